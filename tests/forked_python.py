"""Python programs that begin with torch imported: `run` is `subprocess.run` for them.

A rank that trains a toy spends nine tenths of its life importing torch. So one process imports it, and forks itself for
each program it is asked for, a script or a module. What such a program starts in turn comes from there as well: the
agent of `dsprof run`, and its ranks. A program has its own arguments, environment, streams, working directory and
session; it is armed where it would be, at the end of torch's import; and it ends as an interpreter does. Different are
its parent, which is the process that forks, its process group, what is read from the environment before that point, and
that what was imported before it is not taken apart at its end (`Ending`): a program for which that matters (a
`sitecustomize` on PYTHONPATH, glibc's settings, a function before the start) gets an interpreter of its own, and so
does all of a command that `run` is told to start `fresh`.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

SOCKET: Final = "FORKED_PYTHON_SOCKET"
"""Where the process that forks listens: a name that is no file's."""
MODULES_ONLY: Final = "FORKED_PYTHON_MODULES_ONLY"
"""Set, scripts get an interpreter of their own: ranks that import no torch."""
PRELOADED: Final = (
    "numpy", "torch", "torch._dynamo", "torch.distributed.run", "torch.utils.data", "pandas", "scipy.special", "typer",
    "dsprof.cli.run", "dsprof.launch.conclude", "dsprof.analyzer", "dsprof.trace", "dsprof.reports.terminal",
    "typer._adapters", "pydantic.type_adapter", "concurrent.futures.process", "dsprof.trace.process_pool",
    "dsprof.live.kernel_waits", "dsprof.reports.diffs", "dsprof.analyzer.rules.registry", "dsprof.fix",
    "dsprof.engine.config", "scipy.optimize", "dsprof.collectors.native.build",
)  # fmt: skip
"""torch._dynamo comes with the first optimizer; what follows torch.utils.data is what `dsprof run` imports."""
PR_SET_PDEATHSIG: Final = 1
STACKS: Final = signal.SIGRTMAX
"""A forked program that gets it writes the stacks of its threads to its stderr, and goes on."""
OPTIONS: Final = ("-u", "-P")
PATH, AUTOLOAD = "PYTHONPATH", "TORCH_DEVICE_BACKEND_AUTOLOAD"
READ_EARLY: Final = (
    "PYTHON", "LD_", "MALLOC_", "GLIBC_", "TORCH_", "MKL_", "KMP_", "GOMP_", "KINETO_",
    "DSPROF_ENGINE",
)  # fmt: skip
"""Variables whose names begin so are read before torch is imported, or by it."""
IGNORED: Final = (PATH, AUTOLOAD, "TORCH_NCCL_", "KINETO_LOG_LEVEL")
"""Of those: the first two are done here, nothing reads the third, and the last, which `dsprof run` sets, is set."""

STARTED_WITH: Final = dict(os.environ)
"""The environment before any test has changed it: the process that forks is started by the first that asks, for all."""


class ForkedPopen(subprocess.Popen[Any]):
    """A Popen whose process is forked from the one with torch where the command allows it, else a usual one."""

    _status: socket.socket | None = None
    """Its wait status comes here."""

    def _execute_child(  # type: ignore[no-untyped-def]  # as subprocess names them
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
        start_new_session, process_group,
    ) -> None:  # fmt: skip
        environment = dict(os.environ if env is None else env)
        words = program(args, environment)
        placed = pass_fds or process_group != -1 or (preexec_fn and not ends_with_launcher(preexec_fn))
        if shell or placed or words is None:
            super()._execute_child(  # type: ignore[misc]
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, restore_signals, gid, gids, uid, umask,
                start_new_session, process_group,
            )  # fmt: skip
            return
        asked = {
            "words": words, "command": list(map(str, args)), "env": environment, "cwd": os.path.abspath(cwd or "."),
            "session": start_new_session, "parent": os.getpid(), "umask": umask if umask != -1 else umask_here(),
        }  # fmt: skip
        streams = [given if given != -1 else usual for usual, given in enumerate((p2cread, c2pwrite, errwrite))]
        self._status = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._status.connect(f"\0{environment[SOCKET]}")
        with os.fdopen(os.memfd_create("asked"), "w") as file:  # an environment may be long for a message
            json.dump(asked, file)
            file.flush()
            socket.send_fds(self._status, [b"run"], [*streams, file.fileno()])
        self.pid = int(self._status.recv(64))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._status is None:
            waited: tuple[int, int] = super()._try_wait(wait_flags)  # type: ignore[misc]
            return waited
        with contextlib.suppress(BlockingIOError):
            # Empty: the process that forks has ended, and all its children with it.
            told = self._status.recv(64, socket.MSG_DONTWAIT if wait_flags & os.WNOHANG else 0)
            self._status.close()
            return self.pid, int(told or signal.SIGKILL)
        return 0, 0

    def _internal_poll(self, _deadstate: int | None = None, **waits: Any) -> int | None:
        if self._status is None:
            return super()._internal_poll(_deadstate, **waits)  # type: ignore[misc,no-any-return]
        return super()._internal_poll(_deadstate, _waitpid=lambda _, flags: self._try_wait(flags))  # type: ignore[misc,no-any-return]


def program(args: Any, environment: dict[str, str]) -> list[str] | None:
    """Of `[python, options, script or -m module or -c code, arguments]` what follows the options; None where it is no
    program that can be forked."""
    if SOCKET not in environment or isinstance(args, (str, bytes, os.PathLike)) or str(args[0]) != sys.executable:
        return None
    if any(value != STARTED_WITH.get(name) for name, value in read_early(environment).items()):
        return None
    words = list(map(str, args[1:]))
    while words and words[0] in OPTIONS:
        words.pop(0)
    if not words or (words[0].startswith("-") and words[0] not in ("-m", "-c")):
        return None
    if environment.get(MODULES_ONLY) and words[0] not in ("-m", "-c"):
        return None
    if any(Path(entry, "sitecustomize.py").exists() for entry in environment.get(PATH, "").split(os.pathsep)):
        return None
    return words


def read_early(environment: Mapping[str, str]) -> dict[str, str]:
    """Of these variables those that are read before torch is imported, or by it."""
    return {
        name: value for name, value in environment.items()
        if name.startswith(READ_EARLY) and not name.startswith(IGNORED)
    }  # fmt: skip


@contextlib.contextmanager
def read_early_as_before() -> Iterator[None]:
    """Afterwards these variables of this process are what they are now."""
    before = read_early(os.environ)
    yield
    for name in read_early(os.environ).keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def umask_here() -> int:
    """This process's; the system's call for it would set another."""
    said = Path("/proc/self/status").read_text()
    return int(said.partition("\nUmask:")[2].split(maxsplit=1)[0], 8)


def ends_with_launcher(before: Any) -> bool:
    """Whether `before`, which is to be called in the child, only has it end when the launcher does."""
    return isinstance(before, functools.partial) and before.func.__name__ == "end_with"


def start(command: Sequence[str], *, env: Mapping[str, str], fresh: bool = False, **options: Any) -> ForkedPopen:
    """`subprocess.Popen` with text for a Python program; `fresh`: it and all that it starts are new interpreters."""
    place = {} if fresh else {SOCKET: _forking.listening()}
    return ForkedPopen(command, env={**env, **place}, text=True, **options)


def run(
    command: Sequence[str], *, timeout: float = 240, capture_output: bool = False, check: bool = False, **options: Any
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run`, with what `start` takes."""
    if capture_output:
        options.update(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with start(command, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


class _Forking:
    """The process that forks for this one. It is started for the first that asks, and ends with this one."""

    def __init__(self) -> None:
        self._name = ""
        """The socket it listens on; empty: there is none."""
        self._open: Any = None
        """It, and the end of a pipe that is open as long as this process lives."""

    def listening(self) -> str:
        if self._name:
            return self._name
        name = f"forked-python-{uuid.uuid4()}"
        kept = {name: value for name, value in STARTED_WITH.items() if not name.startswith("DSPROF")}
        alive, ours = os.pipe()
        process = subprocess.Popen(
            [sys.executable, __file__, name, str(alive)],
            # Of pyarrow, which pandas imports, the allocator would start a thread.
            env={**kept, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "KINETO_LOG_LEVEL": "6",
                 "JE_ARROW_MALLOC_CONF": "background_thread:false"},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, pass_fds=(alive,),
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        os.close(alive)
        self._name, self._open = name, (process, ours)
        return name

    def ask_for_stacks(self) -> None:
        if self._name:
            forker = self._open[0].pid
            with contextlib.suppress(OSError):  # what has ended has nothing to tell
                for pid in Path(f"/proc/{forker}/task/{forker}/children").read_text().split():
                    os.kill(int(pid), STACKS)

    def end(self) -> None:
        if self._name:
            process, ours = self._open
            process.kill()
            process.communicate()
            os.close(ours)
            self._name, self._open = "", None


_forking = _Forking()


def ask_for_stacks() -> None:
    """Have all that was forked for this process write where its threads are to its stderr."""
    _forking.ask_for_stacks()


def end_all() -> None:
    """End all that was forked for this process; the next program has another to be forked from."""
    _forking.end()


class Forker:
    """The process that forks. It has one thread, so that a child has all that it had."""

    def __init__(self, name: str, alive: int) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{name}")
        self._listener.listen(64)
        self._alive = alive
        """Can be read when the test process has ended."""
        self._running: dict[int, tuple[int, int, socket.socket]] = {}
        """By pidfd: pid, that of who asked, and where its status is told."""
        self._poll = select.epoll()
        for fd in (self._listener.fileno(), alive):
            self._poll.register(fd, select.EPOLLIN)

    def serve(self) -> dict[str, Any] | None:
        """Fork for whoever asks. Returns in each child, what was asked for; and None when the tests are over."""
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._alive:
                    return None
                if fd in self._running:
                    self._tell_end(fd)
                elif (asked := self._fork()) is not None:
                    return asked

    def _fork(self) -> dict[str, Any] | None:
        connection, _ = self._listener.accept()
        _, fds, _, _ = socket.recv_fds(connection, 16, 4)
        if not fds:  # gone again
            connection.close()
            return None
        *streams, described = fds
        with os.fdopen(described) as file:
            file.seek(0)
            asked: dict[str, Any] = json.load(file)
        pid = os.fork()
        if pid == 0:
            for number, fd in enumerate(streams):
                os.dup2(fd, number)
            self._close(connection, streams)
            return asked
        for fd in streams:
            os.close(fd)
        connection.send(str(pid).encode())
        fd = os.pidfd_open(pid)
        self._running[fd] = pid, asked["parent"], connection
        self._poll.register(fd, select.EPOLLIN)
        return None

    def _tell_end(self, fd: int) -> None:
        pid, parent, connection = self._running.pop(fd)
        self._poll.unregister(fd)
        os.close(fd)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):  # who asked has ended before
            connection.send(str(status).encode())
            os.kill(parent, signal.SIGCHLD)  # by which a launcher wakes up
        connection.close()

    def _close(self, connection: socket.socket, streams: list[int]) -> None:
        """In a child: what only the process that forks needs."""
        for fd in (*streams, *self._running, self._alive):
            os.close(fd)
        for _, _, other in self._running.values():
            other.close()
        connection.close()
        self._poll.close()
        self._listener.close()


class Ending:
    """Spares the programs three quarters of the time that an interpreter takes to end: to take apart thousands of
    modules that were imported before the program began, page by page, and the libraries that they loaded. The program's
    own modules end as ever, and torch.distributed's, which hold its process groups; so does its exit status.
    """

    def __init__(self) -> None:
        atexit.register(self._spare)  # the first to be registered is called last
        self._imported: frozenset[str] = frozenset()

    def imported(self) -> None:
        """What is there now is there before each program begins."""
        ends = ("sys", "builtins", "__main__")
        self._imported = frozenset(
            name for name in sys.modules if name not in ends and not name.startswith("torch.distributed")
        )

    def _spare(self) -> None:
        kept = {name: module for name, module in sys.modules.items() if name in self._imported}
        for name in kept:
            del sys.modules[name]
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        # When the interpreter has ended, before destructors of C++: C's files are flushed, and the process is over.
        libc = ctypes.CDLL(None)
        libc.on_exit(libc._exit, None)
        libc["__cxa_atexit"](libc.fflush, None, None)


def become(asked: dict[str, Any]) -> None:
    """In a child: what an interpreter and `import torch` do before a program begins. It ends with the process that
    forks."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.register(STACKS, file=2)
    if asked["session"]:
        os.setsid()
    os.umask(asked["umask"])
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    os.getppid = lambda: int(asked["parent"])
    sys.orig_argv[:] = asked["command"]
    sys.stdout.reconfigure(write_through="-u" in options_of(asked))  # type: ignore[union-attr]
    random.seed()
    tempfile.tempdir = None  # by TMPDIR, anew
    import numpy as np
    import torch

    np.random.seed(None)
    torch.set_num_threads(int(asked["env"].get("OMP_NUM_THREADS", "1")))
    if os.environ.get(AUTOLOAD, "1") == "1":
        from dsprof.collectors.arm import autoload

        autoload()


def options_of(asked: dict[str, Any]) -> list[str]:
    """Python's own."""
    given: list[str] = asked["command"][1 : -len(asked["words"])]
    return given


def main(name: str, alive: str) -> None:
    """Serve, and in each child run the program that was asked for, as `__main__` of this interpreter."""
    subprocess.Popen = ForkedPopen  # type: ignore[misc]  # before anything takes it from there
    ending = Ending()
    sys.path.pop(0)
    gc.disable()  # nothing that is imported is garbage
    for module in PRELOADED:
        importlib.import_module(module)
    sys.modules["dsprof.analyzer.rules.registry"].all_rules()  # it imports each: a third of what a small run takes
    assert len(os.listdir("/proc/self/task")) == 1, "a child would lack a thread"
    ending.imported()
    gc.collect()
    gc.freeze()
    gc.enable()
    forker = Forker(name, int(alive))
    print("ready", flush=True)
    os.dup2(2, 1)
    asked = forker.serve()
    if asked is None:
        os._exit(0)
    become(asked)
    words: list[str] = asked["words"]
    here = {"-m": asked["cwd"], "-c": ""}.get(words[0], str(Path(words[0]).resolve().parent))
    sys.path[:0] = [
        *([] if "-P" in options_of(asked) else [here]),
        *filter(None, os.environ.get(PATH, "").split(os.pathsep)),
    ]
    # A namespace that lives until the interpreter ends, as the program's own would: to drop it before, and with it a
    # process group, joins gloo's thread with the GIL held, for which that thread may be waiting.
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.argv[:] = words if words[0][0] != "-" else [words[0], *words[2:]]
    if words[0] == "-m":
        runpy._run_module_as_main(words[1], alter_argv=True)  # type: ignore[attr-defined]
    elif words[0] == "-c":
        exec(compile(words[1], "<string>", "exec", dont_inherit=True), module.__dict__)
    else:
        module.__file__ = os.path.abspath(words[0])
        exec(compile(Path(words[0]).read_bytes(), module.__file__, "exec", dont_inherit=True), module.__dict__)


if __name__ == "__main__":
    main(*sys.argv[1:])
