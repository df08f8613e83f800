"""What-ifs on collectives: the same bytes in other pieces. A program in, the changed program out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from .link import Link
from .replay import PARTS, Event, Program

Float = npt.NDArray[np.float64]


class NotRecut(Exception):
    """Of a program whose gradients cannot be cut anew, why not."""


def rebucket(program: Program, sizes: list[int], link: Link, host_ms: float) -> Program:
    """The program with its gradient collectives cut anew into buckets of `sizes` bytes, moved over `link`.

    Each bucket is issued when its last byte is ready. When bytes become ready is known at the measured issues and
    taken as linear in the compute between them. `host_ms` is the issuing thread's cost of one collective.
    Raises NotRecut unless gradients are reduced one after the other in one backward, by one group.
    """
    old = [c for c, gradient in enumerate(program.gradient) if gradient]
    groups = {program.group[c] for c in old}
    if not old:
        raise NotRecut("no gradients are reduced in these steps")
    if len(groups) > 1:
        raise NotRecut(f"gradients are reduced by {len(groups)} process groups, and buckets are those of one")
    count = len(program.steps)
    new = [len(program.transfer) + i for i in range(len(sizes))]
    ready = np.cumsum([float(np.mean(program.size[c])) for c in old])
    wanted = np.cumsum(sizes) * ready[-1] / max(sum(sizes), 1)
    events, work = [], []
    for r in range(len(program.ranks)):
        mine = program.events[r]
        at = [i for i, event in enumerate(mine) if event.what == "issue" and event.collective in old]
        if [mine[i].collective for i in at] != old:
            raise NotRecut("the ranks do not reduce the same gradients in the same order")
        _check_in_a_row(mine, old)
        first, last = at[0], at[-1]
        stretch = program.work[r][first : last + 1]  # from the start of backward to the last issue
        total = stretch.sum(axis=0)
        cost = host_ms * (len(old) - len(sizes))
        share = np.clip(1 - cost / np.maximum(total.sum(axis=-1), 1e-9), 0.05, None)[..., None]
        edges = np.concatenate([np.zeros((1, count, PARTS)), np.cumsum(stretch, axis=0)]) * share
        position = np.interp(wanted, np.concatenate([[0.0], ready]), np.arange(len(ready) + 1))
        low = np.minimum(position.astype(int), len(ready) - 1)
        part = (position - low)[:, None, None]
        points = edges[low] * (1 - part) + edges[low + 1] * part
        pieces = np.diff(np.concatenate([np.zeros((1, count, PARTS)), points]), axis=0)
        events.append((*mine[:first], *(Event("issue", c) for c in new), *mine[last + 1 :]))
        work.append(np.concatenate([program.work[r][:first], pieces, program.work[r][last + 1 :]]))
    return replace(
        program,
        events=tuple(events),
        work=tuple(work),
        transfer=(*program.transfer, *[np.full(count, link.latency_ms)] * len(sizes)),
        wire=(*program.wire, *(np.full(count, size * link.ms_per_byte) for size in sizes)),
        size=(*program.size, *(np.full(count, float(size)) for size in sizes)),
        group=(*program.group, *[program.group[old[0]]] * len(sizes)),
        gradient=(*[False] * len(program.gradient), *[True] * len(sizes)),
        needs=(*program.needs, *["all"] * len(sizes)) if program.needs else (),
        root=(*program.root, *[-1] * len(sizes)) if program.root else (),
        ended=(*program.ended, *[None] * len(sizes)) if program.ended else (),
        message=(*program.message, *[False] * len(sizes)) if program.message else (),
        kind=(*program.kind, *["gradient"] * len(sizes)) if program.kind else (),
    )


def _check_in_a_row(events: tuple[Event, ...], gradients: list[int]) -> None:
    """Raise NotRecut if a rank does more, from the start of backward to its last gradients, than reduce those."""
    at = [i for i, event in enumerate(events) if event.what == "issue" and event.collective in gradients]
    backward = max((i for i in range(at[0]) if events[i].what == "backward"), default=None)
    if backward is None:
        raise NotRecut("gradients are reduced where no backward was seen to begin before")
    between = {event.what for i, event in enumerate(events[: at[-1]]) if i > backward and i not in at}
    if "backward" in between:
        raise NotRecut("gradients are reduced in several backwards of a step")
    if "wait" in between:
        raise NotRecut(
            "backward waits for collectives before its last gradients are issued, and what it would wait for with "
            "other buckets is not known"
        )
    if between:
        raise NotRecut("other collectives are issued among those of the gradients")


def coalesce(program: Program, families: list[list[int]], together: int, link: Link, host_ms: float) -> Program:
    """The program with every `together` neighbours of each family of collectives merged into one, moved over `link`.

    A family is of one kind, in order of issue, in one stretch of the step. What is gathered is needed by the first of
    those merged, so it is issued and waited for there; what is reduced is there with the last. `host_ms` is the issuing
    thread's cost of each collective that is saved. Every family's transfers are modelled, merged or not, so that with
    `together` 1 the model's own error can be told and cancels from a difference.
    Raises NotRecut where ranks do not issue the same collectives.
    """
    count = len(program.steps)
    transfer = list(program.transfer)
    wire = list(program.wire)
    size = list(program.size)
    dropped: set[int] = set()
    for family in families:
        first = not program.gradient[family[0]]
        for begin in range(0, len(family), together):
            merged = family[begin : begin + together]
            kept = merged[0] if first else merged[-1]
            total = sum(float(np.mean(program.size[c])) for c in merged)
            transfer[kept] = np.full(count, link.latency_ms)
            wire[kept] = np.full(count, total * link.ms_per_byte)
            size[kept] = np.full(count, total)
            dropped.update(c for c in merged if c != kept)
    issued = {c for family in families for c in family}
    events, work = [], []
    for r in range(len(program.ranks)):
        mine = program.events[r]
        if {event.collective for event in mine if event.what == "issue" and event.collective in issued} != issued:
            raise NotRecut("not every rank issues the same collectives")
        kept_events: list[Event] = []
        pieces: list[Float] = []
        carried = np.zeros((count, PARTS))
        for event, before in zip(mine, program.work[r][:-1], strict=True):
            carried = carried + before
            if event.collective in dropped:
                if event.what == "issue":
                    left = np.clip(1 - host_ms / np.maximum(carried.sum(axis=-1), 1e-9), 0.0, None)
                    carried = carried * left[:, None]
                continue
            kept_events.append(event)
            pieces.append(carried)
            carried = np.zeros((count, PARTS))
        pieces.append(carried + program.work[r][-1])
        events.append(tuple(kept_events))
        work.append(np.stack(pieces))
    return replace(
        program, events=tuple(events), work=tuple(work), transfer=tuple(transfer), wire=tuple(wire), size=tuple(size)
    )
