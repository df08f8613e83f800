"""Pipelines: a model's layers divided among ranks, which work on several micro-batches at a time.

layers.py    layers to be built where they are needed
given.py     the row of them, as a script gives it
agreement.py what all ranks must have alike
module.py    which of them are here, and their calls
answers.py   what scripts ask of the module, and absent.py what they ask in vain
row.py       what tensor parallelism asks of it
grid.py      where a rank is, by DeepSpeed's names
topology.py  DeepSpeed's names for the ranks of a grid
form.py      what lies in what a stage returns
transfer.py  activations and gradients between stages
deferral.py  weight gradients put off, for zero-bubble schedules
data.py      the micro-batches that a run reads
run.py       a plan, executed
verdict.py   whether it failed anywhere, and who is told
place.py     where a rank is, as scripts ask the engine
engine.py    the engine of a pipeline
measure.py   what each layer takes
"""

from .layers import LayerSpec, TiedLayerSpec
from .module import PipelineModule
from .p2p import PipelineError
from .topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

__all__ = [
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineError",
    "PipelineModule",
    "ProcessTopology",
    "TiedLayerSpec",
]
