"""How large a batch is, by what the outermost module is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from captures import RECORDERS, build_helper, open_recorder, read_rows
from torch import nn

from dsprof.collectors.capture import facts
from dsprof.collectors.loop import modules
from dsprof.schema import Kind

Noted = Callable[[], list[tuple[str, str, float | None]]]


class Anything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, *args: Any, **kwargs: Any) -> int:
        self.inner(torch.ones(77, 3))
        return len(args) + len(kwargs)


@pytest.fixture(params=RECORDERS)
def noted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Noted]:
    """(gauge, module, value) of each so far."""
    if request.param == "native":
        build_helper()
    recorder = open_recorder(request.param, tmp_path / "capture")
    uninstall = modules.watch(recorder, every=True)
    rows = lambda: [row for row in read_rows(tmp_path / "capture") if row.kind is Kind.GAUGE]  # noqa: E731
    yield lambda: [(row.name, row.module, row.value) for row in rows()]
    uninstall()
    assert recorder.errors == 0
    recorder.close()


IDS, FLOATS = torch.zeros(4, 16, dtype=torch.int64), torch.zeros(6, 3)


@pytest.mark.parametrize(
    ("args", "kwargs", "samples", "tokens"),
    [
        ((FLOATS,), {}, 6, None),
        ((IDS,), {}, 4, 64),
        ((3, None, IDS, FLOATS), {}, 4, 64),
        (([FLOATS, IDS],), {}, 6, None),
        (({"mask": FLOATS, "input_ids": IDS},), {}, 4, 64),
        ((), {"labels": FLOATS, "input_ids": IDS}, 4, 64),
        ((), {"module": FLOATS}, 6, None),
        ((IDS[0],), {}, 16, None),
        ((IDS[None],), {}, 1, None),
    ],
)
def test_the_first_tensor_tells(
    args: tuple[Any, ...], kwargs: dict[str, Any], samples: int, tokens: int | None, noted: Noted
) -> None:
    model = Anything()
    model(*args, **kwargs)
    expected = [("samples", "Anything", float(samples))]
    assert noted() == expected + ([("tokens", "Anything", float(tokens))] if tokens else [])


def test_what_has_no_size_tells_nothing(noted: Noted) -> None:
    model = Anything()
    model()
    model(torch.tensor(3.0))
    model("text", {"a": 1})
    model(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    assert noted() == []


def test_forwards_that_are_not_trained_have_none(noted: Noted) -> None:
    model = Anything()
    with torch.no_grad():
        model(IDS)
    assert noted() == []


def test_its_shape_is_told_once(noted: Noted) -> None:
    told: list[facts.Fact] = []
    facts.send_to(told.append)
    told.clear()  # those of other tests
    try:
        model = Anything()
        model(IDS)
        model(FLOATS)
    finally:
        facts.send_to(None)
    assert [fact for fact in told if fact["fact"] == "batch"] == [
        {"fact": "batch", "module": "Anything", "input": "argument 1", "shape": [4, 16], "tokens": True}
    ]
    assert [value for _, _, value in noted()] == [4, 64, 6]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_of_the_model_does_not_see_it(noted: Noted) -> None:
    jit: Any = torch.jit
    traced = jit.trace(nn.Linear(3, 2), FLOATS)
    assert "size" not in str(traced.graph)
