"""What a process uses: dsprof's own threads in it are not its work."""

from __future__ import annotations

import os
import threading

import pytest

from dsprof.live.activity import LONGEST_NAME, name_thread, usage

WRITTEN = 8 << 20


def used_by_a_thread(name: str) -> int:
    """Bytes that this process has used when a thread of that name has written some, and lives on."""
    before = usage(os.getpid(), 0.0)
    wrote, over = threading.Event(), threading.Event()

    def work() -> None:
        if name:
            name_thread(name)
        with open(os.devnull, "wb") as file:
            file.write(bytes(WRITTEN))
        wrote.set()
        over.wait()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    wrote.wait()
    after = usage(os.getpid(), 1.0)
    over.set()
    thread.join()
    assert before is not None
    assert after is not None
    return after.bytes - before.bytes


@pytest.mark.skipif(not os.access("/proc/self/io", os.R_OK), reason="the kernel does not tell bytes")
def test_what_our_own_threads_use_is_no_work() -> None:
    assert used_by_a_thread("") >= WRITTEN
    assert used_by_a_thread("dsprof-watchdog") < WRITTEN
    assert used_by_a_thread("loader") >= WRITTEN


def test_a_thread_has_its_name_for_whoever_lists_threads() -> None:
    said = []

    def work() -> None:
        name_thread("dsprof-a-name-that-is-too-long")
        with open(f"/proc/self/task/{threading.get_native_id()}/comm") as file:
            said.append(file.read())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert said == ["dsprof-a-name-that-is-too-long"[:LONGEST_NAME] + "\n"]
