"""The faults of public bug reports in jobs of other kinds than the reports': what `reported_variants.py` runs.

torchrun --nproc-per-node 3 benchmarks/reported_variant_job.py --case tokens --framework fsdp2 --size 1.2

Each case is one fault, and `--mend` is the same job without it. Layers sleep, so that two cores are enough for four
ranks; frameworks differ by who wraps the model, takes it backward and steps.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH: Final = 48
MICRO_BATCHES: Final = 4
TOKENS: Final = 4096
WORDS: Final = 50_000
STOPPED_EACH_S: Final = 0.1
STOPS: Final = """
import os, select, signal, sys, time
pid, stopped, each = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
while not select.select([sys.stdin], [], [], each - stopped)[0]:
    try: os.kill(pid, signal.SIGSTOP)
    except ProcessLookupError: break
    try: time.sleep(stopped)
    finally: os.kill(pid, signal.SIGCONT)
"""
"""What a CPU quota does: for part of each period a process does not run."""


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        time.sleep(forward_s)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_s)
        return gradients[0], None, None


class Layer(nn.Module):
    """x [..., width] -> the same, in `forward_s`, and twice that for the gradients; `more_s` comes on top."""

    def __init__(self, forward_s: float, width: int = WIDTH) -> None:
        super().__init__()
        self.linear, self.forward_s, self.more_s = nn.Linear(width, width), forward_s, 0.0

    def forward(self, x: Tensor) -> Tensor:
        seconds = self.forward_s + self.more_s
        return torch.tanh(self.linear(_Sleep.apply(x, seconds, 2 * seconds)))


# --- frameworks -----------------------------------------------------------------------------------


class Training:
    """A model in a framework.

    buffers: broadcast before each forward, where the framework does that; accumulate: backwards a step, of which each
    reduces the gradients where `quiet` is off
    """

    def __init__(
        self, framework: str, model: nn.Module, *, buffers: bool = True, accumulate: int = 1, quiet: bool = False,
        optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    ) -> None:  # fmt: skip
        self.framework, self.accumulate, self.quiet = framework, accumulate, quiet
        make = optimizer or (lambda net: torch.optim.AdamW(net.parameters(), lr=1e-3))
        if framework in ("deepspeed", "engine"):
            self.model = self._initialize(model, optimizer)
            return
        if framework == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            self.model = fully_shard(model)  # one unit: many small ones would be a fault of their own
        else:
            self.model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=buffers)
        self.optimizer = make(self.model)

    def _initialize(self, model: nn.Module, optimizer: Any) -> nn.Module:
        if self.framework == "engine":
            from dsprof import engine as deepspeed
        else:
            import deepspeed
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 8,
            "gradient_accumulation_steps": self.accumulate,
            "zero_optimization": {"stage": 1 if self.quiet or self.accumulate == 1 else 2},
        }
        if optimizer is None:
            config["optimizer"] = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config,
            **({"optimizer": optimizer(model)} if optimizer else {}),
        )  # fmt: skip
        made: nn.Module = engine
        return made

    def step(self, *inputs: Any) -> None:
        for micro in range(self.accumulate):
            with self._reduces(micro == self.accumulate - 1):
                loss = self.model(*inputs).square().mean() / self.accumulate
                if self.framework in ("deepspeed", "engine"):
                    engine: Any = self.model
                    engine.backward(loss * self.accumulate)
                    engine.step()
                else:
                    loss.backward()
        if self.framework not in ("deepspeed", "engine"):
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _reduces(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        model: Any = self.model
        if self.quiet and self.framework == "fsdp2":
            model.set_requires_gradient_sync(last)
        if self.quiet and self.framework == "ddp" and not last:
            quiet: contextlib.AbstractContextManager[Any] = model.no_sync()
            return quiet
        return contextlib.nullcontext()


# --- cases ----------------------------------------------------------------------------------------


class Masked(nn.Module):
    """A layer that keeps a mask of `numel` elements as a buffer."""

    def __init__(self, numel: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = Layer(0.003)
        self.register_buffer("mask", torch.ones(numel, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.mask[: x.shape[-1]]


def buffers(args: argparse.Namespace) -> None:
    """DDP broadcasts constants before each forward: 24 MB times the size."""
    count = 6
    dtype = torch.bool if args.place % 2 else torch.float32
    numel = int(24e6 * args.size / count / dtype.itemsize)
    net = nn.Sequential(*(Masked(numel, dtype) for _ in range(count)))
    if args.framework == "trainer":
        train_by_trainer(net, args)
        return
    training = Training(args.framework, net, buffers=not args.mend)
    for _ in range(args.steps):
        training.step(torch.randn(8, WIDTH))


def train_by_trainer(net: nn.Module, args: argparse.Namespace) -> None:
    import tempfile

    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
            outputs = self.net(inputs)
            return {"loss": (outputs - labels).square().mean(), "logits": outputs}

    rows = [{"inputs": torch.ones(WIDTH), "labels": torch.zeros(WIDTH)}] * (8 * 4 * args.steps)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(
            model=Model(),
            args=TrainingArguments(
                output_dir=folder, max_steps=args.steps, per_device_train_batch_size=8, report_to=[],
                save_strategy="no", logging_steps=1000, use_cpu=True, disable_tqdm=True,
                ddp_broadcast_buffers=not args.mend,
            ),
            train_dataset=rows,
        ).train()  # fmt: skip


class Scales(nn.Module):
    """Many scales and shifts among layers that compute."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(0.0015) for _ in range(6))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(WIDTH)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.layers):
            x = layer(x) * torch.stack(list(self.scales[at::6])).mean(0)
        return x


def groups(args: argparse.Namespace) -> None:
    """A group of the optimizer for each of 300 parameters, times the size."""
    kind = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)[args.place % 3]

    def optimizer(net: nn.Module) -> torch.optim.Optimizer:
        params = list(net.parameters())
        each: list[Any] = [{"params": params}] if args.mend else [{"params": [one]} for one in params]
        return kind(each, lr=1e-3, fused=True)

    training = Training(args.framework, Scales(int(300 * args.size)), optimizer=optimizer)
    for _ in range(args.steps):
        training.step(torch.randn(8, WIDTH))


class Embedded(nn.Module):
    """Words, whose gradient is ready last, and layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.Sequential(*(Layer(0.002, width) for _ in range(5)))

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.layers(self.words(tokens).mean(1))
        return x


def accumulation(args: argparse.Namespace) -> None:
    """Each of the micro-batches reduces gradients, of which 10 MB times the size are ready last."""
    micro_batches = MICRO_BATCHES - args.place % 2
    net = Embedded(int(WIDTH * args.size))
    training = Training(args.framework, net, accumulate=micro_batches, quiet=args.mend)
    for _ in range(args.steps):
        training.step(torch.randint(WORDS, (8, 16)))


def tokens(args: argparse.Namespace) -> None:
    """As many tokens on each rank, in documents of other lengths: attention costs their squares."""
    rank, ranks, dealer = dist.get_rank(), dist.get_world_size(), random.Random(args.place)
    layers = [Layer(0.004) for _ in range(4)]
    training = Training(args.framework, nn.Sequential(*layers))
    for _ in range(args.steps):
        squares = []
        for _ in range(ranks):
            cuts = sorted(dealer.sample(range(1, TOKENS), dealer.choice([0, 0, 1, 3, 15])))
            lengths = [end - begin for begin, end in zip([0, *cuts], [*cuts, TOKENS], strict=True)]
            squares.append(sum(length**2 for length in lengths) / TOKENS**2)
        mine = sum(squares) / ranks if args.mend else squares[rank]
        for layer in layers:
            layer.more_s = 0.009 * args.size * mine
        training.step(torch.randn(64, WIDTH))


class Head(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x / x.shape[1]
        return x.mean(1)


class Compiled(nn.Module):
    def __init__(self, head: nn.Module, dynamic: bool) -> None:
        super().__init__()
        self.head = torch.compile(head, backend="eager", dynamic=dynamic)
        self.layers = nn.Sequential(*(Layer(0.004) for _ in range(5)))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(self.head(x))
        return y


def compilation(args: argparse.Namespace) -> None:
    """One rank compiles a head of 3 layers, times the size, anew for each length that it meets."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 500
    late = args.place % dist.get_world_size()
    lengths = random.Random(args.place).sample(range(8, 400), args.steps)
    training = Training(args.framework, Compiled(Head(round(3 * args.size)), args.mend))
    for length in lengths:
        training.step(torch.randn(2, length if dist.get_rank() == late else 160, WIDTH))


def throttled(args: argparse.Namespace) -> None:
    """One rank is stopped for 35 ms of every 100 ms, times the size, wherever it is."""
    training = Training(args.framework, nn.Sequential(*(Layer(0.004) for _ in range(7))))
    stops = None
    for number in range(args.steps):
        if number == 1 and not args.mend and dist.get_rank() == args.place % dist.get_world_size():
            words = [str(os.getpid()), str(0.035 * args.size), str(STOPPED_EACH_S)]
            clean = {name: value for name, value in os.environ.items() if not name.startswith(("DSPROF", "PYTHONPATH"))}
            stops = subprocess.Popen(
                [sys.executable, "-S", "-E", "-c", STOPS, *words], stdin=subprocess.PIPE, env=clean
            )
        training.step(torch.randn(8, WIDTH))
    if stops is not None and stops.stdin is not None:
        stops.stdin.close()
        stops.wait()


def ring(block_s: float, zigzag: bool) -> None:
    """Keys and values go round once; of contiguous chunks a rank needs those that come before its own."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    held, coming = torch.randn(32, 32), torch.empty(32, 32)
    for turn in range(ranks):
        works: Iterable[Any] = ()
        if turn < ranks - 1:
            works = dist.batch_isend_irecv([
                dist.P2POp(dist.isend, held, (rank + 1) % ranks), dist.P2POp(dist.irecv, coming, (rank - 1) % ranks),
            ])  # fmt: skip
        if zigzag or turn == 0:
            time.sleep(block_s / 2)
        elif turn <= rank:
            time.sleep(block_s)
        for one in works:
            one.wait()
        held, coming = coming, held


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block_s: float, zigzag: bool) -> Tensor:
        ctx.block_s, ctx.zigzag = block_s, zigzag
        ring(block_s, zigzag)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ring(2 * ctx.block_s, ctx.zigzag)
        return gradients[0], None, None


class Attention(nn.Module):
    def __init__(self, block_s: float, zigzag: bool) -> None:
        super().__init__()
        self.block_s, self.zigzag, self.layer = block_s, zigzag, Layer(0.003)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(_RingAttention.apply(x, self.block_s, self.zigzag))
        return y


def shards(args: argparse.Namespace) -> None:
    """Contiguous pieces of causal sequences: attention of 5 ms a pair of pieces, times the size."""
    blocks = [Attention(0.005 * args.size, args.mend) for _ in range(3)]
    training = Training(args.framework, nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks))
    for _ in range(args.steps):
        training.step(torch.randn(8, WIDTH))


CASES: Final[dict[str, Callable[[argparse.Namespace], None]]] = {
    one.__name__: one for one in (buffers, groups, accumulation, tokens, compilation, throttled, shards)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--framework", choices=("ddp", "fsdp2", "deepspeed", "engine", "trainer"), default="ddp")
    parser.add_argument("--size", type=float, default=1.0, help="how large the fault is")
    parser.add_argument("--place", type=int, default=1, help="which rank it is of, where it is of one")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--mend", action="store_true", help="the same job without the fault")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if args.framework != "trainer":
        dist.init_process_group("gloo")
    CASES[args.case](args)
    if dist.is_initialized():
        time.sleep(0.1)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
