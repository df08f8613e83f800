"""Builds the native helper with a bare C++ compiler, once for each torch and Python, and keeps it (`places`).

The launcher calls `ensure`, which may compile; a rank calls `find`, which never does, and where there is none `begin`,
which has a process in the background do it; `dsprof build` calls `build_into`. Standard library only, and torch is
never imported here: it takes seconds, and the launcher has no other need for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Final

from . import layout, places
from .places import FILE, MODULE
from .target import SOURCES, BuildTarget, BuiltFor, running_target
from .trust import WRITABLE

COMPILE_SECONDS: Final = 300
WARNINGS: tuple[str, ...] = ("-w",)
"""The compiler's flags about warnings: none fails a user's build. Tests build with those that show all of them."""
BUILDING: Final = "building"
"""A file that is locked while a rank's background process builds."""
FAILED: Final = "failed.json"
LOG: Final = "build.log"
NO_COMPILER: Final = "no C++ compiler found (set CXX, or install g++)"

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


def probe_target(python: Path) -> BuildTarget:
    """What `python` would import, without importing it. Raises OSError, ValueError or SubprocessError."""
    output = subprocess.run(
        [python, "-P", "-c", _PROBE], env=_environment(), capture_output=True, text=True, check=True, timeout=60
    ).stdout
    return BuildTarget(**json.loads(output))


def find(refused: Callable[[str], None] = lambda why: None) -> Path | None:
    """The helper for the torch of this process, if it was built before. Cheap: no subprocess.

    refused: told why a helper, or a place, that somebody asked for is not used, and what to do
    """
    return places.find(running_target(), refused)


class NoHelper(Exception):
    """The helper cannot be had; the message says why."""


def ensure(python: Path, progress: Callable[[str], None]) -> Path:
    """The helper for the torch of `python`, built now if need be, of which `progress` is told. Raises only NoHelper."""
    return obtain(target_of(python), python, progress)


def target_of(python: Path) -> BuildTarget:
    """What `python` would import, without importing it. Raises NoHelper."""
    try:
        target = probe_target(python)
        if target.free_threaded:
            raise NoHelper(f"{python} is free-threaded ({target.soabi}), where dsprof records nothing")
        return target
    except (OSError, ValueError, TypeError, subprocess.SubprocessError) as error:
        raise NoHelper(f"{python} does not tell which torch it has ({_last_line(error)})") from error


def obtain(target: BuildTarget, python: Path, progress: Callable[[str], None]) -> Path:
    """The helper for `target`, which `python` has, built now if need be. Raises only NoHelper."""
    reasons: list[str] = []
    try:
        path = places.find(target, reasons.append)
        for reason in reasons:
            progress(f"warning: {reason}")
        if path is not None:
            return path
        if _compiler() is None:
            raise NoHelper(NO_COMPILER)
        made = build_into(places.writable_cache(), target, python, progress)
        path = places.usable(made, reasons.append)
        if path is None:
            raise NoHelper(reasons[-1])
        return path
    except NoHelper:
        raise
    except Exception as error:  # the profiler works without
        raise NoHelper(f"{type(error).__name__}: {error}") from error


def build_into(
    place: Path, target: BuildTarget, python: Path, progress: Callable[[str], None], *, again: bool = False
) -> Path:
    """The helper for `target`, which `python` has, in the folder `place`, built now unless it is there already.

    again: also if the same compiler has failed before
    Raises NoHelper, OSError.
    """
    folder = place / target.key
    found = folder / FILE
    if places.usable(found) is not None:
        return found
    compiler = _compiler()
    if compiler is None:
        raise NoHelper(NO_COMPILER)
    with _lock(folder):
        if again:
            (folder / FAILED).unlink(missing_ok=True)
        return _build(target, python, compiler, folder, progress)


def begin() -> str:
    """Have the helper for the torch of this process built by one process in the background, whoever of this machine's
    ranks asks first. Why there is none yet, in words. Raises OSError or SubprocessError."""
    target = running_target()
    compiler = _compiler()
    if compiler is None:
        return NO_COMPILER
    for cache in places.caches():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if json.loads((cache / target.key / FAILED).read_text())["compiler"] == shlex.join(compiler):
                return f"building it failed, see {cache / target.key / LOG}"
    folder = places.writable_cache() / target.key
    folder.mkdir(mode=0o700, exist_ok=True)
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
    folder = places.writable_cache() / running_target().key
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
    path = folder / FILE
    if places.usable(path) is not None:  # somebody else built it while we waited for the lock
        return path
    log, failed = folder / LOG, folder / FAILED
    version, warnings = _compiler_version(compiler), WARNINGS
    attempt = {"compiler": shlex.join(compiler), "version": version, "warnings": shlex.join(warnings)}
    with contextlib.suppress(OSError, ValueError):
        if json.loads(failed.read_text()) == attempt:
            raise NoHelper(f"building it failed before, see {log}")
    progress(f"building the native helper for torch {target.torch_version} (about 20 s, once)")
    temporary = folder / f".{os.getpid()}" / FILE  # the module's name is its file's
    temporary.parent.mkdir(exist_ok=True)
    (temporary.parent / "layout.hpp").write_text(layout.header())
    try:
        error = _run(command(target, compiler, temporary, warnings), log) or _run(
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
        temporary.chmod(temporary.stat().st_mode & ~WRITABLE)  # else it would not be trusted
        made = BuiltFor.of(target, compiler=attempt["compiler"], compiler_version=version, warnings=warnings)
        made.write(folder)
        os.replace(temporary, path)
        failed.unlink(missing_ok=True)
        return path
    finally:
        shutil.rmtree(temporary.parent, ignore_errors=True)


def command(target: BuildTarget, compiler: list[str], output: Path, warnings: tuple[str, ...]) -> list[str]:
    """Compiles the helper to `output`, in whose folder layout.hpp lies."""
    torch = Path(target.torch_folder)
    includes = [torch / "include", torch / "include/torch/csrc/api/include", target.include]
    return [
        *compiler,
        *("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", *warnings),
        f"-I{output.parent}",  # layout.hpp
        *(f"-isystem{folder}" for folder in includes),
        *(f"-D{definition}" for definition in target.definitions),
        str(SOURCES[0]),
        *("-o", str(output), f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"),
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
    try:
        output = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NoHelper(f"{shlex.join(compiler)} --version: {_last_line(error)}; set CXX to a C++ compiler") from error
    return output.partition("\n")[0]


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    with contextlib.suppress(OSError):  # of a folder that was there before, and is somebody else's
        folder.chmod(folder.stat().st_mode & ~WRITABLE)
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _last_line(error: Exception) -> str:
    text = getattr(error, "stderr", None) or str(error)
    return str(text).strip().rpartition("\n")[2]
