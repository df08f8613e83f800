"""Keys of what a run tells about itself, each seen in what the engine prints and writes."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from config_coverage import alive
from engines import Layers, configuration, engine_for, train
from models import batches, build
from ranks import Ranks

torch.set_num_threads(1)


def printed(steps: int = 4, *, model: torch.nn.Module | None = None, **keys: Any) -> list[str]:
    """What a training in this process prints, line by line; times as T."""
    text, config = io.StringIO(), configuration(**keys)
    layers = Layers() if model is None else model
    with contextlib.redirect_stdout(text), engine_for(layers, config, dist_init_required=False) as engine:
        train(engine, steps, None if model is None else lambda: batches(1, 1, 1)[0, 0, 0])
    return text.getvalue().splitlines()


@alive("steps_per_print")
def test_steps_per_print() -> None:
    assert printed() == []
    for every, steps in ((1, [1, 2, 3, 4]), (2, [2, 4]), (3, [3])):
        lines = printed(steps_per_print=every)
        assert [int(re.match(r"step=(\d+), skipped=0, lr=\[0\.1\]", line)[1]) for line in lines] == steps  # type: ignore[index]


@alive("dump_state")
def test_dump_state() -> None:
    state = json.loads("\n".join(printed(0, dump_state=True)))
    assert state["zero_optimization"]["reduce_bucket_size"] == 500_000_000


@alive("wall_clock_breakdown", "memory_breakdown")
@pytest.mark.parametrize(("key", "says"), [("wall_clock_breakdown", "time (ms) | fwd"), ("memory_breakdown", "memory")])
def test_breakdowns(key: str, says: str) -> None:
    assert [line.startswith(f"[step {step}] {says}") for step, line in enumerate(printed(**{key: True}), 1)] == [
        True
    ] * 4
    assert len(printed(**{key: True}, steps_per_print=2)) == 2 + 2


# --- comms_logger


def logged(rank: int, section: dict[str, Any]) -> list[str]:
    """Lines of the log and of the summary of three steps, but for times."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), engine_for(Layers(), configuration(1, comms_logger=section)) as engine:
        train(engine, 3)
        with contextlib.suppress(RuntimeError):
            engine.log_summary()
    return text.getvalue().splitlines()


@alive("comms_logger.enabled", "comms_logger.verbose", "comms_logger.prof_all", "comms_logger.prof_ops")
def test_comms_logger(ranks: Ranks) -> None:
    def kinds(**section: Any) -> tuple[int, set[str]]:
        """Lines while it runs, and the kinds of communications in the summary."""
        lines, others = ranks.run(2, logged, section)
        assert others == []
        table = [line.split()[0] for line in lines if not line.startswith("comm op: ")]
        return len(lines) - len(table), set(table[1:])

    assert kinds() == (0, set())
    everything = {"all_gather", "reduce_scatter", "all_reduce", "broadcast"}
    assert kinds(enabled=True) == (0, everything)
    verbose, found = kinds(enabled=True, verbose=True)
    assert (verbose >= 9, found) == (True, everything)  # gradients, their norm and parameters, in each step
    assert kinds(enabled=True, prof_all=False) == (0, set())
    assert kinds(enabled=True, prof_all=False, prof_ops=["all_gather"]) == (0, {"all_gather"})


# --- flops_profiler


def profile(**section: Any) -> list[str]:
    return printed(model=build(odd=False), flops_profiler={"enabled": True, **section})


@alive("flops_profiler.enabled", "flops_profiler.profile_step")
def test_flops_profiler() -> None:
    assert printed(model=build(odd=False)) == []
    for step in (1, 2):
        assert f"Profile of step {step} (steps before it: {step})" in profile(profile_step=step)[1]
    assert profile(profile_step=7) == []  # there are 4


@alive("flops_profiler.module_depth", "flops_profiler.top_modules", "flops_profiler.detailed")
def test_what_the_table_of_flops_has() -> None:
    def shape(**section: Any) -> tuple[int, int, int]:
        """Depths, modules named at depth 1, and modules in the table."""
        lines = profile(**section)
        params = next(line for at, line in enumerate(lines) if lines[at - 1] == "depth 1:")
        depths = sum(line.startswith("depth ") for line in lines)
        return depths, params.count(",") + 1, sum(" (Linear)" in line for line in lines)

    assert shape() == (4, 1, 7)
    assert shape(module_depth=1) == (2, 1, 7)
    assert shape(top_modules=2) == (4, 2, 7)
    assert shape(detailed=False) == (4, 1, 0)


@alive("flops_profiler.output_file")
def test_the_table_of_flops_in_a_file(tmp_path: Path) -> None:
    assert profile(output_file=str(tmp_path / "flops.txt")) == []
    assert "Profile of step 1" in (tmp_path / "flops.txt").read_text()


# --- curves


@alive(
    "tensorboard.enabled", "tensorboard.output_path", "tensorboard.job_name",
    "csv_monitor.enabled", "csv_monitor.output_path", "csv_monitor.job_name",
)  # fmt: skip
@pytest.mark.parametrize(
    ("section", "files"),
    [("tensorboard", "events.out.tfevents.*"), ("csv_monitor", "Train_Samples_*.csv")],
    ids=["tensorboard", "csv_monitor"],
)
def test_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, files: str) -> None:
    monkeypatch.chdir(tmp_path)
    printed(2, **{section: {"enabled": False, "job_name": "none"}})
    printed(2, **{section: {"enabled": True}})
    printed(2, **{section: {"enabled": True, "output_path": str(tmp_path / "there"), "job_name": "mine"}})
    found = {path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob(files)}
    assert found == {"DeepSpeedJobName", "there/mine"}
