"""Offloading: the same weights from less memory, and disks that cannot take it."""

from __future__ import annotations

import copy
import errno
import itertools
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from engines import ALONE
from models import Small, batches, build
from ranks import Ranks
from slow_cases import slow_but
from spans import named
from torch import Tensor, nn

from dsprof.engine import initialize
from dsprof.engine.comm.comm import open_comm
from dsprof.engine.comm.lane import CpuLane
from dsprof.engine.config import Config, ZeroConfig, load
from dsprof.engine.config.zero import AioConfig, OffloadOptimizerConfig, OffloadParamConfig
from dsprof.engine.hooks import Attributes, Hooks, Span
from dsprof.engine.offload import InMemory, Offload, OffloadError, open_offload
from dsprof.engine.offload.disk import PAGE, Disk, Pool, aligned, as_bytes
from dsprof.engine.offload.optimizer import OnDisk
from dsprof.engine.offload.params import ShardFile
from dsprof.engine.optim import build as build_optimizer
from dsprof.engine.zero import Comms, Zero
from dsprof.engine.zero.bucket import Bucket
from dsprof.engine.zero.gather import update_shards
from dsprof.engine.zero.shard import ShardedParam
from dsprof.engine.zero.shares import Partition, equal
from dsprof.engine.zero.storage import placeholder

CPU = torch.device("cpu")
ABOUT: Attributes = {"purpose": "other"}

torch.set_num_threads(1)


@contextmanager
def disk(folder: Path, *, key: str = "nvme_path", **aio: int) -> Iterator[Disk]:
    opened = Disk(folder, AioConfig(**aio), Hooks(), key=key)
    try:
        yield opened
    finally:
        opened.close()


def numbers(nbytes: int) -> Tensor:
    memory = aligned(nbytes)
    memory.copy_(torch.randint(0, 256, (memory.numel(),), dtype=torch.uint8))
    return memory


# --- files


def test_memory_is_aligned_and_can_be_seen_as_bytes() -> None:
    memory = aligned(5000)
    assert (memory.data_ptr() % PAGE, memory.nbytes) == (0, 8192)
    memory.zero_()
    as_bytes(memory)[1] = 7
    assert memory[:3].tolist() == [0, 7, 0]


@pytest.mark.parametrize("aio", [{}, {"block_size": 4096, "queue_depth": 2}, {"intra_op_parallelism": 3}])
def test_what_is_written_is_read(tmp_path: Path, aio: dict[str, int]) -> None:
    with disk(tmp_path, **aio) as opened:
        file = opened.open("a test")
        first, second = file.allocate(300_000), file.allocate(20_000)
        assert (first, second, file.size) == (0, 303_104, 323_584)
        wrote = [numbers(300_000), numbers(20_000)]
        for ticket in [file.write(second, wrote[1], ABOUT), file.write(first, wrote[0], ABOUT)]:
            ticket.wait()
        got = [aligned(300_000), aligned(20_000)]
        for ticket in [file.read(first, got[0], ABOUT), file.read(second, got[1], ABOUT)]:
            ticket.wait()
        assert all(map(torch.equal, wrote, got))
        assert torch.equal(file.mapped(), torch.cat(wrote))


def test_room_is_taken_at_once_and_no_file_is_left(tmp_path: Path) -> None:
    with disk(tmp_path) as opened:
        file = opened.open("a test")
        file.allocate(1_000_000)
        assert os.fstat(file.descriptor).st_blocks * 512 >= 1_000_000
        assert list(tmp_path.iterdir()) == []  # a job that is killed leaves nothing behind
        got = aligned(PAGE).fill_(1)
        file.read(0, got, ABOUT).wait()
        assert not got.any()


def test_transfers_are_told_of(tmp_path: Path, spans: list[Span]) -> None:
    with disk(tmp_path) as opened:
        file = opened.open("a test")
        file.write(file.allocate(5000), numbers(5000), {"purpose": "optimizer", "value": 3.0}).wait()
        file.read(0, aligned(5000), {"purpose": "parameter", "module": "blocks.1.weight"}).wait()
    wrote, read = named(spans, "copy", "write") + named(spans, "copy", "read")
    assert (wrote.lane, wrote.bytes, wrote.purpose, wrote.value) == ("io.nvme.write", 8192, "optimizer", 3.0)
    assert (read.lane, read.bytes, read.purpose, read.module) == ("io.nvme.read", 8192, "parameter", "blocks.1.weight")
    assert read.issue_ns is not None
    assert read.end_ns is not None
    assert read.issue_ns <= read.start_ns <= read.end_ns


def test_requests_are_as_large_and_as_many_as_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, list[int]]] = []
    threads = set()
    write = os.pwritev

    def note(descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        calls.append((offset, [len(part) for part in parts]))
        threads.add(threading.get_ident())
        time.sleep(0.01)
        return write(descriptor, parts, offset)

    monkeypatch.setattr(os, "pwritev", note)
    with disk(tmp_path, block_size=8192, queue_depth=3) as opened:
        calls.clear()  # of the probe
        file = opened.open("a test")
        file.write(file.allocate(40_960), numbers(40_960), ABOUT).wait()
    assert calls == [(0, [8192, 8192, 8192]), (24_576, [8192, 8192])]
    with disk(tmp_path, intra_op_parallelism=2) as opened:
        calls.clear()
        threads.clear()
        file = opened.open("a test")
        file.write(file.allocate(40_960), numbers(40_960), ABOUT).wait()
    assert sorted(calls) == [(0, [20_480]), (20_480, [20_480])]
    assert len(threads) == 2


def test_without_direct_access_the_page_cache_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = os.open

    def no_direct(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return plain(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", no_direct)
    with disk(tmp_path) as opened:
        assert opened.note == f"{tmp_path} has no O_DIRECT"
        file = opened.open("a test")
        wrote, got = numbers(PAGE), aligned(PAGE)
        file.write(file.allocate(PAGE), wrote, ABOUT).wait()
        file.read(0, got, ABOUT).wait()
        assert torch.equal(wrote, got)


def test_buffers_are_used_again_and_never_more_than_configured() -> None:
    class Written:
        done = False

        def wait(self) -> None:
            self.done = True

    pool = Pool("parameters", 2, CPU)
    first, second = pool.take(PAGE), pool.take(PAGE)
    assert first is not None
    assert second is not None
    assert pool.take(PAGE, wait=False) is None
    ticket = Written()
    pool.give(first, after=ticket)  # type: ignore[arg-type]
    assert pool.take(PAGE, wait=False) is None
    assert pool.take(3 * PAGE) is first
    assert ticket.done
    assert first.memory.nbytes == 3 * PAGE


def test_what_is_elsewhere_cannot_be_taken_for_something() -> None:
    absent = placeholder((2, 3), torch.float32)
    assert absent.shape == (2, 3)
    assert absent.isnan().all()
    with pytest.raises(RuntimeError):
        absent.add_(1)


# --- disks that cannot take it


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OffloadError) as raised, disk(tmp_path / "no", key="zero_optimization.offload_param.nvme_path"):
        pass
    assert str(raised.value) == (
        f"zero_optimization.offload_param.nvme_path: {tmp_path}/no does not exist: make it on every machine, or write "
        "another folder"
    )
    (tmp_path / "file").touch()
    with pytest.raises(OffloadError, match="is not a folder: write one on the local disk"), disk(tmp_path / "file"):
        pass


def step(store: OnDisk, optimizer: torch.optim.Optimizer, shard: OneShard) -> None:
    for _ in store.through():
        shard.master.grad = torch.ones_like(shard.master)
        optimizer.step()


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_room_that_is_not_there_is_an_error_before_training(tmp_path: Path) -> None:
    with disk(tmp_path) as opened:
        store = OnDisk(opened, CPU, OffloadOptimizerConfig(device="nvme"))
        master = OneShard(torch.zeros(200_000)).made(store)
        optimizer = torch.optim.AdamW([master.master])
        with largest_file(1_000_000), pytest.raises(OffloadError) as raised:
            store.attach(optimizer, [[master]])
    assert str(raised.value) == (
        f"nvme_path: {tmp_path}: what the optimizer keeps needs a file of 2.4 MB, which is above the limit: raise it "
        "(`ulimit -f`)"
    )


def test_fast_init_takes_the_room_when_it_is_needed(tmp_path: Path) -> None:
    with disk(tmp_path) as opened:
        store = OnDisk(opened, CPU, OffloadOptimizerConfig(device="nvme", fast_init=True))
        master = OneShard(torch.zeros(200_000)).made(store)
        optimizer = torch.optim.AdamW([master.master])
        store.attach(optimizer, [[master]])
        with largest_file(1_000_000), pytest.raises(OffloadError, match="which is above the limit"):
            step(store, optimizer, master)


def test_a_disk_that_fails_later_fails_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, broken = os.pwritev, False

    def fail(descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        if broken:
            raise OSError(errno.EIO, "Input/output error")
        return write(descriptor, parts, offset)

    monkeypatch.setattr(os, "pwritev", fail)
    with disk(tmp_path) as opened:
        store = OnDisk(opened, CPU, OffloadOptimizerConfig(device="nvme"))
        master = OneShard(torch.zeros(100)).made(store)
        optimizer = torch.optim.AdamW([master.master])
        store.attach(optimizer, [[master]])
        broken = True
        with pytest.raises(OffloadError) as raised:
            step(store, optimizer, master)
    assert str(raised.value) == f"nvme_path: {tmp_path}: what the optimizer keeps: Input/output error"


IN_A_MOUNT = """
import sys
from pathlib import Path
from dsprof.engine.config.zero import AioConfig
from dsprof.engine.hooks import Hooks
from dsprof.engine.offload.disk import Disk
folder = Path(sys.argv[1])
try:
    Disk(folder, AioConfig(), Hooks()).open("a test").allocate(3_000_000)
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("size=1m", "OffloadError nvme_path: {} is full: a test needs 3.0 MB more on rank 0, and 1.0 MB are free. "
                    "Make room, or write a folder on a larger disk"),
        ("ro", "OffloadError nvme_path: {} cannot be written to (Read-only file system): write a folder that this user "
               "may write to"),
    ],
    ids=["full", "read-only"],
)  # fmt: skip
def test_disks_that_are_full_or_read_only(tmp_path: Path, options: str, expected: str) -> None:
    inside = shutil.which("unshare") and ["unshare", "-rm", "sh", "-c"]
    mount = f"mount -t tmpfs -o {options} none {tmp_path}"
    if not inside or subprocess.run([*inside, mount], capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a file system of our own")
    (tmp_path / "program.py").touch()
    done = subprocess.run(
        [*inside, f'{mount} && exec "$0" -c "$1" {tmp_path}', sys.executable, IN_A_MOUNT],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.strip() == expected.format(tmp_path), done.stderr


# --- masters and states


class OneShard(ShardedParam):
    """A bf16 parameter of one rank, so that its master is a copy."""

    def __init__(self, values: Tensor, name: str = "weight") -> None:
        param = nn.Parameter(values.bfloat16())
        super().__init__(name, param, Partition(values.numel(), equal(1)), 0, ALONE, persistent=True, index=0)

    def made(self, store: OnDisk | InMemory) -> OneShard:
        store.make_master(self)
        return self


def test_a_share_of_the_elements_is_offloaded() -> None:
    store = InMemory(CPU, 0.5)
    for number in range(8):
        OneShard(torch.zeros(10), f"layer{number}").made(store)
    assert store.hosted == ["layer1", "layer3", "layer5", "layer7"]
    for ratio, expected in ((0.0, 0), (0.25, 20), (0.9, 70), (1.0, 80)):
        store = InMemory(CPU, ratio)
        for _ in range(8):
            OneShard(torch.zeros(10)).made(store)
        assert store.hosted_elements == expected


def stepped(store: OnDisk | InMemory, make: Any, sizes: Sequence[int], steps: int = 4) -> tuple[list[OneShard], Any]:
    """Train parameters of these sizes, one a tile, and the second not in the first step."""
    torch.manual_seed(3)
    shards = [OneShard(torch.randn(size), f"p{size}").made(store) for size in sizes]
    optimizer = make([shard.master for shard in shards])
    store.attach(optimizer, [[shard] for shard in shards])
    for step in range(steps):
        for number, tile in enumerate(store.through()):
            for shard in tile:
                grad = torch.randn(shard.master.shape, generator=torch.Generator().manual_seed(99 * step + number))
                shard.master.grad = grad if (step, number) != (0, 1) else None
            optimizer.step()
            for shard in tile:
                shard.master.grad = None
            update_shards(tile)
    return shards, optimizer


OPTIMIZERS = {
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "stateless": lambda params: torch.optim.SGD(params, lr=0.1),
    "rprop": torch.optim.Rprop,
    "lion": lambda params: build_optimizer("Lion", {"lr": 0.01}, params),
    "unknown": lambda params: Strange(params, lr=0.1),
    "no correction": lambda params: build_optimizer("AdamW", {"lr": 0.1, "bias_correction": False}, params),
}


class Strange(torch.optim.Adam):
    """An optimizer that nothing is known of, with a state of another dtype, one that is replaced, and one of another
    shape.
    """

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["signs"] = (param.grad > 0).to(torch.int8) + state.get("signs", 0)
                    state["count"] = torch.zeros(3) + state["step"]
                    param.data.sub_(0.01 * state["signs"] * state["count"][0])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pipeline_read": True, "pipeline_write": True},
        {"buffer_count": 1},
        {"fast_init": True, "pipeline_read": True, "buffer_count": 2},
    ],
    ids=str,
)
def test_any_optimizer_steps_the_same_from_disk(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    expected, optimizer = stepped(InMemory(CPU), OPTIMIZERS[name], [100, 3000, 17, 1])
    with disk(tmp_path, block_size=4096) as opened:
        store = OnDisk(opened, CPU, OffloadOptimizerConfig(device="nvme", **settings))
        found, restored = stepped(store, OPTIMIZERS[name], [100, 3000, 17, 1])
        for shard, other in zip(found, expected, strict=True):
            assert torch.equal(shard.param, other.param)
            assert shard.master.untyped_storage().nbytes() == 4  # nothing of it is in memory
        for _ in store.through():
            pass
        with store.at_once(changed=False):
            for shard, other in zip(found, expected, strict=True):
                assert torch.equal(shard.master, other.master)
                have, want = restored.state[shard.master], optimizer.state[other.master]
                assert have.keys() == want.keys()
                assert all(torch.equal(have[key], want[key]) for key in have if isinstance(have[key], Tensor))


def test_room_for_states_is_taken_before_there_are_any(tmp_path: Path) -> None:
    with disk(tmp_path) as opened:
        for name, each in (("fused", 12), ("amsgrad", 16), ("momentum", 8), ("stateless", 4), ("unknown", 4)):
            store = OnDisk(opened, CPU, OffloadOptimizerConfig(device="nvme"))
            shard = OneShard(torch.zeros(10_240)).made(store)
            store.attach(OPTIMIZERS[name]([shard.master]), [[shard]])
            assert store._file.size == 10_240 * each, name


def test_looking_for_the_states_leaves_the_optimizer_as_it_is(tmp_path: Path) -> None:
    with disk(tmp_path) as opened:
        store = OnDisk(opened, CPU, OffloadOptimizerConfig(device="nvme"))
        shard = OneShard(torch.zeros(10)).made(store)
        optimizer = torch.optim.AdamW([shard.master])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        heard = []
        optimizer.register_step_post_hook(lambda *_: heard.append(1))
        store.attach(optimizer, [[shard]])
        assert not optimizer.state
        assert not heard
        with pytest.warns(UserWarning, match="before `optimizer.step"):
            scheduler.step()  # for which no step has been taken


def test_states_can_be_replaced_as_a_checkpoint_does(tmp_path: Path) -> None:
    with disk(tmp_path) as opened:
        store = OnDisk(opened, CPU, OffloadOptimizerConfig(device="nvme"))
        shards, optimizer = stepped(store, OPTIMIZERS["momentum"], [5, 4])
        first, second = shards
        with store.at_once():
            first.master.data.fill_(1.5)
            optimizer.state[second.master] = {"momentum_buffer": torch.full((4,), 2.5), "more": torch.ones(4)}
        seen = []
        for (shard,) in store.through():
            seen.append([shard.master.tolist(), *(value.tolist() for value in optimizer.state[shard.master].values())])
        assert seen[0][0] == [1.5] * 5
        assert seen[1][1:] == [[2.5] * 4, [1.0] * 4]


@pytest.mark.parametrize("way", ["clear", "pop one", "load", "within"])
def test_states_that_are_removed_or_replaced_do_not_come_back(tmp_path: Path, way: str) -> None:
    """Whoever does it: a script between steps, or a checkpoint, to go on as if there were no file."""
    found = []
    for on_disk in (True, False):
        with disk(tmp_path) as opened:
            section = OffloadOptimizerConfig(device="nvme")
            store: OnDisk | InMemory = OnDisk(opened, CPU, section) if on_disk else InMemory(CPU)
            shards, optimizer = stepped(store, OPTIMIZERS["amsgrad"], [5, 4])
            with store.at_once(changed=False):
                saved = copy.deepcopy(optimizer.state_dict())
            if way == "clear":
                optimizer.state.clear()
            elif way == "pop one":
                del optimizer.state[shards[1].master]
            elif way == "load":
                for state in saved["state"].values():
                    state["exp_avg"].fill_(0.5)
                optimizer.load_state_dict(saved)
                with store.at_once(changed=False):
                    assert optimizer.state[shards[1].master]["exp_avg"].tolist() == [0.5] * 4
            else:
                with store.at_once():
                    optimizer.state.pop(shards[0].master)
            for _ in range(2):
                for (shard,) in store.through():
                    shard.master.grad = torch.full_like(shard.master, 0.25)
                    optimizer.step()
                    shard.master.grad = None
            with store.at_once(changed=False):
                found.append([
                    [shard.master.tolist(), *(value.tolist() for value in optimizer.state[shard.master].values())]
                    for shard in shards
                ])  # fmt: skip
    assert found[0] == found[1]


def test_a_parameter_written_to_from_outside_takes_its_master_along(tmp_path: Path) -> None:
    with disk(tmp_path) as opened:
        store = OnDisk(opened, CPU, OffloadOptimizerConfig(device="nvme"))
        (shard,), _ = stepped(store, OPTIMIZERS["fused"], [5])
        shard.param.data.fill_(3.0)
        shard.take_from_whole()
        with store.at_once(changed=False):
            assert shard.master.tolist() == [3.0] * 5


def test_a_step_that_fails_leaves_the_states_as_they_were(tmp_path: Path) -> None:
    with disk(tmp_path) as opened:
        section = OffloadOptimizerConfig(device="nvme", pipeline_read=True, buffer_count=3)
        store = OnDisk(opened, CPU, section)
        shards, _ = stepped(store, OPTIMIZERS["fused"], [5, 6, 7])
        with store.at_once(changed=False):
            before = [shard.master.clone() for shard in shards]
        tiles = store.through()
        next(tiles)
        shards[0].master.data.zero_()
        tiles.close()  # what an error in the loop's body comes to
        with store.at_once(changed=False):
            assert all(torch.equal(shard.master, old) for shard, old in zip(shards, before, strict=True))


@pytest.mark.parametrize("pipeline", [False, True])
def test_pipelines_move_the_disk_beside_the_computation(
    tmp_path: Path, spans: list[Span], monkeypatch: pytest.MonkeyPatch, pipeline: bool
) -> None:
    write = os.pwritev

    def slow(descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        time.sleep(0.02)
        return write(descriptor, parts, offset)

    monkeypatch.setattr(os, "pwritev", slow)
    hooks = Hooks()
    opened = Disk(tmp_path, AioConfig(), hooks)
    section = OffloadOptimizerConfig(device="nvme", pipeline_read=pipeline, pipeline_write=pipeline)
    store = OnDisk(opened, CPU, section)
    shards = [OneShard(torch.zeros(100)).made(store) for _ in range(3)]
    store.attach(torch.optim.SGD([shard.master for shard in shards]), [[shard] for shard in shards])
    spans.clear()
    for number, _ in enumerate(store.through()):
        with hooks.span("phase", "optimizer", value=float(number)):
            time.sleep(0.005)
    opened.close()
    steps = [span for span in spans if span.kind == "phase"]
    reads, writes = named(spans, "copy", "read"), named(spans, "copy", "write")
    assert [span.value for span in steps] == [span.value for span in reads] == [0, 1, 2]
    assert [span.value for span in writes] == [0, 1, 2]
    for number in (1, 2):
        issued, written = reads[number].issue_ns, writes[number - 1].end_ns
        assert issued is not None
        assert written is not None
        assert (issued < steps[number - 1].start_ns) is pipeline
        assert (written > steps[number].start_ns) is pipeline


# --- shards of parameters


def shard_file(opened: Disk, **section: int) -> ShardFile:
    return ShardFile(opened, CPU, OffloadParamConfig(device="nvme", **{"max_in_cpu": 0, **section}))


def sharded(size: int, dtype: torch.dtype = torch.float32) -> ShardedParam:
    param = nn.Parameter(torch.arange(size).to(dtype))
    return ShardedParam(f"p{size}", param, Partition(size, equal(2)), 1, ALONE, persistent=False, index=0)


def shard_of(param: ShardedParam) -> list[float]:
    into = torch.empty(param.stop - param.start)
    param.read_shard(into)
    return into.tolist()


@pytest.mark.parametrize(
    "section", [{}, {"buffer_count": 1}, {"buffer_size": 1}, {"buffer_count": 2, "buffer_size": 1}]
)
def test_pieces_go_to_a_file_and_come_back(tmp_path: Path, section: dict[str, int]) -> None:
    with disk(tmp_path) as opened:
        file = shard_file(opened, **section)
        params = [sharded(7001), sharded(3), sharded(200, torch.bfloat16), sharded(1)]
        for param in params:
            file.take(param)
        assert params[0].shard.untyped_storage().nbytes() == 4
        for param in params[:3]:
            file.expect(param)
        assert shard_of(params[0]) == [float(n) for n in range(3501, 7001)]
        assert shard_of(params[1]) == [2.0]
        assert shard_of(params[2]) == [float(n) for n in range(100, 200)]
        assert shard_of(params[3]) == []
        assert params[0].make_master().tolist() == [float(n) for n in range(3501, 7001)]


def test_what_was_read_ahead_is_not_read_again_unless_it_was_written(tmp_path: Path, spans: list[Span]) -> None:
    with disk(tmp_path) as opened:
        file = shard_file(opened, buffer_count=2)
        params = [sharded(10), sharded(20), sharded(30)]
        for param in params:
            file.take(param)
        for ticket in [ticket for record in file.records.values() for ticket in record.writing]:
            ticket.wait()
        assert [file.expect(param) for param in params] == [True, True, False]
        assert shard_of(params[1]) == [float(n) for n in range(10, 20)]
        assert [span.module for span in named(spans, "copy", "read")] == ["p10", "p20"]
        params[0].write_shard(torch.full((5,), 8.0))
        assert shard_of(params[2]) == [float(n) for n in range(15, 30)]
        assert shard_of(params[0]) == [8.0] * 5
        assert [span.module for span in named(spans, "copy", "read")] == ["p10", "p20", "p30", "p10"]


def test_some_elements_stay_in_memory(tmp_path: Path) -> None:
    with disk(tmp_path) as opened:
        file = shard_file(opened, max_in_cpu=12)
        params = [sharded(10), sharded(20), sharded(12)]
        for param in params:
            file.take(param)
        assert [param.store is file for param in params] == [False, True, False]
        assert file.in_memory == 11


# --- training


def tiles_of(zero: Zero) -> list[list[ShardedParam]]:
    return [zero.trainable[start : start + 4] for start in range(0, len(zero.trainable), 4)]


def train(rank: int, zero_section: dict[str, Any], dtype: torch.dtype, accumulate: int = 1) -> dict[str, Tensor]:
    """The weights after some steps."""
    hooks, size = Hooks(), dist.get_world_size() if dist.is_initialized() else 1
    config = load({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero_section}, world_size=size)
    offload: Offload = open_offload(config, CPU, hooks, rank)
    everyone = list(range(size))
    comms = Comms(*(open_comm([everyone], lambda: CpuLane("lane", hooks)) for _ in range(2)))
    model: Small = build(dtype)
    settings = ZeroConfig(
        stage=config.zero_optimization.stage, overlap_comm=True, reduce_bucket_size=1000,
        stage3_param_persistence_threshold=20, stage3_prefetch_bucket_size=500, stage3_max_live_parameters=3000,
        stage3_max_reuse_distance=0,
    )  # fmt: skip
    zero = Zero(
        model,
        Config(zero_optimization=settings),
        comms,
        hooks,
        make_master=offload.states.make_master,
        offload_shard=offload.offload_shard,
    )
    masters = [param.master for param in zero.trainable if param.master is not None]
    optimizer = torch.optim.AdamW(masters, lr=1e-2, fused=True)
    offload.states.attach(optimizer, tiles_of(zero))
    for step in batches(3, accumulate, size):
        for number, microbatch in enumerate(step):
            zero.begin_backward(last=number + 1 == len(step))
            model(microbatch[rank]).backward()
            zero.finish_backward()
        zero.reducer.collect()
        grads = [param.master.grad for param in zero.trainable if param.master is not None]
        torch._foreach_mul_([grad for grad in grads if grad is not None], zero.reducer.postscale)
        hidden = {param: param.master.grad for param in zero.trainable if param.master is not None}
        for param in hidden:
            param.master.grad = None  # type: ignore[union-attr]
        for tile in offload.states.through():
            for param in tile:
                param.master.grad = hidden[param]  # type: ignore[union-attr]
            optimizer.step()
            for param in tile:
                param.master.grad = None  # type: ignore[union-attr]
            zero.gatherer.publish(tile)
        zero.gatherer.drain()
        zero.reducer.clear()
    zero.gatherer.gather([param for param in zero.params if not param.resident], 10**9)
    offload.close()
    return {param.name: param.param.detach().clone() for param in zero.params}


def job(rank: int, sections: list[dict[str, Any]], dtype: torch.dtype, stage: int) -> list[str]:
    """Of which sections the weights differ from those without offloading."""
    expected = train(rank, {"stage": stage}, dtype)
    wrong = []
    for section in sections:
        found = train(rank, {"stage": stage, **section}, dtype)
        wrong += [f"{section}: {name}" for name, value in expected.items() if not torch.equal(found[name], value)]
    return wrong


@pytest.mark.parametrize(
    ("stage", "world_size", "dtype"),
    slow_but(
        [(1, 2, torch.bfloat16), (2, 1, torch.bfloat16), (2, 2, torch.float32), (3, 2, torch.bfloat16)],
        among=[(1, 1, torch.float32), (1, 2, torch.bfloat16), (2, 1, torch.bfloat16), (2, 2, torch.float32),
               (3, 1, torch.bfloat16), (3, 2, torch.float32), (3, 2, torch.bfloat16)],
    ),
)  # fmt: skip
def test_weights_are_those_without_offloading(
    tmp_path: Path, ranks: Ranks, stage: int, world_size: int, dtype: torch.dtype
) -> None:
    """In `make test` two ranks in each stage, and one alone in stage 2."""
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    sections: list[dict[str, Any]] = [
        {"offload_optimizer": {"device": "cpu"}},
        {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        {"offload_optimizer": nvme},
        {"offload_optimizer": {**nvme, "pipeline_read": True, "pipeline_write": True, "buffer_count": 3}},
        {"offload_optimizer": {**nvme, "pipeline_write": True, "fast_init": True, "buffer_count": 1}},
    ]
    if stage == 3:
        sections += [
            {"offload_param": {"device": "cpu"}},
            {"offload_param": {**nvme, "max_in_cpu": 0}},
            {"offload_param": {**nvme, "max_in_cpu": 1000, "buffer_size": 100, "buffer_count": 2}},
            {"offload_param": {**nvme, "max_in_cpu": 0}, "offload_optimizer": {**nvme, "pipeline_read": True}},
        ]
    for wrong in ranks.run(world_size, job, sections, dtype, stage):
        assert wrong == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("buffer_count", [1, 5])
def test_pieces_are_read_ahead_of_the_pass(
    tmp_path: Path, spans: list[Span], monkeypatch: pytest.MonkeyPatch, buffer_count: int
) -> None:
    """Which shows in a read that is asked for while the one before it is under way."""
    read = os.preadv

    def slow(descriptor: int, parts: Sequence[memoryview], offset: int) -> int:
        time.sleep(0.002)
        return read(descriptor, parts, offset)

    monkeypatch.setattr(os, "preadv", slow)
    section = {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0, "buffer_count": buffer_count}
    train(0, {"stage": 3, "offload_param": section}, torch.float32)
    reads = named(spans, "copy", "read")
    early = [second for first, second in itertools.pairwise(reads) if (second.issue_ns or 0) < (first.end_ns or 0)]
    assert bool(early) is (buffer_count > 1)


def apart_job(rank: int, stage: int, reduce_scatter: bool) -> float:
    """The largest difference when gradients go another way to the masters, as they do where these are elsewhere."""
    found = []
    for apart in (False, True):
        with mock.patch.object(Bucket, "apart", apart):
            found.append(train(rank, {"stage": stage, "reduce_scatter": reduce_scatter}, torch.float64, accumulate=2))
    return max((found[0][name] - value).abs().max().item() for name, value in found[1].items())


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("reduce_scatter", [True, False])
def test_gradients_find_masters_that_are_elsewhere(ranks: Ranks, stage: int, reduce_scatter: bool) -> None:
    for difference in ranks.run(2, apart_job, stage, reduce_scatter):
        assert difference < 1e-9


# --- memory

LARGE = """
import resource, sys, threading
from pathlib import Path
import torch
from torch import nn
from dsprof.engine.comm.comm import Comm
from dsprof.engine.config import load
from dsprof.engine.hooks import Hooks
from dsprof.engine.offload import open_offload
from dsprof.engine.zero import Comms, Zero

torch.set_num_threads(1)
threading.stack_size(1 << 18)  # RLIMIT_DATA counts stacks, and how many threads there are is a matter of timing
device, folder = sys.argv[1:]
model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(24)))  # 100 MB, as much of gradients
section = {"device": device, **({"nvme_path": folder} if device == "nvme" else {})}
config = load({"train_batch_size": 1, "zero_optimization": {"stage": 2, "offload_optimizer": section}})
hooks = Hooks()
offload = open_offload(config, torch.device("cpu"), hooks)
alone = Comm(None, None)
zero = Zero(model, config, Comms(alone, alone), hooks, make_master=offload.states.make_master)
optimizer = torch.optim.AdamW([param.master for param in zero.trainable], fused=True)
offload.states.attach(optimizer, [[param] for param in zero.trainable])
model(torch.ones(1, 1024)).sum().backward()
optimizer.zero_grad()
now = 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1])
resource.setrlimit(resource.RLIMIT_DATA, (now + 220_000_000,) * 2)
for step in range(2):
    model(torch.ones(1, 1024)).sum().backward()
    zero.finish_backward()
    zero.reducer.collect()
    grads = {param: param.master.grad for param in zero.trainable}
    for param in grads:
        param.master.grad = None
    for (param,) in offload.states.through():
        param.master.grad = grads[param]
        optimizer.step()
        param.master.grad = None
        zero.gatherer.publish([param])
    zero.reducer.clear()
    grads.clear()
print("trained", sum(float(param.detach().double().sum()) for param in model.parameters()))
"""


MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
"""Have glibc give back what is freed: how much it keeps is a matter of which thread was first."""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
def test_states_that_do_not_fit_into_memory_train_from_disk(tmp_path: Path) -> None:
    """RLIMIT_DATA leaves 220 MB: enough for gradients and tiles (140 were), not for the states as well (over 300)."""

    def run(device: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", LARGE, device, str(tmp_path)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **MALLOC}
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)

    in_memory, from_disk = run("none"), run("nvme")
    assert in_memory.returncode == 1
    assert "can't allocate memory" in in_memory.stderr
    assert from_disk.stdout.startswith("trained"), from_disk.stderr


# --- with the engine


def weights_after(rank: int, zero: dict[str, Any]) -> dict[str, Tensor]:
    model = build(odd=True)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 20, **zero},
    }
    engine = initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    for ids in batches(2, 1, 4)[:, 0, rank]:
        engine.backward(engine(ids))
        engine.step()
    engine.destroy()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def hierarchical(rank: int, folder: str) -> list[str]:
    """What differs with the hierarchical partition, whose second shards stay where the device can reach them."""
    expected, wrong = weights_after(rank, {}), []
    small = {"stage3_prefetch_bucket_size": 1000, "stage3_max_live_parameters": 3000, "stage3_max_reuse_distance": 0}
    for device in ("cpu", "nvme"):
        section = {"device": device, **({"nvme_path": folder} if device == "nvme" else {})}
        found = weights_after(rank, {"zero_hpz_partition_size": 2, "offload_param": section, **small})
        wrong += [f"{device}: {name}" for name, value in expected.items() if not torch.equal(found[name], value)]
    return wrong


def test_the_hierarchical_partition_trains_the_same_with_pieces_elsewhere(tmp_path: Path, ranks: Ranks) -> None:
    assert ranks.run(4, hierarchical, str(tmp_path)) == [[]] * 4


def test_a_single_tile_that_leaves_pipelines_nothing_to_do_is_told_of(tmp_path: Path) -> None:
    def warnings_of(model: nn.Module, size: int) -> list[str]:
        section = {"device": "nvme", "nvme_path": str(tmp_path), "pipeline_read": True, "pipeline_write": True}
        zero = {"stage": 2, "sub_group_size": size, "offload_optimizer": section}
        config = {"train_batch_size": 1, "optimizer": {"type": "Adam"}, "zero_optimization": zero}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            initialize(model=model, model_parameters=model.parameters(), config=config)[0].destroy()
        return [str(warning.message) for warning in caught if "pipeline_" in str(warning.message)]

    layers = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(4)))
    where = "zero_optimization.offload_optimizer"
    why = "has no effect; what a rank steps, 400 elements, is one tile of at most 1000000000 (sub_group_size)"
    assert warnings_of(layers, 1_000_000_000) == [
        f'{where}.pipeline_read: {why}: write "sub_group_size": 100 or less',
        f'{where}.pipeline_write: {why}: write "sub_group_size": 100 or less',
    ]
    assert warnings_of(layers, 100) == []
    assert "there is one parameter, and a tile has one" in warnings_of(nn.Linear(9, 9, bias=False), 1000)[0]
