// The native recorder: writes the records of dsprof/schema.py (`layout.hpp`, made from it) into shared file mappings.
// Its twin in Python, and what both promise, is collectors/record.py.

#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "layout.hpp"

namespace dsprof {

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1'000'000'000ll + t.tv_nsec;
}

inline uint32_t thread_id() {
  static thread_local uint32_t id = static_cast<uint32_t>(syscall(SYS_gettid));
  return id;
}

// What of c10d this thread does not record, because the engine tells of it (record.py: NOTHING, CALLS, ...).
enum PassedOver : uint8_t { kNothing = 0, kCalls = 1, kCallsAndWaits = 2 };
inline thread_local uint8_t passed_over = kNothing;

inline std::atomic<uint64_t> errors{0};  // of the hooks: caught, and of no consequence to the job

class Recorder {
 public:
  Recorder(int folder, int names, uint64_t limit_bytes, uint64_t generation)
      : generation(generation),
        folder_(folder),
        names_(names),
        max_chunks_(limit_bytes / kChunkBytes),
        chunks_(new std::atomic<Record*>[max_chunks_ + 1]()) {}

  std::atomic<bool> muted{false};  // nothing is to be written for now

  // Claims the next record; null when the capture is full, or muted. `index` counts from 0.
  Record* claim(uint64_t* index = nullptr) {
    if (muted.load(std::memory_order_relaxed)) return nullptr;
    if (!full_.load(std::memory_order_relaxed)) {
      const uint64_t i = next_.fetch_add(1, std::memory_order_relaxed);
      if (Record* chunk = chunk_of(i)) {
        if (index) *index = i;
        return chunk + i % kChunkRecords;
      }
    }
    dropped_.fetch_add(1, std::memory_order_relaxed);
    return nullptr;
  }

  Record* at(uint64_t index) const {
    const uint64_t c = index / kChunkRecords;
    Record* chunk = c < max_chunks_ ? chunks_[c].load(std::memory_order_acquire) : nullptr;
    return chunk ? chunk + index % kChunkRecords : nullptr;
  }

  // The id of a name; its line is in names.txt before this returns.
  uint16_t intern(std::string_view name) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = ids_.find(std::string(name));
    if (found != ids_.end()) return found->second;
    if (ids_.size() >= kMaxNames - 1) {
      name = "(too many names)";
      if ((found = ids_.find(std::string(name))) != ids_.end()) return found->second;
    }
    const uint16_t id = static_cast<uint16_t>(ids_.size() + 1);
    std::string line = std::to_string(id) + '\t';
    for (char c : name) {
      if (c == '\\') line += "\\\\";
      else if (c == '\n') line += "\\n";
      else if (c == '\r') line += "\\r";
      else line += c;
    }
    line += '\n';
    if (!full_ && write(names_, line.data(), line.size()) != static_cast<ssize_t>(line.size())) full_ = true;
    ids_.emplace(name, id);
    return id;
  }

  uint64_t records() const { return std::min(next_.load(), mapped_.load() * kChunkRecords); }
  uint64_t dropped() const { return dropped_.load(); }

  // Stops writing. The mappings stay: a collective still in flight may complete its record yet.
  void close() {
    std::lock_guard<std::mutex> lock(mutex_);
    full_ = true;
    for (uint64_t c = 0; c < max_chunks_; c++) release(c);
    ::close(folder_);
    ::close(names_);
  }

  const uint64_t generation;

 private:
  static constexpr uint64_t kChunkBytes = kChunkHeaderBytes + kChunkRecords * sizeof(Record);

  Record* chunk_of(uint64_t index) {
    const uint64_t c = index / kChunkRecords;
    Record* chunk = c < max_chunks_ ? chunks_[c].load(std::memory_order_acquire) : nullptr;
    return chunk ? chunk : map_chunk(c);
  }

  Record* map_chunk(uint64_t c) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (c < max_chunks_ && chunks_[c].load()) return chunks_[c].load();
    char* base = c < max_chunks_ && !full_ ? map_file(c) : nullptr;
    if (!base) {
      full_ = true;
      return nullptr;
    }
    // schema.CHUNK_HEADER; the magic comes last, so that a header is whole or absent
    const uint32_t header[] = {kFormatVersion, kRecordBytes, kChunkRecords, static_cast<uint32_t>(c)};
    const uint64_t pid = static_cast<uint64_t>(getpid());
    memcpy(base + 8, header, sizeof header);
    memcpy(base + 8 + sizeof header, &pid, sizeof pid);
    std::atomic_thread_fence(std::memory_order_release);
    memcpy(base, kChunkMagic, 8);
    Record* chunk = reinterpret_cast<Record*>(base + kChunkHeaderBytes);
    chunks_[c].store(chunk, std::memory_order_release);
    mapped_++;
    if (c >= 2) release(c - 2);
    return chunk;
  }

  // Space is reserved first: on a full disk a sparse mapping would end the job with SIGBUS.
  char* map_file(uint64_t c) {
    char name[32];
    snprintf(name, sizeof name, "chunk-%05llu.bin", static_cast<unsigned long long>(c));
    const int fd = openat(folder_, name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd < 0) return nullptr;
    int error;
    while ((error = posix_fallocate(fd, 0, kChunkBytes)) == EINTR) {}
    void* base = MAP_FAILED;
    if (!error) base = mmap(nullptr, kChunkBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    ::close(fd);
    if (base != MAP_FAILED) return static_cast<char*>(base);
    unlinkat(folder_, name, 0);
    return nullptr;
  }

  // Takes a chunk out of this process's resident memory; a late write brings its page back.
  void release(uint64_t c) {
    Record* chunk = chunks_[c].load();
    if (chunk) madvise(reinterpret_cast<char*>(chunk) - kChunkHeaderBytes, kChunkBytes, MADV_DONTNEED);
  }

  const int folder_, names_;
  const uint64_t max_chunks_;
  std::unique_ptr<std::atomic<Record*>[]> chunks_;
  std::atomic<uint64_t> next_{0}, mapped_{0}, dropped_{0};
  std::atomic<bool> full_{false};
  std::mutex mutex_;
  std::unordered_map<std::string, uint16_t> ids_;
};

// The open recorder; null: off. A closed one is never freed (a few KiB), as late completions point into it.
inline std::atomic<Recorder*> active{nullptr};

constexpr double kNoValue = std::numeric_limits<double>::quiet_NaN();

inline void fill_head(Record* r, uint8_t family, uint8_t kind, uint16_t name, int64_t start, int64_t end) {
  r->head.start_ns = start;
  r->head.end_ns = end;
  r->head.thread = thread_id();
  r->head.name = name;
  r->head.kind = kind;
  r->head.flags = 0;
  r->head.family = family;
}

// What this thread calls c10d for (record.py: Context).
struct Context {
  int16_t stage = -1, microbatch = -1;
  uint16_t module = 0, purpose = 0;
};
inline thread_local Context context;

// Where something happened: the lane of a record that is no communication, and its place.
struct Place {
  uint16_t lane = 0;
  Context of;
};

template <class Fields>
void fill_place(Fields& fields, const Place& place) {
  fields.lane = place.lane;
  fields.stage = place.of.stage;
  fields.microbatch = place.of.microbatch;
  fields.module = place.of.module;
  fields.purpose = place.of.purpose;
}

// A record that is no communication, nor a wait for one: of the family that its kind has.
inline void fill(Record* r, uint8_t kind, uint16_t name, int64_t start, int64_t end, double value, int64_t bytes,
                 int64_t issue = 0, const Place& place = {}, int64_t corr = -1) {
  if (kind == kCopy || kind == kKernel || kind == kLaunch) {
    fill_head(r, kKernelFamily, kind, name, start, end);
    fill_place(r->kernel, place);
    r->kernel.issue_ns = issue;
    r->kernel.bytes = bytes;
    r->kernel.corr = corr;
    r->kernel.value = static_cast<float>(value);
  } else if (kind == kMem || kind == kGauge) {
    fill_head(r, kSampleFamily, kind, name, start, end);
    fill_place(r->sample, place);
    r->sample.value = value;
    r->sample.bytes = bytes;
  } else {
    fill_head(r, kSpanFamily, kind, name, start, end);
    fill_place(r->span, place);
    r->span.value = value;
    r->span.bytes = bytes;
    r->span.corr = corr;
  }
}

inline void publish(Record* r, State state) { r->head.state.store(state, std::memory_order_release); }

// Records what is over.
inline void put(uint8_t kind, uint16_t name, int64_t start, int64_t end, double value, int64_t bytes) {
  Recorder* recorder = active.load(std::memory_order_acquire);
  Record* r = recorder ? recorder->claim() : nullptr;
  if (!r) return;
  fill(r, kind, name, start, end, value, bytes);
  publish(r, kDone);
}

inline void complete(Record* r, int64_t end) {
  if (!active.load(std::memory_order_acquire)) return;  // closed, or a forked child: not ours to write
  r->head.end_ns = end;
  publish(r, kDone);
}

}  // namespace dsprof
