"""Predicted against measured: what dsprof says that mending each planted problem saves, and what it does save.

    python benchmarks/predictions.py              # about fifteen minutes; writes benchmarks/results/predictions.json

Planted and mended runs alternate (A B A B ...), so drift of the host falls on both. The prediction is the gain of the
planted run's own finding, made without having seen the mended one; `measured` is the difference of the mean steps of
each pair. For data.imbalance the mended run is one whose ranks all get the mean length.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "examples" / "train_gpt.py"
MEAN_LENGTH = 160  # of the two lengths that --uneven-lengths gives to two ranks: 64 and 256

CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "rank.straggler": (("--slow-rank", "1"), ()),
    "data.stall": (("--slow-loader",), ()),
    "comm.small-messages": (("--bucket-mb", "0.01"), ()),
    "pause.gc": (("--gc-pressure",), ()),
    "data.imbalance": (("--uneven-lengths",), ("--context", str(MEAN_LENGTH))),
}
"""Code -> switches of the planted run, switches of the mended one."""


def profile(folder: Path, switches: tuple[str, ...]) -> dict[str, Any]:
    command = [sys.executable, "-m", "dsprof", "run", "-q", "--no-report", "-o", str(folder), "--nproc-per-node", "2"]
    subprocess.run([*command, str(EXAMPLE), *switches], check=True, stdout=subprocess.DEVNULL)
    found: dict[str, Any] = json.loads((folder / "findings.json").read_text())
    return found


def compare(code: str, pairs: int, scratch: Path) -> dict[str, Any]:
    planted_switches, mended_switches = CASES[code]
    predicted, measured, steps = [], [], []
    for number in range(pairs):
        planted = profile(scratch / f"{code}-{number}-planted", planted_switches)
        mended = profile(scratch / f"{code}-{number}-mended", mended_switches)
        finding = next((item for item in planted["findings"] if item["code"] == code), None)
        predicted.append(finding["gain"] if finding else {"ms": 0.0, "low": 0.0, "high": 0.0})
        steps.append(planted["run"]["step_ms"]["mean"])
        measured.append(steps[-1] - mended["run"]["step_ms"]["mean"])
        print(
            f"{code:20s} step {steps[-1]:6.1f} ms  predicted {predicted[-1]['ms']:6.1f}  measured {measured[-1]:6.1f}"
        )
    said, was = statistics.median(gain["ms"] for gain in predicted), statistics.median(measured)
    step = statistics.median(steps)
    return {
        "planted": " ".join(planted_switches),
        "step_ms": round(step, 1),
        "predicted_ms": round(said, 1),
        "measured_ms": round(was, 1),
        "error_percent_of_step": round(100 * abs(said - was) / step, 1),
        "pairs": [
            {"predicted_ms": round(gain["ms"], 1), "low": round(gain["low"], 1), "high": round(gain["high"], 1),
             "measured_ms": round(value, 1)}
            for gain, value in zip(predicted, measured, strict=True)
        ],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "predictions.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        cases = {code: compare(code, args.pairs, Path(scratch)) for code in CASES}
    result = {
        "what": "gain predicted from one run against the difference to a run without the problem, in alternation",
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "cases": cases,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
