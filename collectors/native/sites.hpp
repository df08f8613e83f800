// Where in the script something was called: the innermost Python frame that is neither torch's, nor ours, nor of the
// standard library. No Python code runs here, so no handler of a signal does. The twin in Python is
// collectors/recorder/source_locations.py.

#pragma once

#include <Python.h>
#include <frameobject.h>

#include <torch/csrc/autograd/graph_task.h>

#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "recorder.hpp"

namespace dsprof {

class Sites {
 public:
  // Files that begin with one of `inside` are passed over, and those that begin with `library` unless they are of an
  // installed package in it.
  void pass_over(std::vector<std::string> inside, std::string library) {
    forget();
    inside_ = std::move(inside);
    library_ = std::move(library);
  }

  // The id of the `file:line` at which this thread is now, in `recorder`; 0: it is in no Python code, or in none of the
  // script's. With or without the GIL, on any thread. Threads of the autograd engine are not asked: what runs there may
  // hold a lock that somebody with the GIL waits for.
  uint16_t here(Recorder& recorder) {
    if (!PyGILState_GetThisThreadState()) return 0;  // a thread of C++, which has no frames
    if (torch::autograd::get_current_graph_task_id() != -1 && thread_id() != static_cast<uint32_t>(getpid())) return 0;
    const PyGILState_STATE held = PyGILState_Ensure();
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    uint16_t id = 0;
    try {
      id = find(recorder);
    } catch (...) {
      count_error("the place of a call");
    }
    PyErr_Restore(type, value, trace);
    PyGILState_Release(held);
    return id;
  }

 private:
  struct Place {
    PyCodeObject* code;
    int instruction;
    bool operator==(const Place& other) const { return code == other.code && instruction == other.instruction; }
  };
  struct PlaceHash {
    size_t operator()(const Place& place) const {
      return std::hash<const void*>()(place.code) * 31 + static_cast<size_t>(place.instruction);
    }
  };
  static constexpr size_t kMost = 1 << 14;

  uint16_t find(Recorder& recorder) {
    if (generation_ != recorder.generation || ids_.size() >= kMost || outside_.size() >= kMost) {
      forget();
      generation_ = recorder.generation;
    }
    PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
    while (frame) {
      PyCodeObject* code = PyFrame_GetCode(frame);
      const bool found = is_outside(code);
      Py_DECREF(code);  // the frame has it
      if (found) {
        const uint16_t id = id_of(recorder, frame, code);
        Py_DECREF(frame);
        return id;
      }
      PyFrameObject* back = PyFrame_GetBack(frame);
      Py_DECREF(frame);
      frame = back;
    }
    return 0;
  }

  // Each code that is asked about is kept alive, so that none other can come to its address.
  bool is_outside(PyCodeObject* code) {
    const auto known = outside_.find(code);
    if (known != outside_.end()) return known->second;
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    if (!file) PyErr_Clear();
    const bool outside = file && is_outside(file);
    outside_.emplace(code, outside);
    Py_INCREF(code);
    return outside;
  }

  bool is_outside(const char* file) const {
    for (const std::string& begin : inside_)
      if (!strncmp(file, begin.c_str(), begin.size())) return false;
    if (strstr(file, "-packages/")) return true;
    return library_.empty() || strncmp(file, library_.c_str(), library_.size()) != 0;
  }

  uint16_t id_of(Recorder& recorder, PyFrameObject* frame, PyCodeObject* code) {
    const Place place{code, PyFrame_GetLasti(frame)};
    const auto known = ids_.find(place);
    if (known != ids_.end()) return known->second;
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    const uint16_t id = recorder.intern(std::string(file) + ':' + std::to_string(PyFrame_GetLineNumber(frame)));
    ids_.emplace(place, id);
    return id;
  }

  void forget() {
    ids_.clear();
    for (const auto& [code, outside] : outside_) Py_DECREF(code);
    outside_.clear();
  }

  std::vector<std::string> inside_;
  std::string library_;
  uint64_t generation_ = 0;
  std::unordered_map<PyCodeObject*, bool> outside_;
  std::unordered_map<Place, uint16_t, PlaceHash> ids_;
};

inline Sites& sites() {
  static auto* instance = new Sites;  // used with the GIL held only
  return *instance;
}

}  // namespace dsprof
