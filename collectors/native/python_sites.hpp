// The switches of what names lines of the script: of waits for a device, and of collectives.

#pragma once

#include <Python.h>

#include "call_sites.hpp"
#include "python_arguments.hpp"
#include "syncs.hpp"

namespace dsprof {
namespace {

// Lines are those outside of files that begin with one of `files`, and of the standard library. False: an error is set.
bool pass_over(PyObject* files, const char* library) {
  std::vector<std::string> inside;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(files); i++) {
    const char* file = PyUnicode_AsUTF8(PyList_GET_ITEM(files, i));
    if (!file) return false;
    inside.emplace_back(file);
  }
  sites().pass_over(std::move(inside), library);
  return true;
}

// install_syncs([beginnings of files to pass over], folder of the standard library)
PyObject* py_install_syncs(PyObject*, PyObject* args) {
  PyObject* files;
  const char* library;
  if (!PyArg_ParseTuple(args, "O!s", &PyList_Type, &files, &library)) return nullptr;
  return guarded([&]() -> PyObject* {
    if (!pass_over(files, library)) return nullptr;
    install_syncs();
    Py_RETURN_NONE;
  });
}

PyObject* py_uninstall_syncs(PyObject*, PyObject*) {
  uninstall_syncs();
  Py_RETURN_NONE;
}

// install_call_sites([beginnings of files to pass over], folder of the standard library, first, every, most)
PyObject* py_install_call_sites(PyObject*, PyObject* args) {
  PyObject* files;
  const char* library;
  unsigned long long first, every, most;
  if (!PyArg_ParseTuple(args, "O!sKKK", &PyList_Type, &files, &library, &first, &every, &most)) return nullptr;
  return guarded([&]() -> PyObject* {
    if (!pass_over(files, library)) return nullptr;
    call_sites().install(first, every, most);
    Py_RETURN_NONE;
  });
}

PyObject* py_uninstall_call_sites(PyObject*, PyObject*) {
  call_sites().uninstall();
  Py_RETURN_NONE;
}

}  // namespace
}  // namespace dsprof
