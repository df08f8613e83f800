"""What-if on gradients: reduced in other buckets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from ..arrays import Bool, Float, Int
from ..graph.link import Link
from ..graph.segment_work import take_work
from ..graph.step_graph import PARTS, Costs, Edges, StepGraph, Steps, Task
from .apply import Refused, Turn, WhatIf
from .edit import GONE, Recut, Restructure, taken
from .last_end import end_with_the_last

LEAST_COVERED: Final = 0.5
"""Share of the steps that a division must apply to for what it gains to stand for the run."""


class NotRebucketed(Exception):
    """Of steps whose gradients cannot be cut anew, why not."""


@dataclass(frozen=True)
class Rebucket(WhatIf):
    """The gradients that a process group reduces cut anew into buckets of `sizes` bytes, moved over `link`.

    Each bucket is issued when its last byte is ready. When bytes become ready is known at the measured issues and
    taken as linear in the compute between them. A wait for old buckets waits for the new ones that hold their bytes.

    host_ms: the issuing thread's cost of one collective
    group:   whose gradients; None: those of the one group that there is
    backward: of the gradients that a group reduces in several backwards of a step, those of which one
              (`reduced_in_backwards`); None: it does in one only
    """

    sizes: tuple[int, ...]
    link: Link
    host_ms: float = 0.0
    group: str | None = None
    backward: int | None = None
    turn = Turn.DIVISION

    @property
    def name(self) -> str:
        of = "" if self.group is None else f" of group {self.group}"
        of += "" if self.backward is None else f" in backward {self.backward}"
        return f"gradients{of} in {len(self.sizes)} buckets"

    def against(self, other: WhatIf) -> str | None:
        same = (
            isinstance(other, Rebucket)
            and (self.group == other.group or None in (self.group, other.group))
            and (self.backward == other.backward or None in (self.backward, other.backward))
        )
        return "both say how the same gradients are divided" if same else None

    def change(self, graph: StepGraph) -> StepGraph:
        return self._division(graph)

    @cached_property
    def _division(self) -> Division:
        return Division(
            self.name, lambda steps: recut(steps, self.sizes, self.link, self.host_ms, self.group, self.backward)
        )


class Division:
    """A division of communications in each template of a graph, where it is possible."""

    def __init__(self, name: str, change: Callable[[Steps], Recut | None]) -> None:
        """change: may raise NotRebucketed for a template, which is left as it is then."""
        self._name, self._change = name, change
        self._refused: Counter[str] = Counter()
        self._edit = Restructure(self._divided)

    def _divided(self, steps: Steps) -> Recut | None:
        try:
            return self._change(steps)
        except NotRebucketed as reason:
            self._refused[str(reason)] += len(steps.numbers)
            return None

    def __call__(self, graph: StepGraph) -> StepGraph:
        """Raises Refused where most steps cannot be divided so."""
        changed = self._edit(graph)
        steps = len(graph.numbers)
        if steps - self._refused.total() < LEAST_COVERED * steps:
            raise Refused(self._name, self._refused.most_common(1)[0][0])
        return changed


def recut(
    steps: Steps,
    sizes: Sequence[int],
    link: Link,
    host_ms: float,
    group: str | None = None,
    backward: int | None = None,
) -> Recut:
    """What `Rebucket` makes of steps of one template.

    Raises NotRebucketed unless these gradients are reduced one after the other in one backward, by one group.
    """
    structure, segments = steps.structure, steps.structure.segments
    if backward is None:
        old = _gradients_in_order(steps, group)
    else:
        old = reduced_in_backwards(steps, group).get(backward, [])
    lanes = {structure.tasks[c].lane for c in old}
    if not old:
        raise NotRebucketed("no gradients are reduced in these steps")
    if len(lanes) > 1:
        raise NotRebucketed(f"gradients are reduced by {len(lanes)} process groups, and buckets are those of one")
    ready = np.cumsum([float(np.mean(steps.size[c])) for c in old])
    wanted = np.cumsum(sizes) * ready[-1] / max(sum(sizes), 1)
    position = np.interp(wanted, np.concatenate([[0.0], ready]), np.arange(len(ready) + 1))
    low = np.minimum(position.astype(int), len(ready) - 1)
    part = (position - low)[:, None, None]
    new = len(sizes)

    def pieces(spent: Float) -> Float:
        """The own work before each new issue, of that before each old one."""
        nothing = np.zeros((1, spent.shape[1], len(PARTS)))
        total = spent.sum(axis=(0, 2))
        cost = host_ms * (len(old) - new)
        share = np.clip(1 - cost / np.maximum(total, 1e-9), 0.05, None)[:, None]
        edges = np.concatenate([nothing, np.cumsum(spent, axis=0)]) * share
        points = edges[low] * (1 - part) + edges[low + 1] * part
        return np.diff(np.concatenate([nothing, points]), axis=0)

    spans = _spans(steps, old)  # of each thread that reduces them, the segments in which it makes them
    source_of: list[Int] = []  # of each new segment, the old one that it is, or is like
    segment = np.full(segments, GONE)
    issues: list[tuple[int, int]] = []
    made: list[tuple[slice, slice]] = []
    at = 0
    for thread in range(structure.threads):
        mine = structure.of_thread(thread)
        first, last = spans.get(thread, (mine.stop, mine.stop - 1))
        for begin, end in ((mine.start, first), (last + 1, mine.stop)):
            if begin == last + 1 and thread in spans:  # between the two, the new pieces
                made.append((slice(first, last + 1), slice(at, at + new)))
                source_of.append(np.full(new, first))
                issues += [(at + i, i) for i in range(new)]
                segment[first] = at  # what was waited for before it still is
                at += new
            segment[begin:end] = at + np.arange(end - begin)
            source_of.append(np.arange(begin, end))
            at += end - begin
    like = np.concatenate(source_of).astype(np.int64)
    is_made, begins = np.zeros(at, bool), np.zeros(at, bool)
    for _, place in made:
        is_made[place], begins[place.start] = True, True
    # Tasks: the new ones come where the first old one was.
    kept = np.setdiff1d(np.arange(len(structure.tasks)), old)
    before = int((kept < min(old)).sum())
    task = np.full(len(structure.tasks), GONE)
    task[kept] = np.arange(len(kept)) + np.where(kept < min(old), 0, new)
    of_old = structure.tasks[old[0]]
    bucket = Task(lanes.pop(), of_old.kind, gradient=True, workers=of_old.workers, linked=True)
    tasks = [structure.tasks[c] for c in kept.tolist()]
    tasks[before:before] = [bucket] * new

    def rows(of: Float, added: Float) -> Float:
        return np.insert(of[kept], [before] * new, added, axis=0)

    # Edges.
    holds = _overlap(ready, wanted)
    source, target = [], []
    for a, b in zip(structure.edges.source.tolist(), structure.edges.target.tolist(), strict=True):
        c = a - segments
        if 0 <= c < len(structure.tasks) and c in old:  # a wait for an old bucket
            for i in np.flatnonzero(holds[old.index(c)]).tolist():
                source.append(at + before + i)
                target.append(int(segment[b]))
            continue
        if b >= segments and b - segments in old:
            continue  # its issue
        source.append(_moved(a, segment, task, at, len(tasks)))
        target.append(_moved(b, segment, task, at, len(tasks)))
    source += [u for u, _ in issues]
    target += [at + before + i for _, i in issues]
    pairs = np.unique(np.array([source, target], np.int64).reshape(2, -1), axis=1)
    fresh = structure.ids_used + np.arange(int(is_made.sum()) + new)
    segment_ids = structure.ids[like].copy()
    segment_ids[is_made] = fresh[: int(is_made.sum())]
    task_ids = np.insert(structure.ids[segments + kept], [before] * new, fresh[len(fresh) - new :])
    changed = replace(
        structure,
        thread=structure.thread[like],
        backward=structure.backward[like] & (~is_made | begins),
        action=taken(structure.action, like),
        place=taken(structure.place, like),
        tasks=tuple(tasks),
        edges=Edges(pairs[0], pairs[1]),
        ids=np.concatenate([segment_ids, task_ids]),
        ids_used=structure.ids_used + len(fresh),
    )

    def costs(steps: Steps) -> Costs:
        work = take_work(steps.work, like)
        for was, is_now in made:
            work[is_now] = pieces(steps.work[was])
        end_with_the_last(steps, old, work, segment)
        sized = np.repeat(np.array(sizes, np.float64)[:, None], len(steps.numbers), axis=1)
        return Costs(
            work,
            rows(steps.transfer, np.full(sized.shape, link.latency_ms)),
            rows(steps.wire, sized * link.ms_per_byte),
            rows(steps.size, sized),
        )

    return Recut(changed, np.concatenate([segment, np.where(task >= 0, task + at, GONE)]), costs)


def _moved(operation: int, segment: Int, task: Int, segments: int, tasks: int) -> int:
    """The number that an operation has among as many segments and tasks as there are now."""
    if operation < len(segment):
        return int(segment[operation])
    if operation < len(segment) + len(task):
        return segments + int(task[operation - len(segment)])
    return operation - len(segment) - len(task) + segments + tasks


def _overlap(old: Float, new: Float) -> Bool:
    """[old, new] whether two buckets share bytes; each of both lists is where its buckets end."""
    slack = 1e-9 * old[-1]
    begin_old, begin_new = np.append(0.0, old[:-1]), np.append(0.0, new[:-1])
    shared: Bool = (begin_old[:, None] < new - slack) & (begin_new < old[:, None] - slack)
    return shared


def _gradients_in_order(steps: Steps, group: str | None) -> list[int]:
    """The tasks that carry a group's gradients, in the order in which the first thread that does issues them."""
    issues, tasks = steps.structure.issues, steps.structure.tasks
    issues = issues[np.argsort(issues[:, 0], kind="stable")]
    wanted = [task.gradient and group in (None, task.lane) for task in tasks]
    return list(dict.fromkeys(c for c in issues[:, 1].tolist() if wanted[c]))


def reduced_in_backwards(steps: Steps, group: str | None) -> dict[int, list[int]]:
    """How many backwards of the step have begun -> the tasks that carry a group's gradients and are issued then, in
    order: as the first thread that issues any has it."""
    structure = steps.structure
    begun = np.cumsum(structure.backward)
    found: dict[int, list[int]] = {}
    issued = {
        c: segment for segment, c in structure.issues[np.argsort(-structure.issues[:, 0], kind="stable")].tolist()
    }
    for c in _gradients_in_order(steps, group):
        mine = structure.of_thread(int(structure.thread[issued[c]]))
        before = int(begun[mine.start - 1]) if mine.start else 0
        found.setdefault(int(begun[issued[c]]) - before, []).append(c)
    return found


def _spans(steps: Steps, old: list[int]) -> dict[int, tuple[int, int]]:
    """Thread -> from which segment to which it makes the gradients `old`; of threads that reduce them. Raises
    NotRebucketed if one does more there than reduce them."""
    structure = steps.structure
    elsewhere = structure.edges.source >= structure.segments + len(structure.tasks)
    if np.isin(structure.edges.target[elsewhere] - structure.segments, old).any():  # issued in another step
        raise NotRebucketed("the ranks do not reduce the same gradients in the same order")
    issuing = structure.thread[structure.issues[np.isin(structure.issues[:, 1], old), 0]]
    return {thread: _stretch(steps, thread, old) for thread in np.unique(issuing).tolist()}


def _stretch(steps: Steps, thread: int, old: list[int]) -> tuple[int, int]:
    """From which segment to which a thread makes gradients. Raises NotRebucketed if it does more there than
    reduce them."""
    structure = steps.structure
    mine = structure.of_thread(thread)
    issues = structure.issues
    issues = issues[(issues[:, 0] >= mine.start) & (issues[:, 0] < mine.stop)]
    issues = issues[np.argsort(issues[:, 0], kind="stable")]
    of_gradients = np.isin(issues[:, 1], old)
    if issues[of_gradients, 1].tolist() != old:
        raise NotRebucketed("the ranks do not reduce the same gradients in the same order")
    first, last = int(issues[of_gradients, 0].min()), int(issues[of_gradients, 0].max())
    begun = np.flatnonzero(structure.backward[mine.start : first + 1])
    if not len(begun):
        raise NotRebucketed("gradients are reduced where no backward was seen to begin before")
    since = mine.start + int(begun[-1])
    if structure.backward[since + 1 : last + 1].any():
        raise NotRebucketed("gradients are reduced in several backwards of a step")
    waited = structure.edges.target
    if ((waited > since) & (waited <= last)).any():
        raise NotRebucketed(
            "a rank waits for collectives before its last gradients are issued, and what it would wait for with "
            "other buckets is not known"
        )
    others = issues[~of_gradients, 0]
    if since < first or ((others >= since) & (others < last)).any():
        what = "copies" if any(steps.structure.tasks[c].owner >= 0 for c in issues[~of_gradients, 1]) else "collectives"
        raise NotRebucketed(f"other {what} are issued among those of the gradients")
    return first, last
