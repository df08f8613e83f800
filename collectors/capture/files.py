"""What a capture holds beside its records: facts.jsonl and meta.json."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Final

from dsprof.atomic import write_atomically
from dsprof.ondisk import FORMAT_VERSION, describe_failure
from dsprof.permissions import open_to_append
from dsprof.redact import redact_data, redact_text, redact_words

from ..hooking.errors import count_error
from ..hooking.statements import Fact
from ..recorder.record import Recorder
from ..system import clock
from ..system.clock import now_ns
from .identity import BEGAN_NS, Identity, setting

MOST_FACTS: Final = 1000
"""Of a kind: each DataLoader of a script that makes one every epoch is another fact, and the others must still fit."""


class FactsFile:
    """facts.jsonl of one rank: each fact once, as a script may make the same model, or group, again and again."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._rank = rank
        self._written: set[str] = set()
        self._of_a_kind: Counter[str] = Counter()
        self._file = os.fdopen(open_to_append(folder / "facts.jsonl"), "a", encoding="utf-8", buffering=1)

    def write(self, fact: Fact) -> None:
        try:
            kind = str(fact["fact"])
            line = json.dumps({**fact, "rank": self._rank}, default=str) + "\n"
            if line in self._written or self._of_a_kind[kind] >= MOST_FACTS:
                return
            self._written.add(line)
            self._of_a_kind[kind] += 1
            self._file.write(self._redacted(fact, line))
        except (OSError, ValueError) as error:
            count_error("facts.jsonl", error)

    def _redacted(self, fact: Fact, line: str) -> str:
        if redact_text(line) == line:  # a quick look
            return line
        told = {**redact_data(fact), "rank": self._rank}
        return json.dumps(told, default=lambda value: redact_text(str(value))) + "\n"

    def close(self) -> None:
        with suppress(OSError):  # what could not be written was counted
            self._file.close()


class MetaFile:
    """meta.json: who wrote the capture, how, and how it ended."""

    def __init__(self, folder: Path, who: Identity, level: str, native: bool) -> None:
        self._folder, self._who, self._level, self._native = folder, who, level, native
        self._opened_ns = now_ns()
        began = setting(BEGAN_NS)
        self._began_ns = int(began) if began.isdecimal() else clock.process_start_ns()

    def write(self, recorder: Recorder, closed: bool) -> None:
        """As things stand now."""
        import torch

        who = self._who
        meta = {
            "format": FORMAT_VERSION,
            "rank": who.rank,
            "world_size": who.world_size,
            "local_rank": who.local_rank,
            "restart": who.restart,
            "host": who.host,
            "pid": who.pid,
            "argv": redact_words(sys.argv),
            "native": self._native,
            "level": self._level,
            "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
            # Both clocks at one moment: traces of other tools are stamped with the epoch.
            "clock": {
                "monotonic_ns": now_ns(),
                "epoch_ns": time.time_ns(),
                "process_start_ns": self._began_ns,
                "id": clock.clock_id(),
            },
            "opened_ns": self._opened_ns,
            "closed_ns": now_ns() if closed else None,
            "records": recorder.records,
            "dropped": recorder.dropped,
            "errors": [describe_failure(*failure) for failure in recorder.failures()],
            "closed": closed,
        }
        try:
            write_atomically(self._folder / "meta.json", json.dumps(meta, indent=1))
        except OSError as error:
            count_error("meta.json", error)
