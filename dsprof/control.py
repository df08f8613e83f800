"""What the ranks of a job that runs are told, by `dsprof capture`, or by one of them: control.json of the run folder.

    {"capture": "on" or "off", "deep": {"first": 40, "last": 43, "ranks": [0, 1], "share": 0.94}}

Each key may be missing, and each is asked by somebody else, who leaves the other ones as they are. Standard library
only.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from . import permissions, regular_files
from .atomic import write_atomically

LARGEST_CONTROL: Final = 4096
"""Bytes of the file."""
CAPTURE: Final = {"on": True, "off": False}
LARGEST_STEP: Final = 1 << 40


@dataclass(frozen=True)
class DeepRequest:
    """Steps `first` to `last` - 1, counted from 0, are to be traced with torch.profiler on these ranks.

    share: for how much of its steps the device of the rank that asked for it was in phases that its host was still
           launching, from 0 to 1
    """

    first: int
    last: int
    ranks: tuple[int, ...]
    share: float


@dataclass(frozen=True)
class Control:
    """capture: whether the ranks record; None: as their settings say. deep: what is to be traced; None: nothing."""

    capture: bool | None = None
    deep: DeepRequest | None = None


def read(path: Path) -> Control:
    """What the file says. Raises OSError, or ValueError where that is nothing that it can say."""
    said = _read(path)
    if not set(said) & {"capture", "deep"}:
        raise ValueError(f"{path.name}: says neither capture nor deep")
    capture = said.get("capture")
    if capture is not None and capture not in CAPTURE:
        raise ValueError(f"{path.name}: capture is {capture!r}, and may be on or off")
    return Control(None if capture is None else CAPTURE[capture], _deep(said.get("deep"), path.name))


def turn(path: Path, capture: str) -> None:
    """Have the ranks record, or not: "on" or "off". What else the file says stays. Raises OSError."""
    said: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        said = _read(path)
    write_atomically(path, json.dumps({**said, "capture": capture}) + "\n")


def ask_once(path: Path, request: DeepRequest) -> bool:
    """Have the ranks trace, unless anything was asked of them before, by a user or by another rank: of two ranks that
    ask at once one does. Whether this one did. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.once")
    with suppress(FileNotFoundError):
        temporary.unlink()  # of a process of this number that was killed
    file = permissions.create(temporary)
    try:
        with open(file, "w", encoding="utf-8") as text:
            text.write(json.dumps({"deep": asdict(request)}) + "\n")
        os.link(temporary, path)  # fails where there is one already, as a rename does not
    except FileExistsError:
        return False
    finally:
        temporary.unlink()
    return True


def _read(path: Path) -> dict[str, Any]:
    said = regular_files.read_json(path, LARGEST_CONTROL)
    if not isinstance(said, dict):
        raise ValueError(f"{path.name}: is no JSON object")
    return said


def _deep(said: object, name: str) -> DeepRequest | None:
    if said is None:
        return None
    try:
        first, last, ranks, share = (said[key] for key in ("first", "last", "ranks", "share"))  # type: ignore[index]
        numbers = [first, last, *ranks]
        if any(type(one) is not int or not 0 <= one < LARGEST_STEP for one in numbers) or not first < last:
            raise ValueError("numbers of steps or ranks that are none")
        return DeepRequest(first, last, tuple(ranks), float(share))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: deep is not as it is to be ({error})") from error
