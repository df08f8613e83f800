"""The chains of all ranks, a rank at a time: of thousands of ranks there is not room for all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from dsprof.trace.packing import ByRank, pack, unpack

from ..align.topology import Topology
from .chains import Chain, RankChains, without_unseen_messages

Found = TypeVar("Found")


class PackedChains(Mapping[int, RankChains]):
    """As tasks send them. The ranks of a part are unpacked when one of them is asked for, and kept until one of another
    part is: they are to be asked for in order."""

    def __init__(self, parts: Sequence[tuple[tuple[int, ...], bytes]]) -> None:
        """parts: ranks, and what `packed_part` made of their chains"""
        self._parts = [packed for _, packed in parts]
        self._part_of = {rank: part for part, (ranks, _) in enumerate(parts) for rank in ranks}
        self._at, self._held = -1, dict[int, RankChains]()

    def __getitem__(self, rank: int) -> RankChains:
        part = self._part_of[rank]
        if part != self._at:
            self._at, self._held = part, unpack(self._parts[part])
        return self._held[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._part_of)

    def __len__(self) -> int:
        return len(self._part_of)


def packed_part(chains: Mapping[int, RankChains]) -> tuple[tuple[int, ...], bytes]:
    """A part of `PackedChains`."""
    return tuple(chains), pack(ByRank(chains))


class ChangedChains(Mapping[int, RankChains]):
    """Chains of ranks that are changed each time that they are asked for."""

    def __init__(self, of_ranks: Mapping[int, RankChains], change: Callable[[int, RankChains], RankChains]) -> None:
        self._of_ranks, self._change = of_ranks, change

    def __getitem__(self, rank: int) -> RankChains:
        return self._change(rank, self._of_ranks[rank])

    def __iter__(self) -> Iterator[int]:
        return iter(self._of_ranks)

    def __len__(self) -> int:
        return len(self._of_ranks)


class EachChain(Generic[Found]):
    """One thing of each chain of these ranks, with the chain's number: those that lead come first, [R] by rank, and
    those beside them after these. They come in order of rank, and can be gone through again."""

    def __init__(
        self, of_ranks: Mapping[int, RankChains], ranks: Sequence[int], what: Callable[[Chain], Found]
    ) -> None:
        self._of_ranks, self._ranks, self._what = of_ranks, ranks, what

    def __iter__(self) -> Iterator[tuple[int, Found]]:
        beside = len(self._ranks)
        for number, rank in enumerate(self._ranks):
            first, *others = self._of_ranks[rank].chains
            yield number, self._what(first)
            for chain in others:
                yield beside, self._what(chain)
                beside += 1


def without_unseen_waits(of_ranks: Mapping[int, RankChains], topology: Topology) -> Mapping[int, RankChains]:
    """The same, where waits for messages of ranks that were not captured are no time of the rank's own, which would be
    as long whatever a change did: of ranks without a device, where another one of the stage has all of its messages.
    That one has them as late, and who communicates with it is held up as long. One that waits for none stays itself.
    Where no rank changes it is `of_ranks`."""
    waiting, seen_whole = set(), set()
    for rank in of_ranks:
        if rank not in topology.stage_of:
            continue
        chains = of_ranks[rank]
        if not len(chains.time.unseen_messages.start):
            seen_whole.add(topology.stage_of[rank])
        elif len(chains.chains) == 1:
            waiting.add(rank)
    held = {rank for rank in waiting if topology.stage_of[rank] in seen_whole}
    if not held:
        return of_ranks
    return ChangedChains(of_ranks, lambda rank, of: without_unseen_messages(of) if rank in held else of)
