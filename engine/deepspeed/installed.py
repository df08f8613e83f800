"""What importlib.metadata says of the stand-in: there libraries look whether DeepSpeed is installed, and which."""

from __future__ import annotations

from importlib.metadata import Distribution
from pathlib import Path
from typing import Final

from .names import VERSION

METADATA: Final = f"""\
Metadata-Version: 2.1
Name: deepspeed
Version: {VERSION}
Summary: dsprof's training engine under DeepSpeed's names
"""


class _StandIn(Distribution):
    """A distribution without files."""

    def read_text(self, filename: str) -> str | None:
        return METADATA if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        return Path(__file__).parent / str(path)


def distribution() -> Distribution:
    """`importlib.metadata.distribution("deepspeed")`."""
    return _StandIn()
