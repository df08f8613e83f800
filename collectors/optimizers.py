"""Optimizer steps: they end the training step, and the first one shows that this process trains.

torch iterates over the global hooks while it calls them, so a hook that adds or removes one ends the job with
"OrderedDict mutated during iteration". Ours are registered once, when the process is armed, and stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dsprof.schema import Kind

if TYPE_CHECKING:
    from .record import Recorder


class _Steps:
    """Records the outermost optimizer step, once there is a recorder."""

    def __init__(self) -> None:
        self.on_first: Callable[[], None] | None = None
        self.recorder: Recorder | None = None
        self.on_step: Callable[[], None] | None = None
        self.name = 0
        self.handle = 0
        self.under_way: list[int] = []
        """ids of nested optimizers: ZeroRedundancyOptimizer steps another one inside."""

    def before(self, optimizer: object, *_: Any) -> None:
        if self.on_first is not None:
            first, self.on_first = self.on_first, None
            first()
        if self.recorder is None:
            return
        if id(optimizer) in self.under_way:  # its last step raised, so `after` never ran
            self.under_way.clear()
        if not self.under_way:
            self.handle = self.recorder.begin(Kind.PHASE, self.name)
        self.under_way.append(id(optimizer))

    def after(self, optimizer: object, *_: Any) -> None:
        if self.recorder is None or not self.under_way:
            return
        if self.under_way.pop() == id(optimizer) and not self.under_way:
            self.recorder.end(self.handle)
            if self.on_step is not None:
                self.on_step()


_steps = _Steps()
_watching = False


def watch(on_first: Callable[[], None] | None = None) -> None:
    """Register the hooks, once a process; `on_first` is called before the first step from now on."""
    global _watching
    _steps.on_first = on_first
    if not _watching:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        register_optimizer_step_pre_hook(_steps.before)
        register_optimizer_step_post_hook(_steps.after)
        _watching = True


def install(recorder: Recorder, on_step: Callable[[], None]) -> Callable[[], None]:
    """Record steps from now on and call `on_step` after each outermost one."""
    if not _watching:
        watch()
    _steps.name = recorder.intern("optimizer")
    _steps.under_way.clear()
    _steps.recorder, _steps.on_step = recorder, on_step

    def uninstall() -> None:
        _steps.recorder = _steps.on_step = None

    return uninstall
