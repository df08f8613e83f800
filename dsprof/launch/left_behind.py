"""Captures that are left in memory or on a local disk, as their ranks and whoever copied them were killed.

A rank and its copier hold the folder of a capture (`copier.hold`). One that nobody holds is moved into the run folder
to which it belongs, by a copier of its own: a network that does not answer holds up nobody here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from dsprof import permissions, regular_files
from dsprof.collectors.capture import copier, scratch
from dsprof.names import host_name
from dsprof.schema import COPYING_FILE

from .talk import shown

BORN_S: Final = 60.0
"""An empty folder whose capture is about to begin is younger."""


class LeftBehind(NamedTuple):
    """A capture's local folder, and the run folder that it stands for."""

    local: Path
    run: Path


def find(given: str = "") -> list[LeftBehind]:
    """Those of this user on this host. `given`: DSPROF_SCRATCH, a place to look into beside the usual ones. Folders in
    which nothing was ever written are removed."""
    own = [] if not given or given.lower() in scratch.OFF else [Path(os.path.abspath(given))]
    found: list[LeftBehind] = []
    for parent in dict.fromkeys((*own, *scratch.parents(""), scratch.SHARED_MEMORY)):
        try:
            mine = permissions.own_name()
            permissions.check_own(parent / mine)
        except OSError:  # there is none, or it is somebody else's
            continue
        for stands_in in regular_files.folders(parent / mine, "*-*"):
            found += _below(stands_in)
    return found


def _below(stands_in: Path) -> Iterator[LeftBehind]:
    for local in regular_files.folders(stands_in / "capture", "rank*"):
        try:
            os.close(copier.hold(local, alone=True))
            state = scratch.state_of(local / COPYING_FILE)
            if state is not None:
                copier.check_stands_for(local, Path(state.run))
                yield LeftBehind(local, Path(state.run))
            elif time.time() - local.stat().st_mtime > BORN_S:
                local.rmdir()
                copier.remove_empty(local)
        except OSError:  # somebody holds it, or it is none of ours
            continue


def remove(one: LeftBehind) -> None:
    """Of a run whose folder is made anew. Does nothing if somebody holds it by now."""
    try:
        held = copier.hold(one.local, alone=True)
    except OSError:
        return
    shutil.rmtree(one.local, ignore_errors=True)
    os.close(held)
    copier.remove_empty(one.local)


Start = Callable[[Path, Path, str, float, int], None]
"""`scratch.start_copier`."""


def move_all(given: str = "", start: Start = scratch.start_copier) -> Iterator[str]:
    """Start to move each into its run folder, which is made again where it was removed; what to say of it."""
    return _move(find(given), start)


def _move(found: Iterable[LeftBehind], start: Start) -> Iterator[str]:
    for local, run in found:
        try:
            start(local, run, host_name(), 0.0, 0)
        except (OSError, subprocess.SubprocessError) as error:
            yield f"{local}, left by processes that were killed, cannot be moved to {shown(run)} ({error})"
        else:
            yield f"{local}, left by processes that were killed, is moved to {shown(run)}"


def tidy(run: Path, given: str = "") -> Iterator[str]:
    """Before the run `run` begins: what is left of an older one in that very folder is removed, and the others are
    moved. Where captures are written into the run folder only (`off`), nothing is looked for."""
    if given.lower() in scratch.OFF:
        return
    others: list[LeftBehind] = []
    for one in find(given):
        if one.run == Path(os.path.abspath(run)):
            remove(one)
        else:
            others.append(one)
    yield from _move(others, scratch.start_copier)
