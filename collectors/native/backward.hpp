// The end of a backward pass, where DDP begins to wait for its last buckets. The twin in Python is
// collectors/loop/backward.py.

#pragma once

#include <algorithm>
#include <array>
#include <mutex>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include "device_times.hpp"
#include "forks.hpp"
#include "recorder.hpp"

namespace dsprof {

// The autograd engine's graph tasks in which collectives were issued.
class Tasks {
 public:
  // Whether this is the first collective in `task`.
  bool enter(int task) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (std::find(latest_.begin(), latest_.end(), task + 1) != latest_.end()) return false;
    latest_[next_++ % latest_.size()] = task + 1;
    return true;
  }

 private:
  std::mutex mutex_;
  std::array<int, 64> latest_{};  // + 1; a re-entrant backward comes back to the outer one's task
  size_t next_ = 0;
};

inline Tasks& tasks() {
  static PerProcess<Tasks> instance;
  return instance.get();
}

inline thread_local int last_task = -1;  // that this thread issued a collective in

// Has the end of the backward recorded that a collective is issued in. DDP's reducer queues its finalizer on the
// autograd engine with its last bucket, so what is queued with the first runs just before it begins to wait.
// `cpu`: it is of tensors of the CPU.
inline void watch_backward(bool cpu) try {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == -1 || task == last_task) return;
  last_task = task;
  if (!tasks().enter(task)) return;
  if (!cpu && !device_times().on()) return;  // the stream may be one that is captured into a graph
  auto mark = [task] {
    if (last_task > task) return;  // the last collective was issued, and waited for, in a re-entrant backward inside
    try {
      const int64_t now = now_ns();
      if (Recorder* recorder = active.load(std::memory_order_acquire)) {
        const uint16_t name = recorder->intern(kBackwardDone);
        put(kMark, name, now, now, kNoValue, -1);
        device_times().mark(name, now);
      }
    } catch (...) {
      count_error("the end of backward");
    }
  };
  if (torch::autograd::get_current_node()) {
    torch::autograd::Engine::get_default_engine().queue_callback(mark);
  } else {  // this is a callback at its end already, such as DDP's with a static graph
    mark();
  }
} catch (...) {
  count_error("the end of backward");
}

}  // namespace dsprof
