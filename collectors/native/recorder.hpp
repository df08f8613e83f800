// The native recorder: writes the 64-byte records of dsprof/schema.py into shared file mappings.
// Its twin in Python, and what both promise, is collectors/record.py.

#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

namespace dsprof {

enum Kind : uint8_t { kPhase = 2, kComm = 4, kWait = 5, kMark = 13 };
enum State : uint8_t { kEmpty = 0, kBegun = 1, kDone = 2 };
enum Flag : uint8_t { kStartMeasured = 1, kAsync = 2, kP2P = 4 };
constexpr uint32_t kNoSeq = DSPROF_NO_SEQ;  // of a wait that does not know what it waits for

struct Record {  // schema.RECORD_FIELDS
  int64_t start_ns, end_ns, aux, bytes;
  uint32_t name, thread, group, seq;
  int32_t peer, tag;
  uint32_t host_ns;
  uint8_t kind;
  std::atomic<uint8_t> state;  // stored last, so that a reader never sees half a record
  uint8_t dtype, flags;
};
static_assert(sizeof(Record) == DSPROF_RECORD_BYTES);

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

  // Claims the next record; null when the capture is full. `index` counts from 0.
  Record* claim(uint64_t* index = nullptr) {
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
  uint32_t intern(std::string_view name) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = ids_.find(std::string(name));
    if (found != ids_.end()) return found->second;
    if (ids_.size() >= kMaxNames) {
      name = "(too many names)";
      if ((found = ids_.find(std::string(name))) != ids_.end()) return found->second;
    }
    const uint32_t id = static_cast<uint32_t>(ids_.size() + 1);
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
  static constexpr uint64_t kChunkRecords = DSPROF_CHUNK_RECORDS;
  static constexpr uint64_t kHeaderBytes = DSPROF_CHUNK_HEADER_BYTES;
  static constexpr uint64_t kChunkBytes = kHeaderBytes + kChunkRecords * sizeof(Record);
  static constexpr size_t kMaxNames = DSPROF_MAX_NAMES;

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
    const uint32_t header[] = {DSPROF_FORMAT_VERSION, DSPROF_RECORD_BYTES, kChunkRecords, static_cast<uint32_t>(c)};
    const uint64_t pid = static_cast<uint64_t>(getpid());
    memcpy(base + 8, header, sizeof header);
    memcpy(base + 8 + sizeof header, &pid, sizeof pid);
    std::atomic_thread_fence(std::memory_order_release);
    memcpy(base, DSPROF_CHUNK_MAGIC, 8);
    Record* chunk = reinterpret_cast<Record*>(base + kHeaderBytes);
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
    if (chunk) madvise(reinterpret_cast<char*>(chunk) - kHeaderBytes, kChunkBytes, MADV_DONTNEED);
  }

  const int folder_, names_;
  const uint64_t max_chunks_;
  std::unique_ptr<std::atomic<Record*>[]> chunks_;
  std::atomic<uint64_t> next_{0}, mapped_{0}, dropped_{0};
  std::atomic<bool> full_{false};
  std::mutex mutex_;
  std::unordered_map<std::string, uint32_t> ids_;
};

// The open recorder; null: off. A closed one is never freed (a few KiB), as late completions point into it.
inline std::atomic<Recorder*> active{nullptr};
inline void fill(Record* r, uint8_t kind, uint32_t name, int64_t start, int64_t end, int64_t aux, int64_t bytes) {
  r->start_ns = start;
  r->end_ns = end;
  r->aux = aux;
  r->bytes = bytes;
  r->name = name;
  r->thread = thread_id();
  r->seq = kind == kWait ? kNoSeq : 0;
  r->peer = r->tag = -1;
  r->kind = kind;
}

inline void publish(Record* r, State state) { r->state.store(state, std::memory_order_release); }

// Records what is over.
inline void put(int64_t kind, int64_t name, int64_t start, int64_t end, int64_t value, int64_t bytes) {
  Recorder* recorder = active.load(std::memory_order_acquire);
  Record* r = recorder ? recorder->claim() : nullptr;
  if (!r) return;
  fill(r, static_cast<uint8_t>(kind), static_cast<uint32_t>(name), start, end, value, bytes);
  publish(r, kDone);
}

inline void complete(Record* r, int64_t end) {
  if (!active.load(std::memory_order_acquire)) return;  // closed, or a forked child: not ours to write
  r->end_ns = end;
  publish(r, kDone);
}

}  // namespace dsprof
