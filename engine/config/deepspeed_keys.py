"""Keys that DeepSpeed 0.19 has, or once had, and this engine has not; plain data.

Two kinds. *Refused*: without it the training would not be what the user asked for, so it is an error that says what to
write instead; only a value that switches it off is let pass, with a warning. *No effect*: it steers the inside of
DeepSpeed, or says what is the case here anyway, so it is a warning. Nothing is taken silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class Foreign:
    """What is to be said about a key that is not ours."""

    says: str
    refused: bool = False
    off: tuple[Any, ...] = ()
    """Of a refused key: values, beyond the usual, that ask for nothing."""

    def is_off(self, value: object) -> bool:
        """Whether the value asks for nothing."""
        if isinstance(value, Mapping) and (not value or value.get("enabled") is False):
            return True
        return value is None or value is False or value in self.off


def _refused(says: str, *off: object) -> Foreign:
    return Foreign(says, refused=True, off=off)


def _removed(says: str, *off: object) -> Foreign:
    """Refused, and in today's DeepSpeed no more than a name."""
    return _refused(f"{says}; DeepSpeed has removed it too", *off)


def _no_effect(says: str) -> Foreign:
    return Foreign(says)


_PASS_IT = "build the optimizer in the script and pass it as `optimizer=` to `initialize`"
_ONE_FILE_FORMAT = "every rank always writes its own part of a checkpoint, through torch.distributed.checkpoint"
_BY_ANALYSIS = "layers are sharded by what depends on what in the model"

FOREIGN: Final[dict[str, dict[str, Foreign]]] = {
    "": {
        "amp": _removed('write "bf16": {"enabled": true}, or "fp16"'),
        "autotuning": _refused("try values one by one under `dsprof run`, which says what each of them changed"),
        "comet": _refused('write "tensorboard" or "csv_monitor", which any tracker can read'),
        "compile": _refused("pass `torch.compile(model)` to `initialize`", {"deepcompile": False}),
        "compression_training": _removed("quantize or prune the model itself"),
        "curriculum_learning": _removed("let the data set or its sampler choose"),
        "data_efficiency": _refused("let the data set or its sampler choose, and pass it as `training_data=`"),
        "data_parallel_size": _no_effect("ranks that do not share layers or a pipeline train on other data"),
        "datastates_ckpt": _refused(
            "`save_checkpoint` writes through torch.distributed.checkpoint and takes no other way"
        ),
        "disable_allgather": _no_effect(
            'it has none in DeepSpeed either; for broadcasts write "zero_optimization": {"allgather_partitions": false}'
        ),
        "disable_python_gc": _refused("call `gc.disable()` in the script"),
        "eigenvalue": _removed("it belonged to quantized training"),
        "elasticity": _refused(
            "a checkpoint loads at any number of ranks; write the batch sizes themselves. DeepSpeed has removed it too"
        ),
        "expert_parallel": _refused("experts are trained like all parameters, not spread over ranks; remove it"),
        "gradient_allreduce_op": _refused("gradients are averaged; multiply the loss to sum them up", "mean"),
        "graph_harvesting": _removed("capture CUDA graphs in the model itself"),
        "hybrid_engine": _refused("this engine trains; generate text with the module inside it, `engine.module`"),
        "log_level": _no_effect("it says what DeepSpeed logs"),
        "managed_gradient_accumulation": _refused(
            'the engine counts micro-batches itself; write "gradient_accumulation_steps", or use `engine.no_sync()`',
            True,
        ),
        "nebula": _removed("`save_checkpoint` writes to a file system"),
        "progressive_layer_drop": _removed("drop layers in the model's own forward"),
        "quantize_training": _removed("quantize the model itself"),
        "seq_parallel_communication_data_type": _no_effect(
            'gradients travel in "communication_data_type", those of ranks that share sequences too'
        ),
        "sparse_attention": _removed("use torch's flex_attention in the model"),
        "timers": _no_effect("steps are timed by the hooks, without synchronizing the device"),
        "torch_autocast": _refused(
            'write "bf16": {"enabled": true}, or use `torch.autocast` in the model\'s own forward'
        ),
        "use_data_before_expert_parallelism": _refused("experts are not spread over ranks here"),
        "vocabulary_size": _no_effect("DeepSpeed only warns of one that is no multiple of 8"),
        "wandb": _refused('write "tensorboard", which `wandb.init(sync_tensorboard=True)` passes on, or "csv_monitor"'),
        "weight_quantization": _refused("it is for inference"),
        "zero_force_ds_cpu_optimizer": _no_effect("any optimizer may be offloaded"),
    },
    "zero_optimization": {
        "allgather_size": _refused('write "allgather_bucket_size"'),
        "compute_grad_norm": _no_effect("the norm is computed once, with the overflow check"),
        "cpu_offload_use_pin_memory": _no_effect('write "pin_memory" in "offload_optimizer" and "offload_param"'),
        "elastic_checkpoint": _no_effect("every checkpoint loads at any number of ranks"),
        "enable_sanity_checks": _no_effect("what can be checked cheaply always is"),
        "leaf_module": _refused('where ranks run different modules, as experts do, write "stage": 2'),
        "legacy_stage1": _refused('write "stage": 1; DeepSpeed has removed the old implementation too'),
        "load_from_fp32_weights": _no_effect("checkpoints hold the fp32 master weights, and those are loaded"),
        "log_trace_cache_warnings": _no_effect("what is fetched when is in the trace of `dsprof run`"),
        "memory_efficient_linear": _no_effect("torch's linear layer keeps no second copy of a weight"),
        "mics_hierarchical_params_gather": _removed('write "zero_hpz_partition_size": the GPUs of a machine'),
        "mics_shard_size": _removed('write "zero_hpz_partition_size" with the size of the group', -1),
        "override_module_apply": _no_effect("`zero.Init` needs no change to torch"),
        "parameter_alignment": _no_effect("shards of parameters are aligned anyway"),
        "pipeline_loading_checkpoint": _no_effect("checkpoints are read piece by piece, by all ranks at once"),
        "save_muon_momentum_buffer_in_memory": _no_effect("all states of an offloaded optimizer lie in one place"),
        "stage3_allgather_sequential": _no_effect(
            'each parameter is gathered alone with "stage3_prefetch_bucket_size": 0'
        ),
        "stage3_module_granularity_threshold": _no_effect(
            "fetches are batched by size, whatever module they belong to"
        ),
        "stage3_use_all_reduce_for_fetch_params": _no_effect("parameters are fetched by all-gather"),
        "use_multi_rank_bucket_allreduce": _no_effect("a bucket always holds the shards of all ranks"),
        "zenflow": _refused('write "offload_optimizer": {"device": "cpu"}, which computes whole steps on the CPU'),
        "zero_quantized_nontrainable_weights": _refused("quantize frozen weights in the model itself"),
        "zeropp_loco_param": _removed('"zero_quantized_gradients" rounds each gradient by itself'),
    },
    "zero_optimization.offload_optimizer": {
        "cpuadam_cores_perc": _no_effect("the step uses the threads that torch has: set OMP_NUM_THREADS"),
        "super_offload": _refused('write "ratio" below 1 to keep a part of the step on the device'),
    },
    "aio": {
        "overlap_events": _no_effect("requests always overlap, up to queue_depth"),
        "single_submit": _no_effect("requests go to threads, not to libaio"),
        "use_gds": _refused("files are read through host memory"),
    },
    "fp16": {
        "fp16_master_weights_and_grads": _refused("master weights are kept in fp32"),
    },
    "bf16": {
        "bf16_master_weights_and_grads": _refused("master weights are kept in fp32"),
        "bf16_optimizer_states": _refused("optimizer states are kept in fp32"),
        "immediate_grad_update": _no_effect("gradients are added up as backward produces them"),
    },
    "data_types": {
        "buffer_dtype": _refused("cast buffers in the script, `module.to(...)`"),
        "keep_in_fp32_modules": _refused("keep them in fp32 in the model's own forward", "auto", []),
        "param_dtype": _refused('write "bf16": {"enabled": true}, or "fp16"'),
    },
    "optimizer": {
        "legacy_fusion": _no_effect("torch's fused optimizers are used where there are any"),
    },
    "optimizer.params": {
        "adam_w_mode": _no_effect('the type "Adam" takes it: write that, with false here, for L2 regularization'),
        "bias_correction": _refused(_PASS_IT, True),
        **dict.fromkeys(("amsgrad", "capturable", "differentiable", "eps_inside_sqrt", "maximize"), _refused(_PASS_IT)),
        "comm_backend_name": _no_effect("compressed momenta travel over the backend of the process group"),
        "cuda_aware": _no_effect("compressed momenta travel over the backend of the process group"),
        "foreach": _no_effect("torch's fused optimizers are used where there are any"),
        "fp32_optimizer_states": _refused("optimizer states are kept in fp32", True),
        "fused": _no_effect("torch's fused optimizers are used where there are any"),
        "max_grad_norm": _refused('write "gradient_clipping" at the top', 0, 0.0),
        "ns_method": _no_effect('torch\'s Newton-Schulz iteration is used; "gram" computes the same by another route'),
        "per_head_muon": _refused("matrices are orthogonalized whole"),
        "set_grad_none": _no_effect("gradients are always set to None"),
        "torch_adam": _no_effect("torch's implementation is always used, and weight_decay is 0 unless it is given"),
    },
    "scheduler.params": {
        "last_batch_iteration": _refused("`load_checkpoint` sets it", -1),
        "last_epoch": _refused("`load_checkpoint` sets it", -1),
    },
    "activation_checkpointing": {
        "contiguous_memory_optimization": _no_effect("torch's allocator places checkpoints"),
        "number_checkpoints": _no_effect(
            'it sizes DeepSpeed\'s contiguous buffer; for fewer checkpoints write "policy"'
        ),
        "partition_activations": _no_effect("without tensor parallelism each rank has activations of its own"),
        "profile": _no_effect("recomputation is timed by the hooks: see `dsprof run`"),
        "synchronize_checkpoint_boundary": _no_effect("nothing here needs the device to be synchronized"),
    },
    "checkpoint": {
        "checkpoint_serialization": _no_effect(_ONE_FILE_FORMAT),
        "load_universal": _no_effect("every checkpoint loads at any number of ranks and at any stage"),
        "parallel_write": _no_effect(_ONE_FILE_FORMAT),
        "use_node_local_storage": _refused("save to a file system that all machines share"),
        "writer": _no_effect(_ONE_FILE_FORMAT),
    },
    "comms_logger": {
        "debug": _no_effect("module and purpose of a communication are always reported"),
    },
    "flops_profiler": {
        "recompute_fwd_factor": _no_effect("what is computed again is counted as it happens"),
    },
    "tensor_parallel": {
        "dtype": _refused('write "bf16": {"enabled": true}, or "fp16"'),
        "injection_policy_tuple": _refused(f'{_BY_ANALYSIS}; to say it yourself write "plan"'),
        "keep_module_on_host": _refused("the parts of layers are made where the model is"),
        "kernel_inject": _refused("the model's own modules are sharded, not replaced"),
        "partition_config": _refused(
            f'{_BY_ANALYSIS}; to say it yourself write "plan": {{"layers.*.self_attn.o_proj": "row"}}'
        ),
        "preset_model": _no_effect(_BY_ANALYSIS),
        "replace_with_kernel_inject": _refused("the model's own modules are sharded, not replaced"),
        "tensor_parallel": _refused('write "autotp_size" without a section within the section'),
        "tp": _refused('write "autotp_size": 2 instead of "tp": {"tp_size": 2}'),
        "tp_grain_size": _no_effect("attention is sharded by head, and other layers into equal parts"),
        "tp_overlap_comm": _no_effect("a layer waits for the sum it works on, and for no other"),
        "vocab_parallel_ce_backend": _no_effect("it is computed in torch's own operations"),
        "vocab_parallel_lm_head": _no_effect(
            'the planner finds out whether the head is sharded; write "plan" to say it'
        ),
    },
    "pipeline": {
        "grad_partitioned": _no_effect("it concerns pipelines with tensor parallelism"),
        "partition": _refused('write "partition_method"', "best"),
        "pipe_partitioned": _no_effect("it concerns pipelines with tensor parallelism"),
        "seed_layers": _refused("seed the layers where they are built"),
        "use_reentrant": _no_effect("recomputation is never reentrant"),
    },
}
"""Section -> key in it -> what is to be said."""

RENAMED: Final[dict[str, dict[str, str]]] = {
    "": {"bfloat16": "bf16"},
    "zero_optimization": {
        "gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
        "max_live_parameters": "stage3_max_live_parameters",
        "max_reuse_distance": "stage3_max_reuse_distance",
        "model_persistence_threshold": "stage3_model_persistence_threshold",
        "param_persistence_threshold": "stage3_param_persistence_threshold",
        "prefetch_bucket_size": "stage3_prefetch_bucket_size",
        "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    },
    "aio": {"thread_count": "intra_op_parallelism"},
    "tensor_parallel": {"tp_size": "autotp_size"},
}
"""Section -> another name that DeepSpeed takes or took for a key -> the key. Both work."""

REPLACED: Final[dict[str, dict[str, str]]] = {
    "zero_optimization": {
        "cpu_offload": "offload_optimizer",
        "cpu_offload_param": "offload_param",
        "cpu_offload_params": "offload_param",
    },
}
"""Section -> a switch of old DeepSpeed's -> the section that says the same with `"device": "cpu"`."""
