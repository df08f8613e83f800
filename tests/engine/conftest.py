"""What the engine's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ranks import Ranks


@pytest.fixture(scope="package")
def ranks() -> Iterator[Ranks]:
    """Processes to run jobs of several ranks in, shared by all tests of this folder and gone after them."""
    pool = Ranks()
    yield pool
    pool.close()
