"""How the layers of a model that nobody annotated are sharded over tensor-parallel ranks.

derive            from a model to a plan
example_inputs    made-up inputs for a forward
tracer            one forward of the whole model
dependence        what depends on what in it
solve             the cheapest styles of layers that fit
adapt             modules that read their own shapes
verify            the sharded forward held against the whole one
blocks            the blocks between which activations are sharded along the sequence, and their edges
sequence_parallel where these blocks are, and what is done there in training
stage_tracer, tied_vocab    pipelines: their stages tried, their vocabularies
plan, styles      what a plan is
apply             a plan carried out
"""

from .apply import parallelize
from .derive import plan_for
from .plan import Collective, Cost, TensorPlan
from .styles import PlanError
from .tied_vocab import parallelize_pipeline

__all__ = ["Collective", "Cost", "PlanError", "TensorPlan", "parallelize", "parallelize_pipeline", "plan_for"]
