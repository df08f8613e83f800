"""Which runs there are below a log folder. A run has an id, which the browser names it by: never a path."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from dsprof.run import RunFolder

MOST_FOLDERS: Final = 20_000
"""That are looked into."""
DEEPEST: Final = 6
FRESH_S: Final = 10.0
"""So long a listing counts: TensorBoard asks every plugin again and again whether it has anything."""
ITSELF: Final = "."


class RunListing:
    """The runs of a log folder: itself, where it is one or a run's own `tensorboard/`, or those below it.

    clock: as time.monotonic
    """

    def __init__(self, logdir: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._root = Path(logdir) if logdir and "://" not in logdir else None
        self._clock = clock
        self._lock = threading.Lock()
        self._found: dict[str, RunFolder] = {}
        self._until = float("-inf")

    def runs(self) -> dict[str, RunFolder]:
        """Id -> run, the newest first."""
        with self._lock:
            now = self._clock()
            if now >= self._until:
                self._found = self._look()
                self._until = now + FRESH_S
            return self._found

    def _look(self) -> dict[str, RunFolder]:
        from dsprof.run import began

        if self._root is None or not self._root.is_dir():
            return {}
        for folder in (RunFolder(self._root), RunFolder(self._root.absolute().parent)):
            if folder.is_run() and (folder.path == self._root or folder.tensorboard == self._root.absolute()):
                return {ITSELF: folder}
        found = {folder.path.relative_to(self._root).as_posix(): folder for folder in self._below()}
        return dict(sorted(found.items(), key=lambda item: began(item[1]), reverse=True))

    def _below(self) -> Iterator[RunFolder]:
        """Runs below the root, which no link leads to. Nothing is looked for inside a run."""
        assert self._root is not None
        depth = len(self._root.parts)
        for looked, (parent, folders, _) in enumerate(os.walk(self._root)):
            if looked >= MOST_FOLDERS:
                return
            folder = RunFolder(Path(parent))
            if parent != str(self._root) and folder.is_run():
                folders.clear()
                yield folder
            elif len(Path(parent).parts) - depth >= DEEPEST:
                folders.clear()
            else:
                folders[:] = sorted(name for name in folders if not name.startswith("."))
