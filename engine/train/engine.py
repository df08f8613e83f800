"""The engine: one model, its optimizer, and how a step of training goes.

Its surface is DeepSpeed's: `loss = engine(batch)`, `engine.backward(loss)`, `engine.step()` for every micro-batch; at
the end of `gradient_accumulation_steps` of them the step is taken.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from .. import checkpoint
from ..api.absent import ABSENT
from ..comm.groups import Parallel
from ..config import Config
from ..hooks import Hooks
from ..offload import Offload
from ..optim.loss_scaler import LossScaler, cast_floating
from ..tree import loss_of, to_device
from ..zero import Zero
from ..zero.placeholder import plainly
from ..zero.shared_params import SharedParameters
from .optimizer_step import Stepping

CHECK_DATA_EVERY: Final = 50
"""Steps after which tensor-parallel ranks are held to the same data again; they are in the first, too."""


class Engine(Stepping):
    """A model that trains as `config` says. Made by `dsprof.engine.initialize`."""

    def __init__(
        self,
        model: nn.Module,
        config: Config,
        zero: Zero,
        optimizer: torch.optim.Optimizer | None,
        lr_scheduler: Any,
        scaler: LossScaler,
        hooks: Hooks,
        parallel: Parallel,
        shared: SharedParameters,
        offload: Offload,
        *,
        training_dataloader: Any = None,
        undo: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.module = model
        self.config = config
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.training_dataloader = training_dataloader
        self._undo = undo
        self.zero = zero
        self.hooks = hooks
        self.scaler = scaler
        self.parallel = parallel
        self.shared = shared
        self._offload = offload
        self.states = offload.states
        """Masters and the optimizer's states, wherever they are between steps."""
        self._norm: float | None = None
        self._start_stepping()
        self._monitors = self._start_monitors()
        self._losses: list[Tensor] = []
        self._paced: tuple[int, float] | None = None
        """Samples seen when progress was told last, and when that was."""
        self._own_data: Iterator[Any] | None = None
        self._frozen = [param for param in zero.params if param.master is None]
        self._in_no_sync = False
        self._boundary_override: bool | None = None
        self._backward_done = False
        self._stepped = False
        self._destroyed = False
        self.global_steps = 0
        self.global_samples = 0
        self.micro_steps = 0
        self.skipped_steps = 0

    # --- training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward. In fp16 with `auto_cast` its floating-point inputs are cast."""
        self._refuse_destroyed()
        if self.config.fp16.enabled and self.config.fp16.auto_cast:
            args, kwargs = cast_floating(args, torch.float16), cast_floating(kwargs, torch.float16)
        self._check_data((args, kwargs))
        if self._paced is None:
            self._paced = self.global_samples, time.perf_counter()
        with self.hooks.span("phase", "forward" if torch.is_grad_enabled() else "eval"):
            return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Gradients of `loss` (a scalar), which is divided by the number of micro-batches unless told otherwise.

        Returns the loss so divided, detached of loss scaling.
        """
        self._refuse_destroyed()
        if loss.numel() != 1:
            raise ValueError(f"engine.backward wants a scalar loss and got shape {tuple(loss.shape)}: take its mean")
        if not loss.requires_grad:
            raise RuntimeError(
                "engine.backward: the loss depends on no parameter that is trained: they are frozen, or it was "
                "detached, or computed within torch.no_grad()"
            )
        if scale_wrt_gas:
            loss = loss / self.gradient_accumulation_steps()
        self.zero.last_microbatch = self.is_gradient_accumulation_boundary() and not self._in_no_sync
        with self.hooks.span("phase", "backward"):
            (loss.float() * self.scaler.scale if self.scaler.scale != 1.0 else loss).backward(retain_graph=retain_graph)
            self.zero.finish_backward()
        self._backward_done = True
        if self._tells_losses:
            self._losses.append(loss.detach().float() * (self.gradient_accumulation_steps() if scale_wrt_gas else 1))
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
        if not self._backward_done:
            raise RuntimeError("engine.step without engine.backward(loss): do not call loss.backward() yourself")
        with plainly():
            thawed = next((param.name for param in self._frozen if param.param.grad is not None), None)
        if thawed is not None:
            raise RuntimeError(
                f"engine.step: {thawed} was frozen when the engine was made, and has a gradient now, which nothing "
                "would use: unfreeze it before initialize, or make the engine anew"
            )
        self._backward_done = False
        self._stepped = False
        self.global_samples += self.train_micro_batch_size_per_gpu() * self.dp_world_size
        if self.is_gradient_accumulation_boundary():
            with self.hooks.span("phase", "step"):
                self._take_step(lr_kwargs or {})
        self.micro_steps += 1
        self.hooks.microbatch = self.micro_steps % self.gradient_accumulation_steps()

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One whole step: `gradient_accumulation_steps` micro-batches of `data_iter`; their mean loss on this rank.

        Raises RuntimeError without an optimizer, or one without parameters. If the data end within the step, what came
        of them is forgotten, and StopIteration goes on to the caller.
        """
        self._refuse_untrained("train_batch")
        self.module.train()
        losses: list[Tensor] = []
        for _ in range(self.gradient_accumulation_steps()):
            try:
                loss = self._loss_of(data_iter)
            except StopIteration:
                self._forget_partial_step(len(losses))
                raise
            self.backward(loss)
            self.step()
            losses.append(loss.detach().float())
        return torch.stack(losses).mean()

    def eval_batch(self, data_iter: Iterator[Any]) -> Tensor:
        """The mean loss of as many micro-batches as a step has, without gradients."""
        training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                losses = [self._loss_of(data_iter).float() for _ in range(self.gradient_accumulation_steps())]
        finally:
            self.module.train(training)
        return torch.stack(losses).mean()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way is the last of its step."""
        if self._boundary_override is not None:
            return self._boundary_override
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say from outside whether the micro-batch under way is the last of its step."""
        self._boundary_override = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in this block add to this rank's gradients and communicate nothing: stages 0 and 1 only."""
        if self.zero.settings.stage >= 2:
            raise RuntimeError(
                f"engine.no_sync: ZeRO stage {self.zero.settings.stage} keeps only a piece of each gradient, so every "
                "backward has to reduce; use stage 0 or 1, or gradient_accumulation_steps"
            )
        if self._in_no_sync:
            raise RuntimeError("engine.no_sync inside engine.no_sync")
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False

    def compile(self, backend: Any = "inductor", compile_kwargs: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Have the model compiled, with options of `torch.compile` as `compile_kwargs` or by name.

        Raises RuntimeError where parameters come and go: in stage 3.
        """
        if self.zero.fetcher is not None:
            raise RuntimeError(
                "engine.compile: ZeRO stage 3 fetches parameters while modules run, which torch.compile cannot follow: "
                "use stage 0, 1 or 2, or leave it out"
            )
        self.module.compile(backend=backend, **(compile_kwargs or {}), **more)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients there are."""
        self.zero.clear()

    def __getattr__(self, name: str) -> Any:
        """What the engine does not have, such as `generate`, is the model's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        try:
            return getattr(self.module, name)
        except AttributeError:
            instead = f": {ABSENT[name]}" if name in ABSENT else f", and neither has its {type(self.module).__name__}"
            raise AttributeError(f"the engine has no {name!r}{instead}") from None

    # --- checkpoints

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the training to `save_dir`/`tag`, on all ranks: see `checkpoint.save`."""
        self._refuse_destroyed()
        self._stepped_masters()
        self._take_edits()
        return checkpoint.save(self, save_dir, tag, client_state, save_latest, exclude_frozen_parameters)

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from a checkpoint, on all ranks: its path and the client's state. See `checkpoint.load`."""
        self._refuse_destroyed()
        self._stepped_masters()
        return checkpoint.load(
            self, load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only
        )

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write the model alone, in the precision it runs in, to one file: see `checkpoint.save_16bit_model`."""
        self._refuse_destroyed()
        return checkpoint.save_16bit_model(self, save_dir, save_filename, exclude_frozen_parameters)

    def destroy(self) -> None:
        """Take the engine off the model, which has its present weights; end its threads, close its files, and destroy
        its process groups. On all ranks; again is of no effect.

        What ZeRO has divided is whole again; a pipeline's rank keeps its layers, and a tensor-parallel one its part of
        each: `save_16bit_model` writes the whole model. To train on is an error."""
        if self._destroyed:
            return
        self._destroyed = True
        self._own_data = None  # ends its workers, for which a garbage collection would wait
        with contextlib.ExitStack() as rest:  # the others are closed even if one fails
            for close in (
                self._undo,
                self._offload.close,
                self.parallel.close,
                self.shared.close,
                self.zero.close,
                self._monitors.stop,
            ):
                rest.callback(close)
            if self._turn is not None:
                rest.callback(self._turn.end)

    # --- inside

    def _refuse_destroyed(self) -> None:
        if self._destroyed:
            raise RuntimeError(
                "the engine was destroyed: its model, engine.module, is as any other; to train on, call initialize "
                "again"
            )

    def _refuse_untrained(self, what: str) -> None:
        self._refuse_destroyed()
        if self.optimizer is None:
            raise RuntimeError(
                f"engine.{what}: there is no optimizer: pass one to initialize, or configure `optimizer`"
            )
        if not any(group["params"] for group in self._groups()):
            raise RuntimeError(
                f"engine.{what}: the optimizer has no parameters: those of the model were frozen when the engine was "
                "made; unfreeze what is to be trained before initialize"
            )

    def _batches(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        """Where the next micro-batch comes from: what was passed, else the engine's own data over and over."""
        if data_iter is not None:
            return data_iter
        if self.training_dataloader is None:
            raise ValueError("train_batch: pass an iterator of batches, or training_data to initialize")
        from ..data import endless

        self._own_data = self._own_data or endless(self.training_dataloader)
        return self._own_data

    def _loss_of(self, data_iter: Iterator[Any] | None) -> Tensor:
        return loss_of(self, to_device(next(self._batches(data_iter)), self.device))

    def _forget_partial_step(self, microbatches: int) -> None:
        """The data have ended after so many of a step's micro-batches: be as before the first."""
        self.zero.clear()
        self.micro_steps -= microbatches
        self.global_samples -= microbatches * self.train_micro_batch_size_per_gpu() * self.dp_world_size
        self.hooks.microbatch = self.micro_steps % self.gradient_accumulation_steps()
        if microbatches:
            self._losses.clear()

    def _check_data(self, batch: Any) -> None:
        """Raise ValueError on all tensor-parallel ranks if they are about to train on different data."""
        if self.parallel.tensor.size > 1 and self.global_steps % CHECK_DATA_EVERY == 0:
            from ..tensor import check_same

            check_same(batch, self.parallel.tensor)
