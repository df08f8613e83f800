"""The main job, for real: two gloo ranks train the example under `dsprof run`, with each problem planted in turn."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import forked_python
import pytest
from jobs import EXAMPLE, Finished, environment, profile

PLANTED = {
    "healthy": (),
    "slow-rank": ("--slow-rank", "1"),
    "slow-loader": ("--slow-loader",),
    "bucket-mb": ("--bucket-mb", "0.01"),
    "gc-pressure": ("--gc-pressure",),
    "uneven-lengths": ("--uneven-lengths",),
}
FIRST = {
    "slow-rank": ("rank.straggler", [1]),
    "slow-loader": ("data.stall", [0, 1]),
    "bucket-mb": ("comm.small-messages", None),
    "gc-pressure": ("pause.gc", [0]),
    "uneven-lengths": ("data.imbalance", [0, 1]),
}

TOLD_BY_OTHERS = ("slow-rank", "slow-loader", "gc-pressure", "uneven-lengths")
"""What other real jobs of `make test` have (test_mesh_jobs, test_verdicts), or simulated ones (test_analyzer: the last
two), is slow."""

pytestmark = [pytest.mark.timeout(300), pytest.mark.alone]


def disturbed(switch: str, done: Finished) -> bool:
    """Whether something else than what was planted shows, or much of the step is nobody's."""
    found = done.findings
    if found["budget"]["other"] >= 0.05 * found["run"]["step_ms"]["mean"]:
        return True
    if switch == "healthy":
        return bool(done.above_info)
    first = next(iter(done.told), None)
    return first is None or (first["code"], first["where"].get("ranks")) != FIRST[switch] or first["severity"] == "info"


@pytest.fixture(scope="module")
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    switch, native = request.param
    folder = tmp_path_factory.mktemp(f"{switch}-{native}")
    flags = ("--native", native, *(() if switch == "healthy" else ("--no-report",)))
    done = profile(folder, EXAMPLE, *PLANTED[switch], flags=flags, fresh=switch == "healthy")
    if done.status == 0 and disturbed(switch, done):
        # A host that stops a rank, or slows it down for half of a run, makes a true finding. Twice in a row is ours.
        again = tmp_path_factory.mktemp(f"{switch}-{native}-again")
        return profile(again, EXAMPLE, *PLANTED[switch], flags=flags)
    return done


CASES = [
    # Both recorders write the same rows (test_collectives).
    pytest.param(
        (switch, native),
        id=f"{switch}-{native}",
        marks=[pytest.mark.slow] if switch in TOLD_BY_OTHERS or native == "off" else [],
    )
    for native in ("on", "off")
    for switch in PLANTED
]


@pytest.mark.parametrize("finished", CASES, indirect=True)
class TestEveryJob:
    def test_the_first_finding_is_the_planted_one(self, finished: Finished, request: pytest.FixtureRequest) -> None:
        assert finished.status == 0, finished.stderr
        switch = request.node.callspec.params["finished"][0]
        if switch == "healthy":
            assert finished.above_info == [], finished.stderr
            return
        first = finished.told[0]
        code, ranks = FIRST[switch]
        assert (first["code"], first["where"].get("ranks")) == (code, ranks), finished.stderr
        assert first["severity"] != "info", finished.stderr
        assert first["fixes"]

    def test_the_budget_sums_to_the_step_and_explains_it(self, finished: Finished) -> None:
        found = finished.findings
        step_ms = found["run"]["step_ms"]["mean"]
        assert math.isclose(sum(found["budget"].values()), step_ms, rel_tol=1e-9)
        assert found["budget"]["other"] < 0.05 * step_ms

    def test_everything_was_captured(self, finished: Finished) -> None:
        found = finished.findings
        assert found["run"]["ranks"] == {"expected": 2, "captured": 2}
        assert found["run"]["steps"] == 50
        assert (found["capture"]["dropped"], found["capture"]["warnings"]) == (0, [])

    def test_the_verdict_and_the_reports_are_there(self, finished: Finished, request: pytest.FixtureRequest) -> None:
        assert "[dsprof] verdict" in finished.stderr
        assert "dsprof" not in finished.stdout
        if request.node.callspec.params["finished"][0] != "healthy":
            return  # run with --no-report
        assert finished.folder.report_html.read_text().startswith("<!doctype html>")
        assert list(finished.folder.tensorboard.rglob("events.out.tfevents.*"))


@pytest.mark.slow  # test_verdicts compares the losses of its jobs
def test_the_loss_is_bit_identical_with_and_without(tmp_path: Path) -> None:
    args = ("--steps", "8", "--loss-file")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    plain = [*torchrun, str(EXAMPLE), *args, str(tmp_path / "plain")]
    forked_python.run(plain, cwd=tmp_path, env=environment(), check=True, capture_output=True)
    for native in ("on", "off"):
        (tmp_path / native).mkdir()
        profile(
            tmp_path / native,
            EXAMPLE,
            *args,
            str(tmp_path / native / "loss"),
            flags=("--native", native, "--no-report"),
        )
        assert (tmp_path / native / "loss").read_text() == (tmp_path / "plain").read_text()
    assert len((tmp_path / "plain").read_text().split()) == 8
