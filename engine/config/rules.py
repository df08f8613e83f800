"""What keys and values, each fine by itself, cannot be together, and what has no effect beside what else is given.

What one sentence says is a line of `cases.CASES`. Any other rule is a function of the configuration and the number of
ranks that yields remarks; add it to RULES.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from dsprof.words import either, joined

from .cases import FETCHED, STAGE_1, STAGE_3, TAKES, Remark, cases, without_effect
from .config import Config, data_parallel_ranks
from .model import Section
from .parallel import replica_memory, replica_speeds

Rule = Callable[[Config, int], Iterator[Remark]]


def divisors(number: int) -> str:
    """The whole numbers that divide `number`, as words."""
    return either(candidate for candidate in range(1, number + 1) if number % candidate == 0)


# --- precision ----------------------------------------------------------------------------------


def switched_off(config: Config, world_size: int) -> Iterator[Remark]:
    for name in type(config).model_fields:
        section = getattr(config, name)
        if not isinstance(section, Section) or getattr(section, "enabled", True):
            continue
        if section.model_fields_set and "enabled" not in section.model_fields_set:
            yield Remark(name, 'has no effect; it takes "enabled": true', error=False)


def accumulation_type(config: Config, world_size: int) -> Iterator[Remark]:
    trained = config.trained_type
    chosen = config.data_types.grad_accum_dtype
    if chosen not in (None, "fp32", trained):
        choices = '"fp32"' if trained == "fp32" else f'"fp32" or "{trained}"'
        yield Remark(
            "data_types.grad_accum_dtype",
            f'"{chosen}" does not hold what the gradients do, which are {trained}; write {choices}',
        )


# --- ZeRO ---------------------------------------------------------------------------------------


def secondary_partition(config: Config, world_size: int) -> Iterator[Remark]:
    size, ranks = config.zero_optimization.zero_hpz_partition_size, data_parallel_ranks(config, world_size)
    if ranks % size:
        yield Remark(
            "zero_optimization.zero_hpz_partition_size",
            f"{size} does not divide the {ranks} data-parallel ranks; write {divisors(ranks)}",
        )


SENT: Final = (
    "allgather_bucket_size", "allgather_partitions", "contiguous_gradients", "reduce_bucket_size", "reduce_scatter",
    "round_robin_gradients", "zero_quantized_gradients", "zero_quantized_weights",
)  # fmt: skip


def nobody_to_send_to(config: Config, world_size: int) -> Iterator[Remark]:
    if data_parallel_ranks(config, world_size) > 1:
        return
    zero, nothing = config.zero_optimization, ""
    keys = [key for key in SENT if (zero.stage >= 1 or key not in STAGE_1) and (zero.stage == 3 or key not in STAGE_3)]
    if zero.stage == 3 and (zero.offload_param is None or zero.offload_param.device == "none"):
        keys += FETCHED
    if zero.overlap_comm and zero.stage < 3:  # as it is not by default
        keys.append("overlap_comm")
    top = ("communication_data_type", "gradient_predivide_factor", "prescale_gradients", "sparse_gradients")
    given = [*without_effect(zero, "zero_optimization", keys, nothing), *without_effect(config, "", top, nothing)]
    if given:
        names, verb = ", ".join(remark.where for remark in given), "has" if len(given) == 1 else "have"
        yield Remark(names, f"{verb} no effect; there is one data-parallel rank, with nobody to send to", error=False)


def length_of_warm_up(config: Config, world_size: int) -> Iterator[Remark]:
    params = config.scheduler.params.arguments() if config.scheduler is not None else {}
    total, warm = params.get("total_num_steps"), params.get("warmup_num_steps")
    if total is not None and warm is not None and total < warm:
        yield Remark(
            "scheduler.params.total_num_steps",
            f"{total} is less than warmup_num_steps, {warm}: the training ends before the warm-up does",
            error=False,
        )


# --- offloading ---------------------------------------------------------------------------------

OF_DEVICE: Final[Mapping[str, Sequence[str]]] = {
    "cpu": ("ratio",),
    "nvme": ("nvme_path", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write", "fast_init"),
}
"""Device -> the keys that are for it alone."""


def offloading(config: Config, world_size: int) -> Iterator[Remark]:
    zero = config.zero_optimization
    for name, section, stage in (
        ("offload_param", zero.offload_param, 3),
        ("offload_optimizer", zero.offload_optimizer, 1),
    ):
        where = joined("zero_optimization", name)
        if section is None or section.device == "none":
            continue
        if zero.stage < stage:
            yield Remark(where, f"has no effect; {TAKES[stage].format(c=config)}", error=False)
            continue
        if section.device == "nvme" and section.nvme_path is None:
            yield Remark(
                joined(where, "nvme_path"), 'missing, and "device" is "nvme"; write a folder on the local disk'
            )
        other = "nvme" if section.device == "cpu" else "cpu"
        why = f'it is for "device": "{other}", and the device is "{section.device}"'
        yield from without_effect(section, where, OF_DEVICE[other], why)


# --- tensor and pipeline parallelism ------------------------------------------------------------


def model_parallel_sizes(config: Config, world_size: int) -> Iterator[Remark]:
    tensor, stages = config.tensor_parallel.size, config.pipeline.stages
    for where, size in (("tensor_parallel.autotp_size", tensor), ("pipeline.stages", stages)):
        if world_size % size:
            yield Remark(where, f"{size} does not divide the {world_size} ranks; write {divisors(world_size)}")
    if world_size % tensor == 0 and world_size % stages == 0 and world_size % (tensor * stages):
        yield Remark(
            "pipeline.stages",
            f"{stages} stages of {tensor} ranks each do not divide the {world_size} ranks; "
            f"write {divisors(world_size // tensor)}",
        )


# --- ranks that share sequences -------------------------------------------------------------------


def ranks_of_a_sequence(config: Config, world_size: int) -> Iterator[Remark]:
    size, where, section = config.sequence_parallel_size, "sequence_parallel_size", config.context_parallel
    if size == 1:
        yield from without_effect(
            section, "context_parallel", type(section).model_fields, f'it takes "{where}" above 1'
        )
        return
    beside = {
        "tensor_parallel.autotp_size": config.tensor_parallel.size > 1, "pipeline.stages": config.pipeline.stages > 1,
        "heterogeneous.speeds": config.heterogeneous.speeds is not None,
    }  # fmt: skip
    for key in (key for key, given in beside.items() if given):
        yield Remark(where, f"{size}, which does not go together with {key}; remove one of them")
    ranks = data_parallel_ranks(config, world_size)
    if ranks % size and not any(beside.values()):
        yield Remark(where, f"{size} does not divide the {ranks} data-parallel ranks; write {divisors(ranks)}")
    if section.attention == "ulysses":
        why = 'it is for "attention": "ring"; with "ulysses" every rank has all positions of its heads'
        yield from without_effect(section, "context_parallel", ("order",), why)


# --- ranks of unequal speed -----------------------------------------------------------------------


def unequal_ranks(config: Config, world_size: int) -> Iterator[Remark]:
    stages, tensor = config.pipeline.stages, config.tensor_parallel.size
    replicas = data_parallel_ranks(config, world_size)
    for key, unit, of_replicas, nothing, alone in (
        ("speeds", "speed", replica_speeds, "none gets a sample", stages * replicas == 1),
        ("memory", "number", replica_memory, "none holds any state", replicas == 1),
    ):
        given, where = getattr(config.heterogeneous, key), f"heterogeneous.{key}"
        if isinstance(given, tuple) and len(given) != world_size:
            has = f"{len(given)} {unit if len(given) == 1 else f'{unit}s'}"
            ranks = f"{world_size} {'rank' if world_size == 1 else 'ranks'}"
            yield Remark(where, f'{has}, and the job has {ranks}; write one for each rank, or "measure"')
        elif (
            isinstance(given, tuple)
            and world_size % (stages * tensor) == 0
            and not any(of_replicas(given, stages, tensor))
        ):
            yield Remark(where, f"null in every data-parallel replica: {nothing}; write numbers for one at least")
        if given is not None and alone:
            stage = ", and one stage" if key == "speeds" else ""
            yield Remark(where, f"has no effect; there is one data-parallel rank{stage}", error=False)


_MANY_SAMPLES: Final = 1e6
"""Nobody has so many in a micro-batch."""


def share_of_a_sample(config: Config) -> Iterator[Remark]:
    """Of a configuration whose batch sizes are solved."""
    speeds = config.heterogeneous.speeds
    if not isinstance(speeds, tuple):
        return
    paces = replica_speeds(speeds, config.pipeline.stages, config.tensor_parallel.size)
    found = config.shares(len(speeds))
    for replica in (at for at, pace in enumerate(paces) if pace and not found[at]):
        least = sum(paces) / min(filter(None, paces))
        larger = ""
        if least < _MANY_SAMPLES:
            larger = f"batch sizes with {math.ceil(least)} samples or more in a micro-batch of all replicas, or "
        part = sum(found) * paces[replica] / sum(paces)
        yield Remark(
            "heterogeneous.speeds",
            f"data-parallel replica {replica} would get {part:.2g} of the {sum(found)} samples of a micro-batch, less "
            f"than one; write {larger}null for its ranks, which then get none",
        )
        return


RULES: Final[tuple[Rule, ...]] = (
    cases, switched_off, accumulation_type, secondary_partition, nobody_to_send_to, length_of_warm_up, offloading,
    model_parallel_sizes, ranks_of_a_sequence, unequal_ranks,
)  # fmt: skip
