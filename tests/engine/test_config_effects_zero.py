"""Keys of `zero_optimization`, each seen to take effect: what travels when, and who holds what, is as the key says."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from config_coverage import alive
from engines import LAYER, Layers, configuration, engine_for, stored_bytes, train
from ranks import Ranks
from spans import comms, names, recorded
from torch import Tensor

from dsprof.engine.hooks import Span

STEPS = 3
LAST = STEPS - 1
"""By then the order of gradients is settled, and the sequence of modules known."""


@dataclass
class Seen:
    """Of one rank."""

    spans: list[Span]
    masters: list[tuple[int, int]]
    """First element of each parameter's shard, and the one after its last."""
    stored: list[int]
    """Bytes of each parameter's own storage after the last step."""
    in_forward: list[int] = field(default_factory=list)
    """Elements of all parameters' storages, when each layer ran."""
    with_grad: list[int] = field(default_factory=list)
    """Parameters that had a gradient when backward came to the first layer, in each step."""
    failure: str = ""

    def comms(self, purpose: str) -> list[Span]:
        return comms(self.spans, purpose, LAST)

    def phases(self, name: str) -> list[Span]:
        return [s for s in self.spans if s.kind == "phase" and s.name == name and s.step == LAST]


def job(rank: int, config: dict[str, Any], link: float | None = None, unused: bool = False) -> Seen:
    model = Layers()
    if unused:
        model[0].register_parameter("never", torch.nn.Parameter(torch.ones(5)))
    params = list(model.parameters())  # to list them while the model runs would fetch them
    seen = Seen([], [], [])
    with engine_for(model, config, link=link) as engine, recorded() as spans:
        for layer in model:
            layer.register_forward_pre_hook(
                lambda *_: seen.in_forward.append(sum(stored_bytes(p) // 4 for p in engine.zero.params))
            )
        model[0].register_full_backward_pre_hook(
            lambda *_: seen.with_grad.append(sum(p.grad is not None for p in params))
        )
        try:
            train(engine, STEPS)
        except RuntimeError as error:
            seen.failure = str(error)
        seen.spans = list(spans)
        seen.masters = [(p.start, p.stop) for p in engine.zero.trainable]
        seen.stored = list(map(stored_bytes, engine.zero.params))
    return seen


def see(ranks: Ranks, stage: int, world_size: int = 2, *, link: float | None = None, **zero: Any) -> list[Seen]:
    return ranks.run(world_size, job, configuration(stage, zero=zero), link)


@alive("zero_optimization.stage")
def test_stage(ranks: Ranks) -> None:
    """Two micro-batches a step: from stage 2 on each of them is reduced, since nobody keeps whole gradients."""
    found = [ranks.run(2, job, configuration(stage, gradient_accumulation_steps=2))[1] for stage in range(4)]
    assert [seen.masters[0] for seen in found] == [(0, LAYER), (32, LAYER), (32, LAYER), (32, LAYER)]
    assert [[s.microbatch for s in seen.comms("gradient")] for seen in found] == [[1], [1], [0, 1], [0, 1]]
    assert [names(seen.comms("gradient"))[0] for seen in found] == ["all_reduce", *3 * ["reduce_scatter"]]
    assert [seen.stored[0] for seen in found] == [4 * LAYER, 4 * LAYER, 4 * LAYER, 0]


@alive("zero_optimization.contiguous_gradients")
@pytest.mark.parametrize("stage", [0, 2])
def test_contiguous_gradients(ranks: Ranks, stage: int) -> None:
    """All in one bucket: gradients go to its buffer as they come, or wait beside it until it is complete."""
    (at_once, _), (waiting, _) = (see(ranks, stage, contiguous_gradients=value) for value in (True, False))
    assert at_once.with_grad == STEPS * [0]
    assert waiting.with_grad == STEPS * [3]


@alive("zero_optimization.reduce_scatter")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_reduce_scatter(ranks: Ranks, stage: int) -> None:
    (one, _), (other, _) = (see(ranks, stage, reduce_scatter=value) for value in (True, False))
    assert names(one.comms("gradient")) == ["reduce_scatter"]
    assert names(other.comms("gradient")) == ["all_reduce"]


@alive("zero_optimization.reduce_bucket_size")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_reduce_bucket_size(ranks: Ranks, stage: int) -> None:
    for size, count in ((1, 4), (LAYER, 4), (LAYER + 1, 2), (2 * LAYER, 2), (10**9, 1)):
        (seen, _) = see(ranks, stage, reduce_bucket_size=size)
        sent = seen.comms("gradient")
        assert len(sent) == count
        assert all(span.bytes is not None and span.bytes // 4 // LAYER == 4 // count for span in sent)


@alive("zero_optimization.allgather_partitions")
@pytest.mark.parametrize("stage", [1, 2])
def test_allgather_partitions(ranks: Ranks, stage: int) -> None:
    (one, _), (other, _) = (see(ranks, stage, allgather_partitions=value) for value in (True, False))
    assert names(one.comms("parameter")) == ["all_gather"]
    assert names(other.comms("parameter")) == ["broadcast", "broadcast"]  # one from each rank


@alive("zero_optimization.allgather_bucket_size")
@pytest.mark.parametrize("stage", [1, 2])
def test_allgather_bucket_size(ranks: Ranks, stage: int) -> None:
    for size, layers in ((0, [1, 1, 1, 1]), (LAYER, [1, 1, 1, 1]), (3 * LAYER, [3, 1]), (10**9, [4])):
        (seen, _) = see(ranks, stage, allgather_bucket_size=size)
        assert [span.bytes for span in seen.comms("parameter")] == [4 * LAYER * count for count in layers]


@alive("zero_optimization.overlap_comm")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_overlap_comm(ranks: Ranks, stage: int) -> None:
    """A layer's gradients take 30 ms on the link: does backward go on meanwhile, and hand over the next ones?"""

    def queued(overlap: bool) -> int:
        (seen, _) = see(ranks, stage, link=4 * LAYER / 0.030, reduce_bucket_size=1, overlap_comm=overlap)
        sent = seen.comms("gradient")
        assert len(sent) == 4
        assert all(span.dur_ns >= 30e6 for span in sent)
        return sum((after.issue_ns or 0) < (span.end_ns or 0) for span, after in itertools.pairwise(sent))

    assert queued(False) == 0
    assert queued(True) > 0


@alive("zero_optimization.overlap_comm")
def test_overlap_comm_in_the_step(ranks: Ranks) -> None:
    """After the optimizer's step one batch of parameters is on its way while the next is brought together."""

    def queued(overlap: bool) -> int:
        (seen, _) = see(ranks, 1, link=4 * LAYER / 0.030, allgather_bucket_size=0, overlap_comm=overlap)
        first, *others = seen.comms("parameter")
        assert len(others) == 3
        return sum((span.issue_ns or 0) < (first.end_ns or 0) for span in others)

    assert queued(False) == 0
    assert queued(True) > 0


@alive("zero_optimization.sub_group_size")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sub_group_size(ranks: Ranks, stage: int) -> None:
    """Masters have 32 elements each on this rank."""
    for size, tiles in ((0, 4), (32, 4), (64, 2), (10**9, 1)):
        (seen, _) = see(ranks, stage, sub_group_size=size)
        assert [span.value for span in seen.phases("optimizer")] == list(map(float, range(tiles)))


@alive("zero_optimization.round_robin_gradients")
def test_round_robin_gradients(ranks: Ranks) -> None:
    fixed, turning = (see(ranks, 2, round_robin_gradients=value) for value in (False, True))
    assert [start for start, _ in fixed[0].masters] == [0, 0, 0, 0]
    assert [start for start, _ in turning[0].masters] == [0, 32, 0, 32]
    assert [start for start, _ in turning[1].masters] == [32, 0, 32, 0]


@alive("zero_optimization.ignore_unused_parameters")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ignore_unused_parameters(ranks: Ranks, stage: int) -> None:
    for ignore in (True, False):
        config = configuration(stage, zero={"ignore_unused_parameters": ignore})
        for seen in ranks.run(2, job, config, None, True):
            assert seen.failure.startswith("" if ignore else "1 parameters got no gradient")
            assert ("0.never" in seen.failure) is not ignore


# --- stage 3


@alive("zero_optimization.stage3_param_persistence_threshold")
def test_param_persistence_threshold(ranks: Ranks) -> None:
    """What stays whole is brought after the step, as in stage 2; what is sharded, when it is needed."""
    (sharded, _), (whole, _) = (see(ranks, 3, stage3_param_persistence_threshold=size) for size in (LAYER - 1, LAYER))
    assert (sharded.stored, whole.stored) == ([0, 0, 0, 0], [4 * LAYER] * 4)
    for seen, when in ((sharded, "forward"), (whole, "step")):
        (gather,), (phase,) = seen.comms("parameter"), seen.phases(when)
        assert phase.start_ns < (gather.issue_ns or 0) < (phase.end_ns or 0)


@alive("zero_optimization.stage3_model_persistence_threshold")
def test_model_persistence_threshold(ranks: Ranks) -> None:
    for most, stored in ((2 * LAYER, 2), (3 * LAYER - 1, 2), (10**9, 4)):
        (seen, _) = see(ranks, 3, stage3_param_persistence_threshold=LAYER, stage3_model_persistence_threshold=most)
        assert seen.stored == [4 * LAYER] * stored + [0] * (4 - stored)


def fetches(seen: Seen) -> list[int]:
    """Layers in each gather of the last step."""
    return [(span.bytes or 0) // (4 * LAYER) for span in seen.comms("parameter")]


@alive("zero_optimization.stage3_prefetch_bucket_size")
def test_prefetch_bucket_size(ranks: Ranks) -> None:
    """What is kept for backward is not in the way; the last layer is there when backward begins, and the first one is
    not needed: the model's input has no gradient."""
    for size, layers in ((0, 6 * [1]), (LAYER, 6 * [1]), (3 * LAYER, [3, 1, 1, 1]), (10**9, [4, 1, 1])):
        (seen, _) = see(ranks, 3, stage3_prefetch_bucket_size=size, stage3_max_reuse_distance=0)
        assert fetches(seen) == layers


def ahead(rank: int, config: dict[str, Any]) -> list[bool]:
    """Whether each layer's parameters were asked for before the layer before it was over; the last forward."""
    over: list[int] = []

    def sleep(module: torch.nn.Module, args: Any, output: Tensor) -> None:
        time.sleep(0.01)
        over.append(time.monotonic_ns())

    model = Layers()
    with engine_for(model, config) as engine, recorded() as spans:
        for layer in model:
            layer.register_forward_hook(sleep)
        train(engine, STEPS)
        (forward,) = [s for s in spans if s.kind == "phase" and s.name == "forward" and s.step == LAST]
        gathers = [
            s.issue_ns or 0 for s in comms(spans, "parameter", LAST) if (s.issue_ns or 0) < (forward.end_ns or 0)
        ]
    return [asked < end for asked, end in zip(gathers[1:4], over[-4:-1], strict=True)]


@alive("zero_optimization.stage3_prefetch_bucket_size")
def test_prefetching_is_ahead_of_the_use(ranks: Ranks) -> None:
    def asked(size: int) -> list[bool]:
        zero = {"stage3_prefetch_bucket_size": size, "stage3_max_reuse_distance": 0}
        return ranks.run(2, ahead, configuration(3, zero=zero))[0]

    assert asked(0) == [False] * 3
    assert asked(LAYER) == [True] * 3


@alive("zero_optimization.stage3_max_live_parameters")
def test_max_live_parameters(ranks: Ranks) -> None:
    """All may be kept and prefetched, but for this limit."""
    for limit, most in ((LAYER, 1), (2 * LAYER, 2), (3 * LAYER + 1, 3), (10**9, 4)):
        (seen, _) = see(ranks, 3, stage3_max_live_parameters=limit)
        assert max(seen.in_forward[4 * LAST :]) == most * LAYER


@alive("zero_optimization.stage3_max_reuse_distance")
def test_max_reuse_distance(ranks: Ranks) -> None:
    """The second layer is used again after the two others have been twice, the third after the last one was, and the
    first is not."""
    for distance, kept in ((0, 1), (2 * LAYER, 2), (4 * LAYER, 3), (6 * LAYER, 3)):
        (seen, _) = see(ranks, 3, stage3_max_reuse_distance=distance, stage3_prefetch_bucket_size=0)
        assert len(fetches(seen)) == 4 + 3 - kept


@alive("zero_optimization.zero_hpz_partition_size")
def test_hpz_partition_size(ranks: Ranks) -> None:
    """Backward's fetches stay within pairs of ranks; those of forward, of new weights, go to all."""
    reuse = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    (seen, *_) = see(ranks, 3, 4, **reuse)
    assert [span.lane for span in seen.comms("parameter")] == ["comm.parameters"] * 6
    pairs = see(ranks, 3, 4, zero_hpz_partition_size=2, **reuse)
    for seen in pairs:
        assert [span.lane for span in seen.comms("parameter")] == ["comm.parameters"] * 4 + ["comm.near"] * 2
    groups = [seen.comms("parameter")[-1].group for seen in pairs]
    assert groups[0] != pairs[0].comms("parameter")[0].group
