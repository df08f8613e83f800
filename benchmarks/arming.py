"""What dsprof adds to `import torch`: the time its entry point takes, armed and not, in fresh interpreters.

    python benchmarks/arming.py                   # about two minutes; writes benchmarks/results/arming.json

An import of torch takes more than a second and varies by more than the entry point takes, so whole imports cannot be
compared. Each interpreter here imports torch without plug-ins, then does what torch does at the end of its import:
it searches for `torch.backends` entry points (which torch does whether dsprof is there or not; shown beside), and
loads and calls the one of dsprof.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CHILD = """
import json, time
import torch
from importlib.metadata import entry_points
begin = time.perf_counter(), time.process_time()
found = entry_points(group="torch.backends")
searched = time.perf_counter(), time.process_time()
for entry in found:
    if entry.name == "dsprof":
        entry.load()()
called = time.perf_counter(), time.process_time()
import sys
assert "dsprof.collectors.arm" in sys.modules, "dsprof is not installed"
print(json.dumps({"torch's search": [1e3 * (b - a) for a, b in zip(begin, searched)],
                  "dsprof": [1e3 * (b - a) for a, b in zip(searched, called)]}))
"""
ARMS: dict[str, dict[str, str]] = {"unarmed": {}, "armed": {"DSPROF": "1"}}


def taken_by(arm: str) -> dict[str, list[float]]:
    """What -> [wall ms, CPU ms], of one fresh interpreter."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DSPROF")}
    environment = {**kept, **ARMS[arm], "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", CHILD], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, list[float]] = json.loads(done.stdout)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "arming.json")
    args = parser.parse_args()
    order = random.Random(0)
    taken: dict[str, list[dict[str, list[float]]]] = {arm: [] for arm in ARMS}
    for _ in range(args.rounds):
        for arm in order.sample(list(ARMS), len(ARMS)):
            taken[arm].append(taken_by(arm))

    def summary(arm: str, what: str) -> dict[str, float]:
        wall, cpu = zip(*(one[what] for one in taken[arm]), strict=True)
        return {
            "wall_ms_median": round(statistics.median(wall), 2),
            "wall_ms_worst": round(max(wall), 2),
            "cpu_ms_median": round(statistics.median(cpu), 2),
        }

    result = {
        "what": "ms that dsprof's entry point adds to `import torch`",
        **{arm: {what: summary(arm, what) for what in ("dsprof", "torch's search")} for arm in ARMS},
        "rounds": args.rounds,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
