"""Run folders and traces that somebody hostile made: nothing outside of them is read, written or removed, nothing
waits, and each is answered by a sentence."""

from __future__ import annotations

import os
import resource
import shutil
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

import pytest
from hostile import CANARY, Change, Outside, all_runs, impatient, traces
from slow_cases import slow_but
from synthetic import Job, write_capture

from dsprof import cli
from dsprof.collectors.capture import scratch
from dsprof.launch.claim import claim, is_run
from dsprof.launch.peak import facts_told
from dsprof.live.tail import Tail
from dsprof.run import RunError, RunFolder, RunInfo, open_run
from dsprof.trace import load

LONGEST_S = 120
"""What waits for somebody hostile does so for good; a busy machine is only slow."""
ADDRESS_SPACE = 8 << 30
"""Bytes beyond what the process has: what would take more fails."""


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank and a few steps."""
    run = tmp_path_factory.mktemp("good") / "run"
    for capture in Job(ranks=1, steps=3).captures().values():
        capture.path = Path(capture.path.name.replace(capture.path.name.split(".", 2)[2], "host.1"))
        write_capture(capture, run / "capture")
    info = RunInfo(id="run", name="run", command=["dsprof", "run", "train.py"], world_size=1, cwd="/")
    (run / "run.json").write_text(info.to_json())
    return run


@pytest.fixture(scope="module")
def read(good: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, whose table has been made: to make one takes most of what it takes to read a run."""
    run = tmp_path_factory.mktemp("read") / "run"
    shutil.copytree(good, run)
    load(open_run(run))
    return run


OF_THE_TABLE: Final = ("capture", "trace", "memory", "meta.json", "fact ", "a chunk", "records of", "half a", "nobody",
                       "five", "copying", "a trace")  # fmt: skip
"""How the names of cases begin that change what a table is made of, or where it is written."""


@pytest.fixture
def outside(tmp_path: Path) -> Iterator[Outside]:
    place = Outside(tmp_path / "outside")
    yield place
    place.close()


@pytest.fixture
def bounded() -> Iterator[None]:
    """What would take all memory fails instead."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + ADDRESS_SPACE, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def everything_in(folder: Path) -> bytes:
    """The bytes of all plain files below it."""
    found = b""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 30:
            found += path.read_bytes()
    return found


def problem_of(act: Callable[[], object], outside: Outside, run: Path, said: Callable[[], str]) -> str:
    """What was wrong with how something hostile was met; empty: nothing. `act` may raise RunError."""
    try:
        with impatient(LONGEST_S):
            answer = act()
    except RunError as error:
        answer = error
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"raised {type(error).__name__}: {error} ({place.filename}:{place.lineno})"
    text = f"{said()}{answer if isinstance(answer, RunError) else ''}"
    if "Traceback" in text or "\x1b" in text:
        return f"a traceback, or an escape sequence: {text[-300:]!r}"
    if isinstance(answer, int) and answer and "[dsprof] error: " not in text:
        return f"status {answer} without a sentence: {text[-300:]}"
    touched = outside.touched()
    if touched:
        return f"touched outside: {touched[:5]}"
    return "the canary was read" if CANARY in text or CANARY.encode() in everything_in(run) else ""


def read_all(run: Path) -> None:
    """Whatever dsprof reads of a run folder, but for the analysis. Raises RunError."""
    folder = open_run(run)
    is_run(folder), folder.read_hosts(), folder.read_hints(), folder.read_hangs(), folder.rank_of("host", 1)
    facts_told(folder), scratch.waiting(run)
    for _, capture in folder.captures():
        tail = Tail(capture)
        tail.facts("process", "group"), tail.meta(), tail.dropped(), tail.lock_stacks()
        with suppress(OSError):
            tail.follow(), tail.state(0, lambda name: None), tail.is_off()
    found = load(folder)
    for rank in found.ranks:
        found.read(rank)
    for rank in found.memory:
        found.memory[rank]


CASES: Final = all_runs()
VERBS: Final = (["analyze"], ["report"], ["tensorboard", "--no-serve"], ["runs"])


@pytest.mark.usefixtures("bounded")
@pytest.mark.parametrize("reported_every", slow_but([21], among=[9, 21]))
@pytest.mark.parametrize("part", range(4))
def test_hostile_run_folders(
    tmp_path: Path,
    good: Path,
    read: Path,
    outside: Outside,
    capfd: pytest.CaptureFixture[str],
    part: int,
    reported_every: int,
) -> None:
    """All are read, those with strange content are analyzed, and some of all kinds are reported, which writes more:
    fewer in `make test`."""
    wrong: dict[str, str] = {}

    def said() -> str:
        return "".join(capfd.readouterr())

    def problems_of(name: str, change: Change, verbs: Sequence[list[str]]) -> dict[str, str]:
        run = tmp_path / "run"
        shutil.copytree(good if name.startswith(OF_THE_TABLE) else read, run)
        change(run, outside.path)
        acts: list[tuple[str, Callable[[], object]]] = [("read", partial(read_all, run))]
        acts += [(verb[0], partial(cli.main, [*verb, str(run)])) for verb in verbs]
        found = {f"{name}: {what}": problem_of(act, outside, run, said) for what, act in acts}
        shutil.rmtree(run)
        return {what: problem for what, problem in found.items() if problem}

    for number, (name, change) in enumerate(CASES[part::4]):
        strange = "=" in name or "fact" in name
        verbs = VERBS if number % reported_every == part else VERBS[:1] if strange else ()
        found = problems_of(name, change, verbs)
        if any(problem.startswith("touched") for problem in found.values()):
            found = problems_of(name, change, verbs)  # a program that searches the whole disk does not come by twice
        wrong.update(found)
    assert len(CASES) > 300
    assert not wrong, "\n".join(f"{name}: {problem}" for name, problem in wrong.items())


@pytest.mark.usefixtures("bounded")
def test_hostile_traces(tmp_path: Path, outside: Outside, capfd: pytest.CaptureFixture[str]) -> None:
    wrong: dict[str, str] = {}
    for name, change in traces():
        folder, run = tmp_path / "traces", tmp_path / "run"
        folder.mkdir()
        change(folder, outside.path)
        act = partial(cli.main, ["import", str(folder), "-o", str(run)])
        problem = problem_of(act, outside, run, lambda: "".join(capfd.readouterr()))
        if problem:
            wrong[name] = problem
        shutil.rmtree(folder)
        shutil.rmtree(run, ignore_errors=True)
    assert not wrong, "\n".join(f"{name}: {problem}" for name, problem in wrong.items())
    assert not Path("canary-was-run").exists()


def test_a_trace_that_somebody_names_may_be_a_link_but_no_pipe(
    tmp_path: Path, outside: Outside, capfd: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    with impatient(LONGEST_S):
        assert cli.main(["import", str(tmp_path / "pipe")]) == 3
    expected = f"[dsprof] error: {tmp_path}/pipe: is no regular file; write the trace into one\n"
    assert capfd.readouterr().err == expected


def test_a_run_of_links_makes_way_without_what_they_name(tmp_path: Path, good: Path, outside: Outside) -> None:
    """--force removes the run, and the links in it."""
    run = tmp_path / "run"
    shutil.copytree(good, run)
    for part in RunFolder(run).parts:
        if not part.exists():
            part.symlink_to(outside.path / "capture" if part.suffix == "" else outside.path / "secret.txt")
    claim(run, RunInfo(id="new", name="new", command=[]), force=True)
    assert sorted(path.name for path in run.iterdir()) == ["capture", "run.json"]
    assert outside.touched() == []


def test_a_run_folder_that_somebody_names_may_be_a_link(
    tmp_path: Path, good: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(good, tmp_path / "run")
    (tmp_path / "link").symlink_to("run")
    assert cli.main(["analyze", "-q", str(tmp_path / "link")]) == 0
    assert capfd.readouterr().err == ""
    (tmp_path / "empty").mkdir()
    (tmp_path / "to-empty").symlink_to("empty")
    claim(tmp_path / "to-empty", RunInfo(id="new", name="new", command=[]))
    assert (tmp_path / "empty" / "run.json").exists()
