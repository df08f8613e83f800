"""Stage 3 where a model does what modules' hooks do not tell of, and where its memory goes."""

from __future__ import annotations

import copy
import itertools
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from engines import ALONE, stored_bytes, watch_peak
from ranks import Ranks
from slow_cases import slow_but
from spans import comms, recorded
from squared import Squared
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from dsprof import engine as ds
from dsprof.engine.train.engine import Engine
from dsprof.engine.zero import gather
from dsprof.engine.zero.fetch_order import CurrentPass, ModuleParams, Pass
from dsprof.engine.zero.shard import ShardedParam
from dsprof.engine.zero.shares import Partition, equal

WIDTH = 8
LAYER = WIDTH * WIDTH + WIDTH
TIGHT = {"stage3_max_reuse_distance": 0, "stage3_max_live_parameters": 1, "stage3_prefetch_bucket_size": 0}


def linear(**kind: Any) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, **kind)


def engine_for(model: nn.Module, **zero: Any) -> Engine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
    }
    engine: Engine = ds.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    return engine


def batch(step: int, rank: int) -> Tensor:
    seed = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 5, WIDTH, dtype=torch.float64, generator=seed)


# --- whatever a model does, it trains to the same weights


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.middle(torch.tanh(self.first(x))))
        return y


class KeepsReferences(Plain):
    """Modules' hooks do not see them, nor does a look at an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.middle.weight, self.first.bias]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(F.linear(self.first(x), *self.kept))
        return y


class AddsInPlace(Plain):
    """The output of a Linear on three dimensions is a view."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        y: Tensor = self.middle(x)
        y += x
        z: Tensor = self.last(y)
        return z


class UsesDetached(Plain):
    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(self.first(x), self.middle.weight.detach())
        y: Tensor = self.last(F.linear(torch.tanh(x), self.middle.weight, self.middle.bias))
        return y


class KeepsLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.extra = torch.tensor(0.0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.extra = torch.tanh(self.layer.weight).pow(2).mean() * self.layer.weight.pow(2).mean()
        return y


class LossInAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = KeepsLoss(), KeepsLoss()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x))
        return y + self.first.extra + self.last.extra


class Opaque:
    __slots__ = ("value",)

    def __init__(self, value: Tensor) -> None:
        self.value = value


class GivesOpaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Opaque:
        return Opaque(F.linear(x, self.layer.weight, self.layer.bias))


class OutputsOpaque(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = GivesOpaque(), linear()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x).value)
        return y


class Adapted(nn.Module):
    """LoRA, its base called by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.base = linear().requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, *, x: Tensor) -> Tensor:
        return torch.tanh(self.base(input=x) + self.up(self.down(x)))


class AdaptedLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Adapted() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x=x)
        return x


class Forces(Plain):
    """A gradient within forward, and a loss of it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = super().forward(x).pow(2).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force * self.last.bias


class ReadsBeforeAnotherRuns(Plain):
    """By the time the first weight is used, others have been fetched."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        weight = self.first.weight
        y: Tensor = self.last(self.middle(x)) @ weight
        return y


class Recomputes(Plain):
    def inner(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(self.middle(x), self.middle.weight.detach()) @ self.middle.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.inner, self.first(x), use_reentrant=False)
        y: Tensor = self.last(checkpoint(self.inner, x, use_reentrant=True))
        return y


class FrozenMiddle(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.middle.requires_grad_(False)


class Limited(Plain):
    """Forward writes to the table's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, WIDTH, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.table(torch.arange(5)))


class OwnParameter(nn.Parameter):
    pass


class Decayed(Plain):
    """Hooks on the gradients read the parameters, which are of a class of the script's own."""

    def __init__(self) -> None:
        super().__init__()
        for layer in (self.first, self.middle, self.last):
            layer.weight, layer.bias = OwnParameter(layer.weight.data), OwnParameter(layer.bias.data)
        self.watched = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.watched:
            self.watched = True
            for param in self.parameters():
                param.register_hook(lambda grad, param=param: grad * param.detach().abs().mean())
        return super().forward(x)


Backward = Callable[..., Any]


def once(call: Callable[[Tensor], Tensor], backward: Backward, x: Tensor) -> None:
    backward(call(x).pow(2).mean())


def twice(call: Callable[[Tensor], Tensor], backward: Backward, x: Tensor) -> None:
    y = call(x)
    backward(y[..., 0].pow(2).mean(), retain_graph=True)
    backward(y[..., 1:].pow(2).mean())


def recomputing_all(call: Callable[[Tensor], Tensor], backward: Backward, x: Tensor) -> None:
    backward(checkpoint(call, x, use_reentrant=False).pow(2).mean())


def penalised(call: Callable[[Tensor], Tensor], backward: Backward, x: Tensor) -> None:
    x.requires_grad_()
    y = call(x).pow(2).mean()
    (grad,) = torch.autograd.grad(y, x, create_graph=True)
    backward(y + grad.pow(2).sum())


def weights_penalised(call: Callable[[Tensor], Tensor], backward: Backward, x: Tensor) -> None:
    """Backward finds what was used within the block."""
    assert isinstance(call, nn.Module)
    with ds.zero.GatheredParameters(call.parameters()):
        penalty = torch.stack([param.pow(2).sum() for param in call.parameters()]).sum()
    backward(call(x).pow(2).mean() + 0.1 * penalty)


CASES: dict[str, tuple[type[nn.Module], Callable[..., None]]] = {
    "two backwards": (Plain, twice),
    "in place": (AddsInPlace, once),
    "in place, two backwards": (AddsInPlace, twice),
    "detached": (UsesDetached, once),
    "loss in an attribute": (LossInAttribute, once),
    "opaque output": (OutputsOpaque, once),
    "frozen by keyword": (AdaptedLayers, once),
    "forces": (Forces, once),
    "gradient penalty": (Plain, penalised),
    "all recomputed": (UsesDetached, recomputing_all),
    "parts recomputed": (Recomputes, once),
    "read early": (ReadsBeforeAnotherRuns, once),
    "references kept": (KeepsReferences, once),
    "weights penalised": (Plain, weights_penalised),
    "frozen, gradient penalty": (FrozenMiddle, penalised),
    "a table with a limit": (Limited, once),
    "hooks on parameters of another class": (Decayed, once),
}


def trains(rank: int, name: str, zero: dict[str, Any]) -> tuple[float, int]:
    """The largest difference to one process after three steps, and the elements that are whole then."""
    make, step = CASES[name]
    torch.manual_seed(0)
    model = make().double()
    expected = copy.deepcopy(model)
    engine = engine_for(model, **zero)
    optimizer = torch.optim.SGD((p for p in expected.parameters() if p.requires_grad), lr=0.1)
    for number in range(3):
        step(engine, engine.backward, batch(number, rank))
        engine.step()
        optimizer.zero_grad()
        for other in range(2):
            step(expected, lambda loss, **how: (loss / 2).backward(**how), batch(number, other))
        optimizer.step()
    assert engine.zero.fetcher is not None
    live = engine.zero.fetcher.live_params.live
    with ds.zero.GatheredParameters(model.parameters()):
        pairs = zip(model.parameters(), expected.parameters(), strict=True)
        return max((mine - other).abs().max().item() for mine, other in pairs), live


ROOMS = {"roomy": {}, "tight": TIGHT}


@pytest.mark.parametrize(
    ("name", "room"),
    slow_but(
        [(name, "tight" if number % 4 else "roomy") for number, name in enumerate(CASES)],
        among=itertools.product(CASES, ROOMS),
    ),
)
def test_what_hooks_do_not_see_trains_to_the_reference(ranks: Ranks, name: str, room: str) -> None:
    """In `make test` each case once, most of them where parameters are freed as soon as they can be."""
    zero = ROOMS[room]
    for difference, live in ranks.run(2, trains, name, zero):
        assert difference < 1e-12
        assert live == 0


# --- parameters that are not there


def reads(rank: int) -> tuple[list[str], list[Any]]:
    """What uses of a parameter outside the model say, and what may be asked of it."""
    model = Plain()
    engine = engine_for(model)
    weight = model.first.weight
    said = []
    for use in (
        weight.sum, weight.norm, weight.item, lambda: weight.data, lambda: weight + 1, lambda: F.linear(weight, weight),
        lambda: torch.stack([weight]), lambda: copy.deepcopy(model), lambda: pickle.dumps(weight), model.state_dict,
        lambda: weight.requires_grad_(False).fill_(1.0), model.double,
    ):  # fmt: skip
        with pytest.raises(RuntimeError) as error:
            use()
        said.append(str(error.value))
    weight.requires_grad_(True)
    asked = [
        repr(weight), tuple(weight.shape), weight.numel(), weight.dtype, weight.is_leaf, weight.grad,
        torch.zeros_like(weight).shape == weight.shape, isinstance(weight, nn.Parameter), model.to("cpu") is model,
        sum(map(stored_bytes, engine.zero.params)),
    ]  # fmt: skip
    with ds.zero.GatheredParameters(model.parameters()):
        copied, state = copy.deepcopy(model), model.state_dict()
        kinds = {type(param) for param in (*model.parameters(), *copied.parameters())}
        asked += [kinds == {nn.Parameter}, all(torch.equal(copied.state_dict()[name], state[name]) for name in state)]
    return said, asked


def test_a_sharded_parameter_has_its_shape_and_refuses_to_be_used(ranks: Ranks) -> None:
    for said, asked in ranks.run(2, reads):
        for text in said:
            assert "the parameter first.weight is sharded (ZeRO stage 3), and is fetched while the model's" in text
            assert "takes `with zero.GatheredParameters(parameters):` around it, on all ranks" in text
        assert asked == [
            "Parameter first.weight, sharded (ZeRO stage 3), shape (8, 8), torch.float32", (8, 8), 64,
            torch.float32, True, None, True, True, True, 0, True, True,
        ]  # fmt: skip


def inside_gathered(rank: int) -> tuple[list[int], int, bool, int]:
    """Bytes stored after an evaluation in the block, what is live then, whether ranks agree, and live at the end."""
    model = Plain()
    engine = engine_for(model)
    x = torch.ones(2, WIDTH)
    assert engine.zero.fetcher is not None
    with ds.zero.GatheredParameters(model.parameters(), modifier_rank=1):
        with torch.no_grad():
            model.middle.weight.fill_(float(rank))
            engine(x)
        stored = list(map(stored_bytes, engine.zero.params))
        live = engine.zero.fetcher.live_params.live
    with torch.no_grad():
        engine(x)
    after = engine.zero.fetcher.live_params.live
    with ds.zero.GatheredParameters(model.middle.weight):
        same = bool((model.middle.weight == 1.0).all())
    return stored, live, same, after


def test_gathered_parameters_stay_whole_and_are_counted(ranks: Ranks) -> None:
    for stored, live, same, after in ranks.run(2, inside_gathered):
        assert stored == [4 * WIDTH * WIDTH, 4 * WIDTH] * 3
        assert live == 3 * LAYER
        assert same
        assert after == 0


def shared_with_numpy(rank: int) -> tuple[list[str], float, bool]:
    """What is not sharded, how far the weights are from the reference's, and whether numpy's copies stayed."""
    torch.manual_seed(0)
    model, expected = Plain(), Plain()
    expected.load_state_dict(model.state_dict())
    arrays = [model.first.weight.detach().numpy()]  # torch never resizes a storage that numpy has seen
    engine = engine_for(model)
    x = torch.ones(2, WIDTH)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    with ds.zero.GatheredParameters(model.parameters()):
        arrays.append(model.middle.weight.detach().numpy())
    kept = [array.copy() for array in arrays]
    for _ in range(2):
        loss = engine(x).square().sum()
        with ds.zero.GatheredParameters(model.last.weight):  # what autograd has saved of it is in the storage it leaves
            arrays.append(model.last.weight.detach().numpy())
        engine.backward(loss)
        engine.step()
        optimizer.zero_grad()
        expected(x).square().sum().backward()
        nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
        optimizer.step()
    sharded = [param.name for param in engine.zero.params if stored_bytes(param)]
    with ds.zero.GatheredParameters(model.parameters()):
        pairs = zip(model.parameters(), expected.parameters(), strict=True)
        difference = max((found - wanted).abs().max().item() for found, wanted in pairs)
    return sharded, difference, all((one == two).all() for one, two in zip(arrays, kept, strict=False))


def test_a_storage_that_numpy_shares_is_left_to_it(ranks: Ranks) -> None:
    for sharded, difference, kept in ranks.run(2, shared_with_numpy):
        assert sharded == []
        assert difference < 1e-6
        assert kept


def gathered(rank: int, zero: dict[str, Any], from_elements: int) -> tuple[list[Tensor], list[int], int]:
    """Weights after three steps, each with an evaluation before; elements of each gather; bytes of buffers left."""
    torch.manual_seed(0)
    model = Plain().double()
    with mock.patch.object(gather, "DIRECT", from_elements):
        engine = engine_for(model, **zero)
        with recorded() as spans:
            for step in range(3):
                with torch.no_grad():
                    engine(batch(step, rank))
                engine.backward(engine(batch(step, rank)).square().sum())
                engine.step()
        with ds.zero.GatheredParameters(model.parameters()):
            weights = [param.detach().clone() for param in model.parameters()]
    sizes = [(span.bytes or 0) // 8 for span in comms(spans, "parameter")]
    return weights, sizes, sum(buffer.nbytes for buffer in engine.zero.gatherer.buffers.free)


@pytest.mark.parametrize(
    "zero", [{}, TIGHT, {"allgather_partitions": False}, {"offload_param": {"device": "cpu"}}], ids=str
)
def test_a_large_parameter_is_gathered_into_its_own_storage(ranks: Ranks, zero: dict[str, Any]) -> None:
    """Alone, so that it takes no buffer; the numbers are the same."""
    directly = ranks.run(2, gathered, zero, WIDTH * WIDTH)
    for (weights, sizes, buffers), (expected, together, _) in zip(
        directly, ranks.run(2, gathered, zero, gather.DIRECT), strict=True
    ):
        assert all(map(torch.equal, weights, expected))
        assert sum(sizes) == sum(together)
        if "allgather_partitions" not in zero:
            assert set(sizes) <= {WIDTH * WIDTH, WIDTH, 2 * WIDTH, 3 * WIDTH}
        assert buffers <= 8 * 2 * 3 * WIDTH  # of biases


# --- memory


class UsesChild(nn.Module):
    """No parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.layer.weight, self.layer.bias))


class UsesList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.eye(WIDTH)), nn.Parameter(torch.zeros(WIDTH))])

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weights[0] + self.weights[1])


class Frozen(UsesChild):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class Lists(UsesChild):
    """Looks at all its parameters in its first call only."""

    looked = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.looked:
            self.looked = True
            assert not any(p.isnan().any() for p in self.layer.parameters())
            return x * 1.0
        return x * 2.0


def peaks(rank: int, block: type[nn.Module]) -> tuple[list[int], list[str]]:
    """The most elements whole in each of three steps, and the names of what they were fetched for."""
    torch.manual_seed(0)
    model = nn.Sequential(*(block() for _ in range(6)), linear())
    engine = engine_for(model, **{**TIGHT, "stage3_max_live_parameters": 2 * LAYER})
    assert engine.zero.fetcher is not None
    live, found = watch_peak(engine.zero.fetcher), []
    for number in range(3):
        live.peak = 0
        engine.backward(engine(batch(number, rank).float()).pow(2).mean())
        engine.step()
        found.append(live.peak)
    record = engine.zero.fetcher._records[True]
    assert record is not None
    return found, [owner.name for owner in record.owners if owner.params]


@pytest.mark.parametrize("block", [UsesChild, UsesList, Frozen], ids=lambda kind: kind.__name__)
def test_only_the_block_that_runs_is_whole(ranks: Ranks, block: type[nn.Module]) -> None:
    for steps, _ in ranks.run(2, peaks, block):
        assert max(steps) <= 2 * LAYER


def peaks_of_adapted(rank: int) -> int:
    torch.manual_seed(0)
    engine = engine_for(AdaptedLayers(), **TIGHT)
    live = watch_peak(engine.zero.fetcher)
    for number in range(3):
        engine.backward(engine(batch(number, rank).float()).pow(2).mean())
        engine.step()
    return live.peak


def test_frozen_bases_called_by_keyword_go_in_backward(ranks: Ranks) -> None:
    for most in ranks.run(2, peaks_of_adapted):
        assert most <= 2 * LAYER


def test_listing_parameters_is_no_use_of_each_call(ranks: Ranks) -> None:
    """The last layer alone is needed after the first step: in forward only, since its input needs no gradient."""
    for steps, owners in ranks.run(2, peaks, Lists):
        assert steps == [LAYER, LAYER, LAYER]
        assert owners == ["6"]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.first, self.last = nn.Embedding(4 * WIDTH, WIDTH), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(torch.tanh(self.first(self.words(x.long().abs() % 4).mean(-2))))
        return y


def gathers_of_a_step(rank: int) -> list[int]:
    """Elements of each gather of the third step."""
    engine = engine_for(Words().double(), **TIGHT)
    for step in range(3):
        with recorded() as spans:
            engine.backward(engine(batch(step, rank)).square().sum())
        engine.step()
    return [(span.bytes or 0) // 8 for span in comms(spans, "parameter")]


def test_backward_fetches_what_autograd_has_saved(ranks: Ranks) -> None:
    """No embedding, and no bias; the last layer is still there."""
    table, weight = 4 * WIDTH * WIDTH, WIDTH * WIDTH
    for sizes in ranks.run(2, gathers_of_a_step):
        assert sizes == [table, LAYER, LAYER, weight]


class KeepsWeight(torch.autograd.Function):
    """What a kernel of somebody's own may do: autograd does not know that backward reads the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        with torch._C.DisableTorchFunctionSubclass():  # as a kernel in C++, which reads what is there
            return grad * ctx.weight, (grad * x).sum((0, 1))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = KeepsWeight.apply(x, self.weight)
        return y


def squared() -> nn.Module:
    return parametrize.register_parametrization(linear(), "weight", Squared())


def scaled(rank: int, make: Callable[[], nn.Module]) -> float:
    """How far the weights come from a single process's."""
    torch.manual_seed(0)
    model = nn.Sequential(linear(), make(), linear()).double()
    expected = copy.deepcopy(model)
    engine = engine_for(model, **TIGHT)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(3):
        engine.backward(engine(batch(step, 0)).square().mean())
        engine.step()
        optimizer.zero_grad()
        expected(batch(step, 0)).square().mean().backward()
        nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
        optimizer.step()
    with ds.zero.GatheredParameters(model.parameters()):
        pairs = zip(model.parameters(), expected.parameters(), strict=True)
        return max((found - wanted).abs().max().item() for found, wanted in pairs)


@pytest.mark.parametrize("make", [Scale, squared])
def test_a_weight_that_a_function_has_kept_itself_is_there_in_its_backward(
    ranks: Ranks, make: Callable[[], nn.Module]
) -> None:
    assert max(ranks.run(2, scaled, make)) < 1e-9


# --- a pass as data


def sharded(count: int) -> list[ShardedParam]:
    return [
        ShardedParam(
            str(n), nn.Parameter(torch.zeros(10)), Partition(10, equal(2)), 0, ALONE, persistent=False, index=n
        )
        for n in range(count)
    ]


def test_a_pass_knows_what_comes_next() -> None:
    a, b, c = sharded(3)
    owners = [ModuleParams("a", [a]), ModuleParams("both", [a, b]), ModuleParams("c", [c])]
    record = Pass([*owners, owners[0]])
    assert [record.next_place(a, start) for start in range(5)] == [0, 1, 3, 3, None]
    assert [record.elements(0, stop) for stop in range(5)] == [0, 10, 30, 40, 50]
    walk = CurrentPass(record)
    walk.step(owners[0])
    assert list(walk.upcoming()) == [a, b, c, a]
    assert list(walk.upcoming()) == []
    walk.released(c)
    assert list(walk.upcoming()) == [c]
    walk.step(owners[1])
    assert walk.needed_within(a, 10)
    assert not walk.needed_within(a, 9)
    assert not walk.needed_within(b, 100)
    walk.step(owners[0])  # another way
    assert list(walk.upcoming()) == []
    assert walk.outcome() is not record


def lines_run(rank: int, layers: int, zero: dict[str, Any]) -> tuple[int, int]:
    """Lines of Python that fetching runs through in the first step, and in the third, which goes as recorded."""
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(layers)))
    engine = engine_for(model, **zero)
    count, counts = 0, []

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if "zero" not in Path(frame.f_code.co_filename).parts:
            return None
        count += event == "line"
        return trace

    for number in range(3):
        count = 0
        if number != 1:
            sys.settrace(trace)
        try:
            engine.backward(engine(torch.ones(1, 2, requires_grad=True)).sum())
        finally:
            sys.settrace(None)
        counts.append(count)
        engine.step()
    return counts[0], counts[2]


@pytest.mark.parametrize(
    "zero",
    [
        pytest.param({}, id="kept", marks=pytest.mark.slow),
        pytest.param({"stage3_max_reuse_distance": 0}, id="prefetched"),
        pytest.param(
            {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 20},
            id="a little prefetched",
            marks=pytest.mark.slow,
        ),
        pytest.param({"stage3_max_live_parameters": 40}, id="room for few", marks=pytest.mark.slow),
    ],
)
def test_fetching_takes_time_in_proportion_to_the_layers(ranks: Ranks, zero: dict[str, Any]) -> None:
    counted = (ranks.run(2, lines_run, layers, zero)[0] for layers in (30, 120))
    for few, many in zip(*counted, strict=True):
        assert few > 1000
        assert many / few < 4.5  # not 16
