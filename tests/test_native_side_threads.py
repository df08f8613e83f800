"""The native helper's own threads: what the job's threads are left with, and what the pulse tells."""

from __future__ import annotations

import subprocess
from pathlib import Path

from captures import compile_program

NONE_LEFT = r"""
#include <cerrno>
#include <chrono>
#include <system_error>
#include "side_thread.hpp"

extern "C" int pthread_create(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*) { return EAGAIN; }

int main() {
  dsprof::SideThread thread;
  bool thrown = false;
  try {
    thread.start([&] { while (!thread.stopped_by(std::chrono::steady_clock::now())) {} });
  } catch (const std::system_error&) {
    thrown = true;
  }
  sigset_t now;
  pthread_sigmask(SIG_SETMASK, nullptr, &now);
  return !thrown || thread.is_started() || sigismember(&now, SIGINT) || sigismember(&now, SIGTERM);
}
"""


def test_where_no_thread_can_be_had_the_jobs_own_still_gets_its_signals(tmp_path: Path) -> None:
    program = compile_program(NONE_LEFT, tmp_path)
    assert subprocess.run([program], timeout=120, check=False).returncode == 0


PULSE = r"""
#include <sys/wait.h>
#include <unistd.h>
#include <chrono>
#include <cstdio>
#include "pulse.hpp"

static const auto began = std::chrono::steady_clock::now();

// A kernel that has this thread wait for a core for a fifth of the time, a little each time that it wakes.
extern "C" ssize_t pread(int, void* text, size_t length, off_t) {
  const std::chrono::nanoseconds passed = std::chrono::steady_clock::now() - began;
  return snprintf(static_cast<char*>(text), length, "0 %lld 0\n", static_cast<long long>(passed.count() / 5));
}

int main() {
  const pid_t pid = fork();
  if (!pid) {
    dsprof::Pulse pulse;
    pulse.start(0.01);
    usleep(3'000'000);
    pulse.stop();
    printf("%.3f\n", pulse.stopped_s());
    return 0;
  }
  usleep(2'000'000);
  kill(pid, SIGSTOP);
  usleep(300'000);
  kill(pid, SIGCONT);
  int status = 1;
  waitpid(pid, &status, 0);
  return status != 0;
}
"""


def test_a_stop_is_told_however_long_the_thread_has_waited_for_cores_before(tmp_path: Path) -> None:
    """0.4 s in 2 s, which is more than the stop of 0.3 s."""
    program = compile_program(PULSE, tmp_path, "-O1")
    done = subprocess.run([program], capture_output=True, text=True, timeout=120, check=True)
    assert 0.15 < float(done.stdout) < 0.6
