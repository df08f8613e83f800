"""Compilation: the time torch.compile takes for itself, as a phase on the thread that needed the code.

Dynamo calls back at the beginning and the end of the outermost compilation of the process: of a frame, or of a
backward graph that was left until it was needed.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from dsprof.schema import Kind

from ..capture.open_capture import OpenCapture
from ..hooking import dynamo, private
from ..hooking.late_imports import when_imported
from ..hooking.uninstall import Uninstall
from ..hooking.wrap import stands_for

if TYPE_CHECKING:
    from ..recorder.record import Recorder


class Compilations:
    """The callbacks, and how they stay: `torch._dynamo.reset()` removes everybody's."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._name = recorder.intern("compile")
        self._handle = 0
        dynamo.skip(Compilations.began, Compilations.ended)  # those of a backward come from the autograd engine

    def hook(self, module: ModuleType) -> Uninstall:
        """Have the handler of `torch._dynamo.callback` call back, until the result is called."""
        handler = private.need(f"{module.__name__}:callback_handler")
        remove_all = handler.clear

        @stands_for(remove_all)
        def clear() -> None:
            remove_all()
            self._register(handler)

        def unhook() -> None:
            if vars(handler).get("clear") is clear:
                del handler.clear
            for callback, registered in ((self.began, handler.start_callbacks), (self.ended, handler.end_callbacks)):
                if callback in registered:
                    registered.remove(callback)

        self._register(handler)
        handler.clear = clear
        return unhook

    def _register(self, handler: Any) -> None:
        handler.register_start_callback(self.began)
        handler.register_end_callback(self.ended)

    def began(self, *_: Any) -> None:
        self._handle = self._recorder.begin(Kind.PHASE, self._name)

    def ended(self, *_: Any) -> None:
        handle, self._handle = self._handle, 0
        self._recorder.end(handle)


def install(capture: OpenCapture) -> list[Uninstall]:
    """Record compilations from now on, also if the job imports Dynamo only later."""
    return [when_imported("torch._dynamo.callback", Compilations(capture.recorder).hook)]
