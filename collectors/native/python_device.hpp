// The switch of a device's times, and what Python brackets on its streams.

#pragma once

#include <Python.h>

#include <string>
#include <vector>

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

PyObject* py_suspend_device(PyObject*, PyObject* suspended) {
  device_times().suspend(suspended == Py_True);
  Py_RETURN_NONE;
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

// coalescing(whether what this thread issues from now on is begun together, later)
PyObject* py_coalescing(PyObject*, PyObject* begun) {
  coalescing = begun == Py_True;
  Py_RETURN_NONE;
}

}  // namespace
}  // namespace dsprof
