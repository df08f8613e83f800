"""What the collectors cost the training job: CPU time a step, as a ratio to the same job without them.

    python benchmarks/overhead.py              # half an hour; writes benchmarks/results/overhead.json

One process trains the example's model, DistributedDataParallel over a gloo group of one included, and switches
the collectors on and off between blocks of steps. The arms come in a random order within each round, so drift of the
host falls on all alike:

    off      no collectors                     off_again   the same: the A/A arm, what noise alone makes
    native   light level, native recorder      python      light level, Python recorder
    full     full level, native recorder       full_python full level, Python recorder
    torch_profiler   torch.profiler, CPU activities, a window of a block, its stop included

A step's CPU time is the process's (every thread). The ratio is the median over rounds of a block to those
without collectors in the same round; its interval is a bootstrap over rounds. Two-rank wall time cannot resolve 1 % on
a machine of two cores; CPU time in one process can.

A block is long (20 steps, after 5 that are not counted) because switching is itself a cost: installing or removing a
hook makes Python forget what it had specialized and leaves caches cold, a job pays that once, and blocks of 3 steps
showed it as 2 % of a small step where blocks of 20 showed nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
CAPTURES = {"native": ("1", "light"), "python": ("0", "light"), "full": ("1", "full"), "full_python": ("0", "full")}
"""Arm -> DSPROF_NATIVE and DSPROF_LEVEL."""
ARMS = ("off", "off_again", *CAPTURES, "torch_profiler")
WARM_STEPS = 5


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("train_gpt", HERE.parent / "examples" / "train_gpt.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_step(batch_size: int) -> Callable[[], None]:
    """One training step of the example, its DataLoader included."""
    import torch
    import torch.nn.functional as F
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    example = load_example()
    torch.manual_seed(0)
    model = DistributedDataParallel(example.GPT(256, 256, 48, 4, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(example.StandardLibrary(256), batch_size=batch_size, shuffle=True, drop_last=True)
    batches = iter(loader)

    def step() -> None:
        nonlocal batches
        try:
            inputs, targets = next(batches)
        except StopIteration:
            batches = iter(loader)
            inputs, targets = next(batches)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()

    return step


def cpu_of(step: Callable[[], None], steps: int) -> float:
    """CPU seconds of `steps` steps, after WARM_STEPS that are not counted, in every arm."""
    for _ in range(WARM_STEPS):
        step()
    before = time.process_time()
    for _ in range(steps):
        step()
    return time.process_time() - before


def run_block(arm: str, step: Callable[[], None], steps: int, run_folder: Path) -> float:
    """CPU seconds of `steps` steps under `arm`; opening and closing a capture is not counted, as it is once a run."""
    from dsprof.collectors import session

    if arm in CAPTURES:
        os.environ["DSPROF_NATIVE"], os.environ["DSPROF_LEVEL"] = CAPTURES[arm]
        os.environ["DSPROF_RUN"] = str(run_folder)
        capture = session.start()
        assert capture is not None
        assert capture.native == (CAPTURES[arm][0] == "1"), "the native helper is not built: run `dsprof run` once"
        spent = cpu_of(step, steps)
        session.stop()
        return spent
    if arm == "torch_profiler":
        from torch.profiler import ProfilerActivity, profile

        for _ in range(WARM_STEPS):
            step()
        before = time.process_time()
        with profile(activities=[ProfilerActivity.CPU]):
            for _ in range(steps):
                step()
        return time.process_time() - before
    return cpu_of(step, steps)


def ratio(cpu: dict[str, list[float]], arm: str) -> dict[str, float]:
    """Median over rounds of `arm` to the round's own blocks without collectors, with the 95 % interval of a bootstrap.

    The A/A arm is compared with the other arm without collectors; every other with the mean of both.
    """
    off = np.array(cpu["off"])
    if arm != "off_again" and "off_again" in cpu:
        off = (off + np.array(cpu["off_again"])) / 2
    paired = np.array(cpu[arm]) / off
    draw = np.random.default_rng(0).integers(0, len(paired), (10_000, len(paired)))
    low, high = np.percentile(np.median(paired[draw], axis=1), [2.5, 97.5])
    return {"ratio": round(float(np.median(paired)), 4), "low": round(float(low), 4), "high": round(float(high), 4)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=70, help="blocks of each arm")
    parser.add_argument("--block", type=int, default=20, help="steps counted a block")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--output", type=Path, default=HERE / "results" / "overhead.json")
    args = parser.parse_args()
    arms = args.arms.split(",")
    if "off" not in arms or set(arms) - set(ARMS):
        parser.error(f"--arms: a list out of {','.join(ARMS)}, off among them")

    os.environ.pop("DSPROF", None)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        dist.init_process_group("gloo", store=dist.FileStore(f"{scratch}/store", 1), rank=0, world_size=1)
        step = make_step(args.batch_size)
        for _ in range(10):
            step()
        order = random.Random(0)
        cpu: dict[str, list[float]] = {arm: [] for arm in arms}
        for number in range(args.rounds):
            for arm in order.sample(arms, len(arms)):
                cpu[arm].append(run_block(arm, step, args.block, Path(scratch) / f"{arm}{number}") / args.block)
            if sys.stderr.isatty():
                print(f"\rround {number + 1}/{args.rounds}", end="", file=sys.stderr)
        dist.destroy_process_group()

    result = {
        "what": "CPU time a step, ratio to the job without collectors",
        "step_ms": {arm: round(1e3 * statistics.fmean(values), 2) for arm, values in cpu.items()},
        "steps_per_arm": args.rounds * args.block,
        "ratios": {arm: ratio(cpu, arm) for arm in arms if arm != "off"},
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
        "blocks_cpu_ms": {arm: [round(1e3 * value, 3) for value in values] for arm, values in cpu.items()},
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    for arm, found in result["ratios"].items():
        print(f"{arm:15s} {found['ratio']:.4f} [{found['low']:.4f}, {found['high']:.4f}]")
    return 0


if __name__ == "__main__":
    sys.exit(main())
