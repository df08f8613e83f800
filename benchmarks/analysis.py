"""How long the analysis of a run takes, and how much memory, from its Parquet files to the verdict.

    python benchmarks/analysis.py                          # the cases of the result file, about ten minutes
    python benchmarks/analysis.py --ranks 64 --steps 100 --rows 500
    python benchmarks/analysis.py --base CHECKOUT          # each case also by an older dsprof, in turns
    python benchmarks/analysis.py --plot                   # only draws benchmarks/results/analysis.svg anew
    python benchmarks/analysis.py --hta PYTHON             # importing torch.profiler traces beside HTA (beside_hta.py)

The runs are made up (made_up_run.py), one Parquet file a rank beside a run.json, as `dsprof run` leaves them. Each is
analyzed in a fresh process, at most two threads wide. A case that the result file holds is not measured again without
--force. CPU seconds and memory are what counts: they hold on a machine that is busy otherwise, whose load stands beside
them, and wall times do not.

With --base a checkout of an older dsprof analyzes the same files in the same way (git worktree add CHECKOUT COMMIT),
right after this one; of --times such pairs the least CPU time of each counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from analysis_plot import draw
from made_up_run import make_run

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "analysis.json"
IMPORT_RESULTS = HERE / "results" / "import.json"
CASES = [(2, 100, 500), (8, 100, 500), (64, 100, 500), (64, 100, 100), (8, 20, 500), (32, 20, 500), (128, 20, 500),
         (512, 20, 500)]  # fmt: skip
"""(ranks, steps, rows a step): the sizes that are asked for, then those of the plot."""
PLOTTED = (20, 500)
"""Steps and rows a step of the cases that are plotted over the number of ranks."""

STAGES = {
    "align": ["align"],
    "match": ["match_collectives"],
    "ranks": ["summarize_ranks"],
    "budget": ["step_budget", "waits_table"],
    "irregular": ["find_irregular", "mark_ordinary"],
    "load of cores": ["Gauges", "measure_load"],
    "graph": ["checked_graph"],
}
"""Stage -> functions of `analyzer.study`. `align` and `ranks` read the files. Before them `load` brings the run up to
date; `rules` and `answer` follow."""


def peak_mb() -> float:
    """Peak resident set of this process, MB. Not `getrusage`: a child begins with its parent's there."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def analyze_and_tell(folder: Path) -> None:
    """Runs in the fresh process: prints a JSON object."""
    from dsprof import trace
    from dsprof.analyzer import study as measuring
    from dsprof.analyzer.freed_memory import large_apart
    from dsprof.analyzer.judge import judge
    from dsprof.analyzer.rules.registry import all_rules
    from dsprof.analyzer.verdict.answer import answer
    from dsprof.run import RunFolder
    from dsprof.trace.strings import plain_strings

    all_rules()  # else the first question imports them
    large_apart()  # as `reports.measure` does
    before = peak_mb()
    wall, cpu = time.perf_counter(), time.process_time()
    spent: dict[str, float] = dict.fromkeys(["load", *STAGES, "rules", "answer"], 0.0)
    peaks: dict[str, float] = {}

    def timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent[stage] += time.process_time() - begun
                peaks[stage] = round(peak_mb())

        return call

    for stage, names in STAGES.items():
        for name in names:
            setattr(measuring, name, timed(stage, getattr(measuring, name)))
    loaded = timed("load", trace.load)(RunFolder(folder))
    with plain_strings():
        measured = measuring.study(loaded)
        result = timed("answer", answer)(measured, timed("rules", judge)(measured))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(
        json.dumps(
            {
                "rows": sum(len(loaded.read(rank, ("rank",))) for rank in loaded.ranks),
                "wall_s": round(wall, 2),
                "cpu_s": round(cpu, 2),
                "peak_mb": round(peak_mb()),
                "imports_mb": round(before),
                "stages_cpu_s": {stage: round(took, 2) for stage, took in spent.items()}
                | {"rest": round(cpu - sum(spent.values()), 2)},
                "peak_after_mb": peaks,
                "verdict": result.verdict.headline,
                "not_judged": result.not_judged,
                "clock_error_us": round(result.capture.clock_error_us, 1),
            }
        )
    )


def measure(
    ranks: int, steps: int, rows: int, keep: Path | None, base: Path | None = None, times: int = 1
) -> dict[str, Any]:
    folder = (keep or Path(tempfile.mkdtemp())) / f"made-up-{ranks}x{steps}x{rows}"
    try:
        if not (folder / "run.json").exists():
            begun = time.perf_counter()
            make_run(folder, ranks, steps, rows)
            print(f"{folder.name}: made in {time.perf_counter() - begun:.1f} s", file=sys.stderr)
        load = round(os.getloadavg()[0], 1)
        turns = [[in_a_fresh_process(checkout, folder) for checkout in (None, base)[: 2 if base else 1]]
                 for _ in range(times)]  # fmt: skip
        found, *other = (min(side, key=lambda of: float(of["cpu_s"])) for side in zip(*turns, strict=True))
    finally:
        if keep is None:
            shutil.rmtree(folder.parent)
    result = {"ranks": ranks, "steps": steps, "rows_a_step": rows, **found, "load_before": load}
    if other:
        told = {
            name: other[0][name] for name in ("cpu_s", "wall_s", "peak_mb", "imports_mb", "stages_cpu_s", "verdict")
        }
        shares = {name: round(float(found[name]) / float(told[name]), 2) for name in ("cpu_s", "peak_mb")}
        above = [float(of["peak_mb"]) - float(of["imports_mb"]) for of in (found, told)]
        shares["peak_above_imports"] = round(above[0] / above[1], 2)
        result |= {"base": told, "share_of_base": shares}
    return result


def in_a_fresh_process(checkout: Path | None, folder: Path) -> dict[str, Any]:
    """What `analyze_and_tell` prints. checkout: of another dsprof, whose own benchmark does it; None: this one."""
    script = Path(__file__).resolve() if checkout is None else checkout.resolve() / "benchmarks" / "analysis.py"
    child = subprocess.run(
        [sys.executable, str(script), "--child", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={
            **os.environ,
            "PYTHONPATH": str(script.parent.parent),
            "OMP_NUM_THREADS": "2",
            "OPENBLAS_NUM_THREADS": "2",
            "ARROW_DEFAULT_MEMORY_POOL": "system",
        },
    )
    found: dict[str, Any] = json.loads(child.stdout)
    return found


def commit_of(checkout: Path) -> str:
    """The commit of a checkout, and the first line of what it says."""
    told = subprocess.run(
        ["git", "log", "-1", "--format=%h %s"], cwd=checkout, stdout=subprocess.PIPE, text=True, check=True
    )
    return told.stdout.strip()


def compare_with_hta(python: Path, times: int, rounds: int, output: Path) -> int:
    """0 where both tools give the same times, else 1."""
    import beside_hta

    found = {
        "what": "traces of torch.profiler: to HTA's breakdown, overlap and idle time, and to dsprof's verdict",
        "machine": {
            "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(),
            "load_before": round(os.getloadavg()[0], 1),
        },
        **beside_hta.measure(python, times, rounds),
    }  # fmt: skip
    output.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    for difference in found["differences"]:
        print(difference, file=sys.stderr)
    return 0 if found["agree"] else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", help="numbers of ranks, such as 8,64,512")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, default=500, help="rows a step and rank")
    parser.add_argument("--keep", type=Path, help="a folder to keep the made-up runs in, and to find them in")
    parser.add_argument("--force", action="store_true", help="measure again what the result file holds")
    parser.add_argument("--output", type=Path, help="the result file, instead of the one in benchmarks/results")
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--base", type=Path, metavar="CHECKOUT", help="of an older dsprof, to be measured beside this")
    parser.add_argument("--hta", type=Path, metavar="PYTHON", help="an interpreter that has HTA (pip: traceinsight)")
    parser.add_argument("--times", type=int, help="how often each case is measured (1); with --hta: how often each "
                        "trace's step is repeated (160)")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=2, help="with --hta: how often each tool runs, in turns")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        analyze_and_tell(args.child)
        return 0
    if args.hta:
        return compare_with_hta(args.hta, args.times or 160, args.rounds, args.output or IMPORT_RESULTS)
    output = args.output or RESULTS
    cases = [(int(ranks), args.steps, args.rows) for ranks in args.ranks.split(",")] if args.ranks else CASES
    before = json.loads(output.read_text()) if output.exists() else {"cases": []}
    known, base = before["cases"], commit_of(args.base) if args.base else before.get("base", "")
    for case in [] if args.plot else cases:
        kept = [item for item in known if (item["ranks"], item["steps"], item["rows_a_step"]) != case]
        if len(kept) < len(known) and not args.force:
            continue
        found = measure(*case, args.keep, args.base, args.times or 1)
        known = sorted([*kept, found], key=lambda item: (item["rows_a_step"], item["steps"], item["ranks"]))
        result = {
            "what": "from the Parquet files of a made-up run to the verdict, in a fresh process",
            "machine": {"cores": len(os.sched_getaffinity(0)), "python": platform.python_version()},
            "base": base,
            "cases": known,
        }
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(found, indent=1))
    plot(known, output.with_suffix(".svg"))
    return 0


def plot(cases: list[dict[str, Any]], file: Path) -> None:
    """CPU seconds and memory over the number of ranks, of the cases of one number of steps and rows."""
    steps, rows = PLOTTED
    alike = [case for case in cases if (case["steps"], case["rows_a_step"]) == PLOTTED]
    chosen = sorted(alike, key=lambda case: int(case["ranks"]))
    panels = {
        "CPU seconds, Parquet to verdict": [case["cpu_s"] for case in chosen],
        "peak memory above the imports, MB": [case["peak_mb"] - case["imports_mb"] for case in chosen],
    }
    draw([case["ranks"] for case in chosen], panels, f"ranks, of {steps} steps of {rows} rows each", file)


if __name__ == "__main__":
    sys.exit(main())
