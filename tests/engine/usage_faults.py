"""Faults that the engine has had, to be put back while the random tester runs: it must find them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest.mock import patch

from dsprof.engine.train.engine import Engine
from dsprof.engine.zero.fetch import Fetcher
from dsprof.engine.zero.validate import StorageCheck


def _nothing(*_: Any) -> None:
    return None


def _only_gradients(engine: Engine, set_to_none: bool = True) -> None:
    engine.zero.reducer.clear()


PLACES: Final[dict[str, list[tuple[type, str, Callable[..., Any]]]]] = {
    "old weights": [(Fetcher, "weights_change", _nothing)],
    "moved weights": [(StorageCheck, name, _nothing) for name in ("check", "check_kept", "reset")],
    "counted micro-batches": [(Engine, "zero_grad", _only_gradients)],
}
"""Fault -> what is replaced, and by what.

old weights: stage 3 takes what is whole before a step for the weights after it.
moved weights: what `module.to` has put elsewhere is not stepped any more.
counted micro-batches: `zero_grad` in the middle of a step forgets gradients, and counts their micro-batches.
"""


@contextmanager
def put_back(fault: str) -> Iterator[None]:
    """Have the engine of this process as it was with `fault`; with "" as it is."""
    with ExitStack() as stack:
        for owner, name, instead in PLACES.get(fault, []):
            stack.enter_context(patch.object(owner, name, instead))
        yield
