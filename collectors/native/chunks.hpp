// The chunk files of one capture (ondisk.py: CHUNK_HEADER). The twin in Python is collectors/chunks.py.
//
// The next chunk is prepared while the one before it is half full, on a thread of its own that lives for no longer than
// that. At the size limit each new chunk takes the place of the oldest but those at the beginning, which are kept.

#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>

#include "counters.hpp"
#include "layout.hpp"
#include "permissions.hpp"

namespace dsprof {

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

class Chunks {
 public:
  // In the directory `folder`. Never destroyed: late completions write into its mappings.
  Chunks(int folder, uint64_t limit_bytes, Counters& counters)
      : folder_(folder),
        counters_(counters),
        limit_(limit_bytes / kChunkBytes),
        kept_(limit_ < 3 ? limit_ : std::max<uint64_t>(1, limit_ / kKeptShare)),
        ring_(limit_ - kept_),
        places_(new std::atomic<Chunk*>[limit_ + 1]()),
        oldest_(kept_) {}

  std::atomic<bool> full{false};  // nothing is written any more

  // The next slot; null when there is none. `index` counts from 0.
  Record* claim(uint64_t* index) {
    if (!full.load(std::memory_order_relaxed)) {
      const uint64_t i = next_.fetch_add(1, std::memory_order_relaxed);
      const uint64_t number = i / kChunkRecords, at = i % kChunkRecords;
      Record* chunk = find(number);
      if (!chunk) chunk = obtain(number);
      if (chunk) {
        if (at == 0) place_of(chunk)->steps = counters_.get(kSteps);
        if (at == kChunkRecords / 2) prepare(number + 1);
        if (index) *index = i;
        return chunk + at;
      }
      unplaced_++;
    }
    counters_[kDropped].fetch_add(1, std::memory_order_relaxed);
    return nullptr;
  }

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
    std::unique_lock<std::timed_mutex> lock(making_, std::chrono::seconds(1));
    if (!lock) return;  // a disk that does not answer: its thread may go on using the folder
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
  };
  struct Place {  // ondisk.CHUNK_PLACE
    uint64_t kept, given_up, steps;
  };

  static constexpr uint64_t kChunkBytes = kChunkHeaderBytes + kChunkRecords * sizeof(Record);
  // How long a hook waits for a chunk that is not ready. If that is not enough, the records of all are dropped until
  // it is.
  static constexpr auto kPatience = std::chrono::seconds(2);

  static Place* place_of(Record* chunk) {
    return reinterpret_cast<Place*>(reinterpret_cast<char*>(chunk) - kChunkHeaderBytes + kChunkPlaceAt);
  }

  // Where a chunk is entered. That of one that was given up is its successor's.
  std::atomic<Chunk*>& entry(uint64_t number) const {
    return places_[number < kept_ ? number : ring_ ? kept_ + (number - kept_) % ring_ : limit_];
  }

  Record* find(uint64_t number) const {
    const Chunk* chunk = entry(number).load(std::memory_order_acquire);
    return chunk && chunk->number == number ? chunk->records : nullptr;
  }

  // A chunk that is not there: made now, unless that takes long.
  Record* obtain(uint64_t number) {
    if (late_.load(std::memory_order_relaxed)) return nullptr;
    const int64_t began = now_ns();
    std::unique_lock<std::timed_mutex> lock(making_, kPatience);
    if (!lock) {
      late_ = true;
      return nullptr;
    }
    counters_[kWaits]++;
    counters_[kWaitNs] += now_ns() - began;
    Record* chunk = make(number);
    if (!chunk && number >= made_) full = true;
    late_ = false;
    return chunk;
  }

  struct Task {
    Chunks* chunks;
    uint64_t number;
  };

  // Has a chunk made on a thread of its own, to which no signal of the job is delivered.
  void prepare(uint64_t number) {
    auto* task = new Task{this, number};
    sigset_t all, before;
    sigfillset(&all);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    if (pthread_create(&thread, &attributes, &run, task)) delete task;  // then it is made when it is needed
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&attributes);
  }

  static void* run(void* argument) {
    const std::unique_ptr<Task> task(static_cast<Task*>(argument));
    std::lock_guard<std::timed_mutex> lock(task->chunks->making_);
    task->chunks->make(task->number);
    task->chunks->late_ = false;
    return nullptr;
  }

  // Makes a chunk if there is none yet; null where it was given up or cannot be made. Under the lock.
  Record* make(uint64_t number) {
    if (number < made_) return find(number);
    if (full || (number >= kept_ && !ring_)) return nullptr;
    const int64_t began = now_ns();
    const uint64_t oldest = std::max(number + 1 > ring_ ? number + 1 - ring_ : 0, kept_);
    char* base = map_file(number);
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
      if (Record* gone = find(oldest_)) give_up(gone);
      if (remove(oldest_)) counters_[kGivenUp]++;
    }
    entry(number).store(new Chunk{number, records}, std::memory_order_release);
    made_ = number + 1;
    if (number >= 2)
      if (Record* old = find(number - 2)) release(old);
    counters_[kPrepared]++;
    counters_[kPrepareNs] += now_ns() - began;
    return records;
  }

  // Space is reserved first: on a full disk a sparse mapping would end the job with SIGBUS.
  char* map_file(uint64_t number) {
    char name[32];
    const int fd = openat(folder_, name_of(number, name), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, file_mode());
    if (fd < 0) return nullptr;
    give_mode(fd);
    int error;
    while ((error = posix_fallocate(fd, 0, kChunkBytes)) == EINTR) {}
    void* base = MAP_FAILED;
    if (!error) base = mmap(nullptr, kChunkBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    ::close(fd);
    if (base != MAP_FAILED) return static_cast<char*>(base);
    unlinkat(folder_, name, 0);
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
  const uint64_t limit_, kept_, ring_;  // chunks: in all, of those at the beginning, of the newest at the limit
  std::unique_ptr<std::atomic<Chunk*>[]> places_;
  std::atomic<uint64_t> next_{0}, unplaced_{0};
  std::timed_mutex making_;
  std::atomic<bool> late_{false};  // a hook has waited for a chunk in vain
  // The number behind the last chunk that was made, and the first that was not given up: under the lock.
  std::atomic<uint64_t> made_{0};
  uint64_t oldest_;
};

}  // namespace dsprof
