"""What an engine answers of its configuration, by DeepSpeed's names. Sizes are numbers of elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from ..config import Config
from ..optim.loss_scaler import DTYPES
from ..training_state import Training

Answer = Callable[[Training], Any]


def documented(doc: str, function: Answer) -> Answer:
    """`function` with what `help` is to say of it."""
    function.__doc__ = doc
    return function


def _asks(doc: str, function: Callable[[Config], Any]) -> Answer:
    """What `function` returns of the configuration as it is when that is asked for."""
    return documented(doc, lambda training: function(training.config))


def _key(path: str) -> Answer:
    """What the configuration has under a key; None in a section that is not there."""

    def find(config: Config) -> Any:
        found: Any = config
        for name in path.split("."):
            found = None if found is None else getattr(found, name)
        return found

    return _asks(f"`{path}` of the configuration.", find)


def _sharded(what: str, stage: int) -> Answer:
    return _asks(f"Whether {what} sharded.", lambda c: c.zero_optimization.stage >= stage)


def _data_types(training: Training) -> tuple[torch.dtype, torch.dtype]:
    """What the model runs in, and what gradients are added up in."""
    return DTYPES[training.config.trained_type], DTYPES[training.config.accumulation_type]


def communication_dtype(training: Training) -> torch.dtype:
    """What gradients travel in."""
    return DTYPES[training.config.communication_type]


def _offloads_states_to(device: str) -> Answer:
    find = _key("zero_optimization.offload_optimizer.device")
    return documented(
        f"Whether the optimizer's states are offloaded to {device}.", lambda training: find(training) == device
    )


SETTINGS: Final[Mapping[str, Answer]] = {
    "get_batch_info": _asks(
        "Samples of a step over all ranks, samples of a micro-batch on one rank, and micro-batches a step.",
        lambda c: (c.train_batch_size, c.train_micro_batch_size_per_gpu, c.gradient_accumulation_steps),
    ),
    **{name: _key(name) for name in (
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "dataloader_drop_last",
        "gradient_clipping", "gradient_predivide_factor", "zero_allow_untested_optimizer", "steps_per_print",
        "dump_state", "wall_clock_breakdown", "memory_breakdown",
    )},
    "flops_profiler_enabled": _key("flops_profiler.enabled"),
    "autotp_size": _key("tensor_parallel.size"),
    "checkpoint_tag_validation_enabled": _asks(
        "Whether ranks that save under different tags are warned, or refused.",
        lambda c: c.checkpoint.tag_validation != "Ignore",
    ),
    "checkpoint_tag_validation_fail": _asks(
        "Whether they are refused.", lambda c: c.checkpoint.tag_validation == "Fail"
    ),
    # optimizer and schedule, as configured
    "optimizer_params": _asks(
        "`optimizer.params` of the configuration.", lambda c: c.optimizer and c.optimizer.params.arguments()
    ),
    "scheduler_name": _key("scheduler.type"),
    "scheduler_params": _asks(
        "`scheduler.params` of the configuration.", lambda c: c.scheduler and c.scheduler.params.arguments()
    ),
    # precision
    "fp16_enabled": _key("fp16.enabled"),
    "bfloat16_enabled": _key("bf16.enabled"),
    "fp16_auto_cast": _asks(
        "Whether inputs are cast; None without fp16.", lambda c: c.fp16.auto_cast if c.fp16.enabled else None
    ),
    "dynamic_loss_scale": _asks(
        "Whether the loss scale is dynamic.", lambda c: c.fp16.enabled and c.fp16.loss_scale == 0
    ),
    "initial_dynamic_scale": _asks(
        "The loss scale that fp16 begins with; else 1.",
        lambda c: 2.0**c.fp16.initial_scale_power if c.fp16.enabled else 1.0,
    ),
    "get_data_types": _data_types,
    "postscale_gradients": _asks("Whether gradients are averaged after their sum.", lambda c: not c.prescale_gradients),
    # ZeRO: what is sharded, in which buckets, how long parameters stay whole, and where it is
    "zero_optimization": _sharded("the optimizer's state is", 1),
    "zero_optimization_stage": _key("zero_optimization.stage"),
    "zero_optimization_partition_gradients": _sharded("gradients are", 2),
    "zero_optimization_partition_weights": _sharded("parameters are", 3),
    "zero_gather_16bit_weights_on_model_save": _key("zero_optimization.stage3_gather_16bit_weights_on_model_save"),
    **{name: _key(f"zero_optimization.{name}") for name in (
        "zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients",
    )},
    **{f"zero_{key}": _key(f"zero_optimization.{key}") for key in (
        "reduce_scatter", "overlap_comm", "contiguous_gradients", "reduce_bucket_size", "allgather_bucket_size",
        "allgather_partitions", "round_robin_gradients", "ignore_unused_parameters", "sub_group_size",
        "offload_optimizer", "offload_param",
    )},
    **{f"zero_{key}": _key(f"zero_optimization.stage3_{key}") for key in (
        "max_live_parameters", "max_reuse_distance", "prefetch_bucket_size", "param_persistence_threshold",
        "model_persistence_threshold",
    )},
    "zero_cpu_offload": _offloads_states_to("cpu"),
    "zero_use_cpu_optimizer": _offloads_states_to("cpu"),
    "zero_nvme_offload_optimizer": _offloads_states_to("nvme"),
    "zero_partial_offload": _asks(
        "The share of the optimizer's states that is offloaded; 1 without `offload_optimizer`.",
        lambda c: 1.0 if c.zero_optimization.offload_optimizer is None else c.zero_optimization.offload_optimizer.ratio,
    ),
}  # fmt: skip
"""Name -> what calling it returns."""
