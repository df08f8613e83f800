"""The members of process groups, which every rank states: as ranges where they are stored, and once in run.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from synthetic import Job, write_capture

from dsprof.run import RunFolder
from dsprof.trace.files import open_parquet
from dsprof.trace.group_facts import StatedGroups, pack
from dsprof.trace.merge import merge
from dsprof.trace.merge_rank import RANK_INFO


def group(ranks: Any, rank: int = 0, name: str = "0") -> dict[str, Any]:
    return {"fact": "group", "name": name, "ranks": ranks, "rank": rank}


@pytest.mark.parametrize(
    ("ranks", "ranges"),
    [
        ([*range(10_000)], [[0, 10_000, 1]]),
        ([*range(3, 80, 8)], [[3, 83, 8]]),
        ([0, 1, 2, 3, 4, 5, 6, 9, 12, 15], [[0, 7, 1], [9, 18, 3]]),
        ([9, 8, 7, 6, 5, 4, 3, 2, 2, 1], [[n, n + 1, 1] for n in (9, 8, 7, 6, 5, 4, 3, 2, 2, 1)]),
    ],
)
def test_members_as_ranges_and_back(ranks: list[int], ranges: list[list[int]]) -> None:
    (packed,) = pack([group(ranks)])
    assert packed == {"fact": "group", "name": "0", "ranges": ranges, "rank": 0}
    assert StatedGroups().new([packed]) == [group(ranks)]


@pytest.mark.parametrize("ranks", [[0, 1], None, "all", [None] * 20, [0.5] * 20])
def test_what_is_short_or_no_list_of_ranks_stays(ranks: Any) -> None:
    assert pack([group(ranks)]) == [group(ranks)]
    assert StatedGroups().new([group(ranks)]) == [group(ranks)]


@pytest.mark.parametrize(
    "ranges", [None, [[0, 10**30, 1]], [[-(10**30), 5, 1]], [[0, 5]], [[0, 5, 0]], [[0, 1 << 20, 1]] * 3, ["a"]]
)
def test_ranges_that_no_job_has_are_no_members(ranges: Any) -> None:
    stated = {"fact": "group", "name": "0", "ranges": ranges, "rank": 0}
    assert StatedGroups().new([stated]) == [{"fact": "group", "name": "0", "rank": 0}]


def test_what_ranks_state_alike_counts_once_and_in_order() -> None:
    stated = StatedGroups()
    first, other = group([0, 1]), group([2, 3], 2)
    assert stated.new([first, {"fact": "ddp", "rank": 0}]) == [first, {"fact": "ddp", "rank": 0}]
    assert stated.new([group([0, 1], 1), {"fact": "ddp", "rank": 1}]) == [{"fact": "ddp", "rank": 1}]
    assert stated.new([other]) == [other]
    assert stated.new([group([0, 1], 3)]) == [group([0, 1], 3)]


def test_a_group_of_many_ranks_is_in_run_json_once(tmp_path: Path) -> None:
    members = [*range(1000)]
    for rank, capture in Job(ranks=3, steps=3).captures().items():
        path = write_capture(capture, tmp_path / "capture")
        (path / "facts.jsonl").write_text(json.dumps(group(members, rank, "all")) + "\n")
    folder = RunFolder(tmp_path)
    info = merge(folder)
    assert info.groups["all"]["ranks"] == members
    assert [fact["rank"] for fact in info.facts if fact.get("name") == "all"] == [0]
    assert merge(folder) == info
    assert folder.read_info() == info
    with open_parquet(folder.trace / "rank00002.parquet") as file:
        stored = json.loads(file.schema_arrow.metadata[RANK_INFO])
    assert [fact["ranges"] for fact in stored["facts"] if fact.get("name") == "all"] == [[[0, 1000, 1]]]
