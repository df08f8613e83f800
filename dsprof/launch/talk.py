"""What dsprof says while a job runs: on stderr, since the script owns stdout."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Talk:
    """Lines of the launcher, each prefixed `[dsprof]`."""

    quiet: bool = False

    def say(self, text: str) -> None:
        """Say what one may want to know."""
        if not self.quiet:
            self.warn(text)

    def warn(self, text: str) -> None:
        """Say what one has to know."""
        with suppress(OSError, ValueError):  # stderr may be closed, or its terminal gone
            print(f"[dsprof] {text}", file=sys.stderr, flush=True)


def shown(path: Path) -> str:
    """A path as one would type it: relative where it lies below, quoted where it must be."""
    relative = os.path.relpath(path)
    return shlex.quote(str(path) if relative.startswith("..") else relative)
