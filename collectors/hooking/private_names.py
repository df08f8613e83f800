"""The private names of torch, and of frameworks, that dsprof uses: where each is, which collectors use it, and what a
user loses without it. They may go with any release. `private.py` looks them up; nothing else names one of a module.

A name is `module:attribute`, of a class `module:Class.attribute`. What is public by its name and lies in a private
module is in here, too. `tests/test_private_names.py` holds the table against the collectors' source, and takes each
name away.
"""

from __future__ import annotations

from typing import Final, NamedTuple

CUDA: Final = "cuda"
"""Only a torch that was built with CUDA has it."""


class PrivateName(NamedTuple):
    """path: as above; collectors: as `catalogue` names them, or `arming`, before a capture opens; lost: in a sentence;
    decisive: without it the collectors record nothing that they are judged by, as if they were switched off; build:
    which torch has it, empty: every one."""

    path: str
    collectors: tuple[str, ...]
    lost: str
    decisive: bool = False
    build: str = ""

    @property
    def name(self) -> str:
        """As a user would write it."""
        return self.path.replace(":", ".")

    @property
    def package(self) -> str:
        return self.path.partition(".")[0]


C10D: Final = "torch.distributed.distributed_c10d"
PIPELINING: Final = "torch.distributed.pipelining"
FSDP2: Final = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
DEEPSPEED: Final = "deepspeed.runtime.engine"
PIPELINE_ENGINE: Final = "deepspeed.runtime.pipe.engine"
STAGE_3: Final = "deepspeed.runtime.zero.parameter_offload"
STAGES_1_AND_2: Final = "deepspeed.runtime.zero.stage_1_and_2"

COMMUNICATION: Final = ("collectives",)
_NO_CHUNKS: Final = "of the micro-batches of torch's pipelines the {} are not recorded"
_NO_SCHEDULE: Final = "how torch's pipelines are set up is not known"
_NO_TARGETS: Final = "without the native helper, which collective a wait_tensor waits for is not known"
_NO_PYTHON_KERNELS: Final = "without the native helper, collectives are not recorded"
_NO_HISTORY: Final = "at --level full the allocation history of CUDA is not recorded"
_NO_OTHERS: Final = "--deep profiles nothing, as it could not see a torch.profiler of the job's own"
_COMPILED: Final = "torch.compile traces through dsprof's hooks, which splits compiled graphs"
_NO_PARTS: Final = "what memory is for (parameters, gradients, optimizer states) is not known"

_NO_MODULES_OF_ZERO: Final = (
    "what DeepSpeed's stage 3 works for the parameters of modules is not told apart from what these compute"
)
_NO_BUCKETS_OF_ZERO: Final = (
    "what DeepSpeed's stages 1 and 2 work for a bucket of gradients is not told apart from computing"
)

NAMES: Final = (
    # --- the training loop
    PrivateName("torch.autograd:_engine_run_backward", ("phases",), "backward passes are not recorded", True),
    PrivateName(
        "torch.autograd.graph:_engine_run_backward",
        ("phases",),
        "backward passes that do not begin in torch.autograd.backward or grad are not recorded",
    ),
    PrivateName(
        "torch.utils.data.dataloader:_BaseDataLoaderIter",
        ("arming", "phases"),
        "waiting for the DataLoader is not recorded",
        True,
    ),
    PrivateName(
        "torch._C:_current_graph_task_id",
        ("collectives", "modules", "optimizers"),
        "each optimizer that steps in backward ends a step; without the native helper, blocks that are computed again "
        "in backward count as forward, and the end of DDP's backward is not measured",
    ),
    PrivateName(
        "torch._C:_get_tracing_state", ("modules",), "at --level full the number of samples in a batch is not known"
    ),
    PrivateName(
        "torch.utils.checkpoint:_checkpoint_without_reentrant_generator",
        ("activation-checkpoints",),
        "which lines of the script have activations computed again in backward is not known",
    ),
    PrivateName("torch._dynamo.callback:callback_handler", ("compilation",), "compilations are not recorded", True),
    PrivateName(
        "torch._dynamo.utils:get_compilation_metrics",
        ("compilation",),
        "of what torch.compile compiles again it is not told which function it is, and which guard failed",
    ),
    PrivateName(
        "torch._C:_get_privateuse1_backend_name",
        ("collectives",),
        "without the native helper, a job on the device of a plugin of torch's is not told from one on the CPU",
    ),
    PrivateName("torch._C._dynamo.eval_frame:set_code_exec_strategy", ("arming",), _COMPILED),
    PrivateName("torch._C._dynamo.eval_frame:_FrameExecStrategy", ("arming",), _COMPILED),
    PrivateName("torch._C._dynamo.eval_frame:_FrameAction", ("arming",), _COMPILED),
    # --- communication
    PrivateName(
        f"{C10D}:_get_default_store",
        ("arming",),
        "ranks that were not started by `dsprof run` write into a run folder each",
    ),
    PrivateName(
        "torch._C._distributed_c10d:_SymmetricMemory",
        COMMUNICATION,
        "a job that communicates through symmetric memory is judged as if dsprof saw that",
    ),
    PrivateName(f"{C10D}:_world.pg_map", ("process-groups",), "process groups are not known, but for the default one"),
    PrivateName(
        f"{C10D}:_world.pg_names", ("process-groups",), "process groups are not known, but for the default one"
    ),
    PrivateName(
        f"{C10D}:_world.pg_group_ranks", ("process-groups",), "process groups are not known, but for the default one"
    ),
    PrivateName(
        "torch.distributed:Work._get_op_type",
        COMMUNICATION,
        "waits whose collective is not known have no name but `wait`",
    ),
    PrivateName("torch._C:Future", COMMUNICATION, "waits for the futures of collectives are not recorded"),
    PrivateName(
        "torch.distributed:Reducer._run_comm_hook",
        COMMUNICATION,
        "waits of DDP for a rank that has run out of input (join) are not recorded",
    ),
    PrivateName(
        "torch.distributed:Reducer._rebuild_buckets",
        COMMUNICATION,
        "waits of DDP as it orders its buckets, in the second step, are not recorded",
    ),
    PrivateName(
        "torch.distributed:_broadcast_coalesced",
        COMMUNICATION,
        "waits of DDP for the broadcast of its buffers are not recorded",
    ),
    PrivateName(
        "torch.distributed:_verify_params_across_processes",
        COMMUNICATION,
        "waits of DDP as it is made are not recorded",
    ),
    PrivateName(
        "torch.distributed:ProcessGroup._start_coalescing",
        COMMUNICATION,
        "collectives that the backend coalesces seem to begin before they do",
    ),
    PrivateName(
        "torch.distributed:ProcessGroup._end_coalescing",
        COMMUNICATION,
        "waits for collectives that the backend coalesces are of no known collective",
    ),
    PrivateName(
        "torch.distributed:ProcessGroup._get_backend",
        COMMUNICATION,
        "without the native helper, collectives on gloo end where the script has waited for them",
    ),
    PrivateName("torch._C:_dispatch_keyset_full_after", COMMUNICATION, _NO_PYTHON_KERNELS),
    PrivateName("torch._C:DispatchKey", COMMUNICATION, _NO_PYTHON_KERNELS),
    PrivateName("torch._ops:OpOverload._schema", COMMUNICATION, _NO_PYTHON_KERNELS),
    PrivateName(
        "torch._C:_dispatch_get_all_op_names",
        COMMUNICATION,
        "without the native helper, waits for functional collectives are not recorded",
    ),
    PrivateName(
        "torch.ops:_c10d_functional.wait_tensor", COMMUNICATION, "waits for functional collectives are not recorded"
    ),
    PrivateName(
        "torch.library:Library._destroy",
        COMMUNICATION,
        "collectives of a capture by the native helper that follows one in Python are not recorded",
    ),
    PrivateName(
        "torch.autograd:Variable._execution_engine",
        COMMUNICATION,
        "without the native helper, the end of DDP's backward is not measured",
    ),
    PrivateName(
        "torch._C:_current_autograd_node",
        COMMUNICATION,
        "without the native helper, the end of the backward of a DDP with a static graph is not measured",
    ),
    PrivateName("torch:UntypedStorage._cdata", ("collectives", "memory"), f"{_NO_PARTS}; {_NO_TARGETS}"),
    PrivateName("torch:UntypedStorage._weak_ref", COMMUNICATION, _NO_TARGETS),
    PrivateName("torch:UntypedStorage._free_weak_ref", COMMUNICATION, _NO_TARGETS),
    PrivateName("torch:UntypedStorage._expired", COMMUNICATION, _NO_TARGETS),
    PrivateName(f"{FSDP2}:FSDPParamGroup", ("sharding",), "how FSDP2 divides the model is not known", True),
    PrivateName(f"{FSDP2}:FSDPParamGroup.pre_forward", ("sharding",), "what FSDP2 does before forward is not recorded"),
    PrivateName(f"{FSDP2}:FSDPParamGroup.post_forward", ("sharding",), "what FSDP2 does after forward is not recorded"),
    PrivateName(
        f"{FSDP2}:FSDPParamGroup.pre_backward", ("sharding",), "what FSDP2 does before backward is not recorded"
    ),
    PrivateName(
        f"{FSDP2}:FSDPParamGroup.post_backward", ("sharding",), "what FSDP2 does after backward is not recorded"
    ),
    PrivateName(f"{FSDP2}:foreach_all_gather", ("sharding",), "FSDP2's gathers are not known to be of parameters"),
    PrivateName(f"{FSDP2}:foreach_reduce", ("sharding",), "FSDP2's reductions are not known to be of gradients"),
    PrivateName(
        "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel._handle",
        ("sharding",),
        "how FSDP1 divides the model is not known",
    ),
    PrivateName(
        "torch.distributed.fsdp._flat_param:FlatParameter._numels",
        ("sharding",),
        "how FSDP1 divides the model is not known",
    ),
    PrivateName(
        "torch.distributed.tensor.parallel.style:ParallelStyle._apply",
        ("tensor-parallelism",),
        "which process groups are for tensor parallelism is not known",
        True,
    ),
    # --- pipelines
    PrivateName(
        f"{PIPELINING}.stage:_PipelineStageBase",
        ("pipelining",),
        "the micro-batches of torch's pipelines are not recorded",
        True,
    ),
    PrivateName(
        f"{PIPELINING}.stage:_PipelineStageBase.forward_one_chunk", ("pipelining",), _NO_CHUNKS.format("forwards")
    ),
    PrivateName(
        f"{PIPELINING}.stage:_PipelineStageBase.backward_one_chunk", ("pipelining",), _NO_CHUNKS.format("backwards")
    ),
    PrivateName(
        f"{PIPELINING}.stage:_PipelineStageBase.backward_weight_one_chunk",
        ("pipelining",),
        _NO_CHUNKS.format("backwards of the weights alone"),
    ),
    PrivateName(f"{PIPELINING}.schedules:PipelineScheduleSingle._stage", ("pipelining",), _NO_SCHEDULE),
    PrivateName(f"{PIPELINING}.schedules:PipelineScheduleSingle._num_stages", ("pipelining",), _NO_SCHEDULE),
    PrivateName(f"{PIPELINING}.schedules:PipelineScheduleSingle._n_microbatches", ("pipelining",), _NO_SCHEDULE),
    PrivateName(f"{PIPELINING}.schedules:PipelineScheduleSingle._has_backward", ("pipelining",), _NO_SCHEDULE),
    PrivateName(f"{PIPELINING}.schedules:PipelineScheduleMulti._stages", ("pipelining",), _NO_SCHEDULE),
    PrivateName(f"{PIPELINING}.schedules:PipelineScheduleMulti._num_stages", ("pipelining",), _NO_SCHEDULE),
    PrivateName(f"{PIPELINING}.schedules:PipelineScheduleMulti._n_microbatches", ("pipelining",), _NO_SCHEDULE),
    PrivateName(f"{PIPELINING}.schedules:PipelineScheduleMulti._has_backward", ("pipelining",), _NO_SCHEDULE),
    # --- memory
    PrivateName("torch.nn:Module._parameters", ("memory",), _NO_PARTS),
    PrivateName("torch.nn:Module._buffers", ("memory",), _NO_PARTS),
    PrivateName(
        "torch.distributed.tensor:DTensor._local_tensor",
        ("memory",),
        "parameters, gradients and states that are sharded count with what all ranks have of them",
    ),
    PrivateName("torch.cuda:_lazy_call", ("memory",), _NO_HISTORY),
    PrivateName("torch.cuda.memory:_record_memory_history", ("memory",), _NO_HISTORY),
    PrivateName("torch.cuda.memory:_snapshot", ("memory",), f"{_NO_HISTORY}, nor a snapshot written"),
    PrivateName("torch._C:_cuda_isHistoryEnabled", ("memory",), _NO_HISTORY, build=CUDA),
    PrivateName(
        "torch._C:_cuda_attach_out_of_memory_observer",
        ("memory",),
        "who held the memory when a GPU had none left is not recorded",
        build=CUDA,
    ),
    PrivateName(
        "torch._C:_cuda_getMemoryFraction",
        ("memory",),
        "a limit by set_per_process_memory_fraction is not known",
        build=CUDA,
    ),
    # --- closer looks
    PrivateName(
        "torch._C:_cuda_synchronize", ("host-sync",), "calls of torch.cuda.synchronize are not recorded", build=CUDA
    ),
    PrivateName(
        "torch.profiler:_ExperimentalConfig",
        ("deep",),
        "--deep does not record which of a device's streams waited for which: it is told by their times",
    ),
    PrivateName("torch.autograd.profiler:profile._prepare_trace", ("deep",), _NO_OTHERS),
    PrivateName("torch.autograd.profiler:_run_on_profiler_start", ("deep",), _NO_OTHERS),
    PrivateName("torch.autograd.profiler:_is_profiler_enabled", ("deep",), _NO_OTHERS),
    PrivateName("torch._C._autograd:_profiler_enabled", ("deep",), _NO_OTHERS),
    # --- frameworks
    PrivateName(
        f"{DEEPSPEED}:DeepSpeedEngine._take_model_step", ("deepspeed",), "DeepSpeed's steps are not recorded", True
    ),
    *(
        PrivateName(f"{STAGE_3}:DeepSpeedZeRoOffload{method}", ("deepspeed",), _NO_MODULES_OF_ZERO)
        for method in (
            "",
            ".pre_sub_module_forward_function",
            ".post_sub_module_forward_function",
            ".pre_sub_module_backward_function",
            ".post_sub_module_backward_function",
        )
    ),
    *(
        PrivateName(f"{STAGES_1_AND_2}:DeepSpeedZeroOptimizer{method}", ("deepspeed",), _NO_BUCKETS_OF_ZERO)
        for method in ("", ".reduce_ipg_grads")
    ),
    PrivateName(
        f"{PIPELINE_ENGINE}:PipelineEngine._INSTRUCTION_MAP",
        ("deepspeed",),
        "what DeepSpeed's pipelines execute is not recorded",
    ),
    PrivateName(
        f"{PIPELINE_ENGINE}:PipelineEngine._exec_schedule",
        ("deepspeed",),
        "which micro-batch DeepSpeed's pipelines execute is not known",
    ),
    PrivateName(
        "deepspeed.runtime.pipe.dualpipev:DualPipeVEngine._INSTRUCTION_MAP",
        ("deepspeed",),
        "what DeepSpeed's DualPipeV executes is not recorded",
    ),
    PrivateName(
        "deepspeed.runtime.pipe.dualpipev:DualPipeVEngine._active_phase",
        ("deepspeed",),
        "DeepSpeed's DualPipeV seems to have one stage a rank",
    ),
    PrivateName(
        "transformers.trainer:Trainer._save_checkpoint",
        ("checkpoints",),
        "what a transformers.Trainer does beside writing a checkpoint is not recorded",
    ),
    PrivateName(
        "lightning.fabric.plugins.io.torch_io:_atomic_save",
        ("checkpoints",),
        "Lightning's checkpoints are not recorded",
    ),
    PrivateName(
        "lightning_fabric.plugins.io.torch_io:_atomic_save",
        ("checkpoints",),
        "Lightning's checkpoints are not recorded",
    ),
)
