"""The weights of a checkpoint, read without an engine: in one process, on any machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .cuts import Wanted, as_saved, read
from .folder import find, latest_tag
from .pieces import Contents, Piece
from .team import CheckpointError
from .values import unpack


def weights_of(
    folder: str | os.PathLike[str], tag: str | int | None = None, *, without_frozen: bool = False
) -> dict[str, Tensor]:
    """The state dict of the model in checkpoint `folder`/`tag`, by default the one that `folder`/latest names.

    Floating-point parameters are in fp32, as the optimizer had them, and whole, whatever divided them; tied ones are
    one tensor under all their names. Buffers are as they were. `without_frozen` leaves frozen parameters out, as far
    as the optimizer's groups tell. Raises CheckpointError.
    """
    place = Path(folder)
    chosen = latest_tag(place) if tag is None else str(tag)
    if chosen is None:
        raise CheckpointError(f"there is no file {place / 'latest'}: check the folder, or give a tag")
    contents = Contents(place / find(place, chosen))
    contents.check_files()
    training: dict[str, Any] = unpack(contents.value("training"), "training")
    shapes: dict[str, torch.Size] = training["weights"]
    cuts = training.get("cuts", {})  # format 1 had none
    if without_frozen:
        if "optimizer" not in contents:
            raise CheckpointError(
                f"{place / chosen} was saved without an optimizer, and so does not tell what is frozen"
            )
        stages = unpack(contents.value("optimizer"), "optimizer")["groups"]
        trained = {name for groups in stages for group in groups for name in group["params"]}
        shapes = {name: shape for name, shape in shapes.items() if name in trained}
    found: dict[str, Tensor] = {}
    wanted: list[Wanted] = []
    for name, shape in shapes.items():
        saved = as_saved(cuts[name]) if name in cuts else None
        first = f"weight/{name}" if saved is None else f"weight/{name}@0/{saved.pieces}"
        tensor = torch.empty(shape, dtype=_in_fp32(contents.dtype(first)))
        found[name] = tensor
        wanted.append(Wanted(Piece(f"weight/{name}", tensor.view(-1), tensor.numel()), None, saved))
    aliases: dict[str, str] = training.get("aliases", {})
    found |= {alias: found[name] for alias, name in aliases.items() if name in found}
    read(contents, wanted)
    buffers = {
        name: torch.empty(shape, dtype=contents.dtype(f"buffer/{name}") or torch.float32)
        for name, shape in training["buffers"].items()
        if f"buffer/{name}" in contents
    }
    contents.read([Piece(f"buffer/{name}", buffer.view(-1), buffer.numel()) for name, buffer in buffers.items()])
    return found | buffers


def _in_fp32(dtype: torch.dtype | None) -> torch.dtype:
    return torch.float32 if dtype is None or dtype in (torch.float16, torch.bfloat16) else dtype
