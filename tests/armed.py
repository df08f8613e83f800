"""Run a script that is armed, without our launcher, and read what its process wrote."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import forked_python
import pytest
from captures import Row, build_helper, read_rows
from jobs import ABORTED, environment

from dsprof.schema import Kind

both = pytest.mark.parametrize("native", ["1", pytest.param("0", marks=pytest.mark.slow)])
"""With the native helper, and without. What differs there, the recorders and the hooks on collectives and modules, has
tests of its own (test_record, test_collectives, test_modules)."""

ALONE = "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)"
"""Makes a process group of one; `dist` is torch.distributed."""


def train(
    tmp_path: Path, code: str, *, native: str, fresh: bool = False, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run `code` armed, one process, capturing into tmp_path/run; `fresh`: one that imports torch itself."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(code))
    if native == "1":
        build_helper()
    ours = {"DSPROF": "1", "DSPROF_RUN": str(tmp_path / "run"), "DSPROF_NATIVE": native}
    armed = environment(**{**ours, **env})
    (tmp_path / "run").mkdir(exist_ok=True)
    for _ in range(3):
        done = forked_python.run(
            [sys.executable, str(script)],
            cwd=tmp_path,
            env=armed,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            fresh=fresh,
        )
        if ABORTED not in done.stderr:
            break
    return done


@dataclass(frozen=True)
class Captured:
    """What one process wrote."""

    rows: list[Row]
    facts: list[dict[str, Any]]
    meta: dict[str, Any]

    def phases(self, *names: str) -> list[Row]:
        """In the order of their beginnings; all, if none is named."""
        found = [row for row in self.rows if row.kind is Kind.PHASE and (not names or row.name in names)]
        return sorted(found, key=lambda row: row.start_ns)

    def told(self, *names: str) -> list[tuple[str, float | None]]:
        """Name and value of those."""
        return [(row.name, row.value) for row in self.phases(*names)]

    def of(self, fact: str) -> list[dict[str, Any]]:
        """The facts of that name, without it and the rank."""
        return [
            {key: value for key, value in found.items() if key not in ("fact", "rank")}
            for found in self.facts
            if found["fact"] == fact
        ]


def captured(tmp_path: Path, *, errors: Sequence[str] = ()) -> Captured:
    """The newest capture in tmp_path/run; other errors inside the collectors fail the test."""
    folder = max((tmp_path / "run" / "capture").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["errors"] == list(errors)
    facts = [json.loads(line) for line in (folder / "facts.jsonl").read_text().splitlines()]
    return Captured(read_rows(folder), facts, meta)


def inside(inner: Row, outer: Row) -> bool:
    """Whether `inner` lies within `outer`."""
    return outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns
