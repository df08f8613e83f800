"""What the name of a capture's folder tells. Standard library only, as `schema` is."""

from __future__ import annotations

import re
from typing import NamedTuple

from .schema import FOLDER_NAME


class CaptureName(NamedTuple):
    """`rank00003.<restart>.<host>.<pid>`"""

    rank: int
    restart: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank{self.rank:05d}.{self.restart}.{self.host}.{self.pid}"

    @staticmethod
    def of(folder: str) -> CaptureName | None:
        """None: it is no capture's."""
        match = re.fullmatch(FOLDER_NAME, folder, re.ASCII)
        return CaptureName(int(match[1]), int(match[2]), match[3], int(match[4])) if match else None
