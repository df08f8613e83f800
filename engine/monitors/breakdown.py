"""What the phases of a step take, by the engine's spans: `wall_clock_breakdown`, time, and `memory_breakdown`."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from ..hooks import Span

Write = Callable[[str, float], None]
"""Takes what a step spent: the name of a curve, and ms."""

CURVES: Final = {
    "fwd": "forward", "bwd": "backward", "bwd_inner": "backward_inner", "bwd_allreduce": "backward_allreduce",
    "step": "step",
}  # fmt: skip
"""Column -> end of the name that DeepSpeed's curves `elapsed_time_ms_...` have for it."""


class WallClock:
    """Prints means per step, in ms, every `every` steps, over all micro-batches of a step.

    fwd, bwd, step    the phases; of a pipeline, the forwards and backwards of this rank
    bwd_allreduce     the part of bwd that stood still, waiting for gradients to be reduced
    bwd_inner         the rest of bwd
    recompute         the part of bwd_inner that ran forwards again
    reduce            communication of gradients, on whatever lane and whether or not anything waited for it

    `write` gets what each step spent, too. On CPU the times are the spans' own, and nothing is synchronized. With a
    `timer` phases are timed by the device, which does not run when it is called: there a wait is the stream's, so
    bwd_inner and bwd_allreduce cannot be separated and are left out, and the step's end is waited for where numbers
    are printed or written.
    """

    def __init__(
        self,
        every: int,
        show: Callable[[str], None] = print,
        write: Write | None = None,
        timer: Timer | None = None,
    ) -> None:
        self._every = every
        self._show = show
        self._write = write
        self._timer = timer
        self._lock = threading.Lock()  # lanes report their communications on their own threads
        self._ns: Counter[str] = Counter()
        self._window: list[Counter[str]] = []
        """Of each step since the last line, ns by part."""
        self._open: dict[int, Any] = {}
        """id of a phase under way -> the timer's stamp at its begin."""
        self._stamps: list[tuple[str, Any, Any]] = []
        self._in_backward = False

    def begin(self, span: Span) -> None:
        phase = phase_of(span)
        if phase == "backward":
            self._in_backward = True
        if phase is not None and self._timer is not None:
            self._open[id(span)] = self._timer.stamp()

    def end(self, span: Span) -> None:
        phase = phase_of(span)
        if phase == "backward":
            self._in_backward = False
        if phase is not None and self._timer is not None:
            start = self._open.pop(id(span), None)
            if start is not None:
                self._stamps.append((phase, start, self._timer.stamp()))
        else:
            part = phase or self._part(span)
            if part is None:
                return
            with self._lock:
                self._ns[part] += span.dur_ns
        if phase == "step":
            self._end_step(span.step + 1)

    def _part(self, span: Span) -> str | None:
        """What `span`, no phase, is a part of, if of anything."""
        if span.purpose == "gradient" and (span.kind == "comm" or (span.kind == "wait" and self._in_backward)):
            return span.kind
        return None

    def _end_step(self, steps: int) -> None:
        with self._lock:
            spent, self._ns = self._ns, Counter()
        self._window.append(spent)
        prints = steps % self._every == 0
        if self._timer is not None and (prints or self._write is not None):
            for part, start, end in self._stamps:
                spent[part] += round(1e9 * self._timer.seconds(start, end))
            self._stamps.clear()
        if self._write is not None:
            for name, ms in self._columns(spent).items():
                if name in CURVES:
                    self._write(f"elapsed_time_ms_{CURVES[name]}", ms)
        if prints:
            total = sum(self._window, Counter())
            columns = {name: ms / len(self._window) for name, ms in self._columns(total).items()}
            self._window.clear()
            text = " | ".join(f"{name}: {ms:.2f}" for name, ms in columns.items())
            self._show(f"[step {steps}] time (ms) | {text}")

    def _columns(self, ns: Counter[str]) -> dict[str, float]:
        parts = {
            "fwd": ns["forward"],
            "bwd": ns["backward"],
            "bwd_inner": ns["backward"] - ns["wait"],
            "bwd_allreduce": ns["wait"],
            "step": ns["step"],
            "recompute": ns["recompute"],
            "reduce": ns["comm"],
        }
        if self._timer is not None:
            del parts["bwd_inner"], parts["bwd_allreduce"]
        return {name: value / 1e6 for name, value in parts.items()}


# --- which phase a span is, and what time it is on the device, for the other sections too

PHASES: Final = ("forward", "backward", "recompute", "step")


def phase_of(span: Span) -> str | None:
    """The phase that `span` is, if one. A pipeline reports its forwards as actions, those of `eval_batch` too."""
    if span.kind == "phase" and span.name in PHASES:
        return span.name
    if span.kind == "pipe" and span.name == "F" and torch.is_grad_enabled():
        return "forward"
    return None


class Timer(Protocol):
    """Takes stamps on the way, and gives the time between two of them afterwards."""

    def stamp(self) -> Any: ...
    def seconds(self, start: Any, end: Any) -> float: ...


class HostTimer:
    """By the host's clock, in ns."""

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self.stamp = clock

    def seconds(self, start: int, end: int) -> float:
        return (end - start) / 1e9


class CudaTimer:
    """By events in the current stream: the device's own time, and nothing waits until it is asked for."""

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def timer_for(device: torch.device) -> Timer:
    """Of the device's time."""
    return CudaTimer() if device.type == "cuda" else HostTimer()


# --- `memory_breakdown`: memory at the beginning and end of each phase, and the most in between


BRACKETED: Final = ("forward", "backward", "step")


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
        if name is not None and name in BRACKETED:
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
