"""The files that what was typed stands for: files, folders, patterns such as 'runs/*/rank*.json', archives."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsprof.run import RunError

from .archive import is_archive, unpack

Known = Callable[[Path], bool]


@dataclass
class Sources:
    """files:  what a format knows, each once
    looked_at: how many files were looked at in folders, patterns and archives
    notes:  what is to be said of them
    """

    files: list[Path] = field(default_factory=list)
    looked_at: int = 0
    notes: list[str] = field(default_factory=list)


def find_files(given: Sequence[Path], room: Path, known: Known) -> Sources:
    """What `given` stands for. Archives are unpacked below `room`. A file that is named and that no format knows is
    among them all the same. Raises RunError."""
    found = Sources()
    for path in given:
        if path.exists() or not glob.has_magic(str(path)):
            _add(found, path, room, known)
            continue
        fitting = sorted(map(Path, glob.glob(str(path), recursive=True)))
        if not fitting:
            raise RunError(f"{path}: no file or folder fits this pattern; look where the traces are")
        for one in fitting:
            if one.is_dir() or is_archive(one):
                _add(found, one, room, known)
            else:
                _add_known(found, [one], known)
    found.files = list({path.resolve(): path for path in found.files}.values())
    return found


def _add(found: Sources, path: Path, room: Path, known: Known) -> None:
    if not path.exists():
        raise RunError(f"{path}: no such file or folder; name a trace, or the folder that holds one")
    if path.is_dir():
        _add_folder(found, path, room, known)
    elif not path.is_file():
        raise RunError(f"{path}: is no regular file; write the trace into one")
    elif not os.access(path, os.R_OK):
        raise RunError(f"{path}: cannot be read; make it readable")
    elif is_archive(path):
        _add_archive(found, path, room, known)
    else:
        found.files.append(path)


def _add_folder(found: Sources, folder: Path, room: Path, known: Known) -> None:
    """The traces that lie in it; where there are none, those that lie in the folders in it."""
    children = _children(folder)
    before = len(found.files)
    _add_known(found, children, known)
    for archive in (child for child in children if is_archive(child) and child.is_file()):
        _add_archive(found, archive, room, known)
    if len(found.files) == before:
        _add_known(found, [below for child in children if child.is_dir() for below in _children(child)], known)


def _add_archive(found: Sources, path: Path, room: Path, known: Known) -> None:
    place = room / f"archive{len(list(room.iterdir()))}"
    place.mkdir()
    files, notes = unpack(path, place, known)
    found.looked_at += 1
    found.notes += notes
    found.files += files


def _add_known(found: Sources, paths: Iterable[Path], known: Known) -> None:
    for path in paths:
        if path.is_file() and not is_archive(path):
            found.looked_at += 1
            if known(path):
                found.files.append(path)


def _children(folder: Path) -> list[Path]:
    """What lies in it; not what links in it stand for, which may be anywhere."""
    try:
        return sorted(child for child in folder.iterdir() if not child.is_symlink())
    except OSError as error:
        raise RunError(f"{folder}: cannot be read ({error.strerror}); make it readable") from error
