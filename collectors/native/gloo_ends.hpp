// When gloo, on the CPU, begins and ends what c10d was called for.
//
// A collective's work has a future, which its worker ends. A send or a receive has what gloo calls in the wait for it. The
// scopes are listened to only where nothing else tells the end (of a reduce-scatter, which gloo makes of another
// collective): while they are, torch keeps and sets anew the state of threads around each of them, which costs more than
// all else that is done for a collective.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <string_view>
#include <type_traits>
#include <utility>

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "recorder.hpp"

namespace dsprof {

// What a c10d call leaves in its thread's state, which torch carries over to gloo's worker thread.
struct Issued final : c10::DebugInfoBase, std::enable_shared_from_this<Issued> {
  explicit Issued(Record* record) : record(record) {}
  Record* const record;  // null: not recorded; listened to for when its worker ends it
  std::atomic<bool> ends_with_scope{true};  // false once its work's future will tell the end
  std::atomic<bool> measured{false};
};

// When this thread, a worker of gloo's, ended its last work; 0: none yet. What had been queued by then began then.
inline thread_local int64_t last_work_ended_ns = 0;

// The work that `record` is of was ended at `now` by this thread. (Or it was over before its future was asked, which the
// thread says that issued it: then what that said last was over before this was issued, and it began in the call.)
inline void ended_on_worker(Record* record, int64_t now) {
  if (!active.load(std::memory_order_acquire)) return;
  if (record->head.family == kCollectiveFamily && !(record->head.flags & kStartMeasured)) {
    record->head.start_ns = std::max(record->head.start_ns, last_work_ended_ns);
    record->head.flags |= kStartMeasured;
  }
  last_work_ended_ns = now;
}

template <class Slot>
Slot debug_slot() {  // torch 2.13 has a class for these and takes new ones; older ones an enum with two to spare
  if constexpr (std::is_enum_v<Slot>) {
    return Slot::TEST_INFO_2;
  } else {
    static constexpr std::string_view name = "dsprof";
    return Slot(&name);
  }
}

struct Scope final : at::ObserverContext {
  std::shared_ptr<Issued> issued;
};

// gloo opens a scope where a collective is really begun, on its worker thread. Who is called then is settled in the call.
inline std::unique_ptr<at::ObserverContext> scope_begin(const at::RecordFunction& scope) {
  if (strncmp(scope.name(), "gloo:", 5) != 0) return nullptr;
  auto* issued = static_cast<Issued*>(c10::ThreadLocalDebugInfo::get(debug_slot<c10::DebugInfoKind>()));
  if (!issued || !active.load(std::memory_order_acquire)) return nullptr;
  if (issued->record && issued->record->head.thread != thread_id() && !issued->measured.exchange(true)) {
    issued->record->head.start_ns = now_ns();
    issued->record->head.flags |= kStartMeasured;
  }
  auto context = std::make_unique<Scope>();
  context->issued = issued->shared_from_this();
  return context;
}

// One call may have several scopes (coalesced): the last one ends it.
inline void scope_end(const at::RecordFunction&, at::ObserverContext* context) {
  if (!context) return;
  Issued& issued = *static_cast<Scope*>(context)->issued;
  const int64_t now = now_ns();
  if (!issued.record || issued.record->head.thread != thread_id()) last_work_ended_ns = now;
  if (issued.record && issued.ends_with_scope) complete(issued.record, now);
}

// Listens to the scopes of what this thread issues meanwhile. It does so no longer than that: as long as anybody listens,
// on any thread, torch spends ten times as much on each node of a backward, where it sets its thread's state anew.
class ScopesOfThisThread {
 public:
  ScopesOfThisThread() try {
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&scope_begin, &scope_end).scopes({at::RecordScope::USER_SCOPE}));
  } catch (...) {
    count_error("gloo's scopes");
  }

  ~ScopesOfThisThread() {
    if (handle_ != at::INVALID_CALLBACK_HANDLE) at::removeCallback(handle_);
  }

  ScopesOfThisThread(const ScopesOfThisThread&) = delete;
  ScopesOfThisThread& operator=(const ScopesOfThisThread&) = delete;

 private:
  at::CallbackHandle handle_ = at::INVALID_CALLBACK_HANDLE;
};

// Completes the record of a send or a receive when gloo has it finished, which is in the wait for it, or when its work is
// gone without one. The record of what has failed stays open.
class EndOfP2p {
 public:
  // `work` is of a call that has just returned: nobody waits for it yet. It already has what is to be called where
  // somebody else listens to scopes (torch.profiler).
  static void watch(c10d::Work& work, Record* record) {
    std::function<void()>& called = work.*(&Access::recordFunctionEndCallback_);
    called = [of = &work, theirs = std::move(called), end = std::make_shared<EndOfP2p>(record)] {
      if (of->*(&Access::exception_)) end->record_ = nullptr;
      end->now();
      if (theirs) theirs();
    };
  }

  explicit EndOfP2p(Record* record) : record_(record) {}
  ~EndOfP2p() { now(); }
  EndOfP2p(const EndOfP2p&) = delete;
  EndOfP2p& operator=(const EndOfP2p&) = delete;

 private:
  struct Access : c10d::Work {  // what a work's own classes may reach
    using c10d::Work::exception_;
    using c10d::Work::recordFunctionEndCallback_;
  };

  void now() {
    if (Record* record = std::exchange(record_, nullptr)) complete(record, now_ns());
  }

  Record* record_;
};

}  // namespace dsprof
