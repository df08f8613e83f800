"""What is kept of a trace's events, as arrays: operators, calls of the device's runtime, what the device did, the
user's and c10d's annotations, samples of memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

UNKNOWN: Final = -1

KERNEL, COPY, FILL = range(3)


class Columns:
    """A table that grows: arrays of equal length by name."""

    def __init__(self, **types: str) -> None:
        self._types, self._parts = types, {name: list[npt.NDArray[Any]]() for name in types}
        self._count = 0

    def add(self, **arrays: npt.NDArray[Any]) -> None:
        for name, kind in self._types.items():
            self._parts[name].append(arrays[name].astype(kind, copy=False))
        self._count += len(arrays[next(iter(self._types))])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        parts = self._parts[name]
        if len(parts) != 1:
            parts[:] = [np.concatenate(parts) if parts else np.empty(0, self._types[name])]
        return parts[0]


@dataclass
class Annotation:
    """A named stretch of a thread: the user's, the profiler's, or c10d's of a collective."""

    name: str
    thread: int
    start_ns: int
    dur_ns: int
    args: Mapping[str, Any]


@dataclass
class Events:
    """Times are ns since the epoch; a name is an index into `names`, a thread one into `threads`.

    about:  what the file says beside its events
    cut:    where it breaks off; empty: it is whole
    count:  how many events it has, without those that were passed over by their text alone
    odd:    how many were left out as they have no time, no name, or an impossible one
    ops, calls, device, memory: see the constructor
    stream_waits: a stream is told to wait for an event that was recorded on another one (of_stream) by the call of_corr
    comm_args: of a row of `device`, what a communication kernel says of its collective
    """

    about: dict[str, Any] = field(default_factory=dict)
    cut: str = ""
    count: int = 0
    odd: int = 0
    first_odd: str = ""
    unknown: dict[str, None] = field(default_factory=dict)
    """Categories that are none of torch.profiler's, the first few."""
    names: list[str] = field(default_factory=list)
    threads: list[int | str] = field(default_factory=list)
    collectives: list[str | None] = field(default_factory=list)
    """Of each name, which collective a kernel of it is, empty: its name says; None: it does not communicate."""
    ops: Columns = field(
        default_factory=lambda: Columns(name="int32", thread="int32", start_ns="int64", dur_ns="int64")
    )
    calls: Columns = field(
        default_factory=lambda: Columns(name="int32", thread="int32", start_ns="int64", dur_ns="int64", corr="int64")
    )
    device: Columns = field(
        default_factory=lambda: Columns(
            name="int32", what="int8", device="int64", stream="int64", start_ns="int64", dur_ns="int64", corr="int64",
            bytes="int64",
        )
    )  # fmt: skip
    stream_waits: Columns = field(
        default_factory=lambda: Columns(
            device="int64", stream="int64", start_ns="int64", corr="int64", of_stream="int64", of_corr="int64"
        )
    )
    annotations: list[Annotation] = field(default_factory=list)
    memory: Columns = field(
        default_factory=lambda: Columns(
            kind="int64", device="int64", start_ns="int64", allocated="int64", reserved="int64"
        )
    )
    comm_args: dict[int, dict[str, Any]] = field(default_factory=dict)
