"""The engine beside DDP and FSDP2, and what a script does with it beyond training (see test_training_matrix)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import stored_bytes
from models import batches, build, reference
from ranks import Ranks
from spans import comms, recorded

from dsprof import engine as ds
from dsprof.engine import Engine
from dsprof.engine.zero.shard import find_sharded

STEPS, ACCUMULATE = 3, 2


def configuration(stage: int = 0, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, **more.pop("zero", {})}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATE,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": zero,
        **more,
    }


SMALL = {
    "reduce_bucket_size": 1000, "allgather_bucket_size": 500, "stage3_prefetch_bucket_size": 2000,
    "stage3_param_persistence_threshold": 100, "stage3_max_live_parameters": 3000, "stage3_max_reuse_distance": 1500,
}  # fmt: skip


def adamw(params: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1)


def run(engine: Engine, data: torch.Tensor, rank: int) -> list[float]:
    losses = []
    for step in data:
        for microbatch in step:
            loss = engine(microbatch[rank])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def whole(engine: Engine) -> dict[str, torch.Tensor]:
    engine.zero.gatherer.gather([p for p in engine.zero.params if not p.resident], 10**9)
    return {p.name: p.param.detach().float() for p in engine.zero.params}


# --- other engines


def beside(rank: int, stage: int, odd: bool, other: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Train the engine and `other`, a wrapped model of the same weights, alike; the engine's weights after it."""
    model = build(odd=odd)
    engine, *_ = ds.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=configuration(stage)
    )
    data = batches(STEPS, ACCUMULATE, 2)
    run(engine, data, rank)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for step in data:
        for microbatch in step:
            (other(microbatch[rank]) / ACCUMULATE).backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return whole(engine)


def against_ddp(rank: int, stage: int) -> float:
    other = torch.nn.parallel.DistributedDataParallel(build(), find_unused_parameters=True)
    found = beside(rank, stage, True, other)
    return max((found[name] - value).abs().max().item() for name, value in other.module.named_parameters())


def against_fsdp(rank: int, stage: int) -> float:
    from torch.distributed.fsdp import fully_shard

    other = build(odd=False)
    for block in other.blocks:
        fully_shard(block)
    fully_shard(other)
    found = beside(rank, stage, False, other)
    return max((found[name] - value.full_tensor()).abs().max().item() for name, value in other.named_parameters())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_agrees_with_ddp_and_fsdp2(ranks: Ranks, stage: int) -> None:
    assert max(ranks.run(2, against_ddp, stage)) < 1e-6
    assert max(ranks.run(2, against_fsdp, stage)) < 1e-6


# --- overflow


def overflow_on_one_rank(rank: int, stage: int) -> tuple[list[float], list[int], bool, list[torch.Tensor]]:
    model = build(odd=False)
    config = configuration(
        stage, gradient_accumulation_steps=1, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    )
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    before = whole(engine)
    ids = batches(1, 1, 2)[0, 0, rank]
    loss = engine(ids) * (1e30 if rank == 1 else 1.0)  # only rank 1's gradients overflow
    engine.backward(loss)
    engine.step()
    unchanged = all(torch.equal(before[name], value) for name, value in whole(engine).items())
    scales = [engine.loss_scale]
    engine.backward(engine(ids))
    engine.step()
    return [*scales, engine.loss_scale], [engine.skipped_steps, engine.global_steps], unchanged, []


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_agree_on_an_overflow(ranks: Ranks, stage: int) -> None:
    for scales, counts, unchanged, _ in ranks.run(2, overflow_on_one_rank, stage):
        assert scales == [128.0, 128.0]
        assert counts == [1, 2]
        assert unchanged


# --- zero.Init and GatheredParameters


def early(rank: int) -> tuple[int, int, float, bool]:
    config = configuration(3, zero=SMALL)
    with ds.zero.Init(config_dict_or_path=config):
        model = build(odd=False)
    held = [found for p in model.parameters() if (found := find_sharded(p)) is not None]
    freed = sum(map(stored_bytes, held))
    with ds.zero.GatheredParameters(model.head.weight, modifier_rank=0):
        whole_inside = model.head.weight.untyped_storage().size()
        if rank == 0:
            torch.nn.init.constant_(model.head.weight, 0.5)
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    data = batches(STEPS, ACCUMULATE, 2)
    run(engine, data, rank)

    expected = build(odd=False)
    torch.nn.init.constant_(expected.head.weight, 0.5)
    reference(expected, adamw, data, clip=0.5)
    found = whole(engine)
    difference = max((found[name] - value).abs().max().item() for name, value in expected.named_parameters())
    with ds.zero.GatheredParameters(model.parameters(), modifier_rank=1):
        if rank == 1:
            for param in model.parameters():
                param.data.fill_(2.0)
    same = all(bool((value == 2.0).all()) for value in whole(engine).values())
    return freed, whole_inside, difference, same


def test_parameters_are_sharded_as_zero_init_makes_them(ranks: Ranks) -> None:
    for freed, whole_inside, difference, same in ranks.run(2, early):
        assert freed == 0
        assert whole_inside == 31 * 16 * 4
        assert difference < 2e-5
        assert same


# --- sparse gradients


def sparse(rank: int, stage: int, kind: str) -> tuple[float, int]:
    model, expected = build(odd=False), build(odd=False)
    for made in (model, expected):
        made.embedding.sparse = kind == "module"
    config = configuration(stage, gradient_clipping=0.0, sparse_gradients=kind == "config")
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    data = batches(STEPS, ACCUMULATE, 2)
    with recorded() as spans:
        run(engine, data, rank)
    expected.embedding.sparse = False
    reference(expected, adamw, data)
    found = whole(engine)
    difference = max((found[name] - value).abs().max().item() for name, value in expected.named_parameters())
    return difference, len(comms(spans, "gradient"))


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("kind", ["module", "config"])
def test_gradients_of_embeddings_travel_as_rows(ranks: Ranks, stage: int, kind: str) -> None:
    for difference, collectives in ranks.run(2, sparse, stage, kind):
        assert difference < 2e-5
        assert collectives == STEPS * 4  # the bucket, the counts, the indices, the rows
