"""How large a batch is: the first dimension of the first tensor that the outermost module is given, in forwards for
training. One of two dimensions and whole numbers holds tokens. Rows of `schema.SAMPLES` and `schema.TOKENS`; level full
only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from dsprof.schema import SAMPLES, TOKENS, Kind

from ..capture import facts
from ..hooking import dynamo, private
from ..system.clock import now_ns

if TYPE_CHECKING:
    from ..recorder.record import Recorder

FIRST: Final = "input_ids"
"""Given by name, this is looked at before all others, whichever comes first: so Hugging Face's models call it."""
DTENSOR: Final = "DTensor"


class Batches:
    """Notes the batch of each forward. `name_of`: the id of a module's name by its address, 0: it has none."""

    def __init__(self, recorder: Recorder, name_of: Callable[[int], int]) -> None:
        self._recorder, self._name_of = recorder, name_of
        self._samples, self._tokens = recorder.intern(SAMPLES), recorder.intern(TOKENS)
        self._told: set[int] = set()
        self._tracing_state: Callable[[], object] | None = private.find("torch._C:_get_tracing_state")
        dynamo.skip(self.note.__func__)  # type: ignore[attr-defined]

    def note(self, module: Any, /, *args: Any, **kwargs: Any) -> None:
        """A forward of the outermost `module` begins, with these arguments."""
        if self._tracing_state is None or self._tracing_state() is not None:
            # What traces would record that its shape was asked for.
            return
        found = next(_tensors(args, kwargs), None)
        name = self._name_of(id(module))
        if found is None or not name:
            return
        which, tensor = found
        if tensor.is_nested or type(tensor).__name__ == DTENSOR:  # of no one size; of the size on all ranks
            return
        shape = [int(size) for size in tensor.shape]
        if not shape:
            return
        tokens = len(shape) == 2 and not tensor.is_floating_point() and not tensor.is_complex()
        if name not in self._told:
            self._told.add(name)
            facts.state(
                {"fact": "batch", "module": type(module).__name__, "input": which, "shape": shape, "tokens": tokens}
            )
        now = now_ns()
        self._put(self._samples, shape[0], now, name)
        if tokens:
            self._put(self._tokens, shape[0] * shape[1], now, name)

    def _put(self, gauge: int, value: int, now: int, module: int) -> None:
        self._recorder.span(Kind.GAUGE, gauge, now, now, 0, float(value), -1, 0, 0, -1, -1, module, 0)


def _tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The tensors among the arguments, with what they are called; one level of list, tuple or dict down."""
    if FIRST in kwargs:
        yield from _inside(FIRST, kwargs[FIRST])
    for position, value in enumerate(args):
        yield from _inside(f"argument {position + 1}", value)
    for name, value in kwargs.items():
        yield from _inside(name, value)


def _inside(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        inner = [(f"{name}[{key!r}]", item) for key, item in value.items()]
        inner.sort(key=lambda item: item[0] != f"{name}[{FIRST!r}]")
        yield from ((called, item) for called, item in inner if isinstance(item, torch.Tensor))
    elif isinstance(value, (list, tuple)):
        yield from ((f"{name}[{i}]", item) for i, item in enumerate(value) if isinstance(item, torch.Tensor))
