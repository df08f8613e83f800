"""Attention block by block, each with its log-sum-exp: put together, and their gradients, it is torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsprof.engine.sequence import ring
from dsprof.engine.sequence.layout import divide
from dsprof.engine.sequence.ring import part_of

RANKS, LENGTH = 4, 19

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.fixture(params=["fused", "plain"])
def fused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """By the device's fused attention where it has one for these, or by matrix products."""
    if request.param == "plain":
        monkeypatch.setattr(ring, "_flash", lambda query, value: "")
    return bool(request.param == "fused")


def given(dtype: torch.dtype, groups: int, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(2, heads, LENGTH, 8) for heads in (4, groups, groups, 4)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize(("causal", "zigzag"), [(False, False), (True, False), (True, True)])
def test_blocks_of_keys_are_the_whole_attention(
    fused: bool, device: str, dtype: torch.dtype, tolerance: float, groups: int, causal: bool, zigzag: bool
) -> None:
    query, key, value, grad = given(dtype, groups, device)
    wide = [each.double().requires_grad_() for each in (query, key, value)]
    expected = F.scaled_dot_product_attention(*wide, is_causal=causal, enable_gqa=True)
    expected.backward(grad.double())
    layout = divide(LENGTH, RANKS, zigzag=zigzag)
    sums = [torch.zeros_like(each) for each in wide]
    for rank in range(RANKS):
        q, g = layout.part(query, 2, rank), layout.part(grad, 2, rank)
        out = torch.zeros(*q.shape, dtype=torch.float64, device=device)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float64, device=device)
        parts = [(source, part_of(layout, rank, source, causal)) for source in range(RANKS)]
        for source, part in parts:
            if part is None:
                continue
            k, v = (layout.part(each, 2, source)[:, :, part[1]] for each in (key, value))
            found, its = ring.attend_block(q[:, :, part[0]], k, v, part[2], None)
            assert found.dtype == dtype
            before = lse[:, :, part[0]]
            after = torch.logaddexp(before, its.double())
            out[:, :, part[0]] = (
                out[:, :, part[0]] * (before - after).exp()[..., None]
                + found * (its.double() - after).exp()[..., None]
            )  # fmt: skip
            lse[:, :, part[0]] = after
        torch.testing.assert_close(out, layout.part(expected.detach(), 2, rank), rtol=0, atol=tolerance)
        lse = lse.to(torch.promote_types(dtype, torch.float32))
        places = [layout.positions(each, device) for each in range(RANKS)]
        for source, part in parts:
            if part is None:
                continue
            k, v = (layout.part(each, 2, source)[:, :, part[1]] for each in (key, value))
            rows = part[0]
            of_blocks = ring.block_gradients(
                g[:, :, rows], q[:, :, rows], k, v, out[:, :, rows].to(dtype), lse[:, :, rows], part[2], None
            )
            where = [places[rank][rows], places[source][part[1]], places[source][part[1]]]
            for total, at, each in zip(sums, where, of_blocks, strict=True):
                total.index_add_(2, at, each.double())
    for total, each in zip(sums, wide, strict=True):
        torch.testing.assert_close(total, each.grad, rtol=0, atol=3 * tolerance)


@pytest.mark.parametrize(
    ("zigzag", "cells"), [(False, [36, 100, 164, 228]), (True, [132, 132, 132, 132])], ids=["contiguous", "zigzag"]
)
def test_scores_that_each_rank_computes_under_a_causal_mask(zigzag: bool, cells: list[int]) -> None:
    """Of 32 positions over four ranks: 1 : 3 : 5 : 7 but for the diagonal in contiguous pieces, as many in zigzag."""
    layout = divide(32, 4, zigzag=zigzag)
    found = []
    for rank in range(4):
        of_rank = 0
        for source in range(4):
            part = part_of(layout, rank, source, causal=True)
            if part is not None:
                rows, columns = (torch.arange(8)[each].numel() for each in part[:2])
                of_rank += rows * (rows + 1) // 2 if part[2] else rows * columns
        found.append(of_rank)
    assert found == cells


def test_features_of_values_may_differ() -> None:
    """The fused attention does not take them."""
    query, key, value = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 6)
    out, _ = ring.attend_block(query, key, value, True, 0.2)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.2))
