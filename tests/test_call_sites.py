"""Lines that issue collectives, as they are marked by both kinds of hooks."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import forked_python
import pytest
import torch  # noqa: F401  (lines are looked for outside of it)
from captures import RECORDERS, build_helper, open_recorder, read_rows
from jobs import environment

from dsprof.collectors.communication.call_sites import MOST, CallSites
from dsprof.collectors.recorder.python_recorder import PyRecorder
from dsprof.collectors.recorder.source_locations import passed_over
from dsprof.schema import CALL_SITE, DTYPES, Kind

RUN = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
from dsprof.collectors.communication import call_sites
from dsprof.collectors.communication import collectives
from dsprof.collectors import native
from dsprof.collectors.capture.open_capture import OpenCapture
from dsprof.collectors.recorder.python_recorder import PyRecorder
from dsprof.collectors.recorder.source_locations import passed_over

folder = Path(sys.argv[1])
helper = native.load(print) if sys.argv[2] == "native" else None
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
for name, (level, most, code) in json.loads(sys.argv[3]).items():
    recorder = helper.open(folder / name) if helper else PyRecorder(folder / name)
    call_sites.MOST = most
    nothing = lambda *args: None
    taken = [collectives.watch(recorder)]
    marks = call_sites.install(OpenCapture(recorder, folder / name, level, lambda: True, nothing, nothing))
    exec(compile(code, f"{name}.py", "exec"), {
        "torch": torch, "dist": dist, "marks": marks, "ones": torch.ones, "recorder": recorder,
    })
    for uninstall in [*taken, *marks]:
        uninstall()
    recorder.close()
"""


class Case(NamedTuple):
    level: str
    code: str
    most: int = MOST


LAST_OF = """\
for i in range({} + 1):
    (dist.all_reduce(ones(10)) if i < {} else
     dist.all_reduce(ones(10)))
"""
CASES = {
    "alike": Case("light", """\
        for _ in range(3):
            dist.all_reduce(ones(10))
            dist.all_reduce(ones(10))
            dist.all_reduce(ones(10, dtype=torch.int64))
            dist.barrier()
        """),
    "missed": Case("light", LAST_OF.format(16, 16)),
    "looked at": Case("light", LAST_OF.format(76, 76)),
    "full": Case("full", LAST_OF.format(16, 16)),
    "many": Case("light", """\
        for n in range(1, 6):
            dist.all_reduce(ones(n))
        """, most=2),
    "ddp": Case("light", """\
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        for _ in range(3):
            loss = model(ones(2, 4)).sum()
            loss.backward()
        """),
    "turned off": Case("light", """\
        for off in (True, False):
            recorder.mute(off)
            dist.all_reduce(ones(2))
        """),
    "taken away": Case("light", """\
        dist.all_reduce(ones(1))
        marks.pop()()
        dist.all_reduce(ones(2))
        """),
}  # fmt: skip
Marks = list[tuple[str, int, str, int]]
"""Name, bytes, dtype, and line in the case's code, from 1; 0: none."""


@pytest.fixture(scope="module", params=RECORDERS)
def marks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Marks]:
    """Of each case."""
    if request.param == "native":
        build_helper()
    folder = tmp_path_factory.mktemp(request.param)
    for name in CASES:
        (folder / name).mkdir()
    cases = {name: (case.level, case.most, textwrap.dedent(case.code)) for name, case in CASES.items()}
    done = forked_python.run(
        [sys.executable, "-c", RUN, str(folder), request.param, json.dumps(cases)], capture_output=True,
        timeout=120, cwd=folder, env={**environment(), "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {name: marks_in(folder / name, f"{name}.py") for name in CASES}


def marks_in(capture: Path, script: str) -> Marks:
    found = []
    for row in read_rows(capture):
        if (row.kind, row.name) == (Kind.MARK, CALL_SITE):
            file, _, line = row.site.rpartition(":")
            assert file == (script if line else "")
            found.append((row.purpose, row.bytes, DTYPES[int(row.value or 0)], int(line or 0)))
    return found


def test_each_line_is_marked_once_that_issues_the_same(marks: Mapping[str, Marks]) -> None:
    assert marks["alike"] == [
        ("all_reduce", 40, "float32", 2), ("all_reduce", 40, "float32", 3), ("all_reduce", 80, "int64", 4),
        ("barrier", 0, "", 5),
    ]  # fmt: skip


@pytest.mark.parametrize(("case", "seen"), [("missed", False), ("looked at", True), ("full", True)])
def test_after_the_first_ones_one_of_many_is_looked_at(marks: Mapping[str, Marks], case: str, seen: bool) -> None:
    lines = [("all_reduce", 40, "float32", 2), ("all_reduce", 40, "float32", 3)]
    assert marks[case] == lines[: 1 + seen]


def test_that_there_are_more_is_marked(marks: Mapping[str, Marks]) -> None:
    assert marks["many"] == [("all_reduce", 4, "float32", 2), ("all_reduce", 8, "float32", 2), ("", -1, "", 0)]


def test_what_ddp_reduces_has_the_line_of_the_backward(marks: Mapping[str, Marks]) -> None:
    assert ("all_reduce", 80, "float32", 4) in marks["ddp"]


def test_a_line_that_issued_while_the_capture_was_off_is_marked_later(marks: Mapping[str, Marks]) -> None:
    assert marks["turned off"] == [("all_reduce", 8, "float32", 3)]


def test_nothing_is_marked_once_it_is_taken_away(marks: Mapping[str, Marks]) -> None:
    assert marks["taken away"] == [("all_reduce", 4, "float32", 1)]


def test_what_the_engine_tells_of_counts(tmp_path: Path) -> None:
    recorder = open_recorder("python", tmp_path / "capture")
    assert isinstance(recorder, PyRecorder)
    recorder.note_call = CallSites(recorder, 1).note
    name = recorder.intern("all_gather")
    recorder.comm(Kind.COMM, name, 1, 2, 1, 400, recorder.group("0"), 0, -1, 7, 0, -1, -1, 0, 0)
    recorder.close()
    mark, told, *_ = read_rows(tmp_path / "capture")
    assert (mark.name, mark.purpose, mark.bytes, mark.value) == (CALL_SITE, "all_gather", 400, 7)
    assert mark.start_ns == told.start_ns  # so that it is not taken for a mark of a later one
    assert mark.site.startswith(f"{__file__}:")
    assert told.kind == Kind.COMM


def test_what_torch_compile_writes_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    assert default_cache_dir().startswith(tuple(passed_over()))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/scratch/compiled")
    assert "/scratch/compiled" in passed_over()
