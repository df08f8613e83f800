"""What a communication backend does: how many operations a group runs at once, in which collectives a rank depends on
whom, and which messages need a worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from dsprof.run import RunInfo
from dsprof.schema import SYNCHRONIZING

from ..arrays import Bool
from ..columns import Words


@dataclass(frozen=True)
class Backend:
    """workers: operations of one process group that run at once, first issued first served; None: any number.
    messages_queue: whether sends and receives need a worker of their group too; else each runs beside the rest.
    synchronizing: collectives no rank can leave before the last one has arrived.
    others_wait_for_root: the root waits for all, and the others wait for the root: a send waits for its receive.
    root_receives: the root waits for everybody; nobody else for anyone.
    along_tree: the root's data is handed on from rank to rank (`broadcast_tree`).
    scatters_whole: a reduce-scatter moves at least as many bytes as an all-reduce of the same tensor.
    """

    workers: int | None
    messages_queue: bool
    synchronizing: frozenset[str] = frozenset(SYNCHRONIZING)
    others_wait_for_root: frozenset[str] = frozenset({"broadcast", "scatter"})
    root_receives: frozenset[str] = frozenset({"reduce", "gather"})
    along_tree: frozenset[str] = frozenset()
    scatters_whole: bool = False


BACKENDS: Final = {
    # ProcessGroupGloo: two threads a group; unbound buffers. For a tensor of 2.1 MB a rank put on the wire, in a
    # reduce-scatter and in an all-reduce: 2.1 and 2.1 MB of two ranks, 6.4 and 2.9 MB of four. A reduce is one of those
    # with a gather behind it; of a gather each send waits for the root to receive it.
    "gloo": Backend(
        workers=2,
        messages_queue=False,
        synchronizing=frozenset({*SYNCHRONIZING, "reduce"}),
        others_wait_for_root=frozenset({"scatter", "gather"}),
        root_receives=frozenset(),
        along_tree=frozenset({"broadcast"}),
        scatters_whole=True,
    ),
    "nccl": Backend(workers=1, messages_queue=False),  # a stream a communicator; batched messages share a kernel
    "stream": Backend(workers=1, messages_queue=True),  # a device's stream, or a lane of dsprof's engine
    "kernels": Backend(workers=None, messages_queue=False),  # a device's kernels, whose own beginning was traced
    "unlimited": Backend(workers=None, messages_queue=False),
}
DEFAULT: Final = "gloo"
"""Of a group whose backend was not captured: what is timed here ran on CPU."""


def backend_name(group: str, run: RunInfo | None) -> str:
    """The backend of a process group, or of what two of its ranks send each other (`<group> <src>><dst>`)."""
    about = (run.group(group) or run.group(group.partition(" ")[0])) if run is not None else {}
    return str(about.get("backend") or DEFAULT)


def backend_of(group: str, run: RunInfo | None) -> Backend:
    """What it does."""
    return BACKENDS.get(backend_name(group, run), BACKENDS[DEFAULT])


def captured_backend(group: str, run: RunInfo | None) -> Backend | None:
    """What it does, if it was captured which one it is; None: torch chose, or it is another one."""
    about = run.group(group) if run is not None else None
    return BACKENDS.get(str((about or {}).get("backend")))


def by_backend(groups: Words, run: RunInfo | None) -> Iterator[tuple[Backend, Bool]]:
    """Each backend that any of `groups` has, and which of them have it."""
    codes, names = pd.factorize(groups)
    of_name = [backend_of(str(name), run) for name in names]
    for backend in dict.fromkeys(of_name):
        yield backend, np.array([one == backend for one in of_name], bool)[codes]
