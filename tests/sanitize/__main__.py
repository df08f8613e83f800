"""The native helper under AddressSanitizer: `make sanitize`, a few minutes.

    python tests/sanitize [arguments of pytest]       # default: tests/test_native*.py but for THREADS

The helper is built into a cache of its own. No leaks are looked for: Python and torch leave much to the end of the
process, and so does the helper, for threads that outlive it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).parents[1]
THREADS: Final = "test_native_threads.py"
"""Compiles a program with ThreadSanitizer, which goes with no other. Torch is built without either, and what
ThreadSanitizer does not see it takes for races, so that program has no torch in it."""
FLAGS: Final = "-fsanitize=address -fno-omit-frame-pointer -g -O1"


def library(name: str) -> str:
    """Where g++ has a shared library."""
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
    return str(Path(found.strip()).resolve())


def main(arguments: list[str]) -> int:
    if shutil.which("g++") is None:
        print("g++ is not there: install it", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as cache:
        env = {name: value for name, value in os.environ.items() if not name.startswith("DSPROF")}
        env |= {
            "CXX": f"env -u LD_PRELOAD g++ {FLAGS}",  # the compiler itself would be slow
            "DSPROF_CACHE": cache,
            "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so')}",  # the latter for what throws
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        }
        wanted = arguments or [str(path) for path in sorted(TESTS.glob("test_native*.py")) if path.name != THREADS]
        return subprocess.run([sys.executable, "-m", "pytest", "-q", *wanted], env=env, cwd=TESTS.parent).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
