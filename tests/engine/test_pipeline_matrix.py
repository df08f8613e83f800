"""Every way of dividing a model over up to eight ranks, pipeline, data and tensor parallel, with every schedule and
ZeRO stage: the weights are those of one process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import pytest
import torch
from pipelines import configuration, module, reference, start, trained
from ranks import Ranks

PRECISIONS: Final = {"float64": 1e-9, "bf16": 0.05, "fp16": 0.05}
"""What the model runs in -> how far weights may be from the reference's after two steps of at most 0.01 each."""


class Case(NamedTuple):
    stages: int
    replicas: int
    parts: int
    schedule: str
    zero: int
    sizes: str
    recompute: int
    precision: str


SIDES: Final = (1, 2, 4, 8)
MESHES: Final = [mesh for mesh in itertools.product(SIDES, repeat=3) if math.prod(mesh) in SIDES]
USUAL: Final = [mesh for mesh in MESHES if math.prod(mesh) < 8 or mesh in ((2, 2, 2), (8, 1, 1))]
"""Those of the fast tests: eight ranks take long, and of what they have in common with four two meshes tell."""
SCHEDULES: Final = ("gpipe", "1f1b", "interleaved", "zero-bubble")
SIZES: Final = {
    "large": {},
    "small": {"reduce_bucket_size": 100, "allgather_bucket_size": 200, "sub_group_size": 150},
}


def everything() -> list[Case]:
    """Of the usual meshes."""
    return [
        Case(*mesh, *rest)
        for mesh in USUAL
        for rest in itertools.product(SCHEDULES, (0, 1, 2, 3), SIZES, (0, 2), PRECISIONS)
    ]


def covering() -> Iterator[Case]:
    """Cases of which every mesh, and every pair of values of two others, is in one at least (greedily chosen)."""
    cases = everything()
    pairs = {case: {case[:3], *itertools.combinations(enumerate(case[3:]), 2)} for case in cases}
    missing: set[Any] = set().union(*pairs.values())
    while missing:
        case = max(cases, key=lambda case: len(missing & pairs[case]))
        missing -= pairs[case]
        yield case


def every_division() -> Iterator[Case]:
    """Each mesh with each schedule and ZeRO stage, and the rest in turn."""
    rest = itertools.cycle(itertools.product(SIZES, (0, 2), PRECISIONS))
    for mesh in MESHES:
        for schedule, zero in itertools.product(SCHEDULES, (0, 1, 2, 3)):
            yield Case(*mesh, schedule, zero, *next(rest))


def name(case: Case) -> str:
    return "-".join(map(str, case))


def train(rank: int, case: Case) -> dict[str, torch.Tensor]:
    model = module(
        case.stages, virtual_stages=1 if case.schedule != "interleaved" or case.stages > 4 else 2,
        activation_checkpoint_interval=case.recompute,
    )  # fmt: skip
    zero = {"stage": case.zero, **(SIZES[case.sizes] if case.zero else {})}
    if case.zero == 3:
        zero["stage3_param_persistence_threshold"] = 0 if case.sizes == "small" else 20
    half = {} if case.precision == "float64" else {case.precision: {"enabled": True}}
    if case.precision == "fp16":
        half["fp16"] = {"enabled": True, "loss_scale": 128.0}
    if case.precision == "float64":
        model.double()
    divided = {"pipeline": {"schedule": case.schedule}, "tensor_parallel": {"autotp_size": case.parts}}
    engine = start(model, configuration(zero_optimization=zero, **divided, **half))
    found = trained(engine)
    engine.destroy()
    return found


def check(ranks: Ranks, case: Case) -> None:
    expected = reference(case.replicas)
    seen: set[str] = set()
    for found in ranks.run(case.stages * case.replicas * case.parts, train, case):
        for key, value in found.items():
            assert (value.double() - expected[key]).abs().max().item() < PRECISIONS[case.precision], key
        seen |= found.keys()
    assert seen == expected.keys()


@pytest.mark.parametrize("case", list(covering()), ids=name)
def test_pairs_of_settings_train_to_the_reference(ranks: Ranks, case: Case) -> None:
    check(ranks, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", every_division(), ids=name)
def test_every_division_trains_to_the_reference(ranks: Ranks, case: Case) -> None:
    check(ranks, case)
