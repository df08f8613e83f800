"""Parameters that came into a model after its engine was made: nothing would train them."""

from __future__ import annotations

from collections.abc import Container
from itertools import chain
from typing import Any

from torch import nn


class Newcomers:
    """Looks for parameters of `model` that are not `known`. Going through a model takes long, so that is done only when
    a dict of one of its modules has changed."""

    def __init__(self, model: nn.Module, known: Container[nn.Parameter]) -> None:
        self._model = model
        self._known = known
        self._found: list[tuple[str, nn.Parameter]] = []
        self._dicts: list[dict[str, Any]] = []
        self._contents: list[int] = []
        self._go_through()

    def check(self) -> None:
        """Before a step: raise RuntimeError if one of them has a gradient."""
        if self._look() != self._contents:
            self._go_through()
        for name, param in self._found:
            if param.grad is not None:
                raise RuntimeError(
                    f"engine.step: {name} came into the model after the engine was made, and has a gradient, which "
                    "nothing would use: build the whole model before initialize, or call engine.destroy and initialize "
                    "anew"
                )

    def _look(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, self._dicts))))

    def _go_through(self) -> None:
        self._dicts = [each for module in self._model.modules() for each in (module._modules, module._parameters)]
        self._contents = self._look()
        self._found = [(name, param) for name, param in self._model.named_parameters() if param not in self._known]
