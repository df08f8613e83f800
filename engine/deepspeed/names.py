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

from ..unsupported import by_name

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
    "_clone_world_group": ".deepspeed.utils:get_world_group",
    "_get_model_parallel_world_size": ".deepspeed.groups:get_tensor_model_parallel_world_size",
    "_get_broadcast_src_rank": ".deepspeed.groups:get_broadcast_src_rank",
    "_get_data_parallel_group_ranks": ".deepspeed.groups:get_data_parallel_group_ranks",
    **{f"_get_{kind}_{what}": f".deepspeed.groups:get_data_parallel_{what}"
       for kind in ("data_parallel", "sequence_data_parallel") for what in ("group", "rank", "world_size")},
    **{f"_get_sequence_parallel_{what}": f".deepspeed.groups:get_sequence_parallel_{what}"
       for what in ("rank", "world_size")},
}  # fmt: skip
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


# --- what there is not, and what to write instead

_KERNELS: Final = "the engine uses torch's own kernels: write the module with torch.nn"
_SERVING: Final = "the engine trains and does not serve: leave it out here, or run this script on DeepSpeed itself"
_WEIGHTS: Final = (
    "engine.load_checkpoint reads a checkpoint at any number of ranks and any stage, and "
    "engine.save_16bit_model(folder) writes the weights to one file, in fp32 if there is neither fp16 nor bf16"
)
_EXPERTS: Final = "experts are trained like all parameters, not spread over ranks: write the layer with torch.nn"
_SEQUENCES: Final = (
    'write "sequence_parallel_size" in the configuration, and divide each batch by engine.shard_sequence(batch)'
)
_TENSOR_PARALLEL: Final = "tensor_parallel in the configuration shards the model's own layers: leave it out"

ABSENT_MODULES: Final = by_name({
    "try values one by one under dsprof run, which says what each of them changed": "autotuning",
    _WEIGHTS: (
        "checkpoint.constants checkpoint.deepspeed_checkpoint checkpoint.ds_to_universal checkpoint.reshape_utils "
        "checkpoint.universal_checkpoint checkpoint.zero_checkpoint nebula runtime.state_dict_factory"
    ),
    "pass torch.compile(model) to deepspeed.initialize": "compile runtime.compiler",
    "quantize or prune the model itself": "compression",
    "a checkpoint loads at any number of ranks: write the batch sizes themselves": "elasticity",
    "dsprof doctor ds.json checks configuration and machine": "env_report",
    _SERVING: "inference model_implementations runtime.hybrid_engine",
    "write zero_optimization.offload_optimizer or offload_param with a path": "io nvme ops.aio runtime.swap_tensor",
    "dsprof run starts the ranks: dsprof run --engine dsprof --num_gpus N train.py": "launcher",
    _KERNELS: "linear ops.fp_quantizer ops.quantizer ops.transformer",
    _TENSOR_PARALLEL: "module_inject.auto_tp module_inject.replace_module",
    _EXPERTS: "moe",
    'write "tensorboard" or "csv_monitor" in the configuration': "monitor",
    "the engine builds no kernels of DeepSpeed's: leave it out": "ops.op_builder",
    "drop tokens in the model itself": "ops.random_ltd",
    "use torch.nn.functional.scaled_dot_product_attention, or flex_attention": "ops.sparse_attention",
    'write "flops_profiler": {"enabled": true} in the configuration': "profiling",
    'write "activation_checkpointing" in the configuration': "runtime.activation_checkpointing.config",
    "the engine's optimizer is the one that deepspeed.initialize returns": (
        "runtime.bf16_optimizer runtime.fp16 runtime.zero.utils"
    ),
    "let the data set or its sampler choose, and pass it as training_data=": "runtime.data_pipeline",
    "write tensor_parallel in the configuration": "runtime.domino runtime.tensor_parallel",
    'write "optimizer": {"type": "OneBitAdam", ...} in the configuration': "runtime.fp16.onebit",
    "dsprof.engine.schedule has the schedules: make_plan and its actions": "runtime.pipe.schedule",
    "the pipeline sends by itself: leave it out": "runtime.pipe.p2p",
    _SEQUENCES: "runtime.sequence_parallel sequence",
    "write zero_optimization.offload_optimizer": "runtime.superoffload runtime.zenflow",
    "dsprof.engine.config.ZeroConfig is the section as the engine has it": "runtime.zero.config",
    "no linear layer keeps a copy of its weight here: use torch.nn.Linear": "runtime.zero.linear",
    "write zero_optimization.offload_optimizer or offload_param": "runtime.zero.offload_config",
    "it needs no engine: run that line without --engine dsprof": "runtime.zero.stage3 runtime.zero.stage_1_and_2",
    "stage 3 fetches by module: split a large layer into several": "runtime.zero.tiling",
    "dsprof run times every phase of a step; dsprof.span(name) adds one of the script's own": "utils.timer",
})  # fmt: skip
"""Module below `deepspeed` -> what to write in the place of anything that is in it or below it."""

ABSENT_NAMES: Final = by_name({
    "write deepspeed.checkpointing.checkpoint(function, *args)": "CheckpointFunction",
    _WEIGHTS: "DeepSpeedCheckpoint ZeROCheckpoint enable_universal_checkpoint",
    "get_accelerator() has the accelerator; it cannot be replaced": "DeepSpeedAccelerator",
    "pass training_data= to deepspeed.initialize, or a DataLoader of your own": "DeepSpeedDataLoader",
    _SERVING: "DeepSpeedHybridEngine DeepSpeedInferenceConfig InferenceEngine default_inference_config init_inference",
    "the engine's optimizer is a torch.optim.Optimizer": "DeepSpeedOptimizer",
    _KERNELS: "DeepSpeedTransformerConfig DeepSpeedTransformerLayer replace_transformer_layer revert_transformer_layer",
    'write "pipeline": {"schedule": "zero-bubble"} in the configuration': "DualPipeVEngine",
    'write deepspeed.pipe.PipelineModule, and "pipeline": {"schedule": "zero-bubble"}': "DualPipeVModule",
    "initialize makes it: engine.grid of a pipeline has its methods; of other engines, deepspeed.utils.groups": (
        "PipelineParallelGrid"
    ),
    "dsprof run times every phase of a step, and waits for no device to do so": "SynchronizedWallClockTimer",
    "dsprof run times every step": "ThroughputTimer",
    "stage 3 fetches by module: split a large layer into several": "TiledLinear TiledLinearReturnBias",
    "write zero_optimization.offload_optimizer": "ZenFlowCPUAdam ZenFlowSelectiveAdamW",
    _EXPERTS: (
        "_create_expert_and_data_parallel _create_expert_data_and_model_parallel _get_expert_data_parallel_group "
        "_get_expert_data_parallel_rank _get_expert_data_parallel_world_size _get_expert_parallel_group "
        "_get_expert_parallel_rank _get_expert_parallel_world_size"
    ),
    _TENSOR_PARALLEL: (
        "_create_model_parallel _init_tp_mesh_device set_tensor_model_parallel_rank "
        "set_tensor_model_parallel_world_size"
    ),
    _SEQUENCES: "_get_sequence_parallel_group",
    'write "scheduler": {"type": ..., "params": {...}} in the configuration': (
        "add_tuning_arguments get_config_from_args get_lr_from_config"
    ),
    "write all_gather_into_tensor for each": "all_gather_coalesced",
    "write all_reduce for each": "all_reduce_coalesced",
    'write "gradient_clipping": 1.0 in the configuration': "clip_grad_norm_",
    'write "comms_logger": {"enabled": true} in the configuration': "configure",
    "the engine builds no kernels of DeepSpeed's: leave it out": "create_op_builder get_op_builder",
    "write deepspeed.comm": "dist",
    "write all_reduce": "inference_all_reduce",
    "write torch.distributed.device_mesh.init_device_mesh": "initialize_mesh_device",
    "write dsprof.span(name) around it": "instrument_w_nvtx",
    "write deepspeed.runtime.utils.see_memory_usage(message, force=True)": "memory_status",
    'write "cpu_checkpointing": true in activation_checkpointing': "partition_activations_in_checkpoint",
    "dsprof.engine.partition has the ways of dividing layers": "partition_balanced partition_uniform",
    "GPUs are used if torch sees any, else the CPU; CUDA_VISIBLE_DEVICES chooses": "set_accelerator",
    "nothing outlives a backward here: leave it out": "set_num_layers",
    "write deepspeed.zero.GatheredParameters(engine.module.parameters()), and call engine.module in that block": (
        "unwrap_model_for_generation"
    ),
})  # fmt: skip
"""Name in a module -> what to write in its place."""

OTHERWISE: Final = "leave it out, or run the script on DeepSpeed itself, without --engine dsprof"


def refusal(name: str) -> str:
    """What is to be said to who asks for `name` (`deepspeed.moe.layer.MoE`)."""
    words = name.split(".")
    above = [".".join(words[1:count]) for count in range(len(words), 1, -1)]
    instead = next((ABSENT_MODULES[module] for module in above if module in ABSENT_MODULES), None)
    return f"{name}: dsprof's engine, which stands in for DeepSpeed, does not have it: " + (
        instead or ABSENT_NAMES.get(words[-1]) or OTHERWISE
    )
