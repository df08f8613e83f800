"""`zero_optimization`: what is sharded over the data-parallel ranks, and in what pieces it travels."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator

from .model import LARGEST, TO_BE_SOLVED, Section, Whole, whole
from .offload import OffloadOptimizerConfig, OffloadParamConfig


def _stage(value: object) -> int:
    """A whole number, as 2.0 and "2" are too."""
    return whole(value)


class ZeroConfig(Section):
    """ZeRO: states, gradients and parameters sharded over the data-parallel ranks. Sizes are numbers of elements, not
    bytes. Every parameter is cut into equal pieces, one a rank; the sizes below say only how pieces are batched into
    communications, so they can change at any time and checkpoints do not depend on them."""

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(_stage)] = 0
    """What is sharded: 0 nothing, 1 the optimizer's states, 2 gradients too, 3 parameters too."""

    contiguous_gradients: bool = True
    """Copy gradients into the bucket's buffer as backward produces them, instead of packing them when it is full."""

    reduce_scatter: bool = True
    """Reduce gradients by reduce-scatter, so that a rank receives its own pieces only; false: all-reduce."""

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
    """Rotate which rank owns which piece from parameter to parameter, so that remainders and work spread evenly."""

    zero_hpz_partition_size: Whole = Field(default=1, ge=1)
    """Ranks in the group within which a second copy of the parameters is sharded, so that backward fetches stay
    inside it: usually the GPUs of a machine. 1 keeps no second copy (stage 3)."""

    @field_validator("overlap_comm", mode="before")
    @classmethod
    def _as_the_stage_has_it(cls, value: Any, info: ValidationInfo) -> Any:
        return info.data.get("stage") == 3 if value is None else value
