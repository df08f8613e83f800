"""What a pipeline's layers took, from the trace of a run."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from dsprof.analyzer.columns import RankRows
from dsprof.analyzer.work.layer_costs import layer_costs, staged_rows
from dsprof.engine.partition import read_costs
from dsprof.reports import write_layer_costs
from dsprof.run import RunFolder
from dsprof.schema import SHARDING

MS = 1_000_000


def trace(*, splits: bool) -> pd.DataFrame:
    """Two stages of two ranks: layers `0` (2 ms) and `1` (4 ms), then `head` (3 ms); backwards take twice as long."""
    rows = []
    for rank in range(4):
        stage = rank // 2
        layers = [("0", 2), ("1", 4)] if stage == 0 else [("head", 3)]
        for step, microbatch in ((0, 0), (1, 0), (1, 1), (2, 0)):
            at = (step * 10 + microbatch) * 100 * MS
            slow = 50 if step == 0 else 1  # the first step makes buffers
            forward = sum(taken for _, taken in layers)
            parts = (("F", 1), ("B", 1), ("W", 1)) if splits else (("F", 1), ("B", 2))
            for op, times in parts:
                rows.append(("pipe", op, rank, step, stage, microbatch, at, times * forward * slow * MS))
            for name, taken in layers:
                rows.append(("module", name, rank, step, stage, microbatch, at, taken * slow * MS))
                at += taken * MS
    columns = ["kind", "name", "rank", "step", "stage", "microbatch", "start_ns", "dur_ns"]
    table = pd.DataFrame(rows, columns=columns).astype({"stage": "Int16", "dur_ns": "Int64"})
    return table.astype({"kind": "category", "name": "category"})


def test_work_for_buckets_is_no_layer() -> None:
    """dsprof's engine tells of it in a stage's backward."""
    rows = trace(splits=False)
    work = rows[rows["kind"] == "module"].assign(name=SHARDING)
    both = pd.concat([rows.astype(object), work.astype(object)], ignore_index=True)
    both = both.astype({"stage": "Int16", "kind": "category", "name": "category"})
    staged = pd.DataFrame(staged_rows(RankRows(both)))
    assert [layer["name"] for layer in layer_costs(staged)] == ["0", "1", "head"]


@pytest.mark.parametrize("splits", [False, True])
def test_layers_in_order_with_their_part_of_the_backward(tmp_path: Path, splits: bool) -> None:
    found = layer_costs(trace(splits=splits))
    assert [layer["name"] for layer in found] == ["0", "1", "head"]
    assert [layer["forward_s"] for layer in found] == pytest.approx([0.002, 0.004, 0.003])
    assert [layer["backward_s"] for layer in found] == pytest.approx([0.004, 0.008, 0.006])
    folder = RunFolder(tmp_path)
    write_layer_costs(found, folder)
    assert read_costs(folder.layer_costs_json, ["0", "1", "head"]) == pytest.approx([0.006, 0.012, 0.009])


def test_without_a_pipeline_there_are_none() -> None:
    assert layer_costs(trace(splits=False).query("kind != 'pipe'")) == []
    assert layer_costs(trace(splits=False).query("kind != 'module'")) == []
    assert layer_costs(trace(splits=False).iloc[:0]) == []
