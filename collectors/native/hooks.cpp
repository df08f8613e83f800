// The native helper: a CPython module, built by build.py for one torch and one Python.
//
// Nothing here may change what the training job does: every error of ours is caught and counted.

#include <Python.h>

#include <pybind11/detail/common.h>

#include "collectives.hpp"
#include "flops.hpp"
#include "modules.hpp"
#include "recorder.hpp"
#include "waits.hpp"

namespace dsprof {
namespace {

uint64_t generations = 0;

// Runs `body`, turning C++ exceptions into Python's.
template <class Body>
PyObject* guarded(Body body) {
  try {
    return body();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

int64_t integer(PyObject* const* args, Py_ssize_t count, Py_ssize_t i, int64_t absent) {
  return i < count ? PyLong_AsLongLong(args[i]) : absent;
}

double value_of(PyObject* const* args, Py_ssize_t count, Py_ssize_t i) {
  return i < count && args[i] != Py_None ? PyFloat_AsDouble(args[i]) : kNoValue;
}

PyObject* handle_of(const Recorder& recorder, uint64_t index) {
  return PyLong_FromUnsignedLongLong(recorder.generation << 40 | (index + 1));
}

// The record of a handle; null if it is none, or an earlier recorder's.
Record* record_of(int64_t handle) {
  Recorder* recorder = active.load(std::memory_order_acquire);
  if (!recorder || !handle || static_cast<uint64_t>(handle) >> 40 != recorder->generation) return nullptr;
  return recorder->at((static_cast<uint64_t>(handle) & ((1ull << 40) - 1)) - 1);
}

PyObject* py_open(PyObject*, PyObject* args) {
  const char* path;
  unsigned long long limit;
  if (!PyArg_ParseTuple(args, "sK", &path, &limit)) return nullptr;
  if (active.load()) {
    PyErr_SetString(PyExc_RuntimeError, "the native recorder is open already");
    return nullptr;
  }
  const int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
  const int names = openat(folder, "names.txt", O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (names < 0) {
    PyErr_SetFromErrnoWithFilename(PyExc_OSError, path);
    close(folder);
    return nullptr;
  }
  return guarded([&] {
    errors = 0;
    groups().clear();  // their ids are the last recorder's
    active = new Recorder(folder, names, limit, ++generations);
    Py_RETURN_NONE;
  });
}

std::atomic<Recorder*> last{nullptr};  // keeps answering for its counters after it is closed

PyObject* py_close(PyObject*, PyObject*) {
  if (Recorder* recorder = active.exchange(nullptr)) {
    last = recorder;
    recorder->close();
  }
  Py_RETURN_NONE;
}

PyObject* py_disarm_after_fork(PyObject*, PyObject*) {
  active = nullptr;  // and nothing else: its locks may be held by a thread that the child lacks
  Py_RETURN_NONE;
}

PyObject* py_intern(PyObject*, PyObject* name) {
  Recorder* recorder = active.load();
  if (!recorder) return PyLong_FromLong(0);
  PyObject* encoded = PyUnicode_AsEncodedString(name, "utf-8", "backslashreplace");
  if (!encoded) return nullptr;
  const std::string_view text(PyBytes_AS_STRING(encoded), static_cast<size_t>(PyBytes_GET_SIZE(encoded)));
  PyObject* result = guarded([&] { return PyLong_FromUnsignedLong(recorder->intern(text)); });
  Py_DECREF(encoded);
  return result;
}

// After reading arguments: whether one was wrong, which is counted and not raised.
bool misread() {
  if (!PyErr_Occurred()) return false;
  PyErr_Clear();
  errors++;
  return true;
}

// begin(kind, name, bytes=-1, value=None) -> handle
PyObject* py_begin(PyObject*, PyObject* const* args, Py_ssize_t count) {
  const int64_t kind = integer(args, count, 0, 0), name = integer(args, count, 1, 0);
  const int64_t bytes = integer(args, count, 2, -1);
  const double value = value_of(args, count, 3);
  if (misread() || (kind == kWait && passed_over == kCallsAndWaits)) return PyLong_FromLong(0);
  Recorder* recorder = active.load(std::memory_order_acquire);
  uint64_t index = 0;
  Record* r = recorder ? recorder->claim(&index) : nullptr;
  if (!r) return PyLong_FromLong(0);
  fill(r, static_cast<uint8_t>(kind), static_cast<uint16_t>(name), now_ns(), 0, value, bytes);
  publish(r, kBegun);
  return handle_of(*recorder, index);
}

// end(handle, value=None, bytes=-1): value and bytes are set where given
PyObject* py_end(PyObject*, PyObject* const* args, Py_ssize_t count) {
  const int64_t now = now_ns(), handle = integer(args, count, 0, 0);
  const double value = value_of(args, count, 1);
  const int64_t bytes = integer(args, count, 2, -1);
  if (misread()) Py_RETURN_NONE;
  if (Record* r = record_of(handle)) {
    if (count > 1 && args[1] != Py_None) r->span.value = value;
    if (bytes != -1) r->span.bytes = bytes;
    complete(r, now);
  }
  Py_RETURN_NONE;
}

// put(kind, name, start_ns, end_ns, value=None, bytes=-1)
PyObject* py_put(PyObject*, PyObject* const* args, Py_ssize_t count) {
  const int64_t kind = integer(args, count, 0, 0), name = integer(args, count, 1, 0);
  const int64_t start = integer(args, count, 2, 0), end = integer(args, count, 3, 0);
  const double value = value_of(args, count, 4);
  const int64_t bytes = integer(args, count, 5, -1);
  if (misread()) Py_RETURN_NONE;
  put(static_cast<uint8_t>(kind), static_cast<uint16_t>(name), start, end, value, bytes);
  Py_RETURN_NONE;
}

// mark(kind, name, value=None, bytes=-1): an instant, now
PyObject* py_mark(PyObject*, PyObject* const* args, Py_ssize_t count) {
  const int64_t kind = integer(args, count, 0, 0), name = integer(args, count, 1, 0);
  const double value = value_of(args, count, 2);
  const int64_t bytes = integer(args, count, 3, -1), now = now_ns();
  if (misread()) Py_RETURN_NONE;
  put(static_cast<uint8_t>(kind), static_cast<uint16_t>(name), now, now, value, bytes);
  Py_RETURN_NONE;
}

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
  Record* r = recorder ? recorder->claim(&index) : nullptr;
  if (!r) return PyLong_FromLong(0);
  begin_wait(r, now, target, static_cast<uint16_t>(name));
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

// Reads N integers, passing over the one at `skipped`; false: one was wrong, or there are fewer, or over `optional` more.
template <size_t N>
bool integers(PyObject* const* args, Py_ssize_t count, std::array<int64_t, N>& numbers, size_t skipped = N,
              size_t optional = 0) {
  if (count < static_cast<Py_ssize_t>(N) || count > static_cast<Py_ssize_t>(N + optional)) {
    errors++;
    return false;
  }
  for (size_t i = 0; i < N; i++) numbers[i] = i == skipped ? 0 : PyLong_AsLongLong(args[i]);
  return !misread();
}

Context context_of(int64_t stage, int64_t microbatch, int64_t module, int64_t purpose) {
  return {static_cast<int16_t>(stage), static_cast<int16_t>(microbatch), static_cast<uint16_t>(module),
          static_cast<uint16_t>(purpose)};
}

// comm(kind, name, start_ns, end_ns, issue_ns, bytes, group, seq, peer, dtype, flags, stage, microbatch, module,
// purpose) -> handle
PyObject* py_comm(PyObject*, PyObject* const* args, Py_ssize_t count) {
  std::array<int64_t, 15> numbers;
  if (!integers(args, count, numbers)) return PyLong_FromLong(0);
  const auto [kind, name, start, end, issue, bytes, group, seq, peer, dtype, flags, stage, microbatch, module,
              purpose] = numbers;
  Recorder* recorder = active.load(std::memory_order_acquire);
  uint64_t index = 0;
  Record* r = recorder ? recorder->claim(&index) : nullptr;
  if (!r) return PyLong_FromLong(0);
  const Target target{static_cast<uint16_t>(name), static_cast<uint16_t>(group), static_cast<uint32_t>(seq),
                      static_cast<int16_t>(peer), -1, peer != -1};
  fill_comm(r, static_cast<uint8_t>(kind), target, start, end, issue, bytes, static_cast<uint8_t>(dtype),
            context_of(stage, microbatch, module, purpose));
  r->head.flags = static_cast<uint8_t>(flags);
  if (kind == kComm) this_thread.told = target;
  publish(r, end ? kDone : kBegun);
  return handle_of(*recorder, index);
}

// span(kind, name, start_ns, end_ns, issue_ns, value, bytes, flags, lane, stage, microbatch, module, purpose, corr=-1)
// -> handle
PyObject* py_span(PyObject*, PyObject* const* args, Py_ssize_t count) {
  std::array<int64_t, 13> numbers;
  if (!integers(args, count, numbers, 5, 1)) return PyLong_FromLong(0);
  const double number = value_of(args, count, 5);
  const int64_t corr = integer(args, count, 13, -1);
  if (misread()) return PyLong_FromLong(0);
  const auto [kind, name, start, end, issue, value, bytes, flags, lane, stage, microbatch, module, purpose] = numbers;
  Recorder* recorder = active.load(std::memory_order_acquire);
  uint64_t index = 0;
  Record* r = recorder ? recorder->claim(&index) : nullptr;
  if (!r) return PyLong_FromLong(0);
  const Place place{static_cast<uint16_t>(lane), context_of(stage, microbatch, module, purpose)};
  fill(r, static_cast<uint8_t>(kind), static_cast<uint16_t>(name), start, end, number, bytes, issue, place, corr);
  r->head.flags = static_cast<uint8_t>(flags);
  publish(r, end ? kDone : kBegun);
  return handle_of(*recorder, index);
}

// span_end(handle, start_ns, end_ns, seq)
PyObject* py_span_end(PyObject*, PyObject* const* args, Py_ssize_t count) {
  const int64_t handle = integer(args, count, 0, 0), start = integer(args, count, 1, 0);
  const int64_t end = integer(args, count, 2, 0), seq = integer(args, count, 3, -1);
  if (misread()) Py_RETURN_NONE;
  if (Record* r = record_of(handle)) {
    r->head.start_ns = start;
    if (seq != -1) (r->head.family == kP2pFamily ? r->p2p.seq : r->collective.seq) = static_cast<uint32_t>(seq);
    complete(r, end);
  }
  Py_RETURN_NONE;
}

// context(stage, microbatch, module, purpose) -> what it was until now
PyObject* py_context(PyObject*, PyObject* const* args, Py_ssize_t count) {
  const Context before = context;
  std::array<int64_t, 4> numbers;
  if (integers(args, count, numbers)) context = context_of(numbers[0], numbers[1], numbers[2], numbers[3]);
  return Py_BuildValue("iiii", before.stage, before.microbatch, before.module, before.purpose);
}

PyObject* py_pass_over(PyObject*, PyObject* what) {
  const long value = PyLong_AsLong(what);
  if (!misread()) passed_over = static_cast<uint8_t>(value);
  this_thread.told = Target();
  Py_RETURN_NONE;
}

PyObject* py_mute(PyObject*, PyObject* muted) {
  const int value = PyObject_IsTrue(muted);
  if (Recorder* recorder = active.load()) recorder->muted = value == 1;
  misread();
  Py_RETURN_NONE;
}

PyObject* py_counters(PyObject*, PyObject*) {  // (records, dropped, errors)
  const Recorder* recorder = active.load() ? active.load() : last.load();
  const unsigned long long records = recorder ? recorder->records() : 0, dropped = recorder ? recorder->dropped() : 0;
  return Py_BuildValue("KKK", records, dropped, static_cast<unsigned long long>(errors.load()));
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

PyObject* py_count_error(PyObject*, PyObject*) {
  errors++;
  Py_RETURN_NONE;
}

PyObject* py_uninstall_collectives(PyObject*, PyObject*) {
  return guarded([] {
    uninstall_collectives();
    Py_RETURN_NONE;
  });
}

// install_modules(torch.nn.Module.__call__, torch.Tensor, what names an unknown module and what is told of the input of
// a forward, or None and None)
PyObject* py_install_modules(PyObject*, PyObject* args) {
  PyObject *function, *tensor, *namer, *noter;
  if (!PyArg_ParseTuple(args, "O!O!OO", &PyFunction_Type, &function, &PyType_Type, &tensor, &namer, &noter))
    return nullptr;
  return guarded([&] {
    const bool every = namer != Py_None;
    install_modules(function, tensor, every ? namer : nullptr, every ? noter : nullptr);
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
  std::map<Counter::Key, double> flops;
  std::map<std::string, uint64_t> missed;
  try {
    stop_counting();
    counter().take(flops, missed);
  } catch (...) {
    errors++;
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

#define FAST(function) reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), METH_FASTCALL
PyMethodDef methods[] = {
    {"open", py_open, METH_VARARGS, "open(folder, limit_bytes)"},
    {"close", py_close, METH_NOARGS, "close()"},
    {"disarm_after_fork", py_disarm_after_fork, METH_NOARGS, "Fall silent, in a forked child"},
    {"intern", py_intern, METH_O, "intern(name) -> id"},
    {"begin", FAST(py_begin), "begin(kind, name, bytes=-1, value=None) -> handle; 0: not recorded"},
    {"end", FAST(py_end), "end(handle, value=None, bytes=-1)"},
    {"put", FAST(py_put), "put(kind, name, start_ns, end_ns, value=None, bytes=-1)"},
    {"mark", FAST(py_mark), "mark(kind, name, value=None, bytes=-1)"},
    {"begin_wait", FAST(py_begin_wait), "begin_wait(name, work or its target) -> handle; 0: not recorded"},
    {"target", py_target, METH_O, "target(work or None) -> what a wait for it waits for, None: unknown"},
    {"stands_for_issued", py_stands_for_issued, METH_O, "This work is of what this thread issued last"},
    {"enter_blocking", py_enter_blocking, METH_NOARGS, "This thread enters a call that waits for what it issues"},
    {"leave_blocking", py_leave_blocking, METH_NOARGS, "It left the innermost of them"},
    {"group", py_group, METH_O, "group(name) -> id of the process group that has this name now"},
    {"number", py_number, METH_O, "number(group name) -> the number of its next collective, which this takes"},
    {"comm", FAST(py_comm), "A communication that c10d does not show; see record.py -> handle; 0: not recorded"},
    {"span", FAST(py_span), "Anything else with its place; see record.py -> handle; 0: not recorded"},
    {"context", FAST(py_context), "context(stage, microbatch, module, purpose) -> what it was until now"},
    {"span_end", FAST(py_span_end), "span_end(handle, start_ns, end_ns, seq)"},
    {"pass_over", py_pass_over, METH_O, "pass_over(0 nothing, 1 calls of c10d, 2 and waits), on this thread"},
    {"mute", py_mute, METH_O, "mute(whether nothing is to be written)"},
    {"counters", py_counters, METH_NOARGS, "() -> (records, dropped, errors)"},
    {"install_collectives", py_install_collectives, METH_VARARGS, "install_collectives({operator: name}, Work)"},
    {"renew_groups", py_renew_groups, METH_NOARGS, "The default group was destroyed: group names begin anew"},
    {"count_error", py_count_error, METH_NOARGS, "Count an error caught by a hook in Python"},
    {"uninstall_collectives", py_uninstall_collectives, METH_NOARGS, ""},
    {"install_modules", py_install_modules, METH_VARARGS, "install_modules(Module.__call__, Tensor, namer, noter)"},
    {"start_counting", py_start_counting, METH_NOARGS, "Count floating-point operations from now on"},
    {"stop_counting", py_stop_counting, METH_NOARGS, "() -> ([(module, part, dtype, flops)], [(operator, calls)])"},
    {"name_module", FAST(py_name_module), "name_module(id(module), name's id; 0: forget it)"},
    {"uninstall_modules", py_uninstall_modules, METH_NOARGS, ""},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "dsprof_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace dsprof

PyMODINIT_FUNC PyInit_dsprof_native() {
  PyObject* module = PyModule_Create(&dsprof::definition);
  if (module) {
    PyModule_AddStringConstant(module, "TORCH_VERSION", DSPROF_TORCH_VERSION);
    PyModule_AddStringConstant(module, "TORCH_GIT", DSPROF_TORCH_GIT);
    PyModule_AddIntConstant(module, "FORMAT_VERSION", dsprof::kFormatVersion);
    PyModule_AddIntConstant(module, "RECORD_BYTES", dsprof::kRecordBytes);
  }
  return module;
}
