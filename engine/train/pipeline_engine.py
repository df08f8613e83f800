"""An engine whose model is a pipeline: a step is one call of `train_batch`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import activation_checkpoint
from ..comm.consensus import gather_objects
from ..optim.loss_scaler import cast_floating
from ..pipe import split_backward
from ..pipe.failure import FailureConsensus
from ..pipe.module import PipelineModule
from ..pipe.p2p import Links, PipelineError
from ..pipe.runtime import PipelineRun
from ..pipe.step_data import StepData
from ..pipe.topology import PipelineGrid
from ..schedule import Plan, check, make_plan
from ..tensor.check_data import equal_batches, shapes_of
from ..training_state import Training
from .base_engine import BaseEngine
from .deepspeed_api import PIPELINE_ENGINE, Names


class PipelineEngine(BaseEngine):
    """Trains a PipelineModule. Made by `dsprof.engine.initialize`; its surface is DeepSpeed's PipelineEngine's."""

    names: ClassVar[Names] = PIPELINE_ENGINE
    module: PipelineModule

    def __init__(self, training: Training, opened: ExitStack, *, links: Links) -> None:
        # What all ranks do together comes first: what may fail on one of them comes behind it.
        parallel, mesh = training.parallel, training.parallel.mesh
        failures = FailureConsensus(
            parallel.hosts, training.comms(), list(links.values()), training.peers, apart=mesh.dp * mesh.tp > 1,
        )  # fmt: skip
        double = torch.tensor(float(any(param.dtype is torch.float64 for param in training.module.parameters())))
        double = double.to(training.device)
        parallel.everyone.all_reduce(double, "pipeline").wait()  # a rank without parameters is to know
        super().__init__(training, opened, self._line)
        self.forward = self.names.find("forward", training)  # nn.Module has one, so the table would not be asked
        module = self.module
        module.hooks = training.hooks
        module.placement.grid = PipelineGrid(parallel)
        self._plans: dict[tuple[int, bool], Plan] = {}
        self.plan = self._planned(training.config.gradient_accumulation_steps)
        """What every rank of the pipeline does in a step."""
        if self.plan.splits:
            opened.callback(split_backward.install(module))
        self._failures = failures
        self._links = links
        self._loss_dtype = torch.float64 if double.item() else torch.float32
        """Of losses that are returned: float64 in models of it."""
        training.hooks.stage = mesh.pp_rank
        self._batch_fn: Callable[[Any], Any] = _same
        self._last_loss: Tensor | None = None
        self._evaluated: list[tuple[int, ...]] = []
        """The shapes of the first batch that is read in an evaluation."""

    # --- training

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """One whole step: `gradient_accumulation_steps` micro-batches of `data_iter`, each (inputs, labels).

        Returns the mean loss over the micro-batches and the data-parallel ranks, on every rank. `data_iter` is read on
        the ranks of the first and the last stage, and may be None on the others. Raises PipelineError on all ranks if
        one of them fails, and RuntimeError without an optimizer.
        """
        self._refuse_without_optimizer("train_batch")
        self.state.refuse_failed("train_batch", PipelineError)
        if not torch.is_grad_enabled():
            raise RuntimeError("train_batch is called under torch.no_grad(); write engine.eval_batch(data_iter) there")
        self.train()
        self.metrics.start_clock()
        self.optimizer_step.begin()
        if data_iter is not None:
            self._own_data = data_iter
        loss_fn = self.module.loss_fn
        losses = self._run(self.plan, partial(self._training_data, loss_fn is not None), loss_fn, backward=True)
        mean = self._mean(losses, self.plan.microbatches, self.state.loss_weight)
        self._last_loss = mean
        self.metrics.note_loss(mean)
        self.global_samples += self.config.train_batch_size
        with self._failing("train_batch"), self.hooks.span("phase", "step"):
            self._stepped = False
            self._take_step({})
        self.state.peers.withdraw()
        self.micro_steps += self.plan.microbatches
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

        On every rank, or without `bcast_loss` on those of the last stage; None on the others. `reduce_output` is "avg",
        or None for a list of the micro-batches' losses, which is not broadcast. With `return_logits`, a tuple of this
        and the outputs of the last stage, a list with one for each micro-batch. Without `compute_loss`, these outputs
        alone. `data_iter` is read on the ranks of the first stage, and for the loss on those of the last.
        """
        if reduce_output not in ("avg", None):
            raise ValueError(
                f'eval_batch: reduce_output={reduce_output!r}; write "avg", the mean loss, or None, the loss of each '
                "micro-batch"
            )
        if reduce_output is None and compute_loss and bcast_loss:
            raise ValueError(
                "eval_batch: with reduce_output=None the losses are a list, on the last stage alone; write "
                "bcast_loss=False, too"
            )
        count = self.config.gradient_accumulation_steps if num_micro_batches is None else num_micro_batches
        if count < 1:
            raise ValueError(f"eval_batch: num_micro_batches={count}; write 1 or more")
        training = self.module.training
        self.eval()
        plan = self._planned(count, forward_only=True)
        outputs: list[Any] = []
        self._evaluated = []
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
                data = partial(self._data, loss_fn is not None and compute_loss, data_iter, "eval_batch")
                results = self._run(plan, data, loss if compute_loss else None, backward=False)
        finally:
            self.train(training)
        last = self.module.placement.is_last()
        found: Any = results
        if compute_loss and reduce_output is not None:
            found = self._mean(results, plan.microbatches, self._weight_of_evaluation())
        if not last and not (compute_loss and bcast_loss):
            found = None
        if not return_logits:
            return found
        return found, (outputs if compute_loss else results) if last else None

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """What `train_batch` reads when it is given nothing."""
        self._own_data = iterator

    def set_batch_fn(self, function: Callable[[Any], Any]) -> None:
        """What makes (inputs, labels) of that which the iterator gives."""
        self._batch_fn = function

    def set_dataloader(self, loader: Any) -> None:
        """What `train_batch` reads, over and over, when it is given nothing."""
        self.training_dataloader, self._own_data = loader, None

    @property
    def agg_train_loss(self) -> Tensor | None:
        """What `train_batch` returned last."""
        return self._last_loss

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Have a step take so many samples, in more or fewer micro-batches of the same size.

        Raises ValueError if they do not make up whole micro-batches on every replica."""
        self.names.find("set_train_batch_size", self.state)(train_batch_size)
        self.plan = self._planned(self.config.gradient_accumulation_steps)

    # --- inside

    def _planned(self, microbatches: int, *, forward_only: bool = False) -> Plan:
        """Raises ScheduleError for a schedule that would never end."""
        found = self._plans.get((microbatches, forward_only))
        if found is None:
            pipeline, ranks = self.config.pipeline, self.parallel.mesh.pp
            found = make_plan(pipeline.schedule, ranks, microbatches, self.module.placement.virtual_stages)
            check(found)
            if forward_only:
                forwards = tuple(tuple(a for a in actions if a.op == "F") for actions in found.actions)
                found = Plan(found.schedule, ranks, microbatches, found.virtual_stages, forwards)
            self._plans[microbatches, forward_only] = found
        return found

    def _data(self, labels: bool, data_iter: Iterator[Any] | None = None, caller: str = "train_batch") -> StepData:
        """What is read on this rank: inputs on the first stage, and `labels` on the last if they are needed."""
        wanted = (self.module.placement.is_first(), self.module.placement.is_last() and labels)
        if not any(wanted):
            return StepData(iter(()), self.state.device, wanted, self._batch_fn, caller)
        if data_iter is None and caller == "eval_batch":
            raise PipelineError("eval_batch: pass an iterator of batches on the ranks of the first and the last stage")
        source = data_iter if data_iter is not None else self._batches(self._own_data)
        check = self._check_data if caller == "train_batch" else self._check_evaluated
        return StepData(source, self.state.device, wanted, self._batch_fn, caller, check)

    def _check_data(self, batch: Any) -> None:
        super()._check_data(batch)
        if self._shares_unchecked:
            self._check_shares(shapes_of(batch))

    def _check_evaluated(self, batch: Any) -> None:
        super()._check_data(batch)
        if self._unequal_shares is not None and not self._evaluated:
            self._evaluated = shapes_of(batch)

    def _weight_of_evaluation(self) -> float:
        """What this replica's mean counts in that over all: as in training, unless the script's batches are as large on
        replicas of unequal shares. On all ranks."""
        mesh, shares = self.parallel.mesh, self._unequal_shares
        if shares is None:
            return 1.0
        of_first_stage = gather_objects(self._evaluated, self.parallel.everyone)[: mesh.dp * mesh.tp : mesh.tp]
        return 1.0 if any(equal_batches(of_first_stage, shares)) else self.state.loss_weight

    def _training_data(self, labels: bool) -> StepData:
        """As `_data`, for training. Raises RuntimeError for a layer that nothing would train."""
        thawed = next((param.name for param in self._frozen if param.param.requires_grad), None)
        if thawed is not None:
            raise RuntimeError(
                f"train_batch: {thawed} was frozen when the engine was made, and is not now, and nothing would train "
                "it: unfreeze it before initialize, or make the engine anew"
            )
        return self._data(labels)

    def _run(
        self,
        plan: Plan,
        open_data: Callable[[], StepData],
        loss_fn: Callable[[Any, Any], Any] | None,
        *,
        backward: bool,
    ) -> list[Any]:
        """Run a plan. If it fails on one rank of the job it fails on all."""
        self._refuse_destroyed()
        self._failures.begin()
        activation_checkpoint.attach(self.hooks, self.config.activation_checkpointing)
        half = self.config.fp16.enabled and self.config.fp16.auto_cast
        cast: Callable[[Any], Any] = (lambda inputs: cast_floating(inputs, torch.float16)) if half else _same
        run = PipelineRun(
            self.module, plan, self._links, self.hooks, self.state.device, self.zero if backward else None,
            loss_fn=loss_fn, cast=cast, scale=self.scaler.scale * self.state.loss_weight,
        )  # fmt: skip
        failed: BaseException | None = None
        losses: list[Any] = []
        try:
            losses = run.run(open_data, self._failures)
        except Exception as error:
            failed = error
        except BaseException as error:
            self._failures.give_up()  # this rank will not come back
            self.zero.lost = True
            self.state.fail("an earlier step of this engine", error)
            raise
        raised, halfway = self._failures.agree(failed, begun=run.begun)
        self.zero.lost = self._failures.over
        if raised is not None:
            if halfway and self._ends_alike(run):
                self._begin_step_anew()
            elif halfway:
                self.state.fail("an earlier step of this engine", raised)
            raise raised
        return losses

    def _ends_alike(self, run: PipelineRun) -> bool:
        """Whether a step that failed before any weight was changed can begin anew. On all ranks."""
        if self._failures.over:
            return False
        mesh, sent = self.parallel.mesh, [comm.begun for comm in self.zero.comms]
        alike = self._failures.ends_alike((mesh.pp_rank, mesh.tp_rank), sent, drained=run.drained)
        self.zero.lost = self._failures.over
        return alike

    def _line(self, speed: float) -> str:
        """As DeepSpeed's pipelines report a step: its loss, and what a step takes at this many samples a second."""
        step, each = self.global_steps + 1, self.config.train_batch_size / speed if speed else math.inf
        loss = math.nan if self._last_loss is None else self._last_loss.item()
        return f"steps: {step} loss: {loss:0.4f} iter time (s): {each:0.3f} samples/sec: {speed:0.3f}"

    def _mean(self, losses: list[Any], microbatches: int, weight: float) -> Tensor:
        """Over the ranks of the last stage, where the losses are, each counted by its replica's `weight`."""
        total = torch.zeros((), dtype=torch.float64, device=self.state.device)
        for loss in losses if weight else ():  # what is not finite would stay so times 0
            total.add_(loss.double().mean(), alpha=weight)
        self.parallel.everyone.all_reduce(total, "pipeline").wait()
        mesh = self.parallel.mesh
        return (total / (microbatches * mesh.dp * mesh.tp)).to(self._loss_dtype)


def _same(inputs: Any) -> Any:
    return inputs
