"""train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

TRAIN: Final = "train_batch_size"
MICRO: Final = "train_micro_batch_size_per_gpu"
ACCUMULATION: Final = "gradient_accumulation_steps"


class BatchError(ValueError):
    """The batch sizes contradict each other; the message gives all four numbers and what to write."""


@dataclass(frozen=True)
class Batch:
    """Numbers of samples that satisfy the equation."""

    train: int
    """Samples in an optimizer step, over all ranks."""
    micro: int
    """Samples a rank takes in one forward pass."""
    accumulation: int
    """Forward passes of a rank in an optimizer step."""
    ranks: int
    """Data-parallel ranks."""

    def __str__(self) -> str:
        return f"{self.train} = {self.micro} a GPU x {self.accumulation} accumulated x {self.ranks} data-parallel ranks"


def solve(
    train: int | None, micro: int | None, accumulation: int | None, ranks: int, *, unequal: bool = False
) -> Batch:
    """The batch sizes, of which None are still to be found, as DeepSpeed finds them. Raises BatchError.

    `unequal`: ranks take unequally many samples, whose mean need not be whole; it is rounded down."""
    if train is None and micro is None:
        raise BatchError(f'{TRAIN}: missing; write "{MICRO}", the samples of a GPU in one forward pass')
    found = _fill(train, micro, accumulation, ranks)
    if found.train == found.micro * found.accumulation * ranks:
        return found
    if unequal and micro is None and found.train % found.accumulation == 0 and found.micro:
        return found
    remedy = remedies(found, {TRAIN: train, MICRO: micro, ACCUMULATION: accumulation})
    raise BatchError(
        f"{TRAIN}: {found.train} is not {MICRO} {_shown(found.micro, micro)} x"
        f" {ACCUMULATION} {_shown(found.accumulation, accumulation)} x {ranks} data-parallel"
        f" {'rank' if ranks == 1 else 'ranks'} = {found.micro * found.accumulation * ranks};"
        " write " + " or ".join(f'"{key}": {value}' for key, value in remedy.items())
    )


def _fill(train: int | None, micro: int | None, accumulation: int | None, ranks: int) -> Batch:
    """What is None from what is given, rounding down; the equation may not hold."""
    steps = 1 if accumulation is None else accumulation
    if train is None:
        assert micro is not None
        return Batch(micro * steps * ranks, micro, steps, ranks)
    if micro is None:
        return Batch(train, train // ranks // steps, steps, ranks)
    return Batch(train, micro, train // micro // ranks if accumulation is None else accumulation, ranks)


def remedies(found: Batch, given: dict[str, int | None]) -> dict[str, int]:
    """Key -> a value for it with which the equation holds, the other keys staying as given."""
    micro, accumulation = max(1, found.micro), max(1, found.accumulation)
    values = {TRAIN: micro * accumulation * found.ranks}
    for key, rest in ((MICRO, accumulation * found.ranks), (ACCUMULATION, micro * found.ranks)):
        if given[key] is not None and found.train % rest == 0:
            values[key] = found.train // rest
    return values


def _shown(value: int, given: int | None) -> str:
    return str(value) if given is not None else f"{value} (derived)"
