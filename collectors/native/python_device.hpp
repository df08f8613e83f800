// The switch of a device's times, and what Python brackets on its streams.

#pragma once

#include <Python.h>

#include <string>
#include <vector>

#include "device_issue.hpp"
#include "device_times.hpp"
#include "python_arguments.hpp"

namespace dsprof {
namespace {

// start_device("cuda:0", [names' ids of the phases that are timed])
PyObject* py_start_device(PyObject*, PyObject* args) {
  const char* device;
  PyObject* ids;
  if (!PyArg_ParseTuple(args, "sO!", &device, &PyList_Type, &ids)) return nullptr;
  std::vector<uint16_t> phases;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(ids); i++)
    phases.push_back(static_cast<uint16_t>(PyLong_AsLong(PyList_GET_ITEM(ids, i))));
  if (PyErr_Occurred()) return nullptr;
  return guarded([&] {
    device_times().start(c10::Device(std::string(device)), std::move(phases));
    Py_RETURN_NONE;
  });
}

PyObject* py_stop_device(PyObject*, PyObject*) {
  device_times().stop();
  Py_RETURN_NONE;
}

// communications_in_graphs() -> how many went into graphs that were captured, so far
PyObject* py_communications_in_graphs(PyObject*, PyObject*) {
  return PyLong_FromUnsignedLongLong(device_times().into_graphs.load());
}

// collect_device() -> how many spans are not over yet
PyObject* py_collect_device(PyObject*, PyObject*) { return PyLong_FromSize_t(device_times().collect()); }

// begin_on_stream(key, name): the current stream begins to wait, until end_on_stream(key)
PyObject* py_begin_on_stream(PyObject*, PyObject* const* args, Py_ssize_t count) {
  const int64_t key = integer(args, count, 0, 0), name = integer(args, count, 1, 0);
  if (!misread())
    device_times().begin_wait(reinterpret_cast<const void*>(key), static_cast<uint16_t>(name), now_ns());
  Py_RETURN_NONE;
}

PyObject* py_end_on_stream(PyObject*, PyObject* key) {
  const int64_t number = PyLong_AsLongLong(key);
  if (!misread()) device_times().end(reinterpret_cast<const void*>(number));
  Py_RETURN_NONE;
}

// What this thread issues from now on is begun together, when it has all been given.
PyObject* py_begin_coalescing(PyObject*, PyObject*) {
  return guarded([] {
    coalesced.begin();
    Py_RETURN_NONE;
  });
}

// It has all been given: it is issued now.
PyObject* py_issue_coalesced(PyObject*, PyObject*) {
  return guarded([] {
    coalesced.issue_all();
    Py_RETURN_NONE;
  });
}

PyObject* py_end_coalescing(PyObject*, PyObject*) {
  return guarded([] {
    coalesced.issued();
    Py_RETURN_NONE;
  });
}

}  // namespace
}  // namespace dsprof
