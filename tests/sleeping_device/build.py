"""Compiles the sleeping device: once for its sources, the compiler and this torch.

Its files, those of what Python is given too, are compiled as one: most of the time goes to reading torch's headers.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

from dsprof.collectors.native import build as native

HERE = Path(__file__).parent
FILES = ("guard.cpp", "memory.cpp", "tensors.cpp", "copies.cpp", "kernels.cpp", "nccl.cpp", "bindings.cpp")
LIBRARY = "sleeping_bindings.so"
"""It is a library and a module of Python."""


class CannotBuild(Exception):
    """Why there can be no sleeping device here."""


def build(cache: Path) -> Path:
    """The folder below `cache` with the library in it, for SLEEPING_DEVICE. Raises CannotBuild."""
    if torch.version.cuda is not None:
        raise CannotBuild("this torch has CUDA itself")
    compiler = native._compiler()
    if compiler is None:
        raise CannotBuild("no C++ compiler")
    about = f"{torch.__version__} {sys.version} {compiler}".encode() + Path(__file__).read_bytes()
    folder = cache / hashlib.sha256(b"".join(_text(HERE / name) for name in FILES) + about).hexdigest()[:16]
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            making = folder.with_suffix(f".{os.getpid()}")
            making.mkdir(exist_ok=True)
            _compile(compiler, making)
            making.rename(folder)
    return folder


def _text(file: Path) -> bytes:
    """What is in it and in the files beside it that it includes, and these include."""
    text = file.read_bytes()
    return text + b"".join(_text(HERE / name.decode()) for name in re.findall(rb'#include "(\w+\.hpp)"', text))


def _compile(compiler: list[str], into: Path) -> None:
    package = Path(torch.__file__).parent
    includes = [package / "include", Path(sysconfig.get_paths()["include"])]
    (into / "all.cpp").write_text("".join(f'#include "{HERE / name}"\n' for name in FILES))
    command = [
        *compiler, "-std=c++20", "-O1", "-fPIC", "-w", "-shared", *(f"-isystem{include}" for include in includes),
        str(into / "all.cpp"), "-o", str(into / LIBRARY),
        f"-L{package / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10",
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if ended.returncode:
        raise RuntimeError(f"the sleeping device cannot be compiled:\n{ended.stderr[-4000:]}")
