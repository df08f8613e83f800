"""The debugging sections, on spans made by hand and a clock that is set."""

from __future__ import annotations

import contextlib
import csv
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsprof.engine import monitors
from dsprof.engine.activation_checkpoint.policies import Full
from dsprof.engine.config import load
from dsprof.engine.hooks import FAILURES, Hooks, Listener, Span, subscribe
from dsprof.engine.monitors import comms_logger
from dsprof.engine.monitors.breakdown import HostMeter, HostTimer, MemoryBreakdown, WallClock
from dsprof.engine.monitors.comms_logger import CommsLogger, LoggedMessage, Sample, bus_factor, in_binary, stragglers
from dsprof.engine.monitors.flops import FlopsProfiler, ModuleCost, Profile, render
from dsprof.engine.monitors.writers import CsvWriter, Curves, TensorBoardWriter

torch.set_num_threads(1)


class Clock:
    def __init__(self) -> None:
        self.ms = 0.0

    def __call__(self) -> int:
        return round(self.ms * 1e6)


class Engine:
    """Hooks with a clock, and a script of what happens."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.hooks = Hooks(clock=self.clock)
        self.unsubscribe: list[Callable[[], None]] = []

    def listen(self, *listeners: Listener) -> None:
        self.unsubscribe += [subscribe(listener) for listener in listeners]

    def take(self, ms: float, kind: Any, name: str, **about: Any) -> None:
        with self.hooks.span(kind, name, **about):
            self.clock.ms += ms


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    for end in engine.unsubscribe:
        end()
    assert FAILURES == []


@pytest.fixture
def said() -> list[str]:
    return []


# --- wall_clock_breakdown


def step_of(engine: Engine, scale: float = 1.0) -> None:
    for engine.hooks.microbatch in (0, 1):
        engine.take(10 * scale, "phase", "forward")
        with engine.hooks.span("phase", "backward"):
            engine.take(5 * scale, "phase", "recompute", lane="autograd")
            engine.take(3 * scale, "wait", "reduce_scatter", purpose="gradient")
            engine.take(1 * scale, "wait", "all_gather", purpose="parameter")
            engine.clock.ms += 11 * scale
    engine.take(8 * scale, "comm", "reduce_scatter", lane="comm.gradient", purpose="gradient")
    engine.take(8 * scale, "comm", "all_gather", lane="comm.parameter", purpose="parameter")
    with engine.hooks.span("phase", "step"):
        engine.take(2 * scale, "wait", "reduce_scatter", purpose="gradient")
        engine.clock.ms += 5 * scale
    engine.hooks.step += 1


def test_wall_clock_means_are_those_of_a_step(engine: Engine, said: list[str]) -> None:
    engine.listen(WallClock(2, said.append))
    for scale in (1, 3, 1, 1, 5):
        step_of(engine, scale)
    assert said == [
        "[step 2] time (ms) | fwd: 40.00 | bwd: 80.00 | bwd_inner: 68.00 | bwd_allreduce: 12.00 | step: 14.00 | "
        "recompute: 20.00 | reduce: 16.00",
        "[step 4] time (ms) | fwd: 20.00 | bwd: 40.00 | bwd_inner: 34.00 | bwd_allreduce: 6.00 | step: 7.00 | "
        "recompute: 10.00 | reduce: 8.00",
    ]


def test_a_resumed_runs_first_window_is_shorter(engine: Engine, said: list[str]) -> None:
    engine.listen(WallClock(4, said.append))
    engine.hooks.step = 3
    step_of(engine)
    assert said[0].startswith("[step 4] time (ms) | fwd: 20.00 |")


@pytest.fixture
def impatient_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("impatient_threads")
def test_wall_clock_hears_lanes_on_their_threads(said: list[str]) -> None:
    clock = WallClock(1, said.append)
    span = Span("comm", "all_reduce", "comm.gradient", 0, 0, 0, 0, 1000, purpose="gradient")

    def tell() -> None:
        for _ in range(2000):
            clock.end(span)

    threads = [threading.Thread(target=tell) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    clock.end(Span("phase", "step", "main", 0, 0, 0, 0, 0))
    assert said[0].endswith("reduce: 8.00")


# --- comms_logger


def comms(said: list[str], **options: Any) -> CommsLogger:
    return CommsLogger(**{"rank": 0, "group_size": {"dp": 4, "pair": 2}.__getitem__, "show": said.append, **options})


def communicate(engine: Engine, ms: float, name: str, size: int, seq: int, group: str = "dp") -> None:
    engine.take(ms, "comm", name, lane="comm.gradient", bytes=size, group=group, seq=seq, purpose="gradient")


def test_bus_factors_are_those_of_nccl_tests() -> None:
    assert bus_factor("all_reduce", 4) == 1.5
    assert bus_factor("all_gather", 4) == bus_factor("reduce_scatter", 4) == bus_factor("all_to_all", 4) == 0.75
    assert bus_factor("broadcast", 4) == bus_factor("send", 2) == 1.0
    assert bus_factor("all_reduce", 1) == bus_factor("all_gather", 1) == 0.0


def test_communications_are_counted_by_kind_group_and_size(engine: Engine, said: list[str]) -> None:
    logger = comms(said)
    engine.listen(logger)
    communicate(engine, 2, "all_reduce", 4_000_000, 0)
    communicate(engine, 6, "all_reduce", 4_000_000, 1)
    communicate(engine, 1, "all_reduce", 1_000_000, 0, group="pair")
    communicate(engine, 3, "all_gather", 3 * 2**20, 2)
    communicate(engine, 0, "broadcast", 0, 3)
    engine.take(9, "wait", "all_reduce", group="dp")
    logger.log_summary()
    assert said[0].splitlines() == [
        "Comm. Op         Ranks       Message Size              Count  Total Latency(ms)    Avg Latency(ms)"
        "       algbw (GB/s)       busbw (GB/s)",
        "all_gather           4               3 MB                  1               3.00               3.00"
        "               1.05               0.79",
        "all_reduce           2           976.6 KB                  1               1.00               1.00"
        "               1.00               1.00",
        "all_reduce           4           3.815 MB                  2               8.00               4.00"
        "               1.00               1.50",
        "broadcast            4                0 B                  1                  -                  -"
        "                  -                  -",
    ]
    logger.reset()
    assert logger.tallies() == {}


def test_each_communication_may_be_printed(engine: Engine, said: list[str]) -> None:
    engine.listen(comms(said, verbose=True, only=("all_reduce",)), comms(said, verbose=True, rank=1))
    communicate(engine, 2, "all_reduce", 2**21, 0)
    communicate(engine, 2, "all_gather", 2**21, 1)
    assert said == ["comm op: all_reduce | time (ms): 2.00 | msg size: 2 MB | algbw (GB/s): 1.05 | busbw (GB/s): 1.57"]


def test_sizes_without_end_do_not_fill_the_memory(
    engine: Engine, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comms_logger, "MAX_ROWS", 3)
    logger = comms(said)
    engine.listen(logger)
    for size in (100, 200, 300, 400, 500, 513, 100):
        communicate(engine, 1, "all_to_all", size, 0)
    assert {message.bytes: (tally.count, tally.bytes) for message, tally in logger.tallies().items()} == {
        100: (2, 200), 200: (1, 200), 300: (1, 300), 512: (2, 900), 1024: (1, 513),
    }  # fmt: skip


def test_sizes_as_deepspeed_writes_them() -> None:
    assert [in_binary(size) for size in (0, 1023, 1024, 1536, 2**20, 3 * 2**40)] == [
        "0 B", "1023 B", "1 KB", "1.5 KB", "1 MB", "3072 GB",
    ]  # fmt: skip


def test_stragglers_are_those_who_waited_least(engine: Engine, said: list[str]) -> None:
    big, pair = LoggedMessage("all_reduce", 3, 2**20), LoggedMessage("all_gather", 2, 64)

    def samples(*durations: int) -> list[Sample]:
        return [Sample("dp", seq, big, ns * 10**6) for seq, ns in enumerate(durations)]

    ranks = [
        samples(5, 9, 2, 7),
        [*samples(1, 1, 4), Sample("pair", 0, pair, 3 * 10**6), Sample("pair", 1, LoggedMessage("broadcast", 2, 8), 1)],
        [*samples(7, 5, 3), Sample("pair", 0, pair, 10**6), Sample("pair", 1, LoggedMessage("broadcast", 2, 8), 1)],
    ]
    found = stragglers(ranks)  # the fourth of rank 0 is missing on the others
    assert [(s.message, s.count, s.comm_ns, s.waited_ns, s.last_rank, s.last_count) for s in found] == [
        (pair, 1, 10**6, 2 * 10**6, 2, 1),
        (big, 3, 4 * 10**6, (4 + 6 + 8 + 4 + 2 + 1) * 10**6, 1, 2),
    ]
    logger = comms(said, gather=lambda mine: ranks)
    logger.log_summary(show_straggler=True)
    assert said[1].splitlines() == [
        "Breakdown with straggler effect",
        "Comm. Op         Ranks       Message Size              Count   Avg comm lat(ms)   Total waited(ms)"
        "        Mostly last        of the time",
        "all_gather           2               64 B                  1               1.00               2.00"
        "             rank 2              100 %",
        "all_reduce           3               1 MB                  3               1.33              25.00"
        "             rank 1               67 %",
    ]


def test_ranks_hand_over_what_is_recent(engine: Engine, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comms_logger, "RECENT", 2)
    handed: list[list[Sample]] = []
    logger = comms(said, rank=1, gather=handed.append)
    engine.listen(logger)
    for seq in range(3):
        communicate(engine, seq, "all_reduce", 8, seq)
    logger.log_summary(show_straggler=True)
    message = LoggedMessage("all_reduce", 4, 8)
    assert handed == [[Sample("dp", 1, message, 10**6), Sample("dp", 2, message, 2 * 10**6)]]
    assert said == []


# --- memory_breakdown


class Memory:
    def __init__(self) -> None:
        self.now = self.top = 0

    def set(self, mib: int) -> None:
        self.now = mib * 2**20
        self.top = max(self.top, self.now)

    def reset_peak_memory_stats(self) -> None:
        self.top = self.now

    def memory_allocated(self) -> int:
        return self.now

    def max_memory_allocated(self) -> int:
        return self.top


def test_memory_at_the_ends_of_the_phases(engine: Engine, said: list[str]) -> None:
    memory = Memory()
    engine.listen(MemoryBreakdown(memory, 2, said.append))
    memory.set(100)
    for higher in (50, 0):
        for name, during, after in (("forward", 300, 280), ("backward", 350, 120), ("step", 130, 100)):
            with engine.hooks.span("phase", name):
                memory.set(during + higher)
                with engine.hooks.span("phase", "recompute", lane="autograd"):
                    memory.set(during)
                memory.set(after)
        engine.hooks.step += 1
    assert said == [
        "[step 2] memory (MiB) | forward: 100.0 -> 280.0, peak 350.0 | backward: 280.0 -> 120.0, peak 400.0 | "
        "step: 120.0 -> 100.0, peak 180.0"
    ]


def test_the_hosts_memory_is_the_processs() -> None:
    meter = HostMeter()
    before = meter.memory_allocated()
    block = bytearray(64 * 2**20)
    block[:: 2**12] = b"x" * (2**26 // 2**12)  # touched, so that it is there
    grown = meter.memory_allocated() - before
    assert 60 * 2**20 < grown < 128 * 2**20
    assert meter.max_memory_allocated() >= before + 60 * 2**20
    del block


def test_where_the_peak_cannot_be_reset(tmp_path: Path) -> None:
    (tmp_path / "statm").write_text("9 3 1\n")
    (tmp_path / "status").write_text("Name:\tx\nVmHWM:\t    20 kB\n")
    meter = HostMeter(tmp_path / "none")
    meter.reset_peak_memory_stats()
    meter = HostMeter(tmp_path)
    assert meter.max_memory_allocated() == 20 * 1024
    meter.reset_peak_memory_stats()
    assert (tmp_path / "clear_refs").read_text() == "5"
    (tmp_path / "status").write_text("Name:\tx\n")
    assert meter.max_memory_allocated() == meter.memory_allocated()


# --- flops_profiler


class Ticks(nn.Module):
    """Takes a set time."""

    def __init__(self, clock: Clock, ms: float) -> None:
        super().__init__()
        self.clock = clock
        self.ms = ms

    def forward(self, x: Tensor) -> Tensor:
        self.clock.ms += self.ms
        return x


class Layer(nn.Module):
    def __init__(self, clock: Clock, ms: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8, bias=False)
        self.wait = Ticks(clock, ms)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.wait(x))
        return out[:, :4].tanh()


def flops_section(**keys: Any) -> Any:
    section = {"enabled": True, "profile_step": 1, **keys}
    return load({"train_batch_size": 1, "flops_profiler": section}).flops_profiler


def train(engine: Engine, model: nn.Module, steps: int, rows: Callable[[int], int] = lambda step: 2) -> None:
    for engine.hooks.step in range(steps):
        for engine.hooks.microbatch in (0, 1):
            with engine.hooks.span("phase", "forward"):
                loss = model(torch.ones(rows(engine.hooks.step), 4)).sum()
            with engine.hooks.span("phase", "backward"):
                loss.backward()
                engine.clock.ms += 20
        engine.take(5, "phase", "step")


def two_layers(clock: Clock) -> nn.Sequential:
    return nn.Sequential(Layer(clock, 3), Layer(clock, 1))


TABLE = """\
module                                          params          fwd flops            latency              FLOPS
(Sequential)                                        64 100.0 %        256 100.0 %    4.00 ms 100.0 %       64 K
  0 (Layer)                                         32  50.0 %        128  50.0 %    3.00 ms  75.0 %    42.67 K
    linear (Linear)                                 32  50.0 %        128  50.0 %    0.00 us   0.0 %          -
    wait (Ticks)                                     0   0.0 %          0   0.0 %    3.00 ms  75.0 %          0
  1 (Layer)                                         32  50.0 %        128  50.0 %    1.00 ms  25.0 %      128 K
    linear (Linear)                                 32  50.0 %        128  50.0 %    0.00 us   0.0 %          -
    wait (Ticks)                                     0   0.0 %          0   0.0 %    1.00 ms  25.0 %          0"""


def test_operations_and_times_of_every_module(engine: Engine, said: list[str]) -> None:
    model = two_layers(engine.clock)
    engine.listen(FlopsProfiler(model, flops_section(), HostTimer(engine.clock), said.append))
    train(engine, model, 1)
    assert said == []
    train(engine, model, 3)
    # A product of [2, 4] and [4, 8] is 128 operations, and so are the two of its backward; but one there, for the
    # first layer's input needs no gradient.
    assert [line.rstrip() for line in said[0].splitlines()] == [
        "-------------------------- flops profiler --------------------------",
        "Profile of step 1 (steps before it: 1), first micro-batch, this rank:",
        "  params:                                      64",
        "  fwd flops:                                   256",
        "  fwd latency:                                 4.00 ms",
        "  fwd FLOPS = fwd flops / fwd latency:         64 K",
        "  bwd flops, recomputation included:           384",
        "  bwd latency:                                 20.00 ms",
        "  bwd FLOPS = bwd flops / bwd latency:         19.2 K",
        "  step latency:                                5.00 ms",
        "  iter latency = fwd + bwd + step latency:     29.00 ms",
        "  FLOPS = (fwd + bwd flops) / iter latency:    22.07 K",
        "",
        "Top 1 modules in terms of params, flops or fwd latency at different model depths:",
        "depth 0:",
        "  params      Sequential 64",
        "  flops       Sequential 256",
        "  fwd latency Sequential 4.00 ms",
        "depth 1:",
        "  params      Layer 64",
        "  flops       Layer 256",
        "  fwd latency Layer 4.00 ms",
        "depth 2:",
        "  params      Linear 64",
        "  flops       Linear 256",
        "  fwd latency Ticks 4.00 ms",
        "",
        *TABLE.splitlines(),
    ]
    assert len(said) == 1
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


def profiled(engine: Engine, model: nn.Module, said: list[str], **train_options: Any) -> Profile:
    profiler = FlopsProfiler(model, flops_section(), HostTimer(engine.clock), said.append)
    kept: list[Profile] = []
    make = profiler._profile
    profiler._profile = lambda: kept.append(make()) or kept[0]  # type: ignore[func-returns-value, method-assign]
    engine.listen(profiler)
    train(engine, model, 2, **train_options)
    return kept[0]


def test_recomputation_is_counted_in_backward(engine: Engine, said: list[str]) -> None:
    model = two_layers(engine.clock)
    Full().apply(model, engine.hooks)
    profile = profiled(engine, model, said)
    assert profile.modules[0].flops == 256
    assert profile.backward_flops == 384 + 256


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return out


class Heads(nn.Module):
    """[rows, 4] as one sequence in 2 heads of width 16."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(4, 32, bias=False)
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        wide = self.widen(x).view(1, rows, 2, 16).transpose(1, 2)
        out: Tensor = self.attention(wide)
        return out


def test_attention_counts_on_cpu_too(engine: Engine, said: list[str]) -> None:
    profile = profiled(engine, Heads(), said, rows=lambda step: 8)
    costs = {module.name: module.flops for module in profile.modules}
    product = 2 * 2 * 8 * 8 * 16  # heads, and scores or values of 8 rows
    assert costs == {"": 2048 + 2 * product, "widen": 2048, "attention": 2 * product}
    assert profile.backward_flops == 5 * product + 2048


class Trying(nn.Module):
    """Has a module fail, and does without it."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong = nn.Linear(5, 5)
        self.right = nn.Linear(4, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError):
            self.wrong(x)
        out: Tensor = self.right(x)
        return out


def test_modules_that_fail_do_not_shift_the_others(engine: Engine, said: list[str]) -> None:
    profile = profiled(engine, nn.Sequential(Ticks(engine.clock, 2), Trying()), said)
    assert {module.name: (module.flops, module.seconds) for module in profile.modules} == {
        "": (128, 0.002), "0": (0, 0.002), "1": (128, 0.0), "1.wrong": (0, 0.0), "1.right": (128, 0.0),
    }  # fmt: skip


def test_the_first_micro_batch_of_a_step_is_meant(engine: Engine, said: list[str]) -> None:
    """All forwards of it, but not other micro-batches, nor an evaluation in between."""
    clock = engine.clock
    model = two_layers(clock)
    engine.listen(FlopsProfiler(model, flops_section(), HostTimer(clock), said.append))
    train(engine, model, 1)
    engine.hooks.step = 1
    for engine.hooks.microbatch, phase in ((0, "forward"), (0, "eval"), (0, "forward"), (1, "forward")):
        with engine.hooks.span("phase", phase):
            model(torch.ones(2, 4))
    engine.take(5, "phase", "step")
    assert "  fwd latency:                                 8.00 ms" in said[0].splitlines()


def test_a_batch_of_another_size_is_told(engine: Engine, said: list[str]) -> None:
    profile = profiled(engine, two_layers(engine.clock), said, rows=lambda step: 2 + step)
    assert profile.elements == (8, 12)
    assert "  flops are those of step 0, whose input had 8 elements; this one's has 12" in said[0].splitlines()


def test_a_resumed_run_counts_in_the_step_itself(engine: Engine, said: list[str]) -> None:
    model = two_layers(engine.clock)
    engine.listen(FlopsProfiler(model, flops_section(), HostTimer(engine.clock), said.append))
    engine.hooks.step = 1
    with engine.hooks.span("phase", "forward"):
        model(torch.ones(2, 4))
    engine.take(5, "phase", "step")
    assert "  fwd flops:                                   256" in said[0].splitlines()
    assert "  bwd latency:                                 0.00 us" in said[0].splitlines()


def test_a_step_without_the_model(engine: Engine, said: list[str]) -> None:
    engine.listen(FlopsProfiler(two_layers(engine.clock), flops_section(), HostTimer(engine.clock), said.append))
    engine.hooks.step = 1
    engine.take(5, "phase", "step")
    assert said == ["flops profiler: no forward of the model was seen in step 1"]


def test_a_forward_that_fails_leaves_nothing_behind(engine: Engine, said: list[str]) -> None:
    model = two_layers(engine.clock)
    engine.listen(FlopsProfiler(model, flops_section(), HostTimer(engine.clock), said.append))
    with pytest.raises(RuntimeError), engine.hooks.span("phase", "forward"):
        model(torch.ones(2, 3))
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


PROFILE = Profile(
    4,
    (
        ModuleCost("", "GPT", 3_000_000, 5_000_000_000, 0.5),
        ModuleCost("a", "Block", 2_000_000, 1_000_000_000, 0.1),
        ModuleCost("a.mlp", "MLP", 1_000, 10, 0.0001),
        ModuleCost("b", "Head", 1_000_000, 4_000_000_000, 0.4),
    ),
    10_000_000_000, 1.0, 0.5, (8, 8),
)  # fmt: skip


def test_what_the_table_shows_is_set() -> None:
    text = render(PROFILE, flops_section(module_depth=1, top_modules=2, detailed=False))
    assert text.splitlines()[-9:] == [
        "Top 2 modules in terms of params, flops or fwd latency at different model depths:",
        "depth 0:",
        "  params      GPT 3 M",
        "  flops       GPT 5 G",
        "  fwd latency GPT 500.00 ms",
        "depth 1:",
        "  params      Block 2 M, Head 1 M",
        "  flops       Head 4 G, Block 1 G",
        "  fwd latency Head 400.00 ms, Block 100.00 ms",
    ]
    assert "    mlp (MLP)" in render(PROFILE, flops_section())
    assert "depth 2:" in render(PROFILE, flops_section(module_depth=9))


def test_the_table_may_go_to_a_file(engine: Engine, said: list[str], tmp_path: Path) -> None:
    model = two_layers(engine.clock)
    path = tmp_path / "new" / "flops.txt"
    section = flops_section(output_file=str(path), detailed=False)
    engine.listen(FlopsProfiler(model, section, HostTimer(engine.clock), said.append))
    train(engine, model, 2)
    assert path.read_text().endswith("  fwd latency Ticks 4.00 ms\n")
    assert said == []


# --- tensorboard, csv_monitor


def gauges(engine: Engine, steps: range) -> None:
    for engine.hooks.step in steps:
        engine.hooks.mark("train_loss", kind="gauge", value=1 / (1 + engine.hooks.step))
        engine.hooks.mark("lr", kind="gauge", value=1e-3)
        engine.hooks.mark("live_parameters", kind="gauge", value=5.0)
        engine.hooks.mark("train_loss", value=5.0)


def rows(path: Path) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_a_csv_file_for_each_gauge(engine: Engine, tmp_path: Path) -> None:
    section = load(
        {"train_batch_size": 8, "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    ).csv_monitor
    for steps in (range(2), range(2, 3)):  # the second run goes on where the first was
        curves = Curves([CsvWriter(section)], lambda: 8 * (engine.hooks.step + 1))
        unsubscribe = subscribe(curves)
        gauges(engine, steps)
        unsubscribe()
        lines = rows(tmp_path / "job" / "Train_Samples_lr.csv")
        assert lines[-1] == [str(8 * steps.stop), "0.001"]  # although it is not closed yet
        curves.close()
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == [
        "Train_Samples_lr.csv", "Train_Samples_train_loss.csv",
    ]  # fmt: skip
    assert rows(tmp_path / "job" / "Train_Samples_train_loss.csv") == [
        ["step", "train_loss"], ["8", "1.0"], ["16", "0.5"], ["24", repr(1 / 3)],
    ]  # fmt: skip


def test_tensorboard_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match='not installed: `pip install tensorboard`, or write "csv_monitor" instead'):
        TensorBoardWriter(SimpleNamespace(output_path=str(tmp_path), job_name="job"))  # type: ignore[arg-type]


# --- all of them


def everything(tmp_path: Path) -> dict[str, Any]:
    folder = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    return {
        "train_batch_size": 4,
        "wall_clock_breakdown": True,
        "memory_breakdown": True,
        "comms_logger": {"enabled": True},
        "flops_profiler": {"enabled": True},
        "tensorboard": folder,
        "csv_monitor": folder,
    }


def started(
    engine: Engine, source: dict[str, Any], model: nn.Module, said: list[str], rank: int = 0
) -> monitors.Monitors:
    return monitors.start(
        load(source), engine.hooks, model=model, device=torch.device("cpu"), rank=rank, group_size=lambda group: 2,
        samples=lambda: 4 * (engine.hooks.step + 1), show=said.append,
    )  # fmt: skip


@pytest.mark.parametrize("rank", [0, 1])
def test_what_the_configuration_enables_listens(engine: Engine, said: list[str], tmp_path: Path, rank: int) -> None:
    model = two_layers(engine.clock)
    running = started(engine, everything(tmp_path), model, said, rank)
    train(engine, model, 2)
    gauges(engine, range(1))
    communicate(engine, 1, "all_reduce", 8, 0)
    assert running.comms is not None
    assert running.comms.tallies()[LoggedMessage("all_reduce", 2, 8)].count == 1
    running.stop()
    assert not engine.hooks.listening
    firsts = [text.splitlines()[0].split("|")[0] for text in said]
    assert firsts == ([] if rank else [
        "[step 1] time (ms) ", "[step 1] memory (MiB) ", "[step 2] time (ms) ", "[step 2] memory (MiB) ",
        "-" * 26 + " flops profiler " + "-" * 26,
    ])  # fmt: skip
    assert len(list(tmp_path.rglob("*.csv"))) == (0 if rank else 2 + 5)
    assert len(list(tmp_path.rglob("events.out.tfevents.*"))) == (0 if rank else 1)


def test_nothing_is_enabled_by_itself(engine: Engine, said: list[str], tmp_path: Path) -> None:
    running = started(engine, {"train_batch_size": 1}, two_layers(engine.clock), said)
    assert not engine.hooks.listening
    assert running.comms is None
    running.stop()
