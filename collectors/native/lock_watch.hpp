// Writes the Python stacks of all threads where nobody can take the interpreter's lock: one thread is in native code and
// does not give it up. The rank's watchdog (collectors/failures/watchdog.py) feeds this as long as it can run. It is what
// faulthandler.dump_traceback_later does; that has one timer a process, which may be the job's own.

#pragma once

#include <Python.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <string>

#include "forks.hpp"
#include "permissions.hpp"
#include "python_arguments.hpp"
#include "side_thread.hpp"

namespace dsprof {
namespace {

class LockWatch {
 public:
  // Looks every `every_s` whether it was fed; writes to `path` when it has not been for `timeout_s`.
  void start(std::string path, double timeout_s, double every_s) {
    if (thread_.is_started()) return;
    // Not in any header: without it, or where a later Python hides it, there are no stacks.
    dump_ = reinterpret_cast<Dump>(dlsym(RTLD_DEFAULT, "_Py_DumpTracebackThreads"));
    if (!dump_) return;
    path_ = std::move(path);
    timeout_s_ = timeout_s;
    every_s_ = every_s;
    interpreter_ = PyInterpreterState_Main();
    thread_.start([this] { run(); });
  }

  void feed(unsigned long training) {
    training_ = training;
    fed_ = true;
  }

  void stop() { thread_.stop(); }

 private:
  using Dump = const char* (*)(int, PyInterpreterState*, PyThreadState*);
  using Clock = SideThread::Clock;

  void run() {
    pthread_setname_np(pthread_self(), "dsprof-locks");  // what it uses is not the rank's work (live/activity.py)
    double silent_s = 0;
    bool written = false;
    auto looked = Clock::now();
    const auto every = std::chrono::nanoseconds(static_cast<int64_t>(every_s_ * 1e9));
    while (!thread_.stopped_by(Clock::now() + every)) {
      const auto now = Clock::now();
      // A process that was stopped, or a host that slept, has not been silent in between.
      silent_s += std::min(std::chrono::duration<double>(now - looked).count(), 2 * every_s_);
      looked = now;
      if (fed_.exchange(false)) {
        silent_s = 0;
        written = false;
      } else if (silent_s >= timeout_s_ && !written) {
        written = true;
        write();
      }
    }
  }

  void write() const {
    const int file = open(path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, file_mode());
    if (file < 0) return;
    give_mode(file);
    dprintf(file, "# training thread 0x%016lx\n", training_.load());
    dump_(file, interpreter_, nullptr);
    close(file);
  }

  std::atomic<bool> fed_{true};
  std::atomic<unsigned long> training_{0};
  std::string path_;
  double timeout_s_ = 0, every_s_ = 0;
  Dump dump_ = nullptr;
  PyInterpreterState* interpreter_ = nullptr;
  SideThread thread_;
};

LockWatch& lock_watch() {
  static PerProcess<LockWatch> instance;  // never destroyed: a process may end while its thread runs
  return instance.get();
}

PyObject* py_lock_watch_start(PyObject*, PyObject* args) {
  const char* path;
  double timeout_s, every_s;
  if (!PyArg_ParseTuple(args, "sdd", &path, &timeout_s, &every_s)) return nullptr;
  return guarded([&] {
    lock_watch().start(path, timeout_s, every_s);
    Py_RETURN_NONE;
  });
}

PyObject* py_lock_watch_feed(PyObject*, PyObject* training) {
  lock_watch().feed(PyLong_AsUnsignedLongMask(training));
  misread();
  Py_RETURN_NONE;
}

PyObject* py_lock_watch_stop(PyObject*, PyObject*) {
  Py_BEGIN_ALLOW_THREADS
  lock_watch().stop();
  Py_END_ALLOW_THREADS
  Py_RETURN_NONE;
}

}  // namespace
}  // namespace dsprof
