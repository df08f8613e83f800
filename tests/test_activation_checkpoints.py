"""Which lines have activations computed again in backward."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dsprof.collectors.capture.facts import Fact
from dsprof.collectors.capture.open_capture import OpenCapture
from dsprof.collectors.hooking import statements
from dsprof.collectors.loop import activation_checkpoints


@pytest.fixture
def stated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Fact]]:
    """The facts of what is checkpointed meanwhile."""
    found: list[Fact] = []
    monkeypatch.setattr(statements, "_sink", found.append)
    (uninstall,) = activation_checkpoints.install(cast(OpenCapture, SimpleNamespace()))
    yield found
    uninstall()


def here() -> int:
    """The line that calls this."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def keeps_products() -> Any:
    def policy(*_: Any, **__: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)


def test_a_line_is_told_once_with_whether_a_policy_keeps_some(stated: list[Fact]) -> None:
    block, x = torch.nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    for _ in range(3):
        checkpoint(block, x, use_reentrant=False).sum().backward()
    line = here() - 1
    checkpoint(block, x, use_reentrant=False, context_fn=keeps_products).sum().backward()
    assert stated == [
        {"fact": "activation_checkpointing", "site": f"{__file__}:{number}", "framework": None, "selective": selective}
        for number, selective in ((line, False), (line + 2, True))
    ]


def test_gradients_are_the_same_and_the_hook_goes(stated: list[Fact]) -> None:
    from torch.utils import checkpoint as module

    name = activation_checkpoints.GENERATOR
    hooked = getattr(module, name)
    block, x = torch.nn.Linear(4, 4), torch.ones(2, 4, requires_grad=True)
    block(x).sum().backward()
    plain = x.grad
    x.grad = None
    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, plain)
    assert hooked.__wrapped__ is not hooked
