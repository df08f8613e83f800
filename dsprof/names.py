"""Names that tell something: of runs, of hosts, of captures. Standard library only, as `schema` is."""

from __future__ import annotations

import datetime
import os
import re
import secrets
import socket
from typing import Final, NamedTuple


def new_run_id(name: str, now: datetime.datetime | None = None) -> str:
    """`<name>-<UTC>-<id>`, safe as a file name."""
    now = now or datetime.datetime.now(datetime.UTC)
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.") or "run"
    return f"{safe}-{now:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"


def host_name() -> str:
    """This host's whole name, as a file name: `node.a` is not `node.b`. DSPROF_HOST tells apart hosts of one name."""
    return (os.environ.get("DSPROF_HOST") or socket.gethostname()).replace("/", "_") or "localhost"


class CaptureName(NamedTuple):
    """What the name of a capture's folder tells: `rank00003.<restart>.<host>.<pid>`."""

    rank: int
    restart: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"rank{self.rank:05d}.{self.restart}.{self.host}.{self.pid}"

    @staticmethod
    def of(folder: str) -> CaptureName | None:
        """None: it is no capture's."""
        match = _CAPTURE.fullmatch(folder)
        return CaptureName(int(match[1]), int(match[2]), match[3], int(match[4])) if match else None


_CAPTURE: Final = re.compile(r"rank(\d{5,6})\.(\d{1,4})\.(.+)\.(\d{1,10})", re.ASCII)
"""No number has more digits than a rank, a restart or a process can have."""
