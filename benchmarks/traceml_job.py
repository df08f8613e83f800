"""One of the scripts of `tests/verdict_jobs/`, traced by TraceML as its documentation says for a plain loop.

    traceml run traceml_job.py --nproc-per-node 2 --args tests/verdict_jobs/ddp.py --steps 60

Its `trace_step(model)` wants the training loop's edit: around what is from `zero_grad` to `optimizer.step`. Here a step
begins with the first call of a module in training, and ends where the script says that its step ended (`Log.step`).
TraceML diagnoses nothing of a job whose input it has never seen fetched: scripts that make their input themselves fetch
an empty batch before each step.
"""

from __future__ import annotations

import itertools
import runpy
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import traceml_ai
from torch import nn
from torch.utils.data import DataLoader


class Steps:
    """Opens `trace_step` at the first forward of a step and closes it when the script ends the step."""

    def __init__(self) -> None:
        self._open: AbstractContextManager[None] | None = None
        self._without_loader = traceml_ai.wrap_dataloader_fetch(itertools.repeat(None))
        self.has_loader = False

    def begin(self, model: nn.Module) -> None:
        if self._open is None and model.training and torch.is_grad_enabled():
            if not self.has_loader:
                next(self._without_loader)
            self._open = traceml_ai.trace_step(model)
            self._open.__enter__()

    def end(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


def trace(steps: Steps, log: type[Any]) -> None:
    """Calls of modules begin steps, and ends of `log`'s steps end them."""
    called, logged, iterated = nn.Module.__call__, log.step, DataLoader.__iter__

    def iterate(loader: DataLoader[Any]) -> Any:
        steps.has_loader = True
        return iterated(loader)

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        steps.begin(module)
        return called(module, *args, **kwargs)

    def step(self: Any, loss: float) -> None:
        steps.end()
        logged(self, loss)

    nn.Module.__call__ = call  # type: ignore[method-assign]
    DataLoader.__iter__ = iterate  # type: ignore[method-assign]
    log.step = step


def main() -> None:
    script = Path(sys.argv[1]).resolve()
    sys.argv = [str(script), *sys.argv[2:]]
    sys.path.insert(0, str(script.parent))
    traceml_ai.init(mode="auto")
    import common  # the scripts' own: beside them

    trace(Steps(), common.Log)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
