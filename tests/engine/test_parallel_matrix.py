"""Every way of dividing a model over up to eight ranks, pipeline, data and tensor parallel, with every schedule and
ZeRO stage: the weights are those of one process."""

from __future__ import annotations

import itertools
import math
from typing import Final, NamedTuple

import pytest
import torch
from pairwise import every_pair, pairs
from pipeline_models import configuration, module, reference, start, trained
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
SCHEDULES: Final = ("gpipe", "1f1b", "interleaved", "zero-bubble")
SIZES: Final = {
    "large": {},
    "small": {"reduce_bucket_size": 100, "allgather_bucket_size": 200, "sub_group_size": 150},
}


CASES: Final = [
    Case(2, 1, 1, "gpipe", 0, "large", 2, "bf16"),
    Case(2, 2, 1, "gpipe", 1, "large", 2, "float64"),
    Case(2, 2, 1, "gpipe", 2, "small", 0, "fp16"),
    Case(2, 2, 1, "gpipe", 3, "large", 0, "bf16"),
    Case(2, 1, 1, "1f1b", 0, "small", 0, "fp16"),
    Case(2, 2, 1, "1f1b", 1, "large", 2, "float64"),
    Case(2, 2, 1, "1f1b", 2, "small", 0, "float64"),
    Case(2, 2, 1, "1f1b", 3, "small", 2, "bf16"),
    Case(2, 1, 2, "interleaved", 0, "large", 2, "float64"),
    Case(2, 2, 1, "interleaved", 1, "small", 0, "bf16"),
    Case(2, 2, 1, "interleaved", 2, "large", 2, "fp16"),
    Case(2, 2, 1, "interleaved", 3, "small", 2, "float64"),
    Case(4, 1, 1, "zero-bubble", 0, "small", 2, "float64"),
    Case(2, 2, 1, "zero-bubble", 1, "small", 2, "fp16"),
    Case(2, 2, 1, "zero-bubble", 2, "large", 2, "bf16"),
    Case(2, 2, 1, "zero-bubble", 3, "large", 0, "fp16"),
    # One stage, of which a rank may have two in turn.
    Case(1, 1, 1, "zero-bubble", 0, "large", 0, "float64"),
    Case(1, 2, 1, "interleaved", 3, "small", 2, "fp16"),
    Case(1, 4, 1, "1f1b", 2, "large", 0, "float64"),
    Case(1, 1, 2, "gpipe", 1, "small", 0, "bf16"),
    Case(1, 2, 2, "1f1b", 3, "small", 2, "float64"),
]
"""As few as can be: schedules and ZeRO stages alone have 16 pairs."""
LARGE: Final = [Case(1, 1, 4, "1f1b", 0, "large", 2, "fp16"), Case(2, 2, 2, "zero-bubble", 2, "large", 2, "bf16")]
"""To plan for four parts, and to have eight ranks, takes long: these are slow. In two parts, and with two of the three
dimensions, they are above; four parts of layers are also in test_tensor_parallel.py."""


def test_every_pair_of_settings_is_in_a_case_with_stages_and_every_mesh_in_one() -> None:
    """Settings of ZeRO with replicas, too, among which it shards. Of eight ranks one mesh has all three dimensions."""
    staged = [case for case in CASES if case.stages > 1 and (case.zero == 0 or case.replicas > 1)]
    settings = (SCHEDULES, (0, 1, 2, 3), SIZES, (0, 2), PRECISIONS)
    assert every_pair(settings) - set().union(*(pairs(case[3:]) for case in staged)) == set()
    assert {case[:3] for case in CASES + LARGE} == {mesh for mesh in MESHES if math.prod(mesh) < 8} | {(2, 2, 2)}


def every_division() -> list[Case]:
    """Each mesh with each schedule and ZeRO stage, and the rest in turn."""
    rest = itertools.cycle(itertools.product(SIZES, (0, 2), PRECISIONS))
    return [Case(*mesh, *setting, *next(rest)) for mesh in MESHES
            for setting in itertools.product(SCHEDULES, (0, 1, 2, 3))]  # fmt: skip


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


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in LARGE)], ids=name)
def test_pairs_of_settings_train_to_the_reference(ranks: Ranks, case: Case) -> None:
    check(ranks, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", every_division(), ids=name)
def test_every_division_trains_to_the_reference(ranks: Ranks, case: Case) -> None:
    check(ranks, case)
