"""Shapes of training steps of a decoder-only transformer: what its time and its memory are worked out from."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.float64]

VOCABULARY: Final = 51200
"""Where it is not told: GPT-2's, padded as Megatron does."""
GPUS_PER_NODE: Final = 8


@dataclass(frozen=True)
class StepShapes:
    """Steps, float64 columns of one length.

    gpus: tp * dp * pp. global_batch, micro_batch: sequences a step, and a micro-batch of one replica.
    hidden, heads, layers, sequence, vocabulary: of the model. tp, dp, pp: sizes of the dimensions.
    recompute: 1 where activations are computed again in the backward, else 0.
    zero: ZeRO stage.
    gpus_per_node: ranks that share the fast link; tensor-parallel groups are packed first, then data-parallel ones.
    """

    gpus: Column
    global_batch: Column
    micro_batch: Column
    hidden: Column
    heads: Column
    layers: Column
    sequence: Column
    tp: Column
    dp: Column
    pp: Column
    vocabulary: Column
    recompute: Column
    gpus_per_node: Column
    zero: Column

    @classmethod
    def of(cls, rows: list[dict[str, float]]) -> Self:
        """From rows that have at least the sizes of the model, the batch and the dimensions."""
        filled = [{**DEFAULTS, "gpus": row["tp"] * row["dp"] * row["pp"], **row} for row in rows]
        return cls(*(np.array([row[name] for row in filled], dtype=np.float64) for name in NAMES))

    def __len__(self) -> int:
        return len(self.gpus)

    def take(self, chosen: npt.NDArray[Any]) -> Self:
        """The rows that a mask or numbers choose."""
        return type(self)(*(getattr(self, name)[chosen] for name in NAMES))

    @property
    def micro_batches(self) -> Column:
        """Of a replica in a step."""
        return self.global_batch / (self.dp * self.micro_batch)

    def rows(self) -> list[tuple[float, ...]]:
        """Of each row all that it has: rows that are equal are one step."""
        return [tuple(map(float, row)) for row in zip(*(getattr(self, name) for name in NAMES), strict=True)]

    def layer_shapes(self) -> list[tuple[float, ...]]:
        """Of each row what the kernels of one layer on one rank depend on: rows with one shape run the same kernels."""
        columns = (self.hidden, self.heads, self.sequence, self.micro_batch, self.tp, self.recompute)
        return [tuple(map(float, row)) for row in zip(*columns, strict=True)]

    def groups(self) -> list[tuple[float, ...]]:
        """Of each row the question it answers: rows of one group differ in their layout alone."""
        columns = (self.gpus, self.global_batch, self.hidden, self.heads, self.layers, self.sequence, self.vocabulary)
        return [tuple(map(float, row)) for row in zip(*columns, strict=True)]


NAMES: Final = tuple(field.name for field in fields(StepShapes))
DEFAULTS: Final = {
    "vocabulary": float(VOCABULARY),
    "recompute": 1.0,
    "gpus_per_node": float(GPUS_PER_NODE),
    "zero": 1.0,
}
