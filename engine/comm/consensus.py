"""What ranks exchange before one waits for another, and what they do together: what fails on one fails on all,
and none waits for one that has failed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist

from .comm import Comm
from .launch import rank_and_size

T = TypeVar("T")

_ADVICE: Final = {
    errno.ENOSPC: "make room, or choose another folder",
    errno.EDQUOT: "make room, or choose another folder",
    errno.EROFS: "choose a folder that can be written",
    errno.EACCES: "choose a folder that can be written, or change its permissions",
    errno.EPERM: "choose a folder that can be written, or change its permissions",
}


def gather_objects(value: T, comm: Comm | None = None) -> list[T]:
    """Every rank's `value`, by its rank in `comm`; without one, of all ranks of the job. On all of them."""
    group = comm.group if comm is not None else dist.group.WORLD if dist.is_initialized() else None
    if group is None:
        return [value]
    values: list[T] = [value] * dist.get_world_size(group)
    if len(values) > 1:
        dist.all_gather_object(values, value, group=group)
    return values


@dataclass(frozen=True, slots=True)
class Difference:
    """The first thing that ranks which are to say the same of it do not."""

    key: Any
    said: Mapping[int, Any]
    """Rank -> what it says; None for nothing."""

    def listed(self, show: Callable[[Any], str] = str, verbs: tuple[str, str] = ("has", "have")) -> str:
        """`rank 0 has this, and ranks 1, 2 have that`."""
        saying: dict[str, list[int]] = {}
        for rank, value in self.said.items():
            saying.setdefault(repr(value), []).append(rank)
        return ", and ".join(
            f"rank{'s' if ranks[1:] else ''} {', '.join(map(str, ranks))} "
            f"{verbs[1] if ranks[1:] else verbs[0]} {show(self.said[ranks[0]])}"
            for ranks in saying.values()
        )


def first_difference(
    mine: Mapping[Any, Any], comm: Comm | None = None, sets: Iterable[Sequence[int]] | None = None
) -> Difference | None:
    """What the ranks of one of `sets`, by default all, say otherwise than each other of the same key.

    On all ranks of `comm`, as `gather_objects`. Where they agree, 8 bytes of each are sent.
    """
    digests = gather_objects(hashlib.blake2b(repr(mine).encode(), digest_size=8).digest(), comm)
    alike = [range(len(digests))] if sets is None else list(sets)
    if all(len({digests[rank] for rank in ranks}) == 1 for ranks in alike):
        return None
    return difference(gather_objects(mine, comm), alike)


def difference(said: Sequence[Mapping[Any, Any]], sets: Iterable[Sequence[int]]) -> Difference | None:
    """The same of what every rank has `said`."""
    for ranks in sets:
        for key in dict.fromkeys(key for rank in ranks for key in said[rank]):
            values = {rank: said[rank].get(key) for rank in ranks}
            if len(set(map(repr, values.values()))) > 1:
                return Difference(key, values)
    return None


class SharedError(RuntimeError):
    """Something failed on a rank. Raised on every rank, with the reason of the first that failed."""


class LostError(SharedError):
    """The ranks can do nothing together any more, and it is known why."""


def any_rank(flags: Sequence[bool], hosts: Comm, begun: int) -> list[int]:
    """Of each of `flags`, 1 if it is set on any rank of `hosts`, which communicates in host memory. On all of them.

    Raises LostError if the ranks have not `begun` equally many collectives on their device so far, as when the script
    of one has caught an error half-way and gone on alone: what they have sent each other is mixed up then.
    """
    numbers = torch.tensor([*flags, begun, -begun], dtype=torch.int64)
    hosts.all_reduce(numbers, "other", dist.ReduceOp.MAX).wait()
    *found, most, least = numbers.tolist()
    if most != -least:
        raise LostError(
            f"the ranks have sent each other unequally many gradients ({-least} to {most} collectives, this one "
            f"{begun}), so those of this step are mixed up: has one of them left out a backward, or gone on alone "
            "after an error half-way? The weights are those before this step; end the job, and start it again from a "
            "checkpoint"
        )
    return found


@contextlib.contextmanager
def failing_together(
    doing: str,
    everyone: Comm | None = None,
    error: Callable[[str], Exception] = SharedError,
    *,
    same: bool = False,
) -> Iterator[None]:
    """What fails in this block on one rank fails on all, by default of the job. On all of them; they must not
    communicate in it, except in its first lines.

    A rank raises its own error, or `error`, beginning with `doing`, if only others failed; with `same`, all raise that.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as raised:
        failure = raised
    reasons = gather_objects(None if failure is None else reason(failure), everyone)
    failed = [rank for rank, text in enumerate(reasons) if text is not None]
    if not failed:
        return
    try:
        if failure is not None and not same:
            raise failure
        where = f"rank {failed[0]}: " if len(reasons) > 1 else ""
        others = f" (and {len(failed) - 1} other ranks failed)" if len(failed) > 1 else ""
        raise error(f"{doing}: {where if same else 'failed on ' + where}{reasons[failed[0]]}{others}") from failure
    finally:
        del failure  # which leads to this frame, and to all that it was raised in


class World:
    """All ranks of the job; alone without a process group. What fails on one raises `error` on all."""

    def __init__(self, error: type[SharedError] = SharedError) -> None:
        self._error = error
        self.rank, self.size = rank_and_size()

    def together(self, doing: str, work: Callable[[], T]) -> T:
        """Do `work`, which must not communicate, on every rank.

        Raises `error` on all of them, beginning with `doing`, if it raised on any.
        """
        with failing_together(doing, error=self._error, same=True):
            return work()

    def from_first(self, doing: str, work: Callable[[], T]) -> T:
        """What `work` returns on rank 0, which alone does it, on every rank; raises as `together` does."""
        done = self.together(doing, lambda: work() if self.rank == 0 else None)
        return gather_objects(done)[0]  # type: ignore[return-value]


def reason(error: BaseException) -> str:
    """What an error says, and what to do about it where that is known."""
    if isinstance(error, SharedError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        advice = _ADVICE.get(error.errno or 0)
        return f"{error.strerror}{where}{'; ' + advice if advice else ''}"
    return f"{type(error).__name__}: {error}"
