"""Rank processes for engine tests: started once, then given one job after the other.

Importing torch and the engine takes seconds; a job takes a few hundredths. So one process imports them, and the ranks
are forked from that; one in which jobs have left threads is replaced. Jobs are functions of a test module, called as
`function(rank, *args)` in a gloo group of as many ranks as asked for, and must leave nothing patched.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from patches import Bindings, bindings, changes

from dsprof.engine.comm.comm import Comm
from dsprof.engine.comm.lane import Inline
from dsprof.engine.hooks import Hooks

PRELOADED: Final = (
    "torch", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.testing",
    "torch.utils.flop_counter", "dsprof.engine.checkpoint", "dsprof.engine.deepspeed.start",
    "dsprof.engine.planner.apply", "dsprof.engine.setup.initialize", "hypothesis", "pytest",
)  # fmt: skip
"""What most jobs would import, torch._dynamo with the first optimizer."""


MANY: Final = 16
"""Threads of a rank between two jobs. A process group has three, of which one wakes 125 times a second as long as
anything refers to the group: what jobs have left took more CPU time than the jobs."""
IDLE_S: Final = 0.5
"""A rank that gets no job for so long collects at once: it may stay idle for minutes, and its threads would not."""


class RankFailed(AssertionError):
    """A rank raised; the text is its traceback."""


class Ranks:
    """Processes that are ranks of small jobs. `close` ends them."""

    def __init__(self, patience: float = 120) -> None:
        """`patience`: seconds after which a rank that has not answered counts as hung."""
        self.patience = patience
        self._started: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        listener = socket.create_server(("127.0.0.1", 0))
        self._port: int = listener.getsockname()[1]
        self._store = dist.TCPStore(
            "127.0.0.1", self._port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._jobs = 0

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function(rank, *args)` returns, of each rank."""
        self._start(world_size)
        self._jobs += 1
        module = Path(sys.modules[function.__module__].__file__ or "").stem
        for rank, (_, pipe) in enumerate(self._started[:world_size]):
            pipe.send((module, function.__qualname__, rank, world_size, self._jobs, args))
        results, failures, lost = [], [], False
        replaced: list[int] = []
        until = time.monotonic() + self.patience
        for rank, (process, pipe) in enumerate(self._started[:world_size]):
            if not pipe.poll(max(0.0, until - time.monotonic())):
                good, value, lost = False, f"rank {rank}: nothing for {self.patience:.0f} seconds", True
            else:
                try:
                    good, value, used_up = pipe.recv()
                    replaced += [rank] if used_up else []
                except EOFError:
                    process.join(10)
                    good, value, lost = False, f"rank {rank}: its process ended with {process.exitcode}", True
            (results if good else failures).append(value)
        if lost:
            self.close()  # and start anew; ranks that have answered are through with the job
        else:
            for rank in replaced:
                self._end(rank)
                self._started[rank] = self._fork()
        if failures:
            raise RankFailed("\n".join(failures))
        return results

    def close(self) -> None:
        for process, _ in self._started:
            process.kill()
        for rank in range(len(self._started)):
            self._end(rank)
        self._started.clear()

    def _end(self, rank: int) -> None:
        process, pipe = self._started[rank]
        process.kill()
        process.join()
        pipe.close()

    def _start(self, world_size: int) -> None:
        while len(self._started) < world_size:
            self._started.append(self._fork())

    def _fork(self) -> tuple[multiprocessing.process.BaseProcess, Connection]:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there, str(Path(__file__).parent), self._port), daemon=True)
        process.start()
        there.close()
        return process, here


def everyone() -> Comm:
    """All ranks of the job."""
    return Comm(dist.group.WORLD, Inline(Hooks()))


def _serve(pipe: Connection, folder: str, port: int) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what is imported stays: no collection need look at it
    sys.path.insert(0, folder)
    store = dist.TCPStore("127.0.0.1", port)
    before: Bindings = []
    known, collected = 0, True
    while True:
        if not collected and not pipe.poll(IDLE_S):
            gc.collect()
            collected = True
        try:
            module, name, rank, world_size, job, args = pipe.recv()
        except EOFError:
            return
        good, value, collected = False, None, False
        try:
            function = getattr(importlib.import_module(module), name)
            dist.init_process_group(
                "gloo", store=dist.PrefixStore(str(job), store), rank=rank, world_size=world_size,
                timeout=timedelta(seconds=60),
            )  # fmt: skip
            try:
                if len(sys.modules) != known:  # else it is as the last job left it, which takes a third of a small job
                    before, known = bindings(), len(sys.modules)
                value = function(rank, *args)
                if dist.is_initialized():
                    dist.barrier()  # a rank that leaves early would cut off one that is still connecting
                left = changes(before)
                assert not left, f"the job left these replaced: {left}"
                good = True
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()
        except BaseException:
            known = 0  # what it has left replaced is not the next one's
            good, value = False, f"rank {rank}:\n{traceback.format_exc()}"
        used_up = _is_used_up()
        with contextlib.suppress(OSError):
            try:
                pipe.send((good, value, used_up))
            except (TypeError, ValueError, AttributeError, RuntimeError, pickle.PicklingError):  # it cannot be sent
                pipe.send((False, f"rank {rank}:\n{traceback.format_exc()}", used_up))
        del value


def _is_used_up() -> bool:
    """Whether jobs have left threads in this process that do not even end with what is garbage by now."""
    if _threads() > MANY:
        gc.collect()
        until = time.monotonic() + 0.05
        while _threads() > MANY:  # those of lanes are told to end, and do so in a moment
            if time.monotonic() > until:
                return True
            time.sleep(0.001)
    return False


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))
