"""Ranks of unequal memory: each holds its share of what ZeRO shards, and trains as one process does."""

from __future__ import annotations

import contextlib
import io
import itertools
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from config_coverage import alive
from ranks import Ranks
from slow_cases import slow_but
from torch import Tensor, nn
from wire_group import reducing_as_nccl

from dsprof import engine as ds
from dsprof.engine import zero
from dsprof.engine.comm import comm
from dsprof.engine.comm.comm import pass_on
from dsprof.engine.config import ConfigError, load
from dsprof.engine.config.parallel import replica_memory
from dsprof.engine.deepspeed import start
from dsprof.engine.deepspeed.fragments import safe_get_full_fp32_param, safe_get_full_optimizer_state
from dsprof.engine.pipe import LayerSpec, PipelineModule
from dsprof.engine.setup import measure_memory
from dsprof.engine.zero.shard import find_sharded

Memory = Sequence[float | None]

WIDTH, STEPS, FEW, ACCUMULATE, BATCH = 7, 20, 5, 2, 4
ELEMENTS = 4 * (WIDTH * WIDTH + WIDTH)


def layers() -> list[Any]:
    return [part for _ in range(4) for part in (LayerSpec(nn.Linear, WIDTH, WIDTH, dtype=torch.float64), torch.tanh)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x - 0.5).square().mean()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(97 * step + rank))


def in_one_process(ranks: int, count: int) -> list[float]:
    net, losses = Net(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(count):
        total = 0.0
        for micro in range(ACCUMULATE):
            loss = torch.stack([net(batch(step * ACCUMULATE + micro, rank)) for rank in range(ranks)]).mean()
            (loss / ACCUMULATE).backward()
            total += loss.item() / ACCUMULATE
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def configuration(stage: int, memory: Any, zero_keys: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    section = {"stage": stage, **({"stage3_param_persistence_threshold": 10} if stage == 3 else {})}
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": ACCUMULATE,
        "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {**section, **(zero_keys or {})},
        **({} if memory is None else {"heterogeneous": {"memory": memory}}),
        **more,
    }


def quiet(model: nn.Module, config: dict[str, Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ds.initialize(model=model, config=config)[0]


def held(engine: Any) -> tuple[int, int]:
    """Bytes of this rank's masters and their states, and of its shards of the parameters."""
    states = getattr(engine.optimizer, "state", {})
    zero = engine.zero
    tensors = [param.master for param in zero.trainable]
    values = (value for state in states.values() for value in state.values())
    tensors += [value for value in values if torch.is_tensor(value) and value.dim()]
    return sum(tensor.nbytes for tensor in tensors), sum(param.shard.nbytes for param in zero.params)


def steps(engine: Any, rank: int, count: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + count):
        total = 0.0
        for micro in range(ACCUMULATE):
            loss = engine(batch(step * ACCUMULATE + micro, rank))
            engine.backward(loss)
            engine.step()
            total += loss.item() / ACCUMULATE
        losses.append(total)
    return losses


def train(rank: int, config: dict[str, Any], count: int = FEW) -> tuple[list[float], tuple[int, int]]:
    """Losses of this rank, and the bytes that it holds."""
    engine = quiet(Net(), config)
    losses = steps(engine, rank, count)
    found = losses, held(engine)
    engine.destroy()
    return found


def mean(losses: Sequence[Sequence[float]]) -> list[float]:
    return [sum(each) / len(each) for each in zip(*losses, strict=True)]


def check(found: Sequence[tuple[list[float], tuple[int, int]]], memory: Memory, expected: Sequence[float]) -> None:
    """The losses, and that each rank has its part of masters, Adam's two states, and shards, to half an element of each
    of the eight parameters."""
    assert mean([losses for losses, _ in found]) == pytest.approx(expected, abs=1e-9)
    total, states = sum(each or 0 for each in memory), 3 * ELEMENTS * 8
    assert sum(bytes_ for _, (bytes_, _) in found) == states
    for (_, (of_state, of_shards)), each in zip(found, memory, strict=True):
        assert of_state == pytest.approx(states * (each or 0) / total, abs=3 * 8 * 4)
        assert of_shards * 3 == of_state
        assert (of_state == 0) == (each is None)


@pytest.mark.parametrize(
    ("stage", "memory"),
    slow_but(
        [(1, [1, 2]), (2, [80, 20, 40]), (3, [1, None, 2])],
        among=itertools.product((1, 2, 3), ([1, 2], [80, 20, 40], [1, None, 2])),
    ),
    ids=str,
)
def test_losses_are_those_of_one_process(ranks: Ranks, stage: int, memory: Memory) -> None:
    found = ranks.run(len(memory), train, configuration(stage, list(memory)), STEPS)
    check(found, memory, in_one_process(len(memory), STEPS))


HOW: dict[str, tuple[int, dict[str, Any]]] = {
    "small buckets": (2, {"reduce_bucket_size": 60, "allgather_bucket_size": 60, "round_robin_gradients": True}),
    "whole gradients": (2, {"reduce_scatter": False, "allgather_partitions": False}),
    "host": (2, {"offload_optimizer": {"device": "cpu"}}),
    "host, half of it": (3, {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
    "parameters in host memory": (3, {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}),
    "tiles": (3, {"sub_group_size": 40, "stage3_prefetch_bucket_size": 60, "stage3_max_live_parameters": 120}),
}


@pytest.mark.parametrize("way", slow_but(["whole gradients", "host, half of it"], among=HOW))
def test_by_whatever_way(ranks: Ranks, way: str) -> None:
    memory, (stage, keys) = [2, 2, None] if way == "whole gradients" else [1, 2, 2], HOW[way]
    found = ranks.run(3, train, configuration(stage, memory, keys))
    expected = in_one_process(3, FEW)
    assert mean([losses for losses, _ in found]) == pytest.approx(expected, abs=1e-9)


def on_disk(rank: int, folder: Path) -> tuple[list[float], tuple[int, int]]:
    (folder / str(rank)).mkdir()
    offload = {"device": "nvme", "nvme_path": str(folder / str(rank))}
    return train(rank, configuration(3, [1, 3], {"offload_optimizer": offload, "offload_param": offload}))


def test_state_on_a_disk(ranks: Ranks, tmp_path: Path) -> None:
    found = ranks.run(2, on_disk, tmp_path)
    expected = in_one_process(2, FEW)
    assert mean([losses for losses, _ in found]) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("kind", slow_but(["Muon"], among=["Lamb", "Muon"]))
def test_optimizers_that_look_at_whole_parameters(ranks: Ranks, kind: str) -> None:
    """By unequal shares they step as by equal ones."""
    optimizer = {"type": kind, "params": {"lr": 1e-2}}
    equal, unequal = (ranks.run(2, train, configuration(2, memory, optimizer=optimizer)) for memory in (None, [1, 2]))
    for (losses, _), (expected, _) in zip(unequal, equal, strict=True):
        assert losses == pytest.approx(expected, abs=1e-9)


def quantized(rank: int, quantize: bool) -> list[float]:
    return train(rank, configuration(3, [1, None, 2], {"zero_quantized_weights": quantize}))[0]


def test_weights_that_travel_in_int8(ranks: Ranks) -> None:
    """Each rank's shard is packed by itself, so what arrives depends on where shards end: not bit for bit the same."""
    plain, packed = (ranks.run(3, quantized, quantize) for quantize in (False, True))
    assert packed != plain
    for losses, expected in zip(packed, plain, strict=True):
        assert losses == pytest.approx(expected, rel=0.02)


def on_the_wire(rank: int, memory: Any) -> int:
    """Bytes that this rank sends for gradients and parameters in a step."""
    engine = quiet(Net(), configuration(2, memory))
    steps(engine, rank, 1)
    sizes: list[int] = []

    def counted(group: Any, sent: Any, received: Any, tag: int = 0) -> None:
        sizes.extend(tensor.nbytes for tensor, _ in sent)
        pass_on(group, sent, received, tag)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "pass_on", counted)
        steps(engine, rank, 1, 1)
    engine.destroy()
    return sum(sizes)


def test_nothing_is_padded_on_the_wire(ranks: Ranks) -> None:
    """Of two micro-batches each rank sends the other's part of the gradients, with nine flags in each; then its own
    part of the weights."""
    small, large = ranks.run(2, on_the_wire, [1, 2])
    assert (small, large) == (8 * (2 * (152 + 9) + 72), 8 * (2 * (72 + 9) + 152))
    equal = ranks.run(2, on_the_wire, None)
    assert equal[0] >= (small + large) / 2


def as_nccl(rank: int, stage: int) -> list[float]:
    with reducing_as_nccl():
        return train(rank, configuration(stage, [1, 2, 0.5]))[0]


@pytest.mark.parametrize("stage", slow_but([3], among=[2, 3]))
def test_where_collectives_are_those_of_nccl(ranks: Ranks, stage: int) -> None:
    expected = in_one_process(3, FEW)
    assert mean(ranks.run(3, as_nccl, stage)) == pytest.approx(expected, abs=1e-9)


def pipeline(rank: int, memory: Any) -> tuple[list[float], int]:
    model = PipelineModule(layers(), loss_fn=nn.functional.mse_loss, seed_layers=True)
    config = configuration(2, memory, pipeline={"stages": 2, "partition_method": "uniform"})
    engine = quiet(model, config)
    losses = []
    for step in range(FEW):
        inputs = (batch(step * ACCUMULATE + micro, rank % 2) for micro in range(ACCUMULATE))
        losses.append(engine.train_batch(iter([(x, x.cumsum(1)) for x in inputs])).item())
    found = losses, sum(param.master.numel() for param in engine.zero.trainable)
    engine.destroy()
    return found


def test_each_stage_of_a_pipeline_is_divided(ranks: Ranks) -> None:
    """Of each replica the rank with the least memory counts: 10 and 20, of 10, 20, 40 and 30."""
    equal, unequal = (ranks.run(4, pipeline, memory) for memory in (None, [10, 20, 40, 30]))
    for (losses, _), (expected, _) in zip(unequal, equal, strict=True):
        assert losses == pytest.approx(expected, abs=1e-9)
    assert [elements for _, elements in equal] == [58, 54, 58, 54]
    assert [elements for _, elements in unequal] == [36, 76, 36, 76]


def resume(rank: int, folder: Path, stage: int, before: Any, after: Any) -> list[list[float]]:
    """Losses of six steps; then those of the last three, from a checkpoint of the third, by other shares."""
    runs = []
    for memory, load_from, first, count in ((before, False, 0, 6), (before, False, 0, 3), (after, True, 3, 3)):
        engine = quiet(Net(), configuration(stage, memory))
        if load_from:
            engine.load_checkpoint(folder)
        runs.append(steps(engine, rank, count, first))
        if count == 3 and not load_from:
            engine.save_checkpoint(folder)
        engine.destroy()
    return [runs[0][3:], runs[2]]


@pytest.mark.parametrize(
    ("stage", "before", "after"),
    slow_but(
        [(2, None, [1, 2]), (3, [1, None], None)],
        among=[(2, None, [1, 2]), (2, [1, 2], None), (3, None, [5, 2]), (3, [1, None], None), (1, [1, 2], [3, 1])],
    ),
)
def test_a_checkpoint_goes_on_by_other_shares(
    ranks: Ranks, tmp_path: Path, stage: int, before: Any, after: Any
) -> None:
    for expected, found in ranks.run(2, resume, tmp_path, stage, before, after):
        assert found == pytest.approx(expected, abs=1e-12)


def early(rank: int) -> tuple[list[int], list[float]]:
    """Elements of each parameter that `zero.Init` leaves here; losses of the model that is trained on."""
    config = configuration(3, [1, 2])
    with zero.Init(config_dict_or_path=config):
        net = Net()
    sizes = [len(found.shard) for param in net.parameters() if (found := find_sharded(param)) is not None]
    engine = quiet(net, config)
    losses = steps(engine, rank, 3)
    engine.destroy()
    return sizes, losses


def test_a_model_that_is_sharded_as_it_is_made(ranks: Ranks) -> None:
    (slight, some), (large, others) = ranks.run(2, early)
    assert (slight, large) == ([16, 2] * 4, [33, 5] * 4)
    expected = in_one_process(2, 3)
    assert mean([some, others]) == pytest.approx(expected, abs=1e-9)


def fragments(rank: int) -> list[bool]:
    engine = start.initialize(model=Net(), config=configuration(3, [1, 2]))[0]
    steps(engine, rank, 1)
    param = engine.module.layers[0].weight
    whole, state = safe_get_full_fp32_param(param), safe_get_full_optimizer_state(param, "exp_avg")
    assert whole is not None
    assert state is not None
    with zero.GatheredParameters(param):
        same = torch.equal(whole, param.data)
    engine.destroy()
    return [same, state.shape == whole.shape, bool(state.abs().min() > 0)]


def test_what_deepspeed_s_utilities_read(ranks: Ranks) -> None:
    assert ranks.run(2, fragments) == [[True, True, True]] * 2


# --- what is said


@pytest.mark.parametrize(
    ("keys", "memory", "says"),
    [
        ({}, [1, 2, 3], "heterogeneous.memory: 3 numbers, and the job has 2 ranks; write one for each rank, or "
         '"measure"'),
        ({}, [1, 0], "heterogeneous.memory: 0 for rank 1 is not a number above 0; write how much it has, such as 40 "
         "for 40 GiB, or null for a rank that is to hold no shards"),
        ({}, [None, None], "heterogeneous.memory: null in every data-parallel replica: none holds any state; write "
         "numbers for one at least"),
        ({}, "all", 'heterogeneous.memory: "all" is neither "measure" nor a list with the memory of each rank, such as '
         "[1, 2]"),
        ({"zero_hpz_partition_size": 2}, [1, 2], 'heterogeneous.memory: given, and "zero_hpz_partition_size": 2 has '
         "ranks hold equal shards of a second partition; remove one of them"),
        ({"zero_quantized_gradients": True}, "measure", 'heterogeneous.memory: given, and "zero_quantized_gradients" '
         "sends equal parts of gradients to all ranks; remove one of them"),
    ],
)  # fmt: skip
def test_memory_that_cannot_be(keys: dict[str, Any], memory: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(configuration(3, memory, keys), world_size=2)
    assert caught.value.problems == (says,) or list(caught.value.problems) == [says]


def test_one_bit_optimizers_do_not_shard() -> None:
    raw = configuration(0, [1, 2], optimizer={"type": "OneBitAdam", "params": {}})
    assert load(raw, world_size=2).warnings == [
        'heterogeneous.memory: has no effect; the stage is 0, and it takes "stage": 1 or more'
    ]
    raw["zero_optimization"]["stage"] = 1
    with pytest.raises(ConfigError, match="OneBitAdam compresses whole gradients on every rank, which ZeRO shards"):
        load(raw, world_size=2)


def test_memory_of_one_rank_has_no_effect() -> None:
    assert load(configuration(2, [1]), world_size=1).warnings == [
        "heterogeneous.memory: has no effect; there is one data-parallel rank"
    ]


def test_a_replica_has_what_its_smallest_rank_has() -> None:
    assert replica_memory([40, 80, 80, 20], 2, 1) == [40, 20]
    assert replica_memory([40, 80, 80, 20], 1, 2) == [40, 20]
    assert replica_memory([40, None, 80, 20], 2, 1) == [40, 0]


# --- memory that is measured


def measure(rank: int, folder: Path) -> tuple[int, str]:
    limit = folder / str(rank)
    limit.write_text(["max", "1000000\n"][rank])
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as log:
        patch.setattr(measure_memory, "LIMIT", limit)
        patch.setattr(measure_memory.os, "sysconf", lambda name: 2000 if name == "SC_PHYS_PAGES" else 1000)
        engine = quiet(Net(), configuration(2, "measure"))
    elements = sum(param.master.numel() for param in engine.zero.trainable)
    engine.destroy()
    return elements, log.getvalue()


def test_memory_is_measured(ranks: Ranks, tmp_path: Path) -> None:
    """Of a host of 2 MB, in which the second rank's container may have 1 MB."""
    (first, log), (second, silent) = ranks.run(2, measure, tmp_path)
    assert (first, second) == (152, 72)
    assert silent == ""
    assert log == "heterogeneous: the ranks have 0.00186, 0.000931 GiB, so they hold shards as [1.0, 0.5]\n"


@alive("heterogeneous.memory")
def test_memory_divides_what_is_held(ranks: Ranks) -> None:
    (_, (less, _)), (_, (more, _)) = ranks.run(2, train, configuration(1, [1, 2]))
    assert (less, more) == (3 * 8 * 72, 3 * 8 * 152)
