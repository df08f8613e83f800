"""Whether dsprof works with the versions of torch and Python that `pyproject.toml` lets users install.

    make compat                                         # all cells, one after the other; about six minutes each
    python benchmarks/compat.py --cell 2.15/3.13        # that one
    python benchmarks/compat.py --python 3.13=/opt/py313/bin/python3.13

A cell is a version of torch on a version of Python. For each one a virtual environment is made, torch is installed into
it from the package index that pip is set up with (several gigabytes, where the index has no build without CUDA), and
dsprof from this checkout; the jobs of `compat_jobs.py` (arming alone, DDP, FSDP2, a pipeline) run in it without dsprof,
captured by the native helper, and captured in Python. The environment is removed afterwards. Interpreters are looked
for on PATH and among pyenv's.

A job is right when it ends with 0, prints the same losses, bit for bit, captured and not, when what was recorded has
the rows and facts in EXPECTED, when nothing failed inside dsprof, and nothing was lost to a private name.
`gone` lists the private names that a torch has not, whether these jobs use them or not. After each cell
`results/compat.json` is written. A cell that is there for the same sources is not run again, unless `--again` is given;
one that cannot be had says why.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from dsprof.atomic import write_atomically
from dsprof.trace.capture import read_capture
from dsprof.trace.derive import trace_rows

HERE: Final = Path(__file__).parent
ROOT: Final = HERE.parent
RESULT: Final = HERE / "results" / "compat.json"
SCRIPT: Final = HERE / "compat_jobs.py"
IN_JOBS: Final = ("numpy", "psutil", "nvidia-ml-py", "setuptools>=77", "wheel")
"""Beside torch, what a cell gets: what dsprof imports in a training process, and what installs it."""
INSTALL_S: Final = 2400
JOB_S: Final = 300


class Cell(NamedTuple):
    torch: str
    python: str

    def __str__(self) -> str:
        return f"{self.torch}/{self.python}"


CELLS: Final = (
    Cell("2.11", "3.11"),
    Cell("2.11", "3.13"),
    Cell("2.12", "3.12"),
    Cell("2.13", "3.11"),
    Cell("2.13", "3.13"),
    Cell("2.14", "3.11"),
    Cell("2.15", "3.11"),
    Cell("2.15", "3.13"),
)
RECORDERS: Final = {"native": "on", "python": "off"}
"""Recorder -> DSPROF_NATIVE."""


class Job(NamedTuple):
    """What each rank of a job must leave. rows: kind:name -> how many at least."""

    ranks: int
    rows: Mapping[str, int]
    facts: tuple[str, ...]


LOOP: Final = {"phase:data": 6, "phase:forward": 5, "phase:backward": 6, "phase:optimizer": 6, "step:step": 6}
"""The first backward opens a capture that no process group has opened before: after the first forward."""
EXPECTED: Final = {
    "arming": Job(1, {**LOOP, "phase:checkpoint": 1}, ("process", "dataloader", "optimizer")),
    "ddp": Job(
        2,
        {
            **LOOP,
            "comm:all_reduce": 7,
            "comm:broadcast": 6,
            "comm:all_gather": 1,
            "comm:barrier": 1,
            "wait:all_reduce": 1,
            "mark:backward_done": 6,
        },
        ("process", "dataloader", "optimizer", "ddp", "group"),
    ),
    "fsdp2": Job(
        2,
        {**LOOP, "comm:all_gather": 24, "comm:reduce_scatter": 18, "module:FSDP::sharding": 48},
        ("process", "dataloader", "optimizer", "fsdp", "group"),
    ),
    "pipeline": Job(
        2,
        {**LOOP, "comm:send": 24, "comm:recv": 24, "pipe:F": 24, "pipe:B": 24},
        ("process", "dataloader", "optimizer", "pipeline", "group"),
    ),
}


class Unavailable(Exception):
    """A cell that cannot be had, and why."""


def interpreter(version: str, given: Mapping[str, Path]) -> Path:
    """A Python of this version. Raises Unavailable."""
    if version in given:
        return given[version]
    own = Path(sys.base_prefix) / "bin" / f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = shutil.which(f"python{version}")
    for path in (own, *([Path(found)] if found else []), *sorted(pyenv.glob(f"{version}.*/bin/python{version}"))):
        if path.exists() and _run([path, "-c", "import ctypes, venv, sys; print(sys.version)"], 60).returncode == 0:
            return path
    raise Unavailable(f"no Python {version} on this machine; name one with --python {version}=PATH")


def sources() -> str:
    """Names what a cell was run with: dsprof as it runs in a training process, and the jobs."""
    digest = hashlib.sha256()
    folder = ROOT / "dsprof" / "collectors"
    for path in (*sorted(folder.rglob("*.py")), *sorted(folder.rglob("*.[ch]pp")), SCRIPT):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def make(cell: Cell, python: Path, folder: Path) -> tuple[Path, dict[str, str]]:
    """The cell's virtual environment below `folder`: its interpreter, and the versions in it. Raises Unavailable."""
    _checked([python, "-m", "venv", folder / "venv"], "no virtual environment")
    inside = folder / "venv" / "bin" / "python"
    pip = [inside, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    _checked([*pip, f"torch=={cell.torch}.*", *IN_JOBS], f"torch {cell.torch} cannot be installed")
    _checked([*pip, "--no-deps", "--no-build-isolation", ROOT], "dsprof cannot be installed")
    said = _run(
        [inside, "-c", "import torch, sys; print(torch.__version__, torch.version.cuda, sys.version.split()[0])"], 300
    )
    if said.returncode:
        raise Unavailable(f"torch {cell.torch} cannot be imported: {_last(said.stderr)}")
    version, cuda, of_python = said.stdout.split()
    return inside, {"torch": version, "cuda": cuda, "python": of_python}


def run_job(python: Path, job: str, folder: Path, environment: Mapping[str, str]) -> list[str]:
    """What each rank prints. Raises ValueError with what went wrong."""
    folder.mkdir()
    ranks = EXPECTED[job].ranks
    command = [str(python), str(SCRIPT), job, str(folder / "store")]
    processes = []
    for rank in range(ranks):
        place = {"RANK": str(rank), "WORLD_SIZE": str(ranks)} if ranks > 1 else {}
        processes.append(
            subprocess.Popen(
                command,
                cwd=folder,
                env={**environment, **place},
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    printed = []
    try:
        for rank, process in enumerate(processes):
            out, err = process.communicate(timeout=JOB_S)
            if process.returncode:
                raise ValueError(f"rank {rank} ended with {process.returncode}: {_last(err)}")
            printed.append(out)
    except subprocess.TimeoutExpired:
        raise ValueError(f"not over after {JOB_S} s") from None
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return printed


def judge(job: str, run: Path, native: bool) -> tuple[list[str], dict[str, int]]:
    """What is wrong with the captures of a run, and how many rows of each kind and name rank 0 has."""
    expected, wrong, counts = EXPECTED[job], [], Counter[str]()
    wrong += [f"{path.name}: {path.read_text().strip()}" for path in sorted(run.glob("error.*.txt"))]
    captures = sorted((run / "capture").iterdir()) if (run / "capture").is_dir() else []
    if len(captures) != expected.ranks:
        return [*wrong, f"{len(captures)} captures of {expected.ranks} ranks"], {}
    for folder in captures:
        capture = read_capture(folder)
        rank = int(capture.meta["rank"])
        rows = trace_rows(capture, rank, 0)
        found = Counter(f"{kind}:{name}" for kind, name in zip(rows["kind"], rows["name"], strict=True))
        named = Counter(str(fact["fact"]) for fact in capture.facts)
        wrong += [f"rank {rank}: {error}" for error in (*capture.errors, *capture.problems)]
        wrong += [f"rank {rank}: {fact['text']}" for fact in capture.facts if fact["fact"] == "note" and native]
        wrong += [f"rank {rank}: {_lost(fact)}" for fact in capture.facts if fact["fact"] == "lost"]
        wrong += [
            f"rank {rank}: {found[row]} rows {row}, expected {least}"
            for row, least in expected.rows.items()
            if found[row] < least
        ]
        wrong += [f"rank {rank}: no fact {fact}" for fact in expected.facts if not named[fact]]
        if bool(capture.meta["native"]) != native:
            wrong.append(f"rank {rank}: recorded {'in Python' if native else 'by the native helper'}")
        if rank == 0:
            counts = Counter(
                {row: count for row, count in found.items() if not row.startswith(("gauge:", "mem:", "pause:"))}
            )
    return wrong, dict(sorted(counts.items()))


def _gone(python: Path) -> list[str]:
    """The private names of torch that this torch has not (`collectors/hooking/private_names.py`)."""
    code = "from dsprof.collectors.hooking import private; print(*sorted(one.name for one in private.gone()))"
    done = _run([python, "-c", code], 300)
    return done.stdout.split() if done.returncode == 0 else [_last(done.stderr)]


def _lost(fact: Mapping[str, Any]) -> str:
    return f"{fact.get('because')}: {fact.get('what')}"


def run_cell(cell: Cell, given: Mapping[str, Path], say: Any) -> dict[str, Any]:
    """The cell's result."""
    with tempfile.TemporaryDirectory(prefix="compat-") as temporary:
        folder = Path(temporary)
        python, versions = make(cell, interpreter(cell.python, given), folder)
        say(f"torch {versions['torch']}, Python {versions['python']}")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("DSPROF", "PYTHON"))}
        usual = {**kept, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "DSPROF_CACHE": str(folder / "cache")}
        gone = _gone(python)
        for name in gone:
            say(f"has no {name}")
        jobs: dict[str, Any] = {}
        for job in EXPECTED:
            try:
                plain = run_job(python, job, folder / f"{job}-plain", usual)
            except ValueError as error:
                jobs[job] = {"plain": {"wrong": [f"without dsprof: {error}"]}}
                continue
            jobs[job] = {}
            for recorder, native in RECORDERS.items():
                run, wrong, counts = folder / f"{job}-{recorder}-run", list[str](), dict[str, int]()
                run.mkdir()
                armed = {**usual, "DSPROF": "1", "DSPROF_RUN": str(run), "DSPROF_NATIVE": native}
                try:
                    printed = run_job(python, job, folder / f"{job}-{recorder}", armed)
                    if printed != plain:
                        wrong.append("prints other losses than without dsprof")
                    failed, counts = judge(job, run, native == "on")
                    wrong += failed
                except ValueError as error:
                    wrong.append(str(error))
                jobs[job][recorder] = {"wrong": wrong, "rows": counts}
                say(f"{job}, {recorder}: {'; '.join(wrong) or 'right'}")
        right = all(not one["wrong"] for job in jobs.values() for one in job.values())
        return {"state": "right" if right else "wrong", "versions": versions, "gone": gone, "jobs": jobs}


def _run(command: Iterable[Any], timeout: float) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DSPROF")}
    try:
        return subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=timeout, env=kept)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess([*command], 1, "", str(error))


def _checked(command: Iterable[Any], what: str) -> None:
    done = _run(command, INSTALL_S)
    if done.returncode:
        raise Unavailable(f"{what}: {_last(done.stderr)}")


def _last(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("[notice]")]
    errors = [line for line in lines if "error" in line.lower()]
    return (errors or lines or ["no message"])[-1][:500]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", action="append", metavar="TORCH/PYTHON", help="this cell only; may be repeated")
    parser.add_argument("--python", action="append", default=[], metavar="VERSION=PATH", help="an interpreter to use")
    parser.add_argument("--again", action="store_true", help="run also what is there for the same sources")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    chosen = [Cell(*text.split("/", 1)) for text in args.cell] if args.cell else list(CELLS)
    if any(len(cell) != 2 for cell in chosen):
        parser.error("--cell: TORCH/PYTHON, such as 2.13/3.11")
    given = {version: Path(path) for version, _, path in (text.partition("=") for text in args.python)}
    result = json.loads(args.output.read_text()) if args.output.exists() else {"cells": {}}
    digest = sources()
    for cell in chosen:
        there = result["cells"].get(str(cell), {})
        if there.get("sources") == digest and there["state"] in ("right", "wrong") and not args.again:
            print(f"{cell}: {there['state']}, as it was (--again runs it anew)")
            continue
        began = time.time()
        try:
            made = run_cell(cell, given, lambda text, cell=cell: print(f"{cell}: {text}", flush=True))
        except Unavailable as error:
            made = {"state": "not to be had", "why": str(error)}
            print(f"{cell}: {error}", flush=True)
        result["cells"][str(cell)] = {**made, "sources": digest, "seconds": round(time.time() - began)}
        result["cells"] = dict(sorted(result["cells"].items()))
        result["machine"] = {"cores": os.cpu_count(), "system": platform.platform()}
        write_atomically(args.output, json.dumps(result, indent=1) + "\n")
    return int(any(result["cells"][str(cell)]["state"] == "wrong" for cell in chosen))


if __name__ == "__main__":
    sys.exit(main())
