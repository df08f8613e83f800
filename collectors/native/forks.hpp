// What a forked child finds anew. A thread of the parent may have held a lock when the process forked, and the child has
// no thread that would ever free it; what the lock guards may be half changed. So the child does not touch it: whatever
// has a lock is reached through a `PerProcess`, which makes another one there, and what is left of the parent's is
// never freed.

#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace dsprof {

inline std::atomic<uint64_t> forks{0};  // between the process that loaded the helper and this one

// The one `Owner` of this process, made when it is needed first. Never destroyed: threads of gloo and of the autograd
// engine outlive static destructors. As a static variable it needs no initialization, for which there would be a lock.
template <class Owner>
class PerProcess {
 public:
  constexpr PerProcess() = default;

  Owner& get() {
    Held* held = held_.load(std::memory_order_acquire);
    if (held && held->forks == forks.load(std::memory_order_relaxed)) return held->owner;
    auto* made = new Held{forks.load(std::memory_order_relaxed), {}};
    if (held_.compare_exchange_strong(held, made)) return made->owner;
    delete made;  // another thread was first
    return held->owner;
  }

 private:
  struct Held {
    const uint64_t forks;
    Owner owner;
  };
  std::atomic<Held*> held_{nullptr};
};

// Has `after` called in every forked child, also in those of C code that tells Python nothing.
template <void (*after)()>
void watch_forks() {
  static std::atomic<bool> watching{false};
  if (watching.exchange(true)) return;
  pthread_atfork(nullptr, nullptr, [] {
    forks.fetch_add(1, std::memory_order_relaxed);
    after();
  });
}

}  // namespace dsprof
