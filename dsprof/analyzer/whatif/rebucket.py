"""What-ifs on collectives: the same bytes in other pieces."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ..arrays import Float, Int
from ..graph.link import Link
from ..graph.step_graph import PARTS, WAKE_UP_DELAY, Edges, Steps, Task
from .edit import GONE, Edited


class NotRebucketed(Exception):
    """Of steps whose gradients cannot be cut anew, why not."""


def rebucket(steps: Steps, sizes: list[int], link: Link, host_ms: float) -> Edited:
    """The steps with their gradient collectives cut anew into buckets of `sizes` bytes, moved over `link`.

    Each bucket is issued when its last byte is ready. When bytes become ready is known at the measured issues and
    taken as linear in the compute between them. A wait for old buckets waits for the new ones that hold their bytes.
    `host_ms` is the issuing thread's cost of one collective.
    Raises NotRebucketed unless gradients are reduced one after the other in one backward, by one group.
    """
    structure = steps.structure
    old = _gradients_in_order(steps)
    lanes = {structure.tasks[c].lane for c in old}
    if not old:
        raise NotRebucketed("no gradients are reduced in these steps")
    if len(lanes) > 1:
        raise NotRebucketed(f"gradients are reduced by {len(lanes)} process groups, and buckets are those of one")
    count = len(steps.numbers)
    ready = np.cumsum([float(np.mean(steps.size[c])) for c in old])
    wanted = np.cumsum(sizes) * ready[-1] / max(sum(sizes), 1)
    position = np.interp(wanted, np.concatenate([[0.0], ready]), np.arange(len(ready) + 1))
    low = np.minimum(position.astype(int), len(ready) - 1)
    part = (position - low)[:, None, None]

    def pieces(stretch: Float) -> Float:
        """The own work before each new issue, of that before each old one."""
        total = stretch.sum(axis=(0, 2))
        cost = host_ms * (len(old) - len(sizes))
        share = np.clip(1 - cost / np.maximum(total, 1e-9), 0.05, None)[:, None]
        edges = np.concatenate([np.zeros((1, count, len(PARTS))), np.cumsum(stretch, axis=0)]) * share
        points = edges[low] * (1 - part) + edges[low + 1] * part
        return np.diff(np.concatenate([np.zeros((1, count, len(PARTS))), points]), axis=0)

    work: list[Float] = []
    thread: list[Int] = []
    backward: list[npt.NDArray[np.bool_]] = []
    action: list[npt.NDArray[np.object_]] = []
    issues: list[tuple[int, int]] = []
    segment = np.full(structure.segments, GONE)
    at = 0
    for r in range(structure.threads):
        mine = structure.of_thread(r)
        first, last = _stretch(steps, r, old)
        for begin, end in ((mine.start, first), (last + 1, mine.stop)):
            if begin == last + 1:  # between the two, the new pieces
                new = pieces(steps.work[first : last + 1])
                work.append(new)
                action.append(np.repeat(structure.action[first : first + 1], len(sizes)))
                backward.append(np.append(structure.backward[first], np.zeros(len(sizes) - 1, bool)))
                issues += [(at + i, i) for i in range(len(sizes))]
                segment[first] = at  # what was waited for before it still is
                at += len(sizes)
            segment[begin:end] = at + np.arange(end - begin)
            work.append(steps.work[begin:end])
            backward.append(structure.backward[begin:end])
            action.append(structure.action[begin:end])
            at += end - begin
        thread.append(np.full(at - sum(map(len, thread)), r))
    # Tasks: the new ones come where the first old one was.
    kept = [c for c in range(len(structure.tasks)) if c not in set(old)]
    before = [c for c in kept if c < min(old)]
    task = np.full(len(structure.tasks), GONE)
    task[kept] = [i if c in before else i + len(sizes) for i, c in enumerate(kept)]
    new_tasks = len(before) + np.arange(len(sizes))
    bucket = Task(lanes.pop(), "gradient", gradient=True, workers=structure.tasks[old[0]].workers, linked=True)
    tasks = tuple(structure.tasks[c] for c in before) + (bucket,) * len(sizes)
    tasks += tuple(structure.tasks[c] for c in kept if c not in before)

    def rows(of: Float, new: Float) -> Float:
        return np.concatenate([of[before], new, of[[c for c in kept if c not in before]]])

    # Edges.
    holds = _overlap(ready, wanted)
    source, target = [], []
    for a, b in zip(structure.edges.source.tolist(), structure.edges.target.tolist(), strict=True):
        c = a - structure.segments
        if 0 <= c < len(structure.tasks) and c in old:  # a wait for an old bucket
            for i in np.flatnonzero(holds[old.index(c)]).tolist():
                source.append(at + int(new_tasks[i]))
                target.append(int(segment[b]))
            continue
        if b >= structure.segments and b - structure.segments in old:
            continue  # its issue
        source.append(_moved(a, segment, task, at, len(tasks)))
        target.append(_moved(b, segment, task, at, len(tasks)))
    source += [u for u, _ in issues]
    target += [at + int(new_tasks[i]) for _, i in issues]
    pairs = np.unique(np.array([source, target], np.int64).reshape(2, -1), axis=1)
    sized = np.repeat(np.array(sizes, np.float64)[:, None], count, axis=1)
    changed = replace(
        structure,
        thread=np.concatenate(thread).astype(np.int64),
        backward=np.concatenate(backward),
        action=np.concatenate(action),
        tasks=tasks,
        edges=Edges(pairs[0], pairs[1]),
    )
    new_steps = replace(
        steps,
        structure=changed,
        work=np.concatenate(work),
        transfer=rows(steps.transfer, np.full(sized.shape, link.latency_ms)),
        wire=rows(steps.wire, sized * link.ms_per_byte),
        size=rows(steps.size, sized),
        began=np.full((at, count), np.nan),
        ended=np.full((len(tasks), count), np.nan),
    )
    return Edited(new_steps, np.concatenate([segment, np.where(task >= 0, task + at, GONE)]))


def _moved(operation: int, segment: Int, task: Int, segments: int, tasks: int) -> int:
    """The number that an operation has among as many segments and tasks as there are now."""
    if operation < len(segment):
        return int(segment[operation])
    if operation < len(segment) + len(task):
        return segments + int(task[operation - len(segment)])
    return operation - len(segment) - len(task) + segments + tasks


def _overlap(old: Float, new: Float) -> npt.NDArray[np.bool_]:
    """[old, new] whether two buckets share bytes; each of both lists is where its buckets end."""
    slack = 1e-9 * old[-1]
    begin_old, begin_new = np.append(0.0, old[:-1]), np.append(0.0, new[:-1])
    shared: npt.NDArray[np.bool_] = (begin_old[:, None] < new - slack) & (begin_new < old[:, None] - slack)
    return shared


def _gradients_in_order(steps: Steps) -> list[int]:
    """The tasks that carry gradients, in the order in which the first thread that does issues them."""
    issues = steps.structure.issues
    issues = issues[np.argsort(issues[:, 0], kind="stable")]
    return list(dict.fromkeys(c for c in issues[:, 1].tolist() if steps.structure.tasks[c].gradient))


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


def coalesce(steps: Steps, families: list[list[int]], together: int, link: Link, host_ms: float) -> Edited:
    """The steps with every `together` neighbours of each family of tasks merged into one, moved over `link`.

    A family is of one kind, in order of issue, in one stretch of the step. What is gathered is needed by the first of
    those merged, so it is issued and waited for there; what is reduced is there with the last. `host_ms` is the issuing
    thread's cost of each collective that is saved. Every family's transfers are modelled, merged or not, so that with
    `together` 1 the model's own error can be told and cancels from a difference.
    Raises NotRebucketed where ranks do not issue the same collectives.
    """
    structure = steps.structure
    count, segments = len(steps.numbers), structure.segments
    transfer, wire, size = steps.transfer.copy(), steps.wire.copy(), steps.size.copy()
    tasks = list(structure.tasks)
    dropped: set[int] = set()
    for family in families:
        first = not tasks[family[0]].gradient
        for begin in range(0, len(family), together):
            merged = family[begin : begin + together]
            kept = merged[0] if first else merged[-1]
            total = sum(float(np.mean(steps.size[c])) for c in merged)
            transfer[kept], wire[kept], size[kept] = link.latency_ms, total * link.ms_per_byte, total
            tasks[kept] = replace(tasks[kept], linked=True)
            dropped.update(c for c in merged if c != kept)
    every = {c for family in families for c in family}
    issues = structure.issues
    for r in range(structure.threads):
        mine = issues[structure.thread[issues[:, 0]] == r]
        if not every <= set(mine[:, 1].tolist()):
            raise NotRebucketed("not every rank issues the same collectives")
    work = steps.work.copy()
    saved = np.isin(issues[:, 1], list(dropped))
    for segment in issues[saved, 0].tolist():
        taken = work[segment].sum(axis=-1)
        work[segment] *= np.clip(1 - host_ms / np.maximum(taken, 1e-9), 0.0, None)[:, None]
    # Nobody is woken late from a wait that there is no more.
    waits = structure.waits
    gone = np.isin(waits[:, 0], list(dropped))
    work[np.setdiff1d(waits[gone, 1], waits[~gone, 1]), :, WAKE_UP_DELAY] = 0.0
    kept_tasks = [c for c in range(len(tasks)) if c not in dropped]
    number = np.full(len(tasks), GONE)
    number[kept_tasks] = np.arange(len(kept_tasks))
    source, target = structure.edges.source, structure.edges.target

    def is_dropped(operation: Int) -> npt.NDArray[np.bool_]:
        c = operation - segments
        return (c >= 0) & (c < len(tasks)) & np.isin(c, list(dropped))

    stays = ~is_dropped(source) & ~is_dropped(target)
    moved = np.concatenate(
        [np.arange(segments), np.where(number >= 0, number + segments, GONE),
         segments + len(kept_tasks) + np.arange(structure.outside)]
    ).astype(np.int64)  # fmt: skip
    changed = replace(
        structure,
        tasks=tuple(tasks[c] for c in kept_tasks),
        edges=Edges(moved[source[stays]], moved[target[stays]]),
    )
    new_steps = replace(
        steps, structure=changed, work=work, transfer=transfer[kept_tasks], wire=wire[kept_tasks],
        size=size[kept_tasks], ended=np.full((len(kept_tasks), count), np.nan),
    )  # fmt: skip
    return Edited(new_steps, moved[: segments + len(tasks)])
