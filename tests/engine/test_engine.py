"""The engine against a single process: configurations that change how it trains do not change what it trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import batches, build, reference
from ranks import Ranks

from dsprof import engine as ds
from dsprof.engine import Engine

STEPS, ACCUMULATE = 3, 2


def configuration(world_size: int, stage: int = 0, **more: Any) -> dict[str, Any]:
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
    engine.zero.gatherer.bring([p for p in engine.zero.params if not p.resident], 10**9)
    return {p.name: p.param.detach().float() for p in engine.zero.params}


def train(rank: int, config: dict[str, Any], dtype: torch.dtype) -> float:
    """The largest difference to the weights of the reference."""
    world_size = dist.get_world_size()
    model = build(dtype)
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    data = batches(STEPS, ACCUMULATE, world_size)
    run(engine, data, rank)
    expected = build(dtype)
    reference(expected, adamw, data, clip=0.5)
    found = whole(engine)
    return max((found[name] - value.float()).abs().max().item() for name, value in expected.named_parameters())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("zero", [{}, SMALL], ids=["default", "small"])
def test_fp32_trains_to_the_reference(ranks: Ranks, world_size: int, stage: int, zero: dict[str, Any]) -> None:
    known = {key: value for key, value in zero.items() if stage == 3 or not key.startswith("stage3")}
    config = configuration(world_size, stage, zero=known)
    for difference in ranks.run(world_size, train, config, torch.float32):
        assert difference < 2e-5


# --- other engines, other precisions


def against_ddp(rank: int, stage: int) -> float:
    model = build()
    engine, *_ = ds.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=configuration(2, stage)
    )
    data = batches(STEPS, ACCUMULATE, 2)
    run(engine, data, rank)

    other = torch.nn.parallel.DistributedDataParallel(build(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for step in data:
        for microbatch in step:
            (other(microbatch[rank]) / ACCUMULATE).backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    found = whole(engine)
    return max((found[name] - value).abs().max().item() for name, value in other.module.named_parameters())


def against_fsdp(rank: int, stage: int) -> float:
    from torch.distributed.fsdp import fully_shard

    model = build(odd=False)
    engine, *_ = ds.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=configuration(2, stage)
    )
    data = batches(STEPS, ACCUMULATE, 2)
    run(engine, data, rank)

    other = build(odd=False)
    for block in other.blocks:
        fully_shard(block)
    fully_shard(other)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for step in data:
        for microbatch in step:
            (other(microbatch[rank]) / ACCUMULATE).backward()
        torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    found = whole(engine)
    return max((found[name] - value.full_tensor()).abs().max().item() for name, value in other.named_parameters())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_agrees_with_ddp_and_fsdp2(ranks: Ranks, stage: int) -> None:
    assert max(ranks.run(2, against_ddp, stage)) < 1e-6
    assert max(ranks.run(2, against_fsdp, stage)) < 1e-6


def train_half(rank: int, config: dict[str, Any], half: torch.dtype) -> tuple[float, float, int]:
    """The largest difference to a reference that keeps fp32 masters itself, how far that one went, overflows."""
    world_size = dist.get_world_size()
    model = build()
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    data = batches(STEPS, ACCUMULATE, world_size)
    run(engine, data, rank)

    low = build(half)
    before = [p.detach().float() for p in low.parameters()]
    masters = [torch.nn.Parameter(p.detach().float(), p.requires_grad) for p in low.parameters()]
    optimizer = adamw([m for m in masters if m.requires_grad])
    for step in data:
        total: list[torch.Tensor | None] = [None] * len(masters)
        for microbatch in step:
            for batch in microbatch:
                low.zero_grad()
                (low(batch) * 256.0).backward()
                for at, param in enumerate(low.parameters()):
                    if param.grad is not None:
                        part = param.grad.float() / (256.0 * world_size * ACCUMULATE)
                        total[at] = part if total[at] is None else total[at] + part
        for master, grad in zip(masters, total, strict=True):
            master.grad = grad
        torch.nn.utils.clip_grad_norm_([m for m in masters if m.grad is not None], 0.5)
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(low.parameters(), masters, strict=True):
                param.copy_(master)
    found = whole(engine)
    names = [name for name, _ in low.named_parameters()]
    difference = max((found[n] - m.detach()).abs().max().item() for n, m in zip(names, masters, strict=True))
    moved = max((m.detach() - b).abs().max().item() for m, b in zip(masters, before, strict=True))
    return difference, moved, engine.skipped_steps


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("half", "section", "tolerance"),
    [
        (torch.bfloat16, {"bf16": {"enabled": True}}, 0.03),
        (torch.float16, {"fp16": {"enabled": True, "loss_scale": 256}}, 0.01),
    ],
    ids=["bf16", "fp16"],
)
def test_half_precision_trains_to_a_reference_with_fp32_masters(
    ranks: Ranks, stage: int, half: torch.dtype, section: dict[str, Any], tolerance: float
) -> None:
    """Weights are read in the half precision: bf16 has 8 bits, 2^-8 of values up to 3."""
    config = configuration(2, stage, zero={key: SMALL[key] for key in ("reduce_bucket_size",)}, **section)
    for difference, moved, skipped in ranks.run(2, train_half, config, half):
        assert difference < tolerance
        assert moved > 2 * tolerance or half == torch.bfloat16
        assert skipped == 0


def overflow_on_one_rank(rank: int, stage: int) -> tuple[list[float], list[int], bool, list[torch.Tensor]]:
    model = build(odd=False)
    config = configuration(
        2, stage, gradient_accumulation_steps=1, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
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
    config = configuration(2, 3, zero=SMALL)
    with ds.zero.Init(config_dict_or_path=config):
        model = build(odd=False)
    freed = sum(p.untyped_storage().size() for p in model.parameters())
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


def test_parameters_can_be_cut_as_they_are_made(ranks: Ranks) -> None:
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
    config = configuration(2, stage, gradient_clipping=0.0, sparse_gradients=kind == "config")
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    sent: list[int] = []

    class Listener:
        def begin(self, span: Any) -> None: ...
        def end(self, span: Any) -> None:
            if span.kind == "comm" and span.purpose == "gradient":
                sent.append(span.bytes)

    from dsprof.engine.hooks import subscribe

    stop = subscribe(Listener())
    data = batches(STEPS, ACCUMULATE, 2)
    run(engine, data, rank)
    stop()
    expected.embedding.sparse = False
    reference(expected, adamw, data)
    found = whole(engine)
    difference = max((found[name] - value).abs().max().item() for name, value in expected.named_parameters())
    return difference, len(sent)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("kind", ["module", "config"])
def test_gradients_of_embeddings_travel_as_rows(ranks: Ranks, stage: int, kind: str) -> None:
    for difference, collectives in ranks.run(2, sparse, stage, kind):
        assert difference < 2e-5
        assert collectives == STEPS * 4  # the bucket, the counts, the indices, the rows
