"""What scripts do between two steps, drawn at random: each program trains as plain torch does, or is refused by name.

A program is one engine and what a script does with it (`usage_program.py`). It runs on an engine of two or four ranks
(`usage_engine.py`) and in one process with plain torch (`usage_plain.py`); losses, weights, masters, the optimizer's
state and counters must be the same bit for bit (`usage_net.py` says why they can be). A failure prints its program,
which `parsed` reads again:

    python benchmarks/usage_random.py --program FILE
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import usage_machines
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from pairwise import every_pair, pairs
from ranks import Ranks
from usage_machines import PipelineUsage, WholeUsage
from usage_program import PIPELINE, WHOLE, covering, parsed, shrunk
from usage_run import fault_of


@pytest.fixture
def usage_ranks(ranks: Ranks, tmp_path: Path) -> Iterator[None]:
    """Where the machines run their programs."""
    usage_machines.RUN = lambda program: fault_of(program, ranks, tmp_path)
    yield
    del usage_machines.RUN


def few(examples: int) -> settings:
    """The same ones in each run."""
    return settings(
        derandomize=True, deadline=None, database=None, max_examples=examples, stateful_step_count=12,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


@pytest.mark.usefixtures("usage_ranks")
def test_what_scripts_do_with_a_model_that_runs_as_one() -> None:
    run_state_machine_as_test(WholeUsage, settings=few(25))


@pytest.mark.usefixtures("usage_ranks")
def test_what_scripts_do_with_a_pipeline() -> None:
    run_state_machine_as_test(PipelineUsage, settings=few(10))


@pytest.mark.parametrize("axes", [WHOLE, PIPELINE], ids=["whole", "pipeline"])
def test_configurations_have_every_two_values_together(axes: dict[str, list[object]]) -> None:
    found = set().union(*(pairs(each) for each in covering(axes)))
    assert found == every_pair(list(axes.values()))
