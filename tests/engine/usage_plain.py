"""What a program of the random tester means: training with plain torch in one process, a copy of the model for each
data-parallel rank; and the judgement of what an engine made of the same program.

Gradients add up in `grad` until they are cleared. A step takes their mean over the copies, with torch.optim.SGD in
fp32, once the micro-batches of a step have each had their `step()`. Nothing of the engine is imported here.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from usage_net import TROUBLE, Net, TroubleError, batch
from usage_program import LATE_RATE, MOMENTUM, RATE, SAMPLES, Action, Configuration, Program

if TYPE_CHECKING:
    from usage_engine import Outcome

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
ENDED: Final = (TroubleError, StopIteration)


class Plain:
    """The training; every action is a method."""

    def __init__(self, made: Configuration) -> None:
        self.made = made
        self.dtype = DTYPES[made.precision]
        self.samples, self.accumulate = SAMPLES, made.accumulate
        self.copies = [
            Net(tied=made.tied == "yes", side=not made.pipeline).to(self.dtype) for _ in range(made.replicas)
        ]
        for net in self.copies:
            net.times = made.accumulate
        self.masters = {name: nn.Parameter(p.detach().float().clone()) for name, p in self._params(0).items()}
        """What the optimizer steps."""
        listed = [master for name, master in self.masters.items() if not name.startswith("late.")]
        self.optimizer = torch.optim.SGD(listed, lr=RATE, momentum=MOMENTUM)
        self.steps = 0
        self.microbatches = 0
        """Of the step under way, those that are complete."""
        self.losses: list[list[Tensor]] = []
        self.saved: dict[str, dict[str, Any]] = {}
        # What may be refused, and why, depends on what happened before:
        self.backwards = 0
        """Since the last `step()`."""
        self.synced = False
        """Whether one of them in this step was outside `no_sync`."""
        self.partial = False
        """A backward failed, and its gradients have not been cleared."""
        self.halfway = False
        """A pipeline's step failed."""
        self.uncounted = False
        """A step was refused or failed, before which an engine may have run any number of forwards."""
        self.lost = False
        """One replica of a pipeline failed by itself, and the ranks' connections have been broken."""
        self.broken = False
        """A step failed half-way: there are no right weights until a checkpoint is loaded."""
        self.moved = False
        self.doubled = False
        """The optimizer has been given parameters that it has: no step can be taken any more."""

    # --- the actions

    def forward(self, number: int, action: Action) -> list[float]:
        if action.get("fails"):
            TROUBLE["forward"] = action.get("fails")
        side = action.get("side") == "yes"
        losses = [net(*inputs, side=side) for net, inputs in zip(self.copies, self._batches(number), strict=True)]
        self.losses.append(losses)
        return [loss.item() for loss in losses]

    def backward(self, number: int, action: Action) -> None:
        retain = action.get("retain") == "yes"
        losses = self.losses[-1] if retain else self.losses.pop()
        if action.get("fails"):
            TROUBLE["backward"] = action.get("fails")
        failed = None
        for loss in losses:  # all of them, since all ranks fail
            try:
                (loss / self.accumulate).backward(retain_graph=retain)
            except (RuntimeError, *ENDED) as error:
                failed = error
        if failed is not None:
            self.partial = True
            raise failed
        self.backwards += 1
        self.synced = self.synced or action.get("no_sync") != "yes"

    def step(self, number: int, action: Action) -> float | None:
        self.microbatches += 1
        self.backwards = 0
        return self._step() if self.microbatches >= self.accumulate else None

    def discard(self, number: int, action: Action) -> None:
        self.losses.clear()

    def train_batch(self, number: int, action: Action) -> list[float]:
        """Of each rank its mean loss; of a pipeline the mean of all."""
        for net in self.copies:
            net.train()
        short = action.get("data") == "short"
        losses: list[list[float]] = [[] for _ in self.copies]
        try:
            for at in range(self.accumulate):
                if short and at == self.accumulate - 1:
                    raise StopIteration
                for replica, (net, inputs) in enumerate(zip(self.copies, self._batches(number, at), strict=True)):
                    for when in ("forward", "backward", "loss"):
                        if action.get(when) and action.get("replica", str(replica)) == str(replica):
                            TROUBLE[when] = action.get(when)
                    loss = net(*inputs)
                    (loss / self.accumulate).backward()
                    TROUBLE.clear()
                    losses[replica].append(loss.item())
        except ENDED:
            self.zero_grad(number, Action("zero_grad"))
            self.uncounted = self.halfway = self.made.pipeline
            self.lost = self.lost or (self.made.pipeline and self.made.replicas > 1 and bool(action.get("replica")))
            raise
        self._step()
        means = [sum(mine) / len(mine) for mine in losses]
        return [sum(means) / len(means)] if self.made.pipeline else means

    def evaluate(self, number: int, action: Action) -> list[float]:
        before = [net.training for net in self.copies]
        with torch.no_grad():
            if not self.made.pipeline:
                return [net(*inputs).item() for net, inputs in zip(self.copies, self._batches(number), strict=True)]
            found = []
            for at in range(self.accumulate):
                for net, inputs in zip(self.copies, self._batches(number, at), strict=True):
                    found.append(net.eval()(*inputs).item())
            for net, training in zip(self.copies, before, strict=True):
                net.train(training)
        return [sum(found) / len(found)]

    def zero_grad(self, number: int, action: Action) -> None:
        """The engine's, after which the step begins anew, or one of torch's: micro-batches then count as they did."""
        for net in self.copies:
            net.zero_grad()
        self.partial = self.synced = False
        self.backwards = 0
        if action.get("of", "engine") == "engine":
            self.microbatches = 0

    def mode(self, number: int, action: Action) -> None:
        for net in self.copies:
            net.train(action.get("to") == "train")

    def save(self, number: int, action: Action) -> None:
        self.saved[action.get("as")] = copy.deepcopy({
            "copies": [net.state_dict() for net in self.copies],
            "masters": self.masters,
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "uncounted": self.uncounted,
        })  # fmt: skip

    def load(self, number: int, action: Action) -> None:
        saved = copy.deepcopy(self.saved[action.get("as")])
        if action.get("what") == "all":
            self.optimizer.load_state_dict(saved["optimizer"])  # ValueError for other groups
        for net, state in zip(self.copies, saved["copies"], strict=True):
            net.load_state_dict(state)
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(saved["masters"][name])
        self.zero_grad(number, Action("zero_grad"))
        self.uncounted = saved["uncounted"]
        if action.get("what") != "module":
            self.steps = saved["steps"]
        if action.get("what") == "all":
            self.broken = self.halfway = False

    def requires_grad(self, number: int, action: Action) -> None:
        for replica in range(self.made.replicas):
            for name, param in self._params(replica).items():
                if name.startswith(f"{action.get('of')}."):
                    param.requires_grad_(action.get("to") == "yes")

    def add_group(self, number: int, action: Action) -> None:
        late = [master for name, master in self.masters.items() if name.startswith("late.")]
        self.optimizer.add_param_group({"params": late, "lr": LATE_RATE})  # ValueError if they are there

    def rate(self, number: int, action: Action) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = float(action.get("to"))

    def set_samples(self, number: int, action: Action) -> None:
        self.samples = int(action.get("to"))

    def set_accumulate(self, number: int, action: Action) -> None:
        self.accumulate = int(action.get("to"))
        for net in self.copies:
            net.times = self.accumulate

    def move(self, number: int, action: Action) -> None:
        self.moved = True
        for net in self.copies:
            if action.get("to") in ("half", "bfloat16", "float32"):
                net.to(getattr(torch, action.get("to"))).to(self.dtype)
        self._take_edits()

    def reload(self, number: int, action: Action) -> None:
        for net in self.copies:
            net.load_state_dict(net.state_dict())

    def negate(self, number: int, action: Action) -> None:
        with torch.no_grad():
            for replica in range(self.made.replicas):
                for name, param in self._params(replica).items():
                    if name.startswith(f"{action.get('of')}."):
                        param.mul_(-1)
        self._take_edits()

    def read(self, number: int, action: Action) -> dict[str, Tensor]:
        found = {f"weight {name}": param.detach() for name, param in self._params(0).items()}
        for name, master in self.masters.items():
            found[f"master {name}"] = master.detach()
            momentum = self.optimizer.state.get(master, {}).get("momentum_buffer")
            if momentum is not None:
                found[f"momentum {name}"] = momentum
        found |= {name: buffer for name, buffer in self.copies[0].named_buffers() if not self.uncounted}
        found["steps"] = torch.tensor(self.steps)
        return found

    # --- what may be refused

    def may_refuse(self, action: Action, said: str) -> bool:
        """Whether an engine may refuse `action` now, saying that. It must not refuse what it has no reason to."""
        made, thawed = self.made, self._thawed()
        if made.pipeline and action.name in ("forward", "backward", "step"):
            return "train_batch" in said
        begun = self.microbatches > 0 or self.backwards > 0
        failed = self.broken or self.partial or self.halfway
        step = (
            (r"frozen\.\S+ was frozen when the engine was made", thawed),
            (r"that another one has, too", self.doubled),
            (r"\.to\(|moved|memory", self.moved),
            (r"failed", failed),
        )
        reasons = {
            "step": (
                *step, (r"without engine\.backward", self.backwards == 0), (r"inside engine\.no_sync", not self.synced)
            ),
            "train_batch": (*step, (r"in the middle of a step", begun or failed)),
            "save": ((r"failed", failed), (r"that another one has, too", self.doubled)),
            "load": ((r"that another one has, too", self.doubled),),
            "backward": ((r"engine\.no_sync: ZeRO stage", made.stage >= 2), (r"failed", failed)),
            "evaluate": ((r"failed", failed),),
            "set_accumulate": ((r"in the middle of a step", begun),),
            "move": ((r".", True),),
            "reload": ((r"GatheredParameters", made.stage == 3),),
        }  # fmt: skip
        return any(true and re.search(pattern, said) for pattern, true in reasons.get(action.name, ()))

    # --- inside

    def _params(self, replica: int) -> dict[str, nn.Parameter]:
        return dict(self.copies[replica].named_parameters())

    def _thawed(self) -> bool:
        """Whether the layer that is frozen at first trains, or has a gradient of when it did."""
        frozen = [param for name, param in self._params(0).items() if name.startswith("frozen.")]
        return any(param.requires_grad or param.grad is not None for param in frozen)

    def _batches(self, number: int, at: int = 0) -> list[tuple[Tensor, Tensor]]:
        return [batch(10 * number + at, replica, self.samples) for replica in range(self.made.replicas)]

    def _step(self) -> float:
        """The optimizer's step; the norm of the gradients that it was given."""
        everywhere = [self._params(replica) for replica in range(self.made.replicas)]
        for name, master in self.masters.items():
            grads = [grad for params in everywhere if (grad := params[name].grad) is not None]
            master.grad = torch.stack([grad.float() for grad in grads]).sum(0) / len(everywhere) if grads else None
        given = [master for group in self.optimizer.param_groups for master in group["params"]]
        stepped = [master for master in given if master.grad is not None]
        norm = sum((master.grad.double().square().sum() for master in stepped), torch.zeros(())).sqrt().item()
        self.optimizer.step()
        with torch.no_grad():
            for params in everywhere:
                for name, master in self.masters.items():
                    if any(master is each for each in stepped):
                        params[name].copy_(master)
        self.zero_grad(0, Action("zero_grad"))
        self.steps += 1
        return norm

    def _take_edits(self) -> None:
        """What was written to weights goes to their masters; what is a master's rounding leaves that as it is."""
        with torch.no_grad():
            for name, param in self._params(0).items():
                master = self.masters[name]
                master.copy_(torch.where(master.to(self.dtype) == param, master, param.float()))


def judge(program: Program, ranks: Sequence[Sequence[Outcome]]) -> str | None:
    """What an engine's `ranks` did wrong in `program`, in words; None if each action ended right or refused by name."""
    plain = Plain(program.configuration)
    for number, action in enumerate((*program.actions, Action("read"))):
        here = [outcomes[number] for outcomes in ranks]
        wrong = _wrong(plain, number, action, here)
        TROUBLE.clear()
        if wrong:
            return f"line {number + 1}: {action}: {wrong}"
    return None


def _wrong(plain: Plain, number: int, action: Action, here: list[Outcome]) -> str | None:
    kinds = sorted({outcome.kind for outcome in here})
    if plain.lost and any(outcome.kind in ("refused", "error") for outcome in here):
        return None  # what a rank has by itself it may still do
    if action.name == "move" and kinds == ["done", "refused"]:  # some ranks of a pipeline have nothing to move
        kinds, here = ["refused"], [outcome for outcome in here if outcome.kind == "refused"]
    if len(kinds) > 1:
        return "ranks differ: " + "; ".join(f"{outcome.kind} {outcome.text}" for outcome in here)
    (kind,) = kinds
    said = here[0].text
    if kind == "nothing":
        return None
    if kind == "refused" and plain.may_refuse(action, said):
        if action.name == "train_batch":
            plain.uncounted = True
            for net in plain.copies if not re.search("in the middle of a step|failed", said) else ():
                net.train()  # which train_batch does before what is refused then
        return None
    if plain.broken:
        return _while_broken(plain, number, action, here)
    if kind == "trouble" and (action.name == "step" or action.get("optimizer")):
        plain.broken = True
        return None
    if plain.doubled and kind == "done" and action.name in ("step", "train_batch"):
        # Each step is refused from now on; when that is depends on what refused ones left of their micro-batches.
        took = action.name == "train_batch" or here[0].value is not None
        return "a step was taken with an optimizer that has a parameter twice" if took else None
    expected: Any = None
    error: Exception | None = None
    try:
        expected = getattr(plain, action.name)(number, action)
    except Exception as raised:
        error = raised
    if kind == "trouble" or (kind == "refused" and action.get("data") == "short"):
        return None if isinstance(error, ENDED) else f"trouble that was not planted: {said}"
    if kind != "done":
        return None if error is not None and not isinstance(error, ENDED) else f"{kind}, and torch trains: {said}"
    if error is not None and action.name == "add_group":
        plain.doubled = True  # which is found at the next step
        return None
    if error is not None:
        return f"went on in silence where torch raises {type(error).__name__}: {error}"
    return _difference(expected, here, plain.made)


def _while_broken(plain: Plain, number: int, action: Action, here: list[Outcome]) -> str | None:
    """After a step that failed half-way nothing is right but to refuse, and to load a checkpoint."""
    if action.name == "load" and here[0].kind == "done":
        plain.load(number, action)
        return None
    took = action.name in ("save", "train_batch") or (action.name == "step" and here[0].value is not None)
    if took and here[0].kind == "done":
        return "done, after a step that failed half-way"
    if action.name in ("mode", "requires_grad", "add_group", "rate", "set_samples", "set_accumulate"):
        try:
            getattr(plain, action.name)(number, action)
        except ValueError:  # a group that is there already
            plain.doubled = plain.doubled or here[0].kind == "done"
    return None


def _difference(expected: Any, here: list[Outcome], made: Configuration) -> str | None:
    if isinstance(expected, dict):
        exact = {name: tensor.double().numpy() for name, tensor in expected.items()}
        for rank, outcome in enumerate(here):
            missing = exact.keys() - outcome.state.keys() if not made.pipeline else set()
            more = outcome.state.keys() - exact.keys() - {"embed.forwards"}
            if missing or more:
                return f"rank {rank} has not {sorted(missing)}, and has {sorted(more)}"
            for name, value in outcome.state.items():
                if name in exact and not np.array_equal(value, exact[name]):
                    return f"rank {rank}: {name} is off by {np.abs(value - exact[name]).max():.4g}"
        return None
    values = [outcome.value for outcome in here]
    if not isinstance(expected, list):
        expected = [expected] * len(here)
    elif len(expected) != len(here):
        expected = [expected[0]] * len(here)
    for rank, (value, right) in enumerate(zip(values, expected, strict=True)):
        if (value is None) != (right is None):
            return f"rank {rank}: " + ("no step was taken" if value is None else "a step was taken")
        if value is not None and abs(value - right) > 1e-6 * abs(right):
            return f"rank {rank}: {value:.9g}, and in one process {right:.9g}"
    return None
