"""Pipelines: a model's layers divided among ranks, which work on several micro-batches at a time.

layers          layers as a script gives them, to be built where they are needed
module          which layers are here, and their calls
topology        where ranks are, by DeepSpeed's names, and which layers they have
p2p             activations and gradients between stages
split_backward  weight gradients put off, for zero-bubble schedules
step_data       the micro-batches that a step reads
runtime         a plan, executed
failure         whether it failed anywhere, on all ranks
layer_costs     what each layer takes
"""

from .layers import LayerSpec, TiedLayerSpec
from .module import PipelineModule
from .p2p import PipelineError
from .topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

__all__ = [
    "LayerSpec", "PipeDataParallelTopology", "PipeModelDataParallelTopology", "PipelineError", "PipelineModule",
    "ProcessTopology", "TiedLayerSpec",
]  # fmt: skip
