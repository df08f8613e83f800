// Which lines of the script issue which collectives: a mark for each line and for each name, size and type of what it
// issues. The twin in Python is collectors/communication/call_sites.py, which says what a mark holds.

#pragma once

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "forks.hpp"
#include "recorder.hpp"
#include "sites.hpp"

namespace dsprof {

class CallSites {
 public:
  // From now on the line of each of the first `first` alike is looked at, and of one in `every` after them.
  void install(uint64_t first, uint64_t every, size_t most) {
    first_ = first;
    most_ = most;
    every_ = every;  // last: with it on, the others are read
  }

  void uninstall() { every_ = 0; }

  // This thread is about to issue one, before it takes its number, as another thread may have the GIL; or issued one at
  // `issue_ns`.
  void note(Recorder& recorder, uint16_t name, int64_t bytes, uint8_t dtype, int64_t issue_ns = 0) noexcept try {
    const uint64_t every = every_.load(std::memory_order_acquire);
    if (!every || recorder.muted || !to_be_looked_at(recorder, {bytes, name, dtype}, every)) return;
    const uint16_t site = sites().here(recorder);
    switch (enter({bytes, name, dtype}, site)) {
      case kKnown: return;
      case kNew: return put_mark(recorder, name, bytes, dtype, site, issue_ns);
      case kOneTooMany: return put_mark(recorder, 0, -1, 0, 0, issue_ns);
    }
  } catch (...) {
    count_error("call sites");
  }

 private:
  struct Alike {
    int64_t bytes;
    uint16_t name;
    uint8_t dtype;
    bool operator==(const Alike& other) const {
      return bytes == other.bytes && name == other.name && dtype == other.dtype;
    }
  };
  struct AlikeHash {
    size_t operator()(const Alike& alike) const {
      return std::hash<int64_t>()(alike.bytes) * 31 + alike.name * size_t{64} + alike.dtype;
    }
  };
  struct Seen {
    uint64_t times = 0;
    std::vector<uint16_t> sites;
  };
  enum Entered { kKnown, kNew, kOneTooMany };

  bool to_be_looked_at(const Recorder& recorder, const Alike& alike, uint64_t every) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (generation_ != recorder.generation) {
      seen_.clear();
      lines_ = 0;
      generation_ = recorder.generation;
    }
    if (lines_ > most_) return false;
    const uint64_t times = seen_[alike].times++;
    return times < first_ || (times - first_ + 1) % every == 0;
  }

  Entered enter(const Alike& alike, uint16_t site) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<uint16_t>& known = seen_[alike].sites;
    if (lines_ > most_ || std::find(known.begin(), known.end(), site) != known.end()) return kKnown;
    if (++lines_ > most_) return kOneTooMany;
    known.push_back(site);
    return kNew;
  }

  static void put_mark(Recorder& recorder, uint16_t name, int64_t bytes, uint8_t dtype, uint16_t site,
                       int64_t issue_ns) {
    Record* r = recorder.claim();
    if (!r) return;
    const int64_t at = issue_ns ? issue_ns : now_ns();
    fill(r, kMark, recorder.intern(kCallSite), at, at, dtype, bytes, 0, {0, {-1, -1, 0, name}});
    r->span.site = site;
    publish(r, kDone);
  }

  std::atomic<uint64_t> every_{0}, first_{0};
  std::atomic<size_t> most_{0};
  std::mutex mutex_;
  uint64_t generation_ = 0;
  size_t lines_ = 0;
  std::unordered_map<Alike, Seen, AlikeHash> seen_;
};

inline CallSites& call_sites() {
  static PerProcess<CallSites> instance;
  return instance.get();
}

}  // namespace dsprof
