// Names and their ids. The twin in Python is part of collectors/recorder/python_recorder.py.

#pragma once

#include <unistd.h>

#include <atomic>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "layout.hpp"

namespace dsprof {

struct TextHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};

// What this thread has asked for since `epoch`: found again without a lock, and without making a string of the name.
template <class Value>
class Known {
 public:
  const Value* find(uint64_t epoch, std::string_view name) {
    if (epoch_ != epoch) {
      values_.clear();
      epoch_ = epoch;
    }
    const auto found = values_.find(name);
    return found == values_.end() ? nullptr : &found->second;
  }

  void remember(std::string_view name, Value value) { values_.emplace(name, value); }

 private:
  uint64_t epoch_ = 0;
  std::unordered_map<std::string, Value, TextHash, std::equal_to<>> values_;
};

class Names {
 public:
  // Written to the open file `file`. `epoch`, from 1, is another one for each capture of a process.
  Names(int file, uint64_t epoch) : file_(file), epoch_(epoch) {}

  // The id of a name; its line is in names.txt before this returns. `full` is set where that cannot be done.
  uint16_t intern(std::string_view name, std::atomic<bool>& full) {
    static thread_local Known<uint16_t> known;
    if (const uint16_t* id = known.find(epoch_, name)) return *id;
    const uint16_t id = enter(name, full);
    if (id != kMaxNames) known.remember(name, id);  // that one is of any number of names
    return id;
  }

  void close() {
    std::lock_guard<std::mutex> lock(mutex_);
    ::close(file_);
  }

 private:
  uint16_t enter(std::string_view name, std::atomic<bool>& full) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = ids_.find(name);
    if (found != ids_.end()) return found->second;
    if (ids_.size() >= kMaxNames - 1) {
      name = kTooManyNames;
      if ((found = ids_.find(name)) != ids_.end()) return found->second;
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
    if (!full && write(file_, line.data(), line.size()) != static_cast<ssize_t>(line.size())) full = true;
    ids_.emplace(name, id);
    return id;
  }

  const int file_;
  const uint64_t epoch_;
  std::mutex mutex_;
  std::unordered_map<std::string, uint16_t, TextHash, std::equal_to<>> ids_;
};

}  // namespace dsprof
