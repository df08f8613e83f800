"""The outermost module call of a thread is a forward, and nothing that torch does with modules notices."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from captures import RECORDERS, Row, build_helper, open_recorder, read_rows
from torch import nn
from torch.utils.checkpoint import checkpoint

from dsprof.collectors.loop import modules
from dsprof.ondisk import NO_SEQ, Flag, State
from dsprof.schema import Kind

Forwards = Callable[[], list[Row]]


@pytest.fixture(params=RECORDERS)
def forwards(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Forwards]:
    """Modules are recorded during the test; returns the rows so far."""
    if request.param == "native":
        build_helper()
    recorder = open_recorder(request.param, tmp_path / "capture")
    uninstall = modules.watch(recorder)
    try:
        yield lambda: read_rows(tmp_path / "capture")
    finally:
        uninstall()
        assert recorder.errors == 0
        recorder.close()


def described(rows: list[Row]) -> list[tuple[str, float | None, int]]:
    return [(row.name, row.value, row.bytes) for row in rows]


class Doubled(nn.Module):
    """A subclass with a `__call__` of its own, which uses the inherited one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = super().__call__(x) * 2
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x)
        return result


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyError("the model's own")


class Anything(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> int:
        return len(args) + len(kwargs)


def test_only_the_outermost_call_is_a_row(forwards: Forwards) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 1)))
    for _ in range(2):
        model(torch.ones(3, 4))
    assert described(forwards()) == [("forward", 12.0, 48)] * 2
    assert all(row.kind is Kind.PHASE and row.end_ns >= row.start_ns for row in forwards())


def test_inputs_are_counted_one_level_down(forwards: Forwards) -> None:
    one, two = torch.ones(1), torch.ones(2, dtype=torch.int64)
    assert Anything()(one, [two, two], {"a": one, "b": 3}, (one, [two]), "text", key=two, other=None) == 7
    assert described(forwards()) == [("forward", 1.0 + 4 + 1 + 1 + 2, 4 + 32 + 4 + 4 + 16)]


def test_a_forward_says_whether_gradients_are_on(forwards: Forwards) -> None:
    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    model(x)
    with torch.no_grad():
        model(x)
        with torch.enable_grad():
            model(x)
    with torch.inference_mode():
        model(x)
    model.eval()(x)  # evaluation mode alone does not switch them off
    assert [row.flags for row in forwards()] == [Flag.GRAD, Flag(0), Flag.GRAD, Flag(0), Flag.GRAD]
    assert {(row.group, row.seq, row.peer, row.tag, row.host_ns, row.dtype) for row in forwards()} == {
        ("", NO_SEQ, -1, -1, 0, "")
    }


def test_exception_passes_through_and_depth_is_restored(forwards: Forwards) -> None:
    with pytest.raises(KeyError, match="the model's own"):
        nn.Sequential(Failing())(torch.ones(2))
    nn.Identity()(torch.ones(2))
    assert described(forwards()) == [("forward", 2.0, 8)] * 2
    assert all(row.state is State.DONE for row in forwards())


def test_overridden_call_gives_one_row(forwards: Forwards) -> None:
    model = Doubled()
    x = torch.ones(2, 4)
    for _ in range(20):  # often enough for the interpreter to specialize the call
        assert torch.equal(model(x), model.inner.forward(x) * 2)
    assert described(forwards()) == [("forward", 8.0, 32)] * 20


def test_threads_have_their_own_depth(forwards: Forwards) -> None:
    class Spawning(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=nn.Identity(), args=(x,))
            thread.start()
            thread.join()
            return x

    Spawning()(torch.ones(3))
    assert len({row.thread for row in forwards()}) == len(forwards()) == 2


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_is_no_forward(forwards: Forwards, use_reentrant: bool) -> None:
    layer = nn.Linear(4, 4)
    x = torch.ones(2, 4, requires_grad=True)
    checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
    assert [row.name for row in forwards()] == ["forward", "recompute"]
    assert layer.weight.grad is not None


def test_compiled_model_is_one_whole_graph(forwards: Forwards) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Doubled(), nn.ReLU())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.ones(3, 4)
    for _ in range(2):
        assert torch.allclose(compiled(x), model(x))
    assert described(forwards()) == [("forward", 12.0, 48)] * 4


def test_compiled_function_may_call_modules(forwards: Forwards) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = torch.compile(lambda x: model(x).sum() + 1, backend="aot_eager", fullgraph=True)
    x = torch.ones(3, 4)
    expected = model(x).sum() + 1
    for _ in range(2):
        result = compiled(x)
        result.backward()
        assert torch.allclose(result, expected)
    assert len(forwards()) == 3  # the eager one, and aot_eager's graph, which is a module itself


def test_compiled_before_the_hook_still_works(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    compiled = torch.compile(nn.Linear(4, 4), backend="aot_eager", fullgraph=True)
    compiled(torch.ones(3, 4))
    count = request.getfixturevalue("forwards_python")
    compiled(torch.ones(3, 4))
    assert len(count()) == 1


@pytest.fixture
def forwards_python(tmp_path: Path) -> Iterator[Forwards]:
    recorder = open_recorder("python", tmp_path / "capture")
    uninstall = modules.watch(recorder)
    yield lambda: read_rows(tmp_path / "capture")
    uninstall()
    recorder.close()


def test_copy_and_pickle(forwards: Forwards) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    x = torch.ones(2, 4)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(x), model(x))
    assert len(forwards()) == 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_traced_and_symbolically_traced(forwards: Forwards) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.ones(2, 4)
    jit: Any = torch.jit
    for other in (jit.script(model), jit.trace(model, x), torch.fx.symbolic_trace(model)):
        assert torch.equal(other(x), model(x))


def test_exported_model(forwards: Forwards) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    x = torch.ones(2, 4)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), model(x))


@pytest.mark.parametrize("kind", RECORDERS)
def test_uninstall_leaves_no_trace(kind: str, tmp_path: Path) -> None:
    if kind == "native":
        build_helper()
    before = nn.Module.__call__
    recorder = open_recorder(kind, tmp_path / "capture")
    modules.watch(recorder)()
    nn.Identity()(torch.ones(1))
    recorder.close()
    assert nn.Module.__call__ is before
    assert read_rows(tmp_path / "capture") == []


# --- level full ---------------------------------------------------------------------------------


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


@pytest.fixture(params=RECORDERS)
def every(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], list[Row]]]:
    """The rows of modules so far, with every module recorded."""
    if request.param == "native":
        build_helper()
    recorder = open_recorder(request.param, tmp_path / "capture")
    uninstall = modules.watch(recorder, every=True)
    yield lambda: [row for row in read_rows(tmp_path / "capture") if row.kind in (Kind.MODULE, Kind.PHASE)]
    uninstall()
    assert recorder.errors == 0
    recorder.close()


def names(rows: list[Row]) -> list[str]:
    return [row.name for row in rows]


def called(rows: list[Row]) -> list[Row]:
    """Without what the native helper sees of backward."""
    return [row for row in rows if row.purpose != "backward"]


ALL = ["forward", "Tower", "blocks.0", "blocks.1", "blocks.1.0", "blocks.1.1", "head"]


def test_every_module_is_a_row_under_its_name(every: Callable[[], list[Row]]) -> None:
    model = Tower()
    model(torch.ones(1, 4))
    model(torch.ones(1, 4))
    rows = every()
    assert names(rows) == ALL * 2
    assert [row.kind for row in rows[:2]] == [Kind.PHASE, Kind.MODULE]
    phase, tower, *inner = rows[:7]
    assert phase.start_ns <= tower.start_ns
    assert tower.end_ns <= phase.end_ns
    assert all(tower.start_ns <= row.start_ns <= row.end_ns <= tower.end_ns for row in inner)


def test_what_wrappers_add_to_a_name_is_left_out(every: Callable[[], list[Row]]) -> None:
    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.module(x)
            return result

    Wrapper(Tower())(torch.ones(1, 4))
    assert names(every()) == ["forward", "Wrapper", *ALL[1:]]


def test_a_module_that_is_gone_leaves_its_name_to_nobody(every: Callable[[], list[Row]]) -> None:
    for _ in range(50):  # addresses are used again
        nn.Sequential(nn.Linear(4, 4))(torch.ones(1, 4))
        nn.Sequential(nn.ReLU(), nn.ReLU())(torch.ones(1, 4))
    assert names(every()) == ["forward", "Sequential", "0", "forward", "Sequential", "0", "1"] * 50


def test_a_module_that_came_later_has_no_row(every: Callable[[], list[Row]]) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model(torch.ones(1, 4))
    model.append(nn.ReLU())
    model(torch.ones(1, 4))
    assert names(every()) == ["forward", "Sequential", "0"] * 2


def test_what_backward_calls_is_recomputation(every: Callable[[], list[Row]]) -> None:
    model = Tower()
    model(torch.ones(1, 4))
    x = torch.ones(1, 4, requires_grad=True)
    checkpoint(model, x, use_reentrant=False).sum().backward()
    assert names(called(every()))[7:] == [*ALL, "recompute", *ALL[1:]]


def test_a_block_that_is_first_seen_in_a_recomputation_is_named_in_its_model(every: Callable[[], list[Row]]) -> None:
    """The capture of a single process opens in its first backward."""
    block, model = nn.Linear(4, 4), nn.Sequential()
    model.append(block)
    x = torch.ones(1, 4, requires_grad=True)

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            block(grad)
            return grad

    Again.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    model(torch.ones(1, 4))
    assert names(every()) == ["recompute", "forward", "Sequential", "0"]


def test_a_larger_model_names_what_it_has(every: Callable[[], list[Row]]) -> None:
    model = Tower()
    model.blocks[1](torch.ones(1, 4))
    model(torch.ones(1, 4))
    model.blocks[1](torch.ones(1, 4))
    assert names(every()) == ["forward", "Sequential", "0", "1", *ALL, "forward", *ALL[3:6]]


def test_models_beside_each_other_keep_apart(every: Callable[[], list[Row]]) -> None:
    first, second, third = (nn.Sequential(nn.Linear(4, 4)) for _ in range(3))
    for model in (first, second, third, first):
        model(torch.ones(1, 4))
    assert names(every()) == [
        "forward", "Sequential", "0", "forward", "Sequential", "Sequential.0", "forward", "Sequential#2",
        "Sequential#2.0", "forward", "Sequential", "0",
    ]  # fmt: skip


def test_what_comes_in_between_and_is_not_ours_is_the_jobs(every: Callable[[], list[Row]]) -> None:
    class Stop(BaseException):
        pass

    class Odd(nn.Linear):
        def __getattribute__(self, name: str) -> Any:
            if name == "_modules" and stopping:
                raise Stop
            return super().__getattribute__(name)

    stopping = False
    model = Odd(4, 4)
    stopping = True
    with pytest.raises(Stop):
        model(torch.ones(1, 4))
    stopping = False
    model(torch.ones(1, 4))
    assert names(every())[-2:] == ["forward", "Odd"]


def test_a_failing_module_ends_its_row(every: Callable[[], list[Row]]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Failing())
    for _ in range(2):
        with pytest.raises(KeyError, match="the model's own"):
            model(torch.ones(1, 4))
    rows = every()
    assert names(rows) == ["forward", "Sequential", "0", "1"] * 2
    assert {row.state for row in rows} == {State.DONE}


# --- level full, backward: native only ------------------------------------------------------------


@pytest.fixture
def backward(tmp_path: Path) -> Iterator[Callable[[], list[tuple[str, str]]]]:
    """Names of the calls of modules and phases so far, each with `backward` where it is one."""
    build_helper()
    recorder = open_recorder("native", tmp_path / "capture")
    uninstall = modules.watch(recorder, every=True)
    yield lambda: [
        (row.name, row.purpose) for row in read_rows(tmp_path / "capture") if row.kind in (Kind.MODULE, Kind.PHASE)
    ]
    uninstall()
    assert recorder.errors == 0
    recorder.close()


def gradients(rows: list[tuple[str, str]]) -> list[str]:
    return [name for name, purpose in rows if purpose == "backward"]


def test_backward_goes_through_the_modules_in_reverse(backward: Callable[[], list[tuple[str, str]]]) -> None:
    model = Tower()
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
    assert gradients(backward()) == ["head", "blocks.1.1", "blocks.1.0", "blocks.0"] * 2


def test_a_module_computes_before_and_after_those_that_it_calls(backward: Callable[[], list[tuple[str, str]]]) -> None:
    doubled = nn.Sequential(Doubled())
    doubled(torch.ones(2, 4)).sum().backward()
    # What is doubled is so outside of the inherited `__call__`, which Python 3.11 does not show anyway.
    assert gradients(backward()) == ["Sequential", "0.inner"]


def test_outputs_may_be_changed_in_place_and_be_anything(backward: Callable[[], list[tuple[str, str]]]) -> None:
    class Loose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.tail = nn.Linear(4, 4), nn.Identity()

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            x = self.layer(x)
            x.mul_(2).add_(1)
            return {"out": [self.tail(x), None], "count": 3}

    model, same = Loose(), Loose()
    same.load_state_dict(model.state_dict())
    model(torch.ones(2, 4))["out"][0].sum().backward()
    assert gradients(backward()) == ["Loose", "layer"]
    assert model.layer.weight.grad is not None
    assert torch.equal(model.layer.weight.grad, torch.full((4, 4), 4.0))


def test_a_module_called_twice_computes_twice(backward: Callable[[], list[tuple[str, str]]]) -> None:
    layer = nn.Linear(4, 4)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.between = layer, nn.Tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.layer(self.between(self.layer(x)))
            return result

    Twice()(torch.ones(2, 4)).sum().backward()
    assert gradients(backward()) == ["layer", "between", "layer"]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_backward_inside_of_backward(use_reentrant: bool, backward: Callable[[], list[tuple[str, str]]]) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.head(checkpoint(self.body, x, use_reentrant=use_reentrant))
            return result

    Checkpointed()(torch.ones(2, 4, requires_grad=True)).sum().backward()
    again = [("recompute", ""), ("body", ""), ("body.0", ""), ("body.1", "")]
    forward = [("forward", ""), ("Checkpointed", ""), *again[1:], ("head", "")]
    head, body = ("head", "backward"), [("body.1", "backward"), ("body.0", "backward")]
    if use_reentrant:
        assert backward() == [*forward, head, ("Checkpointed", "backward"), *again, *body]
    else:
        assert backward() == [*forward, head, body[0], *again, body[1]]


def test_a_failing_backward_leaves_the_next_one_alone(backward: Callable[[], list[tuple[str, str]]]) -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            raise KeyError("the model's own")

    class Sick(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = Fails.apply(x)  # type: ignore[no-untyped-call]
            return result

    model = nn.Sequential(nn.Linear(4, 4), Sick())
    with pytest.raises(KeyError, match="the model's own"):
        model(torch.ones(2, 4)).sum().backward()
    model[0](torch.ones(2, 4)).sum().backward()
    assert gradients(backward()) == ["1", "0"]


def test_a_backward_on_another_thread(backward: Callable[[], list[tuple[str, str]]]) -> None:
    loss = nn.Sequential(nn.Linear(4, 4), nn.Tanh())(torch.ones(2, 4)).sum()
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert gradients(backward()) == ["1", "0"]


def test_many_threads_of_short_lives_leave_the_lasting_one_known(
    backward: Callable[[], list[tuple[str, str]]],
) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    for _ in range(200):
        thread = threading.Thread(target=model, args=(torch.ones(2, 4),))
        thread.start()
        thread.join()
    model(torch.ones(2, 4)).sum().backward()
    assert gradients(backward()) == ["0", "0"]


def test_a_compiled_model_is_one_module_in_backward(backward: Callable[[], list[tuple[str, str]]]) -> None:
    model = Tower()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(torch.ones(1, 4)).sum().backward()
    before = len(backward())
    compiled(torch.ones(1, 4)).sum().backward()
    found = backward()[before:]
    assert found == [("forward", ""), ("OptimizedModule", ""), ("Tower", ""), ("Tower", "backward")]
