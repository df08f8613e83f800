"""What some predictions of rules rest on that no run tells: measured by CPU time, with one thread of torch, in
interleaved turns.

    python benchmarks/constants.py             # writes benchmarks/results/constants.json; two minutes
    python benchmarks/constants.py fixed       # of that, this alone; the rest stays

fused      the part of a step of Adam, which loops over tensors, that `fused=True` spares
           (`rules/compute/fused_optimizer.py`, SAVED)
cast       ms a byte of gradients that a CPU turns into bfloat16 and back, as bf16_compress_hook does, and gloo adds
           (`rules/comm/volume.py`, CAST_MS_PER_BYTE)
recompute  ms of a block that activation checkpointing takes beside computing it again
           (`rules/compute/recompute.py`, BESIDE_MS)
fixed      what the forward and the backward of a micro-batch take whatever its size in a stage of torch's pipelining,
           by what they take for a quarter of the samples (`work/fixed_part.py`)

tests/test_constants.py holds the rules against the result.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.checkpoint import checkpoint

from dsprof.atomic import write_atomically

RESULTS: Final = Path(__file__).resolve().parent / "results" / "constants.json"
TURNS: Final = 15
SHAPES: Final = ((30, 64), (300, 64), (300, 4096), (300, 16_384), (100, 100_000), (30, 300_000), (10, 2_000_000))
"""Tensors, and elements of each."""
BUCKETS_MB: Final = (0.25, 1, 4, 16, 25)
BLOCKS: Final = 12
WIDTHS: Final = (8, 64, 256)


def median_ms(
    turns: Sequence[Callable[[], Any]], calls: int = 1, clock: Callable[[], float] = time.thread_time
) -> list[float]:
    """Of each of these, CPU time of the thread, or what else the clock tells, median over turns in which all of them
    run."""
    took: list[list[float]] = [[] for _ in turns]
    for number in range(TURNS + 2):
        for place, turn in enumerate(turns):
            began = clock()
            for _ in range(calls):
                turn()
            if number >= 2:
                took[place].append(1e3 * (clock() - began) / calls)
    return [statistics.median(of) for of in took]


def fused(tensors: int, elements: int, kind: type[torch.optim.Optimizer]) -> float:
    def stepper(**options: Any) -> Callable[[], Any]:
        parameters = [nn.Parameter(torch.randn(elements)) for _ in range(tensors)]
        for parameter in parameters:
            parameter.grad = torch.randn(elements)
        return kind(parameters, **options).step

    looped, at_once = median_ms([stepper(), stepper(fused=True)])
    return 1 - at_once / looped


def cast(rank: int, port: int, answer: Any) -> None:
    """Of each size, what a rank's process spends more on an all-reduce in bfloat16 than on half of one in float32, ms a
    byte of float32: both casts, and gloo's slower sum."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    found: dict[str, float] = {}
    for megabytes in BUCKETS_MB:
        bucket = torch.ones(int(megabytes * 250_000))

        def whole(bucket: torch.Tensor = bucket) -> None:
            dist.all_reduce(bucket.div_(2))

        def short(bucket: torch.Tensor = bucket) -> None:
            half = bucket.to(torch.bfloat16).div_(2)
            dist.all_reduce(half)
            bucket.copy_(half)

        calls = max(int(16 / megabytes), 1)
        as_it_is, shorter = median_ms([whole, short], calls, time.process_time)
        found[f"{megabytes:g} MB"] = float(f"{(shorter - as_it_is / 2) / (bucket.numel() * 4):.3g}")
    dist.destroy_process_group()
    if rank == 0:
        answer.put(found)


def casts() -> dict[str, float]:
    """As `cast` tells, in two processes."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [context.Process(target=cast, args=(rank, port, answer)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    found: dict[str, float] = answer.get(timeout=300)
    for process in ranks:
        process.join()
    return found


def recompute(width: int) -> float:
    """ms a block."""
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)) for _ in range(BLOCKS)
    )
    x = torch.randn(4, width, requires_grad=True)

    def forward() -> torch.Tensor:
        y = x
        for block in blocks:
            y = block(y)
        return y

    def checkpointed() -> None:
        y = x
        for block in blocks:
            y = checkpoint(block, y, use_reentrant=False)
        y.sum().backward()

    whole, with_it, again = median_ms([lambda: forward().sum().backward(), checkpointed, forward])
    return (with_it - whole - again) / BLOCKS


class Block(nn.Module):
    """Of a GPT."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.asks, self.answers = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wider, self.narrower = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, tokens, width = x.shape
        of_heads = self.asks(self.before(x)).view(samples, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*of_heads, is_causal=True)
        x = x + self.answers(seen.transpose(1, 2).reshape(x.shape))
        found: torch.Tensor = x + self.narrower(nn.functional.gelu(self.wider(self.between(x))))
        return found


def gpt(width: int, blocks: int) -> nn.Module:
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


def perceptron(width: int, count: int) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(count) for layer in (nn.Linear(width, width), nn.Tanh())))


def convolutions(channels: int, count: int) -> nn.Module:
    return nn.Sequential(*(
        layer for _ in range(count)
        for layer in (nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
    ))  # fmt: skip


MODELS: Final[dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]] = {
    "gpt, 4 blocks of width 128, 8 x 64 tokens": (lambda: gpt(128, 4), (8, 64, 128)),
    "gpt, 12 blocks of width 64, 16 x 32 tokens": (lambda: gpt(64, 12), (16, 32, 64)),
    "gpt, 2 blocks of width 384, 8 x 64 tokens": (lambda: gpt(384, 2), (8, 64, 384)),
    "gpt, 4 blocks of width 64, 4 x 16 tokens": (lambda: gpt(64, 4), (4, 16, 64)),
    "gpt, 1 block of width 512, 8 x 32 tokens": (lambda: gpt(512, 1), (8, 32, 512)),
    "mlp, 8 layers of width 256, 1024 samples": (lambda: perceptron(256, 8), (1024, 256)),
    "mlp, 2 layers of width 1024, 128 samples": (lambda: perceptron(1024, 2), (128, 1024)),
    "mlp, 16 layers of width 64, 256 samples": (lambda: perceptron(64, 16), (256, 64)),
    "mlp, 4 layers of width 512, 256 samples": (lambda: perceptron(512, 4), (256, 512)),
    "mlp, 40 layers of width 32, 64 samples": (lambda: perceptron(32, 40), (64, 32)),
    "mlp, 2 layers of width 32, 8 samples": (lambda: perceptron(32, 2), (8, 32)),
    "mlp, 1 layer of width 8, 4 samples": (lambda: perceptron(8, 1), (4, 8)),
    "convolutions, 4 of 16 channels, 8 images of 32 x 32": (lambda: convolutions(16, 4), (8, 16, 32, 32)),
    "convolutions, 12 of 32 channels, 8 images of 16 x 16": (lambda: convolutions(32, 12), (8, 32, 16, 16)),
}
"""A stage of a pipeline, and the shape of a micro-batch."""
OF_A_STAGE: Final = {"forward": "forward_one_chunk", "backward": "backward_one_chunk"}


def fixed(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> dict[str, Any]:
    """What a stage of torch's pipelining takes for a forward, and for a backward, of a micro-batch of this shape, and
    what of it does not go with the samples, ms; the tensors and bytes of its parameters."""
    model = make()
    parameters = list(model.parameters())
    took: dict[tuple[str, int], list[float]] = {}

    def turn(samples: int) -> Callable[[], None]:
        stage = PipelineStage(model, 0, 1, torch.device("cpu"))
        for name, method in OF_A_STAGE.items():
            setattr(stage, method, timed(getattr(stage, method), took.setdefault((name, samples), [])))
        schedule = ScheduleGPipe(stage, 4, loss_fn=nn.functional.mse_loss)
        x = torch.randn(4 * samples, *shape[1:])
        return lambda: schedule.step(x, target=x)

    whole, few = shape[0], shape[0] // 4
    turns = [turn(whole), turn(few)]
    for number in range(TURNS + 2):
        for one in turns:
            one()
        if number == 1:
            for times in took.values():
                times.clear()
    found: dict[str, Any] = {"tensors": len(parameters), "bytes": sum(one.nbytes for one in parameters)}
    for name in OF_A_STAGE:
        every, short = (statistics.median(took[name, samples]) for samples in (whole, few))
        found[name] = {"ms": round(every, 3), "fixed_ms": round((short - every / 4) / 0.75, 3)}
    return found


def timed(method: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.thread_time()
        answer = method(*args, **kwargs)
        times.append(1e3 * (time.thread_time() - began))
        return answer

    return call


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1:] == ["fixed"]:
        found: dict[str, Any] = json.loads(RESULTS.read_text()) | {"fixed": every_fixed()}
    else:
        found = everything()
    write_atomically(RESULTS, json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


def every_fixed() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as store:
        dist.init_process_group("gloo", init_method=f"file://{store}/store", rank=0, world_size=1)
        try:
            return {name: fixed(*model) for name, model in MODELS.items()}
        finally:
            dist.destroy_process_group()


def everything() -> dict[str, Any]:
    found: dict[str, Any] = {
        "torch": torch.__version__, "machine": platform.machine(), "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1), "fused": {}, "recompute_ms": {},
    }  # fmt: skip
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        for tensors, elements in SHAPES:
            found["fused"][f"{kind.__name__} {tensors} x {elements}"] = round(fused(tensors, elements, kind), 3)
    found["cast_ms_per_byte"] = casts()
    for width in WIDTHS:
        found["recompute_ms"][f"width {width}"] = round(recompute(width), 4)
    return found | {"fixed": every_fixed()}


if __name__ == "__main__":
    main()
