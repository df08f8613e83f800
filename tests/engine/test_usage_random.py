"""What scripts do between two steps, drawn at random: each program trains as plain torch does, or is refused by name.

A program is one engine and what a script does with it (`usage_program.py`). It runs on an engine of two or four ranks
(`usage_engine.py`) and in one process with plain torch (`usage_plain.py`); losses, weights, masters, the optimizer's
state and counters must be the same bit for bit (`usage_net.py` says why they can be). A failure prints its program,
which `python benchmarks/usage_random.py --program FILE` runs again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import usage_machines
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from pairwise import every_pair, pairs
from ranks import Ranks
from usage_faults import PLACES
from usage_machines import PipelineUsage, WholeUsage
from usage_program import PIPELINE, WHOLE, Program, covering, parsed, shrunk
from usage_run import PATIENCE_S, Drawing, tried

HALF_OF_A_STEP = """
    layout=whole stage={stage} accumulate=3 precision={precision} optimizer=script tied=no buckets={buckets} keep=all replicas=2
    forward
    backward
    step
    forward fails=second
    zero_grad
    forward
    backward
    step
    forward
    backward
    step
    forward
    backward
    step
"""  # noqa: E501
MOVED = """
    layout=whole stage={stage} accumulate=1 precision={precision} optimizer=script tied=no buckets={buckets} keep=all replicas=2
    forward
    backward
    step
    move to={to}
    forward
    backward
    step
    forward
"""  # noqa: E501
NOT_TAKEN_BACKWARD = """
    layout=whole stage=3 accumulate=1 precision={precision} optimizer=script tied=no buckets={buckets} keep=all replicas=2
    forward
    backward
    forward
    step
    forward
"""  # noqa: E501
SHOWN = [
    ("old weights", NOT_TAKEN_BACKWARD.format(precision="fp32", buckets="small")),
    ("old weights", NOT_TAKEN_BACKWARD.format(precision="bf16", buckets="large")),
    ("moved weights", MOVED.format(stage=1, precision="fp32", buckets="large", to="float64")),
    ("moved weights", MOVED.format(stage=2, precision="fp32", buckets="small", to="half")),
    ("moved weights", MOVED.format(stage=0, precision="bf16", buckets="small", to="channels_last")),
    *(
        ("counted micro-batches", HALF_OF_A_STEP.format(stage=stage, precision=precision, buckets="small"))
        for stage, precision in [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16")]
    ),
]  # fmt: skip
"""Programs that show a fault which the engine has had."""


FOUND = Path(__file__).with_name("usage_found.txt").read_text().split("\n\n")
"""Programs that showed what was wrong when they were drawn, the shortest of each."""


@pytest.fixture
def usage_ranks(ranks: Ranks, tmp_path: Path) -> Iterator[None]:
    """Where the machines run their programs."""
    usage_machines.RUN = lambda program: tried(program, ranks, tmp_path).fault
    yield
    usage_machines.RUN = usage_machines.nothing


def drawn(examples: int, *phases: Phase) -> settings:
    """The same ones in each run."""
    return settings(
        derandomize=True, deadline=None, database=None, max_examples=examples, stateful_step_count=12,
        suppress_health_check=list(HealthCheck), phases=phases or (Phase.generate, Phase.shrink),
    )  # fmt: skip


@pytest.mark.usefixtures("usage_ranks")
def test_what_scripts_do_with_a_model_that_runs_as_one() -> None:
    run_state_machine_as_test(WholeUsage, settings=drawn(10))


@pytest.mark.usefixtures("usage_ranks")
def test_what_scripts_do_with_a_pipeline() -> None:
    run_state_machine_as_test(PipelineUsage, settings=drawn(4))


@pytest.mark.parametrize(("fault", "text"), SHOWN)
def test_faults_that_the_engine_has_had(ranks: Ranks, tmp_path: Path, fault: str, text: str) -> None:
    program = parsed(text)
    assert tried(program, ranks, tmp_path).fault is None
    assert tried(program, ranks, tmp_path, fault).fault is not None


@pytest.mark.parametrize("text", FOUND, ids=lambda text: text.splitlines()[0].strip("# "))
def test_what_was_drawn_and_is_mended(ranks: Ranks, tmp_path: Path, text: str) -> None:
    assert tried(parsed(text), ranks, tmp_path).fault is None


@pytest.mark.parametrize("axes", [WHOLE, PIPELINE], ids=["whole", "pipeline"])
def test_configurations_have_every_two_values_together(axes: dict[str, list[object]]) -> None:
    found = set().union(*(pairs(each) for each in covering(axes)))
    assert found == every_pair(list(axes.values()))


def test_programs_are_read_as_they_are_printed_and_become_as_short_as_they_can() -> None:
    program = parsed(NOT_TAKEN_BACKWARD.format(precision="bf16", buckets="small"))
    assert parsed(str(program)) == program
    assert program.configuration.stage == 3

    def fails(shorter: Program) -> bool:
        names = [action.name for action in shorter.actions]
        return "step" in names and names.index("step") > 0

    assert [action.name for action in shrunk(program, fails).actions] == ["forward", "step"]


# --- thousands


@pytest.mark.slow
@pytest.mark.timeout(30 * 60)
@pytest.mark.parametrize("fault", PLACES)
def test_drawn_programs_find_faults_that_the_engine_has_had(ranks: Ranks, tmp_path: Path, fault: str) -> None:
    usage_machines.RUN = lambda program: tried(program, ranks, tmp_path, fault).fault
    try:
        with pytest.raises(AssertionError, match="The program:"):
            run_state_machine_as_test(WholeUsage, settings=drawn(300, Phase.generate))
    finally:
        usage_machines.RUN = usage_machines.nothing


@pytest.mark.slow
@pytest.mark.timeout(100 * 60)
def test_two_thousand_programs(tmp_path: Path) -> None:
    ranks = Ranks(PATIENCE_S)
    try:
        drawing = Drawing(tmp_path / "usage_random.json", ranks, tmp_path)
        drawing.draw(2000, time.monotonic() + 90 * 60)
        assert drawing.faults == []
        assert drawing.programs > 0
    finally:
        usage_machines.RUN = usage_machines.nothing
        ranks.close()
