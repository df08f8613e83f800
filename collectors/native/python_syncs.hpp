// The switch of the hooks on what waits for a device.

#pragma once

#include <Python.h>

#include "python_arguments.hpp"
#include "syncs.hpp"

namespace dsprof {
namespace {

// install_syncs([beginnings of files to pass over], folder of the standard library)
PyObject* py_install_syncs(PyObject*, PyObject* args) {
  PyObject* files;
  const char* library;
  if (!PyArg_ParseTuple(args, "O!s", &PyList_Type, &files, &library)) return nullptr;
  return guarded([&]() -> PyObject* {
    std::vector<std::string> inside;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(files); i++) {
      const char* file = PyUnicode_AsUTF8(PyList_GET_ITEM(files, i));
      if (!file) return nullptr;
      inside.emplace_back(file);
    }
    sites().pass_over(std::move(inside), library);
    install_syncs();
    Py_RETURN_NONE;
  });
}

PyObject* py_uninstall_syncs(PyObject*, PyObject*) {
  uninstall_syncs();
  Py_RETURN_NONE;
}

}  // namespace
}  // namespace dsprof
