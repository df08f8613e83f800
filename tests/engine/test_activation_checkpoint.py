"""Activation checkpointing: what is recomputed, what is kept, and that neither shows in the training."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from spans import named
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dsprof.engine import activation_checkpoint, initialize
from dsprof.engine.activation_checkpoint.policies import (
    Full,
    Selective,
    find_blocks,
    named_blocks,
)
from dsprof.engine.hooks import Hooks, Span

torch.set_num_threads(1)


class Block(nn.Module):
    """[rows, 4] -> [rows, 4]; owns a parameter of its own beside those of its children."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)
        self.dropout = nn.Dropout(0.5)
        self.scale = nn.Parameter(torch.ones(4))
        self.seen: dict[str, weakref.ref[Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        product = self.up(x)
        active = torch.nn.functional.gelu(product)
        self.seen = {"product": weakref.ref(product), "active": weakref.ref(active)}
        out: Tensor = x + self.scale * self.dropout(self.down(active))
        return out


class Net(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def recomputed_in(spans: list[Span]) -> list[str | None]:
    return [span.module for span in spans if span.name == "recompute"]


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation_checkpoint, "_settings", activation_checkpoint._Settings())


def net(depth: int = 4) -> Net:
    torch.manual_seed(1)
    return Net(depth).double()


def gradients(model: nn.Module, rows: int = 3) -> dict[str, Tensor]:
    torch.manual_seed(2)  # dropout's
    model.zero_grad()
    model(torch.linspace(-1, 1, rows * 4, dtype=torch.float64).view(rows, 4)).square().sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


POLICIES: list[Full] = [
    Full(blocks=()), Full(), Full(on_host=True), Full(every=1), Full(every=3), Selective(), Selective(on_host=True),
    Full(blocks=["stem", "blocks.*.up"]),
]  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_gradients_are_the_very_same_dropout_included(policy: Full) -> None:
    expected = gradients(net())
    model = net()
    undo = policy.apply(model, Hooks())
    got = gradients(model)
    assert list(got) == list(expected)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    undo()
    assert all("forward" not in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("policy", "recomputed"),
    [
        (Full(blocks=()), []),
        (Full(), ["blocks.3", "blocks.2", "blocks.1", "blocks.0"]),
        (Full(every=2), ["blocks.3", "blocks.1"]),
        (Full(every=3), ["blocks.2"]),
        (Selective(), ["blocks.3", "blocks.2", "blocks.1", "blocks.0"]),
        (Full(blocks=["blocks.[13].up"]), ["blocks.3.up", "blocks.1.up"]),
    ],
    ids=str,
)
def test_which_blocks_are_recomputed(spans: list[Span], policy: Full, recomputed: list[str]) -> None:
    model = net()
    undo = policy.apply(model, Hooks())
    gradients(model)
    assert recomputed_in(spans) == recomputed
    assert {(span.kind, span.lane) for span in spans} <= {("phase", "autograd")}
    undo()
    gradients(model)
    assert recomputed_in(spans) == recomputed


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("policy", "alive", "products", "activations"),
    [
        (Full(blocks=()), {"product", "active"}, 0, 0),
        (Full(), set(), 4, 2),
        (Selective(), set(), 0, 2),  # a product is kept, but by another Python object
    ],
    ids=["nothing", "full", "selective"],
)
def test_what_is_kept_and_what_is_computed_again(
    policy: Full, alive: set[str], products: int, activations: int
) -> None:
    model = net(depth=2).eval()
    policy.apply(model, Hooks())
    loss = model(torch.ones(3, 4, dtype=torch.float64)).sum()
    for block in model.blocks:
        assert isinstance(block, Block)
        assert {name for name, ref in block.seen.items() if ref() is not None} == alive
    with Counting() as counting:
        loss.backward()
    assert counting.calls.count("gelu") == activations
    assert counting.calls.count("addmm") == products


def test_modules_inside_a_block_are_called_again_and_the_block_is_not() -> None:
    """Which is what ZeRO stage 3 fetches by, and what a hook that changes arguments needs."""
    model = net(depth=2)
    Full().apply(model, Hooks())
    calls: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda module, args, name=name: calls.append(name))
        if isinstance(module, Block):
            module.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    got = gradients(model)
    inside = ["up", "dropout", "down"]
    assert [name for name in calls if name in ("blocks.0", "blocks.1")] == ["blocks.0", "blocks.1"]
    assert sorted(calls) == sorted(
        ["", "stem", "blocks.0", "blocks.1", *2 * [f"blocks.{b}.{name}" for b in (0, 1) for name in inside]]
    )
    plain = net(depth=2)
    for block in plain.blocks:
        block.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    expected = gradients(plain)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_hooks_may_do_other_work_in_a_selective_recomputation() -> None:
    """As a fetch does, when the parameter is there already in one of the two."""
    expected = gradients(net())
    model = net()
    Selective().apply(model, Hooks())
    calls = 0

    def fetch(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        for _ in range(calls):
            torch.empty(3).copy_(torch.ones(3)).view(-1)

    for block in model.blocks:
        assert isinstance(block, Block)
        block.up.register_forward_pre_hook(fetch)
    got = gradients(model)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert calls == 8


def test_what_selective_recomputation_cannot_do_is_an_error() -> None:
    model = nn.ModuleList(
        [nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True)), nn.Sequential(nn.Linear(2, 2), nn.ReLU())]
    )
    Selective(blocks=["*"]).apply(model, Hooks())
    with pytest.raises(RuntimeError, match="has been mutated"):
        model[0](torch.ones(1, 2)).sum().backward()
    loss = model[1](torch.ones(1, 2)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"extra time|not found in storage"):
        loss.backward()


def test_activations_on_the_host_are_copies(spans: list[Span]) -> None:
    model = net(depth=2)
    Full(on_host=True).apply(model, Hooks())
    x = torch.ones(3, 4, dtype=torch.float64)
    torch.manual_seed(2)
    hidden = model.stem(x)
    loss = model.blocks[0](hidden).sum()
    with torch.no_grad():
        hidden.zero_()  # would be an error if the block's input were this tensor
    loss.backward()
    block = model.blocks[0]
    assert isinstance(block, Block)
    assert block.up.weight.grad is not None
    got = block.up.weight.grad.clone()
    assert [(s.kind, s.name, s.lane, s.module, s.purpose, s.bytes) for s in spans if s.kind == "copy"] == [
        ("copy", "to_host", "main", "blocks.0", "activation", 3 * 4 * 8)
    ]

    plain = net(depth=2)
    torch.manual_seed(2)
    plain.blocks[0](plain.stem(x)).sum().backward()
    block = plain.blocks[0]
    assert isinstance(block, Block)
    assert block.up.weight.grad is not None
    assert torch.equal(got, block.up.weight.grad)


@pytest.mark.parametrize("on_host", [False, True])
def test_what_is_on_the_host_is_gone_from_the_device(on_host: bool) -> None:
    model = net(depth=2)
    Full(on_host=on_host).apply(model, Hooks())
    hidden = model.stem(torch.ones(3, 4, dtype=torch.float64))
    seen = weakref.ref(hidden)
    loss = model.blocks[0](hidden).sum()
    del hidden
    assert (seen() is None) == on_host
    loss.backward()


class Nested(nn.Module):
    """Takes tensors by name and inside a tuple, and writes into a list it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, pair: tuple[Tensor, int], log: list[Tensor], *, mask: Tensor) -> dict[str, Tensor]:
        x, times = pair
        out = torch.tanh(self.linear(x * mask)) * times
        log.append(out)
        return {"out": out}


@pytest.mark.parametrize(
    "policy", [Full(blocks=["0"]), Full(blocks=["0"], on_host=True), Selective(blocks=["0"])], ids=str
)
def test_arguments_of_any_structure(spans: list[Span], policy: Full) -> None:
    def run(model: nn.Module) -> tuple[Tensor, Tensor]:
        log: list[Tensor] = []
        x = torch.tensor([[1.0, 2.0]], requires_grad=True)
        out = model((x * 1, 3), log, mask=torch.tensor([1.0, 0.5]))["out"]
        assert len(log) == 1
        assert log[0] is out
        out.sum().backward()
        assert len(log) == 1
        assert x.grad is not None
        return out.detach(), x.grad

    torch.manual_seed(3)
    model = nn.ModuleList([Nested()])
    expected = run(model[0])
    policy.apply(model, Hooks())
    assert all(map(torch.equal, run(model[0]), expected))
    assert recomputed_in(spans) == ["0"]


def test_nothing_is_recomputed_without_gradients(spans: list[Span]) -> None:
    model = net()
    Full(on_host=True).apply(model, Hooks())
    with torch.no_grad():
        model(torch.ones(1, 4, dtype=torch.float64))
    assert spans == []


def test_a_model_looks_as_before_and_can_be_copied_and_pickled(spans: list[Span]) -> None:
    plain, model = net(), net()
    Full().apply(model, Hooks())
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [(name, type(module)) for name, module in model.named_modules()] == [
        (name, type(module)) for name, module in plain.named_modules()
    ]

    twin = copy.deepcopy(model)
    gradients(twin)
    assert recomputed_in(spans) == ["blocks.3", "blocks.2", "blocks.1", "blocks.0"]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in twin.parameters())

    for block in model.blocks:
        assert isinstance(block, Block)
        block.seen.clear()  # weak references do not pickle
    back = pickle.loads(pickle.dumps(model))
    assert torch.equal(gradients(back)["stem.weight"], gradients(plain)["stem.weight"])
    assert recomputed_in(spans) == ["blocks.3", "blocks.2", "blocks.1", "blocks.0"]


def test_a_patch_of_somebody_else_is_kept_below_and_refused_above() -> None:
    model = net(depth=2)
    first, second = model.blocks
    first.forward = patch = lambda x: 2 * x
    undo = Full().apply(model, Hooks())
    assert first(torch.ones(1)).item() == 2.0
    second.forward = lambda x: x
    with pytest.raises(RuntimeError, match=r"blocks\.1: its forward was replaced after"):
        undo()
    del second.forward
    with pytest.raises(RuntimeError, match=r"blocks\.1: its"):
        undo()
    assert first.forward is not patch


def test_undoing_gives_a_patch_back() -> None:
    model = net(depth=2)
    patch = model.blocks[0].forward = lambda x: 2 * x
    Full().apply(model, Hooks())()
    assert model.blocks[0].forward is patch


# --- which modules are blocks


class Other(Block):
    pass


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(8))


def refused(action: Callable[[], object]) -> str:
    """What the ValueError says."""
    with pytest.raises(ValueError, match="block") as raised:
        action()
    return str(raised.value)


def found(model: nn.Module) -> list[str]:
    return list(find_blocks(model))


def test_blocks_are_the_repeated_modules() -> None:
    assert found(net(3)) == ["blocks.0", "blocks.1", "blocks.2"]
    pipeline = nn.Sequential(nn.Linear(4, 4), Block(), Block(), nn.LayerNorm(4), nn.Linear(4, 4))
    assert found(pipeline) == ["1", "2"]
    assert found(nn.ModuleDict({"a": Block(), "b": Block()})) == ["a", "b"]


def test_one_class_in_several_containers() -> None:
    stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.ReLU(), nn.Sequential(Block(), Block(), Block()))
    assert found(nn.ModuleList([nn.Linear(4, 4), stages])) == ["1.0.0", "1.0.1", "1.2.0", "1.2.1", "1.2.2"]
    layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
    assert found(layers) == ["0", "1"]
    assert found(nn.ModuleList([nn.ModuleList([nn.Linear(4, 4)] * 2), nn.ModuleList([nn.ReLU()]), layers])) == [
        "2.0",
        "2.1",
    ]


def test_what_is_repeated_inside_a_block_is_its_own_affair() -> None:
    assert found(nn.ModuleList([Experts(), Experts()])) == ["0", "1"]


def test_small_repetitions_elsewhere_are_passed_over() -> None:
    model = net(12)
    model.heads = nn.ModuleList([Other(), Other()])
    assert refused(lambda: find_blocks(model)) == (
        "which blocks to checkpoint? Name those that are meant, of\n"
        "  blocks.*: 12 x Block, 960 parameters\n"
        "  heads.*: 2 x Other, 160 parameters"
    )
    del model.heads
    model.heads = nn.ModuleList([Other(), Other()])
    model.blocks.extend(Block() for _ in range(10))
    assert len(found(model)) == 22


@pytest.mark.parametrize(
    "model", [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))], ids=str
)
def test_no_blocks(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=r"no blocks to checkpoint were found.* name the blocks, such as 'layers\.\*'"):
        find_blocks(model)


def test_named_blocks_come_in_the_models_order() -> None:
    assert list(named_blocks(net(3), ["blocks.2", "blocks.0", "stem"])) == ["stem", "blocks.0", "blocks.2"]
    assert list(named_blocks(net(2), ["blocks.*.up", "blocks.*"])) == [
        "blocks.0",
        "blocks.0.up",
        "blocks.1",
        "blocks.1.up",
    ]


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("block.0", "blocks to checkpoint: the model has no module 'block.0'; did you mean 'blocks.0'?"),
        ("zzz", "blocks to checkpoint: the model has no module 'zzz'; the topmost are ['stem', 'blocks']"),
        ("blocks", "blocks to checkpoint: 'blocks' is a ModuleList, which computes nothing itself; write 'blocks.*'"),
    ],
)
def test_names_that_cannot_be_meant(name: str, error: str) -> None:
    assert refused(lambda: Full(blocks=[name]).apply(net(2), Hooks())) == error


@pytest.mark.parametrize("k", [0, 5])
def test_every_so_many_blocks_must_be_one_of_them(k: int) -> None:
    assert (
        refused(lambda: Full(every=k).apply(net(), Hooks()))
        == f"every k-th block with k = {k}: the model has 4 blocks; write 1 to 4"
    )


# --- deepspeed.checkpointing


def test_checkpoint_needs_no_configuration(spans: list[Span]) -> None:
    assert not activation_checkpoint.is_configured()
    block = net().blocks[0]
    assert isinstance(block, Block)
    x = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(4)
    activation_checkpoint.checkpoint(block, x).sum().backward()
    assert x.grad is not None
    got, x.grad = x.grad, None
    torch.manual_seed(4)
    block(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(got, x.grad)
    assert recomputed_in(spans) == ["Block"]


def test_checkpoint_returns_what_deepspeeds_does() -> None:
    one, two = torch.ones(1, requires_grad=True), torch.ones(2, requires_grad=True)
    assert activation_checkpoint.checkpoint(lambda x: [x], one) is one
    assert activation_checkpoint.checkpoint(lambda x, y: [x, y], one, y=two) == (one, two)
    assert activation_checkpoint.checkpoint(lambda x: {"x": x}, one) == {"x": one}


def copies(spans: list[Span]) -> int:
    spans.clear()
    x = torch.ones(2, requires_grad=True)
    activation_checkpoint.checkpoint(torch.tanh, x * 1).sum().backward()
    return len(named(spans, "copy", "to_host"))


def test_configure_goes_before_an_engines_section(spans: list[Span]) -> None:
    class Section:
        cpu_checkpointing = True

    assert copies(spans) == 0
    hooks = Hooks()
    hooks.step = 7
    activation_checkpoint.attach(hooks, Section())  # type: ignore[arg-type]
    assert copies(spans) == 1
    assert {span.step for span in spans} == {7}
    activation_checkpoint.configure(None, checkpoint_in_cpu=False)
    assert activation_checkpoint.is_configured()
    activation_checkpoint.attach(hooks, Section())  # type: ignore[arg-type]
    assert copies(spans) == 0


def test_recomputations_are_reported_by_the_engine_whose_forward_it_was(spans: list[Span]) -> None:
    class Checkpointed(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return activation_checkpoint.checkpoint(super().forward, input)  # type: ignore[no-any-return]

    config = {"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engines = [initialize(model=Checkpointed(2, 2), config=config)[0] for _ in range(2)]
    for step, engine in enumerate(engines):
        engine.hooks.step = step
    for engine in engines:
        engine.backward(engine(torch.ones(1, 2, requires_grad=True)).sum())
        engine.destroy()
    assert [span.step for span in spans if span.name == "recompute"] == [0, 1]


def test_configure_reads_a_configuration(spans: list[Span]) -> None:
    config = {"train_batch_size": 1, "activation_checkpointing": {"cpu_checkpointing": True}}
    activation_checkpoint.configure(None, config)
    assert copies(spans) == 1
    activation_checkpoint.configure(None, config, checkpoint_in_cpu=False)
    assert copies(spans) == 0
    activation_checkpoint.reset()
    assert activation_checkpoint.is_configured()


class Megatron:
    def __init__(self, size: int) -> None:
        self.get_model_parallel_world_size = lambda: size


def test_what_configure_cannot_do_is_said() -> None:
    with pytest.warns(UserWarning, match=r"checkpointing.configure\(num_checkpoints=4\) has no effect"):
        activation_checkpoint.configure(None, num_checkpoints=4)
    with pytest.warns(UserWarning, match=r"configure\(partition_activations=True\) has no effect"):
        activation_checkpoint.configure(Megatron(1), partition_activations=True)
    with pytest.raises(ValueError, match="partition_activations over a model-parallel group is not supported"):
        activation_checkpoint.configure(Megatron(2), partition_activations=True)
