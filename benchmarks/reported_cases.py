"""Jobs after public bug reports: is the cause told first, with its fix, and does what that saves lie in the interval?

    python benchmarks/reported_cases.py FOLDER  # half an hour; writes benchmarks/results/reported_cases.json

FOLDER has the scripts, and `truth.json`, which says on how many ranks each runs; with MEND=1 in the environment a
script is the same job without its fault. Each runs with and without in turns (A B A B ...), so that drift of the host
falls on both. What was predicted is the gain of the first finding of the first run with the fault, and what is saved
the median over the turns of the mean step with it less the one without.

Written after each run; what was broken off goes on where it was. `load_before` is how many threads wanted a core.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

HERE: Final = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from jobs import profile  # noqa: E402

from dsprof.atomic import write_atomically  # noqa: E402

TURNS: Final = 3
ENVIRONMENT: Final = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@dataclass(frozen=True)
class Wanted:
    """code: of the first finding; ranks: that it names, where it is of some only; fix: what one of its fixes says"""

    code: str
    fix: str
    ranks: tuple[int, ...] | None = None


WANTED: Final = {
    "masks_in_buffers": Wanted("comm.buffers", "broadcast_buffers=False"),
    "groups_of_one": Wanted("compute.optimizer", "group"),
    "accum_reduces_each": Wanted("comm.redundant-reduce", "no_sync"),
    "packed_by_tokens": Wanted("data.imbalance", "squared lengths"),
    "one_rank_recompiles": Wanted("compute.recompile", "dynamic", (1,)),
    "throttled_rank": Wanted("rank.straggler", "CPU limit", (1,)),
    "causal_shards": Wanted("data.imbalance", "zigzag"),
}


def run(script: Path, ranks: int, mended: bool) -> dict[str, Any]:
    """What a run says, and what its steps took."""
    variables = {**ENVIRONMENT, **({"MEND": "1"} if mended else {})}
    load = round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory() as folder:
        done = profile(Path(folder), script, ranks=ranks, flags=("--no-report",), fresh=True, variables=variables)
        if done.status != 0:
            return {"failed": done.stderr[-2000:]}
        found = done.findings
    told = next((item for item in found["findings"] if item["severity"] != "info"), None)
    first = told and {
        "code": told["code"], "title": told["title"], "ranks": told["where"]["ranks"],
        "gain": {end: round(told["gain"][end], 3) for end in ("ms", "low", "high")},
        "fixes": [fix["title"] for fix in told["fixes"]],
    }  # fmt: skip
    return {"step_ms": round(found["run"]["step_ms"]["mean"], 3), "first": first, "load_before": load}


def judged(name: str, runs: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Whether what was said first is right, and whether the interval holds what mending saves."""
    wanted, said = WANTED[name], runs["planted 1"].get("first")
    right = (
        said is not None and said["code"] == wanted.code and (wanted.ranks is None or [*wanted.ranks] == said["ranks"])
    )
    fix = right and any(wanted.fix in title for title in said["fixes"])
    pairs = [
        (runs[f"planted {turn}"]["step_ms"], runs[f"mended {turn}"]["step_ms"])
        for turn in range(1, TURNS + 1)
        if all("step_ms" in runs.get(f"{which} {turn}", {}) for which in ("planted", "mended"))
    ]
    result: dict[str, Any] = {"wanted": wanted.code, "right": right, "right_fix": fix, "turns": len(pairs)}
    if pairs:
        saved = float(np.median([before - after for before, after in pairs]))
        holds = right and said["gain"]["low"] <= saved <= said["gain"]["high"]
        result |= {"saved_ms": round(saved, 3), "holds": holds}
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "reported_cases.json")
    args = parser.parse_args()
    truth = json.loads((args.folder / "truth.json").read_text())
    each: dict[str, Any] = json.loads(args.output.read_text())["each"] if args.output.exists() else {}
    # A turn of all cases before the next one: what is broken off has something of each.
    for number, which, name in (
        (n, w, case) for n in range(1, TURNS + 1) for case in WANTED for w in ("planted", "mended")
    ):
        runs = each.setdefault(name, {}).setdefault("runs", {})
        key = f"{which} {number}"
        if "step_ms" in runs.get(key, {}):
            continue
        runs[key] = run((args.folder / f"{name}.py").resolve(), truth[name]["nproc"], which == "mended")
        each[name] = {**judged(name, runs), "runs": runs}
        print(name, key, json.dumps({of: told for of, told in each[name].items() if of != "runs"}), flush=True)
        complete = [case for case in each.values() if case.get("turns")]
        result = {
            "what": "what `dsprof run` says of jobs after public bug reports, and what mending them saves",
            "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
            "right": f"{sum(case['right'] for case in complete)} of {len(complete)}",
            "right_fix": f"{sum(case['right_fix'] for case in complete)} of {len(complete)}",
            "interval_holds": f"{sum(case['holds'] for case in complete)} of {len(complete)}",
            "each": each,
        }
        write_atomically(args.output, json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
