"""Checkpoints: a training saved so that it goes on from there, on the same ranks or on others.

    folder/latest                   the tag of the last one
    folder/TAG/.metadata            what is in it, and in which file (torch.distributed.checkpoint's format)
    folder/TAG/__RANK_0.distcp      what one rank wrote
    folder/TAG/config.json          the configuration it was trained with

Every tensor is kept flattened, sharded as the ranks that wrote it had it. So ranks that are divided otherwise, into
stages, replicas and tensor-parallel parts, can read it, with any ZeRO stage and any precision. Nothing that is read can
run code.

    saving        a checkpoint from beginning to end, written
    loading       and read
    state         what is saved under which name, what of the weights a rank holds, and shards of tensor-parallel
                  ranks, from one division to another
    optimizer     the optimizer's state, likewise
    dcp           flat pieces of tensors, through torch.distributed.checkpoint
    folder        tags, `latest`, how a new checkpoint takes its place at once or not at all, and everything in it that
                  is no tensor
    consolidate   the model alone, in one file, with an engine or without
"""

from .consolidate import consolidated, save_16bit_model, weights_of
from .folder import CheckpointError
from .loading import load
from .saving import save

__all__ = ["CheckpointError", "consolidated", "load", "save", "save_16bit_model", "weights_of"]
