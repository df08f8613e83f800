"""The whole configuration: the top-level keys, and the sections below them."""

from __future__ import annotations

import math

from pydantic import Field, PrivateAttr, field_validator

from .checkpointing import ActivationCheckpointingConfig, CheckpointConfig
from .debugging import CommsLoggerConfig, CsvMonitorConfig, FlopsProfilerConfig, TensorBoardConfig
from .model import TO_BE_SOLVED, DataType, Number, Section, Whole
from .optimizer import OptimizerConfig
from .parallel import PipelineConfig, TensorParallelConfig
from .precision import Bf16Config, DataTypesConfig, Fp16Config
from .scheduler import SchedulerConfig
from .zero import AioConfig, ZeroConfig


class Config(Section):
    """Of the three batch sizes it is enough to give one or two: they satisfy `train_batch_size` =
    `train_micro_batch_size_per_gpu` x `gradient_accumulation_steps` x data-parallel ranks."""

    train_batch_size: Whole = Field(default=TO_BE_SOLVED, gt=0)
    """Samples in an optimizer step, over all ranks. Default: solved from the other two."""

    train_micro_batch_size_per_gpu: Whole = Field(default=TO_BE_SOLVED, gt=0)
    """Samples a rank takes in one forward pass. Default: solved from the other two."""

    gradient_accumulation_steps: Whole = Field(default=TO_BE_SOLVED, gt=0)
    """Forward and backward passes of a rank in an optimizer step. Default: solved from the other two, else 1."""

    steps_per_print: Whole | None = Field(default=None, gt=0)
    """Optimizer steps between lines on rank 0 that tell of step, learning rate and throughput. Infinity, as Accelerate
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
    """In what type gradients travel. Default: the type they have."""

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
    """Layers cut over ranks."""

    pipeline: PipelineConfig = PipelineConfig()
    """Layers divided into stages."""

    _warnings: list[str] = PrivateAttr(default_factory=list)

    @field_validator("steps_per_print", mode="before")
    @classmethod
    def _never(cls, value: object) -> object:
        return None if value == math.inf else value

    @property
    def warnings(self) -> list[str]:
        """What the user should know of the configuration: keys without effect, old names. Each begins with the key."""
        return self._warnings
