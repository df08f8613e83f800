"""`zero_optimization`: what is sharded over the data-parallel ranks, in what buckets it travels, and what lies in host
memory or files; `aio`: how these are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from .model import LARGEST, TO_BE_SOLVED, Number, Section, Whole, whole

Device = Annotated[Literal["none", "cpu", "nvme"], BeforeValidator(lambda value: "none" if value is None else value)]


class OffloadConfig(Section):
    """What is not in use lies elsewhere than on the device."""

    device: Device = "none"
    """`cpu`: host memory; `nvme`: files below `nvme_path`; `none`: they stay on the device."""

    nvme_path: Path | None = None
    """Folder for the files, on each machine's own disk. Needed with `nvme`."""

    pin_memory: bool = True
    """Host memory is page-locked where there is a GPU, which copies need to be fast and to overlap."""


class OffloadParamConfig(OffloadConfig):
    """Parameters that are not in use lie in host memory or in files (stage 3)."""

    buffer_count: Whole = Field(default=5, ge=1)
    """Buffers that reads from and writes to files pass through (nvme)."""

    buffer_size: Whole = Field(default=100_000_000, ge=1)
    """Elements in each of these buffers (nvme). A larger shard passes through in parts."""

    max_in_cpu: Whole = Field(default=1_000_000_000, ge=0)
    """Elements kept in host memory although they belong on disk, so that they need no reading (nvme)."""


class OffloadOptimizerConfig(OffloadConfig):
    """The optimizer's states lie in host memory or in files, and the step is computed on the CPU (stages 1 to 3)."""

    buffer_count: Whole = Field(default=4, ge=1)
    """Tiles of states held in host memory at once (nvme). Reading ahead and writing behind take one each."""

    pipeline_read: bool = False
    """Read the next tile's states while the current one is updated (nvme)."""

    pipeline_write: bool = False
    """Write the last tile's states while the next one is updated (nvme)."""

    fast_init: bool = False
    """Begin without writing zeros: a tile's files come into being when it is first updated (nvme)."""

    ratio: Number = Field(default=1.0, ge=0, le=1)
    """Share of the elements whose states are offloaded; the rest is updated on the device (cpu)."""


class AioConfig(Section):
    """How files of offloaded states are read and written."""

    block_size: Whole = Field(default=1_048_576, ge=512, multiple_of=512)
    """Bytes in one request."""

    queue_depth: Whole = Field(default=8, ge=1)
    """Requests under way at once for one file."""

    intra_op_parallelism: Whole = Field(default=1, ge=1)
    """Threads that share the requests."""


class ZeroConfig(Section):
    """ZeRO: states, gradients and parameters sharded over the data-parallel ranks. Sizes are numbers of elements, not
    bytes. Every parameter is divided into equal shards, one a rank; the sizes below say only how shards are batched
    into communications, so they can change at any time and checkpoints do not depend on them."""

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(whole)] = 0
    """What is sharded: 0 nothing, 1 the optimizer's states, 2 gradients too, 3 parameters too."""

    contiguous_gradients: bool = True
    """Copy gradients into the bucket's buffer as backward produces them, instead of packing them when it is full."""

    reduce_scatter: bool = True
    """Reduce gradients by reduce-scatter, so that a rank receives its own shard only; false: all-reduce."""

    reduce_bucket_size: Whole = Field(default=500_000_000, gt=0)
    """Elements of gradient reduced in one communication. Smaller buckets start earlier, larger ones cost less each."""

    allgather_partitions: bool = True
    """After a step, collect updated parameters by all-gather; false: by a broadcast from each rank."""

    allgather_bucket_size: Whole = Field(default=500_000_000, ge=0)
    """Elements collected in one communication after a step; 0 takes each parameter by itself."""

    overlap_comm: bool = Field(default=TO_BE_SOLVED, validate_default=True)
    """Reduce gradients beside the backward pass that goes on, instead of stopping it. Default: true in stage 3, else
    false."""

    offload_param: OffloadParamConfig | None = None
    """Where parameters live while they are not in use (stage 3)."""

    offload_optimizer: OffloadOptimizerConfig | None = None
    """Where the optimizer's states live and its step is computed (stages 1 to 3)."""

    sub_group_size: Whole = Field(default=1_000_000_000, ge=0)
    """Elements that the optimizer updates at a time; 0 takes each parameter by itself. With offloading it bounds the
    memory of a step, and the tiles are what reading and writing overlap with."""

    stage3_prefetch_bucket_size: Whole = Field(default=50_000_000, ge=0)
    """Elements of parameters fetched ahead of their use; 0 fetches each module when it begins."""

    stage3_param_persistence_threshold: Whole = Field(default=100_000, ge=0)
    """Parameters with at most so many elements stay whole on every rank, which saves many small communications."""

    stage3_model_persistence_threshold: Whole = Field(default=LARGEST, ge=0)
    """At most so many elements stay whole because of the threshold above."""

    stage3_max_live_parameters: Whole = Field(default=1_000_000_000, ge=0)
    """At most so many fetched elements are held at once; prefetching waits rather than exceed it."""

    stage3_max_reuse_distance: Whole = Field(default=1_000_000_000, ge=0)
    """A parameter that is used again within so many elements is kept instead of released and fetched again."""

    stage3_gather_16bit_weights_on_model_save: bool = False
    """`save_16bit_model` collects the sharded weights and writes them whole."""

    ignore_unused_parameters: bool = True
    """Parameters without a gradient are passed over; false makes them an error that names them."""

    round_robin_gradients: bool = False
    """Rotate which rank owns which shard from parameter to parameter, so that remainders and work spread evenly."""

    zero_hpz_partition_size: Whole = Field(default=1, ge=1)
    """Ranks in the group within which a second copy of the parameters is sharded, so that backward fetches stay
    inside it: usually the GPUs of a machine. 1 keeps no second copy (stage 3)."""

    zero_quantized_weights: bool = False
    """ZeRO++'s qwZ: parameters are gathered in int8, each 256 elements with a scale of their own: half of what bf16
    takes. Shards, masters and checkpoints stay as they are (stage 3)."""

    zero_quantized_gradients: bool = False
    """ZeRO++'s qgZ: gradients of matrices are reduced in int4 by an all-to-all, within machines first where there are
    several, which takes a quarter of what bf16 does. Each 256 elements have a scale of their own (stages 1 to 3)."""

    @field_validator("overlap_comm", mode="before")
    @classmethod
    def _as_the_stage_has_it(cls, value: Any, info: ValidationInfo) -> Any:
        return info.data.get("stage") == 3 if value is None else value
