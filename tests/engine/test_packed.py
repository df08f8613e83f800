"""Weights and gradients that travel in fewer bytes than they have: what they become, how many bytes there are on the
wire, and how a training goes on with it."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from config_coverage import alive
from engines import WIDTH, configuration, engine_for
from float8_models import float8
from ranks import Ranks
from spans import comms, recorded
from torch import Tensor, nn

from dsprof import engine as ds
from dsprof.engine.config import ConfigError, load
from dsprof.engine.setup.initialize import ranks_by_machine
from dsprof.engine.zero.packed import BLOCK, Blocks

torch.set_num_threads(1)

BENCHMARKS: Final = Path(__file__).parents[2] / "benchmarks"

# --- blocks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 5, BLOCK - 1, BLOCK, 3 * BLOCK + 7])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_number_is_off_by_half_a_step_at_most(bits: int, count: int, dtype: torch.dtype) -> None:
    torch.manual_seed(count)
    values = torch.randn(2, 3, count).to(dtype)
    into = torch.full((2, 3, Blocks(bits).nbytes(count)), 255, dtype=torch.uint8)
    Blocks(bits).encode(values, into)
    found = Blocks(bits).decode(into, count, dtype)
    assert (found.dtype, found.shape) == (values.dtype, values.shape)
    for at in range(0, count, BLOCK):
        block = values[..., at : at + BLOCK].double()
        step = block.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
        rounding = block.abs() * torch.finfo(dtype).eps if dtype.itemsize == 2 else 1e-6
        assert ((found[..., at : at + BLOCK].double() - block).abs() <= 0.5 * step + rounding + 1e-6 * step).all()


def test_bytes_of_blocks() -> None:
    assert [Blocks(8).nbytes(n) for n in (0, 1, 4, BLOCK, BLOCK + 1)] == [0, 8, 8, BLOCK + 4, BLOCK + 4 + 8]
    assert [Blocks(4).nbytes(n) for n in (0, 1, 9, BLOCK)] == [0, 8, 12, BLOCK // 2 + 4]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(bits: int, bad: float) -> None:
    values = torch.ones(2 * BLOCK)
    values[3] = bad
    into = torch.empty(Blocks(bits).nbytes(2 * BLOCK), dtype=torch.uint8)
    Blocks(bits).encode(values, into)
    found = Blocks(bits).decode(into, 2 * BLOCK, torch.float32)
    assert not found[3].isfinite()
    assert found[BLOCK:].tolist() == [1.0] * BLOCK
    assert Blocks(bits).decode(torch.zeros_like(into), 2 * BLOCK, torch.float32).tolist() == [0.0] * 2 * BLOCK


# --- models


class Net(nn.Module):
    """Four linear layers whose sizes 16 divides, and a table."""

    def __init__(self, width: int = 64) -> None:
        torch.manual_seed(3)
        super().__init__()
        self.table = nn.Embedding(20, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x.float().square().mean()


STAGE3 = {"stage3_param_persistence_threshold": 100, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}


def settings(stage: int = 3, *, zero: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    kept = STAGE3 if stage == 3 else {}
    return configuration(stage, zero={**kept, **(zero or {})}, **more)


def ids(rank: int, step: int) -> Tensor:
    return (torch.arange(6).view(2, 3) * (step + 1) + 5 * rank) % 20


Trained = tuple[list[float], list[Tensor], list[tuple[str, str, int]]]


def train(
    rank: int, config: dict[str, Any], steps: int = 4, ranks_a_machine: int = 0, model: type[nn.Module] = Net
) -> Trained:
    """Losses, weights, and what this rank has sent in the last step: name, lane and bytes."""
    warnings.simplefilter("ignore")
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if ranks_a_machine:
        os.environ["LOCAL_WORLD_SIZE"] = str(ranks_a_machine)
    try:
        with engine_for(model(), config) as engine, recorded() as spans:
            losses = []
            for step in range(steps * engine.gradient_accumulation_steps()):
                loss = engine(ids(rank, step))
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
            with ds.zero.GatheredParameters(list(engine.module.parameters())):
                weights = [param.detach().clone() for param in engine.module.parameters()]
            last = steps - 1
            sent = [(span.name, span.lane, span.bytes or 0) for purpose in ("parameter", "gradient")
                    for span in comms(list(spans), purpose, last)]  # fmt: skip
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE", None)
    return losses, weights, sent


def moved(found: list[Tensor]) -> Tensor:
    """How far training has moved the weights."""
    before = [param.detach() for param in Net().parameters()]
    return torch.cat([(a.double() - b.double()).flatten() for a, b in zip(found, before, strict=True)])


def apart(one: Trained, other: Trained) -> float:
    mine, theirs = moved(one[1]), moved(other[1])
    return ((mine - theirs).norm() / theirs.norm()).item()


def bytes_of(trained: Trained, *names: str) -> int:
    return sum(size for name, _, size in trained[2] if name in names)


# --- weights in float8


@pytest.mark.parametrize("bf16", [True, False])
def test_weights_of_float8_layers_are_gathered_in_float8(ranks: Ranks, bf16: bool) -> None:
    """A byte an element, where bf16 takes two; bit for bit what comes of casts after a gather."""
    keys = {**float8(), "bf16": {"enabled": bf16}, "gradient_accumulation_steps": 2}
    found = ranks.run(2, train, settings(zero={"stage3_max_reuse_distance": 10**9}, **keys))
    cast_after = ranks.run(2, train, settings(2, **keys))
    without = ranks.run(2, train, settings(zero={"stage3_max_reuse_distance": 10**9}, **keys | {"fp8": {}}))
    for mine, theirs in zip(found, cast_after, strict=True):
        assert mine[0] == theirs[0]
        assert all(map(torch.equal, mine[1], theirs[1]))
    whole = bytes_of(without[0], "all_gather")
    layers, item = 4 * 64 * 64, 2 if bf16 else 4
    assert whole - bytes_of(found[0], "all_gather") == 2 * layers * (item - 1)  # of two micro-batches
    agreed = [size for name, lane, size in found[0][2] if (name, lane) == ("all_reduce", "comm.parameters")]
    assert agreed == [4 * 4] * 2


def test_rowwise_and_layers_without_float8_are_gathered_as_they_are(ranks: Ranks) -> None:
    (plain, _) = ranks.run(2, train, settings(**float8(recipe="rowwise")))
    (all_, _) = ranks.run(2, train, settings())
    (some, _) = ranks.run(2, train, settings(**float8(skip=["layers.0", "layers.1"])))
    assert bytes_of(plain, "all_gather") == bytes_of(all_, "all_gather")
    assert (
        bytes_of(all_, "all_gather") - bytes_of(some, "all_gather") == (2 * 2 - 1) * 64 * 64 * 3
    )  # the last one stays for backward


def seen_meanwhile(rank: int, config: dict[str, Any]) -> tuple[bool, bool, list[Tensor], list[Tensor]]:
    """Whether a layer's weight, whole in forward, is what it is outside; the weights that are gathered between forward
    and backward, and those after the same steps without."""
    warnings.simplefilter("ignore")
    found, exact = [], []
    for look in (True, False):
        with engine_for(Net(), config) as engine:
            for step in range(3):
                loss = engine(ids(rank, step))
                if look and step == 2:
                    sharded = engine.zero.params[1]
                    before = sharded.param.detach().clone()
                    with ds.zero.GatheredParameters(list(engine.module.parameters())):
                        weights = [param.detach().clone() for param in engine.module.parameters()]
                    found = [torch.equal(before, weights[1]), sharded.exact]
                if not look and step == 2:
                    engine.zero_grad()
                    break
                engine.backward(loss)
                engine.step()
            with ds.zero.GatheredParameters(list(engine.module.parameters())):
                exact.append([param.detach().clone() for param in engine.module.parameters()])
    return found[0], found[1], weights, exact[1]


@pytest.mark.parametrize(
    "keys",
    [
        float8(),
        {"zero": {"zero_quantized_weights": True}},
        {"zero": {"zero_quantized_weights": True, "zero_hpz_partition_size": 2}},
    ],
    ids=["float8", "int8", "int8, hpZ"],
)
def test_who_gathers_weights_gets_them_as_they_are(ranks: Ranks, keys: dict[str, Any]) -> None:
    zero = {"stage3_max_reuse_distance": 10**9, **keys.get("zero", {})}
    config = settings(zero=zero, **{name: value for name, value in keys.items() if name != "zero"})
    for same, exact, weights, others in ranks.run(2, seen_meanwhile, config):
        assert not same
        assert exact
        assert all(map(torch.equal, weights, others))


def written_outside(rank: int, config: dict[str, Any]) -> float:
    """How far a layer that is called by itself is from its weights, which a script has made 50 times as large."""
    warnings.simplefilter("ignore")
    with engine_for(Net(), config) as engine:
        for step in range(2):
            engine.backward(engine(ids(rank, step)))
            engine.step()
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
        layer = engine.module.layers[0]
        with torch.no_grad():
            engine(ids(rank, 2))
            with ds.zero.GatheredParameters(layer.weight, modifier_rank=0):
                layer.weight.mul_(50)
            found = layer(x)
            with ds.zero.GatheredParameters(layer.parameters()):
                expected = nn.functional.linear(x, layer.weight, layer.bias)
    return float((found - expected).norm() / expected.norm())


def test_a_scale_does_not_outlive_the_weights_it_is_of(ranks: Ranks) -> None:
    """The rest would be cut off at float8's largest number."""
    assert max(ranks.run(2, written_outside, settings(**float8()))) < 0.1


# --- ZeRO++


@alive("zero_optimization.zero_quantized_weights")
def test_quantized_weights(ranks: Ranks) -> None:
    """Half of bf16's bytes and a scale for each 256 elements; the weights that are trained are fp32's."""
    bf16 = {"bf16": {"enabled": True}}
    (plain, _), (found, _) = (
        ranks.run(2, train, settings(zero={"zero_quantized_weights": on}, **bf16)) for on in (False, True)
    )
    layer, table = 64 * 64, 20 * 64
    packed = [2 * (size // 2 + 4 * -(-size // 2 // BLOCK)) for size in (layer, table)]
    assert (
        bytes_of(plain, "all_gather") - bytes_of(found, "all_gather")
        == (2 * layer - packed[0]) * 7 + 2 * table - packed[1]
    )
    assert 0 < apart(found, plain) < 0.05
    again = ranks.run(2, train, settings(zero={"zero_quantized_weights": True}, **bf16))
    assert all(map(torch.equal, found[1], again[0][1]))
    assert all(map(torch.equal, found[1], again[1][1]))


@alive("zero_optimization.zero_quantized_gradients")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_quantized_gradients(ranks: Ranks, stage: int) -> None:
    """Gradients of matrices by all-to-all, an eighth of fp32's bytes; those of vectors as they were."""
    zero = {"zero_quantized_gradients": True}
    plain, found = ranks.run(2, train, settings(stage)), ranks.run(2, train, settings(stage, zero=zero))
    again = ranks.run(2, train, settings(stage, zero=zero))
    whole = 4 * 64 * 64 + 20 * 64
    sent = 2 * (Blocks(4).nbytes(whole // 2) + 8)  # with a flag for each of five parameters, and their bucket's own
    assert bytes_of(found[0], "all_to_all") == sent
    assert bytes_of(found[0], "reduce_scatter") == 4 * (4 * 64 + 2 * 5)
    assert bytes_of(plain[0], "reduce_scatter") == 4 * (whole + 4 * 64 + 2 * 10)
    assert 0 < apart(found[0], plain[0]) < 0.15
    assert all(map(torch.equal, found[0][1], found[1][1]))
    assert all(map(torch.equal, found[0][1], again[0][1]))


def test_over_machines_a_row_of_each_travels(ranks: Ranks) -> None:
    """Four ranks on two machines: two rows within one, and then one over the network."""
    zero = {"zero_quantized_gradients": True}
    near = ranks.run(4, train, settings(2, zero=zero), 4, 2)
    flat = ranks.run(4, train, settings(2, zero=zero))
    plain = ranks.run(4, train, settings(2))
    row = Blocks(4).nbytes((4 * 64 * 64 + 20 * 64) // 4) + 8
    lanes = [(lane, size) for name, lane, size in near[0][2] if name == "all_to_all"]
    assert lanes == [("comm.gradients.near", 4 * row), ("comm.gradients.far", 2 * row)]
    assert [size for name, _, size in flat[0][2] if name == "all_to_all"] == [4 * row]
    for found in (near, flat):
        assert 0 < apart(found[0], plain[0]) < 0.2
        assert all(torch.equal(a, b) for each in found[1:] for a, b in zip(found[0][1], each[1], strict=True))


def on_unequal_machines(rank: int, config: dict[str, Any], sizes: list[int]) -> list[str]:
    """The lanes of the last step's all-to-alls, where this rank's launcher says that its machine has so many ranks."""
    found = train(rank, config, 1, sizes[rank])
    return [lane for name, lane, _ in found[2] if name == "all_to_all"]


def test_machines_with_other_numbers_of_ranks_are_not_told_apart(ranks: Ranks) -> None:
    """The ranks of one alone would take it that all are like theirs, and open other groups."""
    config = settings(2, zero={"zero_quantized_gradients": True})
    assert ranks.run(6, on_unequal_machines, config, [4, 4, 4, 4, 2, 2]) == [["comm.gradients"]] * 6


@pytest.mark.parametrize(
    ("size", "sets", "found"),
    [
        (2, [[0, 1, 2, 3]], [[[0, 1], [2, 3]]]),
        (4, [[0, 2, 4, 6], [1, 3, 5, 7]], [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]),
        (4, [[0, 1, 2, 3]], None),
        (1, [[0, 1]], None),
        (4, [[0, 1, 2, 3, 4, 5]], None),
        (0, [[0, 1]], None),
    ],
)
def test_machines(size: int, sets: Any, found: Any) -> None:
    assert ranks_by_machine(sets, size) == found


FP16 = {"enabled": True, "initial_scale_power": 4}
BOTH = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
OFFLOADED = {"device": "cpu", "pin_memory": False}


@pytest.mark.parametrize(
    ("world", "zero", "keys"),
    [
        (2, {}, {"bf16": {"enabled": True}, "gradient_accumulation_steps": 3, "gradient_clipping": 0.1}),
        (2, {"reduce_bucket_size": 1000, "contiguous_gradients": False}, {"prescale_gradients": True}),
        (3, {"allgather_partitions": False, "overlap_comm": False}, {"communication_data_type": "bf16"}),
        (4, {"zero_hpz_partition_size": 2}, {"bf16": {"enabled": True}}),
        (2, {"offload_param": OFFLOADED, "offload_optimizer": OFFLOADED}, {"bf16": {"enabled": True}}),
        (3, {"round_robin_gradients": True}, float8()),
        (2, {}, {"activation_checkpointing": {"policy": "full", "blocks": ["layers.*"]}, "fp16": FP16}),
    ],
    ids=["accumulation, clipping", "buckets", "broadcasts", "hpZ", "offload", "float8, uneven", "fp16, recomputation"],
)  # fmt: skip
def test_it_trains_beside_everything_else(ranks: Ranks, world: int, zero: dict[str, Any], keys: dict[str, Any]) -> None:
    plain = ranks.run(world, train, settings(zero=zero, **keys))
    found = ranks.run(world, train, settings(zero=zero | BOTH, **keys))
    assert 0 < apart(found[0], plain[0]) < 0.2
    for each in found[1:]:
        assert all(map(torch.equal, found[0][1], each[1]))


def overflowing(rank: int) -> tuple[int, bool]:
    """Steps that were left out, and whether all weights are numbers."""
    config = settings(zero=BOTH, fp16={"enabled": True, "initial_scale_power": 30})
    with engine_for(Net(), config) as engine:
        for step in range(3):
            engine.backward(engine(ids(rank, step)))
            engine.step()
        skipped = engine.skipped_steps
        with ds.zero.GatheredParameters(list(engine.module.parameters())):
            finite = all(bool(param.isfinite().all()) for param in engine.module.parameters())
    return skipped, finite


def test_an_overflow_is_found(ranks: Ranks) -> None:
    assert ranks.run(2, overflowing) == [(3, True)] * 2


def gpt_losses(rank: int, zero: dict[str, Any]) -> list[float]:
    """Of benchmarks/zeropp.py's model, on this rank."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        from float8 import GPT, batches
    finally:
        sys.path.remove(str(BENCHMARKS))
    torch.manual_seed(1)
    optimizer = {"type": "AdamW", "params": {"lr": 3e-3}}
    config = settings(zero=zero, bf16={"enabled": True}, optimizer=optimizer, gradient_clipping=1.0)
    losses = []
    with engine_for(GPT(32, 2, 2), config) as engine:
        for ids in batches(80)[rank::2]:
            loss = engine(ids)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


def test_the_loss_of_a_gpt_falls_as_in_stage_3(ranks: Ranks) -> None:
    """The first steps of what benchmarks/zeropp.py measures: 150 steps end 0.5 % above."""
    plain, found = (ranks.run(2, gpt_losses, zero)[0] for zero in ({}, BOTH))
    assert plain != found
    assert sum(plain[-10:]) < 0.8 * sum(plain[:10])
    assert sum(found[-10:]) == pytest.approx(sum(plain[-10:]), rel=0.03)


class Branches(nn.Module):
    """Only rank 0 uses the first layer, and nobody the second."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__()
        self.one, self.never, self.all = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.all(x)
        return (y + (self.one(x) if x[0, 0] > 0 else 0)).square().mean()


def branching(rank: int, quantized: bool) -> list[Tensor]:
    zero = {"zero_quantized_gradients": quantized}
    config = configuration(2, zero=zero, optimizer={"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.5}})
    with engine_for(Branches(), config) as engine:
        engine.backward(engine(torch.ones(2, WIDTH) if rank == 0 else -torch.ones(2, WIDTH)))
        engine.step()
        return [param.detach().clone() for param in engine.module.parameters()]


def test_what_no_rank_used_is_left_alone(ranks: Ranks) -> None:
    """And what one has used is not: flags travel as they are."""
    for found, expected in zip(*(ranks.run(2, branching, quantized) for quantized in (True, False)), strict=True):
        before = list(Branches().parameters())
        assert torch.equal(found[1], before[1])
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0.25)
        assert not torch.equal(found[0], before[0])


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"zero_optimization": {"stage": 2, "zero_quantized_gradients": True, "reduce_scatter": False}},
         'zero_optimization.zero_quantized_gradients: true, and "reduce_scatter" is false'),
        ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}, "optimizer": {"type": "Muon"}},
         'the optimizer "Muon" makes the smallest parts of a gradient as large as the others'),
    ],
)  # fmt: skip
def test_what_cannot_be_quantized_is_refused(keys: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load({"train_micro_batch_size_per_gpu": 1, **keys}, world_size=2)
    assert says in str(refused.value)


@pytest.mark.parametrize(("stage", "world", "idle"), [(0, 2, 2), (2, 2, 1), (3, 2, 0), (3, 1, 1)])
def test_where_it_has_no_effect_is_said(stage: int, world: int, idle: int) -> None:
    keys = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage, **BOTH}}
    told = load(keys, world_size=world).warnings
    assert len(told) == idle
    assert all("no effect" in one and "zero_quantized" in one for one in told)
