// What was dropped, and which hooks failed: in a mapped file, so that it outlives a SIGKILL (ondisk.py: COUNTERS).
// The twin in Python is collectors/recorder/counters.py.

#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string_view>

#include "layout.hpp"
#include "permissions.hpp"

namespace dsprof {

class Counters {
 public:
  struct Entry {
    std::atomic<uint64_t> count;
    char hook[kErrorHookBytes];
    char said[kErrorSaidBytes];
  };

  // In the directory `folder`. Where the file cannot be made it counts in memory alone.
  explicit Counters(int folder) {
    void* page = make_page(folder);
    if (page == MAP_FAILED) page = calloc(1, kCountersBytes);
    page_ = static_cast<char*>(page);
    values_ = reinterpret_cast<std::atomic<uint64_t>*>(page_ + kCountersHeaderBytes);
    entries_ = reinterpret_cast<Entry*>(page_ + kErrorTable);
  }

  std::atomic<uint64_t>& operator[](Counter counter) { return values_[counter]; }
  uint64_t get(Counter counter) const { return values_[counter].load(std::memory_order_relaxed); }

  uint64_t errors() const {
    uint64_t total = unlisted().load();
    for (size_t i = 0; i < kMostErrors; i++) total += entries_[i].count.load();
    return total;
  }

  const Entry* entries() const { return entries_; }

  // One more error of this hook; what the first one said is kept.
  void count_error(std::string_view hook, std::string_view said) {
    hook = hook.substr(0, kErrorHookBytes);
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < kMostErrors; i++) {
      Entry& entry = entries_[i];
      if (!entry.count) {
        memcpy(entry.said, said.data(), std::min(said.size(), kErrorSaidBytes));
        memcpy(entry.hook, hook.data(), hook.size());
        entry.count.store(1, std::memory_order_release);  // last: a reader never sees half an entry
        return;
      }
      if (std::string_view(entry.hook, strnlen(entry.hook, kErrorHookBytes)) == hook) {
        entry.count++;
        return;
      }
    }
    unlisted()++;
  }

 private:
  static void* make_page(int folder) {
    const int fd = openat(folder, kCountersName, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, file_mode());
    if (fd < 0) return MAP_FAILED;
    give_mode(fd);
    int error;
    while ((error = posix_fallocate(fd, 0, kCountersBytes)) == EINTR) {}
    void* page = MAP_FAILED;
    if (!error) page = mmap(nullptr, kCountersBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    ::close(fd);
    if (page == MAP_FAILED) {
      unlinkat(folder, kCountersName, 0);
      return page;
    }
    const uint32_t version = 1;
    memcpy(static_cast<char*>(page) + 8, &version, sizeof version);
    memcpy(page, kCountersMagic, 8);
    return page;
  }

  std::atomic<uint32_t>& unlisted() const {
    return *reinterpret_cast<std::atomic<uint32_t>*>(page_ + kCountersHeaderBytes - sizeof(uint32_t));
  }

  char* page_;
  std::atomic<uint64_t>* values_;
  Entry* entries_;
  std::mutex mutex_;
};

}  // namespace dsprof
