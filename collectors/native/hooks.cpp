// The native helper: a CPython module, built by build.py for one torch and one Python.
//
//     layout.hpp       the record, made by layout.py from dsprof/ondisk.py
//     recorder.hpp     writing records:  chunks.hpp  names.hpp  counters.hpp; permissions.hpp: the modes of their files
//     hook_time.hpp    what hooks take of the job
//     forks.hpp        what a forked child finds anew; observers.hpp: what it has of its parent's
//     collectives.hpp  the hooks on c10d; gloo_ends.hpp: when gloo begins and ends; groups.hpp: process groups
//     waits.hpp        what a wait waits for
//     backward.hpp     when a backward pass is over
//     modules.hpp      the hook on torch.nn.Module; calls.hpp: which call made a node of the autograd graph
//     flops.hpp        the operations of a step
//     device_times.hpp what a device's streams did when, by events; device_issue.hpp: when it did a communication;
//                      graph_capture.hpp: whether a stream is captured into a CUDA graph
//     syncs.hpp        where the host waits for a device; call_sites.hpp: what issues collectives; sites.hpp: lines
//     side_thread.hpp  threads of its own: lock_watch.hpp: stacks where no Python can run
//                      pulse.hpp: how long the whole process stood still
//     python_*.hpp     what Python may call: the table below
//
// Nothing here may change what the training job does: every error of ours is caught and counted.

#include <Python.h>

#include "lock_watch.hpp"
#include "pulse.hpp"
#include "python_capture.hpp"
#include "python_communication.hpp"
#include "python_device.hpp"
#include "python_modules.hpp"
#include "python_records.hpp"
#include "python_sites.hpp"

namespace dsprof {
namespace {

#define FAST(function) reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), METH_FASTCALL
PyMethodDef methods[] = {
    // the capture: python_capture.hpp
    {"open", py_open, METH_VARARGS, "open(folder, limit_bytes, copied, patience_s, mode): of the files, 0600 without"},
    {"close", py_close, METH_NOARGS, "close()"},
    {"disarm_after_fork", py_disarm_after_fork, METH_NOARGS, "Fall silent, in a forked child"},
    {"time_hooks", py_time_hooks, METH_O, "time_hooks(on) -> (ns in hooks, calls from Python), since it was turned on"},
    {"mute", py_mute, METH_O, "mute(whether nothing is to be written)"},
    {"intern", py_intern, METH_O, "intern(name) -> id"},
    {"counters", py_counters, METH_NOARGS, "() -> (records, dropped, errors)"},
    {"note_error", py_note_error, METH_VARARGS, "note_error(hook, said): count an error caught by a hook in Python"},
    {"failures", py_failures, METH_NOARGS, "() -> [(hook, how often, what its first error said)]"},
    {"count_step", py_count_step, METH_NOARGS, "The training thread has taken a step"},
    // records: python_records.hpp
    {"begin", FAST(py_begin), "begin(kind, name, bytes=-1, value=None) -> handle; 0: not recorded"},
    {"end", FAST(py_end), "end(handle, value=None, bytes=-1)"},
    {"put", FAST(py_put), "put(kind, name, start_ns, end_ns, value=None, bytes=-1)"},
    {"mark", FAST(py_mark), "mark(kind, name, value=None, bytes=-1)"},
    {"comm", FAST(py_comm), "A communication that c10d does not show; see record.py -> handle; 0: not recorded"},
    {"span", FAST(py_span), "Anything else with its place; see record.py -> handle; 0: not recorded"},
    {"span_end", FAST(py_span_end), "span_end(handle, start_ns, end_ns, seq)"},
    {"make_context", FAST(py_make_context), "make_context(stage, microbatch, module, purpose) -> for set_context"},
    {"context", py_context, METH_NOARGS, "() -> what this thread calls c10d for"},
    {"set_context", py_set_context, METH_O, "set_context(what this thread calls c10d for from now on)"},
    {"pass_over", py_pass_over, METH_O, "pass_over(0 nothing, 1 calls of c10d, 2 and waits), on this thread"},
    // communications and waits: python_communication.hpp
    {"group", py_group, METH_O, "group(name) -> id of the process group that has this name now"},
    {"number", py_number, METH_O, "number(group name) -> the number of its next collective, which this takes"},
    {"begin_wait", FAST(py_begin_wait), "begin_wait(name, work or its target) -> handle; 0: not recorded"},
    {"target", py_target, METH_O, "target(work or None) -> what a wait for it waits for, None: unknown"},
    {"stands_for_issued", py_stands_for_issued, METH_O, "This work is of what this thread issued last"},
    {"enter_blocking", py_enter_blocking, METH_NOARGS, "This thread enters a call that waits for what it issues"},
    {"leave_blocking", py_leave_blocking, METH_NOARGS, "It left the innermost of them"},
    {"install_collectives", py_install_collectives, METH_VARARGS, "install_collectives({operator: name}, Work)"},
    {"renew_groups", py_renew_groups, METH_NOARGS, "The default group was destroyed: group names begin anew"},
    {"uninstall_collectives", py_uninstall_collectives, METH_NOARGS, ""},
    // modules: python_modules.hpp
    {"install_modules", py_install_modules, METH_VARARGS, "install_modules(Module.__call__, Tensor, namer, noter, check)"},
    {"start_counting", py_start_counting, METH_NOARGS, "Count floating-point operations from now on"},
    {"stop_counting", py_stop_counting, METH_NOARGS, "() -> ([(module, part, dtype, flops)], [(operator, calls)])"},
    {"name_module", FAST(py_name_module), "name_module(id(module), name's id; 0: forget it)"},
    {"uninstall_modules", py_uninstall_modules, METH_NOARGS, ""},
    // a device: python_device.hpp
    {"start_device", py_start_device, METH_VARARGS, "start_device(device, [ids of the phases that are timed])"},
    {"stop_device", py_stop_device, METH_NOARGS, "Time it no more"},
    {"communications_in_graphs", py_communications_in_graphs, METH_NOARGS, "communications that graphs have captured"},
    {"collect_device", py_collect_device, METH_NOARGS, "Complete what is over -> how much is not"},
    {"begin_on_stream", FAST(py_begin_on_stream), "begin_on_stream(key, name): the current stream begins to wait"},
    {"end_on_stream", py_end_on_stream, METH_O, "end_on_stream(key): it has waited"},
    {"begin_coalescing", py_begin_coalescing, METH_NOARGS, "what this thread issues is begun together, later"},
    {"issue_coalesced", py_issue_coalesced, METH_NOARGS, "it has all been given, and is issued now"},
    {"end_coalescing", py_end_coalescing, METH_NOARGS, "it has been issued"},
    // lines of the script: python_sites.hpp
    {"pass_over_sites", py_pass_over_sites, METH_VARARGS, "pass_over_sites(beginnings of files, standard library)"},
    {"install_syncs", py_install_syncs, METH_NOARGS, "record every operator that waits for a device"},
    {"uninstall_syncs", py_uninstall_syncs, METH_NOARGS, ""},
    {"install_call_sites", py_install_call_sites, METH_VARARGS, "mark the lines of collectives (first, every, most)"},
    {"uninstall_call_sites", py_uninstall_call_sites, METH_NOARGS, ""},
    // where no Python can run: lock_watch.hpp
    {"lock_watch_start", py_lock_watch_start, METH_VARARGS, "lock_watch_start(file, seconds, every): write stacks unless fed"},
    {"lock_watch_feed", py_lock_watch_feed, METH_O, "lock_watch_feed(identity of the thread that trains)"},
    {"lock_watch_stop", py_lock_watch_stop, METH_NOARGS, ""},
    // whether the process runs at all: pulse.hpp
    {"pulse_start", py_pulse_start, METH_O, "pulse_start(seconds): look so often from now on"},
    {"pulse_stop", py_pulse_stop, METH_NOARGS, ""},
    {"pulse_stopped", py_pulse_stopped, METH_NOARGS, "seconds for which the whole process stood still so far"},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "dsprof_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace dsprof

PyMODINIT_FUNC PyInit_dsprof_native() {
  dsprof::watch_forks<&dsprof::fall_silent>();
  PyObject* module = PyModule_Create(&dsprof::definition);
  if (module) {
    PyModule_AddStringConstant(module, "TORCH_VERSION", DSPROF_TORCH_VERSION);
    PyModule_AddStringConstant(module, "TORCH_GIT", DSPROF_TORCH_GIT);
    PyModule_AddIntConstant(module, "FORMAT_VERSION", dsprof::kFormatVersion);
    PyModule_AddIntConstant(module, "RECORD_BYTES", dsprof::kRecordBytes);
  }
  return module;
}
