"""A DeepSpeed script of several parts, one after the other: `deepspeed_job.py look EXAMPLE ...`.

`look` does what only ranks of a real job can show; what it found is a line of JSON from rank 0. Others are examples.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

EXAMPLES = Path(__file__).parents[1] / "examples" / "deepspeed"
SHORTER = {"zero2_offload": [], "tensor_parallel": ["--steps", "30"], "pipeline": ["--steps", "40"]}


def version() -> str:
    """Of what this process imports as deepspeed."""
    return str(sys.modules["deepspeed"].__version__)


class Versions(Dataset[str]):
    """What the process that loads a sample imports."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        return version()


class Half:
    """Says that this rank shares layers with its neighbour."""

    def get_model_parallel_world_size(self) -> int:
        return 2

    def get_model_parallel_rank(self) -> int:
        return torch.distributed.get_rank()


def configuration(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 4},
        "comms_logger": {"enabled": True},
    }


def refused(call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "not refused"


def look() -> dict[str, Any]:
    found: dict[str, Any] = {}
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    args, _ = parser.parse_known_args()
    found["no engine"] = refused(deepspeed.comm.log_summary)
    deepspeed.init_distributed()
    rank = deepspeed.comm.get_rank()
    found["local rank"] = args.local_rank == deepspeed.comm.get_local_rank() == rank

    found["worker"] = next(iter(DataLoader(Versions(), num_workers=1)))[0]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))
    found["mpu"] = refused(deepspeed.initialize, model=model, config=configuration(3), mpu=Half())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=configuration(3))
    engine.backward(engine(torch.ones(2, 8)).mean())
    engine.step()
    weight, bias = model[0].weight, model[0].bias
    found["cut"] = [hasattr(weight, "ds_id"), hasattr(bias, "ds_id")]
    found["pieces"] = [weight.ds_tensor.numel(), weight.partition_numel(), bias.ds_status.name]
    found["shape"] = [list(weight.ds_shape), weight.ds_numel]
    found["status"] = [weight.ds_status.name]
    with deepspeed.zero.GatheredParameters([weight]):
        found["status"].append(weight.ds_status.name)
        found["whole"] = bool(torch.isfinite(weight).all())
    if rank == 0:
        deepspeed.comm.log_summary()
    return found


def main() -> None:
    for part in [word for word in sys.argv[1:] if not word.startswith("-")]:
        if part == "look":
            found = look()
            if torch.distributed.get_rank() == 0:
                print("found", json.dumps(found), flush=True)
            continue
        if os.environ["RANK"] == "0":
            print("example", part, flush=True)
        sys.argv = [part, "--deepspeed_config", str(EXAMPLES / f"{part}.json"), *SHORTER[part]]
        runpy.run_path(str(EXAMPLES / f"{part}.py"), run_name="__main__")


if __name__ == "__main__":
    main()
