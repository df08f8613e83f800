"""Which rank a job waits for, from what each rank has issued and what of that has not ended. No clock, no files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

SEND: Final = "send"
RECV: Final = "recv"
SAME_BYTES: Final = frozenset({"all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "barrier"})
"""Collectives whose larger side is as large on all ranks. Of a gather or a scatter the root alone has it all, and the
splits of an all-to-all are each rank's own."""
MOST_NAMED: Final = 8
"""Ranks that a sentence names."""

Members = Callable[[str], Sequence[int] | None]
"""The ranks of a process group, in its order; None: not known."""
MessageKey = tuple[str, int, int, str]
"""Group, other rank, tag, and SEND or RECV."""


@dataclass(frozen=True)
class Communication:
    """A communication that a rank issued."""

    name: str
    group: str
    seq: int
    """Number in the group, or of a message in (group, source, destination, tag)."""
    start_ns: int = 0
    bytes: int | None = None
    dtype: str | None = None
    root: int | None = None
    peer: int | None = None
    """The other rank of the job, of a message; None: a collective."""
    tag: int = -1
    waited: bool = False
    """The rank stands still for it, as far as is known."""

    @property
    def words(self) -> str:
        """`all_reduce 41 of group 0`, `recv 3 from rank 2 of group 1`."""
        side = "" if self.peer is None else f" {'to' if self.name == SEND else 'from'} rank {self.peer}"
        return f"{self.name} {self.seq}{side} of group {self.group}"

    @property
    def content(self) -> tuple[str, int | None, str | None]:
        """What all ranks must agree on; None: need not, or not known."""
        return (self.name, self.bytes if self.name in SAME_BYTES else None, self.dtype or None)


@dataclass(frozen=True)
class RankState:
    """How far a rank is.

    open:      communications that have not ended, in the order of their issue
    issued:    how many collectives of each group it has issued
    messages:  how many sends and receives of each kind
    recent:    collectives that it has issued lately, by group and number, the open ones among them
    whole:     `issued` and `messages` are of its whole life: what is not in them it never issued
    waiting:   it stands still inside a communication, as far as is known
    phases:    phases under way, the outermost first
    device_wait: the call in which it stands still until its device has done what it was given; empty: none
    """

    rank: int
    open: tuple[Communication, ...] = ()
    issued: Mapping[str, int] = field(default_factory=dict)
    messages: Mapping[MessageKey, int] = field(default_factory=dict)
    recent: Mapping[tuple[str, int], Communication] = field(default_factory=dict)
    whole: bool = True
    waiting: bool = False
    phases: tuple[str, ...] = ()
    device_wait: str = ""

    @property
    def count(self) -> int:
        """Collectives and messages that it has issued."""
        return sum(self.issued.values()) + sum(self.messages.values())

    def has_reached(self, operation: Communication, of_rank: int) -> bool | None:
        """Whether it has issued its side of what `of_rank` has; None: not known."""
        if operation.peer is None:
            count = self.issued.get(operation.group)
        else:
            other_side = RECV if operation.name == SEND else SEND
            count = self.messages.get((operation.group, of_rank, operation.tag, other_side))
        if count is None:
            return False if self.whole else None
        return count > operation.seq


Version = tuple[tuple[int, ...], Communication]
"""Ranks that issued the same, and what."""


@dataclass(frozen=True)
class Stall:
    """Why ranks wait.

    missing:  `culprits` have not issued what `waiters` wait in, and wait for nobody themselves
    cycle:    `culprits` wait for each other, each in the operation of `waits`
    mismatch: ranks issued different things under one number (`versions`, the most frequent first)
    stuck:    all have issued it, alike, and it does not end
    """

    kind: Literal["missing", "cycle", "mismatch", "stuck"]
    operation: Communication
    waiters: tuple[int, ...]
    culprits: tuple[int, ...]
    versions: tuple[Version, ...] = ()
    waits: tuple[tuple[int, Communication], ...] = ()

    @property
    def code(self) -> str:
        """Of the finding. Ranks that wait for each other in collectives disagree about their order."""
        collectives = {operation.group for _, operation in self.waits if operation.peer is None}
        return "run.desync" if self.kind == "mismatch" or len(collectives) > 1 else "run.hang"

    @property
    def words(self) -> str:
        """In a sentence."""
        what = self.operation.words
        if self.kind == "mismatch":
            versions = ", ".join(f"{described(one)} on {ranks_in_words(ranks)}" for ranks, one in self.versions)
            which = f"collective {self.operation.seq} of group {self.operation.group}"
            return f"{which} is not the same on all ranks: {versions}"
        if self.kind == "cycle":
            waits = ", ".join(f"rank {rank} in {operation.words}" for rank, operation in self.waits)
            return f"{ranks_in_words(self.culprits)} wait for each other: {waits}"
        if self.kind == "stuck":
            return f"all ranks have reached {what}, and it does not end"
        who = ranks_in_words(self.culprits)
        have = "has" if len(self.culprits) == 1 else "have"
        wait = "waits" if len(self.waiters) == 1 else "wait"
        if self.operation.peer is not None:
            side = "received" if self.operation.name == SEND else "sent"
            return f"{who} {have} not {side} what {ranks_in_words(self.waiters)} {wait} for in {what}"
        return f"{who} {have} not reached {what}, in which {ranks_in_words(self.waiters)} {wait}"


def described(operation: Communication) -> str:
    """`all_reduce of 4096 bytes of float32`."""
    size = "" if operation.bytes is None or operation.name == "barrier" else f" of {operation.bytes} bytes"
    return f"{operation.name}{size}" + (f" of {operation.dtype}" if operation.dtype else "")


def ranks_in_words(ranks: Iterable[int]) -> str:
    """`rank 1`, `ranks 0, 2, 3`."""
    listed = list(ranks)
    shown = ", ".join(map(str, listed[:MOST_NAMED])) + (", ..." if len(listed) > MOST_NAMED else "")
    return f"rank {shown}" if len(listed) == 1 else f"ranks {shown}"


def find_stall(states: Mapping[int, RankState], members: Members) -> Stall | None:
    """What the ranks wait for if nothing of it ends; None where nobody is known to wait for something.

    A rank that is not among `states` is never accused, nor one of which it is not known whether it has come.
    """
    waits = [(state.rank, operation) for state in states.values() for operation in _blocking(state)]
    differ = _first_mismatch(states, [operation for _, operation in waits])
    if differ is not None:
        return differ
    missing: dict[tuple[int, Communication], set[int]] = {}
    unknown, found = False, set()
    for rank, operation in waits:
        if (rank, _kind(operation)) in found:  # the oldest that somebody is missing in counts
            continue
        others = members(operation.group) if operation.peer is None else [operation.peer]
        here: set[int] = set()
        for other in others or ():
            if other == rank:
                continue
            reached = states[other].has_reached(operation, rank) if other in states else None
            if reached is None:
                unknown = True
            elif not reached:
                here.add(other)
        unknown |= others is None
        if here:
            missing[rank, operation] = here
            found.add((rank, _kind(operation)))
    if missing:
        return _missing(states, missing)
    stuck = [(rank, operation) for rank, operation in waits if operation.waited]
    if unknown or not stuck:
        return None
    first = min(stuck, key=lambda item: item[1].start_ns)[1]
    alike = [rank for rank, operation in stuck if (operation.group, operation.seq) == (first.group, first.seq)]
    return Stall("stuck", first, tuple(sorted(alike)), ())


def _blocking(state: RankState) -> list[Communication]:
    """Of what is open, what may hold the rank: what it waits for, where that is known; the oldest first."""
    waited = [operation for operation in state.open if operation.waited]
    return sorted(waited or state.open, key=lambda one: one.seq)


def _kind(operation: Communication) -> tuple[object, ...]:
    """What comes one after the other: the collectives of a group, the sends or receives of a pair."""
    return (operation.group, operation.peer, operation.tag, operation.name if operation.peer is not None else "")


def _first_mismatch(states: Mapping[int, RankState], blocking: Iterable[Communication]) -> Stall | None:
    """The first collective, of those up to one that ranks wait in, that is not the same on all ranks."""
    last: dict[str, int] = {}
    for operation in blocking:
        if operation.peer is None:
            last[operation.group] = max(last.get(operation.group, -1), operation.seq)
    issued: dict[tuple[str, int], dict[int, Communication]] = defaultdict(dict)
    for state in states.values():
        for (group, seq), operation in state.recent.items():
            if seq <= last.get(group, -1):
                issued[group, seq][state.rank] = operation
    found = [of_rank for of_rank in issued.values() if differing({rank: one.content for rank, one in of_rank.items()})]
    if not found:
        return None
    return mismatch(min(found, key=lambda of_rank: min(one.start_ns for one in of_rank.values())))


def differing(contents: Mapping[int, tuple[str, int | None, str | None]]) -> bool:
    """Whether ranks that issued these (`Communication.content`) disagree."""
    names = {name for name, _, _ in contents.values()}
    return len(names) > 1 or any(
        len({content[i] for content in contents.values() if content[i] is not None}) > 1 for i in (1, 2)
    )


def mismatch(of_rank: Mapping[int, Communication]) -> Stall:
    """What ranks issued that disagree. The culprits are those that differ from most; all of them, where that does not
    decide it."""
    ranks: dict[tuple[str, int | None, str | None], list[int]] = defaultdict(list)
    for rank in sorted(of_rank):
        ranks[of_rank[rank].content].append(rank)
    order = sorted(ranks.values(), key=lambda same: (-len(same), same[0]))
    decided = len(order[0]) > len(of_rank) / 2
    culprits = sorted(rank for same in order[decided:] for rank in same)
    versions = tuple((tuple(same), of_rank[same[0]]) for same in order)
    first = versions[0][1]
    return Stall("mismatch", first, tuple(sorted(of_rank)), tuple(culprits), versions)


def _missing(states: Mapping[int, RankState], missing: Mapping[tuple[int, Communication], set[int]]) -> Stall:
    edges: dict[int, set[int]] = defaultdict(set)
    for (rank, _), others in missing.items():
        edges[rank] |= others
    # A rank that issued something early and does something else now is not held by it.
    held = {rank for rank in edges if states[rank].waiting}
    culprits = set().union(*missing.values()) - held
    if culprits:
        direct = [(rank, operation) for (rank, operation), others in missing.items() if others & culprits]
        operation = min(direct, key=lambda item: item[1].start_ns)[1]
        absent = culprits & set().union(*(others for (_, one), others in missing.items() if _same(one, operation)))
        waiters = sorted({rank for rank, one in direct if _same(one, operation)} - absent)
        return Stall("missing", operation, tuple(waiters), tuple(sorted(absent)))
    cycle = _cycle(edges)
    of_rank = {rank: operation for (rank, operation), others in missing.items() if others & set(cycle)}
    waits = tuple((rank, of_rank[rank]) for rank in sorted(cycle))
    return Stall("cycle", min((one for _, one in waits), key=lambda one: one.start_ns), waits=waits,
                 waiters=tuple(sorted(cycle)), culprits=tuple(sorted(cycle)))  # fmt: skip


def _same(one: Communication, other: Communication) -> bool:
    return (one.group, one.seq, one.peer, one.tag) == (other.group, other.seq, other.peer, other.tag)


def _cycle(edges: Mapping[int, set[int]]) -> list[int]:
    """Ranks each of which waits for the next, the last for the first; every rank that is waited for waits, too."""
    path = [min(edges)]
    while True:
        following = min(edges[path[-1]])
        if following in path:
            return path[path.index(following) :]
        path.append(following)
