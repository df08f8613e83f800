"""Tensor parallelism: layers cut over ranks that work on the same data.

parallel.py   from a plan to the cut model
planner.py    from a model to a plan
plan.py       a plan: its table, and what it costs
styles.py     what a plan may say of a layer
roles.py      which layer is cut how, from what depends on what
flow.py       what depends on what
trial.py      running a model on stand-ins
inputs.py     made-up inputs for that
fit.py        what the model's own code has to be told
rehearsal.py  the cut model held against the whole one
told.py       activations that tell code another shape
layers.py     column, row and vocabulary layers
attention.py  nn.MultiheadAttention, cut by head
sequence.py   activations cut along the sequence
ops.py        the communications, with their gradients
cut.py        how one parameter is cut
loss.py       cross-entropy over a vocabulary that is cut
rng.py        random numbers that agree, or differ, over the ranks
check_data.py whether ranks got the same data
"""

from .check_data import check_same
from .cut import TensorCut, cut_of, cut_parameters, partial_parameters
from .loss import vocabulary_cross_entropy
from .parallel import parallelize
from .plan import Collective, Cost, TensorPlan
from .planner import plan_for
from .rng import RankStream, same_random_numbers
from .styles import PlanError

__all__ = [
    "Collective",
    "Cost",
    "PlanError",
    "RankStream",
    "TensorCut",
    "TensorPlan",
    "check_same",
    "cut_of",
    "cut_parameters",
    "parallelize",
    "partial_parameters",
    "plan_for",
    "same_random_numbers",
    "vocabulary_cross_entropy",
]
