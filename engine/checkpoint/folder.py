"""Where checkpoints lie: tags, the file `latest`, and how a new one takes its place at once or not at all.

A checkpoint is written beside its place, under `.TAG.dsprof-MARK-saving`, and renamed when it is whole and on disk. One
that is already there is first renamed to `.TAG.dsprof-MARK-replaced`, from where it is read as long as nothing has come
in its stead. MARK is a number of this save's own. A lock on `.TAG.dsprof-MARK-lock`, which the system takes back when
the process ends, says that it is under way: what has none was left by a save that was killed, and is cleared away by
the next, of whatever job.

At the end: how what is no tensor, as counters and random number generators, is written and read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import pickle
import random
import re
import secrets
import shutil
import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch
from torch import Tensor, nn

from ..comm.consensus import SharedError

LATEST: Final = "latest"
_NAME: Final = re.compile(r"\.(?P<name>.+)\.dsprof-(?:[0-9a-f]{8}-)?(?P<what>saving|replaced|lock)")
"""What a save has beside `name`; one of an older version has no mark, and never a lock."""
_ABANDONED_S: Final = 86_400
"""After so long a save is taken to be over, on file systems that have no locks."""


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
    if (folder / str(tag)).is_dir():
        return str(tag)
    for path, name, what in _left_beside(folder):
        if (name, what) == (str(tag), "replaced"):
            return path.name
    there = sorted(path.name for path in folder.glob("*/") if (path / ".metadata").exists()) if folder.is_dir() else []
    have = f"it has {', '.join(there[:10])}{' ...' if len(there) > 10 else ''}" if there else "it has none"
    raise CheckpointError(f"there is no checkpoint {tag} in {folder}; {have}")


class Claim:
    """What one save has beside `folder`/`name`, as long as it is under way."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._mark = secrets.token_hex(4)
        self._lock: int | None = None

    def beside(self, what: str) -> Path:
        """Where what is `saving`, `replaced` or a `lock` lies."""
        return self._folder / f".{self._name}.dsprof-{self._mark}-{what}"

    def open(self) -> None:
        """Take the lock; anew, if its file was cleared away before it was locked."""
        lock = self.beside("lock")
        while self._lock is None:
            handle = os.open(lock, os.O_CREAT | os.O_RDWR, 0o644)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.stat(lock).st_ino == os.fstat(handle).st_ino:
                    self._lock = handle
                    return
            os.close(handle)

    def close(self) -> None:
        """The save is over."""
        if self._lock is not None:
            self.beside("lock").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None


class Place:
    """The place of one checkpoint, and the folder beside it where it is written first. For rank 0."""

    def __init__(self, folder: Path, tag: str) -> None:
        self.folder = folder
        self._tag = tag
        self._claim = Claim(folder, tag)
        self.temporary = self._claim.beside("saving")

    def open(self) -> str:
        """Make the temporary folder, and clear away what saves that were killed have left; the folder's name, which
        the other ranks do not know."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._claim.open()
        for path, name, what in list(_left_beside(self.folder)):  # of each save its lock first
            with contextlib.suppress(OSError):  # another job may be clearing it away, too
                if what == "lock":
                    _remove_free_lock(path)
                elif not path.with_name(path.name.removesuffix(what) + "lock").exists():
                    _clear_away(path, self.folder / name if what == "replaced" else None)
        self.temporary.mkdir()
        return self.temporary.name

    def commit(self, *, latest: bool) -> None:
        """Put the checkpoint in its place, and its tag into the file `latest` if wanted."""
        place, replaced = self.folder / self._tag, self._claim.beside("replaced")
        _sync(self.temporary)
        while not _moved(self.temporary, place):  # there is one already, or another job's has come just now
            shutil.rmtree(replaced, ignore_errors=True)
            with contextlib.suppress(FileNotFoundError):
                place.rename(replaced)
        _sync(self.folder)
        if latest:
            replace_whole(self.folder / LATEST, lambda file: file.write(self._tag.encode()))
        shutil.rmtree(replaced, ignore_errors=True)
        self._claim.close()

    def discard(self) -> None:
        """Remove what has been written, if it has not been committed."""
        shutil.rmtree(self.temporary, ignore_errors=True)
        place, replaced = self.folder / self._tag, self._claim.beside("replaced")
        if replaced.exists() and not place.exists():
            replaced.rename(place)
        self._claim.close()


def _left_beside(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """What saves have beside their places: path, name of the place, and what it is."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        found = _NAME.fullmatch(path.name)
        if found is not None:
            yield path, found["name"], found["what"]


def _remove_free_lock(lock: Path) -> None:
    """Remove it if the save that it is of is under way no more."""
    handle = os.open(lock, os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    except BlockingIOError:
        free = False
    except OSError:  # a file system without locks
        free = time.time() - os.fstat(handle).st_mtime > _ABANDONED_S
    try:
        if free:
            lock.unlink()
    finally:
        os.close(handle)


def _clear_away(path: Path, place: Path | None) -> None:
    """Remove what a save has left, or rename it to `place`, if nothing is there."""
    if place is not None and not place.exists():
        path.rename(place)
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def _moved(source: Path, place: Path) -> bool:
    """Rename a folder; False if there is something at its place."""
    try:
        source.rename(place)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def replace_whole(path: Path, put: Callable[[BinaryIO], object]) -> None:
    """Replace a file by what `put` writes, so that whoever reads it at any moment finds the old one or the new one."""
    claim = Claim(path.parent, path.name)
    claim.open()
    beside = claim.beside("saving")
    try:
        write_synced(beside, put)
        beside.replace(path)
    except Exception:
        beside.unlink(missing_ok=True)
        raise
    finally:
        claim.close()
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


# --- What a checkpoint holds besides its tensors: numbers, texts and collections of them, and random number generators

# They are written with `torch.save` and read with `weights_only`, which runs nothing. What could not be read so is
# refused when it is to be written.


_PLAIN: Final = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype)
_MAPPINGS: Final = (dict, OrderedDict, Counter)
_COLLECTIONS: Final = (list, tuple, set)


def pack(value: Any, name: str) -> bytes:
    """`value` as bytes that `unpack` takes. Raises CheckpointError for a kind of value that would need code to load.

    `name` is what the value is called in that error. Tensors are copied to the CPU.
    """
    buffer = io.BytesIO()
    torch.save(plain(value, name), buffer)
    return buffer.getvalue()


def unpack(data: bytes, name: str) -> Any:
    """The value that was packed. Raises CheckpointError if it holds anything else than `pack` writes."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{name} holds objects that a checkpoint cannot have: the file is damaged, or was made to run code. "
            "Nothing of it was run"
        ) from error
    except Exception as error:
        raise CheckpointError(f"{name} cannot be read, so the file is damaged ({type(error).__name__})") from error


def plain(value: Any, name: str) -> Any:
    """A copy of `value`, with tensors on the CPU, if `pack` takes it; else it raises what that does."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in (Tensor, nn.Parameter):
        return value.detach().cpu().clone()  # a view would take along all it is a view of
    if kind in _MAPPINGS:
        items = ((plain(key, f"a key of {name}"), plain(item, f"{name}[{key!r}]")) for key, item in value.items())
        return kind(dict(items)) if kind is not dict else dict(items)
    if kind in _COLLECTIONS:
        return kind(plain(item, f"{name}[{at}]") for at, item in enumerate(value))
    number = _number(value)
    if number is not None:
        return number
    raise CheckpointError(
        f"{name} is a {kind.__module__}.{kind.__qualname__}, and loading one would have to run code. Write it as None, "
        "numbers, texts, tensors, or dicts, lists, tuples and sets of these: x.tolist() for an array of NumPy's, "
        "vars(x) for a namespace, str(x) for a path, x.state_dict() for an object that has one"
    )


def _number(value: Any) -> Any:
    """A number of NumPy's as one of Python's, None if it is no such: they look alike when printed."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic):
        return None
    plain_one = value.item()
    return plain_one if type(plain_one) in _PLAIN else None


# --- random number generators


def random_states(device: torch.device) -> dict[str, Any]:
    """Where this process's generators stand: torch's on the CPU and on `device`, Python's, and NumPy's if it is
    loaded.
    """
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state()
        if isinstance(state, tuple):  # not that of a generator the program has put in its place
            algorithm, keys, *rest = state
            states["numpy"] = (algorithm, keys.tolist(), *rest)
    return states


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Go on from where `random_states` found the generators."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    numpy = sys.modules.get("numpy")
    if "numpy" in states and numpy is not None:
        numpy.random.set_state(states["numpy"])
