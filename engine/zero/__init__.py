"""ZeRO: how parameters, gradients and optimizer state are sharded over the data-parallel ranks.

zero           the stages, put together
shares         who has which elements of a parameter: in equal parts, or by the memory of ranks
shard          a parameter that is sharded: this rank's part, and its master
reduce         gradients, in buckets, from backward to the masters
ready          gradients as they come in a backward, which travel together, and in which order
gradients      their dtypes and scales on the way, and the sums of micro-batches
bucket         gradients that are reduced together, and their collectives
packed         weights and gradients that travel in fewer bytes than they have
gather         masters to the weights, and parameters, in batches, back to full size
fetch          stage 3: when a module's parameters come and go
fetch_order    one way through a model, as data
param_hooks    uses of parameters that no module's call announces; which modules are torch's own code
storage        the memory of a parameter, which comes and goes, what it is between its uses, and buffers that are
               used again
sparse         gradients of embeddings, as rows
init           zero.Init and zero.GatheredParameters
shared_params  parameters that several ranks of a replica hold
validate       parameters that are refused: without a shape, in shared memory, or newer than the engine
write_check    parameters that a script has written to where torch does not count it
"""

from .init import GatheredParameters, Init
from .ready import BackwardPart
from .zero import Comms, Zero

__all__ = ["BackwardPart", "Comms", "GatheredParameters", "Init", "Zero"]
