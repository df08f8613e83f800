"""Checkpoints: a training saved so that it goes on from there, on the same ranks or on others.

    folder/latest                   the tag of the last one
    folder/TAG/.metadata            what is in it, and in which file (torch.distributed.checkpoint's format)
    folder/TAG/__RANK_0.distcp      what one rank wrote
    folder/TAG/config.json          the configuration it was trained with

Every tensor is kept flattened, cut as the ranks that wrote it had it. So ranks that are divided otherwise, into stages,
replicas and tensor-parallel parts, can read it, with any ZeRO stage and any precision. Nothing that is read can run
code.

    saving.py      a checkpoint from beginning to end, written
    loading.py     and read
    state.py       what is saved under which name, and what of the weights a rank holds
    optimizer.py   the optimizer's state, likewise
    reshard.py     parts of parameters that tensor-parallel ranks have, from one cut to another
    dcp.py         flat pieces of tensors, through torch.distributed.checkpoint
    serialize.py   everything that is no tensor, and random number generators
    folder.py      tags, `latest`, and how a new checkpoint takes its place at once or not at all
    consolidate.py the model alone: in one file, or read without an engine
"""

from ..comm.consensus import CheckpointError
from .consolidate import consolidated, save_16bit_model, weights_of
from .loading import load
from .saving import save

__all__ = ["CheckpointError", "consolidated", "load", "save", "save_16bit_model", "weights_of"]
