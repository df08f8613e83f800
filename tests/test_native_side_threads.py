"""The native helper's own threads: what the job's threads are left with, and what the pulse tells."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dsprof.collectors.native import build

NATIVE = Path(build.__file__).parent

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
    compiler = build._compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    (tmp_path / "none.cpp").write_text(NONE_LEFT)
    command = [*compiler, "-std=c++20", "-pthread", f"-I{NATIVE}", str(tmp_path / "none.cpp"), "-o", "none"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    assert subprocess.run([str(tmp_path / "none")], timeout=120, check=False).returncode == 0
