"""The verdict is true: real jobs with one known fault each, on gloo ranks, and what is said about them.

`make test` runs the usual job of the QUICK families; `make test-all` that of each, and three more of each, drawn from a
seed that is printed. DSPROF_SEED=N draws the same ones again.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import verdict_reference
from verdict_cases import FAMILIES, VARIANTS, Draw, variant
from verdict_truth import Job, Outcome

SEED = int(os.environ.get("DSPROF_SEED") or time.time_ns() % 2**31)

QUICK = (
    "uneven pipeline", "FSDP2 with many units", "checkpoints", "nanoGPT", "late loader and BatchNorm",
    "straggler and a stop", "LBFGS", "actor-critic",
)  # fmt: skip
"""Families of `make test`, each a quarter of a minute or more: of every kind of parallelism and of fault one, a script
of somebody else's, and the optimizers that are hardest to follow."""

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Ran:
    """A job that ended under dsprof, and its losses without."""

    job: Job
    outcome: Outcome
    losses: list[list[float]]


def run(job: Job, folder: Path) -> Ran:
    return Ran(job, job.run(folder), verdict_reference.losses(job, folder / "reference"))


@pytest.fixture(
    scope="module",
    params=[pytest.param(family, marks=[] if family in QUICK else [pytest.mark.slow]) for family in FAMILIES],
)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return run(FAMILIES[request.param](Draw()), tmp_path_factory.mktemp("job"))


class TestUsualJobs:
    def test_what_is_said_is_true(self, ran: Ran) -> None:
        assert ran.job.wrong(ran.outcome) == []

    def test_the_losses_are_those_without_dsprof(self, ran: Ran) -> None:
        assert [rank["losses"] for rank in ran.outcome.truth] == ran.losses


@pytest.mark.slow
@pytest.mark.parametrize("number", range(VARIANTS))
@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_jobs(family: str, number: int, tmp_path: Path) -> None:
    print(f"DSPROF_SEED={SEED}")
    job = variant(family, number, SEED)
    drawn = run(job, tmp_path)
    assert job.wrong(drawn.outcome) == [], f"DSPROF_SEED={SEED}: {job}"
    assert [rank["losses"] for rank in drawn.outcome.truth] == drawn.losses
