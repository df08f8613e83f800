"""Saving a checkpoint, from beginning to end."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path
from typing import Any, Final

from .folder import Place, check_tag, write_synced
from .optimizer import optimizer_state
from .pieces import Piece, shares, write
from .state import Trainee, buffers, device_of, weights
from .team import CheckpointError, Team
from .values import pack, random_states

FORMAT: Final = 1
COUNTERS: Final = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def save(
    engine: Trainee,
    folder: str | os.PathLike[str],
    tag: str | int | None = None,
    client_state: dict[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Save the training to `folder`/`tag`, by default global_step<N>, and `tag` in `folder`/latest. On all ranks.

    `client_state` is handed back by `load`: numbers, texts, tensors, and collections of them; rank 0's counts.
    Returns True. Raises CheckpointError on all ranks; if so, or if the job is killed at any moment, what was there
    before is still there, a checkpoint of the same tag included.
    """
    team = Team()
    with engine.hooks.span("phase", "checkpoint", purpose="checkpoint"):
        name = _agree_on_tag(engine, f"global_step{engine.global_steps}" if tag is None else str(tag), team)
        if engine.micro_steps % engine.config.gradient_accumulation_steps:
            warnings.warn(
                "save_checkpoint in the middle of a step: the gradients of its micro-batches so far are not saved, and "
                "a restart begins that step anew; save after a step has been taken",
                stacklevel=3,
            )
        doing = f"checkpoint {name} was not saved to {folder}"
        with contextlib.ExitStack() as stack:
            if engine.optimizer is not None:
                team.together(doing, lambda: stack.enter_context(engine.states.at_once(changed=False)))
            pieces, values = team.together(
                doing, lambda: _take(engine, client_state or {}, exclude_frozen_parameters, team)
            )
            place = Place(Path(folder), name)
            team.from_first(doing, place.open)
            try:
                size = sum(piece.flat.nbytes for piece in pieces)
                with engine.hooks.span("copy", "checkpoint_write", purpose="checkpoint", bytes=size):
                    write(place.temporary, pieces, values, team, doing)
                team.from_first(doing, lambda: _finish(engine, place, save_latest))
            except CheckpointError:
                if team.rank == 0:
                    place.discard()
                raise
    return True


def _agree_on_tag(engine: Trainee, tag: str, team: Team) -> str:
    team.together("no checkpoint was saved", lambda: check_tag(tag))
    tags = team.gather(tag)
    validation = engine.config.checkpoint.tag_validation
    odd = [rank for rank, other in enumerate(tags) if other != tags[0]]
    if odd and validation != "Ignore":
        text = f"rank 0 gave the tag {tags[0]!r}, and rank {odd[0]} {tags[odd[0]]!r}; give the same on all ranks"
        if validation == "Fail":
            raise CheckpointError(f"no checkpoint was saved: {text} (checkpoint.tag_validation is Fail)")
        if team.rank == 0:
            warnings.warn(f"save_checkpoint: {text}. Rank 0's is taken", stacklevel=4)
    return tags[0]


def _take(
    engine: Trainee, client_state: dict[str, Any], without_frozen: bool, team: Team
) -> tuple[list[Piece], dict[str, bytes]]:
    """The pieces and values that this rank writes."""
    zero = engine.zero
    kept = [param for param in zero.params if param.trainable or not without_frozen]
    mine = weights(kept, masters=engine.optimizer is not None)
    optimizer = None if engine.optimizer is None else optimizer_state(engine.optimizer, zero, team)
    if optimizer is not None:
        mine += optimizer.tensors
    mine = list(shares(mine, team.rank, team.size))
    own = {"random": random_states(device_of(zero))}
    values = {f"rank/{team.rank}": pack(own, "the state of a random number generator")}
    if team.rank != 0:
        return mine, values

    kept_buffers = buffers(engine.module)
    flat = [Piece(f"buffer/{name}", buffer.reshape(-1), buffer.numel()) for name, buffer in kept_buffers.items()]
    mine += shares(flat, 0, 1)
    training = {
        "format": FORMAT,
        "ranks": team.size,
        "counters": {name: getattr(engine, name) for name in COUNTERS},
        "weights": {param.name: param.shape for param in kept},
        "buffers": {name: buffer.shape for name, buffer in kept_buffers.items()},
        "without_frozen": without_frozen,
        "reduction_order": zero.reducer.order,
        "loss_scaler": engine.scaler.state_dict() if engine.scaler.dynamic else None,
    }
    values["training"] = pack(training, "the state of the training")
    values["client_state"] = pack(client_state, "client_state")
    if optimizer is not None:
        about = {"kind": optimizer.kind, "groups": optimizer.groups, "entries": optimizer.entries}
        values["optimizer"] = pack(about, "optimizer.state_dict()")
    if engine.lr_scheduler is not None:
        state = engine.lr_scheduler.state_dict()
        about = {"kind": type(engine.lr_scheduler).__name__, "state": state}
        values["lr_scheduler"] = pack(about, "lr_scheduler.state_dict()")
    return mine, values


def _finish(engine: Trainee, place: Place, save_latest: bool) -> None:
    text = engine.config.model_dump_json(indent=2)
    write_synced(place.temporary / "config.json", lambda file: file.write(text.encode()))
    place.commit(latest=save_latest)
