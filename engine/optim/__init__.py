"""Optimizers that step the masters of sharded parameters, and what goes with a step.

build        the optimizer of a config's `optimizer` section
adopt        a client's optimizer, made to step the masters in place of the model's parameters
tiled        what an optimizer must know of a shard; the common ground of our own; Lion, and LAMB with norms of whole
             parameters
muon         Muon, which gathers whole matrices, and AdamW for the rest
onebit       1-bit Adam
lr           learning rate schedules
loss_scaler  loss scales for fp16, and casts; the norm of gradients over ranks, and clipping

Every optimizer may be stepped in tiles: several calls of `step` a training step, each with the gradients of some
masters only. So nothing is counted per call; a master without a gradient is left alone.
"""

from .adopt import Adopted, StepGuard, adopt, check_client, renew, settles_groups
from .build import build
from .tiled import Shard, wants_muon

__all__ = ["Adopted", "Shard", "StepGuard", "adopt", "build", "check_client", "renew", "settles_groups", "wants_muon"]
