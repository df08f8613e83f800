// How long the whole process stood still, whatever its threads were doing: stopped by a CPU quota, a signal, a debugger, or
// by the machine that it is a guest of. A thread that does nothing else wakes every few milliseconds. Where it comes late,
// and the kernel does not say that it was ready to run and had no core, nobody in the process could run.

#pragma once

#include <Python.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>

#include "forks.hpp"
#include "python_arguments.hpp"
#include "side_thread.hpp"

namespace dsprof {
namespace {

class Pulse {
 public:
  void start(double every_s) {
    if (thread_.is_started()) return;
    every_ = std::chrono::nanoseconds(static_cast<int64_t>(every_s * 1e9));
    thread_.start([this] { run(); });
  }

  void stop() { thread_.stop(); }

  double stopped_s() const { return stopped_ns_.load(std::memory_order_relaxed) / 1e9; }

 private:
  using Clock = SideThread::Clock;
  static constexpr int READ_EVERY = 10;

  void run() {
    pthread_setname_np(pthread_self(), "dsprof-pulse");  // what it uses is not the rank's work (live/activity.py)
    // Of this thread: ns on a core, ns ready to run without one, turns. Without it a crowded core would look like a stop.
    const int schedstat = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    if (schedstat < 0) return;
    int64_t waited = waited_ns(schedstat);
    for (int wakes = 1;; ++wakes) {
      const auto due = Clock::now() + every_;
      if (thread_.stopped_by(due)) break;
      const int64_t late = std::chrono::nanoseconds(Clock::now() - due).count();
      // To read it costs more than to wake: when it is needed, and often enough that waits for a core do not add up.
      if (late < every_.count() / 2 && wakes % READ_EVERY != 0) continue;
      const int64_t now = waited_ns(schedstat);
      const int64_t without_core = now - waited;
      waited = now;  // what it waits each time adds up, and is none of a later stop
      const int64_t unexplained = late - without_core;
      if (late < every_.count() / 2 || 2 * unexplained <= late) continue;
      // It began at any moment between the last time and when this one was due.
      stopped_ns_.fetch_add(unexplained + every_.count() / 2, std::memory_order_relaxed);
    }
    close(schedstat);
  }

  static int64_t waited_ns(int file) {
    char text[96];
    const ssize_t length = pread(file, text, sizeof text - 1, 0);
    long long on_core = 0, waited = 0;
    if (length <= 0) return 0;
    text[length] = 0;
    return sscanf(text, "%lld %lld", &on_core, &waited) == 2 ? waited : 0;
  }

  std::chrono::nanoseconds every_{0};
  std::atomic<int64_t> stopped_ns_{0};
  SideThread thread_;
};

Pulse& pulse() {
  static PerProcess<Pulse> instance;  // never destroyed: a process may end while its thread runs
  return instance.get();
}

PyObject* py_pulse_start(PyObject*, PyObject* every_s) {
  const double every = PyFloat_AsDouble(every_s);
  if (PyErr_Occurred()) return nullptr;
  return guarded([&] {
    pulse().start(every);
    Py_RETURN_NONE;
  });
}

PyObject* py_pulse_stop(PyObject*, PyObject*) {
  Py_BEGIN_ALLOW_THREADS
  pulse().stop();
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

PyObject* py_pulse_stopped(PyObject*, PyObject*) { return PyFloat_FromDouble(pulse().stopped_s()); }

}  // namespace
}  // namespace dsprof
