"""In what gradients are added up and summed: over micro-batches in fp32 unless the configuration says otherwise, over
ranks in what travels; the same in every stage, and on every backend."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from wire_group import NAME, reducing_as_nccl

from dsprof import engine as ds

SMALL = 2.0**-9
"""Added to 1 in bf16 it is lost."""


class Product(nn.Module):
    """The gradient of the weight is the input; of the table, rows of it."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6))
        self.table = nn.Embedding(3, 2, sparse=sparse)
        nn.init.zeros_(self.table.weight)

    def forward(self, factor: Tensor) -> Tensor:
        loss: Tensor = (self.weight * factor).sum() + (self.table(torch.tensor([0, 2])) * factor[0]).sum()
        return loss


def moved(
    rank: int, stage: int, factors: list[list[float]], sparse: bool, as_nccl: bool, more: dict[str, Any]
) -> tuple[list[float], str]:
    """How far a step of learning rate 1 moves the masters, this rank's gradients being its `factors`."""
    mine = factors[rank]
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": len(mine), "gradient_clipping": 0.0,
        "bf16": {"enabled": True}, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "zero_optimization": zero,
        **more,
    }  # fmt: skip
    with reducing_as_nccl() if as_nccl else contextlib.nullcontext():
        engine = ds.initialize(model=Product(sparse), config=config)[0]
        for factor in mine:
            engine.backward(engine(torch.full((6,), factor, dtype=torch.bfloat16)), scale_wrt_gas=False)
            engine.step()
        found = [
            -value.item()
            for param in engine.zero.trainable
            for value in param.master.detach().view(-1)
            if param.name == "weight" or value != 0
        ]
        group = engine.zero.comms[0].group
        backend = "none" if group is None else torch.distributed.get_backend(group)
        engine.destroy()
    return found, backend


SUM = 1 + 31 * SMALL
"""Of 1 and 31 small ones."""


@pytest.mark.parametrize("as_nccl", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_micro_batches_are_added_up_in_fp32(ranks: Ranks, world_size: int, stage: int, as_nccl: bool) -> None:
    """What a rank sums of 32 micro-batches is rounded once, where it travels after them, or never."""
    factors = [[1.0, *[SMALL] * 31]] * world_size
    wire = torch.tensor(SUM).bfloat16().item() if world_size > 1 and stage <= 1 else SUM
    for found, backend in ranks.run(world_size, moved, stage, factors, stage == 1, as_nccl, {}):
        assert backend == ("none" if world_size == 1 else NAME if as_nccl else "gloo")
        assert found
        assert set(found) == {wire}


@pytest.mark.parametrize("as_nccl", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("wire", "expected"), [(None, 1.0), ("fp32", 1 + SMALL)])
def test_ranks_are_summed_in_what_travels(
    ranks: Ranks, stage: int, wire: str | None, expected: float, as_nccl: bool
) -> None:
    """Twice as much as the mean: of ranks with 2 and with 2^-8, whose sum takes nine bits."""
    more = {} if wire is None else {"communication_data_type": wire}
    for found, _ in ranks.run(2, moved, stage, [[2.0], [2 * SMALL]], False, as_nccl, more):
        assert set(found) == {expected}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_another_type_to_add_up_in_is_taken(ranks: Ranks, stage: int) -> None:
    factors = [[1.0, *[SMALL] * 31]] * 2
    for found, _ in ranks.run(2, moved, stage, factors, False, False, {"data_types": {"grad_accum_dtype": "bf16"}}):
        assert set(found) == {1.0}


def moved_in_pipeline(rank: int, stage: int, schedule: str) -> list[float]:
    first, last = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    for layer in (first, last):
        nn.init.ones_(layer.weight)
    model = ds.PipelineModule([first, last], num_stages=2, loss_fn=lambda output, labels: output.sum())
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 32, "gradient_clipping": 0.0,
        "bf16": {"enabled": True}, "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage}, "pipeline": {"schedule": schedule},
    }  # fmt: skip
    engine = ds.initialize(model=model, config=config)[0]
    factors = [32 * (1.0 if number == 0 else SMALL) for number in range(32)]
    batches = [(torch.tensor([[factor]]).bfloat16(), torch.zeros(1)) for factor in factors]
    engine.train_batch(iter(batches))
    found = [1 - param.master.detach().item() for param in engine.zero.trainable]
    engine.destroy()
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("stage", [0, 2])
def test_micro_batches_of_a_pipeline_are_added_up_in_fp32(ranks: Ranks, stage: int, schedule: str) -> None:
    assert ranks.run(2, moved_in_pipeline, stage, schedule) == [[SUM], [SUM]]


def as_one(rank: int, stage: int, as_nccl: bool) -> list[Tensor]:
    """Weights after steps on random data, two micro-batches each."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, 9))
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 20} if stage == 3 else {})}
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "zero_optimization": zero,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(rank)
    with reducing_as_nccl() if as_nccl else contextlib.nullcontext():
        engine = ds.initialize(model=model, config=config)[0]
        for _ in range(6):
            x = torch.randn(4, 9, generator=generator, dtype=torch.float32).bfloat16()
            engine.backward(engine(x).float().square().mean())
            engine.step()
        engine.destroy()
    return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_configuration_trains_the_same_on_both_backends(ranks: Ranks, stage: int) -> None:
    gloo, nccl = ranks.run(2, as_one, stage, False), ranks.run(2, as_one, stage, True)
    for mine, other in zip(gloo, nccl, strict=True):
        assert all(map(torch.equal, mine, other))
