// What a wait waits for. A collective is remembered when it is issued, by its work and by the memory of its tensors;
// a wait asks by the one or the other. The twin in Python is collectors/recorder/wait_targets.py.

#pragma once

#include <array>
#include <optional>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "recorder.hpp"

namespace dsprof {

struct Target {
  uint16_t name = 0;  // of the communication, 0: unknown
  uint16_t group = 0;
  uint32_t seq = kNoSeq;
  int16_t peer = -1;  // of a send or a receive; so is the tag
  int32_t tag = -1;
  bool p2p = false;
};

inline Target target_of(const Record& comm) {
  if (comm.head.family == kP2pFamily)
    return {comm.head.name, comm.p2p.group, comm.p2p.seq, comm.p2p.peer, comm.p2p.tag, true};
  return {comm.head.name, comm.collective.group, comm.collective.seq};
}

// Fills in a communication, or a wait for one; `peer` is a collective's root.
inline void fill_comm(Record* r, uint8_t kind, const Target& what, int64_t start, int64_t end, int64_t issue,
                      int64_t bytes, uint8_t dtype, const Context& of, int16_t root = -1) {
  if (what.p2p) {
    fill_head(r, kP2pFamily, kind, what.name, start, end);
    r->p2p.dtype = dtype;
    r->p2p.module = of.module;
    r->p2p.purpose = of.purpose;
    r->p2p.issue_ns = issue;
    r->p2p.bytes = bytes;
    r->p2p.seq = what.seq;
    r->p2p.group = what.group;
    r->p2p.peer = what.peer;
    r->p2p.tag = what.tag;
    r->p2p.stage = of.stage;
    r->p2p.microbatch = of.microbatch;
  } else {
    fill_head(r, kCollectiveFamily, kind, what.name, start, end);
    r->collective.dtype = dtype;
    r->collective.host_ns = 0;
    r->collective.issue_ns = issue;
    r->collective.bytes = bytes;
    r->collective.seq = what.seq;
    r->collective.group = what.group;
    r->collective.root = root;
    r->collective.stage = of.stage;
    r->collective.microbatch = of.microbatch;
    r->collective.module = of.module;
    r->collective.purpose = of.purpose;
  }
}

// Writes the record of a wait that begins now; `otherwise` is its name where the target is unknown.
inline Record* begin_wait(Record* wait, int64_t now, const Target& target, uint16_t otherwise) {
  if (target.name)
    fill_comm(wait, kWait, target, now, 0, 0, -1, 0, context);
  else
    fill(wait, kWait, otherwise, now, 0, kNoValue, -1, 0, {0, context});
  publish(wait, kBegun);
  return wait;
}

// Targets by address. What is remembered last for an address counts, and only the newest of each set of addresses is
// kept: 2^kBits sets of eight, where a job has some hundred under way at most. `Mark` tells whose address it is.
template <class Mark, size_t kBits>
class Newest {
 public:
  struct Entry {
    const void* address = nullptr;
    Target target;
    Mark mark{};
  };

  void remember(const void* address, Mark mark, const Target& target) {
    std::lock_guard<std::mutex> lock(mutex_);
    Set& set = set_of(address);
    const size_t last = std::min(position(set, address), kWays - 1);
    std::move_backward(set.begin(), set.begin() + last, set.begin() + last + 1);
    set[0] = {address, target, std::move(mark)};
  }

  // The target, if its mark is of what has the address now.
  template <class Check>
  Target find(const void* address, Check recognizes) {
    std::lock_guard<std::mutex> lock(mutex_);
    const Set& set = set_of(address);
    const size_t at = position(set, address);
    return at < kWays && recognizes(set[at].mark) ? set[at].target : Target();
  }

  // Forgets what is gone, in as many sets as come next: all sets have their turn.
  template <class Check>
  void sweep(size_t count, Check gone) {
    std::lock_guard<std::mutex> lock(mutex_);
    while (count--) {
      for (Entry& entry : sets_[turn_])
        if (entry.address && gone(entry.mark)) entry = {};
      turn_ = (turn_ + 1) % sets_.size();
    }
  }

  void clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (Set& set : sets_) set = {};
  }

 private:
  static constexpr size_t kWays = 8;
  using Set = std::array<Entry, kWays>;  // the newest first

  static size_t position(const Set& set, const void* address) {
    size_t i = 0;
    while (i < kWays && set[i].address != address) i++;
    return i;
  }

  Set& set_of(const void* address) {
    return sets_[reinterpret_cast<uintptr_t>(address) * 0x9E3779B97F4A7C15ull >> (64 - kBits)];
  }

  std::mutex mutex_;
  std::array<Set, size_t{1} << kBits> sets_;
  size_t turn_ = 0;
};

// A work's address is used again. One of another type is another one, which no operator of c10d has returned.
inline Newest<c10d::OpType, 10>& works() {
  static PerProcess<Newest<c10d::OpType, 10>> instance;
  return instance.get();
}

inline void remember_work(const c10d::Work& work, const Target& target) {
  works().remember(&work, work.retrieveOpType(), target);
}

inline Target target_of_work(const c10d::Work& work) {
  return works().find(&work, [&](c10d::OpType type) { return type == work.retrieveOpType(); });
}

// The tensors of functional collectives; of others nobody asks what their tensors wait for.
// A storage's address is its own for as long as there is a weak pointer to it, which does not keep its memory. But it
// keeps what was beside that, some hundred bytes, and malloc gives no hole to a larger tensor whose end they lie in: of
// thousands of them the process grows by what a step gathers. So those of tensors that are gone are soon forgotten.
using WeakStorage = std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>>;

inline Newest<WeakStorage, 7>& storages() {
  static PerProcess<Newest<WeakStorage, 7>> instance;
  return instance.get();
}

// A part of them: all are looked at every eight collectives.
inline void forget_gone_storages() {
  storages().sweep(16, [](const WeakStorage& mark) { return mark && mark->expired(); });
}

constexpr int kMostTensors = 256;  // of one collective that are remembered

inline const c10::Storage* storage_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? &tensor.storage() : nullptr;
}

inline Target target_of_tensor(const at::Tensor& tensor) {
  const c10::Storage* storage = storage_of(tensor);
  if (!storage) return {};
  return storages().find(storage->unsafeGetStorageImpl(), [](const WeakStorage&) { return true; });
}

// Remembers the tensors in `value`, a list of lists of them at most.
inline void remember_tensors(const c10::IValue& value, const Target& target, int& room) {
  if (value.isTensor()) {
    const c10::Storage* storage = storage_of(value.toTensor());
    if (storage && room-- > 0)
      storages().remember(storage->unsafeGetStorageImpl(), storage->getWeakStorageImpl(), target);
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) {
      if (room <= 0) return;
      remember_tensors(item, target, room);
    }
  }
}

// What this thread communicates and waits for.
struct Thread {
  int functional = 0;     // operators of `_c10d_functional` that it is in, whose results are waited for by their tensors
  Target issued;          // the collective it issued last
  Target told;            // the communication of the engine that is under way on it, whose calls are passed over
  int blocking = 0;       // calls it is in that wait in C++ for the collectives they issue
  Record* wait = nullptr;  // the record of the outermost of them, from its first collective on
};
inline thread_local Thread this_thread;

// Has a wait for one of the tensors in `value`, which a functional collective is about to return, find `target`.
inline void remember_results(const c10::IValue& value, const Target& target) {
  if (!this_thread.functional) return;
  int room = kMostTensors;
  forget_gone_storages();
  remember_tensors(value, target, room);
}

// A collective was issued on this thread, at `now`.
inline void note_issued(Recorder& recorder, const Record& comm, int64_t now) {
  this_thread.issued = target_of(comm);
  if (!this_thread.blocking) return;
  if (!this_thread.wait) {
    this_thread.wait = recorder.claim();
    if (!this_thread.wait) return;
    begin_wait(this_thread.wait, now, this_thread.issued, 0);
  } else {
    Record* wait = this_thread.wait;
    fill_comm(wait, kWait, this_thread.issued, wait->head.start_ns, 0, 0, -1, 0, context);
  }
}

inline void enter_blocking() { this_thread.blocking++; }

inline void leave_blocking() {
  if (--this_thread.blocking || !this_thread.wait) return;
  complete(this_thread.wait, now_ns());
  this_thread.wait = nullptr;
}

}  // namespace dsprof
