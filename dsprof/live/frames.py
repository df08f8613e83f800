"""Frames of a Python stack, innermost first, and the one that is the user's own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

HOME: Final = f"{Path(__file__).parent.parent}/"
WRAPPED: Final = "<"
"""Begins the file of a frame that is no file's, such as of functions of ours that stand for the job's."""
INSTALLED: Final = re.compile(r"-packages/|/lib(64)?/python3\.\d+/|^<|/bin/[^/]+$")
MOST_SHOWN: Final = 8
LINE: Final = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')
THREAD: Final = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+) ")
TRAINS: Final = re.compile(r"# training thread 0x([0-9a-f]+)")


def user_site(frames: Iterable[Sequence[Any]]) -> str | None:
    """`file:line` of the innermost frame that is neither of an installed package, nor of Python's, nor ours."""
    for file, line, *_ in frames:
        if not INSTALLED.search(str(file)) and not str(file).startswith(HOME):
            return f"{file}:{line}"
    return None


def in_words(frames: Sequence[Sequence[Any]]) -> str:
    """`fetch (loader.py:33) < work (train.py:50)`: the innermost ones, without ours."""
    others = [frame for frame in frames if not str(frame[0]).startswith((HOME, WRAPPED))]
    shown = [f"{function} ({str(file).rpartition('/')[2]}:{line})" for file, line, function in others[:MOST_SHOWN]]
    return " < ".join(shown) + (" < ..." if len(others) > MOST_SHOWN else "")


def short(site: str) -> str:
    """`train.py:33`, of a site."""
    return site.rpartition("/")[2]


def parse_stacks(text: str) -> list[dict[str, Any]]:
    """Threads as `faulthandler` and the native helper write them (`schema.STACKS_FILE`), the one that trains first."""
    threads: list[dict[str, Any]] = []
    training = ""
    for line in text.splitlines():
        if match := TRAINS.match(line):
            threads, training = [], match[1].lstrip("0")  # a later dump takes the place of an earlier one
        elif match := THREAD.match(line):
            threads.append({"name": "", "trains": match[1].lstrip("0") == training, "frames": []})
        elif (match := LINE.match(line)) and threads:
            threads[-1]["frames"].append([match[1], int(match[2]) if match[2].isdigit() else 0, match[3]])
    return sorted(threads, key=lambda thread: not thread["trains"])
