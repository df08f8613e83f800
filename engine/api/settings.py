"""What a script asks of an engine about its configuration: names are those of DeepSpeed's engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..optim.loss_scaler import DTYPES

if TYPE_CHECKING:
    from ..config import Config
    from ..config.offload import OffloadOptimizerConfig, OffloadParamConfig


class Settings(nn.Module):
    """The part of an Engine that repeats its configuration. Numbers of elements where sizes are asked for."""

    config: Config
    optimizer: torch.optim.Optimizer | None

    # --- batches, optimizer, schedule

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples of a step and of a rank's micro-batch, and micro-batches a step."""
        config = self.config
        return config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps

    def dataloader_drop_last(self) -> bool:
        """Whether the loader drops the last batch of an epoch where it is not full."""
        return self.config.dataloader_drop_last

    def optimizer_name(self) -> str | None:
        """The type in the configuration, in lower case; of an optimizer of the script's, its class."""
        if self.config.optimizer is not None:
            return self.config.optimizer.type.lower()
        return None if self.optimizer is None else type(self.optimizer).__name__

    def optimizer_params(self) -> dict[str, Any] | None:
        """Its parameters in the configuration."""
        return None if self.config.optimizer is None else self.config.optimizer.params.arguments()

    def scheduler_name(self) -> str | None:
        """The type in the configuration."""
        return None if self.config.scheduler is None else self.config.scheduler.type

    def scheduler_params(self) -> dict[str, Any] | None:
        """Its parameters in the configuration."""
        return None if self.config.scheduler is None else self.config.scheduler.params.arguments()

    # --- precision

    def fp16_auto_cast(self) -> bool | None:
        """Whether inputs are cast to fp16; None if the model does not run in it."""
        return self.config.fp16.auto_cast if self.config.fp16.enabled else None

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return self.config.fp16.enabled and self.config.fp16.loss_scale == 0

    def initial_dynamic_scale(self) -> float:
        """The loss scale it begins with."""
        return 2.0**self.config.fp16.initial_scale_power if self.config.fp16.enabled else 1.0

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """What the model runs in, and what gradients are added up in."""
        config = self.config
        model = torch.float16 if config.fp16.enabled else torch.bfloat16 if config.bf16.enabled else torch.float32
        accumulated = config.data_types.grad_accum_dtype
        return model, model if accumulated is None else DTYPES[accumulated]

    @property
    def communication_data_type(self) -> torch.dtype:
        """What gradients travel in."""
        chosen = self.config.communication_data_type
        return self.get_data_types()[0] if chosen is None else DTYPES[chosen]

    # --- gradients

    def gradient_clipping(self) -> float:
        """The norm that gradients are clipped to; 0 if they are not."""
        return self.config.gradient_clipping

    def gradient_predivide_factor(self) -> float:
        """What gradients are divided by before they are summed up."""
        return self.config.gradient_predivide_factor

    def postscale_gradients(self) -> bool:
        """Whether gradients are divided after they have been summed up."""
        return not self.config.prescale_gradients

    # --- ZeRO

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether a rank keeps only its pieces of gradients."""
        return self.config.zero_optimization.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether a rank keeps only its pieces of parameters."""
        return self.config.zero_optimization.stage >= 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether `save_16bit_model` writes what stage 3 has in pieces."""
        return self.config.zero_optimization.stage3_gather_16bit_weights_on_model_save

    def zero_allow_untested_optimizer(self) -> bool:
        """Whether any optimizer of the script's is taken."""
        return self.config.zero_allow_untested_optimizer

    def zero_reduce_scatter(self) -> bool:
        """Whether gradients are reduced by reduce-scatter, not all-reduce."""
        return self.config.zero_optimization.reduce_scatter

    def zero_overlap_comm(self) -> bool:
        """Whether gradients are reduced beside the backward pass."""
        return self.config.zero_optimization.overlap_comm

    def zero_contiguous_gradients(self) -> bool:
        """Whether gradients are copied into their bucket as they come."""
        return self.config.zero_optimization.contiguous_gradients

    def zero_reduce_bucket_size(self) -> int:
        """Of a bucket of gradients."""
        return self.config.zero_optimization.reduce_bucket_size

    def zero_allgather_bucket_size(self) -> int:
        """Of a bucket of parameters."""
        return self.config.zero_optimization.allgather_bucket_size

    def zero_allgather_partitions(self) -> bool:
        """Whether parameters are collected by all-gather, not broadcasts."""
        return self.config.zero_optimization.allgather_partitions

    def zero_round_robin_gradients(self) -> bool:
        """Whether the owners of pieces rotate."""
        return self.config.zero_optimization.round_robin_gradients

    def zero_ignore_unused_parameters(self) -> bool:
        """Whether parameters may have no gradient."""
        return self.config.zero_optimization.ignore_unused_parameters

    def zero_sub_group_size(self) -> int:
        """Of what the optimizer updates at a time."""
        return self.config.zero_optimization.sub_group_size

    def zero_max_live_parameters(self) -> int:
        """At most fetched at once, in stage 3."""
        return self.config.zero_optimization.stage3_max_live_parameters

    def zero_max_reuse_distance(self) -> int:
        """Within which a parameter is kept for its next use, in stage 3."""
        return self.config.zero_optimization.stage3_max_reuse_distance

    def zero_prefetch_bucket_size(self) -> int:
        """Fetched ahead, in stage 3."""
        return self.config.zero_optimization.stage3_prefetch_bucket_size

    def zero_param_persistence_threshold(self) -> int:
        """Of the largest parameter that stays whole, in stage 3."""
        return self.config.zero_optimization.stage3_param_persistence_threshold

    def zero_model_persistence_threshold(self) -> int:
        """That stay whole in all, in stage 3."""
        return self.config.zero_optimization.stage3_model_persistence_threshold

    def zero_hpz_partition_size(self) -> int:
        """Ranks that share a second copy of the parameters."""
        return self.config.zero_optimization.zero_hpz_partition_size

    # --- offloading

    def zero_offload_optimizer(self) -> OffloadOptimizerConfig | None:
        """The section of that name."""
        return self.config.zero_optimization.offload_optimizer

    def zero_offload_param(self) -> OffloadParamConfig | None:
        """The section of that name."""
        return self.config.zero_optimization.offload_param

    def zero_cpu_offload(self) -> bool:
        """Whether the optimizer's states are in host memory."""
        section = self.zero_offload_optimizer()
        return section is not None and section.device == "cpu"

    zero_use_cpu_optimizer = zero_cpu_offload

    def zero_nvme_offload_optimizer(self) -> bool:
        """Whether the optimizer's states are in files."""
        section = self.zero_offload_optimizer()
        return section is not None and section.device == "nvme"

    def zero_partial_offload(self) -> float:
        """The share of the optimizer's step that is computed on the CPU, where any is."""
        section = self.zero_offload_optimizer()
        return 1.0 if section is None else section.ratio

    # --- the rest

    def autotp_size(self) -> int:
        """Tensor-parallel ranks."""
        return self.config.tensor_parallel.size

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Whether ranks compare the tags of checkpoints."""
        return self.config.checkpoint.tag_validation != "Ignore"

    def checkpoint_tag_validation_fail(self) -> bool:
        """Whether tags that differ are an error."""
        return self.config.checkpoint.tag_validation == "Fail"

    def steps_per_print(self) -> int | None:
        """Every how many steps progress is told."""
        return self.config.steps_per_print

    def dump_state(self) -> bool:
        """Whether the configuration was printed."""
        return self.config.dump_state

    def wall_clock_breakdown(self) -> bool:
        """Whether times of phases are printed."""
        return self.config.wall_clock_breakdown

    def memory_breakdown(self) -> bool:
        """Whether memory in use is printed."""
        return self.config.memory_breakdown

    def flops_profiler_enabled(self) -> bool:
        """Whether operations are counted."""
        return self.config.flops_profiler.enabled
