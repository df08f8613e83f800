"""The engine against DDP, FSDP2 and DeepSpeed: CPU and wall time a step on the same model, ranks and optimizer.

    python benchmarks/engine.py                   # an hour; writes benchmarks/results/engine.json
    python benchmarks/engine.py --shape convolutions
    python benchmarks/engine.py --arms ddp,dsprof_z0,dsprof_z1,dsprof_z2,dsprof_z3 --output FILE
                                                  # 20 minutes, of the engine alone: results/engine_to_ddp.json
    python benchmarks/engine.py --pipeline        # ten minutes; writes benchmarks/results/pipeline.json

Ranks (gloo) train each of the shapes of engine_shapes.py with AdamW (torch's fused) and gradients clipped to 1.0. All
arms live in the same processes and take turns, a step at a time, in a random order each round: a host's pace changes
more from one second to the next than from one step to the next. Of an arm's turn the first step does not count: what
the caches and the kernel have taken from it in the others' turns a job of its own would have kept (a virtual machine
may give free memory back to its host within two seconds, and to have 80 MB again took a step's time). An arm's figure
is the mean over rounds of its time to DDP's in the same round, geometric and without the lowest and highest fifth; the
interval is that of a bootstrap over rounds. DeepSpeed arms are there where DeepSpeed is installed (0.19.8,
DS_ACCELERATOR=cpu). A shape's results are written when it is through, and it is passed over from then on: `--again`
measures it anew.

With `--pipeline` the two ranks are the stages of a pipeline over the first shape's model, four micro-batches a step,
and figures are ratios to DeepSpeed's PipelineEngine.
"""

from __future__ import annotations

import argparse
import gc
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

import interval
import numpy as np
import torch
import torch.distributed as dist
from block import Block
from engine_shapes import HEADS, LENGTH, SHAPES, VOCABULARY, Shape, next_token
from torch import Tensor, nn

HERE = Path(__file__).parent
WIDTH, LAYERS = 256, 10
CLIP, LR = 1.0, 3e-4
FIRST_ROUNDS = 4
"""Not counted: orders of parameters are recorded, memory is taken, Python specializes what it runs."""
Step = Callable[[Tensor], Tensor]
Arm = Callable[[Shape], Step]


def model(shape: Shape) -> nn.Module:
    torch.manual_seed(0)
    return shape.model()


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=LR, fused=True)


def plain(shape: Shape, wrap: Callable[[nn.Module], nn.Module]) -> Step:
    wrapped = wrap(model(shape))
    optimizer = adamw(wrapped.parameters())

    def step(batch: Tensor) -> Tensor:
        loss: Tensor = wrapped(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def ddp(shape: Shape) -> Step:
    return plain(shape, nn.parallel.DistributedDataParallel)


def fsdp2(shape: Shape) -> Step:
    from torch.distributed.fsdp import fully_shard

    def wrap(module: nn.Module) -> nn.Module:
        assert isinstance(module.blocks, nn.ModuleList)
        for block in module.blocks:
            fully_shard(block)
        return fully_shard(module)

    return plain(shape, wrap)


def configuration(shape: Shape, stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": shape.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
    }


def engine_step(engine: Any) -> Step:
    def step(batch: Tensor) -> Tensor:
        loss: Tensor = engine(batch)
        engine.backward(loss)
        engine.step()
        return loss

    return step


def dsprof(stage: int) -> Arm:
    def make(shape: Shape) -> Step:
        import dsprof.engine

        module = model(shape)
        engine, *_ = dsprof.engine.initialize(
            model=module, optimizer=adamw(module.parameters()), config=configuration(shape, stage)
        )
        return engine_step(engine)

    return make


def deepspeed(stage: int) -> Arm:
    def make(shape: Shape) -> Step:
        import deepspeed

        module = model(shape)
        config = {**configuration(shape, stage), "zero_allow_untested_optimizer": True, "steps_per_print": 10**9}
        engine, *_ = deepspeed.initialize(model=module, optimizer=adamw(module.parameters()), config=config)
        return engine_step(engine)

    return make


# --- pipelines

MICROBATCHES = 4


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(4 * VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.zeros(1, LENGTH, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.tokens(ids) + self.positions
        return x


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(x))
        return logits


def pipeline(library: str, **section: Any) -> Arm:
    """A step of `library`'s PipelineEngine over two stages."""

    def make(shape: Shape) -> Step:
        if library == "dsprof":
            from dsprof.engine import initialize
            from dsprof.engine.pipe import LayerSpec, PipelineModule
        else:
            from deepspeed import init_distributed, initialize
            from deepspeed.pipe import LayerSpec, PipelineModule

            init_distributed("gloo", verbose=False)

        layers = [LayerSpec(Tokens), *(LayerSpec(Block, WIDTH, HEADS) for _ in range(LAYERS)), LayerSpec(Head)]
        module = PipelineModule(
            layers, num_stages=2, loss_fn=next_token, partition_method="uniform", seed_layers=True, base_seed=1
        )
        more = {"pipeline": section} if section else {}
        if library == "deepspeed":
            more = {"zero_allow_untested_optimizer": True, "steps_per_print": 10**9}
        engine, *_ = initialize(
            model=module,
            optimizer=adamw(module.parameters()),
            config={**configuration(shape, 0), "gradient_accumulation_steps": MICROBATCHES, **more},
        )

        def step(ids: Tensor) -> Tensor:
            loss: Tensor = engine.train_batch(iter([(part, part) for part in ids.split(shape.batch)]))
            return loss

        return step

    return make


PIPELINES: dict[str, Arm] = {
    "deepspeed_pipe": pipeline("deepspeed"),
    "dsprof_gpipe": pipeline("dsprof", schedule="gpipe"),
    "dsprof_1f1b": pipeline("dsprof", schedule="1f1b"),
    "dsprof_zero_bubble": pipeline("dsprof", schedule="zero-bubble"),
}

ARMS: dict[str, Arm] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    **{f"dsprof_z{stage}": dsprof(stage) for stage in range(4)},
    **{f"deepspeed_z{stage}": deepspeed(stage) for stage in range(4)},
}


def measure(rank: int, shape: Shape, args: argparse.Namespace, store: str) -> dict[str, Any] | None:
    world_size = shape.ranks
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    steps = {arm: {**ARMS, **PIPELINES}[arm](shape) for arm in args.arms}
    batches = torch.Generator().manual_seed(0 if args.pipeline else rank)  # stages read the same
    samples = shape.batch * (MICROBATCHES if args.pipeline else 1)
    losses: dict[str, list[float]] = {arm: [] for arm in args.arms}
    cpu: dict[str, list[float]] = {arm: [] for arm in args.arms}
    wall: dict[str, list[float]] = {arm: [] for arm in args.arms}
    order = random.Random(0)
    gc.collect()
    gc.freeze()  # the arms' models are one heap here: collecting it would charge one arm for all the others
    for number in range(-FIRST_ROUNDS, args.rounds):
        batch = shape.sample(samples, batches)
        for arm in order.sample(args.arms, len(args.arms)):
            for _ in range(args.steps_before):
                steps[arm](batch).item()
            dist.barrier()
            began = time.process_time(), time.perf_counter()
            losses[arm].append(steps[arm](batch).item())
            if number >= 0:
                cpu[arm].append(time.process_time() - began[0])
                wall[arm].append(time.perf_counter() - began[1])
        if rank == 0 and sys.stderr.isatty():
            print(f"\rround {number + 1}/{args.rounds}", end="", file=sys.stderr)
    both: list[Any] = [None] * world_size
    dist.all_gather_object(both, (cpu, wall, losses))
    dist.destroy_process_group()
    return summarize(both, shape, args) if rank == 0 else None


def summarize(ranks: list[Any], shape: Shape, args: argparse.Namespace) -> dict[str, Any]:
    cpu = {arm: np.mean([rank[0][arm] for rank in ranks], axis=0) for arm in args.arms}
    wall = {arm: np.mean([rank[1][arm] for rank in ranks], axis=0) for arm in args.arms}
    base = args.base
    return {
        "what": f"{shape.about}: time a step, mean of {shape.ranks} ranks, and its ratio to that of {base}",
        "model_parameters": sum(p.numel() for p in model(shape).parameters()),
        "tensors": len(list(model(shape).parameters())),
        "cpu_ms": {arm: round(1e3 * statistics.median(values), 1) for arm, values in cpu.items()},
        "wall_ms": {arm: round(1e3 * statistics.median(values), 1) for arm, values in wall.items()},
        f"cpu_to_{base}": {arm: ratio(cpu[arm], cpu[base]) for arm in args.arms if arm != base},
        f"wall_to_{base}": {arm: ratio(wall[arm], wall[base]) for arm in args.arms if arm != base},
        "last_loss": {arm: round(statistics.fmean(rank[2][arm][-1] for rank in ranks), 5) for arm in args.arms},
        "rounds": args.rounds,
        "steps_before": args.steps_before,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
    }


def ratio(values: Any, base: Any) -> dict[str, float]:
    return {name: round(value, 3) for name, value in interval.ratio(np.log(values / base)).items()}


def worker(rank: int, name: str, args: argparse.Namespace, store: str) -> None:
    result = measure(rank, SHAPES[name], args, store)
    if result is None:
        return
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps({**measured(args.output), name: result}, indent=1) + "\n")
    print(name)
    for arm, found in result[f"cpu_to_{args.base}"].items():
        wall = result[f"wall_to_{args.base}"][arm]["ratio"]
        print(f"{arm:18s} CPU {found['ratio']:.3f} [{found['low']:.3f}, {found['high']:.3f}]   wall {wall:.3f}")


def measured(path: Path) -> dict[str, Any]:
    """Results by shape, so far."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="steps counted of each arm")
    parser.add_argument("--steps-before", type=int, default=1, help="in each turn, that do not count")
    parser.add_argument("--shape", choices=SHAPES, help="this one; by default all that have not been measured")
    parser.add_argument("--again", action="store_true", help="measure what has been measured anew")
    parser.add_argument("--pipeline", action="store_true", help="two pipeline stages instead of two replicas")
    parser.add_argument("--arms", help="some of them, with commas between; by default all that are installed")
    parser.add_argument("--output", type=Path, help="benchmarks/results/engine.json, or pipeline.json")
    args = parser.parse_args()
    arms = PIPELINES if args.pipeline else ARMS
    args.base = next(iter(arms))
    args.output = args.output or HERE / "results" / ("pipeline.json" if args.pipeline else "engine.json")
    if args.arms:
        args.arms = args.arms.split(",")
    else:
        from importlib.util import find_spec

        args.arms = [arm for arm in arms if not arm.startswith("deepspeed") or find_spec("deepspeed")]
    if args.base not in args.arms or set(args.arms) - set(arms):
        parser.error(f"--arms: a list out of {','.join(arms)}, {args.base} among them, which must be installed")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29577")
    shapes = [args.shape] if args.shape else list(SHAPES)[: 1 if args.pipeline else None]
    for name in shapes:
        if name in measured(args.output) and not args.again:
            print(f"{name}: measured already; --again measures it anew")
            continue
        with tempfile.TemporaryDirectory() as folder:
            call = (worker, (name, args, f"{folder}/store"), SHAPES[name].ranks)
            torch.multiprocessing.spawn(*call)  # type: ignore[no-untyped-call]
    return 0


if __name__ == "__main__":
    sys.exit(main())
