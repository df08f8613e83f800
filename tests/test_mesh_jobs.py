"""Real jobs of gloo ranks that form a mesh, each without a fault and with one in one dimension."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from verdict_truth import Check, Job, Outcome, is_present

pytestmark = [pytest.mark.alone, pytest.mark.timeout(300)]

STEPS = 30


def job(
    kind: str,
    first: str | None = None,
    *args: object,
    ranks: int = 4,
    checks: tuple[Check, ...] = (),
    explained: bool = True,
) -> Job:
    words = (kind, "--steps", str(STEPS), *map(str, args))
    return Job("mesh.py", words, ranks, STEPS, first, also=ALSO.get(kind, ()), checks=checks, explained=explained)


ALSO = {
    # What these cost is true of every such job, and grows on a busy host.
    "tp": ("comm.tensor-parallel",), "sp": ("comm.tensor-parallel",), "fsdp-tp": ("comm.tensor-parallel",),
    # Tiny units are gathered again in backward, which is half of their gathers.
    "units-tp": ("comm.tensor-parallel", "comm.exposed", "comm.redundant-gather"),
    # Eight micro-batches for two stages: an eighth of the step is filled and drained.
    "pp-dp": ("pipeline.bubble",),
}  # fmt: skip


def slow(kind: str, rank: int, **coordinate: int) -> Job:
    check = is_present("rank.straggler", ranks=[rank], coordinate=coordinate)
    return job(kind, "rank.straggler", "--slow-rank", rank, "--slow-by", 2, checks=(check,))


def judges(*codes: str) -> Check:
    """None of these codes was left unjudged."""

    def check(outcome: Outcome) -> Iterator[str]:
        unjudged: dict[str, Any] = outcome.found["not_judged"]
        yield from (f"{code}: {unjudged[code]}" for code in codes if code in unjudged)

    return check


def refuses(code: str, text: str) -> Check:
    """A code is not judged, for this reason."""

    def check(outcome: Outcome) -> Iterator[str]:
        if text not in outcome.found["not_judged"].get(code, ""):
            yield f"{code}: {outcome.found['not_judged']}"

    return check


ALL = judges("rank.straggler", "comm.small-messages", "comm.exposed", "comm.tensor-parallel")
WITHOUT_A_FAULT = {
    "tensor-parallel": job("tp", ranks=2, checks=(ALL,)),
    "sequence-parallel": job("sp", ranks=2, checks=(ALL,)),
    "FSDP2 and tensor-parallel": job("fsdp-tp", checks=(ALL,)),
    "HSDP": job("hsdp", checks=(ALL,)),
    "pipelines and replicas": job("pp-dp", checks=(judges("rank.straggler", "comm.small-messages"),)),
    "replicas and experts": job("dp-ep", checks=(judges("rank.straggler", "comm.small-messages"),)),
    "Ulysses": job("ulysses", checks=(judges("rank.straggler", "comm.small-messages"),)),
}
WITH_ONE = {
    "small units": job(
        "units-tp", "comm.small-messages", "--width", 32, checks=(is_present("comm.small-messages", dimension="dp"),)
    ),
    "slow in a tensor-parallel pair": slow("fsdp-tp", 3, dp=1, tp=1),
    "slow in a shard's group": slow("hsdp", 2, replicate=1, shard=0),
    "slow in a pipeline's replica": slow("pp-dp", 3, pp=1, dp=1),
    "slow among experts": slow("dp-ep", 1, dp=0, ep=1),
    "slow in a sequence's group": slow("ulysses", 2, cp=0),
    "gradients one by one": job(
        "ulysses", "comm.small-messages", "--one-by-one", "--blocks", 12, "--forward-ms", 6,
        checks=(is_present("comm.small-messages", dimension="dp"),),
        explained=False,  # 24 gradients are divided one by one, between backward and the optimizer
    ),
    "unequal shares of tokens": job(
        "dp-ep", None, "--skew", 0.5, checks=(refuses("data.imbalance", "unequal shares of tokens"),)
    ),
}  # fmt: skip
QUICK = ("slow in a tensor-parallel pair",)
"""Jobs of `make test`, each ten seconds or more; tests/test_meshes.py has made-up ones of every kind."""


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_A_FAULT)
def test_nothing_is_said_against_a_mesh(name: str, tmp_path: Path) -> None:
    mesh = WITHOUT_A_FAULT[name]
    assert mesh.wrong(mesh.run(tmp_path)) == []


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in WITH_ONE]
)
def test_a_fault_is_found_in_its_dimension(name: str, tmp_path: Path) -> None:
    mesh = WITH_ONE[name]
    assert mesh.wrong(mesh.run(tmp_path)) == []
