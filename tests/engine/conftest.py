"""What the engine's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from ranks import Ranks


@pytest.fixture(scope="package")
def ranks() -> Iterator[Ranks]:
    """Processes to run jobs of several ranks in, shared by all tests of this folder and gone after them."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.fixture(autouse=True, scope="module")
def leaves_no_process_group() -> Iterator[None]:
    """An engine of one process makes itself a group, which tests of other files must not find."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
