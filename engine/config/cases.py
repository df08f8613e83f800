"""What one sentence says of a configuration: a line of CASES for each thing that is wrong, or has no effect, whatever
the number of ranks. What takes more than a sentence is a function in `rules`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from dsprof.words import joined

from .config import Config
from .model import Section
from .zero import AioConfig


@dataclass(frozen=True)
class Remark:
    """What a rule has found."""

    where: str
    """The key it is about."""
    says: str
    error: bool = True
    """False: the training goes on as if the key were not there."""

    def __str__(self) -> str:
        return f"{self.where}: {self.says}"


def without_effect(section: Section, where: str, keys: Iterable[str], why: str) -> Iterator[Remark]:
    """A warning for each of `keys` that was given with a value other than its default."""
    for key in keys:
        if key in section.model_fields_set and getattr(section, key) != type(section).model_fields[key].default:
            yield Remark(joined(where, key), f"has no effect; {why}", error=False)


@dataclass(frozen=True)
class Case:
    """What is wrong `when` a configuration is so, whatever the number of ranks."""

    where: str
    """The key it is about, or the section of the keys that are `idle`."""
    says: str
    """With `{c}` for the configuration."""
    when: Callable[[Config], bool]
    idle: Iterable[str] = ()
    """Keys that have no effect then; none: it is an error."""


STAGE_1: Final = (
    "allgather_bucket_size", "allgather_partitions", "reduce_scatter", "round_robin_gradients", "sub_group_size",
    "zero_quantized_gradients",
)  # fmt: skip
FETCHED: Final = (
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_model_persistence_threshold",
    "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size",
)  # fmt: skip
STAGE_3: Final = (
    "stage3_gather_16bit_weights_on_model_save", *FETCHED, "zero_hpz_partition_size",
    "zero_quantized_weights",
)  # fmt: skip
TAKES: Final = {
    stage: f'the stage is {{c.zero_optimization.stage}}, and it takes "stage": {stage}{above}'
    for stage, above in ((1, " or more"), (3, ""))
}
"""Why what is of a higher stage has no effect."""


def optimizer_is(config: Config, *types: str) -> bool:
    """Whether the optimizer is of one of these types."""
    return config.optimizer is not None and config.optimizer.type in types


def quantizes(config: Config) -> bool:
    """Whether gradients travel in int4."""
    return config.zero_optimization.stage >= 1 and config.zero_optimization.zero_quantized_gradients


def _has_no_nesterov(config: Config) -> bool:
    params = config.optimizer.params.arguments() if config.optimizer is not None else {}
    return bool(params.get("nesterov")) and (params["momentum"] == 0 or params["dampening"] != 0)


def _has_no_files(config: Config) -> bool:
    zero = config.zero_optimization
    return not any(part is not None and part.device == "nvme" for part in (zero.offload_param, zero.offload_optimizer))


CASES: Final = (
    Case(
        "bf16.enabled", 'true, and fp16.enabled is true too; write "enabled": false in one of them',
        lambda c: c.fp16.enabled and c.bf16.enabled,
    ),
    Case(
        "fp16", 'the scale is fixed; for a dynamic one write "loss_scale": 0',
        lambda c: c.fp16.enabled and c.fp16.loss_scale > 0,
        ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale"),
    ),
    Case(
        "fp16.min_loss_scale",
        "{c.fp16.min_loss_scale:g} is above the first scale, 2^{c.fp16.initial_scale_power}; write a larger "
        '"initial_scale_power"',
        lambda c: c.fp16.enabled and c.fp16.loss_scale == 0 and 2.0**c.fp16.initial_scale_power < c.fp16.min_loss_scale,
    ),
    Case(
        "", 'all of the division is done beforehand with "prescale_gradients": true',
        lambda c: c.prescale_gradients, ("gradient_predivide_factor",),
    ),
    Case("zero_optimization", TAKES[1], lambda c: c.zero_optimization.stage < 1, STAGE_1),
    Case("zero_optimization", TAKES[3], lambda c: c.zero_optimization.stage < 3, STAGE_3),
    Case("heterogeneous", TAKES[1], lambda c: c.zero_optimization.stage < 1, ("memory",)),
    Case(
        "heterogeneous.memory",
        'given, and "zero_hpz_partition_size": {c.zero_optimization.zero_hpz_partition_size} has ranks hold equal '
        "shards of a second partition; remove one of them",
        lambda c: c.heterogeneous.memory is not None
        and c.zero_optimization.stage == 3 and c.zero_optimization.zero_hpz_partition_size > 1,
    ),
    Case(
        "heterogeneous.memory",
        'given, and "zero_quantized_gradients" sends equal parts of gradients to all ranks; remove one of them',
        lambda c: c.heterogeneous.memory is not None and quantizes(c),
    ),
    Case(
        "zero_optimization.zero_quantized_gradients",
        'true, and "reduce_scatter" is false, which reduces whole gradients; write "reduce_scatter": true, or '
        'remove "zero_quantized_gradients"',
        lambda c: quantizes(c) and not c.zero_optimization.reduce_scatter,
    ),
    Case(
        "zero_optimization.zero_quantized_gradients",
        'true, and the optimizer "Muon" makes the smallest parts of a gradient as large as the others, errors of four '
        'bits among them; write "AdamW", or remove "zero_quantized_gradients"',
        lambda c: quantizes(c) and optimizer_is(c, "Muon"),
    ),
    Case(
        "sparse_gradients",
        'true, and "zero_optimization" has "stage": {c.zero_optimization.stage}, which shards gradients into pieces; '
        'write "stage": 0 or 1, or remove "sparse_gradients"',
        lambda c: c.sparse_gradients and c.zero_optimization.stage >= 2,
    ),
    Case(
        "optimizer.type",
        "OneBitAdam compresses whole gradients on every rank, which ZeRO shards; write "
        '"zero_optimization": {{"stage": 0}}, or "AdamW"',
        lambda c: optimizer_is(c, "OneBitAdam") and c.zero_optimization.stage >= 1,
    ),
    Case(
        "optimizer.type",
        '"OneBitAdam" compresses what each rank has as if all had equally many samples, and "heterogeneous" has '
        '"speeds"; write "AdamW", or remove "heterogeneous"',
        lambda c: optimizer_is(c, "OneBitAdam") and c.heterogeneous.speeds is not None,
    ),
    Case(
        "optimizer.params.nesterov",
        'true, and it takes a "momentum" above 0 and no "dampening"; write "momentum": 0.9', _has_no_nesterov,
    ),
    Case("aio", 'nothing is offloaded to "nvme"', _has_no_files, AioConfig.model_fields),
    Case(
        "pipeline.virtual_stages",
        '{c.pipeline.virtual_stages}, and "{c.pipeline.schedule}" knows one stage a rank; write 1, or '
        '"schedule": "interleaved"',
        lambda c: c.pipeline.virtual_stages > 1 and c.pipeline.schedule != "interleaved",
    ),
    Case(
        "pipeline", 'it takes "partition_method": "measured"', lambda c: c.pipeline.partition_method != "measured",
        ("layer_costs",),
    ),
    Case(
        "tensor_parallel", 'it takes "autotp_size" above 1', lambda c: c.tensor_parallel.size == 1,
        ("sequence_parallel", "plan"),
    ),
    Case(
        "optimizer.type",
        '"{c.optimizer.type}" looks at whole matrices, and "autotp_size": {c.tensor_parallel.size} shards them; write '
        '"AdamW", "Adam", "SGD" or "Lion"',
        lambda c: c.tensor_parallel.size > 1 and optimizer_is(c, "Lamb", "Muon"),
    ),
    Case(
        "activation_checkpointing", 'it takes "policy": "every_k"',
        lambda c: c.activation_checkpointing.policy != "every_k", ("every",),
    ),
    Case(
        "activation_checkpointing", 'it takes a "policy" but "none"',
        lambda c: c.activation_checkpointing.policy == "none", ("blocks",),
    ),
    Case(
        "comms_logger", 'to choose, write "prof_all": false too',
        lambda c: c.comms_logger.enabled and c.comms_logger.prof_all, ("prof_ops",),
    ),
)  # fmt: skip


def cases(config: Config, world_size: int) -> Iterator[Remark]:
    for case in (case for case in CASES if case.when(config)):
        says = case.says.format(c=config)
        if case.idle:
            yield from without_effect(config[case.where] if case.where else config, case.where, case.idle, says)
        else:
            yield Remark(case.where, says)
