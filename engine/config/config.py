"""The whole configuration: the top-level keys, and the short sections below them: precision and checkpoints."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, field_validator

from .debugging import CommsLoggerConfig, CsvMonitorConfig, FlopsProfilerConfig, TensorBoardConfig
from .model import TO_BE_SOLVED, DataType, Number, Section, Whole
from .optimizer import OptimizerConfig
from .parallel import (
    ContextParallelConfig,
    HeterogeneousConfig,
    PipelineConfig,
    TensorParallelConfig,
    divide,
    replica_memory,
    replica_speeds,
)
from .scheduler import SchedulerConfig
from .zero import AioConfig, ZeroConfig


class Fp16Config(Section):
    """Weights and computation in fp16, master weights in fp32, and the loss scaled so that small gradients survive."""

    enabled: bool = False
    """Train in fp16."""

    auto_cast: bool = False
    """Cast floating-point inputs of the model to fp16."""

    loss_scale: Number = Field(default=0.0, ge=0)
    """A fixed factor for the loss; 0 finds it as training goes, by the keys below."""

    initial_scale_power: Whole = Field(default=16, ge=0, le=127)
    """The dynamic scale begins at 2 to this power."""

    loss_scale_window: Whole = Field(default=1000, ge=1)
    """Steps without overflow after which the dynamic scale doubles."""

    hysteresis: Whole = Field(default=2, ge=1)
    """The dynamic scale is halved at the overflow with this number; each overflow skips its step."""

    consecutive_hysteresis: bool = False
    """A step without overflow restores the hysteresis; false: only the doubling of the scale does."""

    min_loss_scale: Number = Field(default=1.0, gt=0)
    """The dynamic scale never falls below this; an overflow there is an error."""


class Bf16Config(Section):
    """Weights and computation in bf16, master weights in fp32. The range is that of fp32: no loss scale."""

    enabled: bool = False
    """Train in bf16."""

    check_grad_overflow: bool = True
    """Skip a step whose gradient norm is not finite; false takes it."""


class Fp8Config(Section):
    """dsprof's own. Products of linear layers in float8; weights, gradients, the optimizer and checkpoints stay as they
    are."""

    enabled: bool = False
    """Compute linear layers in float8, on CPUs and on CUDA devices of capability 8.9 and above. CPUs are slower in it:
    there it shows what float8 does to a loss."""

    recipe: Literal["tensorwise", "rowwise"] = "tensorwise"
    """`tensorwise`: one scale for a tensor, e4m3, and e5m2 for gradients, the faster; `rowwise`: one scale for each row
    of what is multiplied, e4m3 throughout, the more exact."""

    filter: Literal["auto", "all"] | tuple[str, ...] = "auto"
    """Which layers: `auto`, those that are faster by it, as their shapes and the device's rates tell; `all`; or names,
    with `*` for any text between dots, as `layers.*.mlp.up`. Sizes that do not divide by 16 stay as they are."""

    skip: tuple[str, ...] = ()
    """Names of layers that stay as they are, whatever `filter` says, as `lm_head`."""


class DataTypesConfig(Section):
    """Types that do not follow from `fp16` and `bf16`."""

    grad_accum_dtype: DataType | None = None
    """In what the gradients of several micro-batches are added up on each rank, in every stage. Default: fp32, which
    takes 4 bytes for each gradient that is kept between micro-batches. Over the ranks they are summed in the type in
    which they travel (`communication_data_type`)."""


class ActivationCheckpointingConfig(Section):
    """Activations computed again in the backward pass instead of being kept. DeepSpeed leaves it to the model to call
    `checkpointing.checkpoint`, which works here too; `policy` applies it to a model that does not."""

    cpu_checkpointing: bool = False
    """Keep what recomputation begins with, the checkpoints themselves, in host memory."""

    policy: Literal["none", "full", "every_k", "selective"] = "none"
    """dsprof's own. What the engine wraps by itself: `none`; `full`, every block; `every_k`, one block in `every`;
    `selective`, all but the results that cost most to compute, such as those of matrix products and attention."""

    every: Whole = Field(default=2, ge=1)
    """dsprof's own. With `every_k`: one block in so many is recomputed."""

    blocks: tuple[str, ...] | None = None
    """dsprof's own. Names of the blocks that `policy` is about, with `*` for any text, as `layers.*`. Default: the
    largest list of modules of one kind in the model."""


class CheckpointConfig(Section):
    """How `save_checkpoint` and `load_checkpoint` behave."""

    tag_validation: Annotated[
        Literal["Ignore", "Warn", "Fail"],
        BeforeValidator(lambda value: value.capitalize() if isinstance(value, str) else value),
    ] = "Warn"
    """Whether all ranks gave `save_checkpoint` the same tag: do not look, warn, or fail. In upper or lower case."""


class Config(Section):
    """Of the three batch sizes it is enough to give one or two: they satisfy `train_batch_size` =
    `train_micro_batch_size_per_gpu` x `gradient_accumulation_steps` x data-parallel ranks, of which those that share
    sequences count as one."""

    train_batch_size: Whole = Field(default=TO_BE_SOLVED, gt=0)
    """Samples in an optimizer step, over all ranks. Default: solved from the other two."""

    train_micro_batch_size_per_gpu: Whole = Field(default=TO_BE_SOLVED, gt=0)
    """Samples a rank takes in one forward pass. Default: solved from the other two."""

    gradient_accumulation_steps: Whole = Field(default=TO_BE_SOLVED, gt=0)
    """Forward and backward passes of a rank in an optimizer step. Default: solved from the other two, else 1."""

    steps_per_print: Whole | None = Field(default=None, gt=0)
    """Optimizer steps between lines on rank 0 with step, learning rate and throughput. Infinity, as Accelerate
    writes it: none. Default: no lines."""

    optimizer: OptimizerConfig | None = None
    """The optimizer, unless the script passes its own."""

    scheduler: SchedulerConfig | None = None
    """How the learning rate changes, unless the script passes its own schedule."""

    gradient_clipping: Number = Field(default=1.0, ge=0)
    """Gradients are scaled down to this global norm; 0 leaves them as they are."""

    prescale_gradients: bool = False
    """Divide gradients by the number of ranks before they are summed up, which avoids overflow in fp16; false:
    afterwards."""

    gradient_predivide_factor: Number = Field(default=1.0, gt=0)
    """Divide gradients by this before they are summed up and by the rest afterwards, where they are not prescaled."""

    sparse_gradients: bool = False
    """Gradients of `torch.nn.Embedding(sparse=False)` too travel as the rows that were used, not as the whole table.
    DeepSpeed has removed it."""

    communication_data_type: DataType | None = None
    """In what type gradients travel, and are summed over the ranks. Default: the type that is trained in."""

    zero_allow_untested_optimizer: bool = False
    """With ZeRO, take an optimizer of the script's that is not known to treat each element by itself."""

    dataloader_drop_last: bool = False
    """Drop the last batch of an epoch where it is not full."""

    dump_state: bool = False
    """Print this configuration, as it was understood, on rank 0 at the start."""

    wall_clock_breakdown: bool = False
    """Print how long forward, backward, their communication and the step took, on rank 0."""

    memory_breakdown: bool = False
    """Print memory in use, and its peak, around forward, backward and step, on rank 0."""

    zero_optimization: ZeroConfig = ZeroConfig()
    """What is sharded over the data-parallel ranks."""

    fp16: Fp16Config = Fp16Config()
    """Training in fp16."""

    bf16: Bf16Config = Bf16Config()
    """Training in bf16. `bfloat16` is taken too."""

    fp8: Fp8Config = Fp8Config()
    """dsprof's own. Linear layers in float8."""

    data_types: DataTypesConfig = DataTypesConfig()
    """Types that do not follow from `fp16` and `bf16`."""

    activation_checkpointing: ActivationCheckpointingConfig = ActivationCheckpointingConfig()
    """Activations computed again instead of kept."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints on disk."""

    aio: AioConfig = AioConfig()
    """Reading and writing of offloaded states."""

    comms_logger: CommsLoggerConfig = CommsLoggerConfig()
    """A table of communications."""

    flops_profiler: FlopsProfilerConfig = FlopsProfilerConfig()
    """A table of floating-point operations."""

    tensorboard: TensorBoardConfig = TensorBoardConfig()
    """Curves for TensorBoard."""

    csv_monitor: CsvMonitorConfig = CsvMonitorConfig()
    """Curves as CSV."""

    tensor_parallel: TensorParallelConfig = TensorParallelConfig()
    """Layers sharded over ranks."""

    sequence_parallel_size: Whole = Field(default=1, ge=1)
    """Ranks that share each sequence, and so the memory of its activations. They read the same data, which
    `engine.shard_sequence` divides among them."""

    context_parallel: ContextParallelConfig = ContextParallelConfig()
    """How they compute its attention."""

    pipeline: PipelineConfig = PipelineConfig()
    """Layers divided into stages."""

    heterogeneous: HeterogeneousConfig = HeterogeneousConfig()
    """Ranks of unequal speed or memory."""

    _warnings: list[str] = PrivateAttr(default_factory=list)

    @field_validator("steps_per_print", mode="before")
    @classmethod
    def _never(cls, value: object) -> object:
        return None if value == math.inf else value

    def shares(self, world_size: int) -> list[int]:
        """Samples of a micro-batch that each data-parallel replica gets, in a job of `world_size` ranks. They are equal
        where no speeds are known."""
        speeds = self.heterogeneous.speeds
        whole = self.train_batch_size // self.gradient_accumulation_steps
        if isinstance(speeds, tuple):
            return divide(whole, replica_speeds(speeds, self.pipeline.stages, self.tensor_parallel.size))
        replicas = replicas_of(self, world_size)
        return [whole // replicas] * replicas

    def unequal_shares(self, world_size: int) -> list[int] | None:
        """`shares`, where they differ; None where all replicas get as many."""
        found = self.shares(world_size)
        return found if len(set(found)) > 1 else None

    def memory_of_ranks(self, ranks: int) -> list[float]:
        """What each of so many data-parallel ranks holds of the state that is sharded, beside the others."""
        memory = self.heterogeneous.memory
        if isinstance(memory, tuple):
            return replica_memory(memory, self.pipeline.stages, self.tensor_parallel.size)
        return [1.0] * ranks

    def held_share(self, rank: int, world_size: int) -> float | None:
        """What part of the state that is sharded a rank of the job holds, at most 1; None where that is not known, as
        of memory that is measured at the start, or where no rank has any."""
        memory = self.heterogeneous.memory
        if memory is not None and (memory == "measure" or len(memory) != world_size):
            return None
        parts = self.memory_of_ranks(data_parallel_ranks(self, world_size))
        return parts[rank // self.tensor_parallel.size % len(parts)] / sum(parts) if any(parts) else None

    @property
    def trained_type(self) -> DataType:
        """What the model runs in."""
        return "fp16" if self.fp16.enabled else "bf16" if self.bf16.enabled else "fp32"

    @property
    def accumulation_type(self) -> DataType:
        """What the gradients of several micro-batches are added up in."""
        return self.data_types.grad_accum_dtype or "fp32"

    @property
    def communication_type(self) -> DataType:
        """What gradients travel in, and are summed over the ranks in."""
        return self.communication_data_type or self.trained_type

    @property
    def warnings(self) -> list[str]:
        """What the user should know of the configuration: keys without effect, old names. Each begins with the key."""
        return self._warnings


def data_parallel_ranks(config: Config, world_size: int) -> int:
    """Ranks that hold the same part of the model, and average gradients, at least 1."""
    return max(1, world_size // (config.tensor_parallel.size * config.pipeline.stages))


def replicas_of(config: Config, world_size: int) -> int:
    """Of these, sets that read data of their own: a rank each, or ranks that share sequences. At least 1."""
    return max(1, data_parallel_ranks(config, world_size) // config.sequence_parallel_size)
