"""The check that every test here ends with finds what was replaced, and nothing else."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from patches import bindings, changes
from spans import recorded
from torch import nn

from dsprof.engine.pipe import failure


def test_what_is_replaced_is_found_until_it_is_restored() -> None:
    before = bindings()
    with (
        mock.patch.object(torch, "manual_seed", bindings),
        mock.patch.object(nn.Linear, "forward", bindings),
        mock.patch.object(nn.Parameter, "ds_id", property(lambda param: 1), create=True),
        mock.patch.object(failure, "GRACE_S", 0.5),
        recorded(),
    ):
        assert changes(before) == [
            "Linear.forward",
            "Parameter.ds_id",
            "dsprof.engine.hooks: somebody listens still",
            "dsprof.engine.pipe.failure.GRACE_S",
            "torch.manual_seed",
        ]
    assert changes(before) == []


def test_what_torch_replaces_itself_is_its_own_business(monkeypatch: pytest.MonkeyPatch) -> None:
    before = bindings()
    monkeypatch.setattr(torch, "manual_seed", torch.seed)
    assert changes(before) == []
