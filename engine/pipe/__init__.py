"""Pipelines: a model's layers divided among ranks, which work on several micro-batches at a time.

layers.py    layers to be built where they are needed
module.py    the row of layers, and which of them are here
grid.py      where a rank is, by DeepSpeed's names
topology.py  DeepSpeed's names for the ranks of a grid
transfer.py  activations and gradients between stages
deferral.py  weight gradients put off, for zero-bubble schedules
run.py       a plan, executed
engine.py    the engine of a pipeline
"""

from .layers import LayerSpec, TiedLayerSpec
from .module import PipelineModule
from .topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology
from .transfer import PipelineError

__all__ = [
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineError",
    "PipelineModule",
    "ProcessTopology",
    "TiedLayerSpec",
]
