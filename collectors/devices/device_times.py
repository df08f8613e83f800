"""When the accelerator did what: phases, communications and waits of its streams, by events that are put on them
(`native/device_times.hpp`). Nothing waits for the device: what is over is read at the end of a later step.

It begins after the first step, when the job has chosen its device: asking the driver earlier could spoil a fork.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

from dsprof.schema import CUDA_GRAPH_FACT

from ..capture import facts
from ..capture.open_capture import OpenCapture
from ..communication.waits import replace_method
from ..hooking.uninstall import Uninstall, in_reverse
from ..native import NativeRecorder

PHASES: Final = ("forward", "recompute", "backward", "optimizer")
PATIENCE_S: Final = 1.0
"""How long is looked, as the capture closes, whether what is on the streams is over."""

Call = Callable[..., Any]


def install(capture: OpenCapture) -> list[Uninstall]:
    """Time the device that this process computes on, once it has one. The Python recorder cannot."""
    recorder = capture.recorder
    if not isinstance(recorder, NativeRecorder):
        return []
    hooks: list[Uninstall] = []

    def after_step(_: int) -> None:
        if hooks:
            recorder.collect_device()
            return
        import torch

        if torch.cuda.is_initialized():
            hooks.extend(watch(recorder, f"cuda:{torch.cuda.current_device()}"))
            facts.state({"fact": "device_times", "streams": "cuda"})

    capture.samples.append(after_step)
    return [lambda: in_reverse(hooks)()]


def watch(recorder: NativeRecorder, device: str) -> list[Uninstall]:
    """Time the streams of `device`, such as `cuda:0`, from now on."""
    import torch

    recorder.start_device(device, [recorder.intern(name) for name in PHASES])
    # `wait_stream` calls `wait_event`.
    wait = recorder.intern("wait")

    def waits(original: Call) -> Call:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self != torch.cuda.current_stream():
                return original(self, *args, **kwargs)
            key = id(kwargs)  # a new one each call
            recorder.begin_on_stream(key, wait)
            try:
                return original(self, *args, **kwargs)
            finally:
                recorder.end_on_stream(key)

        return call

    return [
        recorder.stop_device,
        lambda: _collect(recorder),
        replace_method(torch.cuda.Stream, "wait_event", waits),
        *_watch_graphs(recorder, torch.cuda.CUDAGraph),
    ]


def _watch_graphs(recorder: NativeRecorder, graph: Any) -> list[Uninstall]:
    """State how many communications a graph has captured, once it is replayed: of them nothing is seen then. Null: its
    capture had begun before anybody looked."""
    hidden: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()
    """Of each graph, how many had been captured when its capture began, and when it ended."""

    def captures(original: Call) -> Call:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            recorder.graphs_seen += 1
            hidden.setdefault(self, []).append(recorder.communications_in_graphs())
            return original(self, *args, **kwargs)

        return call

    stated: WeakSet[Any] = WeakSet()

    def replays(original: Call) -> Call:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self not in stated:
                stated.add(self)
                recorder.graphs_seen += 1
                counted = hidden.get(self, [])
                known = max(counted) - min(counted) if len(counted) > 1 else None
                facts.state({"fact": CUDA_GRAPH_FACT, "communications": known})
            return original(self, *args, **kwargs)

        return call

    return [
        replace_method(graph, "capture_begin", captures),
        replace_method(graph, "capture_end", captures),
        replace_method(graph, "replay", replays),
    ]


def _collect(recorder: NativeRecorder, clock: Callable[[], float] = time.monotonic) -> None:
    """What is over by now, or soon: a job that has ended has mostly waited for its device."""
    until = clock() + PATIENCE_S
    while recorder.collect_device() and clock() < until:
        time.sleep(0.001)
