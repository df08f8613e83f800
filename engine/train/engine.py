"""The engine: one model, its optimizer, and how a step of training goes.

Its surface is DeepSpeed's: `loss = engine(batch)`, `engine.backward(loss)`, `engine.step()` for every micro-batch; at
the end of `gradient_accumulation_steps` of them the step is taken.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .. import activation_checkpoint
from ..comm.deadlock import NORM
from ..forward import watch_zero_grad
from ..optim.loss_scaler import cast_floating, widened
from ..sequence.trial import hold_against_whole
from ..tensor.check_data import shapes_of
from ..training_state import Training
from ..tree import loss_of, to_device
from ..zero.storage import no_torch_function
from ..zero.zero import GRADIENTS
from .base_engine import CHECK_DATA_EVERY, BaseEngine
from .optimizer_step import refuse_clipping_of


class Engine(BaseEngine):
    """A model that trains as its configuration says. Made by `dsprof.engine.initialize`."""

    def __init__(self, training: Training, opened: contextlib.ExitStack) -> None:
        super().__init__(training, opened)
        self._in_no_sync = False
        self._boundary_override: bool | None = None
        self._counted = False
        """Whether the micro-batch under way has been counted."""
        self._backward_done = False
        self._shapes: list[tuple[int, ...]] = []
        self._synchronized = False
        """Whether a backward outside `no_sync` has come since the last step."""
        refuse_clipping_of(self)
        for owner in (training.module, training.optimizer):  # between backward and step gradients are in buckets, too
            if owner is not None:
                opened.callback(watch_zero_grad(owner, self._cleared))

    # --- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. In fp16 with `auto_cast` its floating-point inputs are cast."""
        self._refuse_destroyed()
        if self.config.fp16.enabled and self.config.fp16.auto_cast:
            args, kwargs = cast_floating(args, torch.float16), cast_floating(kwargs, torch.float16)
        self._check_data((args, kwargs))
        if self._shares_unchecked:
            self._shapes = shapes_of((args, kwargs))
        self.metrics.start_clock()
        if torch.is_grad_enabled():
            self.optimizer_step.begin()
        activation_checkpoint.attach(self.hooks, self.config.activation_checkpointing)
        try:
            if self.state.sequence is not None:
                self.state.sequence.begin_forward(args, kwargs)
            self._try_divided(args, kwargs)
            with self._sharing(), self.hooks.span("phase", "forward" if torch.is_grad_enabled() else "eval"):
                return self.module(*args, **kwargs)
        except Exception as error:
            self._failed("forward", error)
            raise

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Gradients of `loss` (a scalar), which is divided by the number of micro-batches unless `scale_wrt_gas` is
        false. It is the mean over this rank's samples, and counts as many as these are (`heterogeneous`); where ranks
        share sequences, over its part of their positions, and counts as many as have a label there.

        Returns the loss so divided, detached of loss scaling.
        """
        self._refuse_destroyed()
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"engine.backward wants the loss, and got a {type(loss).__name__}: pass the tensor in it, such as "
                "outputs.loss"
            )
        if loss.numel() != 1:
            raise ValueError(f"engine.backward wants a scalar loss and got shape {tuple(loss.shape)}: take its mean")
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "engine.backward is called under torch.no_grad(): call it, and the forward that makes the loss, "
                "outside of that block"
            )
        if not loss.requires_grad:
            raise RuntimeError(
                "engine.backward: the loss depends on no parameter that is trained: they are frozen, or it was "
                "detached, or computed within torch.no_grad()"
            )
        self.state.refuse_failed("engine.backward")
        if self.zero.reducer.open:
            raise RuntimeError(
                "engine.backward: the last backward failed half-way, and what it left of its gradients is still there: "
                "call engine.zero_grad() on all ranks to begin the step anew"
            )
        if self._shares_unchecked:
            self._check_shares(self._shapes)
        if scale_wrt_gas:
            loss = loss / self.config.gradient_accumulation_steps
        if self.state.sequence is not None:
            self.state.sequence.begin_backward()
        self.zero.begin_backward(last=self.is_gradient_accumulation_boundary() and not self._in_no_sync)
        try:
            with self._sharing(), self.hooks.span("phase", "backward"):
                factor = self.scaler.scale * self.state.loss_weight
                scaled = widened(loss) * factor if factor != 1.0 else loss
                if self.state.sequence is not None:
                    scaled = self.state.sequence.weighted(scaled)
                scaled.backward(retain_graph=retain_graph)
                self.zero.finish_backward()
        except Exception as error:
            # Of one that has sent nothing yet the others need not know: this rank may go on with another batch.
            self._failed("backward", error, [*GRADIENTS, NORM] if self.zero.reducer.launched else [])
            raise
        self.state.peers.withdraw()
        self._backward_done = True
        self._synchronized = self._synchronized or not self._in_no_sync
        self.metrics.note_loss(loss, self.config.gradient_accumulation_steps if scale_wrt_gas else 1)
        if self._boundary_override is not None:  # who sets it, as Accelerate does, need not step before the boundary
            self.state.count_microbatch()
            self._counted = True
            if not self._boundary_override:
                self.hooks.microbatch = self.state.under_way
        return loss

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """After each micro-batch's backward; at a gradient accumulation boundary the optimizer steps.

        `lr_kwargs` go to the learning rate schedule's `step`, as ReduceLROnPlateau's needs. Raises RuntimeError without
        an optimizer, or for one without parameters, inside `no_sync`, if gradients did not come by `engine.backward`,
        and for a parameter that was frozen when the engine was made and now has a gradient.
        """
        self._refuse_untrained("step")
        if self._in_no_sync:
            raise RuntimeError("engine.step inside engine.no_sync(): leave the block before you step")
        if not self._backward_done or self.zero.reducer.open:
            raise RuntimeError(
                "engine.step without engine.backward(loss): do not call loss.backward() yourself, nor step after a "
                "backward that failed or that engine.zero_grad() has forgotten"
            )
        with no_torch_function():
            thawed = next((param.name for param in self._frozen if param.param.grad is not None), None)
        if thawed is not None:
            raise RuntimeError(
                f"engine.step: {thawed} was frozen when the engine was made, and has a gradient now, which nothing "
                "would use: unfreeze it before initialize, or make the engine anew"
            )
        boundary = self.is_gradient_accumulation_boundary()
        if boundary and not self._synchronized and self.zero.size > 1:
            raise RuntimeError(
                "engine.step: every backward of this step was inside engine.no_sync(), so no gradients were reduced: "
                "leave the block before the backward of the last micro-batch"
            )
        self._backward_done = False
        self._stepped = False
        if not self._counted:
            self.state.count_microbatch()
        self._counted = False
        if boundary:
            self._synchronized = False
            try:
                with self.hooks.span("phase", "step"):
                    self._take_step(lr_kwargs or {})
            except Exception as error:
                # In stage 3 a forward still gathers parameters.
                kinds = [*GRADIENTS, NORM, *([] if self.zero.settings.stage == 3 else ["parameters"])]
                self._failed("step", error, kinds if self.state.failure else [])
                raise
        self.hooks.microbatch = self.state.under_way

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One whole step: `gradient_accumulation_steps` micro-batches of `data_iter`; their mean loss on this rank.

        Raises RuntimeError without an optimizer, or one without parameters, and in the middle of a step. If the data
        end within the step, or the model raises, what came of them is forgotten, and the error goes on to the caller;
        after one in a backward the script has to call `zero_grad` to go on.
        """
        self._refuse_untrained("train_batch")
        if self._begun:
            raise RuntimeError(
                f"engine.train_batch in the middle of a step, of which {self.state.under_way} of "
                f"{self.config.gradient_accumulation_steps} micro-batches are complete: train_batch takes whole steps. "
                "Complete this one by engine.backward and engine.step, or call engine.zero_grad() on all ranks to "
                "forget it"
            )
        self.train()
        losses: list[Tensor] = []
        try:
            for _ in range(self.config.gradient_accumulation_steps):
                loss = self._loss_of(data_iter)
                self.backward(loss)
                self.step()
                losses.append(self.sequence_mean(loss).float())
        except Exception:
            if not self.zero.reducer.open:  # else others may not be waiting for what this rank has begun to reduce
                self._begin_step_anew()
            raise
        return torch.stack(losses).mean()

    def eval_batch(self, data_iter: Iterator[Any]) -> Tensor:
        """The mean loss of as many micro-batches as a step has, without gradients."""
        training = self.module.training
        self.eval()
        try:
            with torch.no_grad():
                micro_batches = range(self.config.gradient_accumulation_steps)
                losses = [self.sequence_mean(self._loss_of(data_iter)).float() for _ in micro_batches]
        finally:
            self.train(training)
        return torch.stack(losses).mean()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way is the last of its step."""
        if self._boundary_override is not None:
            return self._boundary_override
        return self.state.under_way + 1 >= self.config.gradient_accumulation_steps

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say from outside whether the micro-batch under way is the last of its step."""
        self._boundary_override = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this block add to this rank's gradients and communicate nothing: stages 0 and 1 only."""
        if self.zero.settings.stage >= 2:
            raise RuntimeError(
                f"engine.no_sync: ZeRO stage {self.zero.settings.stage} keeps only a shard of each gradient, so every "
                "backward has to reduce; use stage 0 or 1, or gradient_accumulation_steps"
            )
        if self._in_no_sync:
            raise RuntimeError("engine.no_sync inside engine.no_sync")
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False

    # --- ranks that share sequences

    def shard_sequence(self, batch: Any, *, dim: int = 1, shift: bool | None = None) -> Any:
        """This rank's part of each sequence in a batch that all ranks which share them have alike: of every tensor in
        it with the positions in dimension `dim`. What else there is stays whole. Without `sequence_parallel_size` the
        batch is returned as it is.

        Labels of -100 count into no loss. `shift`: a dict's `labels` are to be those of the next position, which a
        model cannot find behind the end of a part; by default for causal language models of transformers, which get
        them as `shift_labels`, too, and `position_ids`.

        Raises ValueError on all of these ranks for other data on one of them, and for sequences too short to divide.
        """
        sequence = self.state.sequence
        if sequence is None:
            return batch
        check = self.global_steps % CHECK_DATA_EVERY == 0
        return sequence.divide(batch, dim, shift, check_data=check)

    def sequence_mean(self, loss: Tensor) -> Tensor:
        """The loss over whole sequences, of each rank's mean over its part, without a gradient. On all ranks."""
        return loss.detach() if self.state.sequence is None else self.state.sequence.mean(loss)

    def _sharing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.state.sequence is None else self.state.sequence.running()

    def _try_divided(self, args: Any, kwargs: Any) -> None:
        """Before the first forward: hold the model against itself with whole sequences."""
        sequence = self.state.sequence
        if sequence is None or not sequence.unchecked or sequence.layout is None:
            return
        sequence.unchecked = False
        hold_against_whole(sequence, self.module, args, kwargs)

    # --- inside

    def _refuse_untrained(self, what: str) -> None:
        self._refuse_destroyed()
        self._refuse_without_optimizer(f"engine.{what}")
        self.state.refuse_failed(f"engine.{what}")
        if not any(group["params"] for group in self.state.param_groups):
            raise RuntimeError(
                f"engine.{what}: the optimizer has no parameters: those of the model were frozen when the engine was "
                "made; unfreeze what is to be trained before initialize"
            )

    def held(self, param: Tensor) -> str | None:
        """The name of a parameter whose gradient, or a part of it, is the engine's now; None for others."""
        known = self.zero.by_param.get(param) if isinstance(param, nn.Parameter) else None
        return known.name if known is not None and self.zero.reducer.holds(known) else None

    def _loss_of(self, data_iter: Iterator[Any] | None) -> Tensor:
        return loss_of(self, self.shard_sequence(to_device(next(self._batches(data_iter)), self.state.device)))

    @property
    def _begun(self) -> bool:
        """Whether there may be gradients of a step that has not been taken."""
        return self.state.under_way > 0 or self._backward_done or self.zero.reducer.open

    def _begin_step_anew(self) -> None:
        super()._begin_step_anew()
        self._backward_done = self._counted = self._synchronized = False
        with no_torch_function():
            for param in self._frozen:  # which may have been thawed
                param.param.grad = None

    def _cleared(self) -> None:
        """The script clears gradients by torch's names: forget those that torch does not find. The micro-batches of the
        step count as they did."""
        if not self._begun:
            return
        if self.state.under_way:
            warnings.warn(
                f"zero_grad() of the model or the optimizer in the middle of a step: the gradients of "
                f"{self.state.under_way} of its {self.config.gradient_accumulation_steps} micro-batches are forgotten. "
                "A step forgets its gradients by itself: leave it out",
                stacklevel=4,
            )
        self.zero.forget_gradients()
        self._backward_done = self._synchronized = False
