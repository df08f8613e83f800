"""Is what is said of a device true? Pairs of a job with a fault and its mended twin, on a device that sleeps.

    python benchmarks/sleeping_pairs.py               # all; writes benchmarks/results/sleeping_pairs.json
    python benchmarks/sleeping_pairs.py --only NAME

Real processes, of which each has a device of its own (tests/sleeping_device). Of each pair it is asked whether the
first finding is the right one, by how much the predicted saving misses what the mended twin takes less, and whether its
interval holds that. Results are written after each pair, and a run that was broken off goes on where it was.

Pairs were written down, and committed, before any of them ran: first those of `FIRST_TWELVE`, and when the product had
been mended by what they showed those of `SECOND_TWELVE`. After the first four, on a machine with forty threads that
wanted its two cores, all lengths were made four times as long: the twins' own steps had differed by half, since their
hosts, which compute in earnest, were not ahead of the device any more. `load` is how many threads wanted a core. A job
that the machine stopped for a while is run again, whatever was said of it (`stopped`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))

from sleeping_jobs import Ran, SleepingRanks, start  # noqa: E402

from dsprof.analyzer import analyze  # noqa: E402
from dsprof.atomic import write_atomically  # noqa: E402

RESULTS: Final = HERE / "results" / "sleeping_pairs.json"
JOB: Final = "faults.py"
FIRST: Final = 4
"""Steps before are warm-up."""


STOPPED: Final = 1.4
"""A step that takes so many times as long as the median one."""
ATTEMPTS: Final = 4
"""So often a job is run, until the machine does not stop it."""


@dataclass(frozen=True)
class Pair:
    """fault, mended: arguments of both jobs; ranks: how many
    first: code of the finding that is to come first; empty: none is to be above info
    where: ranks that it is to name; None: whichever
    together: what is predicted is what mending this finding and the one that hides it saves
    unjudged: code that cannot be judged at this depth, and is to say which command would tell
    other: of a job that has another fault, too, which was seen when it ran and gains more when it is mended: its code,
        and the arguments with what its finding says to do. Such a pair is not right, as another finding was to come
        first; what mending that one saves is measured beside it
    """

    fault: tuple[str, ...]
    mended: tuple[str, ...]
    first: str
    ranks: int = 2
    where: tuple[int, ...] | None = None
    together: bool = False
    unjudged: str = ""
    other: tuple[str, tuple[str, ...]] | None = None


EXPOSED: Final = ("--width=1024", "--bandwidth=0.1", "--latency-ms=0.4", "--backward-ms=64")
SMALL: Final = ("--blocks=24", "--width=256", "--forward-ms=3.2", "--backward-ms=6.4", "--latency-ms=9.6")
FIRST_TWELVE: Final = {
    "late device": Pair(("--slow-rank=2",), (), "rank.straggler", ranks=3, where=(2,)),
    "late host": Pair(("--late-rank=1", "--late-ms=480"), (), "rank.straggler", where=(1,)),
    "loader exposed": Pair(("--load-ms=480",), (), "data.stall"),
    "loader hidden": Pair(("--load-ms=60",), (), ""),
    ".item() each step": Pair(
        ("--item-every=1", "--load-ms=120"), ("--item-every=10", "--load-ms=120"), "compute.host-sync"
    ),
    "gc, the host waits for the device": Pair(("--gc-ms=240", "--item-every=1"), ("--item-every=1",), "pause.gc"),
    "gc, the host runs ahead": Pair(("--gc-ms=160",), (), ""),
    "collectives exposed": Pair((*EXPOSED, "--bucket-mb=100"), (*EXPOSED, "--bucket-mb=2"), "comm.large-bucket"),
    "small buckets": Pair((*SMALL, "--bucket-mb=0.1"), (*SMALL, "--bucket-mb=1"), "comm.small-messages"),
    "a late host and a slow device hide each other": Pair(
        ("--slow-rank=0", "--late-rank=1", "--late-ms=480"), (), "rank.straggler", together=True
    ),
    "launches too slow": Pair(("--launch-ms=120",), (), "", unjudged="compute.launch-bound"),
    "one rank loads late": Pair(("--late-rank=3", "--late-ms=400"), (), "rank.straggler", ranks=4, where=(3,)),
}
LARGE: Final = (
    "--shard", "--blocks=12", "--large-every=3", "--large-mb=3", "--bandwidth=0.06", "--forward-ms=16",
    "--backward-ms=32",
)  # fmt: skip
UNITS: Final = ("--shard", "--blocks=24", "--forward-ms=4", "--backward-ms=8", "--latency-ms=8")
SLOW_LINK: Final = (
    "--blocks=6", "--width=1024", "--bandwidth=0.2", "--latency-ms=0.4", "--forward-ms=15", "--backward-ms=30"
)  # fmt: skip
SMALLER: Final = ("--blocks=16", "--width=128", "--forward-ms=5", "--backward-ms=10", "--latency-ms=14")
EIGHT: Final = ("--blocks=8", "--forward-ms=10", "--backward-ms=20")
SECOND_TWELVE: Final = {
    "straggler in one tensor-parallel pair of four ranks": Pair(
        ("--share=2", "--slow-rank=1", "--slower=1.6"), ("--share=2",), "rank.straggler", ranks=4, where=(1,)
    ),
    "late host in one tensor-parallel pair of four ranks": Pair(
        ("--share=2", "--late-rank=2", "--late-ms=520"), ("--share=2",), "rank.straggler", ranks=4, where=(2,)
    ),
    "shards are gathered too late": Pair(
        LARGE, (*LARGE, "--ahead=2"), "comm.exposed", other=("comm.small-messages", (*LARGE, "--together=4"))
    ),
    "units of shards too small": Pair(UNITS, (*UNITS, "--together=4"), "comm.small-messages"),
    "gc, longer than the host is ahead": Pair(("--gc-ms=1800", "--gc-every=5"), (), "pause.gc"),
    "gc every other step, the host waits for the device": Pair(
        ("--gc-ms=500", "--gc-every=2", "--item-every=1"), ("--item-every=1",), "pause.gc"
    ),
    "collectives as hidden as they can be": Pair(("--latency-ms=30",), (), ""),
    "collectives exposed, over another link": Pair(
        (*SLOW_LINK, "--bucket-mb=100"), (*SLOW_LINK, "--bucket-mb=4"), "comm.large-bucket"
    ),
    "a loader hides a slow device": Pair(("--load-ms=560", "--slow-rank=1"), ("--slow-rank=1",), "data.stall"),
    "late host hidden": Pair(("--late-rank=1", "--late-ms=120"), (), ""),
    "smaller buckets": Pair((*SMALLER, "--bucket-mb=0.05"), (*SMALLER, "--bucket-mb=0.5"), "comm.small-messages"),
    "launches of eight blocks too slow": Pair((*EIGHT, "--launch-ms=60"), EIGHT, "", unjudged="compute.launch-bound"),
}
CHOSEN: Final = {**FIRST_TWELVE, **SECOND_TWELVE}


def step_ms(ran: Ran) -> float:
    """Mean step after warm-up, of what the device did: from one update to the next."""
    updates = [ran.did("update", rank)["end_ns"].to_numpy(np.int64)[FIRST:] for rank in range(len(ran.told))]
    return float(np.mean([(at[-1] - at[0]) / (len(at) - 1) for at in updates])) / 1e6


def stopped(ran: Ran) -> bool:
    """Whether the machine stopped a rank for so long that a step of the device tells: all steps of a job without
    collections of garbage are alike."""
    for rank in range(len(ran.told)):
        took = np.diff(ran.did("update", rank)["end_ns"].to_numpy(np.int64)[FIRST:])
        if took.max() > STOPPED * np.median(took):
            return True
    return False


def ran(ranks: SleepingRanks, folder: Path, arguments: tuple[str, ...], count: int) -> Ran:
    """The job; not run again where it was kept, unless the machine stopped it."""
    told = [folder / f"told.{rank}" for rank in range(count)]
    alike = not any(argument.startswith("--gc-ms") for argument in arguments)
    for attempt in range(ATTEMPTS):
        if all(path.exists() for path in told):
            found = Ran(folder, [json.loads(path.read_text()) for path in told])
        else:
            found = ranks.run(folder, JOB, *arguments, ranks=count, without="nvml")
        if not (alike and stopped(found)) or attempt == ATTEMPTS - 1:
            break
        shutil.rmtree(folder)
    return found


def judged(ranks: SleepingRanks, pair: Pair, folder: Path) -> dict[str, Any]:
    """What was said of the fault, and what mending it saved."""
    faulty, mended = (ran(ranks, folder / which, getattr(pair, which), pair.ranks) for which in ("fault", "mended"))
    before, after = step_ms(faulty), step_ms(mended)
    analysis = analyze(faulty.trace)
    said = next((finding for finding in analysis.findings if finding.is_problem), None)
    found: dict[str, Any] = {
        "fault_ms": round(before, 3), "mended_ms": round(after, 3), "saved_ms": round(before - after, 3),
        "verdict": analysis.verdict.status, "headline": analysis.verdict.headline, "load": round(os.getloadavg()[0], 1),
        "said": None if said is None else said.code,
        "right": (said.code if said is not None else "") == pair.first,
        "not_judged": analysis.not_judged,
    }  # fmt: skip
    if said is not None:
        gain = said.together.gain if pair.together and said.together is not None else said.gain
        found |= {
            "predicted_ms": round(gain.ms, 3), "low_ms": round(gain.low, 3), "high_ms": round(gain.high, 3),
            "error_percent": round(100 * abs(gain.ms - (before - after)) / before, 2),
            "holds": bool(gain.low <= before - after <= gain.high), "ranks": said.where.ranks,
        }  # fmt: skip
        found["right"] &= pair.where is None or said.where.ranks == pair.where
    if pair.other is not None and said is not None and said.code == pair.other[0]:
        other_ms = before - step_ms(ran(ranks, folder / "other", pair.other[1], pair.ranks))
        found["other"] = {
            "mended": " ".join(pair.other[1]), "saved_ms": round(other_ms, 3),
            "error_percent": round(100 * abs(said.gain.ms - other_ms) / before, 2),
            "holds": bool(said.gain.low <= other_ms <= said.gain.high),
        }  # fmt: skip
    if pair.unjudged:
        found["right"] &= "--deep" in analysis.not_judged.get(pair.unjudged, "")
    return found


def _as_good(of: dict[str, Any]) -> bool:
    """Whether the first finding is the chosen one, or one that saves more when it is mended as it says."""
    return bool(of["right"] or ("other" in of and of["other"]["saved_ms"] >= of["saved_ms"] and of["other"]["holds"]))


def summary(pairs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    priced = [of for name, of in pairs.items() if "holds" in of and CHOSEN[name].first]
    return {
        "pairs": len(pairs),
        "right": sum(of["right"] for of in pairs.values()),
        "first finding saves as much as the chosen one or more": sum(_as_good(of) for of in pairs.values()),
        "holds": f"{sum(of['holds'] for of in priced)} of {len(priced)}",
        "median_error_percent_of_step": float(np.median([of["error_percent"] for of in priced])) if priced else None,
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--only", help="a pair")
    arguments.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "dsprof-sleeping-device")
    arguments.add_argument("--keep", type=Path, help="a folder for what ran, of which nothing is run again")
    options = arguments.parse_args()
    done: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text())["each"] if RESULTS.exists() else {}
    options.cache.mkdir(parents=True, exist_ok=True)
    ranks = start(options.cache)
    try:
        for name, pair in CHOSEN.items():
            if options.only not in (None, name) or (name in done and options.only is None):
                continue
            with tempfile.TemporaryDirectory() as folder:
                place = options.keep / name.replace(" ", "-") if options.keep else Path(folder)
                done[name] = {"fault": " ".join(pair.fault), **judged(ranks, pair, place)}
            print(name, json.dumps({key: of for key, of in done[name].items() if key != "not_judged"}), flush=True)
            each = {one: done[one] for one in CHOSEN if one in done}
            result = {"torch": torch.__version__, "cpus": os.cpu_count(), "summary": summary(each), "each": each}
            write_atomically(RESULTS, json.dumps(result, indent=1) + "\n")
    finally:
        ranks.close()


if __name__ == "__main__":
    main()
