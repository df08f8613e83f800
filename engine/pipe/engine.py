"""An engine whose model is a pipeline: a step is one call of `train_batch`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..engine import Engine, to_device
from ..precision import cast_floating
from ..schedule import Plan, check, make_plan
from ..zero import Zero
from . import deferral
from .module import PipelineModule
from .run import Runner
from .transfer import Links, PipelineError


class PipelineEngine(Engine):
    """Trains a PipelineModule. Made by `dsprof.engine.initialize`; its surface is DeepSpeed's PipelineEngine's."""

    module: PipelineModule

    def __init__(self, module: PipelineModule, *args: Any, links: Links, **more: Any) -> None:
        super().__init__(module, *args, **more)
        self._links = links
        mesh = self.parallel.mesh
        self.plan = self._planned(self.gradient_accumulation_steps())
        """What every rank of the pipeline does in a step."""
        if self.plan.splits:
            self._stop_deferring = deferral.install(module)
        else:
            self._stop_deferring = _nothing
        self._runner = Runner(module, mesh.pp_rank, links, self.hooks, self.device)
        self.hooks.stage = mesh.pp_rank
        self._began = time.perf_counter()
        self._last_loss: Tensor | None = None
        self._told: tuple[int, float] | None = None
        """At which step, and when, progress was told last."""

    # --- training

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One whole step: `gradient_accumulation_steps` micro-batches of `data_iter`, each (inputs, labels).

        Returns the mean loss over the micro-batches and the data-parallel ranks, on every rank. `data_iter` is read on
        the ranks of the first and the last stage, and may be None on the others.
        """
        self.module.train()
        self._began = time.perf_counter()
        backward = _Reduction(self.zero)
        losses = self._run(self.plan, self._data(data_iter), backward)
        mean = self._mean(losses, self.plan.microbatches)
        self._last_loss = mean
        if self._tells_losses:
            self._losses.append(mean)
        with self.hooks.span("phase", "step"):
            self._stepped = False
            self._take_step({})
        self.micro_steps += self.plan.microbatches
        self.global_samples += self.train_batch_size()
        return mean

    def eval_batch(
        self,
        data_iter: Iterator[Any] | None,
        return_logits: bool = False,
        compute_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """The mean loss of as many micro-batches as a step has, or of `num_micro_batches`, without gradients.

        Without `compute_loss`, the outputs of the last stage, a list with one for each micro-batch there and None on
        the other ranks; with `return_logits`, loss and outputs.
        """
        training = self.module.training
        self.module.eval()
        plan = self._planned(num_micro_batches or self.gradient_accumulation_steps(), forward_only=True)
        outputs: list[Any] = []
        loss_fn = self.module.loss_fn
        if return_logits and loss_fn is None:
            raise ValueError("eval_batch: return_logits takes a PipelineModule with a loss_fn")

        def keep(output: Any, labels: Any) -> Any:
            outputs.append(output)
            assert loss_fn is not None
            return loss_fn(output, labels)

        try:
            self.module.loss_fn = None if not compute_loss else keep if return_logits else loss_fn
            with torch.no_grad():
                results = self._run(plan, self._data(data_iter), None)
        finally:
            self.module.loss_fn = loss_fn
            self.module.train(training)
        if not compute_loss:
            return results if self.is_last_stage() else None
        mean = self._mean(results, plan.microbatches)
        return (mean, outputs if self.is_last_stage() else None) if return_logits else mean

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """A stage by itself has no meaning. Raises PipelineError."""
        raise PipelineError("a pipeline trains by engine.train_batch(data_iter) and is tried by engine.eval_batch")

    def backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """As `forward`. Raises PipelineError."""
        self.forward()

    def step(self, *args: Any, **kwargs: Any) -> NoReturn:
        """As `forward`. Raises PipelineError."""
        self.forward()

    def is_first_stage(self) -> bool:
        """Whether this rank has the first layers."""
        return 0 in self.module.stages

    def is_last_stage(self) -> bool:
        """Whether this rank has the last layers."""
        return len(self.module.bounds) - 2 in self.module.stages

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """What `train_batch` reads when it is given nothing."""
        self._own_data = iterator

    def set_dataloader(self, loader: Any) -> None:
        """What `train_batch` reads, over and over, when it is given nothing."""
        self.training_dataloader, self._own_data = loader, None

    def destroy(self) -> None:
        """As Engine.destroy; the model keeps the layers of this rank."""
        super().destroy()
        self._stop_deferring()
        self._links.close()

    # --- inside

    def _planned(self, microbatches: int, *, forward_only: bool = False) -> Plan:
        """Raises PlanError for a schedule that would never end."""
        pipeline, ranks = self.config.pipeline, self.parallel.mesh.pp
        plan = make_plan(pipeline.schedule, ranks, microbatches, self.module.virtual_stages)
        check(plan)
        if forward_only:
            forwards = tuple(tuple(a for a in actions if a.op == "F") for actions in plan.actions)
            return Plan(plan.schedule, ranks, microbatches, plan.virtual_stages, forwards)
        return plan

    def _data(self, data_iter: Iterator[Any] | None) -> _Data:
        if not self.is_first_stage() and not (self.is_last_stage() and self.module.loss_fn is not None):
            return _Data(iter(()), self.device)
        return _Data(self._batches(data_iter or self._own_data), self.device, self._check_data)

    def _run(self, plan: Plan, data: _Data, backward: _Reduction | None) -> list[Any]:
        """Run a plan. If it fails on one rank of the job it fails on all, unless they wait for each other elsewhere."""
        half = self.config.fp16.enabled and self.config.fp16.auto_cast
        cast: Callable[[Any], Any] = (lambda inputs: cast_floating(inputs, torch.float16)) if half else _same
        failed: BaseException | None = None
        losses: list[Any] = []
        try:
            losses = self._runner.run(plan, data, backward, cast=cast, scale=self.scaler.scale)
        except Exception as error:
            failed = error
        count = torch.tensor(float(failed is not None), device=self.parallel.everyone.device)
        self.parallel.everyone.all_reduce(count, "pipeline").wait()
        if failed is not None:
            raise failed
        if count.item():
            raise PipelineError(f"another pipeline of the job failed ({int(count)} ranks); see what they say")
        return losses

    def _progress(self) -> str:
        """As DeepSpeed's pipelines tell it: loss, and time and samples since it was told last."""
        step, now = self.global_steps + 1, time.perf_counter()
        before, then = self._told or (step - 1, self._began)
        self._told = step, now
        each = (now - then) / (step - before)
        loss = float("nan") if self._last_loss is None else self._last_loss.item()
        speed = self.train_batch_size() / each
        return f"steps: {step} loss: {loss:0.4f} iter time (s): {each:0.3f} samples/sec: {speed:0.3f}"

    def _mean(self, losses: list[Any], microbatches: int) -> Tensor:
        """Over the ranks of the last stage, where the losses are."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for loss in losses:
            total += loss.double().mean()
        self.parallel.everyone.all_reduce(total, "pipeline").wait()
        mesh = self.parallel.mesh
        return (total / (microbatches * mesh.dp * mesh.tp)).float()


class _Data:
    """The micro-batches of one step, read when they are needed and as often as there are micro-batches."""

    def __init__(
        self, source: Iterator[Any], device: torch.device, check: Callable[[Any], None] = lambda batch: None
    ) -> None:
        self._source = source
        self._device = device
        self._check = check
        self._read: list[Any] = []

    def inputs(self, microbatch: int) -> Any:
        return self._batch(microbatch)[0]

    def labels(self, microbatch: int) -> Any:
        return self._batch(microbatch)[1]

    def _batch(self, number: int) -> Any:
        while len(self._read) <= number:
            batch = to_device(self._next(), self._device)
            self._check(batch)
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                kind = f"{len(batch)} things" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
                raise PipelineError(
                    f"train_batch: the iterator gave {kind}; a pipeline takes (inputs, labels), each a tensor or a "
                    "tuple of tensors"
                )
            self._read.append(batch)
        return self._read[number]

    def _next(self) -> Any:
        try:
            return next(self._source)
        except StopIteration:
            raise PipelineError(
                f"train_batch: the iterator ended after {len(self._read)} micro-batches of the step; it must give "
                "gradient_accumulation_steps of them for each"
            ) from None


class _Reduction:
    """Tells ZeRO of the pipeline's backwards: stages 0 and 1 reduce in the last, the others in each."""

    def __init__(self, zero: Zero) -> None:
        self._zero = zero

    def begin(self, *, last: bool, complete: bool) -> None:
        self._zero.last_microbatch = last
        self._zero.holds_back = not complete

    def end(self) -> None:
        self._zero.finish_backward()


def _same(inputs: Any) -> Any:
    return inputs


def _nothing() -> None:
    return
