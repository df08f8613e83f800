"""What scripts do between two steps, drawn at random: does the engine train as plain torch does, or refuse by name?

    python benchmarks/usage_random.py                     # 2,000 programs; writes benchmarks/results/usage_random.json
    python benchmarks/usage_random.py --programs 100 --output /tmp/try.json
    python benchmarks/usage_random.py --program FILE      # those in a file: a configuration, then an action a line

The programs, the machines that draw them and the judge are those of tests/engine/test_usage_random.py. The result is
written after each program; started again with the same engine, it goes on where it stopped. It ends after --minutes.
A fault is printed with the smallest program found that shows it; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "engine"))

from ranks import Ranks  # noqa: E402
from usage_run import PATIENCE_S, Drawing, read, tried  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=90)
    parser.add_argument("--output", type=Path, default=HERE / "results" / "usage_random.json")
    parser.add_argument("--program", type=Path, help="run the programs in this file, and draw none")
    args = parser.parse_args()
    ranks = Ranks(PATIENCE_S)
    try:
        with tempfile.TemporaryDirectory() as folder:
            if args.program is not None:
                faults = [tried(program, ranks, Path(folder)).fault for program in read(args.program)]
                for fault in faults:
                    print(fault or "right, or refused by name")
                return int(any(faults))
            drawing = Drawing(args.output, ranks, Path(folder), lambda line: print(line, flush=True))
            drawing.draw(args.programs, time.monotonic() + 60 * args.minutes)
            print(f"{drawing.programs} programs, {len(drawing.faults)} with a fault")
            return int(bool(drawing.faults))
    finally:
        ranks.close()


if __name__ == "__main__":
    sys.exit(main())
