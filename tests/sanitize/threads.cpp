// Several threads at the recorder, its chunks, names and counters, to be compiled with ThreadSanitizer (`make sanitize`).
// Nothing of torch's or Python's: what they were built without is reported as a race.
//
//     threads FOLDER    exit status 0 if every count adds up; the sanitizer's own otherwise
//
// In each round threads begin and complete records, intern names that others intern, too, and count errors, while one
// of them mutes the recorder and reads its counters. Rounds differ by the size limit: with a small one chunks are given
// up while records in them are still to be completed. Then the capture is closed while threads go on, as gloo's do, and
// the next one is opened, and one whose full chunks are handed over to who copies them.

#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "recorder.hpp"

namespace {

using namespace dsprof;

constexpr int kThreads = 4;
constexpr uint64_t kEach = 2 * kChunkRecords;  // records of a thread in a round
constexpr uint64_t kChunk = kChunkHeaderBytes + kChunkRecords * sizeof(Record);

constexpr auto kPatience = std::chrono::minutes(10);  // these threads only record: no disk keeps up with them

int failures = 0;

void expect(bool holds, const char* what, unsigned long long is, unsigned long long of) {
  if (holds) return;
  fprintf(stderr, "%s: %llu, %llu\n", what, is, of);
  failures++;
}

Recorder* open_in(const std::string& folder, uint64_t limit, uint64_t generation, bool copied) {
  mkdir(folder.c_str(), 0700);
  const int directory = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const int names = openat(directory, "names.txt", O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (directory < 0 || names < 0) {
    perror(folder.c_str());
    exit(2);
  }
  auto* recorder = new Recorder(directory, names, limit, generation, kPatience, copied);
  recorder->make_first_chunk();
  active.store(recorder);
  return recorder;
}

// What hooks do: a record now, another that is completed later, a name that everybody knows and one of this thread's.
void work(int thread, std::atomic<uint64_t>& claimed, std::atomic<uint64_t>& refused) {
  std::vector<uint64_t> begun;
  for (uint64_t i = 0; i < kEach; i++) {
    Recorder* recorder = active.load(std::memory_order_acquire);
    if (!recorder) return;
    const uint16_t shared = recorder->intern("shared " + std::to_string(i % 50));
    const uint16_t own = i % 1000 ? shared : recorder->intern("thread " + std::to_string(thread));
    uint64_t index = 0;
    Record* r = recorder->claim(&index);
    if (!r) {
      refused++;
      continue;
    }
    claimed++;
    fill(r, kPhase, own, now_ns(), 0, kNoValue, -1);
    publish(r, kBegun);
    if (i % 7) {
      complete(r, now_ns());
    } else {
      begun.push_back(index);
    }
    if (begun.size() > 64) {
      for (uint64_t at : begun)
        if (Record* late = recorder->at(at)) complete(late, now_ns());
      begun.clear();
    }
    if (i % 5000 == 0) note_error("thread " + std::to_string(thread), "planted");
  }
}

// The thread that trains: counts steps, asks for the counters, mutes for a while.
void train(std::atomic<bool>& over, std::atomic<uint64_t>& muted) {
  while (!over.load()) {
    Recorder* recorder = active.load();
    if (!recorder) return;
    recorder->counters[kSteps]++;
    (void)recorder->records();
    (void)recorder->counters.errors();
    for (size_t i = 0; i < kMostErrors; i++)
      if (recorder->counters.entries()[i].count.load(std::memory_order_acquire))
        (void)strnlen(recorder->counters.entries()[i].said, kErrorSaidBytes);
    recorder->muted = true;
    muted++;
    recorder->muted = false;
    std::this_thread::yield();
  }
}

void check_names(const std::string& folder) {
  std::set<std::string> found;
  FILE* file = fopen((folder + "/names.txt").c_str(), "r");
  char line[256];
  while (file && fgets(line, sizeof line, file)) {
    const char* name = strchr(line, '\t');
    expect(name && found.insert(name).second, "a name that is written twice", found.size(), 0);
  }
  if (file) fclose(file);
  expect(found.size() == 50 + kThreads, "names", found.size(), 50 + kThreads);
}

void round_of(const std::string& folder, uint64_t chunks, uint64_t generation, bool copied = false) {
  Recorder* recorder = open_in(folder, chunks * kChunk, generation, copied);
  std::atomic<uint64_t> claimed{0}, refused{0}, muted{0};
  std::atomic<bool> over{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; i++) threads.emplace_back(work, i, std::ref(claimed), std::ref(refused));
  std::thread trainer(train, std::ref(over), std::ref(muted));
  for (auto& thread : threads) thread.join();
  over = true;
  trainer.join();
  expect(claimed + refused == kThreads * kEach, "asked for", claimed + refused, kThreads * kEach);
  expect(recorder->records() == claimed, "records, claimed", recorder->records(), claimed);
  expect(recorder->counters.get(kDropped) <= refused, "dropped, refused", recorder->counters.get(kDropped), refused);
  expect(recorder->counters.errors() >= kThreads, "errors", recorder->counters.errors(), kThreads);
  check_names(folder);
  active.store(nullptr);
  recorder->close();
}

// The capture is closed in the midst of it: what is claimed or completed later goes where it does no harm.
void closed_meanwhile(const std::string& folder, uint64_t generation) {
  Recorder* recorder = open_in(folder, 64 * kChunk, generation, false);
  std::atomic<uint64_t> claimed{0}, refused{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; i++) threads.emplace_back(work, i, std::ref(claimed), std::ref(refused));
  while (claimed < kChunkRecords) std::this_thread::yield();
  active.store(nullptr);
  recorder->close();
  for (auto& thread : threads) thread.join();
  expect(claimed >= kChunkRecords, "claimed", claimed, kChunkRecords);
}

}  // namespace

int main(int, char** arguments) {
  const std::string folder = arguments[1];
  uint64_t generation = 0;
  round_of(folder + "/whole", 64, ++generation);
  round_of(folder + "/ring", 5, ++generation);
  round_of(folder + "/full", 2, ++generation);
  closed_meanwhile(folder + "/closed", ++generation);
  round_of(folder + "/again", 64, ++generation);
  round_of(folder + "/copied", 64, ++generation, true);
  puts(failures ? "failed" : "passed");
  return failures != 0;
}
