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
from .grid import PipelineGrid
from .module import PipelineModule
from .run import Runner
from .transfer import Links, PipelineError


class PipelineEngine(Engine):
    """Trains a PipelineModule. Made by `dsprof.engine.initialize`; its surface is DeepSpeed's PipelineEngine's."""

    module: PipelineModule

    def __init__(self, module: PipelineModule, *args: Any, links: Links, **more: Any) -> None:
        super().__init__(module, *args, **more)
        module.hooks = self.hooks
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
        self._batch_fn: Callable[[Any], Any] = _same
        self._last_loss: Tensor | None = None
        self._halfway = False
        """Whether a step failed that had begun to make gradients."""
        self._told: tuple[int, float] | None = None
        """At which step, and when, progress was told last."""

    # --- training

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One whole step: `gradient_accumulation_steps` micro-batches of `data_iter`, each (inputs, labels).

        Returns the mean loss over the micro-batches and the data-parallel ranks, on every rank. `data_iter` is read on
        the ranks of the first and the last stage, and may be None on the others. Raises PipelineError on all ranks if
        one of them fails, and RuntimeError without an optimizer.
        """
        if self.optimizer is None:
            raise RuntimeError("train_batch: there is no optimizer: pass one to initialize, or configure `optimizer`")
        if self._halfway:
            raise PipelineError(
                "train_batch: an earlier step of this engine failed half-way, which left its gradients incomplete; "
                "make the engine anew, from a checkpoint"
            )
        self.module.train()
        self._began = time.perf_counter()
        loss_fn = self.module.loss_fn
        losses = self._run(self.plan, self._data(data_iter, loss_fn), _Reduction(self.zero), loss_fn)
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
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Any:
        """The mean loss of as many micro-batches as a step has, or of `num_micro_batches`, without gradients.

        Without `compute_loss`, the outputs of the last stage, a list with one for each micro-batch there and None on
        the other ranks; with `return_logits`, loss and outputs. `reduce_output` and `bcast_loss` are DeepSpeed's: the
        loss is always the mean, on every rank.
        """
        if reduce_output not in ("avg", None) or (reduce_output is None and compute_loss):
            raise ValueError(
                f'eval_batch: reduce_output={reduce_output!r} is not supported: write "avg", the mean loss, or '
                "compute_loss=False, which gives the outputs of each micro-batch"
            )
        training = self.module.training
        self.module.eval()
        plan = self._planned(num_micro_batches or self.gradient_accumulation_steps(), forward_only=True)
        outputs: list[Any] = []
        loss_fn = self.module.loss_fn
        if return_logits and loss_fn is None:
            raise ValueError("eval_batch: return_logits takes a PipelineModule with a loss_fn")

        def loss(output: Any, labels: Any) -> Tensor:
            if return_logits:
                outputs.append(output)
            found = output if loss_fn is None else loss_fn(output, labels)
            if not isinstance(found, Tensor):
                what = "the last layer" if loss_fn is None else "loss_fn"
                raise PipelineError(
                    f"eval_batch: {what} returned a {type(found).__name__}, which is no loss; for outputs alone write "
                    "eval_batch(data_iter, compute_loss=False)"
                )
            return found

        try:
            with torch.no_grad():
                results = self._run(
                    plan, self._data(data_iter, loss_fn if compute_loss else None), None, loss if compute_loss else None
                )
        finally:
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

    @property
    def grid(self) -> PipelineGrid:
        """Where this rank is, by DeepSpeed's names."""
        return PipelineGrid(self.parallel)

    @property
    def mpu(self) -> PipelineGrid:
        """The same, as Megatron's scripts ask for it."""
        return self.grid

    @property
    def stage_id(self) -> int:
        """This rank's place in the pipeline."""
        return self.parallel.mesh.pp_rank

    @property
    def num_stages(self) -> int:
        """Ranks of the pipeline."""
        return self.parallel.mesh.pp

    @property
    def micro_batches(self) -> int:
        """Micro-batches a step."""
        return self.gradient_accumulation_steps()

    @property
    def micro_batch_size(self) -> int:
        """Samples of each, on one replica."""
        return self.train_micro_batch_size_per_gpu()

    def is_first_stage(self) -> bool:
        """Whether this rank has the first layers."""
        return 0 in self.module.stages

    def is_last_stage(self) -> bool:
        """Whether this rank has the last layers."""
        return len(self.module.bounds) - 2 in self.module.stages

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """What `train_batch` reads when it is given nothing."""
        self._own_data = iterator

    def set_batch_fn(self, function: Callable[[Any], Any]) -> None:
        """What makes (inputs, labels) of that which the iterator gives."""
        self._batch_fn = function

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

    def _data(self, data_iter: Iterator[Any] | None, loss_fn: Callable[..., Any] | None) -> _Data:
        wanted = (self.is_first_stage(), self.is_last_stage() and loss_fn is not None)
        if not any(wanted):
            return _Data(iter(()), self.device, wanted, self._batch_fn)
        source = self._batches(self._own_data if data_iter is None else data_iter)
        return _Data(source, self.device, wanted, self._batch_fn, self._check_data)

    def _run(
        self, plan: Plan, data: _Data, backward: _Reduction | None, loss_fn: Callable[[Any, Any], Any] | None
    ) -> list[Any]:
        """Run a plan. If it fails on one rank of the job it fails on all, unless they wait for each other elsewhere."""
        half = self.config.fp16.enabled and self.config.fp16.auto_cast
        cast: Callable[[Any], Any] = (lambda inputs: cast_floating(inputs, torch.float16)) if half else _same
        failed: BaseException | None = None
        losses: list[Any] = []
        try:
            losses = self._runner.run(plan, data, backward, loss_fn=loss_fn, cast=cast, scale=self.scaler.scale)
        except Exception as error:
            failed = error
        begun = backward is not None and backward.begun
        counts = torch.tensor([failed is not None, begun], dtype=torch.float32, device=self.parallel.everyone.device)
        self.parallel.everyone.all_reduce(counts, "pipeline").wait()
        failures, halfway = counts.tolist()
        if failures:
            self._halfway = self._halfway or halfway > 0
            raise failed or PipelineError(
                f"another pipeline of the job failed ({int(failures)} ranks); see what they say"
            )
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
    """The micro-batches of one step, read when they are needed, and given up when they have been used."""

    def __init__(
        self,
        source: Iterator[Any],
        device: torch.device,
        wanted: tuple[bool, bool],
        make: Callable[[Any], Any],
        check: Callable[[Any], None] = lambda batch: None,
    ) -> None:
        """`wanted`: whether inputs are used here, and whether labels are; what is not stays where it is. `make` makes
        both of what is read."""
        self._source = source
        self._device = device
        self._wanted = wanted
        self._make = make
        self._check = check
        self._read = 0
        self._unused: dict[tuple[int, int], Any] = {}

    def inputs(self, microbatch: int) -> Any:
        return self._part(microbatch, 0)

    def labels(self, microbatch: int) -> Any:
        return self._part(microbatch, 1)

    def _part(self, number: int, part: int) -> Any:
        if not self._wanted[part]:
            return None
        while self._read <= number:
            batch = self._make(self._next())
            self._check(batch)
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                kind = f"{len(batch)} things" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
                raise PipelineError(
                    f"train_batch: the iterator gave {kind}; a pipeline takes (inputs, labels), each a tensor or a "
                    "tuple of tensors"
                )
            for at in (0, 1):
                if self._wanted[at]:
                    self._unused[self._read, at] = to_device(batch[at], self._device)
            self._read += 1
        return self._unused.pop((number, part))

    def _next(self) -> Any:
        if not isinstance(self._source, Iterator):
            raise PipelineError(
                f"train_batch: data_iter is a {type(self._source).__name__}, and not an iterator; pass "
                "iter(deepspeed.utils.RepeatingLoader(loader)), or set engine.set_dataloader(loader) once"
            )
        try:
            return next(self._source)
        except StopIteration:
            raise PipelineError(
                f"train_batch: the iterator ended after {self._read} micro-batches of the step; it must give "
                "gradient_accumulation_steps of them for each"
            ) from None


class _Reduction:
    """Tells ZeRO of the pipeline's backwards: stages 0 and 1 reduce in the last, the others in each."""

    def __init__(self, zero: Zero) -> None:
        self._zero = zero
        self.begun = False

    def begin(self, *, last: bool, complete: bool) -> None:
        self.begun = True
        self._zero.last_microbatch = last
        self._zero.holds_back = not complete

    def end(self) -> None:
        self._zero.finish_backward()


def _same(inputs: Any) -> Any:
    return inputs


def _nothing() -> None:
    return
