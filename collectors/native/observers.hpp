// A callback of ours on torch's record functions.

#pragma once

#include <ATen/record_function.h>

#include <utility>

#include "forks.hpp"

namespace dsprof {

// In a forked child it stays as it is, on or off: torch guards its callbacks with a lock, which a thread of the parent
// that begins a backward may have held when the process forked. Callbacks that are not wanted do nothing by themselves.
class Observer {
 public:
  void add(at::RecordFunctionCallback callback) {
    if (handle_ != at::INVALID_CALLBACK_HANDLE) return;
    handle_ = at::addGlobalCallback(std::move(callback));
    forks_ = forks.load();
  }

  void remove() {
    if (handle_ == at::INVALID_CALLBACK_HANDLE || forks_ != forks.load()) return;
    at::removeCallback(handle_);
    handle_ = at::INVALID_CALLBACK_HANDLE;
  }

 private:
  at::CallbackHandle handle_ = at::INVALID_CALLBACK_HANDLE;
  uint64_t forks_ = 0;
};

}  // namespace dsprof
