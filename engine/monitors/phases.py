"""What the sections have in common: which phase a span is, and what time it is on the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, Protocol

import torch

from ..hooks import Span

PHASES: Final = ("forward", "backward", "recompute", "step")


def phase_of(span: Span) -> str | None:
    """The phase that `span` is, if one. A pipeline tells of its forwards as actions, those of `eval_batch` too."""
    if span.kind == "phase" and span.name in PHASES:
        return span.name
    if span.kind == "pipe" and span.name == "F" and torch.is_grad_enabled():
        return "forward"
    return None


class Timer(Protocol):
    """Takes stamps on the way, and tells the time between two of them afterwards."""

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
