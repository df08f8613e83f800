"""Cross-entropy over a vocabulary that is sharded, against F.cross_entropy of the whole."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from tensor_models import error_of, tensor_comm

from dsprof.engine.tensor import vocabulary_cross_entropy


def logits_and_targets(classes: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """[2, 5, classes] and [2, 5]; one target is ignored."""
    generator = torch.Generator().manual_seed(1)
    logits = 6 * torch.randn(2, 5, classes, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, classes, (2, 5), generator=generator)
    targets[0, 0], targets[1, 1] = -100, classes - 1
    return logits.to(dtype), targets


def equal_to_torchs(rank: int) -> None:
    comm = tensor_comm()
    for classes, smoothing, reduction in itertools.product((12, 9, 5), (0.0, 0.1), ("mean", "sum", "none")):
        logits, targets = logits_and_targets(classes)
        here = -(-classes // comm.size)
        padded = F.pad(logits, (0, here * comm.size - classes), value=100.0)  # the padding would win
        mine = padded.chunk(comm.size, -1)[rank].clone().requires_grad_()
        logits.requires_grad_()
        expected = F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), label_smoothing=smoothing, reduction=reduction
        )
        found = vocabulary_cross_entropy(
            mine, targets, comm, vocabulary=classes, label_smoothing=smoothing, reduction=reduction
        )
        torch.testing.assert_close(found.flatten(), expected.flatten(), rtol=1e-12, atol=1e-12)
        weights = torch.arange(1.0, 1 + expected.numel(), dtype=torch.float64)
        (expected.flatten() * weights).sum().backward()
        (found.flatten() * weights).sum().backward()
        assert logits.grad is not None
        assert mine.grad is not None
        whole = F.pad(logits.grad, (0, here * comm.size - classes))
        torch.testing.assert_close(mine.grad, whole.chunk(comm.size, -1)[rank], rtol=1e-12, atol=1e-12)


def other_cases(rank: int) -> None:
    comm = tensor_comm()
    logits, targets = logits_and_targets(8, torch.bfloat16)
    mine = logits.chunk(comm.size, -1)[rank].clone().requires_grad_()
    assert error_of(lambda: vocabulary_cross_entropy(mine, targets[0], comm)).startswith(
        "vocabulary_cross_entropy: logits (2, 5, 4) need a target (2, 5), not (5,)"
    )
    # Another index to ignore.
    other = targets.clamp(min=0)
    found = vocabulary_cross_entropy(mine, other, comm, ignore_index=0)
    torch.testing.assert_close(found, F.cross_entropy(logits.float().flatten(0, 1), other.flatten(), ignore_index=0))
    # Half precision is computed in fp32; large logits do not overflow.
    logits, targets = logits_and_targets(8, torch.bfloat16)
    mine = (1000 * logits).chunk(comm.size, -1)[rank].clone().requires_grad_()
    found = vocabulary_cross_entropy(mine, targets, comm)
    expected = F.cross_entropy(1000 * logits.float().flatten(0, 1), targets.flatten())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    found.backward()
    assert mine.grad is not None
    assert mine.grad.dtype == torch.bfloat16
    # Nothing to learn from: as torch has it.
    assert vocabulary_cross_entropy(mine, torch.full((2, 5), -100), comm).isnan()
    assert "9 classes in 2 x 4 columns" in error_of(lambda: vocabulary_cross_entropy(mine, targets, comm, vocabulary=9))
    assert "reduction is 'average'" in error_of(
        lambda: vocabulary_cross_entropy(mine, targets, comm, reduction="average")  # type: ignore[arg-type]
    )
    with pytest.raises(IndexError, match="targets from 0 to 8, 8 classes"):
        vocabulary_cross_entropy(mine, torch.tensor([[0] * 5, [8] * 5]), comm)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_losses_and_gradients_are_those_of_the_whole(ranks: Ranks, size: int) -> None:
    ranks.run(size, equal_to_torchs)


def test_half_precision_other_ignored_indices_and_wrong_shapes(ranks: Ranks) -> None:
    ranks.run(2, other_cases)
