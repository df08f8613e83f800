"""Which names the stand-in has, module by module, and what stands behind each: `module:attribute`, a module with a
leading dot being the engine's own.

The modules are those of DeepSpeed 0.19.8 that scripts import from. Where DeepSpeed has a thing in two places, so has
this.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import Distribution
from pathlib import Path
from typing import Final

VERSION: Final = "0.19.8+dsprof"
"""DeepSpeed's, whose names these are, so that scripts may compare it; and whose the work is."""

MAJOR, MINOR, PATCH = 0, 19, 8
DEFAULT_PORT: Final = 29500

Names = Mapping[str, str]


def _of(home: str, *names: str) -> dict[str, str]:
    return {name: f"{home}:{name}" for name in names}


_VERSION: Names = {"version": ".deepspeed.names:VERSION"}

_ENGINE: Names = {"DeepSpeedEngine": ".train.base_engine:BaseEngine"}

_PIPELINE_ENGINE: Names = {"PipelineEngine": ".train.pipeline_engine:PipelineEngine"}

_LAYERS: Names = _of(".pipe", "PipelineModule", "LayerSpec", "TiedLayerSpec")

_TOPOLOGY: Names = _of(".pipe.topology", "ProcessTopology", "PipeDataParallelTopology", "PipeModelDataParallelTopology")

_CONFIG: Names = {**_of(".deepspeed.start", "DeepSpeedConfig"), "DeepSpeedConfigError": ".config:ConfigError"}

_CHECKPOINTING: Names = {
    **_of(".activation_checkpoint", "checkpoint", "configure", "is_configured", "reset"),
    "non_reentrant_checkpoint": ".activation_checkpoint:checkpoint",
    **_of(
        ".deepspeed.rng_tracker", "get_cuda_rng_tracker", "model_parallel_cuda_manual_seed",
        "model_parallel_reconfigure_tp_seed",
    ),
    "_CUDA_RNG_STATE_TRACKER": ".deepspeed.rng_tracker:STREAMS",
    "_MODEL_PARALLEL_RNG_TRACKER_NAME": ".deepspeed.rng_tracker:MODEL_PARALLEL",
}  # fmt: skip

_ZERO: Names = _of(
    ".deepspeed.zero", "Init", "GatheredParameters", "register_external_parameter", "ZeroParamStatus", "ZeroParamType"
)

VALID_LR_SCHEDULES: Final = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]

_SCHEDULES: Names = {**_of(".optim.lr", *VALID_LR_SCHEDULES), **_of(".deepspeed.names", "VALID_LR_SCHEDULES")}

_ADAM: Names = _of(".deepspeed.optimizers", "FusedAdam", "DeepSpeedCPUAdam")

_FRAGMENTS: Names = _of(
    ".deepspeed.fragments", "safe_get_full_fp32_param", "safe_set_full_fp32_param", "safe_get_full_grad",
    "safe_set_full_grad", "safe_get_full_optimizer_state", "safe_set_full_optimizer_state", "safe_get_local_fp32_param",
    "safe_set_local_fp32_param", "safe_get_local_grad", "safe_set_local_grad", "safe_get_local_optimizer_state",
    "safe_set_local_optimizer_state", "safe_update_full_grad_vectorized",
)  # fmt: skip

_LEAVES: Names = _of(
    ".deepspeed.z3_leaf", "set_z3_leaf_modules", "unset_z3_leaf_modules", "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix", "set_z3_leaf_module", "get_z3_leaf_modules",
)  # fmt: skip

_GROUPS: Names = {
    **_of(
        ".deepspeed.groups", "get_data_parallel_group", "get_data_parallel_rank", "get_data_parallel_world_size",
        "get_tensor_model_parallel_group", "get_tensor_model_parallel_rank", "get_tensor_model_parallel_world_size",
        "get_tensor_model_parallel_src_rank",
    ),
    "get_model_parallel_group": ".deepspeed.groups:get_tensor_model_parallel_group",
    "get_model_parallel_rank": ".deepspeed.groups:get_tensor_model_parallel_rank",
    "get_model_parallel_world_size": ".deepspeed.groups:get_tensor_model_parallel_world_size",
}  # fmt: skip

_INNER_GROUPS: Names = {
    "_clone_world_group": ".deepspeed.groups:clone_world_group",
    "_get_broadcast_src_rank": ".deepspeed.groups:get_broadcast_src_rank",
    "_get_data_parallel_group": ".deepspeed.groups:get_data_parallel_group",
    "_get_data_parallel_group_ranks": ".deepspeed.groups:get_data_parallel_group_ranks",
    "_get_data_parallel_rank": ".deepspeed.groups:get_data_parallel_rank",
    "_get_data_parallel_world_size": ".deepspeed.groups:get_data_parallel_world_size",
    "_get_model_parallel_world_size": ".deepspeed.groups:get_tensor_model_parallel_world_size",
    "_get_sequence_data_parallel_group": ".deepspeed.groups:get_data_parallel_group",
    "_get_sequence_data_parallel_rank": ".deepspeed.groups:get_data_parallel_rank",
    "_get_sequence_data_parallel_world_size": ".deepspeed.groups:get_data_parallel_world_size",
    "_get_sequence_parallel_rank": ".deepspeed.groups:get_sequence_parallel_rank",
    "_get_sequence_parallel_world_size": ".deepspeed.groups:get_sequence_parallel_world_size",
}
"""Not for scripts, by their names, and yet many use them."""

_LOGS: Names = _of(".deepspeed.utils", "logger", "log_dist", "log_dist_once")

_COMM: Names = {
    **_of(
        "torch.distributed", "ReduceOp", "P2POp", "is_initialized", "is_available", "destroy_process_group",
        "new_group", "get_rank", "get_world_size", "get_global_rank", "broadcast", "broadcast_object_list",
        "all_reduce", "reduce", "all_gather", "all_gather_object", "all_gather_into_tensor", "gather", "scatter",
        "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "send", "recv", "isend",
        "irecv", "batch_isend_irecv", "barrier", "monitored_barrier",
    ),
    **_of(".deepspeed.utils", "get_local_rank", "get_world_group", "log_summary"),
    "get_all_ranks_from_group": "torch.distributed:get_process_group_ranks",
    "init_distributed": ".comm.launch:init_distributed",
}  # fmt: skip

_ACCELERATOR: Names = _of(".deepspeed.accelerator", "get_accelerator", "is_current_accelerator_supported")

MODULES: Final[Mapping[str, Names]] = {
    "deepspeed": {
        "__version__": ".deepspeed.names:VERSION",
        "__version_major__": ".deepspeed.names:MAJOR",
        "__version_minor__": ".deepspeed.names:MINOR",
        "__version_patch__": ".deepspeed.names:PATCH",
        "TORCH_DISTRIBUTED_DEFAULT_PORT": ".deepspeed.names:DEFAULT_PORT",
        **_VERSION,
        **_of(".deepspeed.start", "initialize", "tp_model_init", "set_autotp_mode"),
        **_of(".deepspeed.utils", "OnDevice"),
        "init_distributed": ".comm.launch:init_distributed",
        "add_config_arguments": ".setup.initialize:add_config_arguments",
        **_of(".deepspeed.accelerator", "get_accelerator"),
        **_of(".deepspeed.utils", "logger", "log_dist"),
        "PipelineModule": ".pipe:PipelineModule",
        **_ENGINE,
        **_PIPELINE_ENGINE,
        **_CONFIG,
    },
    "deepspeed.accelerator": _ACCELERATOR,
    "deepspeed.accelerator.real_accelerator": _ACCELERATOR,
    "deepspeed.checkpoint": {},
    "deepspeed.checkpoint.utils": _of(".deepspeed.utils", "clone_tensors_for_torch_save"),
    "deepspeed.checkpointing": _CHECKPOINTING,
    "deepspeed.comm": _COMM,
    "deepspeed.comm.comm": _COMM,
    "deepspeed.constants": {"TORCH_DISTRIBUTED_DEFAULT_PORT": ".deepspeed.names:DEFAULT_PORT"},
    "deepspeed.git_version_info": _VERSION,
    "deepspeed.module_inject": _of(".deepspeed.start", "set_autotp_mode"),
    "deepspeed.module_inject.layers": _of(".deepspeed.start", "set_autotp_mode"),
    "deepspeed.ops": {},
    "deepspeed.ops.adagrad": _of(".deepspeed.optimizers", "DeepSpeedCPUAdagrad"),
    "deepspeed.ops.adam": _ADAM,
    "deepspeed.ops.adam.cpu_adam": _of(".deepspeed.optimizers", "DeepSpeedCPUAdam"),
    "deepspeed.ops.adam.fused_adam": _of(".deepspeed.optimizers", "FusedAdam"),
    "deepspeed.ops.lamb": _of(".deepspeed.optimizers", "FusedLamb"),
    "deepspeed.ops.lion": _of(".deepspeed.optimizers", "FusedLion", "DeepSpeedCPULion"),
    "deepspeed.pipe": _LAYERS,
    "deepspeed.runtime": {},
    "deepspeed.runtime.activation_checkpointing": {},
    "deepspeed.runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "deepspeed.runtime.config": _CONFIG,
    "deepspeed.runtime.dataloader": _of(".data", "RepeatingLoader"),
    "deepspeed.runtime.engine": _ENGINE,
    "deepspeed.runtime.lr_schedules": _SCHEDULES,
    "deepspeed.runtime.pipe": {**_LAYERS, **_of(".pipe.topology", "ProcessTopology")},
    "deepspeed.runtime.pipe.engine": _PIPELINE_ENGINE,
    "deepspeed.runtime.pipe.module": _LAYERS,
    "deepspeed.runtime.pipe.topology": _TOPOLOGY,
    "deepspeed.runtime.utils": _of(".deepspeed.utils", "see_memory_usage", "set_random_seed", "move_to_device"),
    "deepspeed.runtime.zero": _ZERO,
    "deepspeed.runtime.zero.partition_parameters": {
        **_ZERO,
        **_of(".deepspeed.zero", "unregister_external_parameter", "zero_wrapper_for_fp_tensor_constructor"),
    },
    "deepspeed.utils": {
        **_LOGS,
        **_of(".data", "RepeatingLoader"),
        **_of(".deepspeed.utils", "OnDevice"),
        **_FRAGMENTS,
        **_GROUPS,
        **_LEAVES,
    },
    "deepspeed.utils.groups": {**_GROUPS, **_INNER_GROUPS},
    "deepspeed.utils.init_on_device": _of(".deepspeed.utils", "OnDevice"),
    "deepspeed.utils.logging": {**_LOGS, **_of(".deepspeed.utils", "print_dist", "warning_once")},
    "deepspeed.utils.tensor_fragment": _FRAGMENTS,
    "deepspeed.utils.z3_leaf_module": {**_LEAVES, **_of(".deepspeed.z3_leaf", "z3_leaf_module")},
    "deepspeed.utils.zero_to_fp32": _of(
        ".deepspeed.zero_to_fp32",
        "get_fp32_state_dict_from_zero_checkpoint",
        "load_state_dict_from_zero_checkpoint",
        "convert_zero_checkpoint_to_fp32_state_dict",
    ),
    "deepspeed.zero": _ZERO,
}


METADATA: Final = f"""\
Metadata-Version: 2.1
Name: deepspeed
Version: {VERSION}
Summary: dsprof's training engine under DeepSpeed's names
"""


class _StandIn(Distribution):
    """A distribution without files."""

    def read_text(self, filename: str) -> str | None:
        return METADATA if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        return Path(__file__).parent / str(path)


def distribution() -> Distribution:
    """`importlib.metadata.distribution("deepspeed")`."""
    return _StandIn()
