"""`dsprof plan --calibrate`: the hardware's figures, learnt from measured steps."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from dsprof.cli import main
from dsprof.plan.calibrate import calibrate, quantile
from dsprof.plan.choice import best_within
from dsprof.plan.cost import COEFFICIENTS, TYPICAL, UNKNOWN, cost, parameters
from dsprof.plan.fit import fit
from dsprof.plan.steps import StepShapes
from dsprof.plan.table import Measurements, TableError, read_table

HEADINGS = (
    "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,tensor parallelism,"
    "data parallelism,pipeline parallelism,iteration time (ms)\n"
)
MODEL = {"hidden": 2048.0, "heads": 16.0, "layers": 24.0, "sequence": 1024.0}
TRUE = TYPICAL * np.exp(np.linspace(-0.3, 0.3, len(TYPICAL)))
"""Figures of a machine that is unlike the typical one."""


def figures(**changed: float) -> np.ndarray:
    """All figures zero, or infinitely fast, but for those that are given."""
    base = {one.name: 1e12 if one.unit in ("TFLOP/s", "GB/s") else 1e-12 for one in COEFFICIENTS}
    return np.array([{**base, **changed}[one.name] for one in COEFFICIENTS])


def one(**changed: float) -> StepShapes:
    """Of a vocabulary of one word, so that what is worked out for it takes no time."""
    row = {**MODEL, "global_batch": 8.0, "micro_batch": 1.0, "tp": 1.0, "dp": 1.0, "pp": 1.0, "vocabulary": 1.0}
    return StepShapes.of([{**row, **changed}])


def many(gpus: int) -> StepShapes:
    """All layouts of a node's GPUs for two widths and some batches."""
    sizes = [(tp, dp, gpus // tp // dp) for tp, dp in product((1, 2, 4, 8), repeat=2) if gpus % (tp * dp) == 0]
    return StepShapes.of(
        [
            {**MODEL, "hidden": h, "tp": tp, "dp": dp, "pp": pp, "micro_batch": b, "global_batch": b * dp * m}
            for (tp, dp, pp), h, b, m in product(sizes, (1024.0, 2048.0), (1.0, 4.0), (2.0, 8.0))
        ]
    )


# --- the model -------------------------------------------------------------------------------------------------------


def test_matrix_products_alone() -> None:
    """Eight micro-batches, 24 layers, forward and twice that backward and the forward again."""
    layers = 8 * 24 * 4 * (24 * 1024 * 2048**2 + 4 * 1024**2 * 2048)
    found = cost(figures(matrix_tflops=100.0), one()).step
    assert found == pytest.approx([layers / 1e14 * 1e3], rel=1e-5)
    without = cost(figures(matrix_tflops=100.0), one(recompute=0.0)).step
    assert without == pytest.approx([layers * 3 / 4 / 1e14 * 1e3], rel=1e-5)


def test_the_vocabulary_has_a_rate_of_its_own() -> None:
    """Eight micro-batches, forward and twice that backward, once; and twenty passes over the logits at 1500 GB/s."""
    products, passes = 8 * 6 * 1024 * 2048 * 51200, 8 * 1024 * 51200 * 2 * 20
    found = cost(figures(logit_tflops=50.0), one(vocabulary=51200.0)).step
    assert found == pytest.approx([(products / 5e13 + passes / 1.5e12) * 1e3], rel=1e-5)


def test_the_host_sets_the_pace_of_short_layers() -> None:
    found = cost(figures(layer_host_us=1000.0), one()).step
    assert found == pytest.approx([8 * 24.0], rel=1e-4)


def test_a_pipeline_waits_for_its_stages() -> None:
    """Four stages of six layers of 1 ms, 8 micro-batches: (8 + 3) * 6 ms, of which 3 * 6 are the bubble."""
    found = cost(figures(layer_host_us=1000.0), one(pp=4.0))
    assert found.compute == pytest.approx([48.0], rel=1e-5)
    assert found.bubble == pytest.approx([18.0], rel=1e-5)


def test_stages_that_do_not_divide_go_at_the_pace_of_the_longest() -> None:
    """26 layers on four stages are 7, 7, 6, 6: all 26 once, and seven more times the slowest."""
    found = cost(figures(layer_host_us=1000.0), one(pp=4.0, layers=26.0))
    assert found.step == pytest.approx([26 + 7 * 7.0], rel=1e-6)


def test_tensor_parallel_all_reduces() -> None:
    """Six of b*s*h in two bytes a layer, each over a ring of four: 2 * 3/4 of it, and the latency."""
    found = cost(figures(node_link_gb_s=100.0, all_reduce_us=50.0), one(tp=4.0)).tensor
    each = 2 * 3 / 4 * 1024 * 2048 * 2 / 1e11 * 1e3 + 0.05
    assert found == pytest.approx([8 * 24 * 6 * each], rel=1e-6)


def test_groups_larger_than_a_node_use_its_network() -> None:
    inside, outside = (one(dp=8.0, global_batch=8.0, gpus_per_node=size) for size in (8.0, 4.0))
    figure = figures(node_link_gb_s=200.0, network_gb_s=20.0, gradient_bytes=2.0)
    bytes_ms = 2 * 7 / 8 * parameters(inside)[0] * 2 / 1e9 * 1e3
    assert cost(figure, inside).data == pytest.approx([bytes_ms / 200], rel=1e-6)
    assert cost(figure, outside).data == pytest.approx([bytes_ms / 20], rel=1e-6)


def test_parts_add_up_to_the_step() -> None:
    steps = many(8)
    found = cost(TRUE, steps)
    parts = (found.compute, found.tensor, found.hand_over, found.bubble, found.data, found.optimizer)
    assert np.allclose(np.sum(parts, axis=0), found.step)
    assert np.min(parts) > -1e-9


# --- learning --------------------------------------------------------------------------------------------------------


def test_a_machine_is_learnt_from_its_steps() -> None:
    """Measured on 2 and 4 GPUs, told 8. One row in ten is far off, as measured ones are."""
    steps = StepShapes.of([*rows_of(many(2)), *rows_of(many(4))])
    ms = cost(TRUE, steps).step
    ms[::10] *= 1.5
    fitted = fit(steps, ms)
    told = many(8)
    error = np.abs(fitted.step_ms(told) / cost(TRUE, told).step - 1)
    assert np.mean(error) < 0.02
    assert np.all(fitted.values > 0)


def test_no_rate_is_above_what_the_data_sheet_says() -> None:
    """A machine of 300 TFLOP/s, said to do 200 at most: its layers are faster than the figures then."""
    steps = many(2)
    fast = np.array([300.0 if one.name == "matrix_tflops" else one.typical for one in COEFFICIENTS])
    most = np.array([200.0 if one.name == "matrix_tflops" else np.inf for one in COEFFICIENTS])
    ms = cost(fast, steps).step
    assert fit(steps, ms).values[0] > 220
    held = fit(steps, ms, UNKNOWN._replace(most=most))
    assert held.values[0] <= 200
    assert np.mean(np.abs(held.step_ms(steps) / ms - 1)) < 0.02


def rows_of(steps: StepShapes) -> list[dict[str, float]]:
    names = ("hidden", "heads", "layers", "sequence", "tp", "dp", "pp", "micro_batch", "global_batch")
    return [{name: float(getattr(steps, name)[i]) for name in names} for i in range(len(steps))]


def test_nothing_measured_leaves_what_is_typical() -> None:
    found = calibrate(StepShapes.of([]), np.array([]))
    assert found.fitted.values == pytest.approx(TYPICAL)
    told = found.predict(one())
    assert told.low[0] < told.ms[0] < told.high[0]
    assert told.high[0] / told.low[0] > 2


def test_intervals_are_wider_the_farther_away() -> None:
    steps = many(2)
    found = calibrate(steps, cost(TRUE, steps).step)
    near, wider, far = (found.predict(one(**change)) for change in ({}, {"hidden": 4096.0}, {"hidden": 16384.0}))
    widths = [float(np.log(told.high / told.low)[0]) for told in (near, wider, far)]
    assert widths[0] < widths[1] < widths[2]


def test_a_quantile_of_few_is_the_largest_and_none_is_under_a_normal_one() -> None:
    scores = np.linspace(0.0, 10.0, 101)
    assert quantile(scores, 101) == pytest.approx(9.1)
    assert quantile(scores, 4) == 10.0
    assert quantile(scores / 100, 101) == 1.645


def test_the_best_of_a_group() -> None:
    """Two groups; the layout chosen is 1 % and 5 % slower than the fastest."""
    steps = StepShapes.of(rows_of(one(dp=2.0)) + rows_of(one(pp=2.0)) + rows_of(one(dp=4.0)) + rows_of(one(pp=4.0)))
    kept = Measurements(steps, np.array([100.0, 101.0, 100.0, 105.0]))
    assert best_within(kept, np.array([2.0, 1.0, 2.0, 1.0])) == [True, False]


# --- tables ----------------------------------------------------------------------------------------------------------


def written(path: Path, *lines: str, headings: str = HEADINGS) -> Path:
    path.write_text(headings + "\n".join(lines) + "\n", encoding="utf-8-sig")
    return path


def test_a_table_is_read_by_its_headings(tmp_path: Path) -> None:
    found = read_table(written(tmp_path / "t.csv", "2,16,8,1024,16,24,1024,1,1,2,372.16", ""))
    assert found.ms == pytest.approx([372.16])
    assert (found.steps.pp[0], found.steps.hidden[0], found.steps.vocabulary[0]) == (2, 1024, 51200)
    assert found.steps.micro_batches == pytest.approx([2.0])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("4,16,8,1024,16,24,1024,1,1,2,372", ":2: tp 1 x dp 1 x pp 2 are 2 GPUs, and the line says 4"),
        ("2,16,8,1024,16,24,1024,1,1,2,fast", ":2: iteration time (ms) is 'fast', which is not a number"),
        ("2,16,8,1024,16,24,1024,1,1,2,-3", ":2: iteration time (ms) is '-3'; it has to be above 0"),
        ("2,16,8,1024,16,2.5,1024,1,1,2,372", ":2: # layers is '2.5'; it has to be whole and above 0"),
        ("2,9,8,1024,16,24,1024,1,1,2,372", ":2: a global batch of 9 is not a whole number of micro-batches of 8"),
        ("2,16,8", ":2: has 3 of 11 columns"),
        ("2,16,8,1024,16,24,1024,1,1,2,nan", ":2: iteration time (ms) is 'nan'; it has to be above 0"),
    ],
)
def test_what_is_wrong_with_a_row_is_said_with_its_line(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(TableError) as raised:
        read_table(written(tmp_path / "t.csv", line))
    assert said in str(raised.value)


def test_a_column_that_is_missing_is_named(tmp_path: Path) -> None:
    headings = HEADINGS.replace("hidden size", "hiden")
    with pytest.raises(TableError, match=r"t\.csv:1: there is no column for hidden; did you mean 'hiden'\?"):
        read_table(written(tmp_path / "t.csv", headings=headings))


@pytest.mark.parametrize(("content", "said"), [(b"", "is empty"), (b"\xff\xfe\x00", "is not a text in UTF-8")])
def test_what_is_no_table(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(TableError, match=said):
        read_table(path)


# --- the verb --------------------------------------------------------------------------------------------------------


def table_of(path: Path, steps: StepShapes, ms: np.ndarray) -> Path:
    names = ("gpus", "global_batch", "micro_batch", "hidden", "heads", "layers", "sequence", "tp", "dp", "pp")
    rows = [[*(f"{getattr(steps, name)[i]:.0f}" for name in names), f"{ms[i]}"] for i in range(len(steps))]
    return written(path, *(",".join(row) for row in rows))


def test_the_verb_learns_and_predicts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two, four = (table_of(tmp_path / f"{n}.csv", many(n), cost(TRUE, many(n)).step) for n in (2, 4))
    assert main(["plan", "--calibrate", str(two), "--predict", str(four), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["learnt_from"] == len(many(2))
    assert len(told["steps"]) == told["score"]["rows"] == len(many(4))
    assert told["score"]["mape"] < 0.03
    assert {figure["name"] for figure in told["figures"]} == {one.name for one in COEFFICIENTS}

    assert main(["plan", "--calibrate", str(two)]) == 0
    said = capsys.readouterr().out
    assert "learnt from 24 measured steps" in said
    assert "matrix products" in said
    assert "network of a node" in said
    assert "hardly measured: as is typical" in said


def test_what_the_verb_cannot_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--calibrate", str(tmp_path / "none.csv")]) == 2
    assert "none.csv: cannot be read: No such file or directory" in capsys.readouterr().err
    assert main(["plan"]) == 2
    assert "nothing to plan from" in capsys.readouterr().err
    table = table_of(tmp_path / "t.csv", many(2), cost(TRUE, many(2)).step)
    for words, said in (
        (["--params", "7e9"], "without --ranks no model is planned; leave out --params"),
        (["--price", "2"], "without --ranks no model is planned; leave out --price"),
        (["--gpu", "h10"], "--gpu h10: is not known"),
    ):
        assert main(["plan", "--calibrate", str(table), *words]) == 2
        assert said in capsys.readouterr().err


def test_steps_that_were_learnt_are_no_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    learnt = table_of(tmp_path / "learnt.csv", many(2), cost(TRUE, many(2)).step)
    asked = StepShapes.of([*rows_of(many(2))[:3], *rows_of(many(4))])
    both = table_of(tmp_path / "both.csv", asked, cost(TRUE, asked).step)
    verb = ["plan", "--calibrate", str(learnt), "--predict"]
    assert main([*verb, str(both), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["steps_learnt_too"], len(told["steps"])) == (3, len(asked))
    assert told["score"]["rows"] == len(many(4))
    assert main([*verb, str(both)]) == 0
    assert f"3 of these {len(asked)} steps are also in the table that was learnt" in capsys.readouterr().out
    assert main([*verb, str(learnt), "--json"]) == 0
    assert "score" not in json.loads(capsys.readouterr().out)


def test_the_device_that_is_told_is_where_the_figures_begin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table that never left one node tells nothing of the network, so that of --bandwidth stays."""
    steps = many(2).take(np.arange(0, 24, 2))
    table = table_of(tmp_path / "t.csv", steps, cost(TRUE, steps).step)
    assert main(["plan", "--calibrate", str(table), "--gpu", "h100", "--bandwidth", "400Gb", "--json"]) == 0
    figures = {one["name"]: one for one in json.loads(capsys.readouterr().out)["figures"]}
    assert figures["network_gb_s"]["value"] == pytest.approx(40.0, rel=1e-3)
    assert not figures["network_gb_s"]["measured"]
