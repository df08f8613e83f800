"""Where checkpoints lie: tags, the file `latest`, and how a new one takes its place at once or not at all.

A checkpoint is written beside its place, under `.TAG.dsprof-saving`, and renamed when it is whole and on disk. One
that is already there is first renamed to `.TAG.dsprof-replaced`, from where it is read as long as nothing has come in
its stead.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

from ..comm.consensus import SharedError

LATEST: Final = "latest"
_SAVING: Final = ".dsprof-saving"
_REPLACED: Final = ".dsprof-replaced"


class CheckpointError(SharedError):
    """A checkpoint could not be saved or loaded."""


def check_tag(tag: str) -> None:
    """Raise CheckpointError for a tag that cannot be the name of a folder beside `latest`."""
    if not tag or tag == LATEST or tag.startswith(".") or "/" in tag or os.sep in tag or "\0" in tag:
        raise CheckpointError(
            f"the tag {tag!r} cannot name a checkpoint: write a name that is not {LATEST!r}, does not begin with a dot "
            "and has no slash in it"
        )


def find(folder: Path, tag: str | int | None) -> str | None:
    """The name of the folder below `folder` in which checkpoint `tag` is, by default the one that the file `latest`
    names; None without one. Raises CheckpointError if there is no such checkpoint."""
    if tag is None:
        try:
            tag = (folder / LATEST).read_text().strip()
        except FileNotFoundError:
            return None
    for name in (str(tag), f".{tag}{_REPLACED}"):
        if (folder / name).is_dir():
            return name
    there = sorted(path.name for path in folder.glob("*/") if (path / ".metadata").exists()) if folder.is_dir() else []
    have = f"it has {', '.join(there[:10])}{' ...' if len(there) > 10 else ''}" if there else "it has none"
    raise CheckpointError(f"there is no checkpoint {tag} in {folder}; {have}")


class Place:
    """The place of one checkpoint, and the folder beside it where it is written first. For rank 0."""

    def __init__(self, folder: Path, tag: str) -> None:
        self._folder = folder
        self._tag = tag
        self.temporary = folder / f".{tag}{_SAVING}"

    def open(self) -> None:
        """Make the temporary folder, and clear away what earlier saves that were killed have left: a folder is one
        job's.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in self._folder.iterdir():
            if not path.name.startswith(".") or not path.is_dir():
                continue
            if path.name.endswith(_SAVING):
                shutil.rmtree(path)
            elif path.name.endswith(_REPLACED):
                place = self._folder / path.name[1 : -len(_REPLACED)]
                if place.exists():
                    shutil.rmtree(path)
                else:
                    path.rename(place)
        self.temporary.mkdir()

    def commit(self, *, latest: bool) -> None:
        """Put the checkpoint in its place, and its tag into the file `latest` if wanted."""
        place, replaced = self._folder / self._tag, self._folder / f".{self._tag}{_REPLACED}"
        _sync(self.temporary)
        if place.exists():
            place.rename(replaced)
        self.temporary.rename(place)
        _sync(self._folder)
        if latest:
            replace_whole(self._folder / LATEST, lambda file: file.write(self._tag.encode()))
        shutil.rmtree(replaced, ignore_errors=True)

    def discard(self) -> None:
        """Remove what has been written, if it has not been committed."""
        shutil.rmtree(self.temporary, ignore_errors=True)
        place, replaced = self._folder / self._tag, self._folder / f".{self._tag}{_REPLACED}"
        if replaced.exists() and not place.exists():
            replaced.rename(place)


def replace_whole(path: Path, put: Callable[[BinaryIO], object]) -> None:
    """Replace a file by what `put` writes, so that whoever reads it at any moment finds the old one or the new one."""
    beside = path.with_name(f".{path.name}{_SAVING}")
    try:
        write_synced(beside, put)
        beside.replace(path)
    except Exception:
        beside.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def write_synced(path: Path, put: Callable[[BinaryIO], object]) -> None:
    """Write a file, and see it onto the disk."""
    with path.open("wb") as file:
        put(file)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """See the names in a folder onto the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
