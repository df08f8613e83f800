"""What the engine's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from patches import bindings, changes
from ranks import Ranks
from spans import recorded

from dsprof.engine.hooks import FAILURES, Span

torch.set_num_threads(1)
"""As in the ranks. A second thread has nothing to do in models of this size but to spin until the next operation, which
took an eighth of the CPU time of a test."""


@pytest.fixture(scope="package")
def ranks() -> Iterator[Ranks]:
    """Processes to run jobs of several ranks in, shared by all tests of this folder and gone after them."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture
def spans() -> Iterator[list[Span]]:
    """The spans that end in this process during the test."""
    with recorded() as spans:
        yield spans
    assert FAILURES == []


@pytest.fixture(autouse=True)
def leaves_nothing_patched() -> Iterator[None]:
    before = bindings()
    yield
    assert changes(before) == []


@pytest.fixture(autouse=True)
def leaves_no_process_group() -> Iterator[None]:
    """An engine of one process makes itself a group, which other tests must not find."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
