"""Tensor parallelism: layers sharded over ranks that work on the same data.

layers          column, row and vocabulary layers, and batch norms over features that are sharded
attention       nn.MultiheadAttention, by head
collectives     the communications, each with its gradient; cross-entropy over a vocabulary that is sharded
sharding        how one parameter is sharded
shape_override  activations that report another shape
rng             random numbers that agree, or differ, over the ranks
check_data      whether ranks got the same data

What shards a model, in `planner`, stands on these layers; its public names are found here too, when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from .check_data import check_same
from .collectives import VocabularyCrossEntropy, vocabulary_cross_entropy
from .rng import RankStream, same_random_numbers
from .sharding import TensorShard, partial_parameters, shard_of, sharded_parameters

if TYPE_CHECKING:
    from ..planner import Collective, Cost, PlanError, TensorPlan, parallelize, parallelize_pipeline, plan_for

_FORMER: Final = {"TensorCut": TensorShard, "cut_of": shard_of, "cut_parameters": sharded_parameters}
"""Names that these had before."""

__all__ = [
    "Collective", "Cost", "PlanError", "RankStream", "TensorPlan", "TensorShard", "VocabularyCrossEntropy",
    "check_same", "parallelize", "parallelize_pipeline", "partial_parameters", "plan_for", "same_random_numbers",
    "shard_of", "sharded_parameters", "vocabulary_cross_entropy",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _FORMER:
        return _FORMER[name]
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .. import planner  # much code, which most trainings have no use for

    return getattr(planner, name)
