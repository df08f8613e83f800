"""The exception that ends a rank is a fact; the job's own hook, output and exit status are as without us."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from armed import captured, train

from dsprof.collectors.failures import uncaught_exception
from dsprof.names import host_name
from dsprof.run import RankExit, RunFolder, RunInfo
from dsprof.trace import merge

TRAINS = """
import os, sys, threading, torch
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
optimizer.step()
"""
RECORDED = """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    1 / 0
main()
"""
RAISES = """
def check(value):
    raise ValueError(f"bad batch {value}, token=hunter2\\nand more")
check(3)
"""
OWN_HOOK = """
def told(kind, error, trace):
    print("mine:", error.args[0])
sys.excepthook = told
"""
LATER = "optimizer.step()"


def facts(tmp_path: Path) -> list[dict[str, Any]]:
    return captured(tmp_path).of("uncaught")


def test_an_exception_that_nothing_catches(tmp_path: Path) -> None:
    done = train(tmp_path, TRAINS + RAISES, native="0")
    assert done.returncode == 1
    assert "ValueError: bad batch 3, token=hunter2\nand more" in done.stderr, "the traceback is whole"
    (fact,) = facts(tmp_path)
    assert (fact["type"], fact["message"]) == ("ValueError", "bad batch 3, token=[redacted]")
    assert fact["site"].endswith(":7")


def test_a_main_that_torchrun_records(tmp_path: Path) -> None:
    """torch's decorator writes a file of its own, and raises again: the place is the script's, not torch's."""
    done = train(tmp_path, TRAINS + RECORDED, native="0", TORCHELASTIC_ERROR_FILE=str(tmp_path / "error.json"))
    assert done.returncode == 1
    assert (tmp_path / "error.json").exists()
    (fact,) = facts(tmp_path)
    assert (fact["type"], fact["message"]) == ("ZeroDivisionError", "division by zero")
    assert fact["site"].endswith("train.py:9")


@pytest.mark.parametrize("code", [OWN_HOOK + TRAINS, TRAINS + OWN_HOOK], ids=["before the capture", "during it"])
def test_the_hook_of_the_script_is_called_as_without_us(code: str, tmp_path: Path) -> None:
    """One set before the capture is called first; one set later, which calls nobody, takes nothing from the finding."""
    done = train(tmp_path, ("import sys\n" if code.startswith(OWN_HOOK) else "") + code + RAISES, native="0")
    assert done.returncode == 1
    assert done.stdout == "mine: bad batch 3, token=hunter2\nand more\n"
    assert [fact["type"] for fact in facts(tmp_path)] == ["ValueError"]


@pytest.mark.parametrize(
    ("end", "well"),
    [
        ("sys.exit(3)", False),
        ("raise KeyboardInterrupt", False),
        ("thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()", True),
    ],
)
def test_what_is_no_failure_of_the_rank(end: str, well: bool, tmp_path: Path) -> None:
    done = train(tmp_path, TRAINS + end, native="0")
    assert (done.returncode == 0) == well
    assert facts(tmp_path) == []


def test_the_place_is_in_the_code_of_the_user() -> None:
    """Not in the library that raises."""
    try:
        import json

        json.loads("{")
    except ValueError as error:
        told = uncaught_exception.describe(error)
        line = error.__traceback__.tb_lineno if error.__traceback__ else 0
    assert told["site"] == f"{__file__}:{line}"
    assert told["type"] == "JSONDecodeError"


def test_an_exception_without_words_or_place() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert uncaught_exception.describe(Mute()) == {
        "fact": "uncaught",
        "type": "test_an_exception_without_words_or_place.<locals>.Mute",
        "message": "",
        "site": None,
    }
    assert len(uncaught_exception.describe(ValueError("x" * 1000))["message"]) == uncaught_exception.LONGEST


def test_a_process_that_torch_spawned_is_told_by_what_it_raised() -> None:
    class ProcessRaisedException(Exception):
        pass

    told = (
        "\n\n-- Process 0 terminated with the following error:\nTraceback (most recent call last):\nValueError: bad\n"
    )
    assert uncaught_exception.describe(ProcessRaisedException(told))["message"] == "ValueError: bad"


def test_a_script_that_dies_before_its_first_step(tmp_path: Path) -> None:
    """There is no capture to tell it in; the file is taken for a rank's by its process."""
    done = train(tmp_path, "import torch\nraise KeyError('batch')", native="0")
    assert done.returncode == 1
    (left,) = (tmp_path / "run").iterdir()
    process = int(left.name.removeprefix("uncaught.").removesuffix(".json"))
    folder = RunFolder(tmp_path / "run")
    told = {"fact": "uncaught", "type": "KeyError", "message": "'batch'", "site": f"{tmp_path / 'train.py'}:2"}
    assert folder.read_uncaught() == {(host_name(), process): told}
    ends = [RankExit(rank, host_name(), process + rank, 1, None, 0) for rank in (1, 0)]
    folder.write_info(RunInfo(id="run", name="run", command=[], exits=ends))
    assert merge(folder).facts == [{**told, "rank": 0}]
    assert merge(folder).facts == [{**told, "rank": 0}], "once"


@pytest.mark.parametrize("code", ["import torch, sys\nsys.exit(3)", "import torch"])
def test_a_script_that_ends_by_itself_leaves_nothing(code: str, tmp_path: Path) -> None:
    train(tmp_path, code, native="0")
    assert list((tmp_path / "run").iterdir()) == []


def test_the_hook_goes_with_the_capture() -> None:
    before = sys.excepthook
    capture: Any = SimpleNamespace(write_fact=lambda fact: None)
    (uninstall,) = uncaught_exception.install(capture)
    assert sys.excepthook is not before
    uninstall()
    assert sys.excepthook is before
