"""What a rank holds of a model that is trained, by its configuration: for `dsprof doctor`, and for what-ifs.

The sums are those of ZeRO's paper (Rajbhandari et al. 2020, arXiv 1910.02054, section 3): of E elements in half
precision, 2 E bytes of parameters, 2 E of gradients, and 4 E of masters with 8 E of Adam's moments, each divided among
the ranks from the stage on that shards it. Beside these there are the buffers that communications pass through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from . import batch
from .config import Config
from .zero import OffloadConfig

ELEMENT_BYTES: Final = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Data type of a configuration -> bytes of a number."""
MASTER: Final = 4
MOMENTS: Final = {"sgd": 0, "lion": 1, "muon": 1, "adagrad": 1}
"""Optimizer, in lower case -> how many numbers it keeps for each element; of others two, as Adam has."""


@dataclass(frozen=True)
class Held:
    """Bytes on each rank's device, or on the host where there is none.

    optimizer_states: masters, which are a wider copy of the parameters, and moments
    buckets:          what gradients are reduced from
    gathered:         what parameters are gathered into after a step, and in stage 3 ahead of their use, several at once
    whole:            parameters of stage 3 that modules have used, or are about to, and that stay whole meanwhile
    scratch:          what arrives from other ranks, before it is added up
    sums:             gradients of micro-batches, before the last one's, where those are not reduced
    update:           while the optimizer steps, and not while backward runs
    """

    parameters: float
    gradients: float
    optimizer_states: float
    buckets: float
    gathered: float
    whole: float = 0.0
    scratch: float = 0.0
    sums: float = 0.0
    update: float = 0.0

    @property
    def total(self) -> float:
        """While backward runs."""
        return float(sum(vars(self).values())) - self.update

    @property
    def lasting(self) -> float:
        """From step to step."""
        return self.total - self.whole - self.sums


def held(
    config: Config,
    elements: float,
    share: float,
    ranks: int,
    *,
    deepspeed: bool = True,
    largest: float = 0.0,
    frozen: float = 0.0,
    on_host: bool = False,
    sizes: Sequence[int] = (),
) -> Held:
    """What a data-parallel rank holds of a model that trains so many elements. share: its part of what is sharded, of
    equal ranks 1 / `ranks`, their number; deepspeed: DeepSpeed trains it, and not dsprof's engine; largest: elements of
    the largest parameter, 0 where that is not known; frozen: elements that are not trained; on_host: ranks communicate
    in host memory (gloo); sizes: elements of each parameter that is trained, in the model's order, where that is known:
    buckets are then as the engine divides them."""
    zero, item = config.zero_optimization, ELEMENT_BYTES[config.trained_type]
    of_gradients, of_states = (elements * (share if zero.stage >= least else 1) for least in (2, 1))
    states = of_states * ((MASTER if item < MASTER else 0) + MASTER * _moments(config))
    of_a_gradient = item
    if not deepspeed:  # from stage 1 on of one rank's part, and what is reduced as wide as sums are
        of_gradients, of_a_gradient = of_states, _sum_bytes(config) if zero.stage and ranks > 1 else MASTER
    if _is_away(zero.offload_optimizer):
        assert zero.offload_optimizer is not None
        states *= 1 - zero.offload_optimizer.ratio
        of_gradients = 0.0 if zero.stage >= 1 else of_gradients
    every, away = elements + frozen, _is_away(zero.offload_param)
    kept_whole, others = _persistent(config, sizes)
    stays = sum(kept_whole)  # of frozen parameters no sizes are known: they are taken to be sharded
    sharded = every - stays
    largest_sharded = max(others, default=0) if sizes and not frozen else largest
    common = Held(
        parameters=(stays + (0.0 if away else sharded * (share if zero.stage >= 3 else 1))) * item,
        gradients=of_gradients * of_a_gradient,
        optimizer_states=states,
        buckets=0.0,
        gathered=0.0,
    )
    if deepspeed:
        gathered = min(_ahead(config), sharded) * item
        # Of each parameter, whole or not, it keeps this rank's part by itself.
        own = 0.0 if away else stays * share * item
        return replace(
            common, parameters=common.parameters + own, buckets=_deepspeed_buckets(config), gathered=gathered
        )
    if ranks > 1:
        common = replace(
            common,
            buckets=_buckets(config, elements, largest, sizes),
            scratch=_scratch(config, _bucket(config, elements, largest, sizes), share, ranks, on_host=on_host),
            sums=_sums(config, elements, ranks),
        )
    if ranks == 1 and not away:
        return common  # its parameters are whole
    ahead = min(_ahead(config), sharded)
    # Parameters that are gathered one by one need no buffer.
    fetched = ahead if ahead >= largest_sharded else 0.0
    kept, passing = _published(config, elements, largest, kept_whole if zero.stage == 3 else sizes)
    kept, passing = kept + fetched, passing + fetched
    widened = of_states * MASTER if zero.stage and item < MASTER and _sum_bytes(config) < MASTER else 0.0
    whole = _whole(config, sharded, largest_sharded) * item
    return replace(common, gathered=kept * item, whole=whole, update=(passing - kept) * item + widened)


def _moments(config: Config) -> int:
    if config.optimizer is None:
        return 2
    kind = config.optimizer.type.lower()
    if kind == "sgd":
        return int(bool(config.optimizer.params.arguments().get("momentum")))
    return MOMENTS.get(kind, 2)


def _is_away(offloaded: OffloadConfig | None) -> bool:
    return offloaded is not None and offloaded.device != "none"


def _deepspeed_buckets(config: Config) -> float:
    """One of the whole size, and a second one to fill while the first is reduced."""
    zero, item = config.zero_optimization, ELEMENT_BYTES[config.communication_type]
    if zero.stage < 1 or not zero.contiguous_gradients:
        return 0.0
    return float(zero.reduce_bucket_size) * item * (2 if zero.overlap_comm and zero.stage < 3 else 1)


def _buckets(config: Config, elements: float, largest: float, sizes: Sequence[int]) -> float:
    """dsprof's engine takes no more than all gradients, and has two on their way while it fills a third."""
    zero, item = config.zero_optimization, ELEMENT_BYTES[config.communication_type]
    if zero.stage == 0 and item == MASTER:
        return 0.0  # gradients stay where they were reduced
    at_once = 3 if zero.overlap_comm else 1
    if sizes:
        return _largest(_divided(config, sizes), at_once) * item
    return min(_bucket(config, elements, largest, sizes) * at_once, elements) * item


def _divided(config: Config, sizes: Sequence[int]) -> list[int]:
    """Elements of the buckets of dsprof's engine: gradients come from the last parameter to the first."""
    found, filled = list[int](), 0
    for size in reversed(sizes):
        filled += size
        if filled >= config.zero_optimization.reduce_bucket_size:
            found.append(filled)
            filled = 0
    return [*found, filled] if filled else found


def _largest(sizes: Sequence[int], count: int) -> int:
    """Elements of so many buffers, each of which has come to be as large as what it was once needed for."""
    return sum(sorted(sizes)[-count:])


def _bucket(config: Config, elements: float, largest: float, sizes: Sequence[int]) -> float:
    """Elements of the largest one of dsprof's engine, which the parameter closes that reaches the size. Where the
    parameters are not known, half of the largest is beyond it."""
    if sizes:
        return float(max(_divided(config, sizes)))
    size = float(config.zero_optimization.reduce_bucket_size)
    return min(size + largest / 2 if size >= largest else largest, elements)


def _persistent(config: Config, sizes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Elements of each parameter that stage 3 does not shard, as it is small and the model's limit is not reached; and
    of the others."""
    zero, whole, others, total = config.zero_optimization, list[int](), list[int](), 0
    for size in sizes if zero.stage >= 3 else ():
        small = size <= zero.stage3_param_persistence_threshold
        total += size if small else 0
        (whole if small and total <= zero.stage3_model_persistence_threshold else others).append(size)
    return whole, others


def _whole(config: Config, elements: float, largest: float) -> float:
    """When backward begins, there are the last modules of forward, whose forward and backward are no farther apart than
    the reuse distance, what is gathered ahead, and what computes. A reuse begins and ends a module: half each way."""
    zero = config.zero_optimization
    if zero.stage < 3:
        return 0.0
    live = float(zero.stage3_max_live_parameters)
    return max(min(zero.stage3_max_reuse_distance / 2 + _ahead(config) + largest, live, elements), largest)


def _accumulates(config: Config, ranks: int) -> bool:
    """Whether a step has several micro-batches."""
    replicas = max(1, ranks // config.sequence_parallel_size)
    sizes = config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps
    try:
        return batch.solve(*sizes, replicas, unequal=config.heterogeneous.speeds is not None).accumulation > 1
    except batch.BatchError:
        return (config.gradient_accumulation_steps or 1) > 1


def _sum_bytes(config: Config) -> int:
    """Of a number in which micro-batches are added up."""
    return ELEMENT_BYTES[config.accumulation_type]


def _sums(config: Config, elements: float, ranks: int) -> float:
    """dsprof's engine adds the micro-batches of a step up before they are reduced, up to stage 1."""
    if config.zero_optimization.stage > 1 or not _accumulates(config, ranks):
        return 0.0
    return elements * _sum_bytes(config)


def _scratch(config: Config, bucket: float, share: float, ranks: int, *, on_host: bool) -> float:
    """dsprof's engine adds up in host memory what all ranks have sent of this one's part; a device's backend does that
    itself, and where the sum has another type, or is added to what there is, brings it in the gradients' own type."""
    zero, item = config.zero_optimization, ELEMENT_BYTES[config.communication_type]
    adds = item != _sum_bytes(config) or (zero.stage >= 2 and _accumulates(config, ranks))
    times = ranks if on_host else int(adds)
    return bucket * share * item * times if zero.stage else 0.0


def _ahead(config: Config) -> float:
    """Elements that are gathered ahead of their use."""
    zero = config.zero_optimization
    return float(min(zero.stage3_prefetch_bucket_size, zero.stage3_max_live_parameters)) if zero.stage == 3 else 0.0


def _published(config: Config, elements: float, largest: float, sizes: Sequence[int]) -> tuple[float, float]:
    """Elements of the buffers into which dsprof's engine gathers after a step, as many whole parameters in each as they
    hold: those that it keeps, and those that there are meanwhile, one more of two that are on their way. DeepSpeed
    gathers in place."""
    zero = config.zero_optimization
    if zero.stage == 0 or (zero.stage == 3 and not sizes):
        return 0.0, 0.0
    kept, passing = (2, 3) if zero.overlap_comm else (1, 1)
    if sizes:
        batches, filled = list[int](), 0
        for one in sizes:
            if filled and filled + one > zero.allgather_bucket_size:
                batches.append(filled)
                filled = 0
            filled += one
        batches.append(filled)
        return float(_largest(batches, kept)), float(_largest(batches, passing))
    size = float(zero.allgather_bucket_size)
    each = max(size - largest / 2 if size < elements else size, largest)
    return min(each * kept, elements), min(each * passing, elements)
