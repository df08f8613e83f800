"""What ZeRO++ does to a loss, and how many bytes it saves: a small GPT in bf16 and stage 3 on four ranks of two made-up
machines, from the same weights on the same data.
`python benchmarks/zeropp.py [--steps 300] [--output benchmarks/results/zeropp.json]`

The loss compared is the mean over the last sixth of the steps, over all ranks. Bytes are those of one rank's gathers
and reductions in the last step, as nccl-tests count: the whole of what comes together on a rank, or is taken apart
there.
Ranks are processes on a CPU: numbers and bytes, not times.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import warnings
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from float8 import GPT, SAMPLES, batches

from dsprof import engine as ds
from dsprof.engine.hooks import Span, subscribe

RANKS: Final = 4
RANKS_A_MACHINE: Final = 2
ARMS: Final[dict[str, dict[str, Any]]] = {
    "stage 3": {},
    "quantized weights": {"zero_quantized_weights": True},
    "quantized gradients": {"zero_quantized_gradients": True},
    "both, and hpZ": {
        "zero_quantized_weights": True, "zero_quantized_gradients": True, "zero_hpz_partition_size": RANKS_A_MACHINE,
    },
}  # fmt: skip


class Sent:
    """The bytes of each step, by what they were for and over which lane; a listener of the engine's hooks."""

    def __init__(self) -> None:
        self.of_step: dict[int, dict[str, int]] = {}

    def begin(self, span: Span) -> None: ...

    def end(self, span: Span) -> None:
        if span.kind == "comm" and span.purpose in ("parameter", "gradient") and span.lane:
            place = self.of_step.setdefault(span.step, {})
            name = f"{span.purpose}, {span.lane.removeprefix('comm.').removeprefix('gradients.')}"
            place[name] = place.get(name, 0) + (span.bytes or 0)


def train(arm: str, steps: int) -> dict[str, Any]:
    """The mean loss of each step over the ranks, and this rank's bytes in the last step."""
    torch.manual_seed(1)
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES, "gradient_clipping": 1.0, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {
            "stage": 3, "stage3_param_persistence_threshold": 1000, "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0, **ARMS[arm],
        },
    }  # fmt: skip
    model, sent = GPT(), Sent()
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    stop = subscribe(sent)
    losses = torch.zeros(steps)
    size, rank = dist.get_world_size(), dist.get_rank()
    for step, ids in enumerate(batches(steps * size)[rank::size]):
        loss = engine(ids)
        engine.backward(loss)
        engine.step()
        losses[step] = loss.item() / size
    stop()
    engine.destroy()
    dist.all_reduce(losses)
    return {"losses": losses.tolist(), "bytes": sent.of_step[steps - 1]}


def rank_main(rank: int, port: int, steps: int, output: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS_A_MACHINE)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    results: dict[str, Any] = {"torch": torch.__version__, "ranks": RANKS, "steps": steps, "arms": {}}
    last = max(steps // 6, 1)
    for arm in ARMS:
        found = train(arm, steps)
        loss = sum(found["losses"][-last:]) / last
        row = {"first loss": round(found["losses"][0], 4), "loss": round(loss, 4), "bytes of a step": found["bytes"]}
        first = results["arms"].setdefault("stage 3", row)
        row["beside stage 3, percent"] = round(100 * (row["loss"] / first["loss"] - 1), 2)
        results["arms"][arm] = row
    if rank == 0:
        Path(output).write_text(json.dumps(results, indent=1) + "\n")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output", default="/dev/stdout")
    args = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    torch.multiprocessing.start_processes(
        rank_main, (port, args.steps, args.output), nprocs=RANKS, start_method="fork"
    )  # fmt: skip


if __name__ == "__main__":
    main()
