"""Samples by speed on ranks that sleep, one of them twice as slow: how near the ideal, and is the gain predicted?

    python benchmarks/unequal.py                      # writes benchmarks/results/unequal.json
    python benchmarks/unequal.py --only "2 ranks"

Each case is a job of the engine under `dsprof run`, first with equal shares, then with `--set heterogeneous.speeds=...`
as the finding `rank.straggler` of the first run advises, in turns. A rank sleeps for each sample of its micro-batch, so
that nothing but the shares decides. The ideal step is that of all samples at the sum of the speeds, without what a step
costs besides: all samples / sum of (speed / ms of a sample). Of each job the median step counts, after WARM_UP.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

HERE: Final = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from jobs import profile  # noqa: E402

RESULTS: Final = HERE / "results" / "unequal.json"
JOB: Final = HERE / "prediction_jobs" / "unequal.py"
WARM_UP: Final = 6
"""Steps that do not count."""
SAMPLE_MS: Final = 80.0
STEPS: Final = 30
KEY: Final = "heterogeneous.speeds"


@dataclass(frozen=True)
class Case:
    """ranks: how many, of which the first is twice as slow. samples: of a micro-batch of all ranks."""

    ranks: int
    samples: int

    @property
    def ideal_ms(self) -> float:
        """All samples at the sum of the speeds."""
        return self.samples * SAMPLE_MS / (self.ranks - 1 + 0.5)

    @property
    def equal_ms(self) -> float:
        """The slow rank's equal share."""
        return self.samples / self.ranks * 2 * SAMPLE_MS


CASES: Final[Mapping[str, Case]] = {"2 ranks": Case(2, 12), "4 ranks": Case(4, 28)}


def run(case: Case, folder: Path, settings: Sequence[str]) -> tuple[float, dict[str, Any]]:
    """The median step, ms, and what dsprof found."""
    folder.mkdir()
    config = folder / "ds.json"
    config.write_text(json.dumps({
        "train_batch_size": case.samples, "optimizer": {"type": "SGD", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 2},
    }))  # fmt: skip
    finished = profile(
        folder, JOB, "--steps", str(STEPS), "--sample-ms", str(SAMPLE_MS), "--deepspeed_config", str(config),
        "--log", str(folder / "steps.json"), ranks=case.ranks, flags=("-q", "--no-report", *settings),
        variables={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if finished.status:
        sys.exit(f"{case}: exit status {finished.status}\n{finished.stderr[-4000:]}")
    at = json.loads((folder / "steps.json").read_text())
    steps = [1e3 * (later - earlier) for earlier, later in zip(at[WARM_UP:], at[WARM_UP + 1 :], strict=False)]
    return statistics.median(steps), finished.findings


def advised(findings: Mapping[str, Any]) -> dict[str, Any]:
    """The fix of the finding that offers other shares."""
    fixes = [fix for one in findings["findings"] if one["code"] == "rank.straggler" for fix in one["fixes"]]
    return next((fix for fix in fixes if KEY in fix["set"]), {})


def measure(case: Case, turns: int, work: Path) -> dict[str, Any]:
    equal, unequal = [], []
    fix: dict[str, Any] = {}
    for number in range(turns):
        took, findings = run(case, work / f"equal-{number}", ())
        equal.append(took)
        fix = fix or advised(findings)
        if not fix:
            sys.exit(f"no fix was advised: {json.dumps(findings['findings'], indent=1)[:4000]}")
        took, _ = run(case, work / f"unequal-{number}", ("--set", f"{KEY}={json.dumps(fix['set'][KEY])}"))
        unequal.append(took)
    before, after = statistics.median(equal), statistics.median(unequal)
    predicted = {name: round(fix["gain"][name], 1) for name in ("ms", "low", "high")}
    ideal_times = case.equal_ms / case.ideal_ms
    return {
        "advised": fix["title"], "equal_ms": [round(each, 1) for each in equal],
        "unequal_ms": [round(each, 1) for each in unequal], "ideal_ms": round(case.ideal_ms, 1),
        "above_ideal_percent": round(100 * (after / case.ideal_ms - 1), 2),
        "times_as_fast": round(before / after, 3), "ideal_times": ideal_times,
        "of_ideal_gain_percent": round(100 * (before - after) / (case.equal_ms - case.ideal_ms), 1),
        "saved_ms": round(before - after, 1), "predicted": predicted,
        "interval_holds": predicted["low"] <= before - after <= predicted["high"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="a case")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    found = json.loads(args.output.read_text())["cases"] if args.only and args.output.exists() else {}
    for name, case in CASES.items():
        if args.only not in (None, name):
            continue
        with tempfile.TemporaryDirectory() as work:
            found[name] = measure(case, args.turns, Path(work))
        print(name, json.dumps(found[name], indent=1), flush=True)
        machine = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
        result = {"what": (__doc__ or "").partition("\n")[0], "machine": machine, "load": os.getloadavg()[0]}
        args.output.write_text(json.dumps({**result, "cases": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
