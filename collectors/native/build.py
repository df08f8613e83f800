"""Builds the native helper with a bare C++ compiler, once for each torch and Python, and keeps it in a cache.

The launcher calls `ensure`, which may compile; a rank calls `find`, which never does, and where there is none `begin`,
which has a process in the background do it. Standard library only, and torch is never imported here: it takes seconds,
and the launcher has no other need for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from dsprof import permissions

from . import layout

MODULE: Final = "dsprof_native"
SOURCES: Final = (Path(__file__).parent / "hooks.cpp", *sorted(Path(__file__).parent.glob("*.hpp")))
COMPILE_SECONDS: Final = 300
BUILDING: Final = "building"
"""A file that is locked while a rank's background process builds."""
FAILED: Final = "failed.json"
LOG: Final = "build.log"

_PROBE: Final = """
import importlib.util, json, pathlib, sysconfig
spec = importlib.util.find_spec("torch")
folder = pathlib.Path(spec.origin).parent
version = {}
exec((folder / "version.py").read_text(), version)
print(json.dumps({
    "torch_version": version["__version__"], "torch_git": version["git_version"], "torch_folder": str(folder),
    "soabi": sysconfig.get_config_var("SOABI"), "include": sysconfig.get_paths()["include"],
}))
"""

_IN_BACKGROUND: Final = """
import os, sys
if os.fork():
    os._exit(0)
os.nice(10)
import json, pathlib
sys.path.append(sys.argv[1])
from dsprof.collectors.native import build
build.obtain(build.BuildTarget(**json.loads(sys.argv[2])), pathlib.Path(sys.executable), lambda text: None)
"""


@dataclass(frozen=True)
class BuildTarget:
    """The torch and Python that a helper is built for."""

    torch_version: str
    torch_git: str
    torch_folder: str
    soabi: str
    """The interpreter's ABI tag, such as cpython-311-x86_64-linux-gnu."""
    include: str
    """The folder of Python.h."""

    @property
    def key(self) -> str:
        """Names the cached file: whatever would make another one unfit to load is part of it."""
        digest = hashlib.sha256()
        facts = (self.torch_version, self.torch_git, self.soabi, platform.machine(), layout.header())
        digest.update("\0".join((*facts, *_definitions(self))).encode())
        for source in SOURCES:
            digest.update(source.read_bytes())
        return digest.hexdigest()[:20]


def running_target() -> BuildTarget:
    """The torch that this process has imported."""
    torch = sys.modules["torch"]
    return BuildTarget(
        torch_version=str(torch.__version__),
        torch_git=str(torch.version.git_version),
        torch_folder=str(Path(str(torch.__file__)).parent),
        soabi=str(sysconfig.get_config_var("SOABI")),
        include=sysconfig.get_paths()["include"],
    )


def probe_target(python: Path) -> BuildTarget:
    """What `python` would import, without importing it. Raises OSError, ValueError or SubprocessError."""
    output = subprocess.run(
        [python, "-P", "-c", _PROBE], env=_environment(), capture_output=True, text=True, check=True, timeout=60
    ).stdout
    return BuildTarget(**json.loads(output))


def find() -> Path | None:
    """The helper for the torch of this process, if it was built before. Cheap: no subprocess."""
    key = running_target().key
    for folder in _cache_folders():
        path = folder / key / f"{MODULE}.so"
        if _usable(path):
            return path
    return None


class NoHelper(Exception):
    """The helper cannot be had; the message says why."""


def ensure(python: Path, progress: Callable[[str], None]) -> Path:
    """The helper for the torch of `python`, built now if need be, of which `progress` is told. Raises only NoHelper."""
    try:
        target = probe_target(python)
    except (OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
        raise NoHelper(f"{python} does not tell which torch it has ({_last_line(error)})") from error
    return obtain(target, python, progress)


def obtain(target: BuildTarget, python: Path, progress: Callable[[str], None]) -> Path:
    """The helper for `target`, which `python` has, built now if need be. Raises only NoHelper."""
    try:
        for folder in _cache_folders():
            path = folder / target.key / f"{MODULE}.so"
            if _usable(path):
                return path
        compiler = _compiler()
        if compiler is None:
            raise NoHelper("no C++ compiler found (set CXX, or install g++)")
        folder = _writable_folder() / target.key
        with _lock(folder):
            return _build(target, python, compiler, folder, progress)
    except NoHelper:
        raise
    except Exception as error:  # the profiler works without
        raise NoHelper(f"{type(error).__name__}: {error}") from error


def begin() -> str:
    """Have the helper for the torch of this process built by one process in the background, whoever of this machine's
    ranks asks first. Why there is none yet, in words. Raises OSError or SubprocessError."""
    target = running_target()
    compiler = _compiler()
    if compiler is None:
        return "no C++ compiler found (set CXX, or install g++)"
    for folder in _cache_folders():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if json.loads((folder / target.key / FAILED).read_text())["compiler"] == shlex.join(compiler):
                return f"building it failed, see {folder / target.key / LOG}"
    folder = _writable_folder() / target.key
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / BUILDING, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "it is being built for the next run"
        home = str(Path(os.path.abspath(__file__)).parents[3])
        # The process that compiles is nobody's child, so that no `wait` of the script meets it, and keeps the lock.
        subprocess.run(
            [sys.executable, "-P", "-c", _IN_BACKGROUND, home, json.dumps(asdict(target))],
            env=_environment() | {name: os.environ[name] for name in ("DSPROF_CACHE",) if name in os.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[lock.fileno()],
            start_new_session=True,
            timeout=60,
            check=True,
        )
    return "it is being built for the next run"


def wait(seconds: float) -> None:
    """Until it is built, or nobody builds it any more; at most so long."""
    folder = _writable_folder() / running_target().key
    deadline = time.monotonic() + seconds
    while find() is None and time.monotonic() < deadline:
        with open(folder / BUILDING, "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.1)
            else:
                return


def _build(
    target: BuildTarget, python: Path, compiler: list[str], folder: Path, progress: Callable[[str], None]
) -> Path:
    path = folder / f"{MODULE}.so"
    if path.is_file():  # somebody else built it while we waited for the lock
        return path
    log, failed = folder / LOG, folder / FAILED
    attempt = {"compiler": shlex.join(compiler), "version": _compiler_version(compiler)}
    with contextlib.suppress(OSError, ValueError):
        if json.loads(failed.read_text()) == attempt:
            raise NoHelper(f"building it failed before, see {log}")
    progress(f"building the native helper for torch {target.torch_version} (about 20 s, once)")
    temporary = folder / f".{os.getpid()}" / f"{MODULE}.so"  # the module's name is its file's
    temporary.parent.mkdir(exist_ok=True)
    (temporary.parent / "layout.hpp").write_text(layout.header())
    try:
        error = _run(_command(target, compiler, temporary), log) or _run(
            [
                str(python),
                "-P",
                "-c",
                f"import sys, torch; sys.path.insert(0, {str(temporary.parent)!r}); import {MODULE}",
            ],
            log,
        )
        if error is not None:
            failed.write_text(json.dumps(attempt))
            raise NoHelper(f"{error} (all of it: {log})")
        os.replace(temporary, path)
        failed.unlink(missing_ok=True)
        return path
    finally:
        shutil.rmtree(temporary.parent, ignore_errors=True)


def _command(target: BuildTarget, compiler: list[str], output: Path) -> list[str]:
    torch = Path(target.torch_folder)
    includes = [torch / "include", torch / "include/torch/csrc/api/include", target.include]
    return [
        *compiler,
        *("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w"),
        f"-I{output.parent}",  # layout.hpp
        *(f"-isystem{folder}" for folder in includes),
        *(f"-D{definition}" for definition in _definitions(target)),
        str(SOURCES[0]),
        *("-o", str(output), f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"),
    ]


def _definitions(target: BuildTarget) -> list[str]:
    return [
        "USE_DISTRIBUTED",
        "NDEBUG",  # as torch's wheels: their headers would else look at members that only a debug build sets
        "_GLIBCXX_USE_CXX11_ABI=1",  # as every torch since 2.7
        f'DSPROF_TORCH_VERSION="{target.torch_version}"',
        f'DSPROF_TORCH_GIT="{target.torch_git}"',
    ]


def _run(command: list[str], log: Path) -> str | None:
    """Run a step of the build, its output to `log`. None, or what went wrong in a line."""
    with open(log, "w+") as output:
        output.write(shlex.join(command) + "\n")
        output.flush()
        try:
            code = subprocess.run(
                command,
                env=_environment(),
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                timeout=COMPILE_SECONDS,
            ).returncode
        except subprocess.TimeoutExpired:
            return f"{Path(command[0]).name} took more than {COMPILE_SECONDS} s"
        if code == 0:
            return None
        output.seek(0)
        lines = output.read().splitlines()[1:]
    errors = [line.strip() for line in lines if "error" in line.lower()] or lines or ["no message"]
    return f"{Path(command[0]).name} failed: {errors[-1]}"


def _environment() -> dict[str, str]:
    """For our own subprocesses, which are not to be profiled."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DSPROF")}
    return {**kept, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def _compiler() -> list[str] | None:
    for candidate in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        command = shlex.split(candidate) if candidate else []
        if command and shutil.which(command[0]):
            return command
        if candidate and candidate == os.environ.get("CXX"):
            return None  # asked for, and not there: do not guess another
    return None


def _compiler_version(compiler: list[str]) -> str:
    output = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60).stdout
    return output.partition("\n")[0]


def _cache_folders() -> list[Path]:
    """Where helpers are kept: the user's cache, and where that cannot be written, a folder of his own in /tmp."""
    cache = os.environ.get("DSPROF_CACHE")
    if not cache:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        cache = os.path.join(base, "dsprof")
    return [Path(cache) / "native", Path(tempfile.gettempdir()) / f"dsprof-{os.getuid()}" / "native"]


def _writable_folder() -> Path:
    """The first cache folder that files can be made in. Raises OSError where there is none."""
    first, second = _cache_folders()
    try:
        first.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(first, os.W_OK):
            return first
    except OSError:
        pass
    try:
        mine = permissions.own_folder(second.parents[1])
        permissions.make_folder(second, mode=permissions.PRIVATE_FOLDER)
        permissions.check_own(mine, second.name)
    except OSError as error:
        raise OSError(f"{error.filename}: {error.strerror}; set DSPROF_CACHE to a folder of your own") from error
    return second


def _usable(path: Path) -> bool:
    """It is there, and in a folder for everybody, nobody else could have put it there: it is loaded into the job."""
    if not path.is_file():
        return False
    shared = path.is_relative_to(tempfile.gettempdir())
    return not shared or all(p.stat().st_uid == os.getuid() for p in (path, *path.parents[:3]))


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _last_line(error: Exception) -> str:
    text = getattr(error, "stderr", None) or str(error)
    return str(text).strip().rpartition("\n")[2]
