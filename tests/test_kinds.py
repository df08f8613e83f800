"""What is evaluating and what saving: literal rows, literal times."""

from __future__ import annotations

import pandas as pd

from dsprof.analyzer.budget.wall_time import spans_outside_training
from dsprof.schema import COLUMNS


def phases(*rows: tuple[str, float, float, bool | None]) -> pd.DataFrame:
    """Name, from and until when in ms, and whether it had gradients; all of step 1 of two, on the training thread."""
    table = [
        {
            "kind": "phase", "name": name, "lane": "main", "step": 1, "start_ns": round(begin * 1e6),
            "dur_ns": round((end - begin) * 1e6), "grad": grad, "source": "measured",
        }
        for name, begin, end, grad in rows
    ]  # fmt: skip
    steps = [{"kind": "step", "name": "step", "step": step, "dur_ns": 1} for step in (0, 1)]
    rows_of = pd.DataFrame([*table, *steps]).reindex(columns=list(COLUMNS))
    return rows_of.astype({"grad": "boolean", "dur_ns": "Int64"})


def ms(rows: pd.DataFrame, kind: str) -> list[tuple[float, float]]:
    spans = spans_outside_training(rows)[kind]
    return [(begin / 1e6, end / 1e6) for begin, end in zip(spans.start, spans.end, strict=True)]


TRAINED = (("forward", 0, 10, True), ("backward", 10, 20, None), ("optimizer", 20, 30, None))


def test_a_forward_while_saving_is_saving() -> None:
    """Transformers' Trainer has sentence-transformers describe the model, which runs it."""
    rows = phases(*TRAINED, ("checkpoint", 40, 90, None), ("forward", 50, 60, False), ("forward", 95, 99, True))
    assert ms(rows, "evaluation") == []
    assert ms(rows, "checkpointing") == [(40, 90)]


def test_an_evaluation_before_it_is_saved_is_an_evaluation() -> None:
    rows = phases(*TRAINED, ("forward", 32, 38, False), ("checkpoint", 40, 90, None), ("forward", 95, 99, True))
    assert ms(rows, "evaluation") == [(30, 40)]
    assert ms(rows, "checkpointing") == [(40, 90)]
