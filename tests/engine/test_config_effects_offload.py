"""Keys of offloading and of its files, each seen to take effect: what lies where, and what is read and written when."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from config_coverage import alive
from engines import LAYER, WIDTH, Layers, configuration, engine_for, train
from spans import recorded
from torch import nn

from dsprof.engine.config import load
from dsprof.engine.hooks import Hooks, Span
from dsprof.engine.offload import Offload, OffloadError, disk, open_offload

torch.set_num_threads(1)

STEPS = 2
LAST = STEPS - 1


def states(folder: Path, **section: Any) -> dict[str, Any]:
    """A configuration with the states of four tiles on disk: SGD's momenta, a page each."""
    return configuration(
        1,
        zero={"sub_group_size": 0, "offload_optimizer": {"device": "nvme", "nvme_path": str(folder), **section}},
        optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
    )


def pieces(folder: Path, **section: Any) -> dict[str, Any]:
    """A configuration with the parameters on disk, each fetched when it is used."""
    offload = {"device": "nvme", "nvme_path": str(folder), "max_in_cpu": 0, **section}
    fetching = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    return configuration(3, zero={**fetching, "offload_param": offload})


def spans_of(config: dict[str, Any], model: nn.Module | None = None) -> list[Span]:
    """Of a training in this process."""
    with (
        recorded() as spans,  # to the end: what was written behind is over then
        engine_for(Layers() if model is None else model, config, dist_init_required=False) as engine,
    ):
        train(engine, STEPS)
    return spans


def copies(spans: list[Span], name: str) -> list[Span]:
    return [span for span in spans if (span.kind, span.name, span.step) == ("copy", name, LAST)]


def room(folder: Path) -> int:
    """Bytes that this process' files in `folder`, which have no name, take on the disk."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            if str(descriptor.readlink()).startswith(str(folder)):
                found = max(found, os.stat(descriptor).st_blocks * 512)
        except FileNotFoundError:
            continue  # closed meanwhile
    return found


# --- where


@alive("zero_optimization.offload_optimizer.device", "zero_optimization.offload_optimizer.nvme_path")
def test_states_on_disk(tmp_path: Path) -> None:
    spans = spans_of(states(tmp_path, device="none"))
    assert copies(spans, "read") == copies(spans, "write") == []
    spans = spans_of(states(tmp_path))
    assert [(span.purpose, span.value) for span in copies(spans, "read")] == [("optimizer", tile) for tile in range(4)]
    assert [span.value for span in copies(spans, "write")] == [0, 1, 2, 3]
    with engine_for(Layers(), states(tmp_path), dist_init_required=False):
        assert room(tmp_path) > 0
    with pytest.raises(OffloadError, match=r"offload_optimizer.nvme_path: .*nowhere does not exist"):
        spans_of(states(tmp_path / "nowhere"))


@alive("zero_optimization.offload_optimizer.device", "zero_optimization.offload_optimizer.ratio")
def test_states_in_host_memory() -> None:
    for device, ratio, names in (
        ("none", 1.0, []),
        ("cpu", 1.0, ["0", "1", "2", "3"]),
        ("cpu", 0.5, ["1", "3"]),
        ("cpu", 0.0, []),
    ):
        config = configuration(1, zero={"offload_optimizer": {"device": device, "ratio": ratio}})
        with engine_for(Layers(), config, dist_init_required=False) as engine:
            assert engine.states.hosted == [f"{name}.weight" for name in names]  # type: ignore[attr-defined]


@alive("zero_optimization.offload_param.device", "zero_optimization.offload_param.nvme_path")
def test_parameters_on_disk(tmp_path: Path) -> None:
    def read(device: str) -> set[str | None]:
        return {span.module for span in copies(spans_of(pieces(tmp_path, device=device)), "read")}

    assert read("none") == set()
    assert read("nvme") == {f"{layer}.weight" for layer in range(4)}
    assert read("cpu") == set()
    with engine_for(Layers(), pieces(tmp_path, device="cpu"), dist_init_required=False) as engine:
        assert not any(param.resident for param in engine.zero.params)
    with pytest.raises(OffloadError, match=r"offload_param.nvme_path: .*nowhere does not exist"):
        spans_of(pieces(tmp_path / "nowhere"))


@alive("zero_optimization.offload_param.max_in_cpu")
def test_parameters_that_may_stay_in_memory(tmp_path: Path) -> None:
    for most, on_disk in ((0, {0, 1, 2, 3}), (2 * LAYER, {2, 3}), (3 * LAYER - 1, {2, 3}), (10**9, set())):
        read = copies(spans_of(pieces(tmp_path, max_in_cpu=most)), "read")
        assert {span.module for span in read} == {f"{layer}.weight" for layer in on_disk}


@alive("zero_optimization.offload_optimizer.fast_init")
def test_room_for_states_is_taken_at_once_unless_the_beginning_is_to_be_fast(tmp_path: Path) -> None:
    for fast in (False, True):
        with engine_for(Layers(), states(tmp_path, fast_init=fast), dist_init_required=False) as engine:
            assert (room(tmp_path) > 0) is not fast
            train(engine, 1)
            assert room(tmp_path) > 0


@alive("zero_optimization.offload_optimizer.pin_memory", "zero_optimization.offload_param.pin_memory")
@pytest.mark.parametrize("pin", [True, False])
def test_memory_beside_a_gpu_is_page_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pin: bool) -> None:
    """All that this needs to know of the GPU is that there is one."""
    asked: list[bool] = []

    def make_master(device: torch.device, *, pin: bool) -> None:
        asked.append(pin)

    def aligned(nbytes: int, pin: bool | None = None) -> torch.Tensor:
        if pin is not None:  # else it is for something that no GPU reads
            asked.append(pin)
        return torch.empty(disk.round_up(nbytes), dtype=torch.uint8)

    def empty(*shape: Any, pin_memory: bool, **_: Any) -> torch.Tensor:
        asked.append(pin_memory)
        return torch.zeros(*shape)

    param = SimpleNamespace(name="weight", numel=4, make_master=make_master, shard=_OnGpu(4))

    def opened(config: dict[str, Any]) -> Offload:
        return open_offload(load(config), torch.device("cuda"), Hooks())

    monkeypatch.setattr(disk, "aligned", aligned)
    offload = opened(configuration(1, zero={"offload_optimizer": {"device": "cpu", "pin_memory": pin}}))
    offload.states.make_master(param)  # type: ignore[arg-type]
    offload = opened(states(tmp_path, pin_memory=pin))
    offload.states._pool.take(100)  # type: ignore[attr-defined]
    offload.close()
    offload = opened(pieces(tmp_path, pin_memory=pin))
    offload.offload_shard.__self__._pool.take(100)  # type: ignore[union-attr]
    offload.close()
    assert asked == [pin] * 3
    offload = opened(pieces(tmp_path, device="cpu", pin_memory=pin))
    monkeypatch.setattr(torch, "empty", empty)
    assert offload.offload_shard is not None
    offload.offload_shard(param)  # type: ignore[arg-type]
    assert asked == [pin] * 4


class _OnGpu(torch.Tensor):
    is_cuda = True  # type: ignore[assignment]


# --- when


def tiles(spans: list[Span]) -> list[Span]:
    return [span for span in spans if (span.kind, span.name, span.step) == ("phase", "optimizer", LAST)]


@alive("zero_optimization.offload_optimizer.pipeline_read", "zero_optimization.offload_optimizer.buffer_count")
def test_tiles_are_read_ahead(tmp_path: Path) -> None:
    """As many as there are buffers for, beside the one in use."""

    def ahead(**section: Any) -> int:
        """Tiles that had been asked for when the first one was computed."""
        spans = spans_of(states(tmp_path, **section))
        return sum((span.issue_ns or 0) < tiles(spans)[0].start_ns for span in copies(spans, "read")[1:])

    assert ahead() == 0
    assert ahead(pipeline_read=True, buffer_count=1) == 0
    assert ahead(pipeline_read=True, buffer_count=2) == 1
    assert ahead(pipeline_read=True, buffer_count=4) == 3


@alive("zero_optimization.offload_optimizer.pipeline_write")
def test_tiles_are_written_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwritev

    def slow(descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        time.sleep(0.03)
        return write(descriptor, parts, offset)

    monkeypatch.setattr(os, "pwritev", slow)

    def behind(pipeline: bool) -> int:
        """Tiles of the first step that were still being written when the next one was computed."""
        spans = spans_of(states(tmp_path, pipeline_write=pipeline))
        wrote = [span for span in spans if (span.kind, span.name) == ("copy", "write")]
        computed = [span for span in spans if (span.kind, span.name) == ("phase", "optimizer")]
        assert [span.value for span in wrote[:4]] == [span.value for span in computed[:4]] == [0, 1, 2, 3]
        return sum((w.end_ns or 0) > after.start_ns for w, after in zip(wrote[:3], computed[1:4], strict=True))

    assert behind(False) == 0
    assert behind(True) > 0


@alive("zero_optimization.offload_param.buffer_size")
def test_parameters_pass_through_buffers(tmp_path: Path) -> None:
    """Weights of 4 pages, 1024 elements each."""

    def read(size: int) -> list[int | None]:
        model = nn.Sequential(nn.Linear(WIDTH, 512, bias=False), nn.Linear(512, WIDTH, bias=False))
        config = pieces(tmp_path, buffer_size=size)
        with (
            engine_for(_Mean(model), config, dist_init_required=False) as engine,
            recorded() as spans,
        ):
            train(engine, STEPS)
        return [span.bytes for span in copies(spans, "read")]

    assert read(10**6) == 2 * [16384]  # backward needs the second one alone, which is still there
    assert read(2048) == 4 * [8192]
    assert read(1000) == 8 * [4096]


class _Mean(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x).square().mean()
        return y


@alive("zero_optimization.offload_param.buffer_count")
def test_parameters_are_read_ahead(tmp_path: Path) -> None:
    """As many as there are buffers for."""

    def ahead(count: int) -> int:
        """Parameters that had been asked for before the first layer ran, that layer's own included."""
        model = Layers(6)
        begun: list[int] = []
        model[0].register_forward_hook(lambda *_: begun.append(time.monotonic_ns()))
        with engine_for(model, pieces(tmp_path, buffer_count=count), dist_init_required=False) as engine:
            for _ in range(2):  # in the second, what comes next is known, and nothing is being written
                with torch.no_grad(), recorded() as spans:
                    engine(torch.ones(2, WIDTH))
        return sum(span.kind == "copy" and (span.issue_ns or 0) < begun[-1] for span in spans)

    # The first has been copied from its buffer by then, which is free again.
    assert [ahead(1), ahead(2), ahead(4)] == [2, 3, 5]


# --- requests


@alive("aio.block_size", "aio.queue_depth", "aio.intra_op_parallelism")
def test_requests_have_the_configured_size_and_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One weight of 10 pages, or 40 KB."""
    calls: list[tuple[int, list[int]]] = []
    threads: set[int] = set()
    read = os.preadv

    def note(descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        calls.append((offset // 4096, [len(part) // 4096 for part in parts]))
        threads.add(threading.get_ident())
        time.sleep(0.01)
        return read(descriptor, parts, offset)

    def requests(**aio: int) -> list[tuple[int, list[int]]]:
        """Offset, and lengths, in pages, of the parts of each request for the last read of the weight."""
        model = _Mean(nn.Linear(WIDTH, 1280, bias=False))
        with engine_for(model, {**pieces(tmp_path), "aio": aio}, dist_init_required=False) as engine:
            train(engine, 1)
            calls.clear()
            threads.clear()
            with torch.no_grad():
                engine(torch.ones(2, WIDTH))
            return sorted(calls)  # before the engine is destroyed, which leaves the model whole

    monkeypatch.setattr(os, "preadv", note)
    assert requests() == [(0, [10])]
    assert requests(block_size=8192) == [(0, [2, 2, 2, 2, 2])]
    assert requests(block_size=8192, queue_depth=3) == [(0, [2, 2, 2]), (6, [2, 2])]
    assert len(threads) == 1
    assert requests(intra_op_parallelism=2) == [(0, [5]), (5, [5])]
    assert len(threads) == 2


def test_a_wait_for_a_copy_bears_its_number(tmp_path: Path) -> None:
    """Also one that nobody has to stand still for, so that steps are alike."""
    spans = spans_of(states(tmp_path))
    numbers = [span.corr for span in spans if span.kind == "copy"]
    waits = [span for span in spans if span.kind == "wait" and span.corr is not None]
    assert len(numbers) == len(set(numbers))
    assert None not in numbers
    assert {span.corr for span in waits} <= set(numbers)
    of_last = [copy.corr for copy in copies(spans, "read")]
    assert of_last
    assert {span.corr for span in waits if span.name == "read"} >= set(of_last)
    assert len(waits) == len({span.corr for span in waits}), "each is told once"
