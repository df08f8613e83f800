"""ZeRO: how parameters, gradients and optimizer state are cut over the data-parallel ranks.

shard.py      how one parameter is cut
settings.py   what it is to do
bucket.py     gradients that travel together
reduce.py     gradients, in buckets, from backward to the masters
gather.py     parameters, in batches, back to full size
fetch.py      stage 3: when a module's parameters come and go
fetch_order.py one way through a model, as data
param_hooks.py uses of parameters that no module's call announces
placeholder.py what a parameter is between its uses
sparse.py     gradients of embeddings, as rows
init.py       zero.Init and zero.GatheredParameters
registry.py   who keeps which parameter in pieces
shared_params.py parameters that several ranks of a replica have
validate.py   parameters that share memory without being one, or came after the engine, which are refused
zero.py       the stages, put together
"""

from .init import GatheredParameters, Init
from .settings import ZeroSettings
from .zero import Comms, Zero

__all__ = ["Comms", "GatheredParameters", "Init", "Zero", "ZeroSettings"]
