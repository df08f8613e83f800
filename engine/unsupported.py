"""What DeepSpeed's engines and PipelineModule have and these have not, and what to write instead; plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final


def by_name(advice: Mapping[str, str]) -> dict[str, str]:
    """Name -> what to write in its place, from what to write -> the names, with spaces between."""
    return {name: text for text, names in advice.items() for name in names.split()}


_CHECKPOINTS: Final = (
    "engine.save_checkpoint(folder) writes the layers of all stages under their names in the whole model, and "
    "engine.load_checkpoint(folder) reads them, however they are divided"
)
_LOSSES: Final = "add it to what loss_fn returns, or mark it with dsprof.mark(name, value=...)"
_OFFLOAD: Final = (
    'write "offload_optimizer": {"device": "cpu"} in zero_optimization, which keeps states off the device all the time'
)
_TIMES: Final = 'write "wall_clock_breakdown": true in the configuration, or train under dsprof run'

ENGINE: Final = by_name({
    "write engine.backward(loss), which scales the loss and reduces gradients": (
        "allreduce_gradients allreduce_bucket allreduce_and_copy allreduce_no_retain buffered_allreduce_fallback "
        "coalesce_grad_reduction scale sparse_allreduce sparse_allreduce_bucket sparse_allreduce_no_retain "
        "sparse_all_gather all_gather_scalar"
    ),
    'write "gradient_clipping" in the configuration': "clip_fp32_gradients",
    "pass torch.compile(model) to initialize, or call engine.compile() in stages 0 to 2": (
        "is_compiled is_deepcompile_active is_deepcompile_enabled register_compile_pass get_compile_time "
        "get_autosp_backend get_autotp_backend get_deepcompile_backend get_deepspeed_compile_backend"
    ),
    "let the data set or its sampler choose, and pass it as training_data=": (
        "curriculum_learning_enabled curriculum_learning_config data_efficiency_enabled data_efficiency_config "
        "data_sampling_enabled data_sampling_config random_ltd_enabled random_ltd_config random_ltd_initialize "
        "set_custom_curriculum_learning_schedule set_data_post_process_func"
    ),
    _OFFLOAD: "offload_states reload_states",
    "engine.get_data_types() has what the model runs in, and what gradients are added up in": (
        "bf16_master_weights_and_gradients bf16_optimizer_states fp16_master_weights_and_gradients "
        "torch_autocast_enabled torch_autocast_dtype torch_autocast_lower_precision_safe_modules"
    ),
    _TIMES: "get_wall_clock_timers print_forward_breakdown timers",
    "try values one by one under dsprof run, which says what each of them changed": (
        "autotuning_enabled autotuning_metric autotuning_metric_path autotuning_model_info_path "
        "autotuning_profile_model_info autotuning_start_profile_step autotuning_end_profile_step"
    ),
    "experts are trained like all parameters: engine.load_checkpoint loads them, too": "load_moe_state_dict",
    "engine.config has the configuration, section by section": (
        "aio_config dynamic_loss_scale_args flops_profiler_detailed flops_profiler_module_depth "
        "flops_profiler_output_file flops_profiler_profile_step flops_profiler_top_modules get_optimizer_configuration "
        "tensor_parallel_config"
    ),
    "engine.get_mom() has momenta and betas, engine.get_lr() the learning rates": "get_type",
    "engine.optimizer is the optimizer": "client_optimizer basic_optimizer",
    "engine.save_checkpoint writes through torch.distributed.checkpoint": "checkpoint_engine",
    "engine.load_checkpoint reads a checkpoint at any number of ranks and any stage": "load_universal_checkpoint",
    'write "tensorboard" or "csv_monitor" in the configuration': "monitor",
})  # fmt: skip
"""Of any engine."""

PIPELINE_ENGINE: Final = by_name({
    _LOSSES: "agg_additional_losses total_additional_losses",
    _TIMES: "batch_timer",
    "train_batch returns the mean over all replicas, on every rank": "dp_group_loss",
    "print where engine.stage_id and engine.grid.get_data_parallel_id() are those you want": "log_for_device tput_log",
    "write deepspeed.runtime.utils.see_memory_usage(message, force=True)": "mem_status",
    "engine.plan.actions has what each rank does in a step, in order": "num_pipe_buffers pipe_buffers",
    "train_batch returns the mean loss, and engine.agg_train_loss keeps it": "total_loss",
})  # fmt: skip
"""Of PipelineEngine besides."""

PIPELINE_MODULE: Final = by_name({
    _CHECKPOINTS: "ckpt_layer_path ckpt_layer_path_list ckpt_prefix load_state_dir save_state_dict",
    "train_batch sums the gradients of layers of one TiedLayerSpec key: leave it out": (
        "allreduce_tied_weight_gradients get_tied_weights_and_groups tied_comms tied_weight_attrs"
    ),
    "module.forward_funcs has the layers that are here, module.stage_owner(n) says who has layer n": "fwd_map",
    _LOSSES: "get_additional_losses",
})  # fmt: skip
"""Of PipelineModule."""
