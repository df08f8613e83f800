"""Saving a checkpoint, from beginning to end."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ..comm.consensus import World, gather_objects
from ..training_state import Training
from .dcp import Piece, shares, write
from .folder import CheckpointError, Place, check_tag, pack, plain, random_states, write_synced
from .optimizer import optimizer_state
from .state import (
    FORMAT,
    Holdings,
    buffers,
    digests,
    holdings,
    loader_of,
    merged,
    own_buffer,
    part_name,
    tensor_shard,
    weight,
)

COUNTERS: Final = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def save(
    training: Training,
    save_dir: str | os.PathLike[str],
    tag: str | int | None = None,
    client_state: dict[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Save the training to `save_dir`/`tag`, by default global_step<N>, and `tag` in `save_dir`/latest. On all ranks.

    `client_state` is returned by `load`: numbers, texts, tensors, and collections of them; rank 0's counts.
    Returns True. Raises CheckpointError on all ranks; if so, or if the job is killed at any moment, what was there
    before is still there, a checkpoint of the same tag included. A rank whose last step failed half-way raises it at
    once, without waiting for the others, which may be waiting elsewhere.
    """
    training.refuse_failed("save_checkpoint", CheckpointError)
    world = World(CheckpointError)
    with training.hooks.span("phase", "checkpoint", purpose="checkpoint"):
        name = _agree_on_tag(training, f"global_step{training.global_steps}" if tag is None else str(tag), world)
        if training.under_way:
            warnings.warn(
                "save_checkpoint in the middle of a step: the gradients of its micro-batches so far are not saved, and "
                "a restart begins that step anew; save after a step has been taken",
                stacklevel=3,
            )
        doing = f"checkpoint {name} was not saved to {save_dir}"
        with contextlib.ExitStack() as stack:
            if training.optimizer is not None:
                world.together(doing, lambda: stack.enter_context(training.states.at_once(changed=False)))
            mine, described = world.together(doing, lambda: _take(training, exclude_frozen_parameters, world.rank))
            replica = gather_objects(described, training.parallel.model)
            values = world.together(
                doing, lambda: _values(training, client_state or {}, exclude_frozen_parameters, replica, world.rank)
            )
            hashes = world.together(doing, lambda: digests(training.module))
            found = gather_objects((training.parallel.mesh.dp_rank, hashes))
            mine += world.together(doing, lambda: _buffers(training, found, world.rank))
            place = Place(Path(save_dir), name)
            temporary = place.folder / world.from_first(doing, place.open)
            try:
                size = sum(piece.flat.nbytes for piece in mine)
                with training.hooks.span("copy", "checkpoint_write", purpose="checkpoint", bytes=size):
                    write(temporary, mine, values, world, doing)
                world.from_first(doing, lambda: _finish(training, place, save_latest))
            except CheckpointError:
                if world.rank == 0:
                    place.discard()
                raise
    return True


def _agree_on_tag(training: Training, tag: str, world: World) -> str:
    world.together("no checkpoint was saved", lambda: check_tag(tag))
    tags = gather_objects(tag)
    validation = training.config.checkpoint.tag_validation
    odd = [rank for rank, other in enumerate(tags) if other != tags[0]]
    if odd and validation != "Ignore":
        text = f"rank 0 gave the tag {tags[0]!r}, and rank {odd[0]} {tags[odd[0]]!r}; give the same on all ranks"
        if validation == "Fail":
            raise CheckpointError(f"no checkpoint was saved: {text} (checkpoint.tag_validation is Fail)")
        if world.rank == 0:
            warnings.warn(f"save_checkpoint: {text}. Rank 0's is taken", stacklevel=4)
    return tags[0]


@dataclass(frozen=True, slots=True)
class _Described:
    """What a rank sends the others of its replica, so that the checkpoint can say what is in it."""

    holdings: Holdings
    order: list[str] | None
    """In which this rank's gradients are reduced."""
    optimizer: dict[str, Any] | None
    """The values of an `OptimizerState`."""


def _take(training: Training, without_frozen: bool, rank: int) -> tuple[list[Piece], _Described]:
    """The pieces that this rank writes, but for buffers, and a description of what it has."""
    zero, mesh, counts = training.zero, training.parallel.mesh, training.shared.counts
    kept = [param for param in zero.params if param.trainable or not without_frozen]
    counted = [param for param in kept if counts(param.param)]
    pieces = [weight(param, masters=training.optimizer is not None) for param in counted]
    mine = [
        replace(piece, name=part_name(piece.name, tensor_shard(param)))
        for param, piece in zip(counted, pieces, strict=True)
    ]
    about = None
    if training.optimizer is not None:
        state, tensors = optimizer_state(training.optimizer, zero, rank, counts)
        mine += tensors
        about = plain(vars(state), "optimizer.state_dict()")
    described = _Described(holdings(training, without_frozen=without_frozen), zero.reducer.order, about)
    return list(shares(mine, mesh.dp_rank, mesh.dp)), described


def _buffers(training: Training, found: Sequence[tuple[int, dict[str, bytes]]], rank: int) -> list[Piece]:
    """The buffers that this rank writes: of the first replica, the first rank that has one of a name writes it, and any
    other rank its own where that is otherwise. `found`: of every rank, which replica it is of, and its `digests`."""
    written = merged(
        {name: (writer, digest) for name, digest in theirs.items()}
        for writer, (replica, theirs) in enumerate(found)
        if replica == 0
    )
    mine = []
    for name, buffer in buffers(training.module).items():
        writer, digest = written[name]
        if rank == writer or found[rank][1][name] != digest:
            called = f"buffer/{name}" if rank == writer else own_buffer(name, rank)
            mine.append(Piece(called, buffer.reshape(-1), buffer.numel()))
    return list(shares(mine, 0, 1))


def _values(
    training: Training, client_state: dict[str, Any], without_frozen: bool, replica: Sequence[_Described], rank: int
) -> dict[str, bytes]:
    """The values that this rank writes. Rank 0 is one of the first replica, and writes what there is of the whole."""
    own = {"random": random_states(training.device)}
    values = {f"rank/{rank}": pack(own, "the state of a random number generator")}
    if rank != 0:
        return values
    mesh, held = training.parallel.mesh, [each.holdings for each in replica]
    about_training = {
        "format": FORMAT,
        "mesh": (mesh.pp, mesh.dp, mesh.tp),
        "counters": {
            **{name: getattr(training, name) for name in COUNTERS},  # those of a step under way come again
            "micro_steps": training.micro_steps - training.under_way,
            "global_samples": training.global_samples - training.under_way * training.samples_per_microbatch,
        },
        "data": _data(training),
        "weights": merged(each.weights for each in held),
        "cuts": merged(each.shards for each in held),
        "buffers": merged(each.buffers for each in held),
        "aliases": merged(each.aliases for each in held),
        "without_frozen": without_frozen,
        "reduction_orders": [each.order for each in replica],
        "loss_scaler": training.scaler.state_dict() if training.scaler.dynamic else None,
    }
    values["training"] = pack(about_training, "the state of the training")
    values["client_state"] = pack(client_state, "client_state")
    stages = [each.optimizer for each in replica[:: mesh.tp] if each.optimizer is not None]
    if stages:
        about = {
            "kind": stages[0]["kind"],
            "groups": [groups for stage in stages for groups in stage["groups"]],
            "entries": merged(stage["entries"] for stage in stages),
        }
        values["optimizer"] = pack(about, "optimizer.state_dict()")
    if training.lr_scheduler is not None:
        state = training.lr_scheduler.state_dict()
        about = {"kind": type(training.lr_scheduler).__name__, "state": state}
        values["lr_scheduler"] = pack(about, "lr_scheduler.state_dict()")
    return values


def _data(training: Training) -> dict[str, Any] | None:
    """Where the engine's own loader stands. A step that is under way begins anew, so its micro-batches come again."""
    loader = loader_of(training)
    return None if loader is None else loader.state_dict(behind=training.under_way)


def _finish(training: Training, place: Place, save_latest: bool) -> None:
    text = training.config.model_dump_json(indent=2)
    write_synced(place.temporary / "config.json", lambda file: file.write(text.encode()))
    place.commit(latest=save_latest)
