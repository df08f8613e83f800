"""What `overhead.py` makes of its rounds, and the file that they are in.

A round of turns has for each arm the CPU time and the wall time of its steps, which arms took in turns, in us. Its
ratio is that of the steps of one turn, its mean that of the three fifths of the turns in the middle. A round of blocks
has for each arm and rank the sums of a block. Over rounds, too, the lowest and the highest fifth do not count; the 95 %
interval is by the bootstrap over rounds, since the steps of one process have its layout of memory in common.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path
from typing import Any, Final

import interval
import numpy as np
from numpy.typing import NDArray

from dsprof.atomic import write_atomically
from dsprof.ondisk import RECORD_BYTES

HERE: Final = Path(__file__).parent
RESOLVED: Final = 0.005
"""Half the width of the A/A arm's interval."""
FEWEST: Final = 10
"""Rounds: of fewer, the bootstrap's interval means little."""

Round = dict[str, Any]
"""`job`, and `turns`: for each arm its `cpu_us` and `wall_us` [turns] and the fields of
`overhead_turns.Captured`; or `steps` a block, and `blocks`: for each arm an `overhead_blocks.Block` a rank."""


class Result:
    """The rounds so far, in a file that is written anew after each."""

    def __init__(self, path: Path, anew: bool) -> None:
        """Raises SystemExit where the file has rounds of other code."""
        import torch

        self._path = path
        self._of = {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "collectors": _hash_of("collectors", "*.py", "*.[ch]pp"),
            "jobs": _hash_of("benchmarks", "overhead_blocks.py", "overhead_jobs.py", "overhead_turns.py"),
        }
        self.rounds: list[Round] = []
        if path.exists() and not anew:
            found = json.loads(path.read_bytes())
            if found.get("of") != self._of:
                raise SystemExit(f"{path} was measured of other code or on another machine: --anew, or --output")
            self.rounds = found["rounds"]

    def of(self, job: str, kind: str) -> list[Round]:
        """The rounds of `turns`, or of `blocks`."""
        return [one for one in self.rounds if one["job"] == job and kind in one]

    def add(self, measured: Round) -> None:
        self.rounds.append(measured)
        jobs = dict.fromkeys(one["job"] for one in self.rounds)
        summary = {
            "what": "cost a step as a ratio to the same job without collectors: mean over rounds without the lowest "
            "and highest fifth, 95 % interval by the bootstrap, mean of all rounds; CPU time of all ranks, wall time",
            "of": self._of,
            "jobs": {job: self.summary(job) for job in jobs},
        }
        rounds = ",\n".join(json.dumps(one) for one in self.rounds)
        write_atomically(self._path, f'{json.dumps(summary, indent=1)[:-2]},\n "rounds": [\n{rounds}\n ]\n}}\n')

    def resolved(self, job: str) -> bool:
        """Whether it is known what noise alone makes."""
        rounds = self.of(job, "turns")
        if len(rounds) < FEWEST:
            return False
        found = ratio(rounds, "off_again", "cpu")
        return (found["high"] - found["low"]) / 2 <= RESOLVED

    def summary(self, job: str) -> dict[str, Any]:
        turns, blocks = self.of(job, "turns"), self.of(job, "blocks")
        found: dict[str, Any] = {"rounds": len(turns), "rounds_of_blocks": len(blocks), "resolved": self.resolved(job)}
        found["step_ms"] = {
            what: round(float(np.mean([steps_us(one, "off", what).mean() for one in turns or blocks])) / 1e3, 1)
            for what in ("cpu", "wall")
        }
        measured = [(arm, rounds) for rounds in (turns, blocks) for arm in _arms(rounds)]
        for what in ("cpu", "wall"):
            found[what] = {
                arm: ratio(rounds, arm, what) for arm, rounds in measured if (arm != "off_again" or rounds is turns)
            }
        if turns and blocks:
            light = found["cpu"]["light"]
            found["times_what_light_costs"] = {
                arm: _times(cpu, light) for arm, cpu in found["cpu"].items() if arm.startswith("torch_profiler")
            }
        found["captured"] = {arm: _captured(turns, arm) for arm in _arms(turns) if arm != "off_again"}
        found["page_faults_a_step"] = {
            arm: round(float(np.mean([one["turns"][arm]["faults"] for one in turns])), 1)
            for arm in (turns[0]["turns"] if turns else ())
        }
        return found


def steps_us(one: Round, arm: str, what: str) -> NDArray[np.float64]:
    """CPU or wall time a step, us: of each turn, or of the block; mean of the ranks."""
    if "turns" in one:
        return np.array(one["turns"][arm][f"{what}_us"], np.float64)
    ranks = [rank[f"{what}_s"] for rank in one["blocks"][arm]]
    return np.array([1e6 * float(np.mean(ranks)) / one["steps"]])


def ratio(rounds: list[Round], arm: str, what: str) -> dict[str, float]:
    """The A/A arm is compared with the other arm without collectors; every other with both."""
    paired = []
    for one in rounds:
        off = np.log(steps_us(one, "off", what))
        if arm != "off_again":
            off = (off + np.log(steps_us(one, "off_again", what))) / 2
        paired.append(np.log(steps_us(one, arm, what)) - off)
    found = interval.ratio(np.array([interval.trimmed(steps) for steps in paired]))
    found["mean"] = float(np.exp(np.mean(np.concatenate(paired))))
    return {name: round(value, 4) for name, value in found.items()}


def _arms(rounds: list[Round]) -> list[str]:
    """All but `off`."""
    return [arm for arm in (rounds[0].get("turns") or rounds[0]["blocks"]) if arm != "off"] if rounds else []


def _times(theirs: dict[str, float], light: dict[str, float]) -> dict[str, float | None]:
    """How many times as much the one costs as the other. `at_least`: its lower end to light's upper end. None: light
    was not found to cost anything."""
    return {
        "ratio": _share(theirs["ratio"] - 1, light["ratio"] - 1),
        "at_least": _share(theirs["low"] - 1, light["high"] - 1),
    }


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 1) if whole > 0 else None


def _captured(turns: list[Round], arm: str) -> dict[str, float]:
    """What a rank wrote a step, and what was not counted above."""

    def median(what: str) -> float:
        return float(np.median([one["turns"][arm][what] for one in turns]))

    return {
        "records_a_rank_a_step": round(median("records"), 1),
        "bytes_a_rank_a_step": round(median("records") * RECORD_BYTES),
        "opening_cpu_ms": round(median("opening_ms"), 2),
        "closing_cpu_ms": round(median("closing_ms"), 2),
        "side_threads_cpu_ms_a_second": round(median("beside_ms_a_second"), 3),
    }


def _hash_of(folder: str, *patterns: str) -> str:
    """Of these files, so that rounds of different code do not mix."""
    found = hashlib.sha256()
    for path in sorted(path for pattern in patterns for path in (HERE.parent / folder).rglob(pattern)):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]
