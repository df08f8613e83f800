"""Loading a checkpoint, from beginning to end."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..onebit import OneBitAdam
from ..zero.shard import ShardedParam
from .folder import find, latest_tag
from .optimizer import OptimizerLoading, OptimizerState
from .pieces import Contents, Piece
from .saving import COUNTERS, FORMAT
from .state import Trainee, buffers, device_of, weights
from .team import CheckpointError, Team
from .values import set_random_states, unpack


def load(
    engine: Trainee,
    folder: str | os.PathLike[str],
    tag: str | int | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
) -> tuple[str | None, dict[str, Any] | None]:
    """Go on from the checkpoint `folder`/`tag`, by default the one that `folder`/latest names. On all ranks.

    Returns its path and the client's state. Without a file `latest` nothing is loaded, which is warned about, and
    both are None. With `load_module_strict`, parameters and buffers must be those of the checkpoint; else what both
    have is loaded. `load_module_only` loads the weights and nothing else. Random number generators go on as they were
    if there are as many ranks as there were.

    Raises CheckpointError on all ranks. If that is because a file cannot be read, the weights may be neither the old
    ones nor the new; nothing is touched before it is known that the checkpoint fits and is complete.
    """
    team = Team()
    with engine.hooks.span("phase", "checkpoint", purpose="checkpoint"):
        chosen = None if tag is None else str(tag)
        name = team.from_first(f"no checkpoint was loaded from {folder}", lambda: _choose(Path(folder), chosen))
        if name is None:
            warnings.warn(
                f"no checkpoint was loaded: there is no file {Path(folder) / 'latest'}. If there should be one, check "
                "the folder, or give load_checkpoint a tag",
                stacklevel=3,
            )
            return None, None
        path = Path(folder) / name
        doing = f"checkpoint {path} was not loaded"
        loading = team.together(doing, lambda: _Loading(engine, path, team, strict=load_module_strict))
        if not load_module_only:
            team.together(
                doing, lambda: loading.with_training(optimizer=load_optimizer_states, lr=load_lr_scheduler_states)
            )
        team.together(doing, loading.check)
        with engine.hooks.span("copy", "checkpoint_read", purpose="checkpoint", bytes=loading.bytes):
            team.together(doing, loading.read)
        team.together(doing, loading.finish)
        loading.publish()
    return str(path), loading.client_state


def _choose(folder: Path, tag: str | None) -> str | None:
    if tag is None:
        tag = latest_tag(folder)
    return None if tag is None else find(folder, tag)


class _Loading:
    """One load on one rank. Of its methods, `publish` alone communicates."""

    def __init__(self, engine: Trainee, path: Path, team: Team, *, strict: bool) -> None:
        self._engine = engine
        self._team = team
        self._contents = Contents(path)
        self._training = self._value("training")
        if self._training["format"] != FORMAT:
            raise CheckpointError(
                f"it has format {self._training['format']}, and this version of dsprof reads {FORMAT}: update dsprof"
            )
        self.client_state: dict[str, Any] = self._value("client_state")
        self._optimizer: OptimizerLoading | None = None
        self._lr_state: dict[str, Any] | None = None
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._params = self._parameters(strict)
        self._buffers = self._buffer_pieces(strict)
        self._module_only = True

    @property
    def bytes(self) -> int:
        """To be read."""
        return sum(piece.flat.nbytes for piece in self._expected())

    def with_training(self, *, optimizer: bool, lr: bool) -> None:
        """Load more than the module: counters, loss scale, random numbers, and, if wanted, optimizer and schedule."""
        self._module_only = False
        engine = self._engine
        if optimizer and engine.optimizer is not None:
            saved = self._optional("optimizer")
            if saved is not None:
                self._optimizer = OptimizerLoading(
                    engine.optimizer, OptimizerState(**saved, tensors=[]), engine.zero, self._contents,
                    self._training["ranks"], self._team,
                )  # fmt: skip
        if lr and engine.lr_scheduler is not None:
            saved = self._optional("lr_scheduler")
            mine = type(engine.lr_scheduler).__name__
            if saved is not None and saved["kind"] != mine:
                raise CheckpointError(
                    f"it has the state of the schedule {saved['kind']}, and the schedule is {mine}; configure it as it "
                    "was, or load with load_lr_scheduler_states=False"
                )
            self._lr_state = None if saved is None else saved["state"]

    def check(self) -> None:
        """Raise CheckpointError if something to be read is missing."""
        self._contents.plan(self._expected())

    def read(self) -> None:
        """Read the tensors to where they belong: masters and optimizer states as they come into memory."""
        engine = self._engine
        if engine.zero.fetcher is not None:
            engine.zero.fetcher.finish_backward()  # releases what is whole, and would be out of date
        rest = dict.fromkeys(self._params)
        for tile in engine.states.through() if engine.optimizer is not None else ():
            loaded = [param for param in tile if param in rest]
            pieces = weights(loaded, masters=True)
            if self._optimizer is not None:
                pieces += [piece for param in tile for piece in self._optimizer.room(param)]
            self._contents.read(pieces)
            for param in loaded:
                param.publish()
                del rest[param]
        self._contents.read(weights([param for param in rest if param.home is None], masters=False) + self._buffers)
        for param in rest:
            if param.home is not None:
                piece = torch.empty(param.shard.shape, dtype=param.shard.dtype)
                self._contents.read([Piece(f"weight/{param.name}", piece, param.numel, param.start)])
                param.write_piece(piece)
        for target, source in self._copies:
            target.copy_(source.view(target.shape))

    def finish(self) -> None:
        """Set everything that is no tensor."""
        engine = self._engine
        if self._module_only:
            return
        if self._optimizer is not None:
            self._optimizer.finish()
        if self._lr_state is not None:
            engine.lr_scheduler.load_state_dict(self._lr_state)
        if engine.scaler.dynamic and self._training["loss_scaler"] is not None:
            engine.scaler.load_state_dict(self._training["loss_scaler"])
        for name in COUNTERS:
            setattr(engine, name, self._training["counters"][name])
        # Gradients are not saved, so a step begins anew; and it may have another number of micro-batches now.
        engine.micro_steps -= engine.micro_steps % engine.config.gradient_accumulation_steps
        engine.hooks.step = engine.global_steps
        engine.hooks.microbatch = 0
        if self._training["ranks"] == self._team.size:
            own = self._value(f"rank/{self._team.rank}")
            set_random_states(own["random"], device_of(engine.zero))

    def publish(self) -> None:
        """Bring what the ranks have read to all that need it."""
        zero = self._engine.zero
        zero.clear()
        if not self._module_only and self._training["reduction_order"] is not None:
            zero.reducer.restart(self._training["reduction_order"])
        if isinstance(self._engine.optimizer, OneBitAdam):
            zero.reducer.keep_local(self._engine.optimizer.wants_local_gradients)
        for param in zero.params:
            param.secondary = None
        if zero.settings.stage and self._engine.optimizer is not None:
            whole = [param for param in zero.trainable if param.persistent]
            zero.gatherer.bring(whole, zero.settings.allgather_bucket_size)

    # --- what there is to load

    def _expected(self) -> list[Piece]:
        """All that is to be read; what is not in memory, by its shape."""
        pieces = weights(self._params, masters=self._engine.optimizer is not None) + self._buffers
        return pieces + (self._optimizer.expected if self._optimizer is not None else [])

    def _parameters(self, strict: bool) -> list[ShardedParam]:
        params = {param.name: param for param in self._engine.zero.params}
        optional = [p.name for p in params.values() if not p.trainable] if self._training["without_frozen"] else []
        shapes = {name: param.shape for name, param in params.items()}
        common = _common("parameters", shapes, self._training["weights"], optional, strict)
        return [params[name] for name in common]

    def _buffer_pieces(self, strict: bool) -> list[Piece]:
        found = buffers(self._engine.module)
        shapes = {name: buffer.shape for name, buffer in found.items()}
        pieces = []
        for name in _common("buffers", shapes, self._training["buffers"], (), strict):
            buffer = found[name]
            flat = buffer.view(-1) if buffer.is_contiguous() else torch.empty_like(buffer.reshape(-1))
            if not buffer.is_contiguous():
                self._copies.append((buffer, flat))
            pieces.append(Piece(f"buffer/{name}", flat, buffer.numel()))
        return pieces

    def _value(self, name: str) -> Any:
        return unpack(self._contents.value(name), name)

    def _optional(self, name: str) -> Any:
        if name in self._contents:
            return self._value(name)
        warnings.warn(f"the checkpoint was saved without {name}: it begins from the start", stacklevel=7)
        return None


def _common(
    what: str, mine: dict[str, torch.Size], saved: dict[str, torch.Size], optional: Iterable[str], strict: bool
) -> list[str]:
    """Names that both have. Raises CheckpointError for a difference in shape and, if `strict`, for one in names."""
    missing = sorted(mine.keys() - saved.keys() - set(optional))
    unexpected = sorted(saved.keys() - mine.keys())
    texts = [
        f"{len(names)} {what} that the {whose} has not, the first: {names[0]}"
        for whose, names in (("checkpoint", missing), ("model", unexpected))
        if names
    ]
    if texts and strict:
        raise CheckpointError(
            f"there are {'; and '.join(texts)}. To load what both have, give load_module_strict=False"
        )
    if texts:
        warnings.warn(f"load_checkpoint: there are {'; and '.join(texts)}", stacklevel=8)
    common = [name for name in mine if name in saved]
    for name in common:
        if mine[name] != saved[name]:
            raise CheckpointError(
                f"{name} has shape {tuple(saved[name])} in the checkpoint, and {tuple(mine[name])} in the model"
            )
    return common
