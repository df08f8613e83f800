"""Compilation: the time torch.compile takes for itself, as a phase on the thread that needed the code.

Dynamo calls back at the beginning and the end of the outermost compilation of the process: of a frame, or of a
backward graph that was left until it was needed. What was compiled again and which guard had failed Dynamo keeps of its
last compilations: that is read after a step in which it compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from dsprof.schema import RECOMPILED_FACT, Kind

from ..capture import facts
from ..capture.open_capture import OpenCapture
from ..hooking import dynamo, private
from ..hooking.late_imports import when_imported
from ..hooking.uninstall import Uninstall
from ..hooking.wrap import stands_for

if TYPE_CHECKING:
    from ..recorder.record import Recorder


METRICS: Final = "torch._dynamo.utils:get_compilation_metrics"
MOST_FUNCTIONS: Final = 20
"""Of which it is told that they were compiled again."""
LONGEST_REASON: Final = 300


@dataclass
class Recompiled:
    """What was compiled again of one function: how often, for how long altogether, and the guard that failed last."""

    times: int = 0
    stated: int = 0
    spent_ms: float = 0.0
    reason: str = ""


class Recompilations:
    """Counts what is compiled again, by function and line. `compiled` is called after each compilation."""

    def __init__(self) -> None:
        self._pending = False
        self._last = ""
        """Number of the last compilation that was read."""
        self._again: dict[tuple[str, str], Recompiled] = {}

    def compiled(self) -> None:
        self._pending = True

    def sample(self, _: int = 0) -> None:
        """After a step: read what was compiled in it, and state what came together so far each time that it has
        doubled."""
        if not self._pending:
            return
        self._pending = False
        metrics = private.find(METRICS)
        kept = metrics() if metrics is not None else []
        numbers = [str(one.compile_id) for one in kept]
        new = kept[numbers.index(self._last) + 1 :] if self._last in numbers else kept
        self._last = numbers[-1] if numbers else ""
        for one in new:
            self._add(one)
        self.state(lambda again: again.times >= 2 * again.stated)

    def _add(self, one: Any) -> None:
        reason = getattr(one, "recompile_reason", None)
        if not reason:
            return
        key = str(one.co_name), f"{one.co_filename}:{one.co_firstlineno}"
        if key not in self._again and len(self._again) == MOST_FUNCTIONS:
            return
        again = self._again.setdefault(key, Recompiled())
        again.times += 1
        again.spent_ms += (getattr(one, "duration_us", None) or 0) / 1e3
        again.reason = str(reason).splitlines()[0].partition(": ")[2][:LONGEST_REASON]

    def state(self, which: Callable[[Recompiled], bool] = lambda again: again.times > again.stated) -> None:
        for (function, site), again in self._again.items():
            if which(again):
                again.stated = again.times
                facts.state(
                    {"fact": RECOMPILED_FACT, "function": function, "site": site, "times": again.times,
                     "spent_ms": round(again.spent_ms, 1), "reason": again.reason}
                )  # fmt: skip


class Compilations:
    """The callbacks, and how they stay: `torch._dynamo.reset()` removes everybody's."""

    def __init__(self, recorder: Recorder, compiled: Callable[[], None] = lambda: None) -> None:
        self._recorder, self._compiled = recorder, compiled
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
        self._compiled()


def install(capture: OpenCapture) -> list[Uninstall]:
    """Record compilations from now on, also if the job imports Dynamo only later."""
    again = Recompilations()
    capture.samples.append(again.sample)
    compilations = Compilations(capture.recorder, again.compiled)
    return [again.state, when_imported("torch._dynamo.callback", compilations.hook)]
