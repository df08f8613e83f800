"""zero.Init and GatheredParameters: what modules do while they are made, and what may be done to what is sharded."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

from dsprof import engine as ds
from dsprof.engine.zero.init import GatheredParameters, Init
from dsprof.engine.zero.shard import find_sharded, forget

WIDTH = 6


def configuration(stage: int, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    return {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "optimizer": optimizer, **more}


def plain_params(module: nn.Module) -> list[nn.Parameter]:
    """Those of `module` and its children, without what reading them does."""
    return [p for inner in module.modules() for p in dict.values(inner._parameters) if p is not None]


def resident(module: nn.Module) -> int:
    """Elements of `module` that are whole on this rank."""
    knowns = [(param, find_sharded(param)) for param in plain_params(module)]
    return sum(param.numel() for param, known in knowns if known is None or known.resident)


# --- what modules do to their children while they are made


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)


class Inherited(nn.Linear):
    """Has no `__init__` of its own."""


class ChangesData(Inner):
    """A base class's child is changed by the subclass, which has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.linear.weight.data.mul_(2)


class Computes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(self.linear.weight.sum().detach())


class Applies(nn.Module):
    """As nanoGPT and the models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(Inner() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.apply(self.initialize)
        for name, param in self.named_parameters():
            if name.endswith("head.weight"):
                nn.init.normal_(param, std=0.5)

    def initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)


class Ties(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.head.weight, std=3.0)


class Replaces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.weight = nn.Parameter(torch.randn(2, WIDTH))
        self.linear.register_parameter("extra", nn.Parameter(torch.randn(3)))
        self.listed = nn.ParameterList([torch.randn(2)])
        self.listed.append(nn.Parameter(torch.randn(5)))
        del self.linear.bias


class Copies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(copy.deepcopy(first) for _ in range(2))
        for param in self.parameters():
            param.data.add_(torch.randn_like(param))


class Wraps(nn.Module):
    """Through torch's parametrizations, new and old."""

    def __init__(self) -> None:
        super().__init__()
        self.new = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.old = weight_norm(nn.Linear(WIDTH, WIDTH))
        self.square = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))


class Fails(nn.Module):
    def __init__(self, child: nn.Linear) -> None:
        super().__init__()
        child.weight.data.fill_(7.0)
        raise KeyError("no")


class Survives(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        try:
            Fails(self.linear)
        except KeyError:
            self.linear.bias.data.fill_(8.0)


class Converts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.linear.double()


def outside_of_any() -> nn.Module:
    """A module changed, wrapped and copied by the script itself."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LSTM(2, 3))
    model[0].weight.data.mul_(3)
    model[0] = parametrizations.weight_norm(model[0])
    model.append(copy.deepcopy(model[1]))
    return model


def defined_within() -> nn.Module:
    class Local(nn.Linear):
        def __init__(self) -> None:
            super().__init__(WIDTH, WIDTH)
            self.more = nn.Parameter(torch.randn(2))

    return Local()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "inherited": lambda: nn.Sequential(Inherited(WIDTH, WIDTH)),
    "changes data": ChangesData,
    "computes": Computes,
    "applies": Applies,
    "ties": Ties,
    "replaces": Replaces,
    "copies": Copies,
    "wraps": Wraps,
    "survives": Survives,
    "converts": Converts,
    "outside": outside_of_any,
    "within": defined_within,
    "attention": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8),
    "transformer": lambda: nn.Transformer(WIDTH, 2, 2, 1, 8),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(3), nn.Linear(WIDTH, WIDTH)),
}


def values(model: nn.Module) -> dict[str, Tensor]:
    with GatheredParameters(model):
        return {
            name: param.detach().clone() for name, param in model.named_parameters() if not nn.parameter.is_lazy(param)
        }


def made(rank: int, kind: str) -> tuple[int, bool, bool]:
    """Elements left whole, whether the values are those of rank 0 without Init, and whether nothing of it remains."""
    torch.manual_seed(0)
    expected = values(MODELS[kind]())
    before = nn.Module.apply, nn.Linear.__init__, nn.Module.__setstate__
    torch.manual_seed(rank)
    with Init():
        model = MODELS[kind]()
    after = nn.Module.apply, nn.Linear.__init__, nn.Module.__setstate__
    gone = before == after and "__init_subclass__" not in vars(nn.Module)
    gone = gone and all(type(inner._parameters) is dict for inner in model.modules())
    left = sum(
        param.numel()
        for param in model.parameters()
        if not nn.parameter.is_lazy(param) and ((known := find_sharded(param)) is None or known.resident)
    )
    found = values(model)
    same = found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    return left, same, gone


@pytest.mark.parametrize("kind", MODELS)
def test_modules_may_touch_their_children_while_they_are_made(ranks: Ranks, kind: str) -> None:
    assert ranks.run(2, made, kind) == [(0, True, True)] * 2


class Counts(nn.Module):
    """How much of it is whole, at most, as it is made and initialized."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.peak = 0
        for _ in range(5):
            self.layers.append(Inner())
            self.peak = max(self.peak, resident(self))
        self.apply(self.initialize)
        self.after_apply = resident(self)
        self.read = sum(param.sum().item() for param in self.layers[0].parameters())
        self.after_read = resident(self)

    def initialize(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.zero_()
            module.bias.data.zero_()
            self.peak = max(self.peak, resident(self))


def counted(rank: int) -> tuple[int, int, int, int]:
    with Init():
        model = Counts()
    return model.peak, model.after_apply, model.after_read, resident(model)


def test_only_what_is_read_is_whole_and_only_while_its_call_lasts(ranks: Ranks) -> None:
    layer = WIDTH * WIDTH + WIDTH
    assert ranks.run(2, counted) == [(layer, 0, layer, 0)] * 2


def trained(rank: int) -> bool:
    """Whether a model with all of this trains as it does without."""
    config = configuration(3)
    torch.manual_seed(rank)
    with Init(config_dict_or_path=config):
        model = nn.Sequential(
            nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0),
            parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), Inherited(WIDTH, WIDTH),
        )  # fmt: skip
    torch.manual_seed(0)
    reference = nn.Sequential(
        nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0),
        parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), Inherited(WIDTH, WIDTH),
    )  # fmt: skip
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for x in torch.randn(2, 2, 3, WIDTH, generator=torch.Generator().manual_seed(4)):
        engine.backward(engine(x).pow(2).mean())
        engine.step()
        optimizer.zero_grad()
        reference(x).pow(2).mean().backward()
        optimizer.step()
    found = values(model)
    engine.destroy()
    return all(torch.allclose(found[name], value, atol=1e-5) for name, value in reference.named_parameters())


def test_a_model_made_in_the_block_trains(ranks: Ranks) -> None:
    assert ranks.run(2, trained) == [True, True]


def ended_by_error(rank: int) -> tuple[bool, bool]:
    before = nn.Linear.__init__
    child = None
    try:
        with Init():
            child = nn.Linear(2, 2)
            Fails(child)
    except KeyError:
        pass
    assert child is not None
    return nn.Linear.__init__ is before, type(child._parameters) is dict


def test_an_error_in_the_block_leaves_nothing_behind(ranks: Ranks) -> None:
    assert ranks.run(2, ended_by_error) == [(True, True)] * 2


def placed(rank: int) -> set[str]:
    """Devices of parameters that were made on the CPU."""
    with Init(dtype=torch.bfloat16):
        model = Inner()
        model.linear.weight.data.mul_(2)
    existing = Inner()
    Init(existing, dtype=torch.bfloat16)
    with GatheredParameters([*model.parameters(), *existing.parameters()]):
        return {f"{p.device.type} {p.dtype}" for module in (model, existing) for p in module.parameters()}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_parameters_are_sharded_on_the_device_of_the_engine(ranks: Ranks) -> None:
    assert ranks.run(1, placed) == [{"cuda torch.bfloat16"}]


# --- what ZeRO has of parameters


def saved(rank: int, stage: int) -> list[bool]:
    """Whether parameters under ZeRO can be saved, loaded without trust, and copied; before and after `initialize`."""
    config = configuration(stage)
    with Init(config_dict_or_path=config):
        model = nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, 2))
    done = [_saves(model)]
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    done.append(_saves(model))
    engine.destroy()
    return done


def _saves(model: nn.Module) -> bool:
    with GatheredParameters(model):
        params = list(model.parameters())
        file = io.BytesIO()
        torch.save(params, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        copied = copy.deepcopy(params)
        same = all(torch.equal(p, q) and torch.equal(p, r) for p, q, r in zip(params, loaded, copied, strict=True))
    return same and all(find_sharded(param) is None for param in (*loaded, *copied))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_can_be_saved_and_copied(ranks: Ranks, stage: int) -> None:
    assert ranks.run(2, saved, stage) == [[True, True]] * 2


def freed(rank: int) -> tuple[bool, bool, bool]:
    with Init():
        model = nn.Linear(2, 2)
    param = model.weight
    known = find_sharded(param) is not None
    forget(model.bias)
    forgotten = find_sharded(model.bias) is None
    alive = weakref.ref(param)
    del model, param
    gc.collect()
    return known, forgotten, alive() is None


def test_a_sharded_parameter_is_not_kept_alive(ranks: Ranks) -> None:
    assert ranks.run(2, freed) == [(True, True, True)] * 2


# --- GatheredParameters


class Uses(nn.Module):
    """Brings a parameter itself, unless there will be a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if torch.is_grad_enabled():
            return self.second(x)
        with GatheredParameters(self.second.weight):
            return self.second(x) + F.linear(x, self.second.weight)


def around_forward(rank: int, grad: bool) -> tuple[list[int], int, int, bool]:
    """Elements whole: within, after a forward, after the block; what the engine counts; whether the result is right."""
    torch.manual_seed(3)
    model = Uses()
    expected = copy.deepcopy(model)
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=configuration(3))
    x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(4))
    for _ in range(2):  # in the second the fetcher follows what it recorded
        with torch.set_grad_enabled(grad), GatheredParameters(model.parameters()):
            whole = [resident(model)]
            y = engine(x)
            whole.append(resident(model))
        whole.append(resident(model))
        if grad:
            engine.backward(y.sum())
    with torch.set_grad_enabled(grad):
        right = torch.allclose(y, expected(x))
    live = engine.zero.fetcher.live_params.live
    users = sum(param.users for param in engine.zero.params)
    engine.destroy()
    return whole, live, users, right


@pytest.mark.parametrize("grad", [False, True])
def test_gathered_parameters_stay_during_a_forward(ranks: Ranks, grad: bool) -> None:
    size = 2 * (WIDTH * WIDTH + WIDTH)
    assert ranks.run(2, around_forward, grad) == [([size, size, 0], 0, 0, True)] * 2


def written_after_backward(rank: int) -> str:
    model = nn.Linear(WIDTH, WIDTH)
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=configuration(3))
    try:
        with GatheredParameters(model.weight, modifier_rank=0):
            model.weight.data.fill_(3.0)
            engine.backward(engine(torch.ones(2, WIDTH)).sum())
    except RuntimeError as error:
        return str(error)
    return "took it" if all(bool((value == 3).all()) for value in values(model).values()) else "lost it"


def test_what_was_written_is_not_lost_in_silence(ranks: Ranks) -> None:
    for said in ranks.run(2, written_after_backward):
        assert said.startswith("GatheredParameters: weight was released inside the block, by a backward")


# --- arguments


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"remote_device": "cpu"}, "remote_device='cpu' is not supported: write zero_optimization.offload_param"),
        ({"pin_memory": True}, "pin_memory=True is not supported"),
        ({"mpu": object()}, "mpu=.* is not supported"),
        ({"data_parallel_group": object()}, "data_parallel_group=.* every rank is a data-parallel one"),
        ({"zero_param_parallel_group": object()}, "write zero_optimization.zero_hpz_partition_size"),
        ({"zero_quantized_weights": True}, "zero_quantized_weights=True is not supported"),
        ({"param_swapper": object()}, "param_swapper=.* write zero_optimization.offload_param"),
        ({"config": {}, "config_dict_or_path": {}}, "config and config_dict_or_path: pass one of them"),
        ({"dtype": torch.int8}, "dtype=torch.int8 is not of floating-point numbers"),
    ],
)
def test_arguments_that_cannot_be_followed_are_errors(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Init(**arguments)


def test_an_unknown_argument_is_an_error() -> None:
    with pytest.raises(TypeError, match="no argument colour"):
        Init(colour="red")


def told(rank: int) -> list[str]:
    """What is said of arguments that can only be judged in a group."""
    said = []
    bf16 = configuration(3, bf16={"enabled": True})
    for attempt in (lambda: Init(config=bf16, dtype=torch.float16), _nested, lambda: _gather(modifier_rank=2)):
        try:
            attempt()
        except ValueError as error:
            said.append(str(error))
    return said


def _nested() -> None:
    with Init(), Init():
        pass


def _gather(**arguments: Any) -> None:
    with Init():
        model = nn.Linear(2, 2)
    with GatheredParameters(model, **arguments):
        pass


def test_contradicting_settings_are_errors(ranks: Ranks) -> None:
    assert ranks.run(2, told) == [[
        "zero.Init: dtype=torch.float16, and the configuration asks for torch.bfloat16; leave dtype out",
        "zero.Init: this block is inside another one, which shards the same modules; leave it out",
        "GatheredParameters: modifier_rank=2, of 2 ranks",
    ]] * 2  # fmt: skip


def test_a_configuration_of_another_stage_and_enabled_turn_it_off(ranks: Ranks) -> None:
    assert ranks.run(1, switched_off) == [[True, True, False, False]]


def switched_off(rank: int) -> list[bool]:
    """Whether parameters stay as they are."""
    whole = []
    for init in (Init(enabled=False), Init(config=configuration(2)), Init(config=configuration(3)), Init()):
        with init:
            model = nn.Linear(2, 2)
        whole.append(find_sharded(model.weight) is None)
    return whole


def test_gathered_parameters_takes_parameters_only() -> None:
    with pytest.raises(ValueError, match="fwd_module"), GatheredParameters([], fwd_module=nn.Linear(1, 1)):
        pass
    for params, got in ((["weight"], "a str in a list"), ([nn.Linear(1, 1)], "a Linear in a list"), (3, "a int"),
                        ("weight", "a str"), (nn.Linear(1, 1).state_dict(), "a OrderedDict")):  # fmt: skip
        text = f"wants a parameter, several, or a module, and got {got}: write Gathered"
        with pytest.raises(TypeError, match=text), GatheredParameters(params):
            pass
