"""Every test there is, the slow ones too, a file at a time: hours, so it goes on where it stopped.

    python benchmarks/test_all.py               # writes benchmarks/results/test_all.json after each file
    python benchmarks/test_all.py --minutes 60  # ends after the file that is under way then
    python benchmarks/test_all.py --failed      # those again that failed
    python benchmarks/test_all.py --slow        # of each file the slow tests alone, which `make test` leaves out

A file counts as done for the commit that is checked out; nothing may be uncommitted but results. What is written
says of each file which commit it is of, what passed, failed and was skipped, and the seconds of CPU and of the clock.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
RESULT: Final = ROOT / "benchmarks" / "results" / "test_all.json"
COUNTS: Final = ("passed", "failed", "skipped", "errors", "deselected")
NOTHING: Final = 5
"""pytest's exit status where no test is left."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--failed", action="store_true")
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args()
    commit = git("rev-parse", "--short", "HEAD")
    if git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results"):
        sys.exit("there is something uncommitted, so the result would be of no commit: commit it first")
    found: dict[str, Any] = json.loads(args.output.read_text()) if args.output.exists() else {"files": {}}
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    found["files"] = {name: one for name, one in found["files"].items() if name in files}
    if args.slow:
        files = [name for name in files if name in with_slow_tests()]
    end = time.monotonic() + 60 * args.minutes
    for name in files:
        before = found["files"].get(name, {})
        failed = bool(before.get("failed") or before.get("errors"))
        if (args.failed and not failed) or (not args.failed and before.get("commit") == commit and not failed):
            continue
        if time.monotonic() > end:
            break
        found["files"][name] = {"commit": commit, **run(name, slow=args.slow)}
        found["totals"] = {key: sum(one.get(key, 0) for one in found["files"].values()) for key in (*COUNTS, "cpu_s")}
        args.output.write_text(json.dumps(found, indent=1) + "\n")
        print(name, found["files"][name], flush=True)
    wrong = [name for name, one in found["files"].items() if one.get("failed") or one.get("errors")]
    done = sum(found["files"].get(name, {}).get("commit") == commit for name in files)
    print(f"{done} of {len(files)} files of this commit; failed: {', '.join(wrong) or 'none'}")
    return int(bool(wrong))


@functools.cache
def with_slow_tests() -> set[str]:
    """The files that have any: to start pytest for one that has none takes seconds."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "slow"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}


def run(name: str, *, slow: bool) -> dict[str, Any]:
    """What one file's tests came to."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    words = [sys.executable, "-m", "pytest", "-q", name, *(("-m", "slow") if slow else ())]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=os.environ, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    last = next((line for line in reversed(done.stdout.splitlines()) if " in " in line), "")
    counts = {word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", last.partition(" in ")[0])}
    counts["errors"] = counts.get("errors", 0) + counts.pop("error", 0)
    tests = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    result: dict[str, Any] = {key: counts[key] for key in COUNTS if counts.get(key)}
    if done.returncode not in (0, 1, NOTHING):
        result["errors"] = result.get("errors", 0) + 1
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    result |= {"tests": tests} if tests else {}
    return {**result, "slow_alone": slow, "cpu_s": round(cpu, 1), "clock_s": round(time.monotonic() - began, 1)}


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
