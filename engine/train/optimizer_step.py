"""How a step is taken: norm, overflow, clipping, the optimizer, and the new weights to where they are needed.

At the end: torch's functions that clip gradients refuse those that an engine holds.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from torch import Tensor
from torch.nn.utils import clip_grad

from ..checkpoint import CheckpointError
from ..optim import StepGuard, renew, settles_groups
from ..optim.loss_scaler import clip_on_device_, global_norm, overflowed, unscale_and_clip_
from ..optim.onebit import OneBitAdam
from ..training_state import Training
from ..zero.shard import ShardedParam
from ..zero.validate import NewParameterCheck, StorageCheck
from ..zero.write_check import WriteCheck
from ..zero.zero import tiles_of


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a step."""

    norm: float | Tensor
    """Of the gradients before clipping, over all ranks; on their device where the host has not waited for it."""
    overflow: bool
    """Whether they held infinities or NaN, and the weights stay as they were."""


class OptimizerStep:
    """Takes the steps of one training."""

    def __init__(self, training: Training) -> None:
        zero, optimizer = training.zero, training.optimizer
        self._training = training
        self.tiles = tiles_of(zero.trainable, training.config.zero_optimization.sub_group_size)
        """What is stepped at once."""
        self._guard: StepGuard | None = None
        if optimizer is not None:
            optimizer.overflow = False  # type: ignore[attr-defined]
            self._show_scale()
            training.states.attach(optimizer, self.tiles)
            self._guard = StepGuard(optimizer)
        self._new_parameters = NewParameterCheck(training.module, zero.by_param)
        self._storages = StorageCheck(zero.params)
        self._writes = WriteCheck(zero.params)
        may = (master for group in training.param_groups for master in group["params"])
        settled = optimizer is not None and settles_groups(optimizer)
        self._may_step = frozenset(map(id, may if settled else zero.masters.values()))
        """What the optimizer's groups may have."""
        self._counted = {id(p.master) for p in zero.trainable if training.shared.counts(p.param)}
        """What another rank of the same replica counts does not count into the norm here."""

    def take(self) -> StepResult:
        """One step, of the gradients that there are. On all ranks.

        What fails after gradients or weights have begun to change is the training's failure (`Training.fail`).
        """
        self._new_parameters.check()
        self._storages.check("engine.step")
        stepped = self.stepped_masters()
        self._training.zero.check_order(self._training.parallel.hosts)
        try:
            return self._take(stepped)
        except BaseException as error:
            self._training.fail("an earlier step of this engine", error)
            raise

    def _take(self, stepped: set[int]) -> StepResult:
        training, zero = self._training, self._training.zero
        reducer = zero.reducer
        reducer.collect()
        training.shared.sum_gradients(zero.by_param.get)
        grads = reducer.gradients(stepped)
        counted = grads if stepped <= self._counted else reducer.gradients(stepped & self._counted)
        scale = training.scaler.scale / reducer.postscale
        sharded = zero.settings.stage > 0 or reducer.local  # each data-parallel rank has a part of what is counted
        comms = [training.parallel.data, training.parallel.model] if sharded else [training.parallel.model]
        wait = zero.deadlocks.wait if sharded and zero.deadlocks is not None else None
        norm = global_norm(counted, comms, device=training.device, wait=wait)
        # Where nothing depends on it, a host that is ahead of its device does not wait for the norm.
        value = None if not self._skips and norm.is_cuda and all(grad.is_cuda for grad in grads) else norm.item()
        training.peers.check("engine.step")  # if the host has waited: what is aborted brings no numbers
        overflow = self._skips and value is not None and overflowed(value)
        training.optimizer.overflow = overflow  # type: ignore[union-attr]  # where scripts look for it
        if overflow:
            training.skipped_steps += 1
            training.hooks.mark("overflow", value=training.scaler.scale)
        else:
            max_norm = training.config.gradient_clipping
            if value is None:
                clip_on_device_(grads, norm, loss_scale=scale, max_norm=max_norm)
            else:
                unscale_and_clip_(grads, value, loss_scale=scale, max_norm=max_norm)
            zero.begin_update()
            self._writes.mark(step=True)
            self._update()
            self._writes.note()
        reducer.rebuild_buckets()
        reducer.clear()
        if isinstance(training.optimizer, OneBitAdam):
            reducer.leave_unreduced(training.optimizer.wants_local_gradients)
        training.scaler.update(overflow)
        self._show_scale()
        return StepResult((norm if value is None else value) / scale, overflow)

    def stepped_masters(self) -> set[int]:
        """What the optimizer's groups have, by id; no other parameter counts into the norm.

        Parameters of the model that the script has put there become their masters. Raises ValueError for others.
        """
        training = self._training
        found = {id(master) for group in training.param_groups for master in group["params"]}
        if training.optimizer is not None and not found <= self._may_step:
            renew(training.optimizer, training.zero.masters)
            return self.stepped_masters()
        return found

    def take_edits(self) -> None:
        """Before a checkpoint: what the script wrote to parameters goes to their masters."""
        training = self._training
        training.refuse_failed("save_checkpoint", CheckpointError)
        self.stepped_masters()
        self.take_moved()
        self._writes.mark()
        if any(param.edited for param in training.zero.trainable):
            with training.states.at_once():
                for param in training.zero.trainable:
                    param.take_edits()

    def take_moved(self) -> None:
        """Before weights are read: have those where the engine reads them that the script has put elsewhere."""
        self._storages.check_kept()

    def before_load(self) -> None:
        """Before a checkpoint is loaded: have the optimizer's groups and the parameters as the engine knows them."""
        self.stepped_masters()
        self._storages.reset()

    def begin(self) -> None:
        """A forward of the step begins."""
        if self._training.under_way == 0:
            self._writes.ask()

    def close(self) -> None:
        """Have the optimizer step as the script calls it again."""
        if self._guard is not None:
            self._guard.remove()

    @property
    def _skips(self) -> bool:
        """Whether a step is skipped that would write infinities or NaN."""
        config = self._training.config
        return config.fp16.enabled or (config.bf16.enabled and config.bf16.check_grad_overflow)

    def _show_scale(self) -> None:
        """Put the loss scale where scripts look for it in DeepSpeed's optimizers."""
        optimizer, scale = self._training.optimizer, self._training.scaler.scale
        optimizer.cur_scale = optimizer.loss_scale = scale  # type: ignore[union-attr]

    def _update(self) -> None:
        """Tile by tile: the weights of one travel while the next is computed."""
        training, zero = self._training, self._training.zero
        several = len(self.tiles) > 1
        stepping = self._guard or contextlib.nullcontext()
        grads = {param: param.master.grad for param in zero.trainable} if several else {}
        _set_gradients(dict.fromkeys(grads))
        for number, tile in enumerate(training.states.through()):
            if several:
                _set_gradients({param: grads[param] for param in tile})
            for param in tile:
                if not param.master_is_shard:
                    param.take_edits()
            with training.hooks.span("phase", "optimizer", purpose="optimizer", value=float(number)), stepping:
                if isinstance(training.optimizer, OneBitAdam):
                    training.optimizer.step(last_tile=number + 1 == len(self.tiles))
                elif training.optimizer is not None:
                    training.optimizer.step()
            if several:
                _set_gradients(dict.fromkeys(tile))
            zero.gatherer.publish(tile)
        zero.gatherer.drain()


def _set_gradients(grads: Mapping[ShardedParam, Tensor | None]) -> None:
    for param, grad in grads.items():
        param.master.grad = grad


# --- torch's clipping of gradients that an engine holds: between backward and step they are in buckets and shards,
# where `torch.nn.utils.clip_grad_norm_` would find none, return 0 and clip nothing.


class Holder(Protocol):
    """Something that may hold gradients of parameters outside of their `grad`."""

    def held(self, param: Tensor) -> str | None:
        """The name of `param` if its gradient, or a part of it, is there; None if not."""


_HOLDERS: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
_NAMES: Final = ("_clip_grads_with_norm_", "clip_grad_value_")
"""The first is called by `clip_grad_norm_`."""
_REPLACED: Final[list[str]] = []


def refuse_clipping_of(holder: Holder) -> None:
    """From now on torch's functions refuse to clip what `holder` holds, as long as it lives. It must be hashable."""
    _HOLDERS.add(holder)
    for name in _NAMES:
        # A script may have imported the function by name: so not its name, but what is within it is replaced.
        function: Any = getattr(clip_grad, name, None)
        inner = getattr(function, "__wrapped__", None)
        for cell in getattr(function, "__closure__", None) or ():
            if cell.cell_contents is inner and name not in _REPLACED:
                _REPLACED.append(name)
                cell.cell_contents = _refusing(inner)


def _refusing(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def clip(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for holder in list(_HOLDERS):
            name = next(filter(None, map(holder.held, parameters)), None)
            if name is not None:
                raise RuntimeError(
                    "torch.nn.utils.clip_grad: gradients are the engine's from backward to step, and that of "
                    f'{name} is not in its .grad: write "gradient_clipping" in the configuration, which clips by the '
                    "norm of all ranks, or change gradients by deepspeed.utils.safe_get_full_grad and "
                    "safe_set_full_grad"
                )
        return function(parameters, *args, **kwargs)

    return clip
