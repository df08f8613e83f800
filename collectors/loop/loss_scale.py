"""Steps of half precision that are skipped as their gradients overflowed, by torch's GradScaler: a mark each, with the
scale that the loss had. (DeepSpeed's are marked by `frameworks.deepspeed`, those of dsprof's engine by itself.)

Whether a step is skipped is told by whether the optimizer stepped: nothing is read from a device for it. Once one was
skipped the scaler itself has just waited for the device, and the scale is there to be read.
"""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from dsprof.schema import OVERFLOW, SCALER_FACT, Kind

from ..capture import facts
from ..capture.open_capture import OpenCapture
from ..hooking.caller import caller
from ..hooking.errors import count_error
from ..hooking.late_imports import when_imported
from ..hooking.timed import timed_by_arguments
from ..hooking.uninstall import Uninstall, replace_attribute
from . import optimizers

if TYPE_CHECKING:
    from ..recorder.record import Recorder

MODULE: Final = "torch.amp.grad_scaler"


def install(capture: OpenCapture) -> list[Uninstall]:
    """Mark the steps that scalers skip from now on."""
    return [when_imported(MODULE, lambda module: _watch(capture.recorder, module))]


def _watch(recorder: Recorder, module: ModuleType) -> Uninstall:
    scaler: Any = module.GradScaler
    watcher = _Scalers(recorder)
    step = timed_by_arguments(scaler.step, watcher.begin, watcher.end, "a scaled step")
    return replace_attribute(scaler, "step", step)


class _Scalers:
    """Looks at each step that a scaler takes, or not."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._name = recorder.intern(OVERFLOW)
        self._described: weakref.WeakSet[Any] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers of which a scaler's step was seen to be one of theirs: of others it would not be known."""

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, int]:
        """The scaler, its optimizer, and how many steps were taken so far."""
        scaler, optimizer = args[0], args[1] if len(args) > 1 else kwargs.get("optimizer")
        if scaler not in self._described:
            self._described.add(scaler)
            facts.state(_describe(scaler, optimizer))
        return scaler, optimizer, optimizers.taken()

    def end(self, begun: tuple[Any, Any, int]) -> None:
        try:
            scaler, optimizer, before = begun
            if optimizers.taken() != before:
                if optimizer not in self._stepped:
                    self._stepped.add(optimizer)
            elif optimizer in self._stepped:
                self._recorder.mark(int(Kind.MARK), self._name, float(scaler.get_scale()))
        except Exception as error:
            count_error("a scaled step", error)


def _describe(scaler: Any, optimizer: Any) -> facts.Fact:
    site, framework = caller()
    enabled = bool(scaler.is_enabled())
    return {
        "fact": SCALER_FACT,
        "enabled": enabled,
        # One that is switched off, as scripts for fp16 and bf16 do it, has no interval to ask for.
        "growth_interval": int(scaler.get_growth_interval()) if enabled else None,
        # A fused optimizer looks at the overflow on its device: it is called all the same, and nothing tells.
        "seen": not any(group.get("fused") for group in getattr(optimizer, "param_groups", ())),
        "site": site,
        "framework": framework,
    }
