"""What the recorder in Python costs a small DDP job, beside the native one: CPU time a step.

    python benchmarks/python_recorder.py              # some minutes; writes benchmarks/results/python_recorder.json

A GPT of four narrow blocks in buckets of 0.1 MiB: about as many communications and modules a step as a small job has,
and little to compute, so that what each costs is seen. In these arms, each in a process of its own that is captured
from the beginning, or never:

    off, off_again   nothing of dsprof (the A/A arm)       native, python   level light, by each recorder

They take their steps in turns, in a random order, so that a host's pace is much the same for all. Each round has new
processes; a round's ratio is the mean of its turns', without the lowest and highest fifth, the interval is by the
bootstrap over rounds. The collectors' own threads count, as they do in the process's CPU time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import interval
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from overhead_jobs import batches, example, ordinary
from torch.nn.parallel import DistributedDataParallel

from dsprof.atomic import write_atomically

ARMS: Final = {"off": None, "off_again": None, "native": "1", "python": "0"}
"""Arm -> DSPROF_NATIVE; None: there is no capture."""
FIRST_TURNS: Final = 15
"""Not counted."""
BLOCKS, WIDTH, SEQUENCES, BUCKET_MB = 4, 48, 1, 0.1


def take_turns(arm: str, folder: Path, link: Connection) -> None:
    """For each True on `link` a step, answered by its CPU time, s; for None what it was captured as."""
    torch.set_num_threads(1)
    native, capture = ARMS[arm], None
    if native is not None:
        from dsprof.collectors.capture import session

        os.environ.update(DSPROF_NATIVE=native, DSPROF_LEVEL="light", DSPROF_RUN=str(folder / arm))
        capture = session.start()
        assert isinstance(capture, session.Session)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{arm}.store", 1), rank=0, world_size=1)
    torch.manual_seed(0)
    model = DistributedDataParallel(example.GPT(256, 256, WIDTH, 4, BLOCKS), bucket_cap_mb=BUCKET_MB)
    step = ordinary(model, batches(SEQUENCES, 0))
    records = steps = 0
    for counts in iter(link.recv, None):
        if counts and capture is not None and not steps:
            records = capture.recorder.records
        steps += counts
        began = time.process_time()
        step()
        link.send(time.process_time() - began)
    if capture is not None:
        recorder = capture.recorder
        assert (recorder.dropped, recorder.errors) == (0, 0), recorder.failures()
        records = recorder.records - records
    link.send({"records": records / steps, "modules": sum(1 for _ in model.modules())})
    os._exit(0)  # gloo's threads may abort an orderly end, after all is told


def run_round(seed: int, turns: int) -> dict[str, Any]:
    """CPU time a step of each arm [turns], us, and what it was captured as."""
    forks = multiprocessing.get_context("fork")
    order = random.Random(seed)
    links = {}
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for arm in ARMS:
            links[arm], theirs = forks.Pipe()
            children.append(forks.Process(target=take_turns, args=(arm, Path(folder), theirs), daemon=True))
            children[-1].start()
            theirs.close()
        cpu_us: dict[str, list[int]] = {arm: [] for arm in ARMS}
        for turn in range(-FIRST_TURNS, turns):
            for arm in order.sample(list(ARMS), len(ARMS)):
                links[arm].send(turn >= 0)
                taken = links[arm].recv()
                if turn >= 0:
                    cpu_us[arm].append(round(1e6 * taken))
        said = {}
        for arm in ARMS:
            links[arm].send(None)
            said[arm] = links[arm].recv()
        for child in children:
            child.join()
    return {"cpu_us": cpu_us, "captured": said}


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each arm the ratio to those without a capture, and what it adds."""

    def steps(one: dict[str, Any], arm: str) -> NDArray[np.float64]:
        return np.array(one["cpu_us"][arm], np.float64)

    off = float(np.mean([interval.trimmed(steps(one, "off")) for one in rounds]))
    found: dict[str, Any] = {"rounds": len(rounds), "step_cpu_ms": round(off / 1e3, 2)}
    for arm in ("off_again", "native", "python"):
        paired = []
        for one in rounds:
            plain = np.log(steps(one, "off"))
            if arm != "off_again":
                plain = (plain + np.log(steps(one, "off_again"))) / 2
            paired.append(interval.trimmed(np.log(steps(one, arm)) - plain))
        ratio = interval.ratio(np.array(paired))
        found[arm] = {
            **{name: round(value, 4) for name, value in ratio.items()},
            "added_us_a_step": round(off * (ratio["ratio"] - 1)),
            "records_a_step": round(float(np.mean([one["captured"][arm]["records"] for one in rounds])), 1),
        }
    found["modules"] = rounds[0]["captured"]["off"]["modules"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--turns", type=int, default=120, help="steps counted of each arm a round")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "python_recorder.json")
    args = parser.parse_args()
    from dsprof.collectors import native

    if native.load_or_build(wait=True, explain=print) is None:
        sys.exit("the native helper could not be built")
    rounds = []
    for seed in range(args.rounds):
        rounds.append(run_round(seed, args.turns))
        print(json.dumps(summary(rounds)), flush=True)
    of = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    what = (
        "CPU time a step of a small DDP job, as a ratio to the same job without a capture: mean over rounds without "
        "the lowest and highest fifth, 95 % interval by the bootstrap"
    )
    write_atomically(args.output, json.dumps({"what": what, "of": of, **summary(rounds), "of_rounds": rounds}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
