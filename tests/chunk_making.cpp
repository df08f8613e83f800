// The chunks of the native recorder by themselves, with a maker of files that stands still when it is told to. What is
// asserted is what was waited for, never how long. Argument: a folder that is empty.

#include <fcntl.h>
#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#include "chunks.hpp"

using namespace dsprof;
using namespace std::chrono_literals;

namespace {

std::mutex mutex;
std::condition_variable changed;
bool open_gate = true;
std::atomic<int> standing{0};

void check(bool holds, const char* what, int line) {
  if (holds) return;
  fprintf(stderr, "line %d: not so: %s\n", line, what);
  exit(1);
}
#define CHECK(what) check(what, #what, __LINE__)

char* slow_file(int folder, const char* name) {
  std::unique_lock<std::mutex> lock(mutex);
  standing++;
  changed.notify_all();
  changed.wait(lock, [] { return open_gate; });
  standing--;
  lock.unlock();
  const int file = openat(folder, name, O_RDWR | O_CREAT | O_EXCL, 0600);
  const size_t bytes = kChunkHeaderBytes + kChunkRecords * sizeof(Record);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes))) return nullptr;
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return base == MAP_FAILED ? nullptr : static_cast<char*>(base);
}

void set_gate(bool open) {
  std::lock_guard<std::mutex> lock(mutex);
  open_gate = open;
  changed.notify_all();
}

void wait_until_standing() {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [] { return standing > 0; });
}

struct Capture {
  Capture(const std::string& path, std::chrono::nanoseconds patience, bool copied = false)
      : counters((mkdir(path.c_str(), 0700), open(path.c_str(), O_RDONLY | O_DIRECTORY))),
        chunks(open(path.c_str(), O_RDONLY | O_DIRECTORY), 64 << 20, counters, patience, copied, &slow_file) {
    chunks.make_first();
  }
  // Completed records; the last of them may lie in a chunk that is still being made.
  void fill(uint64_t records) {
    for (uint64_t i = 0; i < records; i++) {
      Record* record = chunks.claim(nullptr);
      CHECK(record);
      record->head.state = kDone;
    }
  }
  Counters counters;
  Chunks chunks;
};

int holds() { return 1; }

void a_record_is_dropped_when_the_moment_is_over(const std::string& folder) {
  Capture one(folder, 1ms);
  set_gate(false);
  one.fill(kChunkRecords);
  wait_until_standing();
  CHECK(!one.chunks.claim(nullptr));
  CHECK(one.counters.get(kWaits) == 1);
  CHECK(one.chunks.ready());  // nobody waits for it any more
  for (int i = 0; i < 1000; i++) CHECK(!one.chunks.claim(nullptr));
  CHECK(one.counters.get(kWaits) == 1);
  CHECK(one.counters.get(kDropped) == 1001);
  CHECK(one.chunks.records() == kChunkRecords);
  set_gate(true);
  uint64_t index = 0, dropped = 0;
  while (!one.chunks.claim(&index)) dropped++;
  CHECK(index / kChunkRecords == (kChunkRecords + 1001 + dropped) / kChunkRecords);
  CHECK(one.counters.get(kDropped) == 1001 + dropped);
  one.chunks.close();
}

void who_holds_the_interpreter_does_not_wait(const std::string& folder) {
  Capture one(folder, 1h);
  set_gate(false);
  one.fill(kChunkRecords);
  wait_until_standing();
  holds_interpreter = &holds;
  CHECK(!one.chunks.claim(nullptr));
  holds_interpreter = nullptr;
  CHECK(!one.chunks.claim(nullptr, false));  // nor who holds a lock
  CHECK(one.counters.get(kWaits) == 0);
  CHECK(!one.chunks.ready());  // others may
  set_gate(true);
  one.fill(10);
  one.chunks.close();
}

void a_wait_holds_up_nobody_else(const std::string& folder) {
  Capture one(folder, 1h);
  set_gate(false);
  one.fill(kChunkRecords);
  wait_until_standing();
  std::atomic<bool> got{false};
  std::thread waiting([&] { got = one.chunks.claim(nullptr) != nullptr; });
  while (one.chunks.records() == kChunkRecords) std::this_thread::yield();  // it has taken its slot
  for (int i = 0; i < 1000; i++) CHECK(!one.chunks.claim(nullptr, false));
  CHECK(!got);
  set_gate(true);
  waiting.join();
  CHECK(got);
  CHECK(one.counters.get(kDropped) == 1000);
  one.chunks.close();
}

bool finished(const std::string& folder, int number) {
  char name[32];
  snprintf(name, sizeof name, "/chunk-%05d.bin", number);
  uint64_t found = 0;
  const int file = open((folder + name).c_str(), O_RDONLY);
  CHECK(file >= 0 && pread(file, &found, sizeof found, kChunkFinishedAt) == sizeof found);
  close(file);
  return found == 1;
}

void chunks_in_which_all_has_ended_are_handed_over(const std::string& folder, bool copied) {
  Capture one(folder, 1h, copied);
  one.fill(10);
  Record* last = one.chunks.claim(nullptr);
  last->head.state = kBegun;
  one.fill(4 * kChunkRecords);
  CHECK(!finished(folder, 0));  // `last` is under way
  while (finished(folder, 1) != copied) std::this_thread::yield();  // right after the newest chunk is there
  CHECK(!finished(folder, 2) && !finished(folder, 3));
  last->head.end_ns = 5;
  last->head.state = kDone;
  one.fill(kChunkRecords);
  while (finished(folder, 0) != copied) std::this_thread::yield();
  CHECK(one.counters.get(kDropped) == 0);
  last->head.end_ns = 7;  // too late, and of no consequence
  one.chunks.close();
}

}  // namespace

int main(int, char** arguments) {
  const std::string folder = arguments[1];
  a_record_is_dropped_when_the_moment_is_over(folder + "/a");
  who_holds_the_interpreter_does_not_wait(folder + "/b");
  a_wait_holds_up_nobody_else(folder + "/c");
  chunks_in_which_all_has_ended_are_handed_over(folder + "/d", true);
  chunks_in_which_all_has_ended_are_handed_over(folder + "/e", false);
}
