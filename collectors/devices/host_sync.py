"""Where a thread of the host stands still until a device has done what it was given, and at which line of the script:
`.item()`, `.tolist()`, `.cpu()`, `if tensor:`, `x[mask]`, copies from memory that is not pinned, and `synchronize` of
the device, of a stream or of an event.

Operators are seen by the native helper (`native/syncs.hpp`); a kernel in Python in front of every copy would cost more
than it tells, so without the helper they are not. Functions that wait without an operator are wrapped here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from dsprof.schema import HOST_SYNC, Kind

from ..capture.open_capture import OpenCapture
from ..hooking import private
from ..hooking.hook_parts import HookPart, install_each
from ..hooking.timed import timed
from ..hooking.uninstall import Uninstall, replace_attribute
from ..native import NativeRecorder
from ..recorder.record import Recorder
from ..recorder.source_locations import SourceLocations
from ..system.clock import now_ns


def install(capture: OpenCapture) -> list[Uninstall]:
    """Watch after the first step, if the job uses a device: on the CPU there is nothing to wait for."""
    uninstalls: list[Uninstall] = []

    def begin() -> None:
        import torch

        capture.after_step.remove(begin)
        if torch.cuda.is_initialized():
            uninstalls.extend(watch(capture.recorder))
            operators = isinstance(capture.recorder, NativeRecorder)
            capture.write_fact({"fact": "host_sync", "operators": operators})

    def uninstall() -> None:
        while uninstalls:
            uninstalls.pop()()

    capture.after_step.append(begin)
    return [uninstall]


def watch(recorder: Recorder) -> list[Uninstall]:
    """Record from now on what the host waits for a device in."""
    sites = SourceLocations(recorder)

    def watch_operators() -> Uninstall | None:
        if not isinstance(recorder, NativeRecorder):
            return None
        recorder.install_syncs()
        uninstall: Uninstall = recorder.uninstall_syncs
        return uninstall

    calls = [
        HookPart(
            f"calls of {call} are not recorded", functools.partial(_watch_call, place, name, call, recorder, sites)
        )
        for place, name, call in _calls()
    ]
    operators = HookPart("waits for the device in operators such as .item() are not recorded", watch_operators)
    return install_each("host-sync", (*calls, operators))


def _calls() -> list[tuple[Any, str, str]]:
    """What waits without an operator: where it is, its name there, and what a row calls it. Of a torch that was built
    without CUDA, nothing."""
    import torch

    private.find("torch._C:_cuda_synchronize")  # tells what is lost without
    places = (
        (torch._C, "_cuda_synchronize", "torch.cuda.synchronize"),  # under whichever name the script has it
        (torch.cuda.Stream, "synchronize", "Stream.synchronize"),
        (torch.cuda.Event, "synchronize", "Event.synchronize"),
    )
    return [found for found in places if callable(getattr(found[0], found[1], None))]


def _watch_call(place: Any, name: str, call: str, recorder: Recorder, sites: SourceLocations) -> Uninstall:
    original: Callable[..., Any] = getattr(place, name)
    row, purpose = recorder.intern(HOST_SYNC), recorder.intern(call)
    span, end, here = recorder.span, recorder.span_end, sites.here

    def begin() -> tuple[int, int]:
        began = now_ns()
        return span(Kind.MARK, row, began, 0, 0, None, -1, 0, 0, -1, -1, 0, purpose, -1, here()), began

    def ended(begun: tuple[int, int]) -> None:
        handle, began = begun
        end(handle, began, now_ns(), -1)

    synchronize = timed(original, begin, ended, "a wait for the device")
    return replace_attribute(place, name, synchronize)
