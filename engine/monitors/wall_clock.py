"""`wall_clock_breakdown`: where the time of a step goes, as the engine's spans tell it. Nothing is synchronized."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

from ..hooks import Span


class WallClock:
    """Prints means per step, in ms, every `every` steps, over all micro-batches of a step.

    fwd, bwd, step    the phases
    bwd_allreduce     the part of bwd that stood still, waiting for gradients to be reduced
    bwd_inner         the rest of bwd
    recompute         the part of bwd_inner that ran forwards again
    reduce            communication of gradients, on whatever lane and whether or not anything waited for it
    """

    def __init__(self, every: int, show: Callable[[str], None] = print) -> None:
        self._every = every
        self._show = show
        self._lock = threading.Lock()  # lanes tell of their communications on their own threads
        self._ns: Counter[str] = Counter()
        self._steps = 0
        self._in_backward = False

    def begin(self, span: Span) -> None:
        if span.kind == "phase" and span.name == "backward":
            self._in_backward = True

    def end(self, span: Span) -> None:
        part = self._part(span)
        if part is None:
            return
        with self._lock:
            self._ns[part] += span.dur_ns
            if part != "step":
                return
            self._steps += 1
            if (span.step + 1) % self._every:
                return
            ms = {part: ns / 1e6 / self._steps for part, ns in self._ns.items()}
            self._ns.clear()
            self._steps = 0
        self._show(_line(span.step + 1, Counter(ms)))

    def _part(self, span: Span) -> str | None:
        """What `span` is a part of, if of anything."""
        if span.kind == "phase" and span.name in ("forward", "backward", "recompute", "step"):
            if span.name == "backward":
                self._in_backward = False
            return span.name
        if span.purpose == "gradient" and (span.kind == "comm" or (span.kind == "wait" and self._in_backward)):
            return span.kind
        return None


def _line(steps: int, ms: Counter[str]) -> str:
    columns = {
        "fwd": ms["forward"],
        "bwd": ms["backward"],
        "bwd_inner": ms["backward"] - ms["wait"],
        "bwd_allreduce": ms["wait"],
        "step": ms["step"],
        "recompute": ms["recompute"],
        "reduce": ms["comm"],
    }
    return f"[step {steps}] time (ms) | " + " | ".join(f"{name}: {value:.2f}" for name, value in columns.items())
