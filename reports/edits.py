"""A fix in words: what to write and where, and what to type instead."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from dsprof.analyzer.finding import Fix
from dsprof.analyzer.text import clean


@dataclass(frozen=True)
class Edit:
    """One concrete edit: `text` to write at `place` (empty where it is clear or not known)."""

    place: str
    text: str

    def __str__(self) -> str:
        return f"{self.place}  {self.text}" if self.place else self.text


def changes(fix: Fix, cwd: str = "") -> list[Edit]:
    """A fix as edits to copy; file names are shortened to be relative to `cwd`."""
    return [edit for entry in fix.patch if (edit := _change(fix.kind, entry, cwd)).text]


def applied_by(fix: Fix) -> str:
    """How dsprof makes a change without an edit, as one types it; empty where it cannot."""
    return f"dsprof run {settings(fix)} ..." if fix.knobs else ""


def settings(fix: Fix) -> str:
    """A fix's knobs as they are typed: `--set ddp.bucket_cap_mb=25`."""
    from dsprof.knobs import flags

    return shlex.join(map(clean, flags(fix.knobs)))


def _change(kind: str, entry: dict[str, Any], cwd: str) -> Edit:
    value = clean(entry.get("value", ""))
    if kind == "env":
        return Edit("", f"export {clean(entry.get('name', ''))}={value}")
    if kind == "config":
        key = _dotted(entry.get("path", ""))
        if entry.get("op") == "move":
            return Edit("", f"rename {_dotted(entry.get('from', ''))} to {key}")
        return Edit("", f"remove {key}" if entry.get("op") == "remove" else f"{key} = {value}")
    argument = clean(entry.get("argument") or "")
    value = "" if entry.get("value") is None else value  # a line to look at
    called = argument.endswith(")")  # a call to write, not an argument to set
    code = f"{argument}={value}" if argument and value and not called else argument or value
    return Edit(site(entry.get("file"), entry.get("line"), cwd), code)


def _dotted(pointer: object) -> str:
    """The key that a JSON Pointer points to, as one says it: `fp16.enabled`."""
    return clean(pointer).strip("/").replace("/", ".").replace("~1", "/").replace("~0", "~")


def site(file: object, line: object, cwd: str = "") -> str:
    """`train.py:112`; empty where the file is not known."""
    if not file:
        return ""
    path = PurePath(clean(file))
    if cwd and path.is_relative_to(cwd):
        path = path.relative_to(cwd)
    return str(path) if line is None else f"{path}:{line}"
