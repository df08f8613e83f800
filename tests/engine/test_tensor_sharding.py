"""How a parameter is sharded, and that nothing gets lost in it."""

from __future__ import annotations

import gc
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dsprof.engine.tensor import TensorShard, partial_parameters, shard_of
from dsprof.engine.tensor.sharding import even_shard, mark_partial, shard_in_place


@st.composite
def cuts(draw: st.DrawFn) -> TensorShard:
    size = draw(st.integers(1, 6))
    rank = draw(st.integers(0, size - 1))
    others = draw(st.lists(st.integers(1, 3), max_size=2))
    dim = draw(st.integers(0, len(others)))
    if draw(st.booleans()):
        return even_shard([*others[:dim], draw(st.integers(1, 13)), *others[dim:]], dim, size, rank)
    copies = draw(st.sampled_from([c for c in range(1, size + 1) if size % c == 0]))
    bands = [size // copies * width for width in draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))]
    shape = (*others[:dim], sum(bands), *others[dim:])
    return TensorShard(shape=shape, dim=dim, bands=tuple(bands), size=size, rank=rank, copies=copies)


@given(cuts())
def test_join_is_the_inverse_of_take(cut: TensorShard) -> None:
    whole = torch.arange(1.0, 1 + torch.Size(cut.shape).numel()).view(cut.shape)
    parts = [cut.of_rank(rank).take(whole) for rank in range(cut.size)]
    assert all(tuple(part.shape) == cut.local_shape for part in parts)
    assert torch.equal(cut.join(parts), whole)


@given(cuts())
def test_a_cut_survives_json(cut: TensorShard) -> None:
    assert TensorShard.from_dict(json.loads(json.dumps(cut.to_dict()))) == cut


@given(cuts())
def test_index_and_real_say_what_take_takes(cut: TensorShard) -> None:
    along = torch.arange(1, 1 + cut.shape[cut.dim])
    line = TensorShard(shape=(cut.shape[cut.dim],), dim=0, bands=cut.bands, size=cut.size, rank=cut.rank,
                     copies=cut.copies, padding=cut.padding)  # fmt: skip
    taken = line.take(along)
    assert torch.equal(taken, torch.where(cut.index() < len(along), cut.index() + 1, 0))
    assert (taken > 0).sum() == cut.real
    assert (taken[: cut.real] > 0).all()


@given(cuts())
def test_every_element_counts_once(cut: TensorShard) -> None:
    counted = [cut.of_rank(rank).real for rank in range(cut.size) if cut.of_rank(rank).counts]
    assert sum(counted) == cut.shape[cut.dim]


def test_parts_of_four_ranks_become_those_of_two() -> None:
    qkv = torch.arange(24.0).view(12, 2)  # four query rows, two of keys, two of values, twice
    old = TensorShard(shape=(12, 2), dim=0, bands=(8, 4), size=4, rank=0)
    new = TensorShard(shape=(12, 2), dim=0, bands=(8, 4), size=2, rank=1)
    saved = [(old.of_rank(rank).to_dict(), old.of_rank(rank).take(qkv)) for rank in range(4)]
    whole = TensorShard.from_dict(saved[0][0]).join([part for _, part in saved])
    assert torch.equal(new.take(whole), qkv[[4, 5, 6, 7, 10, 11]])


def test_a_padded_vocabulary() -> None:
    cut = even_shard((5, 2), 0, 4, 2)
    assert (cut.bands, cut.padding, cut.local_shape) == ((8,), 3, (2, 2))
    assert [cut.of_rank(rank).real for rank in range(4)] == [2, 2, 1, 0]
    assert cut.take(torch.ones(5, 2)).tolist() == [[1, 1], [0, 0]]


def test_copies_of_a_key_value_head() -> None:
    cut = TensorShard(shape=(4,), dim=0, bands=(4,), size=4, rank=3, copies=2)
    assert cut.take(torch.arange(4)).tolist() == [2, 3]
    assert [cut.of_rank(rank).counts for rank in range(4)] == [True, False, True, False]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"bands": (5,)}, "do not make up dimension"),
        ({"dim": 2}, "do not make up dimension"),
        ({"rank": 2}, "rank 2 of 2 ranks"),
        ({"copies": 3}, "3 of which share"),
        ({"bands": (1, 3)}, "do not divide by 2"),
    ],
)
def test_cuts_that_cannot_be(wrong: dict[str, object], said: str) -> None:
    good: dict[str, object] = {"shape": (4, 3), "dim": 0, "bands": (4,), "size": 2, "rank": 0}
    TensorShard(**good)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=said):
        TensorShard(**good | wrong)  # type: ignore[arg-type]


def test_a_tensor_of_another_shape_is_refused() -> None:
    cut = even_shard((4, 3), 0, 2, 0)
    with pytest.raises(ValueError, match=r"shape \(3, 4\) is to be sharded as one of \(4, 3\)"):
        cut.take(torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"has 2 of \(2, 3\)"):
        cut.join([torch.zeros(2, 3)])
    with pytest.raises(ValueError, match="not a sharding"):
        TensorShard.from_dict({"shape": [4], "dims": 0})


def test_marks_lie_beside_the_parameters() -> None:
    layer = nn.Linear(4, 4)
    weight, whole = layer.weight, layer.weight.detach().clone()
    cut = even_shard((4, 4), 0, 2, 1)
    shard_in_place(layer.weight, cut)
    mark_partial(layer.bias)
    assert layer.weight is weight
    assert torch.equal(weight, whole[2:])
    assert weight.untyped_storage().nbytes() == 4 * weight.numel()
    assert shard_of(weight) == cut
    assert shard_of(layer.bias) is None
    assert partial_parameters(layer) == [layer.bias]
    shard_in_place(weight, cut)  # a tied one comes a second time
    with pytest.raises(ValueError, match="another way"):
        shard_in_place(weight, even_shard((4, 4), 1, 2, 1))
    other = nn.Linear(4, 4)
    del layer, weight
    gc.collect()
    assert shard_of(other.weight) is None
    assert partial_parameters(other) == []
