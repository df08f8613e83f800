"""What the engine does on a GPU: on a device that sleeps (`sleeping_device/jobs/engine.py`)."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import numpy as np
import pytest
import torch
from sleeping_jobs import Ran, SleepingRanks
from sleeping_truth import CLOCKS_MS, MS, assert_moments, close
from torch import nn

from dsprof.engine.hooks import Span
from dsprof.engine.monitors.comms_logger import CommsLogger, LoggedMessage
from dsprof.engine.pipe.p2p import Arrival, Message
from dsprof.engine.planner.example_inputs import given_inputs
from dsprof.engine.zero.shard import ShardedParam
from dsprof.engine.zero.storage import Storage


@pytest.fixture(scope="module")
def ran(sleeping_ranks: SleepingRanks, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    ran = sleeping_ranks.run(tmp_path_factory.mktemp("engine"), "engine.py", armed=False)
    assert ran.told[0]["failures"] == 0
    return ran


def assert_spans(ran: Ran, spans: list[Any], *names: str) -> None:
    """These communications, which the device knows by these names, began when its stream got to them."""
    log = ran.log().set_index("name")
    did = [(log["reached_ns"][name], log["end_ns"][name]) for name in names]
    found, true = (np.array(times, np.int64).reshape(-1, 2) for times in ([span[1:3] for span in spans], did))
    assert len(found) == len(names)
    assert close(found[:, 1] - found[:, 0], true[:, 1] - true[:, 0]).all()
    assert_moments(found.ravel(), true.ravel(), ", ".join(names))


def test_a_lane_waits_for_the_computation_and_runs_beside_it(ran: Ran) -> None:
    told, log = ran.told[0]["lane"], ran.log().set_index("name")
    # Neither has ended, and is told of, before the first is waited for; then that one has.
    assert told["stages"] == [[False, False, 0], [True, False, 1]]
    assert_spans(ran, told["comm"], "first", "second")
    assert [size for *_, size in told["comm"]] == [8, 16]
    assert [name for name, *_ in told["launch"]] == ["all_reduce"] * 2
    assert told["synchronized"] == 1  # for the lane's origin: else the host has not waited
    assert log["begin_ns"]["first"] == log["end_ns"]["computing"] == log["begin_ns"]["more"]
    assert log["begin_ns"]["second"] == log["end_ns"]["first"]
    assert log["begin_ns"]["after"] >= log["end_ns"]["second"]


def test_communications_from_before_anybody_listened_are_passed_over(ran: Ran) -> None:
    told = ran.told[0]["late_listener"]
    assert_spans(ran, told["comm"], "heard")
    assert told["done"]


def test_times_are_as_exact_after_a_day(ran: Ran) -> None:
    """The device tells the time since an event in a float, which at a day's end goes in steps of 8 ms."""
    found = np.array([span[1:3] for span in ran.told[0]["day"]["comm"]])
    true = ran.did("brief")["end_ns"].to_numpy()
    assert len(found) == len(true) == 24 * 6
    assert found[-1, 1] - found[-1, 0] == pytest.approx(0.125 * MS, abs=1e-3 * MS)
    passed = found[:, 1] - found[0, 1], true - true[0]
    assert np.abs(passed[0] - passed[1]).max() < CLOCKS_MS * MS
    assert passed[1][-1] > 23.5 * 3600 * 1000 * MS


def test_memory_is_kept_until_its_communication_is_waited_for(ran: Ran) -> None:
    assert ran.told[0]["memory"]["kept"] == [True, False]


def test_a_stream_is_over_when_its_last_kernel_is(ran: Ran) -> None:
    told = ran.told[0]["asked"]
    assert told == {"busy": [False, False], "through": [True, True]}


def test_phases_are_timed_by_the_device(ran: Ran) -> None:
    """The host is through with them at once; the step is waited for, since the curves are wanted of each."""
    told = ran.told[0]["phases"]
    assert told["lines"] == [
        "[step 2] time (ms) | fwd: 20.00 | bwd: 40.00 | step: 7.50 | recompute: 8.00 | reduce: 0.00"
    ]
    log = ran.log().set_index("name")
    assert [went_on >= log["end_ns"][f"step {step}"] for step, went_on in enumerate(told["went_on"])] == [True, True]
    names, found = zip(*told["curves"], strict=True)
    assert names == tuple(f"elapsed_time_ms_{name}" for name in ("forward", "backward", "step")) * 2
    assert found == pytest.approx([20, 40, 5, 20, 40, 10], abs=1e-3)


def test_nothing_is_waited_for_between_lines(ran: Ran) -> None:
    told = ran.told[0]["between_lines"]
    assert len(set(told["asked"])) == 1
    assert told["lines"] == ["[step 3] time (ms) | fwd: 0.00 | bwd: 0.00 | step: 7.00 | recompute: 0.00 | reduce: 0.00"]


def test_shards_come_from_the_host_beside_the_computation(ran: Ran) -> None:
    told, log = ran.told[0]["offloaded"], ran.log()
    forward = log[(log["launch_ns"] >= told["begin"]) & (log["launch_ns"] <= told["end"])]
    copies = forward[forward["name"] == "copy to device"]
    assert len(copies) >= 3
    assert set(forward[forward["name"] == "layer"]["stream"]) == {0}
    assert 0 not in set(copies["stream"])
    assert told["off"] < 1e-4


def test_a_host_that_is_ahead_does_not_wait_for_the_norm(ran: Ran) -> None:
    told, log = ran.told[0]["ahead"], ran.log()
    step = log[(log["launch_ns"] >= told["begin"]) & (log["launch_ns"] <= told["went_on"])]
    assert len(step) > 5
    assert "copy to host" not in set(step["name"])
    assert step["end_ns"].max() > told["went_on"]
    assert told["norms"][0] == pytest.approx(told["norms"][1], rel=1e-5)
    assert told["off"] < 1e-6


RANKS: Final = {
    **{f"stage {stage}": (stage, {}) for stage in range(4)},
    "bf16": (1, {"bf16": {"enabled": True, "check_grad_overflow": False}}),
}
"""What several ranks train: the stage, and more of the configuration."""


@pytest.fixture(scope="module")
def several(sleeping_ranks: SleepingRanks, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    jobs = [(name, *job) for name, job in RANKS.items()]
    return sleeping_ranks.run(
        tmp_path_factory.mktemp("ranks"), "engine_ranks.py", json.dumps(jobs), ranks=2, armed=False
    )


@pytest.mark.parametrize("name", RANKS)
def test_hosts_of_several_ranks_are_ahead_of_their_devices(several: Ran, name: str) -> None:
    """Which gradients there are is exchanged by the hosts: the flags that come with them are not read."""
    for rank in range(2):
        told, log = several.told[rank][name], several.log(rank)
        step = log[(log["launch_ns"] >= told["begin"]) & (log["launch_ns"] <= told["went_on"])]
        assert len(step) > 5
        assert step.loc[step["name"] == "layer", "end_ns"].max() > told["went_on"]


@pytest.mark.parametrize("name", RANKS)
def test_steps_whose_hosts_are_ahead_train_as_torch_does(several: Ran, name: str) -> None:
    more = RANKS[name][1]
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            (model(torch.full((2, 8), 1.0 + rank)).square().mean() / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    wanted = [param.detach().view(-1).tolist() for param in model.parameters()]
    for told in several.told:
        for found, true in zip(told[name]["weights"], wanted, strict=True):
            assert found == pytest.approx(true, abs=1e-2 if more else 1e-5)


def test_writes_that_torch_does_not_count_are_taken_over_or_refused(several: Ran) -> None:
    """The host does not wait for what it asks of the device when the forward begins."""
    for told in several.told:
        assert [told["written"][str(number)] for number in range(3)] == [5.0, 6.0, 7.0]
        assert told["written"]["after a forward"].startswith("weight was written to through .data")


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_of_two_steps_are_not_mixed(sleeping_ranks: SleepingRanks, tmp_path: Path, stage: int) -> None:
    """Where one rank has caught an error half-way and gone on alone, which no device shows."""
    ran = sleeping_ranks.run(tmp_path, "engine_alone.py", str(stage), ranks=2, armed=False)
    for told in ran.told:
        before, mixed, after = told["said"]
        assert before == ""
        assert mixed.startswith("LostError: the ranks have sent each other unequally many gradients")
        assert "unequally many gradients" in after


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_storage_that_is_freed_waits_for_the_stream_that_used_it(
    monkeypatch: pytest.MonkeyPatch, on_gpu: bool
) -> None:
    stream, whole = mock.Mock(), mock.Mock(is_cuda=on_gpu)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    storage: Any = mock.Mock(whole=whole, _placeholder=torch.ones(()))
    whole.shape = (2,)
    Storage.empty(storage, nn.Parameter(torch.ones(2)))
    calls = [call[0] for call in whole.mock_calls if "__" not in call[0]]
    freed = ["untyped_storage", "untyped_storage().resizable", "untyped_storage().resize_"]
    assert calls == (["record_stream"] if on_gpu else []) + freed


def test_what_the_host_alone_timed_has_no_bandwidth() -> None:
    """On a GPU it has only been handed over."""
    lines: list[str] = []
    logger = CommsLogger(rank=0, group_size=lambda group: 2, lanes_alone=True, verbose=True, show=lines.append)
    logger.end(Span("comm", "all_reduce", "main", 0, 0, 0, 0, 1000, bytes=4, group="tp", seq=0))
    logger.end(Span("comm", "all_reduce", "comm.gradients", 0, 0, 0, 0, 2000, bytes=4000, group="dp", seq=0))
    assert lines == [
        "comm op: all_reduce | time (ms): - | msg size: 4 B | algbw (GB/s): - | busbw (GB/s): -",
        "comm op: all_reduce | time (ms): 0.00 | msg size: 3.906 KB | algbw (GB/s): 2.00 | busbw (GB/s): 2.00",
    ]
    assert logger.tallies()[LoggedMessage("all_reduce", 2, 4)].count == 1


@pytest.mark.parametrize("on_gpu", [False, True])
def test_weights_that_come_to_the_host_are_there(on_gpu: bool) -> None:
    """A copy from the device to pinned memory that nobody waits for would not be."""
    shard = mock.Mock(is_cuda=on_gpu)
    param: Any = SimpleNamespace(store=None, shard=shard, secondary=None, written=lambda: None)
    piece = torch.ones(2)
    ShardedParam.write_shard(param, piece)
    shard.copy_.assert_called_once_with(piece, non_blocking=on_gpu)


def test_what_was_received_is_not_given_to_the_next_receive_while_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, tensor = mock.Mock(), mock.Mock(is_cuda=True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    arrival = Arrival(mock.Mock(), mock.Mock(), [Message([tensor], [True])])
    assert arrival.take().tensors == [tensor]
    tensor.record_stream.assert_called_once_with(stream)


@pytest.mark.parametrize(("local_rank", "visible", "number"), [("3", 8, 3), ("3", 1, 0), ("0", 1, 0)])
def test_the_engines_gpu_becomes_the_current_one(
    monkeypatch: pytest.MonkeyPatch, local_rank: str, visible: int, number: int
) -> None:
    """A rank that sees its own GPU alone has number 0, whatever its local rank."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    launch = importlib.import_module("dsprof.engine.comm.launch")
    assert launch.local_device() == torch.device("cuda", number)
    assert chosen == [torch.device("cuda", number)]


def test_a_local_rank_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setenv("LOCAL_RANK", "5")
    launch = importlib.import_module("dsprof.engine.comm.launch")
    with pytest.raises(RuntimeError, match="LOCAL_RANK is 5, and this process sees 4 GPUs"):
        launch.local_device()


def test_an_example_may_be_on_a_device() -> None:
    """Models are tried on the CPU."""
    tensor = mock.Mock(spec=torch.Tensor)
    inputs = given_inputs({"ids": tensor})
    tensor.cpu.assert_called_once_with()
    assert inputs.kwargs["ids"] is tensor.cpu.return_value
