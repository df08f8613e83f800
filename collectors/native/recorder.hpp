// The native recorder: writes the records of dsprof/ondisk.py (`layout.hpp`, made from it) into shared file mappings.
// Its twin in Python, and what both promise, is collectors/recorder/record.py.

#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string_view>

#include "chunks.hpp"
#include "counters.hpp"
#include "forks.hpp"
#include "hook_time.hpp"
#include "layout.hpp"
#include "names.hpp"

namespace dsprof {

inline uint32_t thread_id() {
  static thread_local uint32_t id = 0;
  static thread_local uint64_t of = 0;
  const uint64_t now = forks.load(std::memory_order_relaxed);  // a forked child's only thread has another one
  if (!id || of != now) {
    id = static_cast<uint32_t>(syscall(SYS_gettid));
    of = now;
  }
  return id;
}

// What of c10d this thread does not record, because the engine tells of it (record.py: NOTHING, CALLS, ...).
enum PassedOver : uint8_t { kNothing = 0, kCalls = 1, kCallsAndWaits = 2 };
inline thread_local uint8_t passed_over = kNothing;

class Recorder {
 public:
  Recorder(int folder, int names, uint64_t limit_bytes, uint64_t generation, Chunks::Patience patience, bool copied)
      : generation(generation),
        counters(folder),
        chunks_(folder, limit_bytes, counters, patience, copied),
        names_(names, generation) {}

  const uint64_t generation;  // from 1, of the recorders of this process
  std::atomic<bool> muted{false};  // nothing is to be written for now
  Counters counters;

  // Claims the next record; null when the capture is full, or muted. `index` counts from 0.
  Record* claim(uint64_t* index = nullptr) {
    return muted.load(std::memory_order_relaxed) ? nullptr : chunks_.claim(index);
  }

  // The same for who holds a lock that other hooks take: it waits for nothing.
  Record* claim_at_once() {
    return muted.load(std::memory_order_relaxed) ? nullptr : chunks_.claim(nullptr, false);
  }

  // Before a claim of who can let go of the interpreter's lock: whether it should, and `wait_for_chunk` meanwhile.
  bool ready() const { return muted.load(std::memory_order_relaxed) || chunks_.ready(); }
  void wait_for_chunk() { chunks_.wait_for_chunk(); }

  Record* at(uint64_t index) const { return chunks_.at(index); }
  uint16_t intern(std::string_view name) { return names_.intern(name, chunks_.full); }
  uint64_t records() const { return chunks_.records(); }

  void make_first_chunk() { chunks_.make_first(); }

  // In a forked child: the files are the parent's.
  void abandon() { chunks_.abandon(); }

  void close() {
    chunks_.close();
    names_.close();
  }

 private:
  Chunks chunks_;
  Names names_;
};

// The open recorder; null: off. A closed one is never freed (a few KiB), as late completions point into it.
inline std::atomic<Recorder*> active{nullptr};
inline std::atomic<Recorder*> last{nullptr};  // keeps answering for its counters after it is closed

// In a forked child: what is open is the parent's, and so are its locks.
inline void fall_silent() {
  if (Recorder* recorder = active.exchange(nullptr)) recorder->abandon();
}

// Counts an error of a hook: caught, and of no consequence to the job.
inline void note_error(std::string_view hook, std::string_view said) {
  if (Recorder* recorder = active.load()) recorder->counters.count_error(hook, said);
}

// The same of the exception that is being handled.
inline void count_error(const char* hook) noexcept try {
  try {
    throw;
  } catch (const std::exception& error) {
    const std::string_view said = error.what();
    note_error(hook, said.substr(0, said.find('\n')));
  }
} catch (...) {
  note_error(hook, "unknown");
}

constexpr double kNoValue = std::numeric_limits<double>::quiet_NaN();

inline void fill_head(Record* r, uint8_t family, uint8_t kind, uint16_t name, int64_t start, int64_t end) {
  r->head.start_ns = start;
  r->head.end_ns = end;
  r->head.thread = thread_id();
  r->head.name = name;
  r->head.kind = kind;
  r->head.flags = 0;
  r->head.family = family;
}

// What this thread calls c10d for (record.py: Context).
struct Context {
  int16_t stage = -1, microbatch = -1;
  uint16_t module = 0, purpose = 0;
};
inline thread_local Context context;

// Where something happened: the lane of a record that is no communication, and its place.
struct Place {
  uint16_t lane = 0;
  Context of;
};

template <class Fields>
void fill_place(Fields& fields, const Place& place) {
  fields.lane = place.lane;
  fields.stage = place.of.stage;
  fields.microbatch = place.of.microbatch;
  fields.module = place.of.module;
  fields.purpose = place.of.purpose;
}

// A record that is no communication, nor a wait for one: of the family that its kind has.
inline void fill(Record* r, uint8_t kind, uint16_t name, int64_t start, int64_t end, double value, int64_t bytes,
                 int64_t issue = 0, const Place& place = {}, int64_t corr = -1) {
  if (kind == kCopy || kind == kKernel || kind == kLaunch) {
    fill_head(r, kKernelFamily, kind, name, start, end);
    fill_place(r->kernel, place);
    r->kernel.issue_ns = issue;
    r->kernel.bytes = bytes;
    r->kernel.corr = corr;
    r->kernel.value = static_cast<float>(value);
  } else if (kind == kMem || kind == kGauge) {
    fill_head(r, kSampleFamily, kind, name, start, end);
    fill_place(r->sample, place);
    r->sample.value = value;
    r->sample.bytes = bytes;
  } else {
    fill_head(r, kSpanFamily, kind, name, start, end);
    fill_place(r->span, place);
    r->span.value = value;
    r->span.bytes = bytes;
    r->span.corr = corr;
    r->span.site = 0;
  }
}

inline void publish(Record* r, State state) { r->head.state.store(state, std::memory_order_release); }

// Records what is over.
inline void put(uint8_t kind, uint16_t name, int64_t start, int64_t end, double value, int64_t bytes) {
  Recorder* recorder = active.load(std::memory_order_acquire);
  Record* r = recorder ? recorder->claim() : nullptr;
  if (!r) return;
  fill(r, kind, name, start, end, value, bytes);
  publish(r, kDone);
}

inline void complete(Record* r, int64_t end) {
  if (!active.load(std::memory_order_acquire)) return;  // closed
  r->head.end_ns = end;
  publish(r, kDone);
}

}  // namespace dsprof
