"""Whom a job waits for, from what each rank has issued."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dsprof.live.waiting import RECV, SEND, Communication, RankState, Stall, find_stall

WORLD = {"0": (0, 1, 2), "1": (0, 1), "2": (1, 2)}


def reduction(seq: int, group: str = "0", *, size: int = 64, dtype: str = "float32", at: int = 0) -> Communication:
    return Communication("all_reduce", group, seq, at, size, dtype)


def rank(number: int, *opened: Communication, waiting: bool | None = None, **issued: int) -> RankState:
    """One that has issued so many collectives of each group (`g0=5`), and `opened`."""
    counts = {name[1:]: count for name, count in issued.items()}
    messages = {}
    for one in opened:
        if one.peer is None:
            counts[one.group] = max(counts.get(one.group, 0), one.seq + 1)
        else:
            messages[one.group, one.peer, one.tag, one.name] = one.seq + 1
    recent = {(one.group, one.seq): one for one in opened if one.peer is None}
    return RankState(number, opened, counts, messages, recent, waiting=bool(opened) if waiting is None else waiting)


def stall(*states: RankState) -> Stall:
    found = find_stall({state.rank: state for state in states}, lambda group: WORLD.get(group))
    assert found is not None
    return found


def none(*states: RankState) -> None:
    assert find_stall({state.rank: state for state in states}, lambda group: WORLD.get(group)) is None


def test_the_rank_that_has_not_come() -> None:
    found = stall(rank(0, reduction(41)), rank(1, g0=41), rank(2, reduction(41)))
    assert (found.kind, found.culprits, found.waiters) == ("missing", (1,), (0, 2))
    assert found.code == "run.hang"
    assert found.words == "rank 1 has not reached all_reduce 41 of group 0, in which ranks 0, 2 wait"


def test_what_is_under_way_before_it_does_not_hide_it() -> None:
    """All have issued number 40, whose end was not seen yet."""
    early = [reduction(40), reduction(41)]
    found = stall(rank(0, *early), rank(1, reduction(40)), rank(2, *early))
    assert (found.kind, found.culprits, found.operation.seq) == ("missing", (1,), 41)


def test_nobody_waits() -> None:
    none(rank(0, g0=3), rank(1, g0=3), rank(2, g0=2))


def test_all_have_come_and_it_may_be_slow() -> None:
    none(*(rank(number, reduction(3)) for number in range(3)))
    found = stall(*(rank(number, replace(reduction(3), waited=True)) for number in range(3)))
    assert (found.kind, found.culprits, found.waiters) == ("stuck", (), (0, 1, 2))


def test_who_waits_for_who_waits_is_no_culprit() -> None:
    """Rank 0 waits for rank 1, which waits in another group for rank 2."""
    found = stall(rank(0, reduction(5, "1")), rank(1, reduction(7, "2"), g1=5), rank(2, g2=7))
    assert (found.culprits, found.waiters, found.operation.group) == ((2,), (1,), "2")


def test_what_was_issued_early_does_not_hold_a_rank() -> None:
    """Rank 1 has issued a bucket and sleeps; rank 0 waits for its message."""
    received = Communication(RECV, "1", 0, peer=1, tag=0, waited=True)
    found = stall(rank(0, received, g0=4), rank(1, reduction(4), waiting=False), rank(2, g0=5))
    assert (found.kind, found.culprits, found.waiters) == ("missing", (1,), (0,))
    assert found.words == "rank 1 has not sent what rank 0 waits for in recv 0 from rank 1 of group 1"


def test_two_groups_in_another_order() -> None:
    found = stall(rank(0, reduction(0, "0")), rank(1, reduction(0, "1")), rank(2, reduction(0, "0")))
    assert (found.kind, found.code, found.culprits) == ("cycle", "run.desync", (0, 1))
    assert "rank 0 in all_reduce 0 of group 0, rank 1 in all_reduce 0 of group 1" in found.words


def test_both_receive_first() -> None:
    states = [rank(one, Communication(RECV, "1", 0, peer=1 - one, tag=0, waited=True)) for one in (0, 1)]
    found = stall(*states)
    assert (found.kind, found.code, found.culprits) == ("cycle", "run.hang", (0, 1))


def test_a_message_whose_other_side_has_come_holds_nobody() -> None:
    sent = Communication(SEND, "1", 0, peer=1, tag=0)
    received = Communication(RECV, "1", 0, peer=0, tag=0)
    none(rank(0, sent), rank(1, received))


def test_tags_are_apart() -> None:
    found = stall(rank(0, Communication(RECV, "1", 0, peer=1, tag=7, waited=True)),
                  rank(1, Communication(SEND, "1", 0, peer=0, tag=8), waiting=False))  # fmt: skip
    assert found.culprits == (1,)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (Communication("broadcast", "0", 3, 0, 64, "float32"), "broadcast of 64 bytes of float32 on rank 1"),
        (reduction(3, size=68), "all_reduce of 68 bytes of float32 on rank 1"),
        (reduction(3, dtype="int32"), "all_reduce of 64 bytes of int32 on rank 1"),
    ],
)
def test_the_one_that_differs_from_most(odd: Communication, words: str) -> None:
    found = stall(rank(0, reduction(3)), rank(1, odd), rank(2, reduction(3)))
    assert (found.kind, found.code, found.culprits) == ("mismatch", "run.desync", (1,))
    assert words in found.words


def test_of_two_that_differ_neither_is_the_culprit_alone() -> None:
    found = stall(rank(0, reduction(3, "1")), rank(1, reduction(3, "1", size=68)))
    assert found.culprits == (0, 1)


def test_the_first_difference_counts() -> None:
    """Rank 1 left number 3 out: from then on every number differs in size, and it is one behind."""
    late = RankState(1, (reduction(4, size=16),), {"0": 5}, {}, {
        ("0", 3): reduction(3, size=32), ("0", 4): reduction(4, size=16)}, waiting=True)  # fmt: skip
    others = [
        RankState(one, (reduction(5, size=16),), {"0": 6}, {}, {
            ("0", 3): reduction(3), ("0", 4): reduction(4, size=32), ("0", 5): reduction(5, size=16)}, waiting=True)
        for one in (0, 2)
    ]  # fmt: skip
    found = stall(late, *others)
    assert (found.operation.seq, found.culprits) == (3, (1,))


@pytest.mark.parametrize("name", ["gather", "scatter", "all_to_all"])
def test_sizes_that_may_differ(name: str) -> None:
    def one(size: int) -> Communication:
        return Communication(name, "0", 3, 0, size, "float32")

    none(rank(0, one(300)), rank(1, one(100)), rank(2, one(200)))


def test_nobody_is_accused_of_whom_too_little_is_known() -> None:
    none(rank(0, reduction(41)), rank(2, reduction(41)))  # rank 1 was not captured
    unknown = replace(rank(1), whole=False)
    none(rank(0, reduction(41)), unknown, rank(2, reduction(41)))
    none(rank(0, reduction(41, "unheard of")), rank(1), rank(2))
