"""A rank that fails by itself: the others end soon, with a sentence that names it and its error."""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from slow_cases import slow_but
from torch import nn

from dsprof import engine as ds
from dsprof.engine.comm import deadlock, peers
from dsprof.engine.comm.comm import Comm
from dsprof.engine.comm.consensus import SharedError
from dsprof.engine.pipe import PipelineError

WIDTH = 8
FAILING = 1
ERROR = "ArithmeticError: this rank cannot go on"
TIMED_OUT = "Timed out waiting 60000ms"
"""What gloo says at the time-out of the ranks' groups."""


def start(stage: int) -> Any:
    """Several buckets, and a layer a tile."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": WIDTH * WIDTH, "sub_group_size": WIDTH}
    if stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    config = {
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": zero,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }  # fmt: skip
    return ds.initialize(model=model, config=config)[0]


def train(engine: Any, times: int = 1) -> None:
    for _ in range(times):
        engine.backward(engine(torch.ones(2, WIDTH)).pow(2).mean())
        engine.step()


def fail(*_: Any) -> None:
    raise ArithmeticError("this rank cannot go on")


@contextlib.contextmanager
def broken(engine: Any, where: str) -> Iterator[None]:
    """Something in the middle of the forward, backward or step of this rank raises."""
    if where == "forward":
        handle = engine.module[2].register_forward_pre_hook(fail)
    elif where == "backward":
        handle = engine.module[1].register_full_backward_pre_hook(fail)
    else:
        handle = engine.optimizer.register_step_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def close(engine: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what stage 3 has lost
        engine.destroy()


# --- an error that nobody catches


def uncaught(rank: int, stage: int, where: str) -> tuple[str, str]:
    """What a rank raises, and then raises if it goes on all the same."""
    engine = start(stage)
    train(engine)
    if rank == FAILING:
        with broken(engine, where), pytest.raises(ArithmeticError) as failed:
            train(engine)
        with contextlib.redirect_stderr(io.StringIO()):
            sys.excepthook(failed.type, failed.value, failed.tb)
        return "", ""
    with pytest.raises(SharedError) as caught:
        train(engine, 3)
    with pytest.raises(RuntimeError) as again:
        train(engine)
    close(engine)
    return str(caught.value), str(again.value)


@pytest.mark.parametrize(
    ("stage", "where"),
    [(0, "backward"), (0, "step"), (1, "forward"), (1, "step"), (2, "backward"), (3, "forward"), (3, "step")],
)
def test_the_others_end_with_a_rank_whose_error_nobody_catches(ranks: Ranks, stage: int, where: str) -> None:
    for rank, (said, again) in enumerate(ranks.run(3, uncaught, stage, where)):
        if rank != FAILING:
            assert f"rank {FAILING} has failed" in said
            assert f"in engine.{where} in step 1: {ERROR}" in said
            assert f"rank {FAILING} has failed" in again


def uncaught_beside_a_pipeline(rank: int) -> str:
    """A rank ends between two steps."""
    torch.manual_seed(1)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    model = ds.PipelineModule(layers, 3, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine = ds.initialize(model=model, config=config)[0]
    batch = (torch.ones(2, WIDTH), torch.ones(2, WIDTH))
    engine.train_batch(iter([batch]))
    if rank == FAILING:
        with contextlib.redirect_stderr(io.StringIO()):
            sys.excepthook(ArithmeticError, ArithmeticError("this rank cannot go on"), None)
        return ""
    with pytest.raises(PipelineError) as caught:
        engine.train_batch(iter([batch]))
    close(engine)
    return str(caught.value)


def test_a_pipeline_ends_with_a_rank_that_fails_between_two_steps(ranks: Ranks) -> None:
    for rank, said in enumerate(ranks.run(3, uncaught_beside_a_pipeline)):
        if rank != FAILING:
            assert said.startswith(f"rank {FAILING} has failed in the script: {ERROR}")


# --- one that the script catches, on one rank


def quick() -> contextlib.ExitStack:
    """A rank looks soon what the others wait for."""
    stack = contextlib.ExitStack()
    for name, value in (("PATIENCE_S", 0.3), ("LOOK_S", 0.05), ("SHARE_S", 1.0)):
        stack.enter_context(mock.patch.object(deadlock, name, value))
    return stack


def caught_alone(rank: int, stage: int, where: str, clears: bool) -> tuple[list[str], list[str]]:
    """The script goes on with the next batch: what is refused on the way, and the kinds of these errors."""
    with quick():
        engine = start(stage)
        train(engine)
        said, kinds = [], []
        for number in range(3):
            try:
                with broken(engine, where) if (rank, number) == (FAILING, 0) else contextlib.nullcontext():
                    try:
                        train(engine)
                    except ArithmeticError:
                        if clears:
                            engine.zero_grad()
            except RuntimeError as error:
                said.append(str(error))
                kinds.append(type(error).__name__)
        if rank != FAILING:
            close(engine)
        return said, kinds


@pytest.mark.parametrize(
    ("stage", "where", "clears"),
    slow_but(
        [(0, "step", False), (1, "backward", False), (2, "backward", True), (3, "step", False)],
        among=[(0, "backward", True), (0, "step", False), (1, "backward", False), (2, "backward", True),
               (2, "step", False), (3, "backward", True), (3, "step", False)],
    ),
)  # fmt: skip
def test_a_script_that_goes_on_alone_does_not_train_wrongly(ranks: Ranks, stage: int, where: str, clears: bool) -> None:
    """In `make test` each stage once."""
    for rank, (said, kinds) in enumerate(ranks.run(3, caught_alone, stage, where, clears)):
        if rank != FAILING or clears:
            assert f"rank {FAILING} has failed in engine.{where} in step 1: {ERROR}" in said[0]
            assert kinds[0] == "LostError"
        for text in said:
            assert TIMED_OUT not in text
        if rank == FAILING and not clears:
            assert "failed half-way" in said[0]


def skipped(rank: int, stage: int) -> list[float]:
    """One rank's forward fails, and it goes on with another batch: nothing has been sent of it."""
    engine = start(stage)
    for number in range(3):
        if (rank, number) == (FAILING, 1):
            with broken(engine, "forward"), pytest.raises(ArithmeticError):
                train(engine)
        train(engine)
    weights: list[float] = next(engine.module.parameters()).detach().view(-1).tolist()
    return weights


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_batch_that_one_rank_leaves_out_is_its_own_affair(ranks: Ranks, stage: int) -> None:
    first, *others = ranks.run(3, skipped, stage)
    assert all(each == first for each in others)


def everywhere(rank: int, stage: int, where: str) -> int:
    """The same error on all ranks, one of them later than the others look for it."""
    with quick():
        engine = start(stage)
        train(engine)
        with broken(engine, where), pytest.raises(ArithmeticError):
            train(engine)
        time.sleep(0.5 if rank == FAILING else 0)
        engine.zero_grad()
        train(engine, 2)
        return int(engine.global_steps)


@pytest.mark.parametrize(("stage", "where"), [(1, "forward"), (0, "backward"), (2, "backward"), (3, "backward")])
def test_an_error_that_all_ranks_catch_ends_nothing(ranks: Ranks, stage: int, where: str) -> None:
    assert ranks.run(3, everywhere, stage, where) == [3, 3, 3]


# --- where waits do not end by themselves, as on NCCL


@contextlib.contextmanager
def as_on_a_device() -> Iterator[None]:
    """The groups pass for those of devices: nobody sees what a rank waits for, and messages have no tags."""
    with (
        mock.patch.object(Comm, "device", torch.device("cpu")),
        mock.patch.object(Comm, "separates_contents", False),
    ):
        yield


def anew_together(rank: int, stage: int) -> int:
    with as_on_a_device():
        engine = start(stage)
        train(engine)
        with broken(engine, "backward"), pytest.raises(ArithmeticError):
            train(engine)
        engine.zero_grad()
        train(engine, 2)
        return int(engine.global_steps)


@pytest.mark.parametrize("stage", [0, 2])
def test_an_error_that_all_ranks_catch_ends_nothing_on_devices(ranks: Ranks, stage: int) -> None:
    assert ranks.run(3, anew_together, stage) == [3, 3, 3]


def looks(rank: int) -> tuple[str, list[str]]:
    """The groups pass for NCCL's, which a rank has to abort when another has ended."""
    aborted: list[str] = []
    with (
        mock.patch.object(peers, "POLL_S", 0.05),
        mock.patch.object(peers.Comm, "device", torch.device("cpu")),
        mock.patch.object(dist.ProcessGroup, "abort", lambda group: aborted.append(group.group_name), create=True),
    ):
        engine = start(0)
        train(engine)
        with mock.patch.object(dist, "get_backend", return_value="nccl"):
            if rank == FAILING:
                with contextlib.redirect_stderr(io.StringIO()):
                    sys.excepthook(ArithmeticError, ArithmeticError("this rank cannot go on"), None)
            else:
                watcher = next(thread for thread in threading.enumerate() if thread.name == "dsprof-peers")
                watcher.join(30)
        wanted = sorted({comm.group.group_name for comm in engine.state.comms() if comm.group is not None})
        if rank == FAILING:
            return "", []
        with pytest.raises(SharedError) as caught:
            engine(torch.ones(2, WIDTH))
    assert sorted(aborted) == wanted
    return str(caught.value), aborted


def test_device_waits_are_aborted_when_another_rank_has_ended(ranks: Ranks) -> None:
    said, aborted = ranks.run(2, looks)[0]
    assert f"rank {FAILING} has failed in the script: {ERROR}" in said
    assert len(aborted) == 3  # of the job, the gradients and the parameters


def counted(rank: int, stage: int) -> int:
    """What a step puts on the wire, and asks of the store, where nothing fails."""
    engine = start(stage)
    train(engine, 2)
    store = mock.Mock(wraps=engine.state.peers._store)
    engine.state.peers._store = engine.zero.deadlocks._store = store
    before = engine.zero.comms[0].begun
    train(engine, 2)
    assert engine.zero.comms[0].begun == before + 2 * 4  # a bucket a layer
    return len(store.method_calls)


@pytest.mark.parametrize("stage", [0, 2])
def test_nothing_is_exchanged_while_nothing_fails(ranks: Ranks, stage: int) -> None:
    assert ranks.run(2, counted, stage) == [0, 0]
