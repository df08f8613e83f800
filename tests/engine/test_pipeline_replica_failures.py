"""One replica of a pipeline that fails by itself: every rank of every replica and stage is told, and none waits."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pipeline_models import configuration, start
from ranks import Ranks
from slow_cases import slow_but
from torch import Tensor, nn

from dsprof import engine as ds
from dsprof.engine.checkpoint import CheckpointError
from dsprof.engine.comm.comm import break_connections
from dsprof.engine.pipe import LayerSpec, PipelineError, PipelineModule, failure

STAGES = 3
REPLICAS = 2
LAYERS = 6
MICROBATCHES = 3
WIDTH = 4


class Breaks(nn.Module):
    """Fails in the second micro-batch, on the replica 1 alone."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.how = how if dist.get_rank() % REPLICAS == 1 else "not"
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.linear(x)
        if self.calls == 2 and self.how == "forward":
            raise ArithmeticError("cannot go on")
        if self.calls == 2 and self.how == "backward":
            y.register_hook(_fail)
        return y


def _fail(grad: Tensor) -> Tensor:
    raise ArithmeticError("cannot go back")


def broken_engine(schedule: str, how: str, layer: int, stage: int) -> Any:
    """An engine of two replicas, of which one fails in `layer`."""
    torch.manual_seed(0)
    layers: list[Any] = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    layers[layer] = LayerSpec(Breaks, how)
    virtual = 2 if schedule == "interleaved" else 1
    module = PipelineModule(
        layers, STAGES, loss_fn=nn.functional.mse_loss, partition_method="uniform", virtual_stages=virtual
    )
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0} if stage == 3 else {"stage": stage}
    more = {"gradient_accumulation_steps": MICROBATCHES, "pipeline": {"schedule": schedule}}
    return start(module, configuration(zero_optimization=zero, **more))


def train(engine: Any) -> None:
    engine.train_batch(iter([(torch.ones(2, WIDTH), torch.ones(2, WIDTH))] * MICROBATCHES))


def causes(error: BaseException | None) -> list[str]:
    """What an error says, and those that it follows from."""
    found = []
    while error is not None:
        found.append(f"{type(error).__name__}: {error}")
        error = error.__cause__
    return found


def failing_job(rank: int, schedule: str, cases: list[tuple[str, int, int]]) -> list[tuple[list[str], list[str]]]:
    """Of each case what the failing step says, and what the next says."""
    found = []
    for case in cases:
        with mock.patch.object(failure, "GRACE_S", 0.5):
            engine = broken_engine(schedule, *case)
        said = []
        for _ in range(2):
            with pytest.raises((PipelineError, ArithmeticError)) as caught:
                train(engine)
            said.append(causes(caught.value))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine.destroy()
        found.append((said[0], said[1]))
    return found


SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")


@pytest.mark.parametrize("all_ways", slow_but([False], among=[False, True]))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_rank_is_told_of_one_replica_that_fails(ranks: Ranks, schedule: str, all_ways: bool) -> None:
    """Wherever it fails: in the first, the middle or the last stage, forward or backward, in each ZeRO stage. In
    `make test` each schedule in one stage, forward and backward."""
    owners = {0: 0, 4: 1, 5: 2} if schedule == "interleaved" else {0: 0, 3: 1, 5: 2}
    ways = [(how, layer) for how in ("forward", "backward") for layer in owners]
    cases = [(how, layer, number % 4) for number, (how, layer) in enumerate(ways)]
    if not all_ways:
        cases = cases[SCHEDULES.index(schedule) % 3 :: 3]
    for rank, said in enumerate(ranks.run(STAGES * REPLICAS, failing_job, schedule, cases)):
        for (how, layer, _), (first, second) in zip(cases, said, strict=True):
            failing = REPLICAS * owners[layer] + 1
            what = f"ArithmeticError: cannot go {'on' if how == 'forward' else 'back'}"
            if rank == failing:
                assert first[0] == what
            else:
                assert first[0].startswith(f"PipelineError: rank {failing}: stage ")
                assert what in first[0]
            assert not [text for text in first if "Timed out waiting 60000ms" in text]  # the time-out of the groups
            assert "lost each other" in second[0] or "failed half-way" in second[0]


def waiting_job(rank: int) -> str:
    """The last rank waits for the first, each other one for the next; it gives up when that has."""
    group = dist.new_group(range(dist.get_world_size()))
    if rank > 0:
        with pytest.raises(RuntimeError) as caught:
            dist.recv(torch.empty(1), group=group, group_src=(rank + 1) % dist.get_world_size())
        said = str(caught.value)
    else:
        said = "gave up"
    break_connections(group)
    break_connections(None)
    dist.barrier()
    return said


def test_a_rank_that_gives_up_closes_all_its_connections(ranks: Ranks) -> None:
    """Also where its neighbour's is closed already: whoever waits for it would wait until the time-out."""
    first, *others = ranks.run(4, waiting_job)
    assert first == "gave up"
    assert all("Timed out" not in said for said in others)


def lost_job(rank: int, folder: str) -> dict[str, str]:
    with mock.patch.object(failure, "GRACE_S", 0.5):
        engine = broken_engine("1f1b", "backward", 5, 3)
    engine.save_checkpoint(folder, "before")
    with pytest.raises((PipelineError, ArithmeticError)):
        train(engine)
    said = {}
    for name, use in {
        "train_batch": lambda: train(engine),
        "eval_batch": lambda: engine.eval_batch(iter([])),
        "save_checkpoint": lambda: engine.save_checkpoint(folder, "after"),
        "load_checkpoint": lambda: engine.load_checkpoint(folder, "before"),
    }.items():
        with pytest.raises((PipelineError, CheckpointError)) as caught:
            use()
        said[name] = str(caught.value)
    # What was whole when the step failed still is.
    if any(not param.resident for param in engine.zero.params):
        with pytest.raises(PipelineError) as refused, ds.zero.GatheredParameters(engine.module.parameters()):
            pass
        said["gather"] = str(refused.value)
        with pytest.warns(UserWarning, match="build the model anew") as warned:
            engine.destroy()
        said["destroy"] = str(warned[0].message)
    engine.destroy()
    return said


def test_ranks_that_have_lost_each_other_say_so_whatever_is_asked(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(STAGES * REPLICAS, lost_job, str(tmp_path))
    assert any("gather" in said and "that ZeRO stage 3 has sharded" in said["destroy"] for said in found)
    for said in found:
        for name, text in said.items():
            assert "ranks have lost each other" in text, name
        for name in ("train_batch", "save_checkpoint", "load_checkpoint"):
            assert said[name].startswith(f"{name}: this engine's ranks have lost each other: an earlier step")
            assert "cannot go back" in said[name]
