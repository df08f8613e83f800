"""What a process uses: files, files mapped into memory, connections. dsprof's own threads in it are not its work."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsprof.live.activity import (
    BUSY_BYTES,
    LONGEST_NAME,
    Activity,
    Moved,
    Usage,
    bytes_between,
    kernel_children,
    name_thread,
    usage,
)
from dsprof.live.sockets import Carried, connections

SIZE = 8 << 20
tells_bytes = pytest.mark.skipif(not os.access("/proc/self/io", os.R_OK), reason="the kernel does not tell bytes")


def own_usage() -> Usage:
    found = usage(os.getpid(), 0.0)
    assert found is not None
    return found


def used_by(work: Callable[[], object]) -> int:
    """Bytes that this process has used when that is done."""
    before = own_usage()
    work()
    return bytes_between([before, own_usage()])


def used_by_a_thread(name: str) -> int:
    """Bytes that this process has used when a thread of that name has written some, and lives on."""
    wrote, over = threading.Event(), threading.Event()

    def work() -> None:
        if name:
            name_thread(name)
        with open(os.devnull, "wb") as file:
            file.write(bytes(SIZE))
        wrote.set()
        over.wait()

    thread = threading.Thread(target=work, daemon=True)

    def until_it_wrote() -> None:
        thread.start()
        wrote.wait()

    used = used_by(until_it_wrote)
    over.set()
    thread.join()
    return used


def on_disk(path: Path) -> None:
    """A file of zeros, of which nothing is in memory."""
    with open(path, "wb") as file:
        file.write(bytes(SIZE))
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@tells_bytes
def test_what_our_own_threads_use_is_no_work() -> None:
    assert used_by_a_thread("") >= SIZE
    assert used_by_a_thread("dsprof-watchdog") < SIZE
    assert used_by_a_thread("loader") >= SIZE


@tells_bytes
def test_what_is_read_by_a_system_call_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "data"
    on_disk(path)
    assert SIZE <= used_by(path.read_bytes) < 2 * SIZE


@tells_bytes
def test_a_file_that_is_mapped_into_memory_counts(tmp_path: Path) -> None:
    path = tmp_path / "data"
    on_disk(path)

    def load() -> None:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            assert sum(mapped[at] for at in range(0, SIZE, mmap.PAGESIZE)) == 0

    before = own_usage().files
    used = used_by(load)
    if own_usage().files.from_storage - before.from_storage < SIZE:
        pytest.skip("this file system does not say what it reads, or has it in memory")
    assert used >= SIZE


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the kernel does not tell connections")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_what_a_connection_carries_counts(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"no {host} here")
    with listening, socket.create_connection(listening.getsockname()[:2]) as one:
        other, _ = listening.accept()
        with other:
            if os.fstat(one.fileno()).st_ino not in connections():
                pytest.skip("the kernel does not tell what connections carry")

            def download() -> None:
                thread = threading.Thread(target=one.sendall, args=(bytes(SIZE),))
                thread.start()
                left = SIZE
                while left:
                    left -= len(other.recv(left))
                thread.join()

            used = used_by(download)  # as the one who sends, and as the one who receives
    assert 2 * SIZE <= used < 3 * SIZE


def sample(at_s: float, carried: dict[int, Carried], files: Moved | None = None) -> Usage:
    return Usage(at_s, 0.0, files or Moved(), carried, frozenset({1}))


def test_connections_that_come_and_go() -> None:
    samples = [
        sample(0, {7: Carried(1000, 0), 8: Carried(50, 0)}),
        sample(1, {7: Carried(1200, 10)}),
        sample(2, {}),  # as where the kernel does not answer
        sample(3, {7: Carried(1500, 10), 9: Carried(4000, 0)}),
        sample(4, {7: Carried(20, 0)}),  # another one, with the number of one that is closed
    ]
    assert bytes_between(samples) == 200 + 10 + 300 + 4000


def test_a_kernel_that_did_not_answer_at_first_makes_no_connection_new() -> None:
    assert bytes_between([sample(0, {}), sample(1, {7: Carried(10**9, 0)}), sample(2, {7: Carried(10**9 + 5, 0)})]) == 5


def test_of_each_direction_the_largest_counter_counts() -> None:
    now = Moved(read=100, written=7, from_storage=400, to_storage=3)
    assert bytes_between([sample(0, {}), sample(1, {}, now)]) == 407
    with_connection = [sample(0, {7: Carried(0, 0)}), sample(1, {7: Carried(500, 2)}, now)]
    assert bytes_between(with_connection) == 507


@pytest.mark.parametrize(("a_second", "works"), [(BUSY_BYTES // 2, False), (2 * BUSY_BYTES, True)])
def test_a_process_that_only_receives_works(a_second: int, works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    activity = Activity(os.getpid())
    monkeypatch.setattr(
        "dsprof.live.activity.usage", lambda process, at_s: sample(at_s, {7: Carried(10**6 + int(at_s) * a_second, 0)})
    )
    for at_s in range(10):
        activity.sample(float(at_s))
    assert activity.works(4.0) is works


@pytest.mark.skipif(not os.access("/proc/self/task", os.R_OK), reason="the kernel does not tell children")
def test_where_the_kernel_has_the_children() -> None:
    # Of a shell, not of this process: earlier tests may have left children here (a multiprocessing fork server).
    with subprocess.Popen(["sh", "-c", "(sleep 1000 & wait) & wait"]) as shell:
        until = time.monotonic() + 10
        found: list[dict[str, Any]] = []
        while [one["name"] for one in found] != ["sh", "sleep"] and time.monotonic() < until:
            found = kernel_children(shell.pid)
        for child in {shell.pid, *(one["task"] for one in found)}:
            os.kill(child, signal.SIGKILL)
    assert [one["name"] for one in found] == ["sh", "sleep"]
    assert {one["task"] for one in found}.isdisjoint({shell.pid})


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
