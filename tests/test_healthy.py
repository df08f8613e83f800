"""No false alarm: jobs of every kind with nothing wrong. `benchmarks/verdicts.py --healthy` keeps them."""

from __future__ import annotations

from pathlib import Path

import pytest
from healthy_cases import HEALTHY, LEAST_HEALTHY, PLAIN_DDP, missing

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(300)]

said: dict[str, str] = {}
"""Name -> status of the verdict, of the jobs that have run; one that a busy machine keeps from its cores, which the
kernel counts, is as healthy as can be told there."""


def test_there_are_more_than_fifty() -> None:
    assert len(HEALTHY) == 56


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_said_against_it(name: str, tmp_path: Path) -> None:
    job = HEALTHY[name]
    if missing(job):
        pytest.skip(f"{missing(job)} is not installed")
    outcome = job.run(tmp_path)
    assert job.wrong(outcome) == []
    said[name] = "healthy" if outcome.wants_cores else outcome.found["verdict"]["status"]
    if name in PLAIN_DDP:
        assert said[name] == "healthy", outcome.found["verdict"]


def test_most_are_called_healthy() -> None:
    if len(said) < len(HEALTHY) - 4:
        pytest.skip("not all of them have run")
    others = {name: status for name, status in said.items() if status != "healthy"}
    assert list(said.values()).count("healthy") >= LEAST_HEALTHY, others
