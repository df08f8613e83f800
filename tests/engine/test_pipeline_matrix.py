"""Every way of dividing a model into stages, with everything else that divides it: the weights are the reference's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Final, NamedTuple

import pytest
import torch
from pipelines import configuration, module, reference, start, trained
from ranks import Ranks

PRECISIONS: Final = {"float64": 1e-9, "bf16": 0.05, "fp16": 0.02}
"""What the model runs in -> how far weights may be from the reference's after two steps of at most 0.01 each."""


class Case(NamedTuple):
    stages: int
    replicas: int
    schedule: str
    zero: int
    sizes: str
    recompute: int
    precision: str


MESHES: Final = [(p, d) for ranks in (1, 2, 4, 8) for p in (1, 2, 4, 8) for d in (1, 2, 4, 8) if p * d == ranks]
SCHEDULES: Final = ("gpipe", "1f1b", "interleaved", "zero-bubble")
SIZES: Final = {
    "large": {},
    "small": {"reduce_bucket_size": 100, "allgather_bucket_size": 200, "sub_group_size": 150},
}


def everything() -> list[Case]:
    return [
        Case(*mesh, *rest)
        for mesh in MESHES
        for rest in itertools.product(SCHEDULES, (0, 1, 2, 3), SIZES, (0, 2), PRECISIONS)
    ]


def covering() -> Iterator[Case]:
    """Cases of which every pair of values of any two settings, in any mesh, is in one at least (greedily chosen)."""
    cases = everything()
    pairs = {case: {*itertools.combinations(enumerate((case[:2], *case[2:])), 2)} for case in cases}
    missing = set().union(*pairs.values())
    while missing:
        case = max(cases, key=lambda case: len(missing & pairs[case]))
        missing -= pairs[case]
        yield case


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
    engine = start(model, configuration(zero_optimization=zero, pipeline={"schedule": case.schedule}, **half))
    found = trained(engine)
    engine.destroy()
    return found


def check(ranks: Ranks, case: Case) -> None:
    expected = reference(case.replicas)
    seen: set[str] = set()
    for found in ranks.run(case.stages * case.replicas, train, case):
        for key, value in found.items():
            assert (value.double() - expected[key]).abs().max().item() < PRECISIONS[case.precision], key
        seen |= found.keys()
    assert seen == expected.keys()


@pytest.mark.parametrize("case", list(covering()), ids=name)
def test_pairs_of_settings_train_to_the_reference(ranks: Ranks, case: Case) -> None:
    check(ranks, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", everything(), ids=name)
def test_every_setting_trains_to_the_reference(ranks: Ranks, case: Case) -> None:
    check(ranks, case)
