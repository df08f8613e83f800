"""What an engine is seen to do: its spans, recorded in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from dsprof.engine.hooks import Hooks, Kind, Span, subscribe


@dataclass(eq=False)
class _Recorder:
    """A listener that keeps the spans that have ended."""

    spans: list[Span] = field(default_factory=list)

    def begin(self, span: Span) -> None: ...

    def end(self, span: Span) -> None:
        self.spans.append(span)


@contextlib.contextmanager
def recorded(hooks: Hooks | None = None) -> Iterator[list[Span]]:
    """The spans that end within this block: those of every engine of this process, or of the one that `hooks` is of."""
    recorder = _Recorder()
    stop = subscribe(recorder) if hooks is None else hooks.subscribe(recorder)
    try:
        yield recorder.spans
    finally:
        stop()


def named(spans: list[Span], kind: Kind, name: str) -> list[Span]:
    return [span for span in spans if (span.kind, span.name) == (kind, name)]


def comms(spans: list[Span], purpose: str, step: int | None = None) -> list[Span]:
    """Communications for one purpose, in the order in which they were handed to their lanes."""
    found = [s for s in spans if s.kind == "comm" and s.purpose == purpose and step in (None, s.step)]
    return sorted(found, key=lambda span: (span.issue_ns or span.start_ns, span.seq or 0))


def names(spans: list[Span]) -> list[str]:
    return [span.name for span in spans]
