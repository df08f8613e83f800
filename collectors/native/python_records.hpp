// Records that Python writes, and what a thread writes them for.

#pragma once

#include <Python.h>

#include <bit>

#include "call_sites.hpp"
#include "device_times.hpp"
#include "python_arguments.hpp"
#include "recorder.hpp"
#include "waits.hpp"

namespace dsprof {
namespace {

// begin(kind, name, bytes=-1, value=None) -> handle
PyObject* py_begin(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Hook hook(true);
  const int64_t kind = integer(args, count, 0, 0), name = integer(args, count, 1, 0);
  const int64_t bytes = integer(args, count, 2, -1);
  const double value = value_of(args, count, 3);
  if (misread() || (kind == kWait && passed_over == kCallsAndWaits)) return PyLong_FromLong(0);
  Recorder* recorder = active.load(std::memory_order_acquire);
  uint64_t index = 0;
  Record* r = recorder ? claim_for_python(*recorder, &index) : nullptr;
  if (!r) return PyLong_FromLong(0);
  fill(r, static_cast<uint8_t>(kind), static_cast<uint16_t>(name), now_ns(), 0, value, bytes);
  publish(r, kBegun);
  if (kind == kPhase) device_times().begin(r);
  return handle_of(*recorder, index);
}

// end(handle, value=None, bytes=-1): value and bytes are set where given
PyObject* py_end(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Hook hook;
  const int64_t now = now_ns(), handle = integer(args, count, 0, 0);
  const double value = value_of(args, count, 1);
  const int64_t bytes = integer(args, count, 2, -1);
  if (misread()) Py_RETURN_NONE;
  if (Record* r = record_of(handle)) {
    if (count > 1 && args[1] != Py_None) r->span.value = value;
    if (bytes != -1) r->span.bytes = bytes;
    device_times().end(r);
    complete(r, now);
  }
  Py_RETURN_NONE;
}

// put(kind, name, start_ns, end_ns, value=None, bytes=-1)
PyObject* py_put(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Hook hook;
  const int64_t kind = integer(args, count, 0, 0), name = integer(args, count, 1, 0);
  const int64_t start = integer(args, count, 2, 0), end = integer(args, count, 3, 0);
  const double value = value_of(args, count, 4);
  const int64_t bytes = integer(args, count, 5, -1);
  if (misread()) Py_RETURN_NONE;
  if (Recorder* recorder = active.load(std::memory_order_acquire)) wait_for_chunk(*recorder);
  put(static_cast<uint8_t>(kind), static_cast<uint16_t>(name), start, end, value, bytes);
  Py_RETURN_NONE;
}

// mark(kind, name, value=None, bytes=-1): an instant, now
PyObject* py_mark(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Hook hook;
  const int64_t kind = integer(args, count, 0, 0), name = integer(args, count, 1, 0);
  const double value = value_of(args, count, 2);
  const int64_t bytes = integer(args, count, 3, -1), now = now_ns();
  if (misread()) Py_RETURN_NONE;
  if (Recorder* recorder = active.load(std::memory_order_acquire)) wait_for_chunk(*recorder);
  put(static_cast<uint8_t>(kind), static_cast<uint16_t>(name), now, now, value, bytes);
  Py_RETURN_NONE;
}

Context context_of(int64_t stage, int64_t microbatch, int64_t module, int64_t purpose) {
  return {static_cast<int16_t>(stage), static_cast<int16_t>(microbatch), static_cast<uint16_t>(module),
          static_cast<uint16_t>(purpose)};
}

// comm(kind, name, start_ns, end_ns, issue_ns, bytes, group, seq, peer, dtype, flags, stage, microbatch, module,
// purpose) -> handle
PyObject* py_comm(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Hook hook(true);
  std::array<int64_t, 15> numbers;
  if (!integers(args, count, numbers)) return PyLong_FromLong(0);
  const auto [kind, name, start, end, issue, bytes, group, seq, peer, dtype, flags, stage, microbatch, module,
              purpose] = numbers;
  Recorder* recorder = active.load(std::memory_order_acquire);
  uint64_t index = 0;
  Record* r = recorder ? claim_for_python(*recorder, &index) : nullptr;
  if (!r) return PyLong_FromLong(0);
  const Target target{static_cast<uint16_t>(name), static_cast<uint16_t>(group), static_cast<uint32_t>(seq),
                      static_cast<int16_t>(peer), -1, peer != -1};
  fill_comm(r, static_cast<uint8_t>(kind), target, start, end, issue, bytes, static_cast<uint8_t>(dtype),
            context_of(stage, microbatch, module, purpose));
  r->head.flags = static_cast<uint8_t>(flags);
  if (kind == kComm) {
    call_sites().note(*recorder, target.name, bytes, static_cast<uint8_t>(dtype), issue);
    this_thread.told = target;
  }
  publish(r, end ? kDone : kBegun);
  return handle_of(*recorder, index);
}

// span(kind, name, start_ns, end_ns, issue_ns, value, bytes, flags, lane, stage, microbatch, module, purpose, corr=-1,
// site=0) -> handle
PyObject* py_span(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Hook hook(true);
  std::array<int64_t, 13> numbers;
  if (!integers(args, count, numbers, 5, 2)) return PyLong_FromLong(0);
  const double number = value_of(args, count, 5);
  const int64_t corr = integer(args, count, 13, -1), site = integer(args, count, 14, 0);
  if (misread()) return PyLong_FromLong(0);
  const auto [kind, name, start, end, issue, value, bytes, flags, lane, stage, microbatch, module, purpose] = numbers;
  Recorder* recorder = active.load(std::memory_order_acquire);
  uint64_t index = 0;
  Record* r = recorder ? claim_for_python(*recorder, &index) : nullptr;
  if (!r) return PyLong_FromLong(0);
  const Place place{static_cast<uint16_t>(lane), context_of(stage, microbatch, module, purpose)};
  fill(r, static_cast<uint8_t>(kind), static_cast<uint16_t>(name), start, end, number, bytes, issue, place, corr);
  r->head.flags = static_cast<uint8_t>(flags);
  if (r->head.family == kSpanFamily) r->span.site = static_cast<uint16_t>(site);
  publish(r, end ? kDone : kBegun);
  if (kind == kPhase && !end) device_times().begin(r);  // what is told at its end alone, its stream is beyond
  return handle_of(*recorder, index);
}

// span_end(handle, start_ns, end_ns, seq)
PyObject* py_span_end(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Hook hook;
  const int64_t handle = integer(args, count, 0, 0), start = integer(args, count, 1, 0);
  const int64_t end = integer(args, count, 2, 0), seq = integer(args, count, 3, -1);
  if (misread()) Py_RETURN_NONE;
  if (Record* r = record_of(handle)) {
    r->head.start_ns = start;
    if (seq != -1) (r->head.family == kP2pFamily ? r->p2p.seq : r->collective.seq) = static_cast<uint32_t>(seq);
    device_times().end(r);
    complete(r, end);
  }
  Py_RETURN_NONE;
}

// To Python a context is a number, the bytes that it has here.
PyObject* number_of(const Context& value) { return PyLong_FromUnsignedLongLong(std::bit_cast<uint64_t>(value)); }

// make_context(stage, microbatch, module, purpose) -> for set_context
PyObject* py_make_context(PyObject*, PyObject* const* args, Py_ssize_t count) {
  std::array<int64_t, 4> numbers;
  if (!integers(args, count, numbers)) return number_of(Context());
  const auto [stage, microbatch, module, purpose] = numbers;
  return number_of(context_of(stage, microbatch, module, purpose));
}

PyObject* py_context(PyObject*, PyObject*) { return number_of(context); }

PyObject* py_set_context(PyObject*, PyObject* given) {
  const uint64_t number = PyLong_AsUnsignedLongLong(given);
  if (!misread()) context = std::bit_cast<Context>(number);
  Py_RETURN_NONE;
}

PyObject* py_pass_over(PyObject*, PyObject* what) {
  const long value = PyLong_AsLong(what);
  if (!misread()) passed_over = static_cast<uint8_t>(value);
  this_thread.told = Target();
  Py_RETURN_NONE;
}

}  // namespace
}  // namespace dsprof
