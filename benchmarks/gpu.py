"""The engine on one GPU: speed, memory, and a model that does not fit.

    python benchmarks/gpu.py                      # some ten minutes; writes benchmarks/results/gpu-<name>.json
    python benchmarks/gpu.py --tiny --device cpu  # the same at toy size, to try the script where there is no GPU

`speed`: a GPT of about a billion parameters trains in bf16 with fp32 masters, fused AdamW and gradients clipped to 1.0,
on random tokens. For each ZeRO stage, arms take turns in one process, in a random order each round:

    torch       torch alone, the same recipe by hand       engine      dsprof's engine, nobody listening
    again       the same once more: the A/A arm            hooks       a subscriber listens
    profiler    under dsprof's collectors

Figures are medians over rounds; ratios are to torch's block in the same round, intervals those of a bootstrap over
rounds. A block is timed from an idle device to an idle device. MFU is (6 N + 12 layers width length) operations a token
(Chowdhery et al. 2022, appendix B; N without the input embeddings) to the card's dense bf16 peak. An arm's memory is
what its states hold, and what a block adds at most.

`offload`: the card is capped to ten bytes a parameter, and the states alone need sixteen. Without offloading that ends
in torch.OutOfMemoryError; with the optimizer's states, and with the parameters too, on the host, it trains, to the
losses of the card without a cap.

`lane`: one rank has nobody to talk to, so the stream beside the computation is tried by itself: copies both ways
between the card and pinned memory, in order, waited for by the stream, and timed. And weights after some steps against
torch's. Two ranks cannot share a card under NCCL: collectives between cards are not in here.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_arms import GPT, LARGE, TINY, Device, Size, Step, configuration, model, plain, start_engine, step_of, tokens

HERE = Path(__file__).parent
CAP = 10
"""Bytes a parameter that the card is capped to."""
STATES = 16
"""Bytes a parameter of weights and gradients in bf16, masters and Adam's two moments in fp32."""
PEAKS = {"H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}
"""Part of a device's name -> dense bf16 operations a second, of NVIDIA's data sheets."""
ARMS = ("torch", "engine", "again", "hooks", "profiler")


# --- speed


class Listener:
    """Somebody listens, and does next to nothing."""

    def __init__(self) -> None:
        self.spans = 0

    def begin(self, span: Any) -> None: ...

    def end(self, span: Any) -> None:
        self.spans += 1


@contextmanager
def circumstances(arm: str, scratch: Path) -> Any:
    """What is on while `arm` trains."""
    if arm == "hooks":
        from dsprof.engine.hooks import subscribe

        listener = Listener()
        stop = subscribe(listener)
        try:
            yield
        finally:
            stop()
        assert listener.spans, "nothing was told"
    elif arm == "profiler":
        from dsprof.collectors.capture import session

        os.environ["DSPROF_RUN"] = str(scratch)
        capture = session.start()
        assert capture is not None, "the collectors did not start: is DSPROF=0 set?"
        try:
            yield
        finally:
            session.stop()
    else:
        yield


def speed(stage: int, size: Size, device: Device, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each block, by arm, and bytes."""
    arms: dict[str, Step] = {}
    states: dict[str, int] = {}
    for arm in ("torch", "engine"):
        before = device.used()
        module = model(size, device.torch, torch.bfloat16)
        arms[arm] = (
            plain(module)
            if arm == "torch"
            else step_of(start_engine(module, configuration(stage, size.batch, torch.bfloat16)))
        )
        arms[arm](tokens(size, device, 0, 1)[0]).item()  # makes the optimizer's states
        gc.collect()
        states[arm] = device.used() - before
    parameters = sum(p.numel() for p in module.parameters())
    inputs = module.tokens.weight.numel() + module.positions.numel()
    steps = {arm: arms["torch" if arm == "torch" else "engine"] for arm in ARMS}
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    peaks = dict.fromkeys(ARMS, 0)
    losses = {}
    order = random.Random(0)
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(args.rounds + 1):
            data = tokens(size, device, number, args.block + 1)
            for arm in order.sample(ARMS, len(ARMS)):
                with circumstances(arm, Path(scratch) / f"{arm}{number}"):
                    steps[arm](data[0])  # caches are the last arm's
                    device.wait()
                    device.reset_peak()
                    at_rest, began = device.used(), time.perf_counter()
                    for ids in data[1:]:
                        loss = steps[arm](ids)
                    device.wait()
                    spent = time.perf_counter() - began
                peaks[arm] = max(peaks[arm], device.peak() - at_rest)
                losses[arm] = loss.item()
                if number:  # the first round allocates
                    seconds[arm].append(spent / args.block)
    return {
        "parameters": parameters,
        "operations_a_token": 6 * (parameters - inputs) + 12 * size.layers * size.width * size.length,
        "seconds": seconds,
        "bytes": {arm: states["torch" if arm == "torch" else "engine"] + peaks[arm] for arm in ARMS},
        "last_loss": losses,
    }


def bootstrap(values: Any) -> dict[str, float]:
    """Median over rounds, with the 95 % interval of a bootstrap over them."""
    draw = np.random.default_rng(0).integers(0, len(values), (10_000, len(values)))
    low, high = np.percentile(np.median(np.asarray(values)[draw], axis=1), [2.5, 97.5])
    return {"median": float(np.median(values)), "low": float(low), "high": float(high)}


def summarize(found: dict[str, Any], size: Size, device: Device, peak: float | None) -> dict[str, Any]:
    """Of one stage: figures by arm."""
    rows = {}
    for arm, seconds in found["seconds"].items():
        rate = size.batch * size.length / statistics.median(seconds)
        base = np.array(found["seconds"]["torch"])
        rows[arm] = {
            "tokens_a_second": round(rate, 1),
            "mfu": None if peak is None else round(rate * found["operations_a_token"] / peak, 4),
            "seconds_a_step_to_torch": {k: round(v, 4) for k, v in bootstrap(np.array(seconds) / base).items()},
            "peak_gb": round(found["bytes"][arm] / 1e9, 2) if device.is_cuda else None,
            "last_loss": round(found["last_loss"][arm], 5),
        }
    return rows


# --- a model that does not fit

OFFLOADING: dict[str, dict[str, Any]] = {
    "fits": {"stage": 2},
    "capped": {"stage": 2},
    "optimizer on the host": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}},
    "parameters on the host too": {
        "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
    },
}  # fmt: skip


def offload(arm: str, size: Size, device: Device, args: argparse.Namespace) -> dict[str, Any]:
    """Some steps of the model, on one short sequence at a time, with a cap on the card in all arms but the first."""
    size = Size(**{**asdict(size), "batch": 1, "length": max(16, size.length // 4)})
    with torch.device("meta"):
        parameters = sum(p.numel() for p in GPT(size).parameters())
    cap = CAP * parameters if device.is_cuda and arm != "fits" else None
    if cap is not None and device.total is not None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap / device.total), device.torch)
    zero = {"reduce_bucket_size": 5e7, **OFFLOADING[arm]}
    result: dict[str, Any] = {"cap_gb": None if cap is None else round(cap / 1e9, 2)}
    losses: list[float] = []
    try:
        module = model(size, device.torch, torch.bfloat16)
        step = step_of(start_engine(module, configuration(zero.pop("stage"), 1, torch.bfloat16, **zero)))
        batches = tokens(size, device, 1, args.offload_steps)
        for ids in batches:
            began = time.perf_counter()
            losses.append(step(ids).item())
            device.wait()
            result["last_step_seconds"] = round(time.perf_counter() - began, 4)
    except torch.OutOfMemoryError:
        return {**result, "trains": False, "steps": len(losses)}
    gigabytes = round(device.peak() / 1e9, 2) if device.is_cuda else None
    return {**result, "trains": True, "losses": losses, "peak_gb": gigabytes, "states_gb": STATES * parameters / 1e9}


# --- the lane, and weights


def lane(device: Device) -> dict[str, Any]:
    """Copies to pinned memory and back on a lane, in order, and what was told of them."""
    from dsprof.engine.comm.lane import open_lane
    from dsprof.engine.hooks import Hooks

    hooks, told = Hooks(), []

    class Keep(Listener):
        def end(self, span: Any) -> None:
            told.append(span)

    stop = hooks.subscribe(Keep())
    beside = open_lane("smoke", device.torch, hooks)
    here = torch.zeros(1 << 22, device=device.torch)
    host = torch.empty(1 << 22, pin_memory=device.is_cuda)
    back = torch.empty_like(here)
    right = 0
    for number in range(8):
        here.fill_(number)  # in the computation's stream: the lane has to wait for it
        out = beside.submit(lambda: host.copy_(here, non_blocking=True), "out", bytes=host.nbytes)
        again = beside.submit(lambda: back.copy_(host, non_blocking=True), "back", bytes=host.nbytes)
        out.wait()
        again.wait()
        right += bool((back == number).all())  # in the computation's stream: it has to wait for the lane
    device.wait()
    beside.poll()
    finished = out.done and again.done
    beside.close()
    stop()
    copies = [span for span in told if span.kind == "comm"]
    ordered = all(before.end_ns <= after.start_ns + 1000 for before, after in pairwise(copies))  # to a microsecond
    best = max((span.bytes / span.dur_ns for span in copies if span.dur_ns > 0), default=0.0)
    return {
        "copies": len(copies),
        "right": right,
        "done": finished,
        "in_order": ordered,
        "best_gb_a_second": round(best, 2),
    }


def weights(stage: int, device: Device) -> float:
    """The greatest difference to torch's own weights after five steps in fp32."""
    ours, theirs = (model(TINY, device.torch, torch.float32) for _ in range(2))
    engine = start_engine(ours, configuration(stage, TINY.batch, torch.float32))
    step, reference = step_of(engine), plain(theirs)
    for ids in tokens(TINY, device, 3, 5):
        step(ids)
        reference(ids)
    engine.destroy()  # the model has its weights whole again
    return max((a - b).abs().max().item() for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


# --- all of it


def tasks(device: Device, args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    size: Size = TINY if args.tiny else Size(**{**asdict(LARGE), "layers": args.layers, "batch": args.batch})
    arms = [arm for arm in OFFLOADING if device.is_cuda or arm != "capped"]
    return {
        **{f"speed {n}": lambda n=n: speed(n, size, device, args) for n in range(4)},  # type: ignore[misc]
        **{f"offload {arm}": lambda arm=arm: offload(arm, size, device, args) for arm in arms},  # type: ignore[misc]
        "lane": lambda: lane(device),
        "weights": lambda: {f"stage {n}": weights(n, device) for n in range(4)},
    }


def measured(name: str, device: Device, args: argparse.Namespace) -> Any:
    """A task's result; on a GPU in a process of its own, whose memory is its own."""
    print(name, file=sys.stderr)
    if not device.is_cuda:
        return tasks(device, args)[name]()
    command = [sys.executable, __file__, *sys.argv[1:], "--child", name]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1800)
    if child.returncode:
        return {"failed": child.returncode}
    return json.loads(child.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a toy model")
    parser.add_argument("--layers", type=int, default=LARGE.layers, help="fewer, if the card is smaller")
    parser.add_argument("--batch", type=int, default=LARGE.batch, help="sequences a step")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--block", type=int, default=4, help="steps counted a block")
    parser.add_argument("--offload-steps", type=int, default=4)
    parser.add_argument("--peak", type=float, help="dense bf16 operations a second, if the card is not known here")
    parser.add_argument("--output", type=Path, help="benchmarks/results/gpu-<name>.json")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here; to try the script without one write --tiny --device cpu")
    if args.device == "cpu" and torch.cuda.is_available():
        parser.error("where there is a GPU the engine trains on it: write CUDA_VISIBLE_DEVICES= before the command")
    if args.rounds < 1 or args.block < 1 or args.offload_steps < 1:
        parser.error("--rounds, --block and --offload-steps are at least 1")
    os.environ.pop("DSPROF", None)
    device = Device(args.device)
    if args.child:
        print(json.dumps(tasks(device, args)[args.child]()), flush=True)
        return 0
    name = device.name
    peak = args.peak or next((flops for part, flops in PEAKS.items() if part in name), None)
    if peak is None and device.is_cuda:
        parser.error(f"the peak of {name!r} is not known here: write --peak, dense bf16 operations a second")
    found = {task: measured(task, device, args) for task in tasks(device, args)}
    size = TINY if args.tiny else Size(**{**asdict(LARGE), "layers": args.layers, "batch": args.batch})
    stages = {f"stage {n}": found[f"speed {n}"] for n in range(4)}
    result = {
        "what": "one device: training speed by ZeRO stage, a model that does not fit, and the lane",
        "device": {"name": name, "memory_gb": None if device.total is None else round(device.total / 1e9, 1)},
        "peak_flops": peak,
        "model": asdict(size) | {"parameters": stages["stage 0"].get("parameters")},
        "speed": {
            stage: row if "failed" in row else summarize(row, size, device, peak) for stage, row in stages.items()
        },
        "offload": {task.removeprefix("offload "): row for task, row in found.items() if task.startswith("offload ")},
        "lane": found["lane"],
        "difference_to_torchs_weights": found["weights"],
        "rounds": args.rounds,
        "steps_a_block": args.block,
        "machine": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda},
    }
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    output: Path = args.output or HERE / "results" / f"gpu-{slug}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    for stage, rows in result["speed"].items():
        for arm, row in rows.items() if "failed" not in rows else ():
            ratio = row["seconds_a_step_to_torch"]
            print(
                f"{stage}  {arm:9s} {row['tokens_a_second']:>10.0f} tokens/s  MFU {row['mfu']}  to torch "
                f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]  {row['peak_gb']} GB"
            )
    for part in ("offload", "lane", "difference_to_torchs_weights"):
        print(f"{part}: {json.dumps(result[part])}")
    return int(any("failed" in row for row in found.values()))


if __name__ == "__main__":
    sys.exit(main())
