"""A trial of `dsprof fix --verify`: it ends after so many steps, on all ranks at the same one, and keeps its losses.

DSPROF_TRIAL is a JSON object: {"steps": 60}; 0 or none: the job ends by itself. Each rank ends by SystemExit from its
optimizer's step, as if the script had called sys.exit(): nobody is signalled, and what the script does after training
is left out. A loss is what `backward` was called of, if it is a single number: it stays where it is, on its device,
until the process ends, and is then written to the run folder.
"""

from __future__ import annotations

import atexit
import json
import os
from pathlib import Path
from typing import Any, Final

from dsprof.atomic import write_atomically
from dsprof.schema import TRIAL_FILE

from ..capture.identity import identify, setting
from ..hooking.errors import count_error
from ..hooking.uninstall import Uninstall, in_reverse, replace_attribute
from ..hooking.wrap import stands_for
from ..overrides.host import after_steps

VARIABLE: Final = "DSPROF_TRIAL"
MOST_LOSSES: Final = 400
"""Of one process; those of the first steps tell best whether two jobs train alike."""


def asked() -> dict[str, Any] | None:
    """What the variable says; None: this is no trial. Raises ValueError."""
    text = setting(VARIABLE)
    if not text:
        return None
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"{VARIABLE} is no JSON object")
    return found


def follow() -> Uninstall:
    """Do what is asked for. To be called when optimizers are watched already: of the last step all is recorded."""
    trial = asked()
    if trial is None:
        return lambda: None
    losses = _Losses()
    steps = int(trial.get("steps") or 0)

    def step(number: int) -> None:
        losses.step = number
        if number == steps:
            raise SystemExit(0)

    return in_reverse([losses.watch(), after_steps(step)])


class _Losses:
    """The losses of a process: of each call of `backward` the step, counted from 0, and the tensor."""

    def __init__(self) -> None:
        self.step = 0
        self.taken: list[tuple[int, Any]] = []
        self.pid = os.getpid()

    def watch(self) -> Uninstall:
        import torch.autograd as autograd

        backward = autograd.backward

        @stands_for(backward)
        def noting(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            if grad_tensors is None and len(self.taken) < MOST_LOSSES:
                self.note(tensors)
            return backward(tensors, grad_tensors, *args, **kwargs)

        atexit.register(self.write)
        return replace_attribute(autograd, "backward", noting)

    def note(self, tensors: Any) -> None:
        try:
            one = tensors[0] if isinstance(tensors, (list, tuple)) and len(tensors) == 1 else tensors
            if one.numel() == 1:
                self.taken.append((self.step, one.detach().clone()))
        except Exception as error:
            count_error("the loss", error)

    def write(self) -> None:
        """Write them down, the mean of each step; a process without any writes nothing."""
        run = setting("DSPROF_RUN")
        if not self.taken or not run or os.getpid() != self.pid:
            return
        try:
            of_step: dict[int, list[float]] = {}
            for step, loss in self.taken:
                of_step.setdefault(step, []).append(float(loss))
            rank = identify().rank
            found = {"rank": rank, "losses": [[step, sum(some) / len(some)] for step, some in sorted(of_step.items())]}
            write_atomically(Path(run) / TRIAL_FILE.format(rank=rank, pid=self.pid), json.dumps(found))
        except Exception as error:  # the device may be gone; the losses are then not compared
            count_error("the losses", error)
