"""The operations that the native helper counts, against numbers worked out by hand; nothing computes differently."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from captures import build_helper, open_recorder, read_names
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from dsprof.collectors.loop import modules
from dsprof.collectors.loop.flops import FIRST, TURNS, StepCounter
from dsprof.collectors.native import NativeRecorder
from dsprof.schema import DTYPES, FLOPS_FOR

Counted = dict[tuple[str, str], float]
"""(module, what for) -> operations."""


class Counting:
    """Counts while it is called."""

    def __init__(self, recorder: NativeRecorder, folder: Path) -> None:
        self.recorder, self._folder = recorder, folder
        self.missed: dict[str, int] = {}
        self.dtypes: set[str] = set()

    def __call__(self, work: Callable[[], Any]) -> Counted:
        self.recorder.start_counting()
        try:
            work()
        finally:
            counted, missed = self.recorder.stop_counting()
        names = read_names(self._folder)
        self.missed, self.dtypes = dict(missed), {DTYPES[dtype] for _, _, dtype, _ in counted}
        found: Counter[tuple[str, str]] = Counter()
        for module, part, _, flops in counted:
            found[names[module], FLOPS_FOR[part]] += flops
        return dict(found)


@pytest.fixture
def counting(tmp_path: Path) -> Iterator[Counting]:
    build_helper()
    folder = tmp_path / "capture"
    recorder = open_recorder("native", folder)
    assert isinstance(recorder, NativeRecorder)
    uninstall = modules.watch(recorder, every=True)
    yield Counting(recorder, folder)
    uninstall()
    assert recorder.errors == 0
    recorder.close()


def totals(counted: Counted) -> dict[str, float]:
    found: Counter[str] = Counter()
    for (_, what), flops in counted.items():
        found[what] += flops
    return dict(found)


class Mlp(nn.Module):
    """8 -> 16 -> 4."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.up, self.down, self.reentrant = nn.Linear(8, 16), nn.Linear(16, 4), reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self._both(x)
        found: Tensor = checkpoint(self._both, x, use_reentrant=self.reentrant)
        return found

    def _both(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.relu(self.up(x)))
        return found


UP, DOWN = 2 * 32 * 8 * 16, 2 * 32 * 16 * 4  # of a batch of 32: 8,192 and 4,096


def test_a_product_costs_two_operations_a_term_and_twice_that_in_backward(counting: Counting) -> None:
    """The first layer's input needs no gradient: only its weight's is computed."""
    counted = counting(lambda: Mlp()(torch.ones(32, 8)).sum().backward())
    assert counted == {
        ("up", "forward"): UP,
        ("down", "forward"): DOWN,
        ("up", "backward"): UP,
        ("down", "backward"): 2 * DOWN,
    }
    assert (counting.missed, counting.dtypes) == ({}, {"float32"})


def test_frozen_weights_cost_less(counting: Counting) -> None:
    model = Mlp()
    model.up.requires_grad_(False)
    assert totals(counting(lambda: model(torch.ones(32, 8)).sum().backward())) == {
        "forward": UP + DOWN,
        "backward": DOWN,
    }


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_computed_again_is_counted_apart(counting: Counting, reentrant: bool) -> None:
    """Re-entrant checkpointing runs its first forward with gradients off. The other may end its recomputation early."""
    x = torch.ones(32, 8, requires_grad=True)
    with set_checkpoint_early_stop(False):
        counted = totals(counting(lambda: Mlp(reentrant)(x).sum().backward()))
    assert counted == {"forward": UP + DOWN, "backward": 2 * UP + 2 * DOWN, "recompute": UP + DOWN}


def test_a_checkpointed_function_is_computed_again_as_well(counting: Counting) -> None:
    weight = torch.ones(8, 16, requires_grad=True)

    def step() -> None:
        checkpoint(lambda x: torch.tanh(x @ weight), torch.ones(32, 8), use_reentrant=False).sum().backward()

    assert totals(counting(step)) == {"forward": UP, "backward": UP, "recompute": UP}


def test_each_micro_batch_counts(counting: Counting) -> None:
    model = Mlp()

    def step() -> None:
        for _ in range(4):
            model(torch.ones(32, 8)).sum().backward()

    assert totals(counting(step)) == {"forward": 4 * (UP + DOWN), "backward": 4 * (UP + 2 * DOWN)}


def test_without_gradients_it_is_something_else(counting: Counting) -> None:
    model, weight = Mlp(), torch.ones(16, 16)

    def step() -> None:
        with torch.no_grad():
            model(torch.ones(32, 8))  # an evaluation
            weight @ weight  # what an optimizer may do

    assert totals(counting(step)) == {"other": UP + DOWN + 2 * 16**3}


class Attention(nn.Module):
    """Width 16 in 4 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, 4, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: Tensor = self.out(heads.transpose(1, 2).reshape(batch, length, width))
        return found


def test_attention_is_two_products_and_its_scores_again_in_backward(counting: Counting) -> None:
    """[2, 6, 16] in 4 heads of 4: a product of queries and keys is 2 * 2 * 4 * 6 * 6 * 4 operations."""
    x = torch.ones(2, 6, 16, requires_grad=True)
    counted = counting(lambda: Attention()(x).sum().backward())
    product, qkv, out = 2_304, 2 * 12 * 16 * 48, 2 * 12 * 16 * 16
    assert counted == {
        ("qkv", "forward"): qkv,
        ("Attention", "forward"): 2 * product,
        ("out", "forward"): out,
        ("qkv", "backward"): 2 * qkv,
        ("Attention", "backward"): 4 * product,
        ("Attention", "recompute"): product,
        ("out", "backward"): 2 * out,
    }


def test_convolutions(counting: Counting) -> None:
    """3 -> 8 channels, 3 x 3, [2, 3, 9, 9] to [2, 8, 5, 5]; then transposed, 8 -> 4, 2 x 2, to [2, 4, 6, 6]."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ConvTranspose2d(8, 4, 2))
    counted = counting(lambda: model(torch.ones(2, 3, 9, 9)).sum().backward())
    first, second = 2 * (2 * 8 * 25) * (3 * 9), 2 * (2 * 8 * 25) * (4 * 4)
    assert counted == {
        ("0", "forward"): first,
        ("1", "forward"): second,
        ("0", "backward"): first,
        ("1", "backward"): 2 * second,
    }


def test_grouped_convolution_sees_its_group_only(counting: Counting) -> None:
    model = nn.Conv1d(8, 8, 3, groups=4, bias=False)
    assert totals(counting(lambda: model(torch.ones(1, 8, 10)))) == {"forward": 2 * (8 * 8) * (2 * 3)}


def test_the_format_is_that_of_the_inputs(counting: Counting) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        counting(lambda: nn.Linear(8, 16)(torch.ones(32, 8)))
    assert counting.dtypes == {"bfloat16"}


def test_what_has_no_formula_is_named(counting: Counting) -> None:
    library = torch.library.Library("dsprof_test", "DEF")
    library.define("odd(Tensor x) -> Tensor")
    library.impl("odd", lambda x: x * 2, "CPU")
    library.define("product(Tensor x) -> Tensor")
    library.impl("product", lambda x: x @ x, "CPU")

    def work() -> None:
        torch.ops.dsprof_test.odd(torch.ones(3, 3))
        torch.ops.dsprof_test.product(torch.ones(3, 3))
        nn.LSTM(8, 8)(torch.ones(5, 2, 8))

    with torch.no_grad():
        counted = totals(counting(work))
    assert counting.missed.pop("dsprof_test::odd") == 1
    assert set(counting.missed) <= {"aten::mkldnn_rnn_layer"}
    assert counted["other"] >= 2 * 27


def test_the_gradient_of_a_gradient(counting: Counting) -> None:
    """A backward inside of a forward, whose own graph is kept: it is no recomputation."""

    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            energy = self.layer(x).square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return force

    x = torch.ones(4, 8, requires_grad=True)
    counted = totals(counting(lambda: Force()(x).square().sum().backward()))
    assert counted["forward"] == 2 * 4 * 8
    assert "recompute" not in counted
    assert counted["backward"] > counted["forward"]


def test_nothing_computes_differently(counting: Counting) -> None:
    def train() -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(Attention(), nn.LayerNorm(16), nn.Dropout(0.1), Mlp2())
        optimizer = torch.optim.AdamW(model.parameters())
        losses = []
        for _ in range(3):
            loss = model(torch.randn(2, 6, 16)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return [*losses, *(p.sum().item() for p in model.parameters())]

    counted: list[float] = []
    counting(lambda: counted.extend(train()))
    assert counted == train()


class Mlp2(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 1))


class FakeRecorder:
    """Notes what a counter asks for, and what it writes."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.wrote: list[dict[str, Any]] = []
        self.idle = False

    def start_counting(self) -> None:
        self.did.append("start")

    def stop_counting(self) -> tuple[list[Any], list[Any]]:
        self.did.append("stop")
        return [] if self.idle else [(3, 0, 7, 8.0), (0, 3, 8, 2.0)], [("odd", 2)]

    def write(self, fact: dict[str, Any]) -> None:
        self.did.append("fact")
        self.wrote.append(fact)


NAMES = {1: "forward", 3: "layers.0"}
COUNTED = ["start", "stop", "fact"]


def counter_of(recorder: FakeRecorder, **more: Any) -> StepCounter:
    given: Any = {"capturing": lambda: True, **more}
    return StepCounter(recorder, recorder.write, names=lambda: NAMES, **given)  # type: ignore[arg-type]


def test_one_step_is_counted_after_those_that_warm_up() -> None:
    recorder, stepped = FakeRecorder(), itertools.count(40)
    counter = counter_of(recorder, taken=lambda: next(stepped))
    for _ in range(FIRST):
        assert recorder.did == []
        counter.after_step()
    for _ in range(4):
        counter.after_step()
    assert recorder.did == COUNTED
    (fact,) = recorder.wrote
    assert fact.pop("begin_ns") <= fact.pop("end_ns")
    assert fact == {
        "fact": "flops",
        "thread": threading.get_native_id(),
        "torch_threads": torch.get_num_threads(),
        "optimizer_steps": 1,
        "operations": [["layers.0", "forward", "float32", 8.0], ["", "other", "float64", 2.0]],
        "uncounted": {"odd": 2},
    }


def test_with_several_optimizers_some_steps_are_counted_one_by_one() -> None:
    """The second optimizer is stepped for the first time in what is counted."""
    recorder = FakeRecorder()
    optimizers = 1
    counter = counter_of(recorder, optimizers=lambda: optimizers)
    for _ in range(FIRST):
        counter.after_step()
    optimizers = 2
    for turn in range(2 * TURNS):
        recorder.idle = turn % 2 == 1  # nothing between the two of them: that is told, too
        counter.after_step()
    assert recorder.did == COUNTED * TURNS
    assert [len(fact["operations"]) for fact in recorder.wrote] == [2, 0] * (TURNS // 2)


def counted_steps(first: int, last: int | None, known: bool = True, optimizers: int = 1, of: int = 20) -> list[int]:
    """Which steps (of optimizers, from 0) are counted where those from `first` on and before `last` are captured; what
    is `known` beforehand is where that ends."""
    recorder = FakeRecorder()
    step = -1

    def captured(number: int) -> bool:
        return first <= number and (last is None or number < last)

    counter = counter_of(
        recorder,
        capturing=lambda: captured(step),
        last=last if known else None,
        optimizers=lambda: optimizers,
        taken=lambda: step,
    )
    found = []
    for step in range(of):
        counter.after_step()
        found += [step] * (len(recorder.wrote) - len(found))
        if captured(step + 1) and not captured(step):
            counter.turned_on()
    assert recorder.did.count("stop") == recorder.did.count("start")
    return found


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        ((0, None), [5]),
        ((0, 6), [5]),
        ((0, 3), [2]),
        ((0, 1), []),  # the first step of a run compiles
        ((2, 5), [4]),
        ((10, 50), [11]),
        ((10, 12), [11]),
        ((10, 11), [10]),
    ],
)
def test_of_a_window_the_second_step_is_counted_or_its_last(
    window: tuple[int, int | None], expected: list[int]
) -> None:
    assert counted_steps(*window) == expected


@pytest.mark.parametrize(("window", "expected"), [((0, 4), []), ((10, 15), [11]), ((10, 11), [])])
def test_where_its_end_is_not_known_it_is_the_second(window: tuple[int, int], expected: list[int]) -> None:
    assert counted_steps(*window, known=False) == expected


def test_of_several_optimizers_a_short_window_is_counted_whole() -> None:
    assert counted_steps(10, 14, optimizers=2) == [10, 11, 12, 13]


def test_turns_of_several_optimizers_follow_each_other() -> None:
    """What is captured after a pause is not the next turn."""
    recorder = FakeRecorder()
    on = True
    counter = counter_of(recorder, capturing=lambda: on, optimizers=lambda: 2)
    for _ in range(FIRST + 2):
        counter.after_step()
    on = False
    counter.after_step()
    on = True
    counter.turned_on()
    for _ in range(4):
        counter.after_step()
    assert recorder.did == [*COUNTED * 2, "start", "stop"]


def test_a_step_in_which_the_capture_is_turned_off_does_not_count() -> None:
    recorder = FakeRecorder()
    on = True
    counter = counter_of(recorder, capturing=lambda: on)
    for _ in range(FIRST):
        counter.after_step()
    on = False
    counter.after_step()
    assert recorder.did == ["start", "stop"]
    on = True
    for _ in range(FIRST + 1):
        counter.after_step()
    assert recorder.did == ["start", "stop", *COUNTED]
