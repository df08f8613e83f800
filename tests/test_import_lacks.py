"""What an imported trace lacks, for which rules, and how to record it the next time."""

from __future__ import annotations

from pathlib import Path

import kineto_traces as kt
import pytest
from test_import_mapped import span, write

from dsprof import cli
from dsprof.analyzer.rules.registry import all_rules
from dsprof.importers import import_trace
from dsprof.importers.lacks import HOW, LACKS, contents_of, lacking

ARGS = {"Collective name": "allreduce", "Process Group Name": "0", "In msg nelems": 1000, "dtype": "Float"}


def test_a_whole_trace_lacks_nothing(tmp_path: Path) -> None:
    for rank in (0, 1):
        events = [*kt.training(steps=6, args=ARGS), kt.memory(5, 512, 1024)]
        about = {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2}}
        kt.write(tmp_path, kt.as_kineto(events, **about), f"rank{rank}.json")
    assert lacking(contents_of(import_trace(tmp_path))) == []


def test_what_is_not_there_is_said_with_how_to_record_it(tmp_path: Path) -> None:
    events = [kt.op("aten::linear", 0, 50), kt.op("aten::mm", 60, 50)]
    about = {"distributedInfo": {"backend": "gloo", "rank": 0, "world_size": 4}}
    trace = import_trace(kt.write(tmp_path, kt.as_kineto(events, **about)))
    assert [one.what for one in lacking(contents_of(trace))] == [
        "3 of 4 ranks", "where steps begin and end", "collectives of a known group", "what a device did",
        "memory of the devices",
    ]  # fmt: skip
    assert str(lacking(contents_of(trace))[1]) == (
        "not in the trace: where steps begin and end (for rank.straggler, data.stall, data.imbalance, pause.gc, "
        "checkpoint.stall); call profiler.step() after each step"
    )


def test_few_steps_and_collectives_without_numbers(tmp_path: Path) -> None:
    for rank in (0, 1):
        kt.write(tmp_path, kt.as_kineto([*kt.training(steps=3), kt.memory(5, 512, 1024)]), f"rank{rank}.json")
    whats = [one.what for one in lacking(contents_of(import_trace(tmp_path)))]
    assert whats == ["enough steps (3 of 5)", "numbers of the collectives, so they are matched by their order"]


def test_every_code_is_a_rules_and_every_way_is_for_something() -> None:
    codes = {rule.code for rule in all_rules()}
    assert {code for _, _, of in LACKS.values() for code in of} <= codes
    assert {key for of_format in HOW.values() for key in of_format} <= LACKS.keys()


def test_the_command_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = 'rank = "pid"\n[[events]]\nname = "f"\nkind = "phase"\nas = "forward"\n'
    (tmp_path / "m.toml").write_text(text)
    path = write(tmp_path / "t.json", [span("f", 0, 10), span("f", 20, 10)])
    run = tmp_path / "run"
    assert cli.main(["import", str(path), "--mapping", str(tmp_path / "m.toml"), "-o", str(run), "--no-report"]) == 0
    assert "not in the trace: where steps begin and end (for rank.straggler" in capsys.readouterr().err
