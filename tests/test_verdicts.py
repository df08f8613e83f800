"""The verdict is true: real jobs with one known fault each, on gloo ranks, and what is said about them.

`make test` runs the usual job of the QUICK families; `make test-all` that of each, and three more of each, drawn from a
seed that is printed. DSPROF_SEED=N draws the same ones again.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import verdict_reference
from verdict_cases import FAMILIES, VARIANTS, Draw, variant
from verdict_truth import Job, Outcome

SEED = int(os.environ.get("DSPROF_SEED") or time.time_ns() % 2**31)

QUICK = ("uneven pipeline", "nanoGPT", "late loader and BatchNorm")
"""Families of `make test`, each a quarter of a minute or more: stages, replicas, and a script of somebody else's. Every
cause that the others have is planted in a simulated job, too (test_planted.py holds that). Real stragglers are also in
test_mesh_jobs.py, real small messages in test_example.py, real checkpoints in test_checkpoint_hooks.py, and optimizers
that are hard to follow in test_phases.py."""

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]


USUAL = [pytest.param(family, marks=[] if family in QUICK else [pytest.mark.slow]) for family in FAMILIES]
Losses = list[list[float]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Job, Outcome]]:
    """The usual job of a family under dsprof, once."""

    @functools.cache
    def run(family: str) -> tuple[Job, Outcome]:
        job = FAMILIES[family](Draw())
        return job, job.run_undisturbed(tmp_path_factory.mktemp("job"))

    return run


@pytest.fixture(scope="module")
def references(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Losses | RuntimeError]:
    """Without dsprof, of all families whose losses are compared, several at a time, as they are not timed."""
    asked = [
        item.callspec.params["family"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == test_the_losses_are_those_without_dsprof.__name__
    ]
    jobs = {family: FAMILIES[family](Draw()) for family in asked}
    return verdict_reference.losses_of(jobs, tmp_path_factory.mktemp("references"))


@pytest.mark.parametrize("family", USUAL)
def test_what_is_said_is_true(family: str, ran: Callable[[str], tuple[Job, Outcome]]) -> None:
    job, outcome = ran(family)
    assert job.wrong(outcome) == []


@pytest.mark.parametrize("family", USUAL)
def test_the_losses_are_those_without_dsprof(
    family: str, ran: Callable[[str], tuple[Job, Outcome]], references: dict[str, Losses | RuntimeError]
) -> None:
    reference = references[family]
    if isinstance(reference, RuntimeError):
        raise reference
    _, outcome = ran(family)
    assert [rank["losses"] for rank in outcome.truth] == reference


@pytest.mark.slow
@pytest.mark.parametrize("number", range(VARIANTS))
@pytest.mark.parametrize("family", FAMILIES)
def test_drawn_jobs(family: str, number: int, tmp_path: Path) -> None:
    print(f"DSPROF_SEED={SEED}")
    job = variant(family, number, SEED)
    outcome = job.run_undisturbed(tmp_path)
    assert job.wrong(outcome) == [], f"DSPROF_SEED={SEED}: {job}"
    assert [rank["losses"] for rank in outcome.truth] == verdict_reference.losses(job, tmp_path / "reference")
