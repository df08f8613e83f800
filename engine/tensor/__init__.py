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
norm.py       batch norms over features that are cut
sequence.py   activations cut along the sequence
row.py        the same from one stage of a pipeline to the next
ties.py       weights tied across the stages of a pipeline
ops.py        the communications, with their gradients
cut.py        how one parameter is cut
loss.py       cross-entropy over a vocabulary that is cut
rng.py        random numbers that agree, or differ, over the ranks
check_data.py whether ranks got the same data
"""

from .check_data import check_same
from .cut import TensorCut, cut_of, cut_parameters, partial_parameters
from .loss import VocabularyCrossEntropy, vocabulary_cross_entropy
from .parallel import parallelize
from .plan import Collective, Cost, TensorPlan
from .planner import plan_for
from .rng import RankStream, same_random_numbers
from .styles import PlanError
from .ties import parallelize_pipeline

__all__ = [
    "Collective",
    "Cost",
    "PlanError",
    "RankStream",
    "TensorCut",
    "TensorPlan",
    "VocabularyCrossEntropy",
    "check_same",
    "cut_of",
    "cut_parameters",
    "parallelize",
    "parallelize_pipeline",
    "partial_parameters",
    "plan_for",
    "same_random_numbers",
    "vocabulary_cross_entropy",
]
