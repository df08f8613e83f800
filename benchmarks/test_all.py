"""Every test there is, the slow ones too, a file at a time: hours, so it goes on where it stopped.

    python benchmarks/test_all.py               # writes benchmarks/results/test_all.json after each file
    python benchmarks/test_all.py --minutes 60  # ends after the file that is under way then
    python benchmarks/test_all.py --failed      # those again that failed
    python benchmarks/test_all.py --slow        # of each file the slow tests alone, which `make test` leaves out
    python benchmarks/test_all.py --again       # forgets all results first: a new round

A round takes as many sittings as it needs, and what is tested may be worked on in between. A file is done when its
tests have passed in this round and neither the file nor what it imports from `tests/` has changed since. Each result
names the commit that it is of. `round` says how many files are done, over how many commits the results are spread, and
for how many files nothing at all that tests depend on (`WATCHED`) has changed since: only where that is all of them are
the results those of one state of the project. Nothing may be uncommitted but results.
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
RESULT: Final = ROOT / "benchmarks" / "results" / "test_all.json"
COUNTS: Final = ("passed", "failed", "skipped", "errors", "deselected")
NOTHING: Final = 5
"""pytest's exit status where no test is left."""
WATCHED: Final = (".", ":!CHANGELOG.md", ":!benchmarks/results/test_all.json")
"""What the result of a test may depend on, as git names paths: tests also read the documentation and other results."""


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--failed", action="store_true")
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULT)
    args = parser.parse_args(words)
    commit = git("rev-parse", "--short", "HEAD")
    if git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results"):
        sys.exit("there is something uncommitted, so the result would be of no commit: commit it first")
    known = args.output.exists() and not args.again
    results: dict[str, Any] = json.loads(args.output.read_text())["files"] if known else {}
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))
    results = {name: one for name, one in results.items() if name in files}
    if args.slow:
        files = [name for name in files if name in with_slow_tests()]
    left = [name for name in files if failed(results.get(name, {}))]
    if not args.failed:  # those first that have no result at all
        left = [*(name for name in files if name not in left and not done(name, results, args.slow)), *left]
    end = time.monotonic() + 60 * args.minutes
    for name in left:
        if time.monotonic() > end:
            break
        results[name] = {"commit": commit, **run(name, slow=args.slow)}
        args.output.write_text(json.dumps(summary(results, files, slow=args.slow), indent=1) + "\n")
        print(name, results[name], flush=True)
    wrong = [name for name in files if failed(results.get(name, {}))]
    told = summary(results, files, slow=args.slow)["round"]
    print(
        f"{told['done']} of {told['files']} files are done, of {told['commits']} commits; for {told['of_this_state']} "
        f"of them nothing has changed since; failed: {', '.join(wrong) or 'none'}"
    )
    return int(bool(wrong))


def failed(result: dict[str, Any]) -> bool:
    return bool(result.get("failed") or result.get("errors"))


def done(name: str, results: dict[str, Any], slow: bool) -> bool:
    """Whether the file has passed in this round with the tests that it has today; its slow tests alone are not all."""
    result = results.get(name)
    if result is None or failed(result) or (result["slow_alone"] and not slow):
        return False
    return not changed_since(result["commit"], *map(str, sorted(sources(name))))


def summary(results: dict[str, Any], files: list[str], *, slow: bool) -> dict[str, Any]:
    """What is written: how far the round is, the sums of what the files came to, and each file's result."""
    counted = {name: results[name] for name in files if name in results}
    finished = [name for name in counted if done(name, results, slow)]
    commits = {counted[name]["commit"] for name in finished}
    same = {commit for commit in commits if not changed_since(commit, *WATCHED)}
    told = {
        "slow_alone": slow, "files": len(files), "done": len(finished), "commits": len(commits),
        "of_this_state": sum(counted[name]["commit"] in same for name in finished),
    }  # fmt: skip
    totals = {key: round(sum(one.get(key, 0) for one in counted.values()), 1) for key in (*COUNTS, "cpu_s")}
    return {"round": told, "totals": totals, "files": dict(sorted(results.items()))}


@functools.cache
def changed_since(commit: str, *paths: str) -> bool:
    """Whether one of these is not as it was in that commit; a commit that is gone says nothing, so: yes."""
    words = ["git", "diff", "--quiet", commit, "HEAD", "--", *paths]
    return bool(subprocess.run(words, cwd=ROOT, stderr=subprocess.DEVNULL, check=False).returncode)


@functools.cache
def sources(name: str) -> frozenset[Path]:
    """Of a file of tests, as paths below the project: itself, what it imports from `tests/`, at any remove, and the
    fixtures of its folders."""
    tests, found = ROOT / "tests", set[Path]()
    file = ROOT / name
    folders = [folder for folder in file.parents if folder.is_relative_to(tests)]
    left = [file, *(folder / "conftest.py" for folder in folders)]
    while left:
        path = left.pop()
        if path in found or not path.exists():
            continue
        found.add(path)
        for module in imported(path):
            steps = module.split(".")
            for folder in {path.parent, *folders}:
                left += [folder.joinpath(*steps).with_suffix(".py"), folder.joinpath(*steps, "__init__.py")]
    return frozenset(path.relative_to(ROOT) for path in found)


def imported(path: Path) -> Iterator[str]:
    """The modules that a file names in its imports; `from a import b` may mean a.b, too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield from filter(None, [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)])


@functools.cache
def with_slow_tests() -> set[str]:
    """The files that have any: to start pytest for one that has none takes seconds."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "slow"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return {line.partition("::")[0] for line in listed.stdout.splitlines() if "::" in line}


def run(name: str, *, slow: bool) -> dict[str, Any]:
    """What one file's tests came to."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    words = [sys.executable, "-m", "pytest", "-q", name, *(("-m", "slow") if slow else ())]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=os.environ, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    last = next((line for line in reversed(ended.stdout.splitlines()) if " in " in line), "")
    counts = {word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", last.partition(" in ")[0])}
    counts["errors"] = counts.get("errors", 0) + counts.pop("error", 0)
    tests = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", ended.stdout, re.MULTILINE)
    result: dict[str, Any] = {key: counts[key] for key in COUNTS if counts.get(key)}
    if ended.returncode not in (0, 1, NOTHING):
        result["errors"] = result.get("errors", 0) + 1
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    result |= {"tests": tests} if tests else {}
    return {**result, "slow_alone": slow, "cpu_s": round(cpu, 1), "clock_s": round(time.monotonic() - began, 1)}


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
