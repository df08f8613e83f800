"""The batch equation: solved, or contradicted with all four numbers and what to write."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsprof.engine.config import Batch, BatchError, ConfigError, load
from dsprof.engine.config.batch import solve

SIZES = st.none() | st.integers(1, 200)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ((64, 4, None, 8), Batch(64, 4, 2, 8)),
        ((64, None, 2, 8), Batch(64, 4, 2, 8)),
        ((None, 4, 2, 8), Batch(64, 4, 2, 8)),
        ((64, 4, 2, 8), Batch(64, 4, 2, 8)),
        ((64, None, None, 8), Batch(64, 8, 1, 8)),
        ((None, 4, None, 8), Batch(32, 4, 1, 8)),
    ],
)
def test_what_is_missing_is_solved_for(given: tuple[int | None, int | None, int | None, int], found: Batch) -> None:
    assert solve(*given) == found


def test_a_batch_in_words() -> None:
    assert str(Batch(64, 4, 2, 8)) == "64 = 4 a GPU x 2 accumulated x 8 data-parallel ranks"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((32, 4, 1, 2),
         "train_batch_size: 32 is not train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 1 x 2 "
         'data-parallel ranks = 8; write "train_batch_size": 8 or "train_micro_batch_size_per_gpu": 16 or '
         '"gradient_accumulation_steps": 4'),
        ((30, 4, None, 2),
         "train_batch_size: 30 is not train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 3 (derived) x 2 "
         'data-parallel ranks = 24; write "train_batch_size": 24 or "train_micro_batch_size_per_gpu": 5'),
        ((2, None, None, 3),
         "train_batch_size: 2 is not train_micro_batch_size_per_gpu 0 (derived) x gradient_accumulation_steps 1 "
         '(derived) x 3 data-parallel ranks = 0; write "train_batch_size": 3'),
        ((None, None, 4, 2),
         'train_batch_size: missing; write "train_micro_batch_size_per_gpu", the samples of a GPU in one forward pass'),
    ],
)  # fmt: skip
def test_contradictions(given: tuple[int | None, int | None, int | None, int], says: str) -> None:
    with pytest.raises(BatchError) as caught:
        solve(*given)
    assert str(caught.value) == says


@settings(deadline=None)
@given(train=SIZES, micro=SIZES, accumulation=SIZES, ranks=st.integers(1, 16))
def test_either_the_equation_holds_or_each_remedy_makes_it_hold(
    train: int | None, micro: int | None, accumulation: int | None, ranks: int
) -> None:
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    sizes = dict(zip(keys, (train, micro, accumulation), strict=True))
    raw = {key: size for key, size in sizes.items() if size is not None}
    try:
        config = load(raw, world_size=ranks)
    except ConfigError as error:
        (problem,) = error.problems
        if train is None and micro is None:
            assert problem.startswith("train_batch_size: missing")
            return
        assert f" x {ranks} data-parallel rank" in problem
        remedies = re.findall(r'"(\w+)": (\d+)', problem.partition("; write ")[2])
        assert remedies
        for key, value in remedies:
            mended = load({**raw, key: int(value)}, world_size=ranks)
            assert getattr(mended, key) == int(value)
    else:
        found = [getattr(config, key) for key in keys]
        assert found[0] == found[1] * found[2] * ranks
        assert all(found[number] == size for number, size in enumerate(sizes.values()) if size is not None)
