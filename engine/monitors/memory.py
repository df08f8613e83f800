"""`memory_breakdown`: memory at the beginning and end of each phase, and the most in between."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import torch

from ..hooks import Span
from .wall_clock import phase_of

PHASES: Final = ("forward", "backward", "step")


class Meter(Protocol):
    """Reads the memory in use, in bytes, under the names that `torch.cuda` has for what tensors take of a GPU."""

    def reset_peak_memory_stats(self) -> None:
        """Have the peak be of what comes from now on. Of a GPU it is the whole process's."""

    def memory_allocated(self) -> int: ...
    def max_memory_allocated(self) -> int: ...


class HostMeter:
    """The process's resident memory, by the kernel's count."""

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._proc = proc

    def reset_peak_memory_stats(self) -> None:
        """Where the kernel does not allow it the peak stays that since the process began."""
        try:
            (self._proc / "clear_refs").write_text("5")
        except OSError:
            return

    def memory_allocated(self) -> int:
        return int((self._proc / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def max_memory_allocated(self) -> int:
        for line in (self._proc / "status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return self.memory_allocated()


def meter_for(device: torch.device) -> Meter:
    """Of a GPU, or of the host where tensors are there."""
    return torch.cuda if device.type == "cuda" else HostMeter()


@dataclass
class _Phase:
    before: int
    after: int = 0
    peak: int = 0


class MemoryBreakdown:
    """Prints each phase's memory every `every` steps: before and after it in the last step, the peak of all steps."""

    def __init__(self, meter: Meter, every: int, show: Callable[[str], None] = print) -> None:
        self._meter = meter
        self._every = every
        self._show = show
        self._phases: dict[str, _Phase] = {}

    def begin(self, span: Span) -> None:
        name = phase_of(span)
        if name is not None and name in PHASES:
            self._meter.reset_peak_memory_stats()
            self._phases.setdefault(name, _Phase(0)).before = self._meter.memory_allocated()

    def end(self, span: Span) -> None:
        name = phase_of(span)
        if name is None or name not in self._phases:
            return
        phase = self._phases[name]
        phase.after = self._meter.memory_allocated()
        phase.peak = max(phase.peak, self._meter.max_memory_allocated())
        if name == "step" and (span.step + 1) % self._every == 0:
            columns = (
                f"{name}: {phase.before / 2**20:.1f} -> {phase.after / 2**20:.1f}, peak {phase.peak / 2**20:.1f}"
                for name, phase in self._phases.items()
            )
            self._show(f"[step {span.step + 1}] memory (MiB) | {' | '.join(columns)}")
            self._phases.clear()
