"""Where native helpers are kept and looked for: where DSPROF_NATIVE_PATH says, in the package itself, in the user's
cache. In each, the helper for one torch and one Python has a folder named by `BuildTarget.key`.
"""

from __future__ import annotations

import os
import stat
import sysconfig
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from dsprof.permissions import own_folder

from .target import BuildTarget, built_for
from .trust import WRITABLE, Untrusted, trusted

MODULE: Final = "dsprof_native"
FILE: Final = f"{MODULE}.so"
PACKAGE: Final = Path(__file__).parent / "built"
"""Inside the package, whose files are trusted like its .py files."""
GIVEN: Final = "DSPROF_NATIVE_PATH"


def find(target: BuildTarget, refused: Callable[[str], None] = lambda why: None) -> Path | None:
    """The helper for `target`, if it was built before. Cheap: no subprocess.

    refused: told of each helper, or place, that somebody asked for or that might have fitted, why it is not used and
    what to do
    """
    given = os.environ.get(GIVEN)
    if given:
        found = _given(Path(os.path.abspath(given)), target, refused)
        if found is not None:
            return found
    for folder in (PACKAGE, *caches()):
        found = usable(folder / target.key / FILE, refused)
        if found is not None:
            return found
    if PACKAGE.is_dir():
        for other in _others(PACKAGE, target):
            refused(f"{other}: run `dsprof build` again")
    return None


def _given(path: Path, target: BuildTarget, refused: Callable[[str], None]) -> Path | None:
    """The helper at or below what DSPROF_NATIVE_PATH names."""
    if path.is_dir():
        found = next((file for file in (path / target.key / FILE, path / FILE) if file.is_file()), None)
        if found is None:
            others = _others(path, target) or [f"{path} holds no helper"]
            for other in others:
                refused(f"{GIVEN}: {other}: run `dsprof build -o {path}` with the job's Python")
            return None
    elif path.exists():
        found = path
    else:
        refused(f"{GIVEN}: {path} does not exist: name the folder that was given to `dsprof build -o`")
        return None
    if found.parent.name != target.key:
        unfit = built_for(found.parent).why_not(target, found)
        if unfit is not None:
            then = "" if path.is_dir() else f", and set {GIVEN} to that folder"
            refused(f"{GIVEN}: {unfit}: run `dsprof build -o {found.parent}` with the job's Python{then}")
            return None
    return usable(found, refused)


def _others(folder: Path, target: BuildTarget) -> list[str]:
    """Why the helpers in this folder are not for `target`, a sentence each."""
    found = []
    with suppress(OSError):
        for file in sorted(folder.glob(f"*/{FILE}")):
            unfit = built_for(file.parent).why_not(target, file)
            if unfit is not None:
                found.append(unfit)
    return found


def usable(path: Path, refused: Callable[[str], None] = lambda why: None) -> Path | None:
    """Where to load it from, if it is there and nobody else can have put it there."""
    if path.is_relative_to(PACKAGE):
        return path if path.is_file() else None
    try:
        return trusted(path) if path.is_file() else None
    except Untrusted as error:
        refused(f"{path} is not loaded: {error}")
    except OSError as error:
        refused(f"{path} cannot be looked at: {error.strerror or error}")
    return None


def caches() -> list[Path]:
    """Where helpers are kept: the user's cache, and where that cannot be used, a folder of the user's own in /tmp."""
    cache = os.environ.get("DSPROF_CACHE")
    if not cache:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        cache = os.path.join(base, "dsprof")
    return [Path(cache) / "native", Path(tempfile.gettempdir()) / f"dsprof-{os.getuid()}" / "native"]


def writable_cache(refused: Callable[[str], None] = lambda why: None) -> Path:
    """The first cache that files can be made in, and loaded from. Raises OSError where there is none."""
    reasons, kept = [], caches()
    for folder in kept:
        try:
            if folder == kept[-1]:  # below a folder for everybody, where a link may lead anywhere
                own_folder(folder.parents[1])
            make_private(folder)
            trusted(folder)
            if os.access(folder, os.W_OK):
                return folder
            reasons.append(f"{folder} cannot be written")
        except (OSError, Untrusted) as error:
            reasons.append(f"{folder} is not used: {error}")
        refused(reasons[-1])
    raise OSError("; ".join(reasons))


def make_private(folder: Path) -> None:
    """Make a cache and what is missing above it, for this user alone. Raises OSError."""
    for missing in reversed([above for above in (folder, *folder.parents) if not above.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    for ours in (folder.parent, folder):  # made by an earlier version under a umask that lets the group write
        status = os.lstat(ours)
        own = status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode)
        if own and ours.name.startswith(("dsprof", "native")) and status.st_mode & WRITABLE:
            ours.chmod(stat.S_IMODE(status.st_mode) & ~WRITABLE)


def for_image(refused: Callable[[str], None]) -> Path:
    """Where `dsprof build` puts a helper that is to be found by whoever runs the image: into the package, where that is
    installed and can be written, else into the user's cache. Raises OSError."""
    package = Path(__file__).resolve().parent
    installed = any(package.is_relative_to(sysconfig.get_paths()[kind]) for kind in ("purelib", "platlib"))
    return PACKAGE if installed and os.access(package, os.W_OK) else writable_cache(refused)
