// What the module's functions are given by Python, and give back. An argument of ours that is wrong is counted, never
// raised into the job.

#pragma once

#include <Python.h>

#include <array>
#include <exception>

#include "recorder.hpp"

namespace dsprof {
namespace {

// Runs `body`, turning C++ exceptions into Python's.
template <class Body>
PyObject* guarded(Body body) {
  try {
    return body();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

// After reading arguments: whether one was wrong, which is counted and not raised.
bool misread() {
  if (!PyErr_Occurred()) return false;
  note_error("arguments of a record", "one is of the wrong type, or too large");
  PyErr_Clear();
  return true;
}

int64_t integer(PyObject* const* args, Py_ssize_t count, Py_ssize_t i, int64_t absent) {
  return i < count ? PyLong_AsLongLong(args[i]) : absent;
}

double value_of(PyObject* const* args, Py_ssize_t count, Py_ssize_t i) {
  return i < count && args[i] != Py_None ? PyFloat_AsDouble(args[i]) : kNoValue;
}

// Reads N integers, passing over the one at `skipped`; false: one was wrong, or there are fewer, or over `optional` more.
template <size_t N>
bool integers(PyObject* const* args, Py_ssize_t count, std::array<int64_t, N>& numbers, size_t skipped = N,
              size_t optional = 0) {
  if (count < static_cast<Py_ssize_t>(N) || count > static_cast<Py_ssize_t>(N + optional)) {
    note_error("arguments of a record", "too many or too few");
    return false;
  }
  for (size_t i = 0; i < N; i++) numbers[i] = i == skipped ? 0 : PyLong_AsLongLong(args[i]);
  return !misread();
}

// Before a record of a function that Python has called: if its chunk is not there, it is waited for without the
// interpreter's lock.
void wait_for_chunk(Recorder& recorder) {
  if (recorder.ready()) return;
  Py_BEGIN_ALLOW_THREADS
  recorder.wait_for_chunk();
  Py_END_ALLOW_THREADS
}

Record* claim_for_python(Recorder& recorder, uint64_t* index) {
  wait_for_chunk(recorder);
  return recorder.claim(index);
}

PyObject* handle_of(const Recorder& recorder, uint64_t index) {
  return PyLong_FromUnsignedLongLong(recorder.generation << 40 | (index + 1));
}

// The record of a handle; null if it is none, or an earlier recorder's.
Record* record_of(int64_t handle) {
  Recorder* recorder = active.load(std::memory_order_acquire);
  if (!recorder || !handle || static_cast<uint64_t>(handle) >> 40 != recorder->generation) return nullptr;
  return recorder->at((static_cast<uint64_t>(handle) & ((1ull << 40) - 1)) - 1);
}

}  // namespace
}  // namespace dsprof
