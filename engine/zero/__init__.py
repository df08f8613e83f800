"""ZeRO: how parameters, gradients and optimizer state are sharded over the data-parallel ranks.

zero           the stages, put together
shard          how one parameter is sharded
reduce         gradients, in buckets, from backward to the masters
ready          gradients as they come in a backward
bucket         gradients that are reduced together, and their collectives
bucket_layout  which gradients those are, and in which order
buffer_pool    memory of communications that is used again
packed         weights and gradients that travel in fewer bytes than they have
gather         masters to the weights, and parameters, in batches, back to full size
fetch          stage 3: when a module's parameters come and go
fetch_order    one way through a model, as data
param_hooks    uses of parameters that no module's call announces
torch_code     whether modules are torch's own code, whose backward needs what autograd has saved and no more
storage        the memory of a parameter, which comes and goes, and which are there
placeholder    what a parameter is between its uses, and which are sharded
sparse         gradients of embeddings, as rows
init           zero.Init and zero.GatheredParameters
shared_params  parameters that several ranks of a replica hold
validate       parameters that are refused: without a shape, in shared memory, or newer than the engine
"""

from .bucket_layout import BackwardPart
from .init import GatheredParameters, Init
from .zero import Comms, Zero

__all__ = ["BackwardPart", "Comms", "GatheredParameters", "Init", "Zero"]
