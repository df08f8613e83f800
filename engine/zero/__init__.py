"""ZeRO: how parameters, gradients and optimizer state are cut over the data-parallel ranks.

shard.py      how one parameter is cut
settings.py   what it is to do
bucket.py     gradients that travel together
reduce.py     gradients, in buckets, from backward to the masters
gather.py     parameters, in batches, back to full size
fetch.py      stage 3: when a module's parameters come and go
fetch_order.py one way through a model, as data
uses.py       uses of parameters that no module's call announces
absent.py     what a parameter is between its uses
sparse.py     gradients of embeddings, as rows
init.py       zero.Init and zero.GatheredParameters
holder.py     who keeps which parameter in pieces
memory.py     parameters that share memory without being one, which are refused
newcomers.py  parameters that came after the engine, which are refused
partition.py  the stages, put together
"""

from .init import GatheredParameters, Init
from .settings import ZeroSettings
from .zero import Comms, Zero

__all__ = ["Comms", "GatheredParameters", "Init", "Zero", "ZeroSettings"]
