// The switch of the hook on modules.

#pragma once

#include <Python.h>

#include "modules.hpp"
#include "python_arguments.hpp"

namespace dsprof {
namespace {

// install_modules(torch.nn.Module.__call__, torch.Tensor, what names an unknown module or None, interrupts.by_handler)
PyObject* py_install_modules(PyObject*, PyObject* args) {
  PyObject *function, *tensor, *namer, *by_handler;
  if (!PyArg_ParseTuple(args, "O!O!OO", &PyFunction_Type, &function, &PyType_Type, &tensor, &namer, &by_handler))
    return nullptr;
  install_modules(function, tensor, namer == Py_None ? nullptr : namer, by_handler);
  Py_RETURN_NONE;
}

// name_module(id(module), name's id; 0: forget it)
PyObject* py_name_module(PyObject*, PyObject* const* args, Py_ssize_t count) {
  const int64_t address = integer(args, count, 0, 0), name = integer(args, count, 1, 0);
  if (misread()) Py_RETURN_NONE;
  const auto* module = reinterpret_cast<const void*>(address);
  if (name)
    module_names()[module] = static_cast<uint16_t>(name);
  else
    module_names().erase(module);
  Py_RETURN_NONE;
}

PyObject* py_uninstall_modules(PyObject*, PyObject*) {
  uninstall_modules();
  Py_RETURN_NONE;
}

}  // namespace
}  // namespace dsprof
