"""Pipelines: a model's layers divided among ranks, which work on several micro-batches at a time.

layers.py          layers as a script gives them, built where they are needed, alike on all ranks
module.py          which of them are here, and their calls
deepspeed_api.py   what scripts ask of the module by DeepSpeed's names
row.py             what tensor parallelism asks of it
topology.py        where ranks are, by DeepSpeed's names
treespec.py        what lies in what a stage returns
p2p.py             activations and gradients between stages
split_backward.py  weight gradients put off, for zero-bubble schedules
step_data.py       the micro-batches that a run reads
runtime.py         a plan, executed
failure.py         whether it failed anywhere, and who is told
layer_costs.py     what each layer takes
"""

from .layers import LayerSpec, TiedLayerSpec
from .module import PipelineModule
from .p2p import PipelineError
from .topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

__all__ = [
    "LayerSpec", "PipeDataParallelTopology", "PipeModelDataParallelTopology", "PipelineError", "PipelineModule",
    "ProcessTopology", "TiedLayerSpec",
]  # fmt: skip
