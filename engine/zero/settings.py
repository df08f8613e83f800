"""What ZeRO is to do, as one object that all of it reads."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from ..optim.loss_scaler import DTYPES

if TYPE_CHECKING:
    from ..config import Config


@dataclass(frozen=True, slots=True)
class ZeroSettings:
    """Sizes in elements, names and meaning as in DeepSpeed's configuration."""

    stage: int = 0
    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    overlap_comm: bool = True
    reduce_scatter: bool = True
    contiguous_gradients: bool = True
    allgather_partitions: bool = True
    round_robin_gradients: bool = False
    ignore_unused_parameters: bool = True
    stage3_param_persistence_threshold: int = 100_000
    stage3_model_persistence_threshold: int = 2**63 - 1
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000
    sparse_gradients: bool = False
    communication_dtype: torch.dtype | None = None
    """What gradients travel in; their own by default."""
    accumulate_dtype: torch.dtype | None = None
    """In what micro-batches are summed: by default the masters' dtype, fp32 for half precisions, in every stage."""
    prescale_gradients: bool = False
    gradient_predivide_factor: float = 1.0

    @classmethod
    def of(cls, config: Config) -> ZeroSettings:
        """What the configuration says."""
        zero = config.zero_optimization
        alike = {field.name for field in fields(cls)}.intersection(type(zero).model_fields)
        return cls(
            **{name: getattr(zero, name) for name in alike},
            sparse_gradients=config.sparse_gradients,
            communication_dtype=DTYPES.get(config.communication_data_type or ""),
            accumulate_dtype=DTYPES.get(config.data_types.grad_accum_dtype or ""),
            prescale_gradients=config.prescale_gradients,
            gradient_predivide_factor=config.gradient_predivide_factor,
        )
