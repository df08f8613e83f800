// The chunk files of one capture (ondisk.py: CHUNK_HEADER). The twin in Python is collectors/recorder/chunks.py.
//
// A chunk is made on a thread of its own that lives for no longer than that, never in a hook: the first when the capture
// is opened, each later one while the one before it is half full. A hook that needs one which is not there yet waits for
// a moment at most, without a lock; then its record is dropped and counted. At the size limit each new chunk takes the
// place of the oldest but those at the beginning, which are kept.

#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "counters.hpp"
#include "layout.hpp"
#include "permissions.hpp"
#include "side_thread.hpp"

namespace dsprof {

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

// Whether this thread holds the interpreter's lock; null: there is no interpreter.
inline int (*holds_interpreter)() = nullptr;

class Chunks {
 public:
  using Patience = std::chrono::nanoseconds;
  using MapFile = char* (*)(int folder, const char* name);

  // In the directory `folder`. Never destroyed: late completions write into its mappings. `patience`: how long a hook
  // waits for a chunk. `copied`: somebody copies the chunks elsewhere and removes those that are marked as finished.
  Chunks(int folder, uint64_t limit_bytes, Counters& counters, Patience patience, bool copied = false,
         MapFile map_file = &map_new_file)
      : folder_(folder),
        counters_(counters),
        patience_(patience),
        copied_(copied),
        map_file_(map_file),
        limit_(limit_bytes / kChunkBytes),
        kept_(limit_ < 3 ? limit_ : std::max<uint64_t>(1, limit_ / kKeptShare)),
        ring_(limit_ - kept_),
        places_(new std::atomic<Chunk*>[limit_ + 1]()),
        oldest_(kept_) {}

  std::atomic<bool> full{false};  // nothing is written any more

  // Makes the first chunk. Before anything is claimed, and not in a hook.
  void make_first() {
    if (!make(0)) full = true;
  }

  // The next slot; null when there is none. `index` counts from 0. Waits for a chunk only where it `may_wait` and the
  // thread does not hold the interpreter's lock.
  Record* claim(uint64_t* index, bool may_wait = true) {
    if (!full.load(std::memory_order_relaxed)) {
      const uint64_t i = next_.fetch_add(1, std::memory_order_relaxed);
      const uint64_t number = i / kChunkRecords, at = i % kChunkRecords;
      Record* chunk = find(number);
      if (!chunk) chunk = obtain(number, may_wait);
      if (chunk) {
        if (at == 0) place_of(chunk)->steps = counters_.get(kSteps);
        if (at == kChunkRecords / 2) start_making(number + 1, false);
        if (index) *index = i;
        return chunk + at;
      }
      unplaced_++;
    }
    counters_[kDropped].fetch_add(1, std::memory_order_relaxed);
    return nullptr;
  }

  // Whether the next claim need not wait: its chunk is there, or will not be.
  bool ready() const {
    return full.load(std::memory_order_relaxed) || late_.load(std::memory_order_relaxed) ||
           find(next_.load(std::memory_order_relaxed) / kChunkRecords);
  }

  // Waits until the next claim finds its chunk, for a moment at most.
  void wait_for_chunk() { wait_for(next_.load(std::memory_order_relaxed) / kChunkRecords); }

  // The slot of this number; null if it was given up.
  Record* at(uint64_t index) const {
    Record* chunk = find(index / kChunkRecords);
    return chunk ? chunk + index % kChunkRecords : nullptr;
  }

  uint64_t records() const { return next_.load() - unplaced_.load(); }

  // In a forked child: what it has still to complete, of calls that its parent was in, is the parent's to write.
  void abandon() {
    for (uint64_t place = 0; place < limit_; place++)
      if (Chunk* chunk = places_[place].load()) give_up(chunk->records);
  }

  // Stops writing. The mappings stay: a collective still in flight may complete its record yet.
  void close() {
    full = true;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (!made_one_.wait_for(lock, kLastWait, [&] { return !making_; })) return;  // a disk that does not answer: its
      making_ = true;                                                              // thread may go on using the folder
    }
    const uint64_t used = (next_.load() + kChunkRecords - 1) / kChunkRecords;
    for (uint64_t number = used; number < made_; number++) remove(number);  // prepared in vain
    for (uint64_t place = 0; place < limit_; place++)
      if (Chunk* chunk = places_[place].load()) release(chunk->records);
    ::close(folder_);
  }

 private:
  struct Chunk {
    const uint64_t number;
    Record* const records;
    bool finished = false;  // handed over to who copies it
  };
  struct Unfinished {  // of a capture that is copied: what is full, and may be written into yet
    uint64_t number;
    int64_t full_ns;
    uint64_t open;  // the first record that may be
  };
  struct Place {  // ondisk.CHUNK_PLACE
    uint64_t kept, given_up, steps;
  };

  static constexpr uint64_t kChunkBytes = kChunkHeaderBytes + kChunkRecords * sizeof(Record);
  static constexpr auto kLastWait = std::chrono::seconds(1);
  // After that nobody is about to write the record whose slot is empty in a chunk that is full: it was dropped.
  static constexpr int64_t kLongestWriteNs = 60'000'000'000;

  static Place* place_of(Record* chunk) {
    return reinterpret_cast<Place*>(reinterpret_cast<char*>(chunk) - kChunkHeaderBytes + kChunkPlaceAt);
  }

  // Where a chunk is entered. That of one that was given up is its successor's.
  std::atomic<Chunk*>& entry(uint64_t number) const {
    return places_[number < kept_ ? number : ring_ ? kept_ + (number - kept_) % ring_ : limit_];
  }

  Chunk* chunk_of(uint64_t number) const {
    Chunk* chunk = entry(number).load(std::memory_order_acquire);
    return chunk && chunk->number == number ? chunk : nullptr;
  }

  Record* find(uint64_t number) const {
    const Chunk* chunk = chunk_of(number);
    return chunk ? chunk->records : nullptr;
  }

  // A chunk that is not there: waited for, if that takes no longer than a moment.
  Record* obtain(uint64_t number, bool may_wait) {
    if (late_.load(std::memory_order_relaxed)) return nullptr;
    if (may_wait && !(holds_interpreter && holds_interpreter()))
      wait_for(number);
    else
      start_making(number, true);
    return find(number);
  }

  // Has a chunk made, and waits until it is there. If it is not in time, nobody waits any more until it is.
  void wait_for(uint64_t number) {
    const int64_t began = now_ns();
    const auto until = std::chrono::steady_clock::now() + patience_;
    while (start_making(number, true)) {
      std::unique_lock<std::mutex> lock(mutex_);
      if (made_one_.wait_until(lock, until, [&] { return !making_; })) continue;
      late_ = true;
      break;
    }
    counters_[kWaits]++;
    counters_[kWaitNs] += now_ns() - began;
  }

  struct Task {
    Chunks* chunks;
    uint64_t number;
    bool needed;
  };

  // Has a chunk made on a thread of its own, to which no signal of the job is delivered, unless one is being made. If
  // the chunk is `needed` now, not being able to make it is the end of the capture. Whether there is one to wait for.
  bool start_making(uint64_t number, bool needed) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (making_) return true;
      if (full || number < made_) return false;
      making_ = true;
    }
    auto* task = new Task{this, number, needed};
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    const bool started = [&] {
      const WithoutSignals quiet;
      return !pthread_create(&thread, &attributes, &run, task);
    }();
    pthread_attr_destroy(&attributes);
    if (started) return true;
    delete task;  // no thread can be had: the next one that needs it tries again
    made();
    return false;
  }

  static void* run(void* argument) {
    const std::unique_ptr<Task> task(static_cast<Task*>(argument));
    Chunks& chunks = *task->chunks;
    if (!chunks.make(task->number) && task->needed) chunks.full = true;
    chunks.made();
    return nullptr;
  }

  void made() {
    std::lock_guard<std::mutex> lock(mutex_);
    making_ = late_ = false;
    made_one_.notify_all();
  }

  // Makes a chunk if there is none yet; null where it was given up or cannot be made. On the one thread that does.
  Record* make(uint64_t number) {
    if (number < made_) return find(number);
    if (full || (number >= kept_ && !ring_)) return nullptr;
    const int64_t began = now_ns();
    const uint64_t oldest = std::max(number + 1 > ring_ ? number + 1 - ring_ : 0, kept_);
    char name[32];
    char* base = map_file_(folder_, name_of(number, name));
    if (!base) return nullptr;
    // ondisk.CHUNK_HEADER and CHUNK_PLACE; the magic comes last, so that a header is whole or absent
    const uint32_t header[] = {kFormatVersion, kRecordBytes, kChunkRecords, static_cast<uint32_t>(number)};
    const uint64_t pid = static_cast<uint64_t>(getpid());
    memcpy(base + 8, header, sizeof header);
    memcpy(base + 8 + sizeof header, &pid, sizeof pid);
    auto* records = reinterpret_cast<Record*>(base + kChunkHeaderBytes);
    *place_of(records) = {kept_, oldest - kept_, 0};
    std::atomic_thread_fence(std::memory_order_release);
    memcpy(base, kChunkMagic, 8);
    for (; oldest_ < oldest; oldest_++) {
      const Chunk* gone = chunk_of(oldest_);
      if (gone) give_up(gone->records);
      if (remove(oldest_) || (gone && gone->finished)) counters_[kGivenUp]++;
    }
    entry(number).store(new Chunk{number, records}, std::memory_order_release);
    made_ = number + 1;
    if (number >= 2)
      if (Record* old = find(number - 2)) release(old);
    if (copied_ && number >= 3) unfinished_.push_back({number - 3, now_ns(), 0});
    hand_over();
    counters_[kPrepared]++;
    counters_[kPrepareNs] += now_ns() - began;
    return records;
  }

  // Marks the full chunks in which all has ended as finished: who copies them removes them, so this process lets go of
  // them, or their space would not be free.
  void hand_over() {
    const int64_t now = now_ns();
    std::vector<Unfinished> left;
    for (Unfinished& one : unfinished_) {
      Chunk* chunk = chunk_of(one.number);
      if (!chunk) continue;  // given up
      while (one.open < kChunkRecords && is_over(chunk->records[one.open], now - one.full_ns)) one.open++;
      if (one.open < kChunkRecords) {
        left.push_back(one);
        continue;
      }
      const uint64_t finished = 1;
      memcpy(reinterpret_cast<char*>(chunk->records) - kChunkHeaderBytes + kChunkFinishedAt, &finished, sizeof finished);
      chunk->finished = true;
      give_up(chunk->records);
    }
    unfinished_ = std::move(left);
  }

  static bool is_over(const Record& record, int64_t full_ns) {
    const uint8_t state = record.head.state.load(std::memory_order_acquire);
    return state == kDone || (state == kEmpty && full_ns > kLongestWriteNs);
  }

  // Space is reserved first: on a full disk a sparse mapping would end the job with SIGBUS.
  static char* map_new_file(int folder, const char* name) {
    const int fd = openat(folder, name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, file_mode());
    if (fd < 0) return nullptr;
    give_mode(fd);
    int error;
    while ((error = posix_fallocate(fd, 0, kChunkBytes)) == EINTR) {}
    void* base = MAP_FAILED;
    if (!error) base = mmap(nullptr, kChunkBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    ::close(fd);
    if (base != MAP_FAILED) return static_cast<char*>(base);
    unlinkat(folder, name, 0);
    return nullptr;
  }

  static const char* name_of(uint64_t number, char (&name)[32]) {
    snprintf(name, sizeof name, "chunk-%05llu.bin", static_cast<unsigned long long>(number));
    return name;
  }

  bool remove(uint64_t number) {
    char name[32];
    return !unlinkat(folder_, name_of(number, name), 0);
  }

  // Takes a chunk out of this process's resident memory; a late write brings its page back.
  static void release(Record* records) {
    madvise(reinterpret_cast<char*>(records) - kChunkHeaderBytes, kChunkBytes, MADV_DONTNEED);
  }

  // Lets go of a chunk's file. Whoever has still to complete a record there writes into memory that nobody reads.
  static void give_up(Record* records) {
    mmap(reinterpret_cast<char*>(records) - kChunkHeaderBytes, kChunkBytes, PROT_READ | PROT_WRITE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  }

  const int folder_;
  Counters& counters_;
  const Patience patience_;
  const bool copied_;
  const MapFile map_file_;
  const uint64_t limit_, kept_, ring_;  // chunks: in all, of those at the beginning, of the newest at the limit
  std::unique_ptr<std::atomic<Chunk*>[]> places_;
  std::atomic<uint64_t> next_{0}, unplaced_{0};
  std::mutex mutex_;  // of `making_`; nothing is waited for while it is held
  std::condition_variable made_one_;
  bool making_ = false;            // a thread makes a chunk
  std::atomic<bool> late_{false};  // a hook has waited for it in vain
  // The number behind the last chunk that was made; and, of the thread that makes them, the first that was not given up
  // and those that are not finished.
  std::atomic<uint64_t> made_{0};
  uint64_t oldest_;
  std::vector<Unfinished> unfinished_;
};

}  // namespace dsprof
