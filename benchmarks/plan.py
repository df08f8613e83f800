"""`dsprof plan --calibrate` against measured steps: what it predicts of steps that it has not seen.

    python benchmarks/plan.py            # a few minutes; writes benchmarks/results/plan.json

Two tables of VIA-Research/vTrain (MIT), commit f8dda84: 1,440 steps of GPTs on 2, 4 and 8 A100 of one node, and 20 on
64, 256 and 512. Where they lie is said by --tables, else by DSPROF_PLAN_TABLES.

Each split learns from some rows and is told others. `mape` is the mean absolute relative error, `held` the share of
rows inside their 90 % intervals, `width` half of the median interval, `near` the share of groups (same model, GPUs and
global batch, at least two layouts) where the layout predicted to be the fastest is within 2 % of the fastest. One set
of expected figures serves all splits, and no rate is above the data sheet of A100.

`layer_effects_percent` says by how much the kernels of each layer shape of the first table (width, micro-batch, tensor
parallelism) are slower than the model fitted to all of its rows has them: no row of other shapes tells of that.
`off_a_line_percent` is the most by which a row of that table is off the straight line through the rows that differ from
it in the number of micro-batches alone. Steps of a real machine vary more.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from dsprof.plan.calibrate import calibrate
from dsprof.plan.choice import best_within, score
from dsprof.plan.cost import COEFFICIENTS, UNKNOWN
from dsprof.plan.hardware import A100, Cluster
from dsprof.plan.table import Measurements, read_table

HERE = Path(__file__).parent
TABLES = Path(os.environ.get("DSPROF_PLAN_TABLES", HERE.parents[1] / "shared" / "data" / "plan"))
HARDWARE = UNKNOWN._replace(most=Cluster(A100, "bfloat16").expected().most)
DRAWS = 20


def part(table: Measurements, chosen: Any) -> Measurements:
    return Measurements(table.steps.take(chosen), table.ms[chosen])


def told_by(known: Measurements, others: Measurements) -> dict[str, Any]:
    """Learn from some rows, and score others."""
    found = calibrate(known.steps, known.ms, HARDWARE)
    return {"learnt": len(known.ms), **score(found, others).to_dict(), "held_out": found.held_out}


def split(table: Measurements, learnt: Any, told: Any) -> dict[str, Any]:
    """Learn from some rows of a table, and score others."""
    return told_by(part(table, learnt), part(table, told))


def leave_one_out(table: Measurements) -> dict[str, Any]:
    """Each row told by all the others."""
    rows = np.arange(len(table.ms))
    ms, held, width = np.zeros(len(rows)), np.zeros(len(rows), bool), np.zeros(len(rows))
    for row in rows:
        known = part(table, rows != row)
        told = calibrate(known.steps, known.ms, HARDWARE).predict(table.steps.take(rows == row))
        ms[row], width[row] = told.ms[0], np.log(told.high[0] / told.low[0]) / 2
        held[row] = told.low[0] <= table.ms[row] <= told.high[0]
    near = best_within(table, ms)
    errors = ms / table.ms - 1
    return {
        "learnt": len(rows) - 1, "rows": len(rows), "mape": float(np.mean(np.abs(errors))), "held": float(held.mean()),
        "width": float(np.median(width)), "groups": len(near), "near": float(np.mean(near)),
        "errors_percent": [round(100 * float(error), 1) for error in errors],
    }  # fmt: skip


def samples(table: Measurements, count: int, repeats: int) -> dict[str, Any]:
    """Learnt from `count` rows drawn by chance, told the others; the mean over `repeats` draws."""
    rows = np.arange(len(table.ms))
    found = []
    for seed in range(repeats):
        drawn = np.random.default_rng(seed).choice(rows, count, replace=False)
        found.append(split(table, np.isin(rows, drawn), ~np.isin(rows, drawn)))
    names = ("learnt", "rows", "mape", "held", "width", "near")
    # A draw of few rows may leave no two layouts of one question.
    means = {name: float(np.mean([one[name] for one in found if one[name] is not None])) for name in names}
    return {**means, "draws": repeats, "mape_of_draws": [round(one["mape"], 4) for one in found]}


def one_of_each_shape(table: Measurements, known: Any) -> Any:
    """The shortest step of each layer shape that the known rows lack, as a mask."""
    shapes = table.steps.layer_shapes()
    seen = {shape for shape, is_known in zip(shapes, known, strict=True) if is_known}
    chosen = np.zeros(len(table.ms), bool)
    for row in np.argsort(table.ms):
        if shapes[row] not in seen:
            seen.add(shapes[row])
            chosen[row] = True
    return chosen


def answered_wrongly(known: Measurements, others: Measurements) -> dict[str, int]:
    """Of the questions whose best layout is missed: the layer that the fastest one has -> how many there are."""
    ms = calibrate(known.steps, known.ms, HARDWARE).predict(others.steps).ms
    groups: dict[tuple[float, ...], list[int]] = {}
    for row, group in enumerate(others.steps.groups()):
        groups.setdefault(group, []).append(row)
    found: dict[str, int] = {}
    for rows in groups.values():
        if best_within(part(others, rows), ms[rows]) == [False]:
            fastest = rows[int(np.argmin(others.ms[rows]))]
            name = _shape(others.steps.layer_shapes()[fastest])
            found[name] = found.get(name, 0) + 1
    return found


def _shape(shape: tuple[float, ...]) -> str:
    return f"width {shape[0]:.0f}, micro-batch {shape[3]:.0f}, tp {shape[4]:.0f}"


def layer_effects(table: Measurements) -> dict[str, float]:
    effects = calibrate(table.steps, table.ms, HARDWARE).fitted.effects
    return {_shape(shape): round(100 * float(np.expm1(effect)), 1) for shape, effect in sorted(effects.items())}


def off_a_line(table: Measurements) -> float:
    """The most that a row is off the line through those that differ in the number of micro-batches alone, percent."""
    alike: dict[tuple[float, ...], list[int]] = {}
    s = table.steps
    for row, key in enumerate(zip(s.hidden, s.micro_batch, s.layers, s.tp, s.dp, s.pp, strict=True)):
        alike.setdefault(key, []).append(row)
    worst = 0.0
    for rows in alike.values():
        if len(rows) > 2:
            count, ms = s.micro_batches[rows], table.ms[rows]
            worst = max(worst, float(np.max(np.abs(np.polyval(np.polyfit(count, ms, 1), count) / ms - 1))))
    return 100 * worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, default=TABLES)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "plan.json")
    given = parser.parse_args()
    single, several = (read_table(given.tables / f"vtrain_{name}.csv") for name in ("single", "multi_20"))
    gpus, hidden, layers = single.steps.gpus, single.steps.hidden, single.steps.layers
    began = time.process_time()
    found: dict[str, Any] = {"several nodes, leave one out": leave_one_out(several)}
    for less, more in ((2, 8), (2, 4), (4, 8), (8, 2)):
        found[f"{less} GPUs tell {more}"] = split(single, gpus == less, gpus == more)
    found["2 GPUs tell 8"]["answered_wrongly"] = answered_wrongly(part(single, gpus == 2), part(single, gpus == 8))
    known = (gpus == 2) | one_of_each_shape(single, gpus == 2)
    found["2 GPUs and a step of each further layer shape tell 8"] = split(single, known, (gpus == 8) & ~known)
    for tp in (4, 8):
        found[f"2 GPUs tell tensor parallelism of {tp}"] = split(single, gpus == 2, single.steps.tp == tp)
    found["one node tells several"] = told_by(single, several)
    found["24 layers tell others"] = split(single, layers == 24, layers != 24)
    for width in (1024, 2048):
        found[f"width {width} tells the other"] = split(single, hidden == width, hidden != width)
    for count in (15, 40):
        found[f"{count} rows by chance, one node"] = samples(single, count, 6)
    found["12 rows by chance, several nodes"] = samples(several, 12, DRAWS)
    figures = {
        name: dict(
            zip(
                [one.name for one in COEFFICIENTS],
                map(float, calibrate(t.steps, t.ms, HARDWARE).fitted.values.round(3)),
                strict=True,
            )
        )
        for name, t in (("one node", single), ("several nodes", several))
    }
    result = {
        "splits": found, "figures": figures, "layer_effects_percent": layer_effects(single),
        "off_a_line_percent": round(off_a_line(single), 4), "cpu_seconds": round(time.process_time() - began),
    }  # fmt: skip
    given.output.write_text(json.dumps(result, indent=1) + "\n")
    for name, one in found.items():
        shares = "  ".join(f"{what} {100 * one[what]:5.1f} %" for what in ("mape", "held", "near"))
        print(f"{name:52} {shares}")


if __name__ == "__main__":
    main()
