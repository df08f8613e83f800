"""What dsprof adds to `import torch`: CPU time of the import, armed and not, in alternation.

    python benchmarks/arming.py                   # about two minutes; writes benchmarks/results/arming.json

`no_plugins` imports torch with TORCH_DEVICE_BACKEND_AUTOLOAD=0: torch's own search for plug-ins, which every
installed one shares, is the difference between it and `unarmed`.
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
IMPORT = "import time; begin = time.process_time(); import torch; print(time.process_time() - begin)"
ARMS: dict[str, dict[str, str]] = {
    "no_plugins": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    "unarmed": {},
    "armed": {"DSPROF": "1"},
}


def import_ms(arm: str) -> float:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DSPROF")}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], env={**kept, **ARMS[arm]}, capture_output=True, text=True, check=True
    )
    return 1e3 * float(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "arming.json")
    args = parser.parse_args()
    order = random.Random(0)
    taken: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(args.rounds):
        for arm in order.sample(list(ARMS), len(ARMS)):
            taken[arm].append(import_ms(arm))
    median = {arm: round(statistics.median(values), 1) for arm, values in taken.items()}
    added = [armed - bare for armed, bare in zip(taken["armed"], taken["no_plugins"], strict=True)]
    result = {
        "what": "CPU ms of `import torch`",
        "median_ms": median,
        "armed_less_no_plugins_ms": round(statistics.median(added), 1),
        "rounds": args.rounds,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
