"""What a rank holds of a model that is trained, by its configuration: for `dsprof doctor`, and for what-ifs.

The sums are those of ZeRO's paper (Rajbhandari et al. 2020, arXiv 1910.02054, section 3): of E elements in half
precision, 2 E bytes of parameters, 2 E of gradients, and 4 E of masters with 8 E of Adam's moments, each divided among
the ranks from the stage on that shards it. Beside these there are the buffers that communications pass through.
"""

from __future__ import annotations

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
    gathered:         what parameters are gathered into, beyond what the module that computes needs itself
    whole:            parameters of stage 3 that modules have used, or are about to, and that stay whole meanwhile
    scratch:          what arrives from other ranks, before it is added up
    sums:             gradients of micro-batches, before the last one's, where those are not reduced
    """

    parameters: float
    gradients: float
    optimizer_states: float
    buckets: float
    gathered: float
    whole: float = 0.0
    scratch: float = 0.0
    sums: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))


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
) -> Held:
    """What a data-parallel rank holds of a model that trains so many elements. share: its part of what is sharded, of
    equal ranks 1 / `ranks`, their number; deepspeed: DeepSpeed trains it, and not dsprof's engine; largest: elements of
    the largest parameter, 0 where that is not known; frozen: elements that are not trained; on_host: ranks communicate
    in host memory (gloo)."""
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
    common = Held(
        parameters=0.0 if away else every * (share if zero.stage >= 3 else 1) * item,
        gradients=of_gradients * of_a_gradient,
        optimizer_states=states,
        buckets=0.0,
        gathered=0.0,
    )
    if deepspeed:
        gathered = min(_ahead(config), every) * item
        return replace(common, buckets=_deepspeed_buckets(config), gathered=gathered)
    if ranks > 1:
        common = replace(
            common,
            buckets=_buckets(config, elements, largest),
            scratch=_scratch(config, elements, largest, share, ranks, on_host=on_host),
            sums=_sums(config, elements, ranks),
        )
    if ranks == 1 and not away:
        return common  # its parameters are whole
    gathered = min(_ahead(config), every) if zero.stage == 3 else _published(config, elements, largest)
    return replace(common, gathered=gathered * item, whole=_whole(config, every, largest) * item)


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


def _buckets(config: Config, elements: float, largest: float) -> float:
    """dsprof's engine takes no more than all gradients, and has two on their way while it fills a third."""
    zero, item = config.zero_optimization, ELEMENT_BYTES[config.communication_type]
    if zero.stage == 0 and item == MASTER:
        return 0.0  # gradients stay where they were reduced
    return min(_bucket(config, elements, largest) * (3 if zero.overlap_comm else 1), elements) * item


def _bucket(config: Config, elements: float, largest: float) -> float:
    """Elements of one of dsprof's engine, which the parameter closes that reaches the size: half of it is beyond."""
    size = float(config.zero_optimization.reduce_bucket_size)
    return min(size + largest / 2 if size >= largest else largest, elements)


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


def _scratch(config: Config, elements: float, largest: float, share: float, ranks: int, *, on_host: bool) -> float:
    """dsprof's engine adds up in host memory what all ranks have sent of this one's part; a device's backend does that
    itself, and where the sum has another type, or is added to what there is, brings it in the gradients' own type."""
    zero, item = config.zero_optimization, ELEMENT_BYTES[config.communication_type]
    adds = item != _sum_bytes(config) or (zero.stage >= 2 and _accumulates(config, ranks))
    times = ranks if on_host else int(adds)
    return _bucket(config, elements, largest) * share * item * times if zero.stage else 0.0


def _ahead(config: Config) -> float:
    """Elements that are gathered ahead of their use."""
    zero = config.zero_optimization
    return float(min(zero.stage3_prefetch_bucket_size, zero.stage3_max_live_parameters)) if zero.stage == 3 else 0.0


def _published(config: Config, elements: float, largest: float) -> float:
    """Elements of the buffers into which dsprof's engine gathers after a step, as many whole parameters in each as they
    hold. DeepSpeed gathers in place."""
    zero = config.zero_optimization
    if zero.stage == 0:
        return 0.0
    size = float(zero.allgather_bucket_size)
    each = max(size - largest / 2 if size < elements else size, largest)
    return min(each * (2 if zero.overlap_comm else 1), elements)
