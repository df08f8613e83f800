// Communications and waits as Python names them, and the switch of the hooks on c10d.

#pragma once

#include <Python.h>

#include <pybind11/detail/common.h>

#include <string>
#include <utility>
#include <vector>

#include "collectives.hpp"
#include "device_times.hpp"
#include "python_arguments.hpp"
#include "waits.hpp"

namespace dsprof {
namespace {

// What a group named by Python gives; 0 without a recorder.
template <class Body>
PyObject* of_group(PyObject* name, Body body) {
  Recorder* recorder = active.load(std::memory_order_acquire);
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(name, &size);
  if (misread() || !recorder) return PyLong_FromLong(0);
  return guarded([&] { return PyLong_FromUnsignedLong(body(groups().named({text, static_cast<size_t>(size)}, *recorder))); });
}

PyObject* py_group(PyObject*, PyObject* name) {
  return of_group(name, [](Group& group) { return group.id; });
}

PyObject* py_number(PyObject*, PyObject* name) {
  return of_group(name, [](Group& group) { return group.next++; });
}

PyObject* work_type = nullptr;  // torch.distributed.Work, whose objects are pybind11's

// The work in a Python object; null where it is none, or its class is made of several of pybind11's.
c10d::Work* work_of(PyObject* object) {
  if (!work_type || !PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(work_type))) return nullptr;
  const auto* instance = reinterpret_cast<pybind11::detail::instance*>(object);
  return instance->simple_layout ? static_cast<c10d::Work*>(instance->simple_value_holder[0]) : nullptr;
}

// What a wait waits for that Python names: a work, or what target() gave of one. Unknown: Target().
Target target_named(PyObject* object) {
  if (!PyTuple_CheckExact(object)) {
    const c10d::Work* work = work_of(object);
    return work ? target_of_work(*work) : Target();
  }
  unsigned int name, group, seq;
  int peer, tag, p2p;
  if (!PyArg_ParseTuple(object, "IIIiip", &name, &group, &seq, &peer, &tag, &p2p)) return {};
  return {static_cast<uint16_t>(name), static_cast<uint16_t>(group), seq, static_cast<int16_t>(peer), tag, p2p != 0};
}

// begin_wait(name, work or its target) -> handle
PyObject* py_begin_wait(PyObject*, PyObject* const* args, Py_ssize_t count) {
  const int64_t now = now_ns(), name = integer(args, count, 0, 0);
  const Target target = count > 1 ? target_named(args[1]) : Target();
  if (misread() || passed_over == kCallsAndWaits) return PyLong_FromLong(0);
  Recorder* recorder = active.load(std::memory_order_acquire);
  uint64_t index = 0;
  Record* r = recorder ? claim_for_python(*recorder, &index) : nullptr;
  if (!r) return PyLong_FromLong(0);
  begin_wait(r, now, target, static_cast<uint16_t>(name));
  device_times().begin(r);
  return handle_of(*recorder, index);
}

// target(work; None: what this thread issued last) -> (name, group, seq, peer, tag, p2p) or None
PyObject* py_target(PyObject*, PyObject* object) {
  const Target target = object == Py_None ? this_thread.issued : target_named(object);
  if (!target.name) Py_RETURN_NONE;
  return Py_BuildValue("IIIiiN", target.name, target.group, target.seq, target.peer, target.tag,
                       PyBool_FromLong(target.p2p));
}

PyObject* py_stands_for_issued(PyObject*, PyObject* object) {
  if (const c10d::Work* work = work_of(object)) remember_work(*work, this_thread.issued);
  Py_RETURN_NONE;
}

PyObject* py_enter_blocking(PyObject*, PyObject*) {
  enter_blocking();
  Py_RETURN_NONE;
}

PyObject* py_leave_blocking(PyObject*, PyObject*) {
  leave_blocking();
  Py_RETURN_NONE;
}

// install_collectives({operator: name}, torch.distributed.Work)
PyObject* py_install_collectives(PyObject*, PyObject* args) {
  PyObject *table, *work, *key, *value;
  if (!PyArg_ParseTuple(args, "O!O!", &PyDict_Type, &table, &PyType_Type, &work)) return nullptr;
  std::vector<std::pair<std::string, std::string>> names;
  Py_ssize_t position = 0;
  while (PyDict_Next(table, &position, &key, &value)) {
    names.emplace_back(PyUnicode_AsUTF8(key), PyUnicode_AsUTF8(value));
  }
  // Should torch bind it by other means than pybind11 one day, its works cannot be told.
  const auto* type = reinterpret_cast<PyTypeObject*>(work);
  const bool known = strstr(Py_TYPE(work)->tp_name, "pybind11_type") &&
                     type->tp_basicsize == sizeof(pybind11::detail::instance);
  Py_XSETREF(work_type, known ? Py_NewRef(work) : nullptr);
  return guarded([&] {
    install_collectives(names);
    Py_RETURN_NONE;
  });
}

PyObject* py_renew_groups(PyObject*, PyObject*) {
  groups().renew();
  Py_RETURN_NONE;
}

PyObject* py_uninstall_collectives(PyObject*, PyObject*) {
  return guarded([] {
    uninstall_collectives();
    Py_RETURN_NONE;
  });
}

}  // namespace
}  // namespace dsprof
