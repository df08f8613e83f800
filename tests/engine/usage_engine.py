"""Runs a program of the random tester on an engine: one rank's side of it."""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from usage_faults import put_back
from usage_net import PATH, TROUBLE, Net, TroubleError, batch, loss_of
from usage_program import LATE_RATE, MOMENTUM, RATE, SAMPLES, Action, Configuration, Program

from dsprof import engine as ds
from dsprof.engine.deepspeed.fragments import safe_get_full_fp32_param, safe_get_full_optimizer_state
from dsprof.engine.deepspeed.start import initialize
from dsprof.engine.pipe import PipelineModule

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
STACKS_AFTER_S: Final = 15.0
"""When a rank that has not come to the end writes where it is."""

State = dict[str, "np.ndarray[Any, Any]"]
"""What there is to be compared, by `weight NAME`, `master NAME`, `momentum NAME`, `forwards` and `steps`; exact."""


@dataclass
class Outcome:
    """What came of one action on one rank."""

    kind: str
    """`done`, `nothing` (there was nothing to do it with), `refused` by name, `trouble` as planted, or an `error`."""
    value: float | None = None
    """A loss, or the norm of the gradients of a step that was taken."""
    text: str = ""
    """Of an exception: its class and message, of an `error` its traceback."""
    state: State = field(default_factory=dict)


def run(rank: int, program: Program, folder: str, fault: str = "") -> list[Outcome]:
    """The outcome of every action, and of reading the state at the end, with a `fault` put back (`usage_faults.py`).

    `folder` is for checkpoints, and for `progress.RANK`: the action that is under way, and after a while the stacks.
    """
    TROUBLE.clear()
    with open(Path(folder, f"progress.{rank}"), "w") as progress, warnings.catch_warnings(), put_back(fault):
        warnings.simplefilter("ignore")
        faulthandler.dump_traceback_later(STACKS_AFTER_S, file=progress)
        try:
            progress.write("initialize\n")
            progress.flush()
            script = Script(program.configuration, rank, Path(folder))
            outcomes = []
            for number, action in enumerate((*program.actions, Action("read"))):
                progress.write(f"line {number + 1}: {action}\n")
                progress.flush()
                outcomes.append(script.outcome(number, action))
            progress.write("destroy\n")
            progress.flush()
            script.engine.destroy()
        finally:
            faulthandler.cancel_dump_traceback_later()
    return outcomes


def settings_of(made: Configuration) -> dict[str, Any]:
    """The engine's configuration."""
    size = 40 if made.buckets == "small" else 10**8
    kept = 10**8 if made.keep == "all" else 0
    zero: dict[str, Any] = {"stage": made.stage, "reduce_bucket_size": size}
    if made.stage:
        zero |= {"allgather_bucket_size": size, "sub_group_size": size}
    if made.stage == 3:
        zero |= {
            "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": kept,
            "stage3_prefetch_bucket_size": kept,
        }  # fmt: skip
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": made.accumulate,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
    }
    if made.precision == "bf16":
        settings["bf16"] = {"enabled": True}
    if made.optimizer == "config":
        settings["optimizer"] = {"type": "SGD", "params": {"lr": RATE, "momentum": MOMENTUM}}
    if made.pipeline:
        settings["pipeline"] = {"stages": 2, "schedule": made.layout}
    return settings


class Loss:
    """A pipeline's loss function."""

    times = 1

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.times * loss_of(outputs, targets)


class Script:
    """A training script on one rank."""

    def __init__(self, made: Configuration, rank: int, folder: Path) -> None:
        self.made = made
        self.folder = folder
        self.dtype = DTYPES[made.precision]
        self.samples = SAMPLES
        self.losses: list[Tensor] = []
        net = Net(tied=made.tied == "yes", side=not made.pipeline)
        self.loss: Any = net
        model: torch.nn.Module = net
        if made.pipeline:
            self.loss = Loss()
            parts = 2 if made.layout == "interleaved" else 1
            model = PipelineModule(PATH, 2, model=net, loss_fn=self.loss, virtual_stages=parts)
        self.loss.times = made.accumulate
        listed = [param for name, param in model.named_parameters() if not name.startswith("late.")]
        optimizer = None if made.optimizer == "config" else torch.optim.SGD(listed, lr=RATE, momentum=MOMENTUM)
        self.engine: Any = initialize(
            model=model, optimizer=optimizer, model_parameters=listed, config=settings_of(made)
        )[0]
        self.replica = self.engine.parallel.mesh.dp_rank

    def outcome(self, number: int, action: Action) -> Outcome:
        """Do the action on line `number`, whatever comes of it."""
        try:
            outcome: Outcome = getattr(self, action.name)(number, action) or Outcome("done")
        except Exception as error:
            outcome = Outcome(*_what(error))
        TROUBLE.clear()
        return outcome

    def batches(self, number: int, count: int) -> list[tuple[Tensor, Tensor]]:
        return [batch(10 * number + at, self.replica, self.samples) for at in range(count)]

    # --- a model that runs as one

    def forward(self, number: int, action: Action) -> Outcome:
        (inputs,) = self.batches(number, 1)
        if action.get("fails"):
            TROUBLE["forward"] = action.get("fails")
        loss = self.engine(*inputs, side=action.get("side") == "yes")
        self.losses.append(loss)
        return Outcome("done", loss.item())

    def backward(self, number: int, action: Action) -> Outcome:
        if not self.losses:
            return Outcome("nothing")
        retain = action.get("retain") == "yes"
        loss = self.losses[-1] if retain else self.losses.pop()
        if action.get("fails"):
            TROUBLE["backward"] = action.get("fails")
        with self.engine.no_sync() if action.get("no_sync") == "yes" else contextlib.nullcontext():
            self.engine.backward(loss, retain_graph=retain)
        return Outcome("done")

    def step(self, number: int, action: Action) -> Outcome:
        with self.optimizer_failing(action.get("fails")):
            self.engine.step()
        return Outcome("done", self.engine.get_global_grad_norm() if self.engine.was_step_applied() else None)

    @contextlib.contextmanager
    def optimizer_failing(self, call: str) -> Iterator[None]:
        """Have the optimizer raise at that call of it: one for each tile of parameters."""
        calls = 0

        def raises(*_: object) -> None:
            nonlocal calls
            calls += 1
            if str(calls) == call:
                raise TroubleError("the optimizer")

        handle = self.engine.optimizer.register_step_pre_hook(raises)
        try:
            yield
        finally:
            handle.remove()

    def discard(self, number: int, action: Action) -> None:
        """Losses that are not taken backward."""
        self.losses.clear()

    # --- a model in stages, and what both have

    def train_batch(self, number: int, action: Action) -> Outcome:
        count = self.engine.gradient_accumulation_steps()
        batches = self.batches(number, count - 1 if action.get("data") == "short" else count)
        for when in ("forward", "backward", "loss"):
            if action.get(when) and action.get("replica", str(self.replica)) == str(self.replica):
                TROUBLE[when] = action.get(when)
        with self.optimizer_failing(action.get("optimizer")):
            return Outcome("done", self.engine.train_batch(iter(batches)).item())

    def evaluate(self, number: int, action: Action) -> Outcome:
        batches = self.batches(number, self.engine.gradient_accumulation_steps())
        if self.made.pipeline:
            return Outcome("done", self.engine.eval_batch(iter(batches)).item())
        with torch.inference_mode() if action.get("by") == "inference_mode" else torch.no_grad():
            return Outcome("done", self.engine(*batches[0]).item())

    def zero_grad(self, number: int, action: Action) -> None:
        of = {"engine": self.engine, "optimizer": self.engine.optimizer, "module": self.engine.module}
        of[action.get("of", "engine")].zero_grad()

    def mode(self, number: int, action: Action) -> None:
        self.engine.train(action.get("to") == "train")

    def save(self, number: int, action: Action) -> None:
        self.engine.save_checkpoint(self.folder, action.get("as"))

    def load(self, number: int, action: Action) -> Outcome | None:
        if not Path(self.folder, action.get("as")).exists():
            return Outcome("nothing")
        self.engine.load_checkpoint(
            self.folder, action.get("as"), load_module_only=action.get("what") == "module",
            load_optimizer_states=action.get("what") != "without_optimizer",
        )  # fmt: skip
        return None

    def requires_grad(self, number: int, action: Action) -> None:
        for param in self._params(action.get("of")):
            param.requires_grad_(action.get("to") == "yes")

    def add_group(self, number: int, action: Action) -> None:
        self.engine.optimizer.add_param_group({"params": self._params("late"), "lr": LATE_RATE})

    def rate(self, number: int, action: Action) -> None:
        for group in self.engine.optimizer.param_groups:
            group["lr"] = float(action.get("to"))

    def set_samples(self, number: int, action: Action) -> None:
        self.engine.set_train_micro_batch_size(int(action.get("to")))
        self.samples = int(action.get("to"))

    def set_accumulate(self, number: int, action: Action) -> None:
        count = int(action.get("to"))
        self.engine.set_train_batch_size(count * self.samples * self.made.replicas)
        self.loss.times = count

    def move(self, number: int, action: Action) -> None:
        module, to = self.engine.module, action.get("to")
        if to in ("channels_last", "contiguous_format"):
            module.to(memory_format=getattr(torch, to))
        elif to == "engine_float64":
            self.engine.to(torch.float64).to(self.dtype)
        else:
            module.to(getattr(torch, to)).to(self.dtype)

    def reload(self, number: int, action: Action) -> None:
        self.engine.module.load_state_dict(self.engine.module.state_dict())

    def negate(self, number: int, action: Action) -> None:
        params = self._params(action.get("of"))
        with ds.zero.GatheredParameters(params, modifier_rank=0), torch.no_grad():
            for param in params:
                param.mul_(-1)

    def read(self, number: int, action: Action) -> Outcome:
        """All that is compared, in whole."""
        engine, found = self.engine, {}
        names = {param: name for name, param in engine.module.named_parameters()}
        if self.made.pipeline:
            names = engine.module.names()
        with ds.zero.GatheredParameters(list(names)):
            for param, name in names.items():
                found[f"weight {name}"] = param.detach().clone()
        for param, name in names.items():
            master = safe_get_full_fp32_param(param)
            found[f"master {name}"] = param.detach() if master is None else master
            with contextlib.suppress(ValueError):  # before its first step it has none
                state = safe_get_full_optimizer_state(param, "momentum_buffer")
                if state is not None:
                    found[f"momentum {name}"] = state
        for name, buffer in engine.module.named_buffers():
            found[name] = buffer
        arrays = {name: tensor.double().numpy() for name, tensor in found.items()}
        arrays["steps"] = np.array(float(engine.global_steps))
        return Outcome("done", state=arrays)

    def _params(self, layer: str) -> list[torch.nn.Parameter]:
        """Those of a layer, as far as they are on this rank."""
        return [p for name, p in self.engine.module.named_parameters() if name.startswith(f"{layer}.")]


def _what(error: Exception) -> tuple[str, None, str]:
    """The outcome that an exception is, and what it says."""
    said = f"{type(error).__name__}: {error}"
    told = (
        TroubleError.__name__ in said and "failed half-way" not in said
    )  # by another rank, and not of an earlier step
    if isinstance(error, TroubleError | StopIteration) or told:
        return "trouble", None, said
    frame = _innermost(error.__traceback__)
    module = str(frame.tb_frame.f_globals.get("__name__"))
    if module.startswith("dsprof.engine.") and _line(frame).startswith("raise"):
        return "refused", None, said
    return "error", None, "".join(traceback.format_exception(error))[-3000:]


def _innermost(trace: TracebackType | None) -> TracebackType:
    assert trace is not None
    return trace if trace.tb_next is None else _innermost(trace.tb_next)


def _line(frame: TracebackType) -> str:
    """The line that raised; of a statement over several lines, the first."""
    name, number = frame.tb_frame.f_code.co_filename, frame.tb_lineno
    return linecache.getline(name, number).strip()


def progress(folder: Path) -> Iterator[str]:
    """Where each rank was when it was last heard of, and its stacks."""
    for file in sorted(folder.glob("progress.*")):
        lines = file.read_text().splitlines()
        at = max((n for n, line in enumerate(lines) if line.split(":")[0].split(" ")[0] in MARKS), default=0)
        yield f"{file.name.replace('progress.', 'rank ')}: " + "\n    ".join(lines[at:])


MARKS: Final = ("initialize", "line", "destroy")
