"""What DeepSpeed has and the stand-in has not, and what to write instead; plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_KERNELS: Final = "the engine uses torch's own kernels: write the module with torch.nn"
_SERVING: Final = "the engine trains and does not serve: leave it out here, or run this script on DeepSpeed itself"
_WEIGHTS: Final = (
    "engine.load_checkpoint reads a checkpoint at any number of ranks and any stage, and "
    "engine.save_16bit_model(folder) writes the weights to one file, in fp32 if there is neither fp16 nor bf16"
)
_MEMORY: Final = "it needs no engine: run that line without --engine dsprof"
_CUSTOM_OPTIMIZER: Final = 'write "optimizer": {"type": ..., "params": {...}} in the configuration'
_CONFIG_SCHEDULE: Final = 'write "scheduler": {"type": ..., "params": {...}} in the configuration'
_EXPERTS: Final = "experts are trained like all parameters, not spread over ranks: write the layer with torch.nn"
_SEQUENCES: Final = "write tensor_parallel in the configuration; Ulysses is not there"
_TENSOR_PARALLEL: Final = "tensor_parallel in the configuration cuts the model's own layers: leave it out"

MODULES: Final[Mapping[str, str]] = {
    "deepspeed.autotuning": "try values one by one under dsprof run, which says what each of them changed",
    "deepspeed.checkpoint.constants": _WEIGHTS,
    "deepspeed.checkpoint.deepspeed_checkpoint": _WEIGHTS,
    "deepspeed.checkpoint.ds_to_universal": _WEIGHTS,
    "deepspeed.checkpoint.reshape_utils": _WEIGHTS,
    "deepspeed.checkpoint.universal_checkpoint": _WEIGHTS,
    "deepspeed.checkpoint.zero_checkpoint": _WEIGHTS,
    "deepspeed.compile": "pass torch.compile(model) to deepspeed.initialize",
    "deepspeed.compression": "quantize or prune the model itself",
    "deepspeed.elasticity": "a checkpoint loads at any number of ranks: write the batch sizes themselves",
    "deepspeed.env_report": "dsprof doctor ds.json checks configuration and machine",
    "deepspeed.inference": _SERVING,
    "deepspeed.io": "write zero_optimization.offload_optimizer or offload_param with a path",
    "deepspeed.launcher": "dsprof run starts the ranks: dsprof run --engine dsprof --num_gpus N train.py",
    "deepspeed.linear": _KERNELS,
    "deepspeed.model_implementations": _SERVING,
    "deepspeed.module_inject.auto_tp": _TENSOR_PARALLEL,
    "deepspeed.module_inject.replace_module": _TENSOR_PARALLEL,
    "deepspeed.moe": _EXPERTS,
    "deepspeed.monitor": 'write "tensorboard" or "csv_monitor" in the configuration',
    "deepspeed.nebula": _WEIGHTS,
    "deepspeed.nvme": "write zero_optimization.offload_optimizer or offload_param with a path",
    "deepspeed.ops.aio": "write zero_optimization.offload_optimizer or offload_param with a path",
    "deepspeed.ops.fp_quantizer": _KERNELS,
    "deepspeed.ops.op_builder": "the engine builds no kernels of DeepSpeed's: leave it out",
    "deepspeed.ops.quantizer": _KERNELS,
    "deepspeed.ops.random_ltd": "drop tokens in the model itself",
    "deepspeed.ops.sparse_attention": "use torch.nn.functional.scaled_dot_product_attention, or flex_attention",
    "deepspeed.ops.transformer": _KERNELS,
    "deepspeed.profiling": 'write "flops_profiler": {"enabled": true} in the configuration',
    "deepspeed.runtime.activation_checkpointing.config": 'write "activation_checkpointing" in the configuration',
    "deepspeed.runtime.bf16_optimizer": "the engine's optimizer is the one that deepspeed.initialize returns",
    "deepspeed.runtime.compiler": "pass torch.compile(model) to deepspeed.initialize",
    "deepspeed.runtime.data_pipeline": "let the data set or its sampler choose, and pass it as training_data=",
    "deepspeed.runtime.domino": "write tensor_parallel in the configuration",
    "deepspeed.runtime.fp16.onebit": 'write "optimizer": {"type": "OneBitAdam", ...} in the configuration',
    "deepspeed.runtime.fp16": "the engine's optimizer is the one that deepspeed.initialize returns",
    "deepspeed.runtime.hybrid_engine": _SERVING,
    "deepspeed.runtime.pipe.schedule": "dsprof.engine.schedule has the schedules: make_plan and its actions",
    "deepspeed.runtime.pipe.p2p": "the pipeline sends by itself: leave it out",
    "deepspeed.runtime.sequence_parallel": _SEQUENCES,
    "deepspeed.runtime.state_dict_factory": _WEIGHTS,
    "deepspeed.runtime.superoffload": "write zero_optimization.offload_optimizer",
    "deepspeed.runtime.swap_tensor": "write zero_optimization.offload_optimizer or offload_param with a path",
    "deepspeed.runtime.tensor_parallel": "write tensor_parallel in the configuration",
    "deepspeed.runtime.zenflow": "write zero_optimization.offload_optimizer",
    "deepspeed.runtime.zero.config": "dsprof.engine.config.ZeroConfig is the section as the engine has it",
    "deepspeed.runtime.zero.linear": "no linear layer keeps a copy of its weight here: use torch.nn.Linear",
    "deepspeed.runtime.zero.offload_config": "write zero_optimization.offload_optimizer or offload_param",
    "deepspeed.runtime.zero.stage3": _MEMORY,
    "deepspeed.runtime.zero.stage_1_and_2": _MEMORY,
    "deepspeed.runtime.zero.tiling": "stage 3 fetches by module: cut a large layer into several",
    "deepspeed.runtime.zero.utils": "the engine's optimizer is the one that deepspeed.initialize returns",
    "deepspeed.sequence": _SEQUENCES,
    "deepspeed.utils.timer": "dsprof run times every phase of a step; dsprof.span(name) adds one of the script's own",
}
"""Module -> what to write in the place of anything that is in it or below it."""

NAMES: Final[Mapping[str, str]] = {
    "CheckpointFunction": "write deepspeed.checkpointing.checkpoint(function, *args)",
    "DeepSpeedCheckpoint": _WEIGHTS,
    "ZeROCheckpoint": _WEIGHTS,
    "DeepSpeedAccelerator": "get_accelerator() has the accelerator; it cannot be replaced",
    "DeepSpeedDataLoader": "pass training_data= to deepspeed.initialize, or a DataLoader of your own",
    "DeepSpeedHybridEngine": _SERVING,
    "DeepSpeedInferenceConfig": _SERVING,
    "DeepSpeedOptimizer": "the engine's optimizer is a torch.optim.Optimizer",
    "DeepSpeedTransformerConfig": _KERNELS,
    "DeepSpeedTransformerLayer": _KERNELS,
    "DualPipeVEngine": 'write "pipeline": {"schedule": "zero-bubble"} in the configuration',
    "DualPipeVModule": 'write deepspeed.pipe.PipelineModule, and "pipeline": {"schedule": "zero-bubble"}',
    "InferenceEngine": _SERVING,
    "PipelineParallelGrid": (
        "initialize makes it: engine.grid of a pipeline has its methods; of other engines, deepspeed.utils.groups"
    ),
    "SynchronizedWallClockTimer": "dsprof run times every phase of a step, and waits for no device to do so",
    "ThroughputTimer": "dsprof run times every step",
    "TiledLinear": "stage 3 fetches by module: cut a large layer into several",
    "TiledLinearReturnBias": "stage 3 fetches by module: cut a large layer into several",
    "ZenFlowCPUAdam": "write zero_optimization.offload_optimizer",
    "ZenFlowSelectiveAdamW": "write zero_optimization.offload_optimizer",
    "_create_expert_and_data_parallel": _EXPERTS,
    "_create_expert_data_and_model_parallel": _EXPERTS,
    "_create_model_parallel": _TENSOR_PARALLEL,
    "_get_expert_data_parallel_group": _EXPERTS,
    "_get_expert_data_parallel_rank": _EXPERTS,
    "_get_expert_data_parallel_world_size": _EXPERTS,
    "_get_expert_parallel_group": _EXPERTS,
    "_get_expert_parallel_rank": _EXPERTS,
    "_get_expert_parallel_world_size": _EXPERTS,
    "_get_sequence_parallel_group": _SEQUENCES,
    "_init_tp_mesh_device": _TENSOR_PARALLEL,
    "add_tuning_arguments": _CONFIG_SCHEDULE,
    "all_gather_coalesced": "write all_gather_into_tensor for each",
    "all_reduce_coalesced": "write all_reduce for each",
    "clip_grad_norm_": 'write "gradient_clipping": 1.0 in the configuration',
    "configure": 'write "comms_logger": {"enabled": true} in the configuration',
    "create_op_builder": "the engine builds no kernels of DeepSpeed's: leave it out",
    "default_inference_config": _SERVING,
    "dist": "write deepspeed.comm",
    "get_config_from_args": _CONFIG_SCHEDULE,
    "enable_universal_checkpoint": _WEIGHTS,
    "get_lr_from_config": _CONFIG_SCHEDULE,
    "get_op_builder": "the engine builds no kernels of DeepSpeed's: leave it out",
    "inference_all_reduce": "write all_reduce",
    "init_inference": _SERVING,
    "initialize_mesh_device": "write torch.distributed.device_mesh.init_device_mesh",
    "instrument_w_nvtx": "write dsprof.span(name) around it",
    "memory_status": "write deepspeed.runtime.utils.see_memory_usage(message, force=True)",
    "partition_activations_in_checkpoint": 'write "cpu_checkpointing": true in activation_checkpointing',
    "partition_balanced": "dsprof.engine.partition has the ways of dividing layers",
    "partition_uniform": "dsprof.engine.partition has the ways of dividing layers",
    "replace_transformer_layer": _KERNELS,
    "revert_transformer_layer": _KERNELS,
    "set_tensor_model_parallel_rank": _TENSOR_PARALLEL,
    "set_tensor_model_parallel_world_size": _TENSOR_PARALLEL,
    "set_accelerator": "GPUs are used if torch sees any, else the CPU; CUDA_VISIBLE_DEVICES chooses",
    "set_num_layers": "nothing outlives a backward here: leave it out",
    "unwrap_model_for_generation": (
        "write deepspeed.zero.GatheredParameters(engine.module.parameters()), and call engine.module in that block"
    ),
}
"""Name in a module -> what to write in its place."""

OTHERWISE: Final = "leave it out, or run the script on DeepSpeed itself, without --engine dsprof"


def refusal(name: str) -> str:
    """What is to be said to who asks for `name` (`deepspeed.moe.layer.MoE`)."""
    words = name.split(".")
    above = [".".join(words[:count]) for count in range(len(words), 1, -1)]
    instead = next((MODULES[module] for module in above if module in MODULES), None)
    return f"{name}: dsprof's engine, which stands in for DeepSpeed, does not have it: " + (
        instead or NAMES.get(words[-1]) or OTHERWISE
    )
