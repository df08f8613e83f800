// Level full: which call of a module made which node of the autograd graph, and from that each module's time in backward.
//
// The graph is left as it is. A node has the number that its thread was at when it was made, so the numbers that a call
// covers tell its nodes; torch reports each node's number, and the thread that made it, when it computes it.

#pragma once

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <deque>
#include <vector>

#include "observers.hpp"
#include "recorder.hpp"

namespace dsprof {

// A call of a module that has a name; number 0: none.
struct Call {
  uint64_t number = 0;
  uint16_t name = 0;
};

inline std::atomic<uint64_t> call_numbers{0};
inline thread_local Call current_call;         // the innermost on this thread
inline thread_local uint32_t calls_inside = 0;  // how many are under way on it

// The calls that a thread's nodes were made in.
class Nodes {
 public:
  explicit Nodes(uint64_t thread) : thread(thread) {}

  // Nodes from `first` on are made in `call`.
  void begin(uint64_t first, const Call& call) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!made_.empty() && made_.back().first >= first) made_.pop_back();  // it made none
    if (made_.size() >= kMost) made_.erase(made_.begin(), made_.begin() + kMost / 2);
    made_.push_back({first, call});
  }

  Call of(uint64_t node) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = std::upper_bound(made_.begin(), made_.end(), node,
                                  [](uint64_t number, const Made& made) { return number < made.first; });
    return after == made_.begin() ? Call() : std::prev(after)->call;
  }

  const uint64_t thread;  // as torch numbers them

 private:
  struct Made {
    uint64_t first;
    Call call;
  };
  static constexpr size_t kMost = 1 << 17;  // 3 MiB; older nodes are forgotten

  std::mutex mutex_;
  std::vector<Made> made_;
};

// Of every thread that calls modules. Those that are gone are forgotten in the end: nn.DataParallel makes new ones each
// time.
class NodesOfThreads {
 public:
  std::shared_ptr<Nodes> add(uint64_t thread) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (threads_.size() >= kMost) {
      const auto is_gone = [](const std::shared_ptr<Nodes>& nodes) { return nodes.use_count() == 1; };
      const auto gone = std::find_if(threads_.begin(), threads_.end(), is_gone);
      if (gone != threads_.end()) threads_.erase(gone);
    }
    return threads_.emplace_back(std::make_shared<Nodes>(thread));
  }

  std::shared_ptr<Nodes> of(uint64_t thread) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto found = threads_.rbegin(); found != threads_.rend(); ++found)
      if ((*found)->thread == thread) return *found;
    return nullptr;
  }

 private:
  static constexpr size_t kMost = 64;
  std::mutex mutex_;
  std::deque<std::shared_ptr<Nodes>> threads_;
};

inline NodesOfThreads& nodes_of_threads() {
  static PerProcess<NodesOfThreads> instance;
  return instance.get();
}

// What this thread keeps of the nodes, of one process: those of the parent may be locked for good.
struct NodesHere {
  uint64_t forks = 0;
  std::shared_ptr<Nodes> mine, looked_at;
};

inline NodesHere& nodes_here() {
  static thread_local NodesHere here;
  const uint64_t now = forks.load(std::memory_order_relaxed);
  if (here.forks != now) here = {now, nullptr, nullptr};
  return here;
}

inline Nodes& nodes_of_this_thread() {
  std::shared_ptr<Nodes>& mine = nodes_here().mine;
  if (!mine) mine = nodes_of_threads().add(at::RecordFunction::currentThreadId());
  return *mine;
}

// A thread computes gradients: one level for the nodes of a backward, further ones for backwards inside of a node.
struct Computing {
  int task = -1;
  Call call;
  Record* row = nullptr;
  uint64_t generation = 0;
  bool grad = false;         // gradients are on: a graph of the backward is made
  uint32_t calls_inside = 0;  // calls of modules that were under way when the node began
};
inline thread_local std::vector<Computing> computing;
inline thread_local size_t computing_depth = 0;

inline Call made_in(uint64_t thread, uint64_t node) {
  std::shared_ptr<Nodes>& looked_at = nodes_here().looked_at;
  if (!looked_at || looked_at->thread != thread) looked_at = nodes_of_threads().of(thread);
  return looked_at ? looked_at->of(node) : Call();
}

// Nodes that follow each other and were made in one call share a record. The accumulation of a gradient, which has no
// number, belongs to the node before it: it comes right after the one that made the gradient.
inline std::unique_ptr<at::ObserverContext> node_begins(const at::RecordFunction& node) {
  computing_depth++;
  try {
    if (computing.size() <= computing_depth) computing.resize(computing_depth + 1);
    Computing& here = computing[computing_depth - 1];
    computing[computing_depth].row = nullptr;
    Recorder* recorder = active.load(std::memory_order_acquire);
    if (!recorder) {  // closed, or a forked child, in which a lock may be held by a thread that it lacks
      here.row = nullptr;
      return nullptr;
    }
    const int task = torch::autograd::get_current_graph_task_id();
    const bool same = here.task == task && here.generation == recorder->generation;
    const Call call = node.seqNr() >= 0 ? made_in(node.forwardThreadId(), static_cast<uint64_t>(node.seqNr()))
                      : same            ? here.call
                                        : Call();
    if (!same || here.call.number != call.number) here.row = nullptr;
    here.grad = c10::GradMode::is_enabled();
    here.calls_inside = calls_inside;
    here.task = task;
    here.call = call;
    if (!call.number || here.row) return nullptr;
    here.generation = recorder->generation;
    if ((here.row = recorder->claim())) {
      static thread_local std::pair<uint64_t, uint16_t> backward{0, 0};  // its id, of a recorder
      if (backward.first != recorder->generation) backward = {recorder->generation, recorder->intern("backward")};
      fill(here.row, kModule, call.name, now_ns(), 0, kNoValue, -1, 0, {0, {-1, -1, 0, backward.second}});
      here.row->span.corr = static_cast<int64_t>(call.number);
      publish(here.row, kBegun);
    }
  } catch (...) {
    count_error("modules in backward");
  }
  return nullptr;
}

inline void node_ends(const at::RecordFunction&, at::ObserverContext*) {
  if (!computing_depth) return;
  computing_depth--;
  if (computing_depth < computing.size() && computing[computing_depth].row)
    complete(computing[computing_depth].row, now_ns());
}

inline Observer nodes_observer;

inline void watch_nodes() {
  at::RecordFunctionCallback callback(&node_begins, &node_ends);
  nodes_observer.add(callback.scopes({at::RecordScope::BACKWARD_FUNCTION}));
}

inline void leave_nodes() { nodes_observer.remove(); }

// A call of a module that is recorded. `value` of its record is how many nodes were made in it.
class ModuleCall {
 public:
  void begin(Recorder& recorder, uint16_t name) try {
    if (!name || !(record_ = recorder.claim())) return;
    before_ = current_call;
    current_call = {++call_numbers, name};
    calls_inside++;
    first_ = at::sequence_number::peek();
    nodes_of_this_thread().begin(first_, current_call);
    fill(record_, kModule, name, now_ns(), 0, kNoValue, -1);
    record_->span.corr = static_cast<int64_t>(current_call.number);
    publish(record_, kBegun);
  } catch (...) {
    count_error("modules in backward");
  }

  void end() try {
    if (!record_) return;
    current_call = before_;
    calls_inside--;
    if (!active.load(std::memory_order_acquire)) return;
    const uint64_t last = at::sequence_number::peek();
    record_->span.value = static_cast<double>(last - first_);
    complete(record_, now_ns());
    nodes_of_this_thread().begin(last, before_);
  } catch (...) {
    count_error("modules in backward");
  }

 private:
  Record* record_ = nullptr;
  Call before_;
  uint64_t first_ = 0;
};

}  // namespace dsprof
