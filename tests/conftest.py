"""Fixtures that several test modules use."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked_python
import hypothesis
import pytest
import sleeping_jobs
from captures import RECORDERS, build_helper
from planting import planted
from sleeping_jobs import SleepingRanks

from dsprof.collectors.hooking import errors, statements
from dsprof.collectors.overrides import install as overrides
from dsprof.launch import Launch
from dsprof.trace.strings import plain_strings

# An example of a test takes as long as the machine is busy: by default one of 0.2 s fails.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def as_commands_do() -> Iterator[None]:
    """What runs in this process holds strings as every command of dsprof does."""
    with plain_strings():
        yield


@pytest.fixture(scope="session", autouse=True)
def temporary_files_go_with_the_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """torchrun leaves the folder of its logs where temporary files are made, and a process that is killed leaves all
    that it made there: pytest removes them with its own folders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("tmp")))
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(scope="module", autouse=True)
def programs_can_be_forked() -> Iterator[None]:
    """What programs read before torch is there (`forked_python.READ_EARLY`) is after each file as it was before. dask
    leaves PYTHONHASHSEED and MALLOC_TRIM_THRESHOLD_: then every job of every later file imported torch anew."""
    with forked_python.read_early_as_before():
        yield


@pytest.fixture(scope="module", autouse=True)
def priority_is_kept() -> Iterator[None]:
    """Every later test of this process, and every job that it starts, would have to wait for a core."""
    before = os.nice(0)
    yield
    assert os.nice(0) == before, "a test has lowered the priority of this process, which cannot be taken back"


@pytest.fixture(params=RECORDERS)
def kind(request: pytest.FixtureRequest) -> str:
    """Of each recorder, for `open_recorder`."""
    if request.param == "native":
        build_helper()
    return str(request.param)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Launch]:
    """What the command line would launch, with nothing launched; the working directory is an empty one."""
    seen: list[Launch] = []

    def run(self: Launch) -> int:
        seen.append(self)
        return 0

    monkeypatch.setattr(Launch, "run", run)
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("DSPROF", "PET_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return seen


@pytest.fixture
def turn(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, Any]], list[dict[str, Any]]]]:
    """Have knobs turned, as in a rank; gives the list in which facts arrive. Everything is taken away again."""
    undo: list[Callable[[], None]] = []
    counted: list[tuple[str, str]] = []

    def install(values: dict[str, Any]) -> list[dict[str, Any]]:
        facts: list[dict[str, Any]] = []
        errors.noted.clear()  # what another test has left
        monkeypatch.setenv(overrides.VARIABLE, json.dumps(values))
        statements.send_to(facts.append)
        errors.send_to(lambda where, said: counted.append((where, said)))
        undo.append(overrides.install())
        return facts

    yield install
    for one in undo:
        one()
    statements.send_to(None)
    errors.send_to(None)
    assert not counted


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pytest_collection_finish() -> None:
    """All that is imported stays until the end: no collection of garbage need look at it."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where the time of a long run went, by file."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if sum(seconds.values()) > 60:
        terminalreporter.section("slowest files")
        for file, spent in seconds.most_common(30):
            terminalreporter.write_line(f"{spent:6.1f} s  {file}")


@pytest.fixture(scope="session")
def sleeping_ranks(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SleepingRanks]:
    """A device that sleeps, and what runs jobs on it (`sleeping_device/`)."""
    kept: pytest.Cache | None = getattr(pytestconfig, "cache", None)  # none with -p no:cacheprovider
    ranks = sleeping_jobs.start(kept.mkdir("sleeping_device") if kept else tmp_path_factory.mktemp("sleeping_device"))
    yield ranks
    ranks.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    codes = {str(code) for marker in item.iter_markers("plants") for code in marker.args}
    if not codes:
        return (yield)
    with planted(codes):
        return (yield)
