"""How an engine takes a step: norm, overflow, clipping, the optimizer, and the new weights to where they are needed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ..offload import States
from ..optim import Turn, renew, settles_groups
from ..optim.grad_norm import global_norm, unscale_and_clip_
from ..optim.loss_scaler import overflowed
from ..optim.onebit import OneBitAdam
from ..zero.shard import ShardedParam
from ..zero.shared_params import SharedParameters
from ..zero.validate import Newcomers
from ..zero.zero import tiles_of
from .metrics import Telling


class Stepping(Telling):
    """The part of an Engine that does."""

    states: States
    lr_scheduler: Any
    shared: SharedParameters

    def _start_stepping(self) -> None:
        zero, optimizer = self.zero, self.optimizer
        self.tiles = tiles_of(zero.trainable, self.config.zero_optimization.sub_group_size)
        """What is stepped at once."""
        self._turn: Turn | None = None
        if optimizer is not None:
            optimizer.overflow = False  # type: ignore[attr-defined]
            self._show_scale()
            self.states.attach(optimizer, self.tiles)
            self._turn = Turn(optimizer)
        self._newcomers = Newcomers(self.module, zero.by_param)
        self._masters: dict[nn.Parameter, nn.Parameter] = {
            param.param: param.master for param in zero.trainable if param.master is not None
        }
        may = (master for group in self._groups() for master in group["params"])
        settled = optimizer is not None and settles_groups(optimizer)
        self._may_step = frozenset(map(id, may if settled else self._masters.values()))
        """What the optimizer's groups may have."""
        self._counted = {id(p.master) for p in zero.trainable if self.shared.counts(p.param)}
        """What another rank of the same replica counts does not count into the norm here."""

    @property
    def _skips(self) -> bool:
        """Whether a step is skipped that would write infinities or NaN."""
        return self.config.fp16.enabled or (self.config.bf16.enabled and self.config.bf16.check_grad_overflow)

    def _take_step(self, lr_kwargs: Mapping[str, Any]) -> None:
        """Norm, overflow, clipping, optimizer, and the new weights to where they are needed."""
        reducer = self.zero.reducer
        self._newcomers.check()
        stepped = self._stepped_masters()
        self.zero.check_trail(self.parallel.everyone)
        self.zero.collect()
        self.shared.sum_gradients(self.zero.by_param.get)
        masters = [param.master for param in self.zero.trainable if id(param.master) in stepped]
        pairs = [(id(master), master.grad) for master in masters if master is not None and master.grad is not None]
        scale = self.scaler.scale / reducer.after
        counted = [grad for owner, grad in pairs if owner in self._counted]
        wait = None if self.zero.deadlocks is None else self.zero.deadlocks.wait
        value = global_norm(counted, self._norm_groups(), self.hooks, device=self.device, wait=wait).item()
        grads = [grad for _, grad in pairs]
        self._norm = value / scale
        overflow = self._skips and overflowed(value)
        self.optimizer.overflow = overflow  # type: ignore[union-attr]  # where scripts look for it
        if overflow:
            self.skipped_steps += 1
            self.hooks.mark("overflow", value=self.scaler.scale)
        else:
            unscale_and_clip_(grads, value, loss_scale=scale, max_norm=self.config.gradient_clipping)
            self._step_optimizer()
            self._stepped = True
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**lr_kwargs)
        reducer.settle()
        self.zero.clear()
        if isinstance(self.optimizer, OneBitAdam):
            reducer.keep_local(self.optimizer.wants_local_gradients)
        self.scaler.update(overflow)
        self._show_scale()
        self._tell()
        self.global_steps += 1
        self.hooks.step = self.global_steps

    def _show_scale(self) -> None:
        """Put the loss scale where scripts look for it in DeepSpeed's optimizers."""
        self.optimizer.cur_scale = self.optimizer.loss_scale = self.scaler.scale  # type: ignore[union-attr]

    def _stepped_masters(self) -> set[int]:
        """What the optimizer's groups have, by id; no other parameter counts into the norm.

        Parameters of the model that the script has put there become their masters. Raises ValueError for others.
        """
        found = {id(master) for group in self._groups() for master in group["params"]}
        if self.optimizer is not None and not found <= self._may_step:
            renew(self.optimizer, self._masters)
            return self._stepped_masters()
        return found

    def _take_edits(self) -> None:
        """Before a checkpoint: what the script wrote to parameters goes to their masters."""
        if any(param.edited for param in self.zero.trainable):
            with self.states.at_once():
                for param in self.zero.trainable:
                    param.take_edits()

    def _norm_groups(self) -> list[dist.ProcessGroup]:
        """Groups over which the squares of the counted gradients are to be summed, one after the other."""
        data, model = self.parallel.data.group, self.parallel.model.group
        apart = self.zero.settings.stage > 0 or self.zero.reducer.local
        return [group for group in (data if apart else None, model) if group is not None]

    def _step_optimizer(self) -> None:
        """Tile by tile: the weights of one travel while the next is computed."""
        several = len(self.tiles) > 1
        turn = self._turn or contextlib.nullcontext()
        grads = {p: p.master.grad for p in self.zero.trainable if p.master is not None} if several else {}
        self._set_gradients(dict.fromkeys(grads))
        for number, tile in enumerate(self.states.through()):
            if several:
                self._set_gradients({param: grads[param] for param in tile})
            for param in tile:
                param.take_edits()
            with self.hooks.span("phase", "optimizer", purpose="optimizer", value=float(number)), turn:
                if isinstance(self.optimizer, OneBitAdam):
                    self.optimizer.step(last_tile=number + 1 == len(self.tiles))
                elif self.optimizer is not None:
                    self.optimizer.step()
            if several:
                self._set_gradients(dict.fromkeys(tile))
            self.zero.publish(tile)
        self.zero.finish_publish()

    @staticmethod
    def _set_gradients(grads: Mapping[ShardedParam, Tensor | None]) -> None:
        for param, grad in grads.items():
            if param.master is not None:
                param.master.grad = grad
