"""The debugging sections on real trainings, held against what is measured without them."""

from __future__ import annotations

import contextlib
import csv
import io
import re
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist
from engines import Layers, configuration, engine_for, train
from ranks import Ranks
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dsprof.engine import initialize
from dsprof.engine.config import ConfigError, load
from dsprof.engine.pipe import PipelineModule

torch.set_num_threads(1)


def columns(line: str) -> dict[str, float]:
    """The numbers of a line `[step 1] time (ms) | fwd: 1.00 | ...`, and the step."""
    step = re.match(r"\[step (\d+)\]", line)
    assert step is not None, line
    return {"n": int(step[1])} | {name: float(value) for name, value in re.findall(r"(\w+): ([\d.]+)", line)}


# --- wall_clock_breakdown


class Sleep(torch.autograd.Function):
    """Takes set times, in ms, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.backward_ms = backward
        time.sleep(forward / 1e3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.backward_ms / 1e3)
        return grad, None, None


class Sleeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Sleep.apply(self.linear(x), 20, 40)  # type: ignore[no-untyped-call]
        return y.square().mean()


class SleepingSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        time.sleep(0.01)
        super().step(closure)


def test_wall_clock_lies_between_the_work_and_what_is_measured_around_it(tmp_path: Path) -> None:
    spent = dict.fromkeys(("fwd", "bwd", "step"), 0.0)
    curves = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    config = configuration(
        wall_clock_breakdown=True, steps_per_print=3, gradient_accumulation_steps=2, tensorboard=curves,
        csv_monitor=curves, zero_allow_untested_optimizer=True,
    )  # fmt: skip
    del config["optimizer"]
    model, text = Sleeping(), io.StringIO()
    optimizer = SleepingSGD(model.parameters(), lr=0.1)
    with (
        contextlib.redirect_stdout(text),
        engine_for(model, config, optimizer=optimizer, dist_init_required=False) as engine,
    ):
        for _ in range(2 * 3):
            began = time.perf_counter()
            loss = engine(torch.ones(2, 8))
            after_forward = time.perf_counter()
            engine.backward(loss)
            after_backward = time.perf_counter()
            engine.step()
            over = time.perf_counter()
            spent["fwd"] += after_forward - began
            spent["bwd"] += after_backward - after_forward
            spent["step"] += over - after_backward
    progress, line = sorted(text.getvalue().splitlines(), reverse=True)
    told = columns(line)
    assert told["n"] == 3
    for name, slept in (("fwd", 2 * 20), ("bwd", 2 * 40), ("step", 10)):
        assert slept <= told[name] <= 1e3 * spent[name] / 3 + 0.01, name
    assert told["bwd_allreduce"] == told["recompute"] == told["reduce"] == 0
    assert told["bwd_inner"] == told["bwd"]
    speed = re.search(r"^step=3, skipped=0, .*, samples/sec: ([\d.]+)$", progress)
    assert speed is not None
    assert 2 * 2 * 3 / sum(spent.values()) * 0.99 <= float(speed[1]) <= 2 * 2 * 3 / 0.39  # 3 * (2 * 60 + 10) ms

    # The same, step by step, under DeepSpeed's names and against samples seen.
    names = {"fwd": "forward", "bwd": "backward", "bwd_inner": "backward_inner", "step": "step"}
    for column, name in names.items():
        points = scalars(tmp_path / "job", f"elapsed_time_ms_{name}")
        assert [samples for samples, _ in points] == [4, 8, 12]
        assert sum(ms for _, ms in points) / 3 == pytest.approx(told[column], abs=0.01)
    assert scalars(tmp_path / "job", "elapsed_time_ms_backward_allreduce") == [(4, 0), (8, 0), (12, 0)]


def waits(rank: int) -> dict[str, float]:
    """What rank 0 tells of a step in which the gradients, 256 bytes, take 0.4 s."""
    text = io.StringIO()
    config = configuration(wall_clock_breakdown=True)
    with contextlib.redirect_stdout(text), engine_for(Layers(1), config, link=640) as engine:
        train(engine, 1)
    return columns(text.getvalue()) if rank == 0 else {}


def test_the_wait_of_backward_for_gradients_is_reported(ranks: Ranks) -> None:
    told = ranks.run(2, waits)[0]
    assert 200 < told["bwd_allreduce"] < told["reduce"] + 200
    assert told["reduce"] >= 400
    assert told["bwd_inner"] == pytest.approx(told["bwd"] - told["bwd_allreduce"], abs=0.011)


def test_an_engine_tells_of_itself_alone() -> None:
    """And not of a second one in the same process, which takes other steps and other times."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.ExitStack() as engines:
        told = configuration(wall_clock_breakdown=True, flops_profiler={"enabled": True})
        first = engines.enter_context(engine_for(Layers(1), told, dist_init_required=False))
        second = engines.enter_context(engine_for(Sleeping(), configuration(), dist_init_required=False))
        spent = []
        for _ in range(2):
            train(second, 2)
            began = time.perf_counter()
            train(first, 1)
            spent.append(1e3 * (time.perf_counter() - began))
    lines = [columns(line) for line in text.getvalue().splitlines() if line.startswith("[step")]
    assert [line["n"] for line in lines] == [1, 2]
    for line, ms in zip(lines, spent, strict=True):
        assert line["fwd"] + line["bwd"] + line["step"] <= ms + 0.03  # the other one's come on top of it
    assert re.search(r"fwd flops: +256$", text.getvalue(), re.MULTILINE)


# --- comms_logger


def communicated(rank: int, stage: int) -> tuple[dict[tuple[str, int], int], dict[str, list[int]]]:
    """Counts by kind and bytes as the logger has them; and the bytes of every call of torch's, by its name."""
    calls: dict[str, list[int]] = {}

    def spy(name: str) -> Any:
        real = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.setdefault(name, []).append(args[0].nbytes if args else 0)
            return real(*args, **kwargs)

        return mock.patch.object(dist, name, call)

    config = configuration(stage, comms_logger={"enabled": True}, gradient_accumulation_steps=2)
    with engine_for(Layers(), config) as engine, contextlib.ExitStack() as spies:
        train(engine, 1)  # the first step settles the order of buckets
        logger = engine.metrics.monitors.comms
        assert logger is not None
        for comm in engine.zero.comms:
            comm.all_reduce(torch.zeros(1), "other").wait()  # what the lane had to do before is told
        logger.reset()
        for name in ("all_reduce", "broadcast", "isend", "irecv", "barrier", "all_gather_object"):
            spies.enter_context(spy(name))
        train(engine, 3)
        told = {(message.op, message.bytes): tally.count for message, tally in logger.tallies().items()}
    return told, calls


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_communications_are_those_that_torch_is_asked_for(ranks: Ranks, stage: int) -> None:
    for told, calls in ranks.run(2, communicated, stage):
        assert "barrier" not in calls  # nothing is synchronized for it
        whole = [size for (op, size), count in told.items() for _ in range(count) if op == "all_reduce"]
        assert sorted(whole) == sorted(calls.get("all_reduce", []))
        # gloo's reduce-scatters and all-gathers of two ranks are an exchange of half the message.
        halves = [size // 2 for (op, size), count in told.items() for _ in range(count) if op in EXCHANGES]
        assert sorted(halves) == sorted(calls.get("isend", [])) == sorted(calls.get("irecv", []))
        assert {op for op, _ in told} == ({"all_reduce"} if stage == 0 else {"all_reduce", *EXCHANGES})


EXCHANGES = ("reduce_scatter", "all_gather")


def piped(rank: int, section: dict[str, Any]) -> str:
    text = io.StringIO()
    torch.manual_seed(0)
    model = PipelineModule([nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)], num_stages=2, loss_fn=mse)
    config = configuration(train_batch_size=8, **section) | {"gradient_accumulation_steps": 4}
    with contextlib.redirect_stdout(text):
        engine, *_ = initialize(model=model, config=config, model_parameters=model.parameters())
        for _ in range(2):
            engine.train_batch(iter([(torch.ones(2, 4), torch.ones(2, 4))] * 4))
            engine.eval_batch(iter([(torch.ones(2, 4), torch.ones(2, 4))] * 4))
        if "comms_logger" in section:
            engine.log_summary()
        engine.destroy()
    return text.getvalue()


def mse(output: Tensor, labels: Tensor) -> Tensor:
    return (output - labels).square().mean()


def test_what_a_pipeline_receives_has_no_size_beforehand(ranks: Ranks) -> None:
    lines = ranks.run(2, piped, {"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["isend", "recv"]}})
    table = [line.split() for line in lines[0].splitlines()[1:]]
    # Rank 0 sends activations [2, 8] in 2 steps and as many evaluations, and gets the gradients of 2 steps.
    assert [(row[0], row[2:-4]) for row in table] == [("recv", ["-", "8"]), ("send", ["64", "B", "16"])]
    assert table[0][-2:] == ["-", "-"]


def test_kinds_that_the_engine_does_not_have_are_refused() -> None:
    section = {"enabled": True, "prof_all": False}
    names = ["all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"]
    config = load({"train_batch_size": 1, "comms_logger": {**section, "prof_ops": names}})
    assert config.comms_logger.prof_ops == ("all_gather", "reduce_scatter", "all_reduce")
    with pytest.raises(
        ConfigError, match='"allreduce" is no communication of the engine; write some of "all_gather", '
    ):
        load({"train_batch_size": 1, "comms_logger": {**section, "prof_ops": ["allreduce"]}})


# --- memory_breakdown

MIB = 2**20


class Wide(nn.Module):
    """Keeps 64 MiB from forward to backward, and takes 48 MiB for a moment, and 64 for the product."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        kept = x.expand(16 * MIB).clone()
        momentary = torch.ones(12 * MIB)
        return (self.gain * kept).sum() + momentary[0].item()


def test_memory_is_what_psutil_says() -> None:
    text, process = io.StringIO(), psutil.Process()
    config = configuration(memory_breakdown=True, train_batch_size=1, train_micro_batch_size_per_gpu=1)
    with contextlib.redirect_stdout(text), engine_for(Wide(), config, dist_init_required=False) as engine:
        for _ in range(2):
            seen = [process.memory_info().rss]
            loss = engine(torch.ones(1))
            seen.append(process.memory_info().rss)
            engine.backward(loss)
            del loss
            seen.append(process.memory_info().rss)
            engine.step()
            seen.append(process.memory_info().rss)
    number = r"([\d.]+) -> ([\d.]+), peak ([\d.]+)"
    told = re.search(rf"\[step 2\].*forward: {number}.*backward: {number}.*step: {number}", text.getvalue())
    assert told is not None
    values = list(map(float, told.groups()))
    for at in range(3):
        before, after, peak = values[3 * at : 3 * at + 3]
        assert before == pytest.approx(seen[at] / MIB, abs=12)
        assert after == pytest.approx(seen[at + 1] / MIB, abs=12)
        assert peak >= max(before, after) - 0.1
    before, after, peak = values[:3]
    assert 60 < after - before < 76
    assert 165 < peak - before < 190


# --- flops_profiler


def told_flops(text: str) -> tuple[int, int, int]:
    """Parameters, and operations forward and backward."""
    found = [re.search(rf"  {name}: +([\d.]+ ?[KM]?)$", text, re.MULTILINE) for name in FLOPS]
    factors = {"": 1, "K": 10**3, "M": 10**6}

    def number(shown: str) -> int:
        value, _, unit = shown.strip().partition(" ")
        return round(float(value) * factors[unit])

    params, forward, backward = (number(match[1]) if match else -1 for match in found)
    return params, forward, backward


FLOPS = ("params", "fwd flops", "bwd flops, recomputation included")


class Two(nn.Module):
    """[2, 8] -> 16 -> 8: 256 parameters; 512 operations a layer forward, and thrice that backward in all."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.up(x).relu())
        return y.square().mean()


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Two() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = [layer(x) for layer in self.layers]
        return losses[0] + losses[1]


def profiled(rank: int, stage: int, keys: dict[str, Any]) -> tuple[int, int, int]:
    text = io.StringIO()
    torch.manual_seed(0)
    config = configuration(stage, flops_profiler={"enabled": True}, gradient_accumulation_steps=2, **keys)
    x = torch.ones(2, 8)
    with contextlib.redirect_stdout(text), engine_for(Deep(), config, example=(x,)) as engine:
        train(engine, 2, lambda: x)
    return told_flops(text.getvalue())


def test_operations_are_those_that_torch_counts_too() -> None:
    model, counter = Deep(), FlopCounterMode(display=False)
    with counter:
        loss = model(torch.ones(2, 8))
    forward = counter.get_total_flops()
    with counter:
        loss.backward()
    assert (forward, counter.get_total_flops()) == (FORWARD, BACKWARD)


FORWARD = 2 * 2 * 512
BACKWARD = 2 * 3 * 512
"""Of the first layer's inputs no gradient is needed."""


def test_operations_of_a_rank(ranks: Ranks) -> None:
    whole = 2 * 256
    full = {"activation_checkpointing": {"policy": "full"}}
    assert ranks.run(2, profiled, 0, {})[0] == (whole, FORWARD, BACKWARD)
    assert ranks.run(2, profiled, 3, {})[0] == (whole, FORWARD, BACKWARD)  # parameters are counted whole
    assert ranks.run(2, profiled, 3, full)[0] == (whole, FORWARD, BACKWARD + FORWARD)
    half = ranks.run(2, profiled, 1, {"tensor_parallel": {"autotp_size": 2}})[0]
    assert half == (whole // 2, FORWARD // 2, BACKWARD // 2)


def staged(rank: int, pipeline: dict[str, Any]) -> tuple[str, dict[str, float]]:
    """What both profiles tell of a pipeline of 2 ranks and four layers [2, 8] -> 8, of 256 operations each."""
    text = io.StringIO()
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8, bias=False) for _ in range(4)]
    model = PipelineModule(layers, num_stages=2, loss_fn=mse, partition_method="uniform")
    config = configuration(
        flops_profiler={"enabled": True}, wall_clock_breakdown=True, pipeline=pipeline, gradient_accumulation_steps=4
    )
    with contextlib.redirect_stdout(text):
        engine, *_ = initialize(model=model, config=config, model_parameters=model.parameters())
        began = time.perf_counter()
        for _ in range(2):
            engine.eval_batch(iter([(torch.ones(2, 8), torch.ones(2, 8))] * 4))
            engine.train_batch(iter([(torch.ones(2, 8), torch.ones(2, 8))] * 4))
        spent = 1e3 * (time.perf_counter() - began)
        engine.destroy()
    if rank:
        return text.getvalue(), {}
    lines = [columns(line) for line in text.getvalue().splitlines() if line.startswith("[step")]
    return text.getvalue(), {name: sum(line[name] for line in lines) for name in lines[0]} | {"spent": spent}


@pytest.mark.parametrize(
    "pipeline",
    [{"schedule": "1f1b"}, {"schedule": "interleaved", "virtual_stages": 2}, {"schedule": "zero-bubble"}],
    ids=["1f1b", "interleaved", "zero-bubble"],
)
def test_operations_and_times_of_a_stage(ranks: Ranks, pipeline: dict[str, Any]) -> None:
    (text, times), (nothing, _) = ranks.run(2, staged, pipeline)
    assert nothing == ""
    # Two layers: one product each forward; backward two each, but one of the first layer of all.
    assert told_flops(text) == (128, 2 * 256, 3 * 256)
    assert 0 < times["fwd"] < times["spent"]
    assert 0 < times["bwd"] < times["spent"]


# --- curves


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    """Points of a curve, from TensorBoard's file; the CSV file has the same."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars(f"Train/Samples/{name}")]
    with (folder / f"Train_Samples_{name}.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["step", name]
    assert [int(row[0]) for row in rows] == [step for step, _ in found]
    assert [float(row[1]) for row in rows] == pytest.approx([value for _, value in found], rel=1e-6)
    return found


def test_curves_go_on_with_the_samples_seen(tmp_path: Path) -> None:
    """Also where a step has another number of them than before."""
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    losses = []
    for batch in (2, 4):
        config = configuration(
            train_micro_batch_size_per_gpu=batch, tensorboard=section, csv_monitor=section,
            fp16={"enabled": True, "auto_cast": True, "initial_scale_power": 4},
            scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 4,
                                                      "warmup_type": "linear"}},
        )  # fmt: skip
        with engine_for(Layers(), config, dist_init_required=False) as engine:
            if batch == 4:
                engine.load_checkpoint(tmp_path / "saved")
            for _ in range(2):
                loss = engine(torch.ones(batch, 8))
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
            engine.save_checkpoint(tmp_path / "saved")
    seen = [2, 4, 8, 12]
    assert scalars(tmp_path / "job", "train_loss") == [
        (samples, pytest.approx(loss, rel=1e-6)) for samples, loss in zip(seen, losses, strict=True)
    ]
    assert scalars(tmp_path / "job", "loss_scale") == [(samples, 16) for samples in seen]
    assert [samples for samples, _ in scalars(tmp_path / "job", "lr")] == seen
