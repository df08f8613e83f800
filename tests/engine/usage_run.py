"""Programs of the random tester, from their text to what is wrong with them: one, or thousands by seed."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import usage_engine
import usage_machines
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from pairwise import every_pair, pairs
from ranks import RankFailed, Ranks
from usage_machines import PipelineUsage, Usage, WholeUsage
from usage_plain import judge
from usage_program import PIPELINE, WHOLE, Program, parsed, shrunk

BATCH: Final = 20
"""Programs that are drawn from one seed."""
PATIENCE_S: Final = 60.0
"""After which a rank that does not answer hangs. Where ranks of a pipeline have lost each other, several waits of five
seconds end before that."""
HERE: Final = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Tried:
    """What came of a program."""

    fault: str | None
    """What is wrong, in words; None if all of it ended right or refused by name."""
    refused: tuple[str, ...] = ()
    """The actions that were refused, each by its name."""


def tried(program: Program, ranks: Ranks, within: Path, put_back: str = "") -> Tried:
    """Run `program` on `ranks`, with a fault `put_back` perhaps, and judge it. Files are `within`, and gone after.

    A rank that hangs, that died, or that cannot make its engine is a fault, too.
    """
    folder = Path(tempfile.mkdtemp(dir=within))
    try:
        outcomes = ranks.run(program.configuration.world_size, usage_engine.run, program, str(folder), put_back)
        done = zip(program.actions, outcomes[0], strict=False)
        return Tried(judge(program, outcomes), tuple(action.name for action, each in done if each.kind == "refused"))
    except RankFailed as error:
        return Tried("\n".join([str(error), *usage_engine.progress(folder)]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def smaller(program: Program, fault: str, ranks: Ranks, within: Path) -> Program:
    """`program` without the actions that the same `fault` does without, in the first words of it."""

    def same(shorter: Program) -> bool:
        found = tried(shorter, ranks, within).fault
        return found is not None and _kind(found) == _kind(fault)

    return shrunk(program, same)


def _kind(fault: str) -> str:
    """A fault without its line and its numbers."""
    words = fault.splitlines()[0].split(": ")[1:] or [fault.splitlines()[0]]
    return "".join(letter for letter in ": ".join(words) if not letter.isdigit())[:60]


class Drawing:
    """Programs drawn by seed, BATCH from each, two seeds of three for models that run as one. What came of them is
    written to `output` after each, and a drawing of the same code goes on from there."""

    def __init__(self, output: Path, ranks: Ranks, within: Path, say: Callable[[str], None] = print) -> None:
        self.output = output
        self._ranks, self._within, self._say = ranks, within, say
        self._of = {"code": _fingerprint(), "torch": torch.__version__, "python": platform.python_version()}
        self.batches: list[dict[str, Any]] = []
        if output.exists():
            before = json.loads(output.read_text())
            if before["of"] == self._of | {"cores": before["of"]["cores"]}:
                self.batches = before["batches"]

    @property
    def programs(self) -> int:
        return sum(batch["programs"] for batch in self.batches)

    @property
    def faults(self) -> list[dict[str, Any]]:
        return [fault for batch in self.batches for fault in batch["faults"]]

    def draw(self, programs: int, until: float) -> None:
        """Run so many of them in all, or those that begin before `until` (`time.monotonic`)."""
        number = max(0, len(self.batches) - 1)  # the last one may not be complete
        while self.programs < programs and time.monotonic() < until:
            self._draw_batch(number, min(BATCH, programs - BATCH * number), until)
            number += 1

    def _draw_batch(self, number: int, size: int, until: float) -> None:
        kind: type[Usage] = PipelineUsage if number % 3 == 2 else WholeUsage
        if number == len(self.batches):
            begun: dict[str, Any] = {"seed": number, "machine": kind.__name__, "programs": 0, "actions": 0}
            self.batches.append(begun | {"refused": {}, "pairs": [], "faults": [], "seconds": 0.0, "digests": []})
        batch, drawn = self.batches[number], 0

        def run(program: Program) -> None:
            nonlocal drawn
            drawn += 1
            if drawn > batch["programs"] and drawn <= size and time.monotonic() < until:
                self._run(program, batch)

        usage_machines.RUN = run
        machine = type(kind.__name__, (kind,), {})
        run_state_machine_as_test(
            seed(number)(machine),
            settings=settings(
                max_examples=size, phases=[Phase.generate], database=None, deadline=None, stateful_step_count=12,
                suppress_health_check=list(HealthCheck),
            ),
        )  # fmt: skip
        self._say(
            f"seed {number}: {batch['programs']} programs of {batch['machine']}, {len(batch['faults'])} with a fault, "
            f"{batch['seconds']:.0f} s"
        )

    def _run(self, program: Program, batch: dict[str, Any]) -> None:
        began = time.monotonic()
        came = tried(program, self._ranks, self._within)
        batch["programs"] += 1
        batch["actions"] += len(program.actions)
        batch["refused"] = dict(Counter(batch["refused"]) + Counter(came.refused))
        batch["digests"].append(hashlib.sha256(str(program).encode()).hexdigest()[:8])
        if came.fault is not None:
            hangs = ": nothing for " in came.fault  # each try of a shorter one would take as long
            small = program if hangs else smaller(program, came.fault, self._ranks, self._within)
            self._say(f"seed {batch['seed']}: {came.fault}\n{small}\n")
            batch["faults"].append({
                "seed": batch["seed"], "fault": came.fault, "program": str(small), "drawn": str(program)
            })  # fmt: skip
        batch["pairs"] = sorted({*batch["pairs"], *(f"{one}&{other}" for one, other in pairs(program.configuration))})
        batch["seconds"] += time.monotonic() - began
        self._write()

    def _write(self) -> None:
        refused: Counter[str] = Counter()
        for batch in self.batches:
            refused.update(batch["refused"])
        covered = {pair for batch in self.batches for pair in batch["pairs"]}
        wanted = {f"{one}&{other}" for axes in (WHOLE, PIPELINE) for one, other in every_pair(list(axes.values()))}
        digests = [digest for batch in self.batches for digest in batch["digests"]]
        result = {
            "what": "what scripts do between two steps, at random, against plain torch in one process, bit for bit",
            "of": self._of | {"cores": os.cpu_count()},
            "programs": self.programs,
            "distinct": len(set(digests)),
            "actions": sum(batch["actions"] for batch in self.batches),
            "actions_refused_by_name": dict(refused.most_common()),
            "programs_with_a_fault": len(self.faults),
            "pairs_of_settings": f"{len(covered & wanted)} of {len(wanted)}",
            "minutes": round(sum(batch["seconds"] for batch in self.batches) / 60, 1),
            "batches": self.batches,
        }
        fresh = self.output.with_name(self.output.name + ".new")
        fresh.write_text(json.dumps(result) + "\n")
        fresh.replace(self.output)


def _fingerprint() -> str:
    """Of the engine and the tester: what was drawn before either was changed does not count."""
    digest = hashlib.sha256()
    for file in (*sorted((HERE.parent.parent / "engine").rglob("*.py")), *sorted(HERE.glob("usage_*.py"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def read(file: Path) -> Iterator[Program]:
    """The programs in a file, with an empty line between two."""
    return (parsed(text) for text in file.read_text().split("\n\n") if text.strip())
