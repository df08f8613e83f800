"""A pipeline that fails anywhere fails on every rank, soon, and with the cause named."""

from __future__ import annotations

import time

import pytest
import torch
from pipelines import configuration, start
from ranks import Ranks
from torch import Tensor, nn

from dsprof.engine.pipe import LayerSpec, PipelineError, PipelineModule, verdict

mse = nn.functional.mse_loss


class BuildsNot(nn.Linear):
    """Can be built on one rank only."""

    def __init__(self, rank: int) -> None:
        super().__init__(4, 4)
        if torch.distributed.get_rank() != rank:
            raise OSError("no such file")


def building_job(rank: int, early: bool) -> str:
    layers = [LayerSpec(nn.Linear, 4, 4), LayerSpec(BuildsNot, 0)]
    try:
        if early:
            PipelineModule(layers, 2, partition_method="uniform")
        else:
            start(PipelineModule(layers, partition_method="uniform"), configuration(pipeline={"stages": 2}))
    except PipelineError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("early", [True, False])
def test_a_layer_that_cannot_be_built_on_one_rank_is_told_on_all(ranks: Ranks, early: bool) -> None:
    own = "layer 1 (BuildsNot) could not be built on rank 1: OSError: no such file"
    assert ranks.run(2, building_job, early) == [f"PipelineModule: rank 1 has no layers: {own}", own]


class Breaks(nn.Module):
    """Fails in one replica, forward or backward, in the second micro-batch."""

    def __init__(self, replica: int, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.breaks = torch.distributed.get_rank() % 2 == replica
        self.how = how
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.linear(x)
        if not self.breaks or self.calls < 2:
            return y
        if self.how == "forward":
            raise ArithmeticError("cannot go on")
        if self.how == "interrupt":
            raise KeyboardInterrupt
        y.register_hook(_fail)
        return y


def _fail(grad: Tensor) -> Tensor:
    raise ArithmeticError("cannot go back")


def replica_job(rank: int, how: str, stage: int) -> tuple[list[str], float]:
    """Two pipelines of two stages, of which the second fails."""
    verdict.GRACE_S = 0.5
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    layers.insert(stage, LayerSpec(Breaks, 1, how))  # type: ignore[arg-type]
    module = PipelineModule(layers, 2, loss_fn=mse, partition_method=[0, 1 + (stage == 0), 3])
    engine = start(module, configuration(zero_optimization={"stage": stage + 1}))
    began, said = time.monotonic(), []
    for _ in range(2):
        try:
            engine.train_batch(iter([(torch.ones(2, 4), torch.ones(2, 4))] * 4))
        except (RuntimeError, ArithmeticError, KeyboardInterrupt) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said, time.monotonic() - began


@pytest.mark.parametrize(
    ("how", "stage", "what"),
    [
        ("forward", 0, "ArithmeticError: cannot go on"),
        ("backward", 1, "ArithmeticError: cannot go back"),
        ("interrupt", 1, "KeyboardInterrupt: "),
    ],
)
def test_one_replica_that_fails_ends_the_job(ranks: Ranks, how: str, stage: int, what: str) -> None:
    """The other waits for its gradients, which never come."""
    failing = 2 * stage + 1
    for rank, (said, seconds) in enumerate(ranks.run(4, replica_job, how, stage)):
        cause = f"PipelineError: rank {failing}: stage {stage} of the pipeline failed: {what}"
        assert said[0] == (what if rank == failing else cause)
        assert "lost each other" in said[1] or "failed half-way" in said[1]
        assert seconds < 30  # and not the 60 of the group's timeout


def unread_job(rank: int) -> list[str]:
    module = PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], 2, loss_fn=mse)
    engine = start(module, configuration())
    said = []
    for call in (engine.train_batch, lambda: engine.eval_batch(None)):
        with pytest.raises((PipelineError, ValueError)) as refused:
            call()
        said.append(str(refused.value))
    engine.destroy()
    return said


def test_data_that_are_not_there_are_told_on_all_ranks(ranks: Ranks) -> None:
    for train, evaluate in ranks.run(2, unread_job):
        assert "train_batch: pass an iterator of batches" in train
        assert "eval_batch: pass an iterator of batches" in evaluate
