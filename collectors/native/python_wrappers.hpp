// Callables in the place of Python's functions and methods: a call of one is recorded, or has a purpose. They make no
// frame and take no tuple of arguments, so they cost a fraction of a function written in Python. That one is in
// collectors/wrappers.py.

#pragma once

#include <Python.h>
#include <structmember.h>

#include <array>

#include "device_times.hpp"
#include "python_communication.hpp"
#include "recorder.hpp"
#include "waits.hpp"

namespace dsprof {
namespace {

constexpr size_t kOpTypes = 32;  // of c10d::OpType those that have a name of their own
using WaitNames = std::array<uint16_t, kOpTypes>;

struct Wrapper {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject* original;
  PyObject* attributes;  // what functools.wraps gives it
  PyObject* references;  // weak ones
  uint64_t generation;   // of the recorder whose names these are; while another one is open nothing is recorded
  uint8_t kind;
  uint16_t name;     // or a purpose
  WaitNames* waits;  // by c10d::OpType; of others it is `name`

  static const Wrapper& of(PyObject* self) { return *reinterpret_cast<Wrapper*>(self); }

  Recorder* recorder() const {
    Recorder* open = active.load(std::memory_order_acquire);
    return open && open->generation == generation ? open : nullptr;
  }
};

PyObject* call_recorded(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  const Wrapper& wrapper = Wrapper::of(self);
  Recorder* recorder = wrapper.recorder();
  Record* r = recorder ? recorder->claim() : nullptr;
  if (r) {
    fill(r, wrapper.kind, wrapper.name, now_ns(), 0, kNoValue, -1);
    publish(r, kBegun);
  }
  PyObject* result = PyObject_Vectorcall(wrapper.original, args, nargsf, keywords);
  if (r) complete(r, now_ns());
  return result;
}

PyObject* call_for_purpose(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  const Wrapper& wrapper = Wrapper::of(self);
  const Context before = context;
  if (wrapper.recorder()) context = {-1, -1, 0, wrapper.name};
  PyObject* result = PyObject_Vectorcall(wrapper.original, args, nargsf, keywords);
  context = before;
  return result;
}

// Of a work's method, whose first argument is the work.
PyObject* call_waiting(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  const Wrapper& wrapper = Wrapper::of(self);
  Recorder* recorder = wrapper.recorder();
  const int64_t begun = now_ns();
  Record* r = recorder && passed_over != kCallsAndWaits ? recorder->claim() : nullptr;
  if (r) {
    const c10d::Work* work = PyVectorcall_NARGS(nargsf) ? work_of(args[0]) : nullptr;
    const size_t type = work ? static_cast<size_t>(work->retrieveOpType()) : kOpTypes;
    const uint16_t name = type < kOpTypes ? (*wrapper.waits)[type] : wrapper.name;
    begin_wait(r, begun, work ? target_of_work(*work) : Target(), name);
    device_times().begin(r);
  }
  PyObject* result = PyObject_Vectorcall(wrapper.original, args, nargsf, keywords);
  if (r) {
    const int64_t ended = now_ns();
    device_times().end(r);
    complete(r, ended);
  }
  return result;
}

int traverse_wrapper(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(Wrapper::of(self).original);
  Py_VISIT(Wrapper::of(self).attributes);
  return 0;
}

int clear_wrapper(PyObject* self) {
  auto* wrapper = reinterpret_cast<Wrapper*>(self);
  Py_CLEAR(wrapper->original);
  Py_CLEAR(wrapper->attributes);
  return 0;
}

void free_wrapper(PyObject* self) {
  auto* wrapper = reinterpret_cast<Wrapper*>(self);
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  if (wrapper->references) PyObject_ClearWeakRefs(self);
  clear_wrapper(self);
  delete wrapper->waits;
  type->tp_free(self);
  Py_DECREF(type);
}

// A method where it is a class's.
PyObject* bind_wrapper(PyObject* self, PyObject* object, PyObject*) {
  return object && object != Py_None ? PyMethod_New(self, object) : Py_NewRef(self);
}

PyObject* describe_wrapper(PyObject* self) {
  return PyUnicode_FromFormat("<%R, recorded by dsprof>", Wrapper::of(self).original);
}

// Copied and pickled as functions are: by name.
PyObject* reduce_wrapper(PyObject* self, PyObject*) { return PyObject_GetAttrString(self, "__qualname__"); }

PyTypeObject* wrapper_type = nullptr;

bool make_wrapper_type() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(Wrapper, call), READONLY, nullptr},
      {"__dictoffset__", T_PYSSIZET, offsetof(Wrapper, attributes), READONLY, nullptr},
      {"__weaklistoffset__", T_PYSSIZET, offsetof(Wrapper, references), READONLY, nullptr},
      {nullptr, 0, 0, 0, nullptr},
  };
  static PyGetSetDef properties[] = {
      {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, nullptr, nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr},
  };
  static PyMethodDef methods[] = {
      {"__reduce__", reduce_wrapper, METH_NOARGS, nullptr},
      {nullptr, nullptr, 0, nullptr},
  };
  static PyType_Slot slots[] = {
      {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
      {Py_tp_descr_get, reinterpret_cast<void*>(bind_wrapper)},
      {Py_tp_repr, reinterpret_cast<void*>(describe_wrapper)},
      {Py_tp_traverse, reinterpret_cast<void*>(traverse_wrapper)},
      {Py_tp_clear, reinterpret_cast<void*>(clear_wrapper)},
      {Py_tp_dealloc, reinterpret_cast<void*>(free_wrapper)},
      {Py_tp_members, members},
      {Py_tp_getset, properties},
      {Py_tp_methods, methods},
      {0, nullptr},
  };
  constexpr unsigned long flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
                                  Py_TPFLAGS_METHOD_DESCRIPTOR | Py_TPFLAGS_DISALLOW_INSTANTIATION;
  static PyType_Spec spec = {"dsprof_native.Wrapper", sizeof(Wrapper), 0, flags, slots};
  if (!wrapper_type) wrapper_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return wrapper_type;
}

// All else of it is zero.
Wrapper* new_wrapper(vectorcallfunc call, PyObject* original, uint16_t name) {
  auto* wrapper = make_wrapper_type() ? reinterpret_cast<Wrapper*>(wrapper_type->tp_alloc(wrapper_type, 0)) : nullptr;
  if (!wrapper) return nullptr;
  Recorder* recorder = active.load();
  wrapper->call = call;
  wrapper->original = Py_NewRef(original);
  wrapper->generation = recorder ? recorder->generation : 0;
  wrapper->name = name;
  return wrapper;
}

// recorded(original, kind, name): its calls are recorded
PyObject* py_recorded(PyObject*, PyObject* args) {
  PyObject* original;
  unsigned char kind;
  unsigned short name;
  if (!PyArg_ParseTuple(args, "ObH", &original, &kind, &name)) return nullptr;
  Wrapper* wrapper = new_wrapper(&call_recorded, original, name);
  if (wrapper) wrapper->kind = kind;
  return reinterpret_cast<PyObject*>(wrapper);
}

// for_purpose(original, purpose): what this thread communicates in it has this purpose
PyObject* py_for_purpose(PyObject*, PyObject* args) {
  PyObject* original;
  unsigned short purpose;
  if (!PyArg_ParseTuple(args, "OH", &original, &purpose)) return nullptr;
  return reinterpret_cast<PyObject*>(new_wrapper(&call_for_purpose, original, purpose));
}

// waiting(Work.wait, {c10d::OpType: name}, name of others): its calls are recorded as waits
PyObject* py_waiting(PyObject*, PyObject* args) {
  PyObject *original, *names, *key, *value;
  unsigned short other;
  if (!PyArg_ParseTuple(args, "OO!H", &original, &PyDict_Type, &names, &other)) return nullptr;
  WaitNames by_type;
  by_type.fill(other);
  Py_ssize_t position = 0;
  while (PyDict_Next(names, &position, &key, &value)) {
    const size_t type = PyLong_AsSize_t(key);
    if (type < kOpTypes) by_type[type] = static_cast<uint16_t>(PyLong_AsLong(value));
  }
  if (PyErr_Occurred()) return nullptr;
  Wrapper* wrapper = new_wrapper(&call_waiting, original, other);
  if (wrapper) wrapper->waits = new WaitNames(by_type);
  return reinterpret_cast<PyObject*>(wrapper);
}

}  // namespace
}  // namespace dsprof
