// The switches of the hook on modules, and of the counter of operations.

#pragma once

#include <Python.h>

#include "flops.hpp"
#include "modules.hpp"
#include "python_arguments.hpp"

namespace dsprof {
namespace {

// install_modules(torch.nn.Module.__call__, torch.Tensor, what names an unknown module and what is told of the input of
// a forward, or None and None, signals.by_handler)
PyObject* py_install_modules(PyObject*, PyObject* args) {
  PyObject *function, *tensor, *namer, *noter, *by_handler;
  if (!PyArg_ParseTuple(args, "O!O!OOO", &PyFunction_Type, &function, &PyType_Type, &tensor, &namer, &noter,
                        &by_handler))
    return nullptr;
  return guarded([&] {
    const bool every = namer != Py_None;
    install_modules(function, tensor, every ? namer : nullptr, every ? noter : nullptr, by_handler);
    Py_RETURN_NONE;
  });
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
  return guarded([] {
    uninstall_modules();
    Py_RETURN_NONE;
  });
}

PyObject* py_start_counting(PyObject*, PyObject*) {
  return guarded([] {
    start_counting();
    Py_RETURN_NONE;
  });
}

// stop_counting() -> ([(name of the module, part, dtype, operations)], [(operator without a formula, calls)])
PyObject* py_stop_counting(PyObject*, PyObject*) {
  std::map<FlopCounter::Key, double> flops;
  std::map<std::string, uint64_t> missed;
  try {
    stop_counting();
    flop_counter().take(flops, missed);
  } catch (...) {
    count_error("operations of a step");
  }
  PyObject *counted = PyList_New(0), *others = PyList_New(0);
  const auto append = [](PyObject* list, PyObject* item) {
    if (!list || !item || PyList_Append(list, item) < 0) misread();
    Py_XDECREF(item);
  };
  for (const auto& [key, number] : flops)
    append(counted, Py_BuildValue("IIId", key.module, key.part, key.dtype, number));
  for (const auto& [name, calls] : missed)
    append(others, Py_BuildValue("sK", name.c_str(), static_cast<unsigned long long>(calls)));
  return Py_BuildValue("NN", counted, others);
}

}  // namespace
}  // namespace dsprof
