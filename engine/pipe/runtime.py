"""Runs a pipeline's plan: one action after the other, what is sent and received beside them.

A plan says what each rank computes in which order; receives are started a few actions early and sends never waited for,
so that both overlap with the computation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ..comm.lane import Ticket
from ..hooks import Hooks
from ..optim.loss_scaler import widened
from ..schedule import Action, Plan
from ..tree import filled
from ..zero import BackwardPart, Zero
from .failure import FailureConsensus, said
from .module import PipelineModule
from .p2p import AHEAD, Arrival, Direction, Link, Links, Message, PipelineError, message_of
from .split_backward import Work, deferring
from .step_data import StepData

EARLY: Final = 2
"""Receives in one direction that are started before they are needed."""


@dataclass(slots=True)
class _Flight:
    """A micro-batch between a stage's forward and its backward."""

    inputs: list[_Input]
    """Those that a gradient goes back for."""
    outputs: list[Any]
    """Where gradients come in: edges of the graph, so that what was sent on is not kept."""


@dataclass(slots=True)
class _Input:
    """A tensor that came in: what its gradient is like, and the gradient once it is there."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    grad: Tensor | None = None

    def back(self) -> Tensor:
        """What goes back: zeros if the loss does not depend on the tensor."""
        if self.grad is None:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return self.grad


class PipelineRun:
    """One rank's side of one run of a plan."""

    def __init__(
        self,
        module: PipelineModule,
        plan: Plan,
        links: Links,
        hooks: Hooks,
        device: torch.device,
        zero: Zero | None,
        *,
        loss_fn: Callable[[Any, Any], Any] | None,
        cast: Callable[[Any], Any],
        scale: float,
    ) -> None:
        """`zero` is told of each backward, and is None if `plan` has none. `cast` is done to what the first stage
        reads. Gradients are of `scale` times the losses' mean."""
        self._module = module
        self._links = links
        self._hooks = hooks
        self._plan = plan
        self._actions = plan.actions[module.placement.stage_id]
        self._zero = zero
        self._loss_fn = loss_fn
        self._cast = cast
        self._scale = scale / plan.microbatches
        self._last_stage = module.placement.last_stage
        self._flights: dict[tuple[int, int], _Flight] = {}
        self._put_off: dict[tuple[int, int], list[Work]] = {}
        self._here: dict[tuple[Direction, int, int], Message] = {}
        """Messages between two stages of this rank, by the receiving one."""
        self._arrivals: dict[Direction, dict[tuple[int, int], Arrival]] = {direction: {} for direction in AHEAD}
        """Messages on their way, by stage and micro-batch, in the order in which they come."""
        self._sent: list[Ticket] = []
        self._sends = dict.fromkeys(AHEAD, 0)
        self._receives = {direction: self._expected(direction) for direction in AHEAD}
        self._results: list[Any] = []
        self.begun = False
        """Whether a backward has begun to make gradients."""
        self.drained = True
        """Whether nothing that others send this rank, or it them, is on its way after a failure."""

    def run(self, open_batches: Callable[[], StepData], failures: FailureConsensus) -> list[Any]:
        """Run this rank's actions; the losses of the micro-batches, or without a loss function the outputs, where the
        last stage is, detached.

        Raises what a layer raised, and PipelineError on the ranks that wait for one which failed; nothing is under way
        afterwards, and another plan can be run. A failure of this rank is reported to `failures`, which says how long
        others may have to be waited for.
        """
        for link in self._links.values():
            link.begin()
        stage, microbatch = self._hooks.stage, self._hooks.microbatch
        try:
            self._run(open_batches())
        except BaseException as error:
            where = f"stage {'/'.join(map(str, self._module.placement.stages))}"
            failures.report(error, where)
            self._notify_neighbours(str(error) if isinstance(error, PipelineError) else said(error, where))
            if isinstance(error, Exception):
                self._drain(failures.deadline())
            raise
        finally:
            self._hooks.stage, self._hooks.microbatch = stage, microbatch
            for link in self._links.values():
                link.poll()
        return self._results

    def _run(self, batches: StepData) -> None:
        final = len(self._actions) - 1
        for at, action in enumerate(self._actions):
            self._hooks.stage, self._hooks.microbatch = action.stage, action.microbatch
            self._start_receives()
            if action.op == "F":
                self._forward(action, batches)
            elif action.op == "B":
                self._inputs_backward(action, at == final)
            else:
                self._weights_backward(action, at == final)
        for ticket in self._sent:
            ticket.wait()
        for link in self._links.values():
            link.settle()

    # --- actions

    def _forward(self, action: Action, batches: StepData) -> None:
        stage, microbatch = action.stage, action.microbatch
        inputs: list[_Input]
        if stage == 0:
            value, inputs = self._cast(batches.inputs(microbatch)), []
        else:
            value, inputs = arrived(self._take("F", stage, microbatch), grad=self._zero is not None)
        with self._hooks.span("pipe", "F"):
            output = self._module(value, stage)
            if stage == self._last_stage:
                output = self._loss(output, microbatch, batches)
                message = None
            else:
                message = message_of(output, self._module.end_of(stage))
        if message is not None:
            self._give("F", stage, microbatch, message)
        if self._zero is not None:
            tensors = [widened(output) * self._scale] if message is None else message.tensors
            edges = [torch.autograd.graph.get_gradient_edge(t) if t.requires_grad else None for t in tensors]
            self._flights[stage, microbatch] = _Flight(inputs, edges)

    def _loss(self, output: Any, microbatch: int, batches: StepData) -> Any:
        """The loss, or the output itself if there is no function for it; a detached copy is a result."""
        loss_fn = self._loss_fn
        if loss_fn is not None:
            output = loss_fn(output, batches.labels(microbatch))
        if self._zero is not None and not (isinstance(output, Tensor) and output.numel() == 1):
            what = "loss_fn returned" if loss_fn is not None else "there is no loss_fn, and the last layer returned"
            kind = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, Tensor) else type(output).__name__
            raise PipelineError(f"train_batch: {what} {kind}; it must be a scalar, the mean over the micro-batch")
        if self._zero is not None and not output.requires_grad:
            raise PipelineError(
                "train_batch: the loss depends on no parameter that is trained: it was detached or made a number on "
                "the way, all parameters are frozen, or train_batch is called under torch.no_grad()"
            )
        self._results.append(output.detach() if isinstance(output, Tensor) else output)
        return output.reshape(()) if isinstance(output, Tensor) and self._zero is not None else output

    def _inputs_backward(self, action: Action, final: bool) -> None:
        stage, microbatch = action.stage, action.microbatch
        flight = self._flights.pop((stage, microbatch))
        grads: Sequence[Tensor | None] = [None]
        if stage != self._last_stage:
            grads = self._take("B", stage, microbatch).tensors
            wanted = iter(grads)
            grads = [None if edge is None else next(wanted) for edge in flight.outputs]
        splits = self._plan.splits
        zero = self._begin_backward(action, last=final, complete=not splits)
        with ExitStack() as around:
            around.enter_context(self._hooks.span("pipe", "B"))
            around.enter_context(self._hooks.span("phase", "backward"))
            if splits:
                self._put_off[stage, microbatch] = around.enter_context(deferring())
            pairs = [(edge, grad) for edge, grad in zip(flight.outputs, grads, strict=True) if edge is not None]
            if pairs:
                torch.autograd.backward([edge for edge, _ in pairs], [grad for _, grad in pairs])
            zero.finish_backward()
        if stage > 0:
            back = [each.back() for each in flight.inputs]
            self._give("B", stage, microbatch, Message(back, [False] * len(back)))

    def _weights_backward(self, action: Action, final: bool) -> None:
        zero = self._begin_backward(action, last=final, complete=True)
        with self._hooks.span("pipe", "W"), self._hooks.span("phase", "backward"):
            for work in self._put_off.pop((action.stage, action.microbatch)):
                work()
            zero.finish_backward()

    def _begin_backward(self, action: Action, *, last: bool, complete: bool) -> Zero:
        """Announce a backward to ZeRO: stages 0 and 1 reduce in the last, the others in each. `last`: no backward of
        this rank follows in the step. `complete`: all gradients of the stage are there afterwards."""
        assert self._zero is not None
        self.begun = True
        ends = complete and action.stage == self._module.placement.stages[0]  # stages go backwards from the last
        part = BackwardPart(action.stage, action.microbatch, ends)
        self._zero.begin_backward(last=last, complete=complete, part=part)
        return self._zero

    # --- messages

    def _link(self, direction: Direction, sender: int) -> Link | None:
        """By which stage `sender` sends in that direction; None if there is no stage, or one that is on this rank."""
        receiver = sender + AHEAD[direction]
        ranks = self._plan.ranks
        if not 0 <= receiver <= self._last_stage or sender % ranks == receiver % ranks:
            return None
        return self._links[direction, min(sender, receiver) % ranks == ranks - 1]

    def _give(self, direction: Direction, stage: int, microbatch: int, message: Message) -> None:
        link = self._link(direction, stage)
        if link is None:
            self._here[direction, stage + AHEAD[direction], microbatch] = message
            return
        self._sends[direction] += 1
        self._sent = [ticket for ticket in self._sent if not ticket.done]
        self._sent.append(link.send(message, self._hooks.position))

    def _take(self, direction: Direction, stage: int, microbatch: int) -> Message:
        if (direction, stage, microbatch) in self._here:
            return self._here.pop((direction, stage, microbatch))
        arrivals = self._arrivals[direction]
        while (stage, microbatch) not in arrivals:
            self._receive_next(direction)
        return arrivals.pop((stage, microbatch)).take()

    def _expected(self, direction: Direction) -> Iterator[tuple[Link, int, int]]:
        """What this rank gets from others in a direction, in the order in which they send it: by which link, and for
        which stage and micro-batch."""
        before = AHEAD[direction]
        mine = [a for a in self._actions if a.op == direction and 0 <= a.stage - before <= self._last_stage]
        links = [self._link(direction, action.stage - before) for action in mine]
        return iter([(link, a.stage, a.microbatch) for link, a in zip(links, mine, strict=True) if link is not None])

    def _receive_next(self, direction: Direction) -> bool:
        """Start the next receive in a direction; False if there are no more."""
        expected = next(self._receives[direction], None)
        if expected is None:
            return False
        link, stage, microbatch = expected
        step, _, _ = self._hooks.position
        self._arrivals[direction][stage, microbatch] = link.receive((step, microbatch, stage))
        return True

    def _next_arrival(self, direction: Direction) -> Arrival | None:
        """What comes next in a direction, whether its receive has been started or not."""
        arrivals = self._arrivals[direction]
        if not arrivals and not self._receive_next(direction):
            return None
        return arrivals.pop(next(iter(arrivals)))

    def _start_receives(self) -> None:
        for direction, arrivals in self._arrivals.items():
            while len(arrivals) < EARLY and self._receive_next(direction):
                pass
            for arrival in arrivals.values():
                arrival.advance()

    def _notify_neighbours(self, reason: str) -> None:
        """Have the ranks that wait for this one fail too, and not wait for ever."""
        for direction in AHEAD:
            senders = [action.stage for action in self._actions if action.op == direction]
            links = [link for stage in senders if (link := self._link(direction, stage)) is not None]
            for link in links[self._sends[direction] :][:1]:
                self._sent.append(link.fail(reason, self._hooks.position))

    def _drain(self, deadline: float | None) -> None:
        """Receive what is still sent to this rank, to no purpose: its senders would wait for ever otherwise.

        Until `deadline`, if they may be waiting for this rank elsewhere."""
        for direction in AHEAD:
            with suppress(Exception):  # the sender failed, too, and sends no more
                while (arrival := self._next_arrival(direction)) and _ends(arrival, deadline):
                    arrival.wait()
        for ticket in self._sent:
            if _ends(ticket, deadline):
                with suppress(Exception):
                    ticket.wait()
        self.drained = deadline is None or time.monotonic() < deadline
        if deadline is None:
            with suppress(Exception):
                for link in self._links.values():
                    link.settle()


def _ends(ticket: Ticket | Arrival, deadline: float | None) -> bool:
    """Whether it is done by then; waits no longer."""
    while deadline is not None and not ticket.done:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


class _Arrive(torch.autograd.Function):
    """What came in, as if it had been computed here, so that a layer may write to it; its gradient goes to `into`."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: list[Tensor], into: _Input) -> Tensor:
        ctx.into = into
        return tensor.pop()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (ctx.into.grad,) = grads
        return None, None, None


_arrive: Final[Callable[..., Tensor]] = _Arrive.apply


def arrived(message: Message, *, grad: bool) -> tuple[Any, list[_Input]]:
    """A message as a stage's input, and those of its tensors that a gradient goes back for."""
    tensors, inputs = [], []
    for tensor, wanted in zip(message.tensors, message.wanted, strict=True):
        plain = tensor.detach()
        if wanted and grad:
            inputs.append(_Input(plain.shape, plain.dtype, plain.device))
            anchor = torch.empty(0, device=plain.device, requires_grad=True)
            plain = _arrive(anchor, [plain], inputs[-1])
        tensors.append(plain)
    return filled(message.form, tensors), inputs
