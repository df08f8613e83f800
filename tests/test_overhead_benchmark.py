"""benchmarks/overhead.py: what it makes of the rounds, and how it goes on. No job is run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import overhead  # noqa: E402
from overhead_result import FEWEST, Result, Round  # noqa: E402

CPU_US = {"off": 100_000, "off_again": 100_000, "light": 100_200, "full": 103_000}
CPU_S = {"off": 1.0, "off_again": 1.0, "python": 1.02, "torch_profiler": 1.3, "torch_profiler_stacks": 2.0,
         "torch_profiler_memory": 1.5}  # fmt: skip
SAID = {"faults": 2.0, "records": 10.0, "beside_ms_a_second": 0.5, "opening_ms": 5.0, "closing_ms": 1.0}


def turns(job: str = "ddp", paces: tuple[float, ...] = (1.0, 1.5, 1.0), **times: list[int]) -> Round:
    """A round on a host whose pace changes from turn to turn."""
    arms = {arm: times.get(arm, [round(pace * us) for pace in paces]) for arm, us in CPU_US.items()}
    return {
        "job": job,
        "turns": {arm: {"cpu_us": us, "wall_us": [2 * n for n in us], **SAID} for arm, us in arms.items()},
    }


def blocks(job: str = "ddp", ranks: tuple[float, ...] = (1.0,)) -> Round:
    """A round whose ranks take as many times as long as CPU_S says."""
    of = {arm: [{"cpu_s": pace * s, "wall_s": 2 * s} for pace in ranks] for arm, s in CPU_S.items()}
    return {"job": job, "steps": 5, "blocks": of}


def result(path: Path, *rounds: Round) -> Result:
    found = Result(path, anew=False)
    for one in rounds:
        found.add(one)
    return found


def test_a_ratio_is_of_steps_of_one_turn(tmp_path: Path) -> None:
    """The host's pace falls out."""
    summary = result(tmp_path / "o.json", *[turns()] * FEWEST, blocks(), blocks()).summary("ddp")
    assert summary["cpu"]["light"] == {"ratio": 1.002, "low": 1.002, "high": 1.002, "mean": 1.002}
    assert summary["cpu"]["torch_profiler"]["ratio"] == 1.3
    assert summary["resolved"]
    assert summary["step_ms"] == {"cpu": pytest.approx(116.7), "wall": pytest.approx(233.3)}
    assert summary["times_what_light_costs"]["torch_profiler"] == {"ratio": 150.0, "at_least": 150.0}
    assert summary["captured"]["light"] == {
        "records_a_rank_a_step": 10.0, "bytes_a_rank_a_step": 640, "opening_cpu_ms": 5.0, "closing_cpu_ms": 1.0,
        "side_threads_cpu_ms_a_second": 0.5,
    }  # fmt: skip


def test_all_but_the_arm_that_shows_the_noise_are_compared_with_both_arms_without_collectors(tmp_path: Path) -> None:
    cpu = result(tmp_path / "o.json", turns(off=[80_000] * 3, off_again=[125_000] * 3, full=[103_000] * 3)).summary(
        "ddp"
    )["cpu"]
    assert cpu["off_again"]["ratio"] == 1.5625
    assert cpu["full"]["ratio"] == 1.03


def test_blocks_are_the_mean_of_the_ranks(tmp_path: Path) -> None:
    summary = result(tmp_path / "o.json", blocks("fsdp2", ranks=(1.0, 3.0))).summary("fsdp2")
    assert summary["step_ms"] == {"cpu": 400.0, "wall": 400.0}
    assert "off_again" not in summary["cpu"]


def test_the_lowest_and_the_highest_fifth_do_not_count(tmp_path: Path) -> None:
    """Of the turns of a round, and of the rounds."""
    odd = turns(paces=(1.0,) * 5, light=[10_000, 101_000, 101_000, 101_000, 900_000])
    low, high = (turns(paces=(1.0,) * 5, light=[us] * 5) for us in (50_000, 800_000))
    assert result(tmp_path / "o.json", odd, low, odd, high, odd).summary("ddp")["cpu"]["light"]["ratio"] == 1.01


def test_the_interval_is_over_rounds_since_a_process_has_a_bias_of_its_own(tmp_path: Path) -> None:
    """A thousand steps of one process say no more of the next one's bias than one step does."""
    biased = [turns(paces=(1.0,) * 1000, off_again=[us] * 1000) for us in (99_000, 101_000)]
    cpu = result(tmp_path / "o.json", *biased * (FEWEST // 2)).summary("ddp")["cpu"]["off_again"]
    assert cpu["high"] - cpu["low"] > 0.01


def test_light_that_costs_nothing_is_no_divisor(tmp_path: Path) -> None:
    summary = result(tmp_path / "o.json", turns(light=[99_900, 149_850, 99_900]), blocks()).summary("ddp")
    assert summary["times_what_light_costs"]["torch_profiler"] == {"ratio": None, "at_least": None}


def test_rounds_are_wanted_until_the_noise_is_known(tmp_path: Path) -> None:
    found = result(tmp_path / "few.json", *[turns()] * (FEWEST - 1))
    assert not found.resolved("ddp")
    found.add(turns())
    assert found.resolved("ddp")
    for again in (90_000, 110_000) * FEWEST:
        found.add(turns("engine", off_again=[again] * 3))
    assert not found.resolved("engine")


def test_it_goes_on_from_the_rounds_that_were_written(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    result(path, turns(), turns(), blocks())
    again = Result(path, anew=False)
    assert [len(again.of(*which)) for which in (("ddp", "turns"), ("ddp", "blocks"), ("engine", "turns"))] == [2, 1, 0]
    again.add(turns("engine"))
    assert [one["job"] for one in json.loads(path.read_text())["rounds"]] == ["ddp"] * 3 + ["engine"]
    assert Result(path, anew=True).rounds == []


def test_rounds_of_other_code_are_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "o.json"
    result(path, turns())
    path.write_text(path.read_text().replace('"collectors": "', '"collectors": "0'))
    with pytest.raises(SystemExit, match=r"o\.json was measured of other code or on another machine: --anew"):
        Result(path, anew=False)


def test_jobs_take_turns_and_no_round_is_begun_when_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[str, int]] = []
    now = 0.0

    def run_turns(job: str, seed: int, turns_: int) -> Round:
        nonlocal now
        taken.append((job, seed))
        now += 1.0
        return turns(job)

    def run_blocks(job: str, seed: int, rounds: int, block: int, warm: int) -> Iterator[Round]:
        nonlocal now
        taken.append((f"blocks of {job}", rounds))
        for _ in range(rounds):
            now += 1.0
            yield blocks(job)

    monkeypatch.setattr(overhead, "run_turns", run_turns)
    monkeypatch.setattr(overhead, "run_blocks", run_blocks)
    monkeypatch.setattr(overhead.time, "monotonic", lambda: now)
    found = Result(tmp_path / "o.json", anew=False)
    args = argparse.Namespace(turns=40, rounds_of_blocks=5, block=6, warm=4)
    overhead.measure(found, ["ddp", "engine"], until=14.0, args=args)
    assert taken == [
        ("ddp", 0), ("blocks of ddp", 4), ("engine", 0), ("blocks of engine", 4),
        ("ddp", 1), ("blocks of ddp", 1), ("engine", 1), ("blocks of engine", 1), ("ddp", 2),
    ]  # fmt: skip
    assert len(found.rounds) == 15
