// Threads of the helper's own, beside the job's. The job's signals are for its own threads: none is delivered to one of these.

#pragma once

#include <signal.h>

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

namespace dsprof {

// While there is one, a thread is started to which no signal is delivered, as it has the mask of the thread that starts
// it. That has its own again afterwards, also where no thread can be had, which throws.
class WithoutSignals {
 public:
  WithoutSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~WithoutSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  WithoutSignals(const WithoutSignals&) = delete;
  WithoutSignals& operator=(const WithoutSignals&) = delete;

 private:
  sigset_t before_;
};

// Looks at something now and then, until `stop`. Whoever has one is reached through a `PerProcess` (forks.hpp).
class SideThread {
 public:
  using Clock = std::chrono::steady_clock;

  bool is_started() const { return thread_.joinable(); }

  // `look` returns when `stopped_by` says so.
  template <class Look>
  void start(Look look) {
    stopping_ = false;
    const WithoutSignals quiet;
    thread_ = std::thread(std::move(look));
  }

  void stop() {
    if (!is_started()) return;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  // On the thread: waits until then, or for `stop`; whether it was that.
  bool stopped_by(Clock::time_point due) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_until(lock, due, [this] { return stopping_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace dsprof
