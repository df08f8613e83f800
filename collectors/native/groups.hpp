// Process groups and the numbering of their communications. The twin in Python is collectors/recorder/groups.py.

#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "forks.hpp"
#include "recorder.hpp"

namespace dsprof {

struct Group {
  uint16_t id = 0;
  std::atomic<int8_t> gloo{-1};  // whether its CPU backend reports its own beginnings and ends; -1: nobody asked yet
  std::atomic<uint32_t> next{0};
};

// Groups by name, as a new group may have a destroyed one's address. Destroying the default group makes torch
// number its groups from 0 again: `renew` keeps the next ones apart (`0#2`), and their numbering from 0.
class Groups {
 public:
  Group& of(c10d::ProcessGroup& pg, Recorder& recorder) {
    Group& group = named(pg.getGroupName(), recorder);  // the name may take the GIL (a group in Python)
    if (group.gloo < 0) group.gloo = on_gloo(pg);
    return group;
  }

  Group& named(std::string_view name, Recorder& recorder) {
    static thread_local Known<Group*> known;
    const uint64_t epoch = epoch_.load(std::memory_order_acquire);
    if (Group* const* group = known.find(epoch, name)) return **group;
    Group& group = enter(name, recorder);
    known.remember(name, &group);
    return group;
  }

  uint32_t next_p2p(const Group& group, int64_t peer, int64_t tag, bool send) {
    std::lock_guard<std::mutex> lock(mutex_);
    return p2p_[{group.id, peer, tag, send}]++;
  }

  void renew() {
    std::lock_guard<std::mutex> lock(mutex_);
    epoch_ = ++epochs_;
    current_.clear();
    suffix_ = "#" + std::to_string(++generation_);
  }

  void clear() {
    std::lock_guard<std::mutex> lock(mutex_);
    epoch_ = ++epochs_;
    current_.clear();
    p2p_.clear();
    suffix_.clear();
    generation_ = 1;
  }

 private:
  Group& enter(std::string_view name, Recorder& recorder) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = current_.find(name);
    if (found != current_.end()) return *found->second;
    Group& group = all_.emplace_back();
    group.id = recorder.intern(std::string(name) + suffix_);
    current_.emplace(name, &group);
    return group;
  }

  static bool on_gloo(c10d::ProcessGroup& pg) try {
    return pg.getBackend(c10::DeviceType::CPU)->getBackendName() == "gloo";
  } catch (...) {
    return false;  // no CPU backend in this group
  }

  std::mutex mutex_;
  // Another one where a name may mean another group; of this process and of those that it was forked from.
  static inline std::atomic<uint64_t> epochs_{0};
  std::atomic<uint64_t> epoch_{++epochs_};
  std::unordered_map<std::string, Group*, TextHash, std::equal_to<>> current_;
  std::deque<Group> all_;  // never shrinks: a call under way may be using any of them
  std::string suffix_;
  int generation_ = 1;
  std::map<std::tuple<uint16_t, int64_t, int64_t, bool>, uint32_t> p2p_;
};

inline Groups& groups() {
  static PerProcess<Groups> instance;
  return instance.get();
}

}  // namespace dsprof
