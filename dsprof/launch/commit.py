"""Which commit of the job's own repository is checked out, read from git's files: git may not be installed."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Final

from dsprof import regular_files

FULL: Final = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
MOST_BYTES: Final = 1 << 20


def checked_out(folder: Path) -> str:
    """The commit of the repository that `folder` lies in; empty where there is none, or it cannot be read."""
    with suppress(OSError, ValueError):
        for place in (folder.resolve(), *folder.resolve().parents):
            if (place / ".git").exists():
                return _of(place / ".git")
    return ""


def _of(git: Path) -> str:
    if git.is_file():  # of a worktree or a submodule: "gitdir: PATH"
        git = (git.parent / _read(git).partition("gitdir:")[2].strip()).resolve()
    head = _read(git / "HEAD").strip()
    if not head.startswith("ref:"):
        return head if FULL.fullmatch(head) else ""
    name = head.partition("ref:")[2].strip()
    if not name.startswith("refs/") or ".." in name:
        return ""
    common = (git / _read(git / "commondir").strip()).resolve() if (git / "commondir").is_file() else git
    for place in (git, common):
        if (place / name).is_file() and FULL.fullmatch(found := _read(place / name).strip()):
            return found
    packed = _read(common / "packed-refs") if (common / "packed-refs").is_file() else ""
    for line in packed.splitlines():
        commit, _, ref = line.partition(" ")
        if ref == name and FULL.fullmatch(commit):
            return commit
    return ""


def _read(file: Path) -> str:
    return regular_files.read_bytes(file, MOST_BYTES).decode("utf-8", "replace")
