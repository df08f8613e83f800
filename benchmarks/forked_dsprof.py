"""`dsprof` as one types it, each process forked from one that has imported torch (tests/forked_python.py)."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from forked_python import MODULES_ONLY, end_all, start

__all__ = ["Failed", "dsprof", "end_all"]
LONGEST_S: Final = 900.0
LOOK_S: Final = 1.0


class Failed(Exception):
    """A command was not done in time; the message says which."""


def nothing() -> None:
    pass


def dsprof(
    where: Path, *words: str, device: bool = False, longest_s: float = LONGEST_S, look: Callable[[], None] = nothing
) -> subprocess.CompletedProcess[str]:
    """The command, run in a folder.

    device: its job runs on the sleeping device, whose ranks are new interpreters; look: called every second meanwhile.
    Raises Failed where it takes longer than `longest_s`, after which it goes on with the next command.
    """
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if device:
        environment |= {MODULES_ONLY: "1", "SLEEPING_DEVICE": str(_device()), "DSPROF_WITHOUT": "nvml"}
        environment["DSPROF_DEEP"] = "never"  # torch.profiler does not know this device
    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
        start(
            [sys.executable, "-m", "dsprof", *words],
            env=environment, cwd=where, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
        ) as process,
    ):  # fmt: skip
        try:
            left = longest_s
            while process.poll() is None:
                look()
                if left <= 0:
                    raise Failed(f"dsprof {words[0]} was not done after {longest_s:g} s")
                try:
                    process.wait(LOOK_S)
                except subprocess.TimeoutExpired:
                    left -= LOOK_S
        except BaseException:
            process.terminate()
            process.wait()
            raise
        look()
        told: list[Any] = []
        for stream in (out, err):
            stream.seek(0)
            told.append(stream.read())
    return subprocess.CompletedProcess(words, process.returncode, *told)


def _device() -> Path:
    from sleeping_device.build import build

    cache = Path(tempfile.gettempdir()) / "dsprof-sleeping-device"
    cache.mkdir(exist_ok=True)
    return build(cache)
