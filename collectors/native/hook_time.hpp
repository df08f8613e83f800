// What hooks take of the job's threads, in the steps in which that is measured: one in 64
// (collectors/capture/hook_time.py).

#pragma once

#include <atomic>
#include <cstdint>

#include "chunks.hpp"

namespace dsprof {

struct HookTime {
  std::atomic<bool> on{false};
  std::atomic<int64_t> spent_ns{0};
  std::atomic<uint64_t> from_python{0};  // how often Python called a hook's beginning
};
inline HookTime hook_time;

// Counts the time from here to the end of the scope, but for what is `Job`'s.
class Hook {
 public:
  explicit Hook(bool from_python = false) : on_(hook_time.on.load(std::memory_order_relaxed)) {
    if (!on_) return;
    if (from_python) hook_time.from_python.fetch_add(1, std::memory_order_relaxed);
    hook_time.spent_ns.fetch_sub(now_ns(), std::memory_order_relaxed);
  }
  ~Hook() {
    if (on_) hook_time.spent_ns.fetch_add(now_ns(), std::memory_order_relaxed);
  }
  Hook(const Hook&) = delete;

 private:
  const bool on_;
};

// Within a `Hook`: what the job does itself, such as the operator behind a kernel.
class Job {
 public:
  Job() : on_(hook_time.on.load(std::memory_order_relaxed)) {
    if (on_) hook_time.spent_ns.fetch_add(now_ns(), std::memory_order_relaxed);
  }
  ~Job() {
    if (on_) hook_time.spent_ns.fetch_sub(now_ns(), std::memory_order_relaxed);
  }
  Job(const Job&) = delete;

 private:
  const bool on_;
};

}  // namespace dsprof
