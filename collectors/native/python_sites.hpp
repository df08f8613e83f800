// The switches of what names lines of the script: of waits for a device, and of collectives.

#pragma once

#include <Python.h>

#include "call_sites.hpp"
#include "python_arguments.hpp"
#include "syncs.hpp"

namespace dsprof {
namespace {

// pass_over_sites([beginnings of files], folder of the standard library): lines are those outside of these files
PyObject* py_pass_over_sites(PyObject*, PyObject* args) {
  PyObject* files;
  const char* library;
  if (!PyArg_ParseTuple(args, "O!s", &PyList_Type, &files, &library)) return nullptr;
  return guarded([&]() -> PyObject* {
    std::vector<std::string> inside;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(files); i++) {
      const char* file = PyUnicode_AsUTF8(PyList_GET_ITEM(files, i));
      if (file)
        inside.emplace_back(file);
      else
        PyErr_Clear();  // it is not UTF-8, and the name of no code is compared with it
    }
    sites().pass_over(std::move(inside), library);
    Py_RETURN_NONE;
  });
}

// install_syncs()
PyObject* py_install_syncs(PyObject*, PyObject*) {
  return guarded([]() -> PyObject* {
    install_syncs();
    Py_RETURN_NONE;
  });
}

PyObject* py_uninstall_syncs(PyObject*, PyObject*) {
  uninstall_syncs();
  Py_RETURN_NONE;
}

// install_call_sites(first, every, most): `most` lines in all; looked at are the first of those alike, and one in `every`
// after them
PyObject* py_install_call_sites(PyObject*, PyObject* args) {
  unsigned long long first, every, most;
  if (!PyArg_ParseTuple(args, "KKK", &first, &every, &most)) return nullptr;
  return guarded([&]() -> PyObject* {
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
