"""What `PyRecorder` remembers of a collective's tensors."""

from __future__ import annotations

import torch

from dsprof.collectors.recorder.wait_targets import MOST_STORAGES, SWEPT, Target, Targets

TARGET = Target(1, 1, 0, -1, -1, False)


def test_a_tensor_is_known_as_long_as_it_is_there_and_forgotten_soon_after() -> None:
    targets = Targets()
    lasting = [torch.zeros(4) for _ in range(10)]
    for tensor in lasting:
        targets.remember_tensors(tensor, TARGET)
    for _ in range(10 * SWEPT):  # each is gone when the next is made
        targets.remember_tensors(torch.zeros(4), TARGET)
    assert all(targets.of_tensor(tensor) == TARGET for tensor in lasting)
    assert len(targets._storages) <= len(lasting) + SWEPT


def test_of_very_many_the_newest_are_known() -> None:
    targets = Targets()
    tensors = [torch.zeros(1) for _ in range(MOST_STORAGES + 10)]
    for tensor in tensors:
        targets.remember_tensors(tensor, TARGET)
    assert len(targets._storages) == MOST_STORAGES
    assert targets.of_tensor(tensors[-1]) == TARGET
