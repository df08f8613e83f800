"""Compiles the sleeping device: once for its sources, the compiler and this torch.

Its files are compiled as one, since most of the time goes to reading torch's headers.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from dsprof.collectors.native import build as native

HERE = Path(__file__).parent
DEVICE = ("guard.cpp", "memory.cpp", "tensors.cpp", "copies.cpp", "kernels.cpp", "nccl.cpp")
BINDINGS = "bindings.cpp"


class CannotBuild(Exception):
    """Why there can be no sleeping device here."""


def build(cache: Path) -> Path:
    """The folder below `cache` with the libraries in it, for SLEEPING_DEVICE. Raises CannotBuild."""
    if torch.version.cuda is not None:
        raise CannotBuild("this torch has CUDA itself")
    compiler = native._compiler()
    if compiler is None:
        raise CannotBuild("no C++ compiler")
    about = f"{torch.__version__} {sys.version} {compiler}".encode() + Path(__file__).read_bytes()
    objects = {
        "device": cache / f"{_hash(b''.join(_text(HERE / name) for name in DEVICE) + about)}.o",
        "bindings": cache / f"{_hash(_text(HERE / BINDINGS) + about)}.o",
    }
    folder = cache / _hash("".join(path.name for path in objects.values()).encode())
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            making = folder.with_suffix(f".{os.getpid()}")
            making.mkdir(exist_ok=True)
            _compile(compiler, objects, making, folder)
            making.rename(folder)
    return folder


def _text(file: Path) -> bytes:
    """What is in it and in the files beside it that it includes, and these include."""
    text = file.read_bytes()
    return text + b"".join(_text(HERE / name.decode()) for name in re.findall(rb'#include "(\w+\.hpp)"', text))


def _hash(what: bytes) -> str:
    return hashlib.sha256(what).hexdigest()[:16]


def _compile(compiler: list[str], objects: dict[str, Path], into: Path, final: Path) -> None:
    """Compile what has changed, and link."""
    package = Path(torch.__file__).parent
    includes = [package / "include", Path(sysconfig.get_paths()["include"])]
    flags = ["-std=c++20", "-O1", "-fPIC", "-w", *(f"-isystem{include}" for include in includes)]

    def run(*arguments: str) -> None:
        ended = subprocess.run([*compiler, *flags, *arguments], capture_output=True, text=True, timeout=600)
        if ended.returncode:
            raise RuntimeError(f"the sleeping device cannot be compiled:\n{ended.stderr[-4000:]}")

    (into / "device.cpp").write_text("".join(f'#include "{HERE / name}"\n' for name in DEVICE))
    sources = {"device": into / "device.cpp", "bindings": HERE / BINDINGS}

    def compile_one(name: str) -> None:
        if not objects[name].exists():
            made = into / f"{name}.o"
            run("-c", str(sources[name]), "-o", str(made))
            made.rename(objects[name])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, objects))
    link = ("-shared", f"-L{package / 'lib'}", f"-L{into}")
    run(str(objects["device"]), "-o", str(into / "libsleeping_device.so"), *link, "-ltorch_cpu", "-lc10")
    run(
        str(objects["bindings"]), "-o", str(into / "sleeping_bindings.so"), *link, "-lsleeping_device",
        "-ltorch_python", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{final}",
    )  # fmt: skip
