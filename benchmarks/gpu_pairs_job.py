"""The training that `gpu_pairs.py` profiles on a GPU: a small GPT, with faults that users have, each by an argument.

It is a user's script: nothing of dsprof is imported but for `--by engine`. It says itself what a step took, by events
on the device. Without a GPU it trains on the CPU, to try the script.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from block import Block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

VOCABULARY = 8192
GPU = torch.cuda.is_available()
COUNTED = range(38, 68)
"""Steps whose mean is told: after warm-up, and after those that are traced, by `--deep 30:34` or by dsprof itself, and
what comes of it. As many of them as make whole rounds of what is done every 6 or 10 steps."""


class Times:
    """When the device ended each step."""

    def __init__(self) -> None:
        self.ends: list[Any] = []

    def mark(self) -> None:
        if GPU:
            self.ends.append(torch.cuda.Event(enable_timing=True))
            self.ends[-1].record()
        else:
            self.ends.append(time.perf_counter())

    def told(self) -> dict[str, Any]:
        """Mean step of those that are counted, and the three longest after the first ten, with their numbers; ms."""
        if GPU:
            torch.cuda.synchronize()
        pairs = zip(self.ends[:-1], self.ends[1:], strict=True)
        took = [b.elapsed_time(e) if GPU else 1e3 * (e - b) for b, e in pairs]
        counted = [took[step - 1] for step in COUNTED if step - 1 < len(took)]
        longest = sorted(range(10, len(took) + 1), key=lambda step: -took[step - 1])[:3]
        return {
            "mean_ms": sum(counted) / len(counted), "median_ms": statistics.median(took[9:]),
            "longest": [[step, round(took[step - 1], 2)] for step in longest],
        }  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=70)
    parser.add_argument("--by", choices=["plain", "ddp", "fsdp2", "engine"], default="plain")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--load-ms", type=float, default=0.0, help="of a core, for a batch")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--image-mb", type=float, default=0.0, help="that go to the device with each batch")
    parser.add_argument("--pinned", type=int, default=1)
    parser.add_argument("--item-every", type=int, default=0)
    parser.add_argument("--host-ms", type=float, default=0.0, help="of the host's own work between two steps")
    parser.add_argument("--optimizer", choices=["fused", "foreach", "loop"], default="fused")
    parser.add_argument("--recompute", type=int, default=0)
    parser.add_argument("--garbage", type=int, default=0, help="objects that are made, and held, before training")
    parser.add_argument("--cycles", type=int, default=0, help="cycles of objects that each step leaves")
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--graphed", type=int, default=0)
    parser.add_argument("--fp8", type=int, default=0)
    parser.add_argument("--done", type=Path, help="a file for what a step took, ms, when training has ended")
    return parser.parse_args()


class GPT(nn.Module):
    """Its loss on tokens [batch, length + 1]."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, args.width)
        self.blocks = nn.ModuleList(Block(args.width, max(args.width // 64, 1)) for _ in range(args.layers))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, VOCABULARY, bias=False)
        self.recompute = bool(args.recompute)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids[:, :-1])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), ids[:, 1:].flatten())


class Batches(Dataset[dict[str, Tensor]]):
    """Each is made in `load_ms` of a core."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args

    def __len__(self) -> int:
        return int(self.args.steps)

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        busy(self.args.load_ms)
        random = torch.Generator().manual_seed(at)
        ids = torch.randint(0, VOCABULARY, (self.args.batch, self.args.length + 1), generator=random)
        image = torch.zeros(int(self.args.image_mb * 2**20 / 4))
        return {"ids": ids, "image": image}


def busy(milliseconds: float) -> None:
    end = time.perf_counter() + milliseconds / 1e3
    a = np.ones((64, 64))
    while time.perf_counter() < end:
        a = a @ a / 64


def garbage(count: int) -> list[Any]:
    return [{"name": str(at), "values": [at]} for at in range(count)]


def cycles(count: int) -> None:
    for _ in range(count):
        one: list[Any] = []
        one.append(one)


def wrapped(model: nn.Module, args: argparse.Namespace) -> nn.Module:
    if args.by == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if args.by == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block)
        fully_shard(model)
    return model


def batches(args: argparse.Namespace, device: torch.device) -> Iterator[Tensor]:
    loader = DataLoader(
        Batches(args), batch_size=None, num_workers=args.workers, pin_memory=bool(args.pinned),
        persistent_workers=args.workers > 0,
    )  # fmt: skip
    for batch in loader:
        batch["image"].to(device, non_blocking=bool(args.pinned))
        yield batch["ids"].to(device, non_blocking=bool(args.pinned))


def with_engine(model: nn.Module, args: argparse.Namespace, device: torch.device, times: Times) -> None:
    from dsprof import engine as ds

    config = {
        "train_micro_batch_size_per_gpu": args.batch, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "fused": True}},
        **({"fp8": {"enabled": True}} if args.fp8 else {}),
    }  # fmt: skip
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    for ids in batches(args, device):
        engine.backward(engine(ids))
        engine.step()
        times.mark()


def with_torch(model: nn.Module, args: argparse.Namespace, device: torch.device, times: Times) -> None:
    how = {"fused": {"fused": True}, "foreach": {"foreach": True}, "loop": {"foreach": False}}[args.optimizer]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **how)
    kept = garbage(args.garbage)
    if args.graphed:
        example = torch.zeros(args.batch, args.length + 1, dtype=torch.long, device=device)
        model = torch.cuda.make_graphed_callables(model, (example,))  # type: ignore[assignment]
    total = 0.0
    for step, ids in enumerate(batches(args, device)):
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if args.item_every and step % args.item_every == 0:
            total += loss.item()
        busy(args.host_ms)
        cycles(args.cycles)
        if args.save_every and (step + 1) % args.save_every == 0:
            torch.save(model.state_dict(), "model.pt")
        times.mark()
    del kept


def main() -> None:
    args = arguments()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if GPU else torch.device("cpu")
    if GPU:
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        if args.by != "plain" or "RANK" in os.environ:
            dist.init_process_group("nccl" if GPU else "gloo", device_id=device if GPU else None)
            stack.callback(dist.destroy_process_group)
        model = wrapped(GPT(args).to(device, torch.bfloat16), args)
        times = Times()
        (with_engine if args.by == "engine" else with_torch)(model, args, device, times)
        told = times.told()
        if args.done:
            args.done.with_suffix(".new").write_text(json.dumps(told))
            args.done.with_suffix(".new").rename(args.done)
    gc.collect()


if __name__ == "__main__":
    main()
