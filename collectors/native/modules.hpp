// Forward: a call hook on torch.nn.Module.__call__ that times the outermost module call of each thread, and at level
// full every module that has a name (`calls.hpp`: in backward, too). Its twin in Python is collectors/loop/modules.py.

#pragma once

#include <Python.h>

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include "calls.hpp"
#include "device_times.hpp"
#include "flops.hpp"
#include "recorder.hpp"

namespace dsprof {

// The hook replaces the vectorcall pointer of the function object nn.Module.__call__, not the function:
// Dynamo, torch.fx, torch.jit, pickle and subclasses all go on seeing torch's own. Python 3.11 does not look at the
// pointer for `super().__call__(x)`: a class with a `__call__` of its own then shows the calls it makes, not its own.
inline PyFunctionObject* module_function = nullptr;
inline vectorcallfunc original_call = nullptr;
inline PyObject* tensor_type = nullptr;
inline thread_local bool inside_module = false;

// At level full: the names of modules by address, which Python takes out when a module dies, and what gives names to an
// unknown module and all that it has. Both are used with the GIL held.
inline PyObject* module_namer = nullptr;
inline PyObject* input_noter = nullptr;  // is called with what a forward is given
inline std::unordered_map<const void*, uint16_t>& module_names() {
  static auto* instance = new std::unordered_map<const void*, uint16_t>;
  return *instance;
}

// signals.by_handler: whether a signal's handler of the job raised an exception.
inline PyObject* handler_check = nullptr;

// After an error: whether what is raised is the job's (Ctrl-C, what a signal's handler raised), and stays raised; what is
// ours is taken away.
inline bool is_the_jobs() {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return true;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace) PyException_SetTraceback(value, trace);
  PyObject* answer = PyObject_CallOneArg(handler_check, value);
  if (!answer) {  // another handler came in between
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return true;
  }
  const bool theirs = answer == Py_True;
  Py_DECREF(answer);
  PyErr_Restore(type, value, trace);
  if (!theirs) PyErr_Clear();
  return theirs;
}

// Adds a tensor's elements and bytes; false: a fake one, so this is a compiler tracing and not a forward; or something
// of the job's was raised.
inline bool count_tensor(PyObject* object, int64_t& elements, int64_t& bytes) {
  if (!PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(tensor_type))) return true;
  const char* type = Py_TYPE(object)->tp_name;
  if (!strcmp(type, "FakeTensor") || !strcmp(type, "FunctionalTensor")) return false;
  static PyObject* const nbytes_name = PyUnicode_InternFromString("nbytes");  // to make them each time takes as long again
  static PyObject* const itemsize_name = PyUnicode_InternFromString("itemsize");
  PyObject* nbytes = PyObject_GetAttr(object, nbytes_name);
  PyObject* itemsize = nbytes ? PyObject_GetAttr(object, itemsize_name) : nullptr;
  const int64_t size = nbytes ? PyLong_AsLongLong(nbytes) : 0, each = itemsize ? PyLong_AsLongLong(itemsize) : 1;
  Py_XDECREF(nbytes);
  Py_XDECREF(itemsize);
  if (PyErr_Occurred()) return !is_the_jobs();  // a tensor without a plain size, such as a nested one
  bytes += size;
  elements += size / std::max<int64_t>(each, 1);  // numel() would be recorded by torch.jit.trace
  return true;
}

inline bool count_input(PyObject* object, int64_t& elements, int64_t& bytes) {
  if (PyList_Check(object) || PyTuple_Check(object)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); i++)
      if (!count_tensor(PySequence_Fast_GET_ITEM(object, i), elements, bytes)) return false;
    return true;
  }
  if (PyDict_Check(object)) {
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(object, &position, &key, &value))
      if (!count_tensor(value, elements, bytes)) return false;
    return true;
  }
  return count_tensor(object, elements, bytes);
}

// The name of a module, 0: it has none. An outermost module that is unknown is named with all that it has. What was
// raised in between and is not ours stays raised.
inline uint16_t name_of_module(PyObject* module, bool outermost) {
  const auto found = module_names().find(module);
  if (found != module_names().end()) return found->second;
  if (!outermost) return 0;
  PyObject* done = PyObject_CallOneArg(module_namer, module);  // what is ours it counts itself
  if (!done) return 0;
  Py_DECREF(done);
  const auto named = module_names().find(module);
  return named == module_names().end() ? 0 : named->second;
}

// Tells Python of the arguments of a forward that is trained. What is raised and is not ours stays raised.
inline void note_input(PyObject* const* args, size_t nargsf, PyObject* keywords) {
  Py_XDECREF(PyObject_Vectorcall(input_noter, args, PyVectorcall_NARGS(nargsf), keywords));
}

inline PyObject* module_call(PyObject* function, PyObject* const* args, size_t nargsf, PyObject* keywords) {
  Recorder* recorder = active.load(std::memory_order_acquire);
  if (!recorder || (inside_module && !module_namer) || !PyVectorcall_NARGS(nargsf))
    return original_call(function, args, nargsf, keywords);
  if (inside_module) {
    Hook hook;
    ModuleCall module;
    module.begin(*recorder, name_of_module(args[0], false));
    PyObject* result;
    {
      Job job;
      result = original_call(function, args, nargsf, keywords);
    }
    module.end();
    return result;
  }
  Hook hook;
  const Py_ssize_t count = PyVectorcall_NARGS(nargsf) + (keywords ? PyTuple_GET_SIZE(keywords) : 0);
  int64_t elements = 0, bytes = 0;
  bool real = true;
  for (Py_ssize_t i = 1; i < count && real; i++) real = count_input(args[i], elements, bytes);
  if (!real && PyErr_Occurred()) return nullptr;
  // What the backward pass calls is a recomputation, not a forward.
  const bool again = torch::autograd::get_current_graph_task_id() != -1;
  const bool grad = c10::GradMode::is_enabled();
  Record* r = real ? recorder->claim() : nullptr;
  if (r) {
    const uint16_t name = recorder->intern(again ? "recompute" : "forward");
    fill(r, kPhase, name, now_ns(), 0, static_cast<double>(elements), bytes);
    if (grad) r->head.flags = kGrad;
    publish(r, kBegun);
    device_times().begin(r);
  }
  ModuleCall module;
  if (module_namer && real) {
    // A block that is computed again may be called by itself, and have no name but in its model.
    const uint16_t name = name_of_module(args[0], !again);
    if (name && grad && !again && !PyErr_Occurred()) note_input(args, nargsf, keywords);
    if (!PyErr_Occurred()) module.begin(*recorder, name);
    trained = grad;
  }
  const auto ended = [r] {
    if (!r) return;
    device_times().end(r);
    complete(r, now_ns());
  };
  if (PyErr_Occurred()) {
    ended();
    return nullptr;
  }
  inside_module = true;
  PyObject* result;
  {
    Job job;
    result = original_call(function, args, nargsf, keywords);
  }
  inside_module = false;
  module.end();
  ended();
  return result;
}

inline void uninstall_modules() {
  if (!module_function) return;
  module_function->vectorcall = original_call;
  Py_CLEAR(module_function);
  Py_CLEAR(tensor_type);
  Py_CLEAR(module_namer);
  Py_CLEAR(input_noter);
  Py_CLEAR(handler_check);
  module_names().clear();
  leave_nodes();
}

// `namer` and `noter` null: only outermost calls.
inline void install_modules(PyObject* function, PyObject* tensor, PyObject* namer, PyObject* noter, PyObject* check) {
  uninstall_modules();
  handler_check = Py_NewRef(check);
  module_namer = Py_XNewRef(namer);
  input_noter = Py_XNewRef(noter);
  if (module_namer) watch_nodes();
  module_function = reinterpret_cast<PyFunctionObject*>(Py_NewRef(function));
  tensor_type = Py_NewRef(tensor);
  original_call = module_function->vectorcall;
#if PY_VERSION_HEX >= 0x030C0000
  PyFunction_SetVectorcall(module_function, &module_call);
#else
  module_function->vectorcall = &module_call;
  module_function->func_version = 0;  // bytecode specialized for this function would pass it by
#endif
}

}  // namespace dsprof
