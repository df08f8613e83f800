"""Compiles the sleeping device: once for its sources, the compiler and this torch."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from dsprof.collectors.native import build as native

HERE = Path(__file__).parent
DEVICE = ("device.cpp", "nccl.cpp")
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
    sources = b"".join(path.read_bytes() for path in sorted(HERE.iterdir()) if path.suffix in (".cpp", ".hpp", ".py"))
    about = f"{torch.__version__} {sys.version} {compiler}".encode()
    folder = cache / hashlib.sha256(sources + about).hexdigest()[:16]
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            making = folder.with_suffix(f".{os.getpid()}")
            making.mkdir()
            _compile(compiler, making, folder)
            making.rename(folder)
    return folder


def _compile(compiler: list[str], into: Path, final: Path) -> None:
    package = Path(torch.__file__).parent
    includes = [package / "include", Path(sysconfig.get_paths()["include"])]
    flags = ["-std=c++20", "-O1", "-fPIC", "-w", *(f"-isystem{include}" for include in includes)]

    def run(*arguments: str) -> None:
        ended = subprocess.run([*compiler, *flags, *arguments], capture_output=True, text=True, timeout=600)
        if ended.returncode:
            raise RuntimeError(f"the sleeping device cannot be compiled:\n{ended.stderr[-4000:]}")

    with ThreadPoolExecutor(2) as pool:
        sources = (*DEVICE, BINDINGS)
        list(pool.map(lambda name: run("-c", str(HERE / name), "-o", str(into / f"{name}.o")), sources))
    link = ("-shared", f"-L{package / 'lib'}", f"-L{into}")
    objects = [str(into / f"{name}.o") for name in DEVICE]
    run(*objects, "-o", str(into / "libsleeping_device.so"), *link, "-ltorch_cpu", "-lc10")
    run(
        str(into / f"{BINDINGS}.o"), "-o", str(into / "sleeping_bindings.so"), *link, "-lsleeping_device",
        "-ltorch_python", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{final}",
    )  # fmt: skip
    for name in sources:
        (into / f"{name}.o").unlink()
