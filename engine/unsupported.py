"""What DeepSpeed's engines and PipelineModule have and these have not, and what to write instead; plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_BACKWARD: Final = "write engine.backward(loss), which scales the loss and reduces gradients"
_CLIP: Final = 'write "gradient_clipping" in the configuration'
_COMPILE: Final = "pass torch.compile(model) to initialize, or call engine.compile() in stages 0 to 2"
_CURRICULUM: Final = "let the data set or its sampler choose, and pass it as training_data="
_OFFLOAD: Final = (
    'write "offload_optimizer": {"device": "cpu"} in zero_optimization, which keeps states off the device all the time'
)
_PRECISION: Final = "engine.get_data_types() has what the model runs in, and what gradients are added up in"
_SEQUENCE: Final = "sequences are not split over ranks: leave it out"
_TIMES: Final = 'write "wall_clock_breakdown": true in the configuration, or train under dsprof run'
_TUNING: Final = "try values one by one under dsprof run, which says what each of them changed"
_CHECKPOINTS: Final = (
    "engine.save_checkpoint(folder) writes the layers of all stages under their names in the whole model, and "
    "engine.load_checkpoint(folder) reads them, however they are divided"
)
_EXPERTS: Final = "experts are trained like all parameters: engine.load_checkpoint loads them, too"
_LOSSES: Final = "add it to what loss_fn returns, or mark it with dsprof.mark(name, value=...)"
_PLAN: Final = "engine.plan.actions has what each rank does in a step, in order"
_PRINT: Final = "print where engine.stage_id and engine.grid.get_data_parallel_id() are those you want"
_TIED: Final = "train_batch sums the gradients of layers of one TiedLayerSpec key: leave it out"
_SECTION: Final = "engine.config has the configuration, section by section"

ENGINE: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("allreduce_gradients", "allreduce_bucket", "allreduce_and_copy", "allreduce_no_retain",
         "buffered_allreduce_fallback", "coalesce_grad_reduction", "scale", "sparse_allreduce",
         "sparse_allreduce_bucket", "sparse_allreduce_no_retain", "sparse_all_gather", "all_gather_scalar"),
        _BACKWARD,
    ),
    "clip_fp32_gradients": _CLIP,
    **dict.fromkeys(
        ("is_compiled", "is_deepcompile_active", "is_deepcompile_enabled", "register_compile_pass", "get_compile_time",
         "get_autosp_backend", "get_autotp_backend", "get_deepcompile_backend", "get_deepspeed_compile_backend"),
        _COMPILE,
    ),
    **dict.fromkeys(
        ("curriculum_learning_enabled", "curriculum_learning_config", "data_efficiency_enabled",
         "data_efficiency_config", "data_sampling_enabled", "data_sampling_config", "random_ltd_enabled",
         "random_ltd_config", "random_ltd_initialize", "set_custom_curriculum_learning_schedule",
         "set_data_post_process_func"),
        _CURRICULUM,
    ),
    "offload_states": _OFFLOAD,
    "reload_states": _OFFLOAD,
    **dict.fromkeys(
        ("bf16_master_weights_and_gradients", "bf16_optimizer_states", "fp16_master_weights_and_gradients",
         "torch_autocast_enabled", "torch_autocast_dtype", "torch_autocast_lower_precision_safe_modules"),
        _PRECISION,
    ),
    "get_sequence_parallel_group": _SEQUENCE,
    "get_wall_clock_timers": _TIMES,
    "print_forward_breakdown": _TIMES,
    **dict.fromkeys(
        ("autotuning_enabled", "autotuning_metric", "autotuning_metric_path", "autotuning_model_info_path",
         "autotuning_profile_model_info", "autotuning_start_profile_step", "autotuning_end_profile_step"),
        _TUNING,
    ),
    "load_moe_state_dict": _EXPERTS,
    **dict.fromkeys(
        ("aio_config", "dynamic_loss_scale_args", "flops_profiler_detailed", "flops_profiler_module_depth",
         "flops_profiler_output_file", "flops_profiler_profile_step", "flops_profiler_top_modules",
         "get_optimizer_configuration", "tensor_parallel_config"),
        _SECTION,
    ),
    "get_type": "engine.get_mom() has momenta and betas, engine.get_lr() the learning rates",
    "client_optimizer": "engine.optimizer is the optimizer",
    "basic_optimizer": "engine.optimizer is the optimizer",
    "checkpoint_engine": "engine.save_checkpoint writes through torch.distributed.checkpoint",
    "load_universal_checkpoint": "engine.load_checkpoint reads a checkpoint at any number of ranks and any stage",
    "monitor": 'write "tensorboard" or "csv_monitor" in the configuration',
    "timers": _TIMES,
}  # fmt: skip
"""Name -> what to write in its place, of any engine."""

PIPELINE_ENGINE: Final[Mapping[str, str]] = {
    "agg_additional_losses": _LOSSES,
    "batch_timer": _TIMES,
    "dp_group_loss": "train_batch returns the mean over all replicas, on every rank",
    "log_for_device": _PRINT,
    "mem_status": "write deepspeed.runtime.utils.see_memory_usage(message, force=True)",
    "num_pipe_buffers": _PLAN,
    "pipe_buffers": _PLAN,
    "total_additional_losses": _LOSSES,
    "total_loss": "train_batch returns the mean loss, and engine.agg_train_loss keeps it",
    "tput_log": _PRINT,
}
"""Of PipelineEngine besides."""

PIPELINE_MODULE: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("ckpt_layer_path", "ckpt_layer_path_list", "ckpt_prefix", "load_state_dir", "save_state_dict"), _CHECKPOINTS
    ),
    **dict.fromkeys(
        ("allreduce_tied_weight_gradients", "get_tied_weights_and_groups", "tied_comms", "tied_weight_attrs"), _TIED
    ),
    "fwd_map": "module.forward_funcs has the layers that are here, module.stage_owner(n) says who has layer n",
    "get_additional_losses": _LOSSES,
}
"""Of PipelineModule."""
