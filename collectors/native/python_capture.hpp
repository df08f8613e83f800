// The capture as a whole: opening and closing it, its names, its counters.

#pragma once

#include <Python.h>
#include <fcntl.h>

#include <string>
#include <string_view>

#include "collectives.hpp"
#include "device_times.hpp"
#include "permissions.hpp"
#include "python_arguments.hpp"
#include "recorder.hpp"

namespace dsprof {
namespace {

uint64_t generations = 0;

PyObject* py_open(PyObject*, PyObject* args) {
  const char* path;
  unsigned long long limit;
  int copied;
  double patience_s;
  int mode = 0600;
  if (!PyArg_ParseTuple(args, "sKpd|i", &path, &limit, &copied, &patience_s, &mode)) return nullptr;
  if (active.load()) {
    PyErr_SetString(PyExc_RuntimeError, "the native recorder is open already");
    return nullptr;
  }
  const int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
  file_mode() = static_cast<mode_t>(mode);
  const int names = openat(folder, "names.txt", O_WRONLY | O_CREAT | O_APPEND | O_NOFOLLOW | O_CLOEXEC, file_mode());
  if (names < 0) {
    PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
    close(folder);
    return nullptr;
  }
  give_mode(names);
  return guarded([&] {
    groups().clear();  // their ids are the last recorder's
    holds_interpreter = &PyGILState_Check;
    const auto patience = std::chrono::duration_cast<Chunks::Patience>(std::chrono::duration<double>(patience_s));
    auto* recorder = new Recorder(folder, names, limit, ++generations, patience, copied == 1);
    Py_BEGIN_ALLOW_THREADS
    recorder->make_first_chunk();
    Py_END_ALLOW_THREADS
    active = recorder;
    Py_RETURN_NONE;
  });
}

PyObject* py_close(PyObject*, PyObject*) {
  if (Recorder* recorder = active.exchange(nullptr)) {
    last = recorder;
    Py_BEGIN_ALLOW_THREADS
    recorder->close();
    Py_END_ALLOW_THREADS
  }
  Py_RETURN_NONE;
}

PyObject* py_disarm_after_fork(PyObject*, PyObject*) {
  fall_silent();
  Py_RETURN_NONE;
}

PyObject* py_intern(PyObject*, PyObject* name) {
  Recorder* recorder = active.load();
  if (!recorder) return PyLong_FromLong(0);
  PyObject* encoded = PyUnicode_AsEncodedString(name, "utf-8", "backslashreplace");
  if (!encoded) return nullptr;
  const std::string_view text(PyBytes_AS_STRING(encoded), static_cast<size_t>(PyBytes_GET_SIZE(encoded)));
  PyObject* result = guarded([&] { return PyLong_FromUnsignedLong(recorder->intern(text)); });
  Py_DECREF(encoded);
  return result;
}

PyObject* py_mute(PyObject*, PyObject* muted) {
  const int value = PyObject_IsTrue(muted);
  if (Recorder* recorder = active.load()) recorder->muted = value == 1;
  misread();
  Py_RETURN_NONE;
}

// note_error(hook, what it said): an error that a hook in Python has caught
PyObject* py_note_error(PyObject*, PyObject* args) {
  PyObject *hook, *said;
  if (!PyArg_ParseTuple(args, "UU", &hook, &said)) return nullptr;
  const auto text = [](PyObject* string) {
    PyObject* encoded = PyUnicode_AsEncodedString(string, "utf-8", "backslashreplace");
    std::string found = encoded ? PyBytes_AS_STRING(encoded) : "";
    Py_XDECREF(encoded);
    PyErr_Clear();
    return found;
  };
  note_error(text(hook), text(said));
  Py_RETURN_NONE;
}

PyObject* py_failures(PyObject*, PyObject*) {  // [(hook, how often, what the first error said)]
  Recorder* recorder = active.load() ? active.load() : last.load();
  PyObject* found = PyList_New(0);
  for (size_t i = 0; found && recorder && i < kMostErrors; i++) {
    const Counters::Entry& entry = recorder->counters.entries()[i];
    if (!entry.count) break;
    const auto text = [](const char* field, size_t size) {
      return PyUnicode_DecodeUTF8(field, static_cast<Py_ssize_t>(strnlen(field, size)), "replace");
    };
    PyObject* one = Py_BuildValue("NKN", text(entry.hook, kErrorHookBytes),
                                  static_cast<unsigned long long>(entry.count), text(entry.said, kErrorSaidBytes));
    if (!one || PyList_Append(found, one)) Py_CLEAR(found);
    Py_XDECREF(one);
  }
  return found;
}

// time_hooks(whether to from now on) -> (what hooks took while that was on, ns; how often Python called one)
PyObject* py_time_hooks(PyObject*, PyObject* on) {
  const int value = PyObject_IsTrue(on);
  misread();
  if (value == 1) {
    hook_time.spent_ns = 0;
    hook_time.from_python = 0;
  }
  hook_time.on = value == 1;
  return Py_BuildValue("LK", static_cast<long long>(hook_time.spent_ns.load()),
                       static_cast<unsigned long long>(hook_time.from_python.load()));
}

PyObject* py_count_step(PyObject*, PyObject*) {
  if (Recorder* recorder = active.load()) recorder->counters[kSteps]++;
  Py_RETURN_NONE;
}

PyObject* py_counters(PyObject*, PyObject*) {  // (records, dropped, errors)
  Recorder* recorder = active.load() ? active.load() : last.load();
  if (!recorder) return Py_BuildValue("KKK", 0ull, 0ull, 0ull);
  return Py_BuildValue("KKK", static_cast<unsigned long long>(recorder->records()),
                       static_cast<unsigned long long>(recorder->counters.get(kDropped)),
                       static_cast<unsigned long long>(recorder->counters.errors()));
}

}  // namespace
}  // namespace dsprof
