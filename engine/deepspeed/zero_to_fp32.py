"""`deepspeed.utils.zero_to_fp32`: the weights of the engine's checkpoints as one state dict, or as files of one."""

from __future__ import annotations

import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from ..checkpoint import weights_of
from ..tree import batches

UNITS: Final = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Tensor]:
    """The whole model's state dict in fp32, from `checkpoint_dir`/`tag`, by default the last. See `weights_of`.

    With DeepSpeed's `lazy_mode` values are tensors only once `contiguous()` is called; these are from the beginning,
    and have it too. Raises CheckpointError.
    """
    return weights_of(checkpoint_dir, tag, without_frozen=exclude_frozen_parameters)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Give `model`, which no engine has, the weights of a checkpoint, and return it, on the CPU. What only one of them
    has is left as it is, and warned about."""
    model = model.cpu()
    result = model.load_state_dict(weights_of(checkpoint_dir, tag), strict=False)
    for whose, names in (("model", result.missing_keys), ("checkpoint", result.unexpected_keys)):
        if names:
            warnings.warn(f"only the {whose} has {', '.join(names[:5])}{' ...' if names[5:] else ''}", stacklevel=2)
    return model


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: str | int | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write that state dict to `output_dir`, as pytorch_model.bin.

    What is larger than `max_shard_size` (bytes, or such as `5GB`) becomes several files and an index, as Hugging Face
    writes and reads them. Raises ValueError for a size that is none and for `safe_serialization`, CheckpointError.
    """
    if safe_serialization:
        raise ValueError(
            "convert_zero_checkpoint_to_fp32_state_dict: the engine writes no safetensors; write "
            "model.save_pretrained(output_dir, state_dict=get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir))"
        )
    limit = sys.maxsize if max_shard_size is None else _bytes(max_shard_size)
    state = weights_of(checkpoint_dir, tag, without_frozen=exclude_frozen_parameters)
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    shards = [dict(items) for items in batches(state.items(), limit, lambda item: item[1].nbytes)] or [{}]
    if len(shards) == 1:
        torch.save(shards[0], folder / "pytorch_model.bin")
        return
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"pytorch_model-{number:05d}-of-{len(shards):05d}.bin"
        torch.save(shard, folder / name)
        where |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": sum(value.nbytes for value in state.values())}, "weight_map": where}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _bytes(size: str | int) -> int:
    if isinstance(size, int):
        return size
    found = re.fullmatch(r"(\d+)\s*([KMGT]?I?B)", size.strip().upper())
    if found is None or found[2] not in UNITS:
        raise ValueError(f"max_shard_size={size!r}: write bytes, or a number and one of {', '.join(UNITS)}")
    return int(found[1]) * UNITS[found[2]]
