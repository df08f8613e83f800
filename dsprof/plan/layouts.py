"""Layouts of a model on N ranks: which there are, which fit into memory, how fast each is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from .calibrate import Calibrated, Predicted
from .cost import layer_flops
from .memory import MemoryNeed, memory
from .steps import StepShapes

BEST: Final = 3
MICRO_BATCHES: Final = (1, 2, 4, 8, 16, 32, 64)
ZERO: Final = (1, 2, 3)


class NoLayout(Exception):
    """A model cannot be laid out as was asked; the message says why."""


@dataclass(frozen=True)
class TransformerModel:
    """A decoder-only transformer, and the batch of a step in sequences."""

    hidden: int
    heads: int
    layers: int
    sequence: int
    vocabulary: int
    global_batch: int

    @property
    def parameters(self) -> float:
        return 12.0 * self.layers * self.hidden**2 + self.vocabulary * self.hidden

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.global_batch * self.sequence

    def model_flops(self) -> float:
        """Of a step, forward and backward as the model needs them: nothing that is computed again."""
        matrix = layer_flops(self.tokens, self.sequence, self.hidden)
        return 3.0 * self.layers * matrix + 6.0 * self.tokens * self.hidden * self.vocabulary


@dataclass(frozen=True)
class Wanted:
    """What is fixed of a layout; None: any."""

    tp: int | None = None
    dp: int | None = None
    pp: int | None = None
    micro_batch: int | None = None
    zero: int | None = None
    recompute: bool | None = None


@dataclass(frozen=True)
class Ranked:
    """Layouts that fit, the fastest first. shapes, predicted, need: a row a layout. tried: how many were looked at."""

    shapes: StepShapes
    predicted: Predicted
    need: MemoryNeed
    tried: int


def layouts(model: TransformerModel, ranks: int, gpus_per_node: int, wanted: Wanted) -> StepShapes:
    """All layouts. Raises NoLayout where there is none."""
    _check(model, ranks, wanted)
    rows = list(_rows(model, ranks, gpus_per_node, wanted))
    if not rows:
        raise NoLayout(
            f"no layout of {ranks} ranks divides {model.layers} layers, {model.heads} heads and a global batch of "
            f"{model.global_batch}; change --global-batch or --ranks"
        )
    return StepShapes.of(rows)


def _check(model: TransformerModel, ranks: int, wanted: Wanted) -> None:
    sizes = {name: getattr(wanted, name) for name in ("tp", "dp", "pp")}
    product = int(np.prod([size for size in sizes.values() if size is not None]))
    said = " x ".join(f"--{name} {size}" for name, size in sizes.items() if size is not None)
    if None not in sizes.values() and product != ranks:
        raise NoLayout(f"{said} are {product} ranks, and --ranks says {ranks}")
    if ranks % product:
        raise NoLayout(f"{said} does not divide --ranks {ranks}")
    if wanted.tp is not None and (model.heads % wanted.tp or model.hidden % wanted.tp):
        raise NoLayout(f"--tp {wanted.tp} does not divide {model.heads} heads and a width of {model.hidden}")
    if wanted.pp is not None and wanted.pp > model.layers:
        raise NoLayout(f"--pp {wanted.pp} are more stages than the model has layers, {model.layers}")


def _rows(model: TransformerModel, ranks: int, per_node: int, wanted: Wanted) -> Iterator[dict[str, float]]:
    base = {
        "hidden": model.hidden, "heads": model.heads, "layers": model.layers, "sequence": model.sequence,
        "vocabulary": model.vocabulary, "global_batch": model.global_batch, "gpus_per_node": per_node,
    }  # fmt: skip
    for tp in [wanted.tp] if wanted.tp else [size for size in divisors(ranks) if size <= per_node]:
        if model.heads % tp or model.hidden % tp:
            continue
        for pp in [wanted.pp] if wanted.pp else divisors(ranks // tp):
            dp, left = divmod(ranks, tp * pp)
            if left or pp > model.layers or (wanted.dp is not None and dp != wanted.dp):
                continue
            if wanted.pp is None and model.layers % pp:
                continue
            for micro in [wanted.micro_batch] if wanted.micro_batch else MICRO_BATCHES:
                if model.global_batch % (dp * micro):
                    continue
                for zero in [wanted.zero] if wanted.zero is not None else ZERO[: 1 if pp > 1 or dp == 1 else None]:
                    for again in (0, 1) if wanted.recompute is None else (int(wanted.recompute),):
                        yield {
                            **base, "tp": tp, "pp": pp, "dp": dp, "micro_batch": micro, "zero": zero,
                            "recompute": again,
                        }  # fmt: skip


def divisors(number: int) -> list[int]:
    """Ascending."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def rank_layouts(calibrated: Calibrated, shapes: StepShapes, memory_gib: float, dtype: str) -> Ranked:
    """Those that fit into the memory of a rank, by their predicted time; of equal ones that which needs less memory.
    Raises NoLayout where none fits."""
    need = memory(shapes, dtype)
    fits = need.total <= memory_gib
    if not fits.any():
        least = int(np.argmin(need.total))
        raise NoLayout(
            f"no layout fits into {memory_gib:.0f} GiB a rank: the smallest of {len(shapes)} needs "
            f"{need.total[least]:.0f} GiB ({describe(shapes, least)}); use more ranks or smaller micro-batches"
        )
    inside = np.flatnonzero(fits)
    ms = calibrated.fitted.step_ms(shapes.take(inside))
    order = inside[np.lexsort((need.total[inside], ms))]
    # Of layouts that are one but for their ZeRO stage and take as long, the first one needs the least memory.
    columns = ("tp", "dp", "pp", "micro_batch", "recompute")
    first: dict[tuple[float, ...], int] = {}
    for row in order:
        first.setdefault(tuple(float(getattr(shapes, name)[row]) for name in columns), int(row))
    order = np.array(list(first.values()), dtype=np.int64)
    chosen = shapes.take(order)
    return Ranked(chosen, calibrated.predict(chosen), memory(chosen, dtype), len(shapes))


def describe(shapes: StepShapes, row: int) -> str:
    """`tp 2, dp 4, pp 1, micro-batch 2, ZeRO 1, recompute`."""
    words = [f"{name} {getattr(shapes, name)[row]:.0f}" for name in ("tp", "dp", "pp")]
    words += [f"micro-batch {shapes.micro_batch[row]:.0f}", f"ZeRO {shapes.zero[row]:.0f}"]
    return ", ".join([*words, *(["recompute"] if shapes.recompute[row] else [])])


def as_dict(ranked: Ranked, row: int, model: TransformerModel) -> dict[str, Any]:
    """A layout as plain data: sizes, time, throughput, memory."""
    names = ("gpus", "tp", "dp", "pp", "micro_batch", "micro_batches", "zero", "recompute")
    found: dict[str, Any] = {name: int(getattr(ranked.shapes, name)[row]) for name in names}
    ms = {"ms": ranked.predicted.ms, "low": ranked.predicted.low, "high": ranked.predicted.high}
    found["step"] = {name: float(values[row]) for name, values in ms.items()}
    seconds = found["step"]["ms"] / 1e3
    found["tokens_a_second"] = model.tokens / seconds
    found["tflops_a_gpu"] = model.model_flops() / seconds / found["gpus"] / 1e12
    found["memory_gib"] = {
        "total": float(ranked.need.total[row]),
        **{
            name: float(getattr(ranked.need, name)[row])
            for name in ("parameters", "gradients", "optimizer", "activations", "reserved")
        },
    }
    return found
