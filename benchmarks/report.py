"""What the report of a large run takes, and whether a trace of one gigabyte opens as one.

    python benchmarks/report.py                     # all cases; writes benchmarks/results/report.json
    python benchmarks/report.py --only "64 ranks"   # those whose name begins so
    python benchmarks/report.py --keep FOLDER       # where runs and traces stay, and are found again

Each case is made first (made-up runs of `made_up_run.py`; a real torch.profiler trace of DLRM, repeated until its text
has a gigabyte) and then goes from its files to report.html by the command line, in a fresh process whose CPU time and
peak memory count, with those of the processes that it starts. CPU time, so that a machine that is busy otherwise can
tell it too; `wall_s` stands beside it. A result is written after each case, and a case that has one is left out.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from beside_hta import DLRM, repeat
from made_up_run import make_run

RESULTS: Final = Path(__file__).parent / "results" / "report.json"
ROWS: Final = 100
"""Of a step and rank."""
REPEATED: Final = 2400
"""Steps of the DLRM trace."""


@dataclass(frozen=True)
class Case:
    """make: writes what is read below a folder; command: of dsprof, from it; cpu_s, peak_mb: at most; 0: whatever."""

    make: Callable[[Path], None]
    command: Callable[[Path, Path], list[str]]
    cpu_s: float = 0.0
    peak_mb: float = 0.0


def made_up(ranks: int, steps: int) -> Callable[[Path], None]:
    return lambda folder: (make_run(folder, ranks, steps, ROWS), None)[1]


def gigabyte(folder: Path) -> None:
    """rank0.json, of at least 1e9 bytes: not compressed, as torch.profiler writes it by itself."""
    folder.mkdir(parents=True, exist_ok=True)
    packed, plain = folder / "rank0.json.gz", folder / "rank0.json"
    repeat(min(DLRM.glob("worker0*")), packed, REPEATED)
    with gzip.open(packed, "rb") as source, plain.open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 24)
    packed.unlink()
    if plain.stat().st_size < 1e9:
        raise SystemExit(f"{plain} has {plain.stat().st_size:,} bytes: repeat it more often")


def report(folder: Path, page: Path) -> list[str]:
    return ["report", str(folder), "-o", str(page), "--force"]


def imported(folder: Path, page: Path) -> list[str]:
    return ["import", str(folder / "rank0.json"), "-o", str(page.parent / "imported"), "--force"]


CASES: Final = {
    "64 ranks x 100 steps": Case(made_up(64, 100), report, 10.0, 1500.0),
    "1,024 ranks x 20 steps": Case(made_up(1024, 20), report),
    "torch.profiler trace of 1 GB": Case(gigabyte, imported),
}


def measured(command: list[str], page: Path) -> dict[str, Any]:
    """Runs dsprof, in this process's only child."""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-m", "dsprof", *command], capture_output=True, text=True, check=False)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    page = page if page.exists() else page.parent / "imported" / "report.html"
    found: dict[str, Any] = {
        "cpu_s": round(used.ru_utime + used.ru_stime, 2), "peak_mb": round(used.ru_maxrss * 1024 / 1e6),
        "wall_s": round(time.monotonic() - began, 1), "status": done.returncode,
        "page_mb": round(page.stat().st_size / 1e6, 2) if page.exists() else None,
        "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip
    if done.returncode:
        found["said"] = done.stderr[-500:]
    return found


def run(name: str, keep: Path) -> dict[str, Any]:
    """The case, made where it is not there already, in a fresh process."""
    case, folder = CASES[name], keep / name.replace(" ", "-").replace(",", "")
    ready = folder / "made"
    if not ready.exists():
        case.make(folder)
        ready.touch()
    page = keep / "page" / "report.html"
    shutil.rmtree(page.parent, ignore_errors=True)
    page.parent.mkdir(parents=True)
    words = [sys.executable, __file__, "--child", json.dumps([case.command(folder, page), str(page)])]
    found: dict[str, Any] = json.loads(subprocess.check_output(words, text=True))
    if case.cpu_s:
        found["holds"] = found["cpu_s"] < case.cpu_s and found["peak_mb"] < case.peak_mb and found["status"] == 0
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose name begins so")
    parser.add_argument("--keep", type=Path, help="a folder in which what was made stays")
    parser.add_argument("--force", action="store_true", help="measure again what the result file holds")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        command, page = json.loads(options.child)
        print(json.dumps(measured(command, Path(page))))
        return
    done: dict[str, Any] = json.loads(RESULTS.read_text())["cases"] if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in CASES:
            if not name.startswith(options.only) or (name in done and not options.force):
                continue
            done[name] = run(name, options.keep or Path(scratch))
            machine = {"cores": os.cpu_count(), "python": sys.version.split()[0]}
            what = "from a run's files to report.html, by the command line"
            RESULTS.write_text(json.dumps({"what": what, "machine": machine, "cases": done}, indent=1) + "\n")
            print(name, done[name], flush=True)


if __name__ == "__main__":
    main()
