"""Checkpoints: what a thread takes to save one, by torch.save, torch.distributed.checkpoint, safetensors, Lightning,
Accelerate or Transformers' Trainer.

The outermost call counts: what DCP writes with torch.save is part of its own, and what a Trainer gathers, describes and
deletes beside writing is part of its checkpoint. So is what it writes on other threads,
which nobody waits for: of `async_save` there is a row for the part that blocks its caller. dsprof's engine tells of its
checkpoints itself.
"""

from __future__ import annotations

import functools
import io
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from dsprof.schema import Kind

from ..capture import facts
from ..capture.open_capture import OpenCapture
from ..hooking import dynamo, private
from ..hooking.caller import caller_site
from ..hooking.errors import count_error
from ..hooking.hook_parts import HookPart, install_each
from ..hooking.late_imports import Hook, when_imported
from ..hooking.uninstall import Uninstall, in_reverse, replace_attribute
from ..hooking.wrap import stands_for
from ..system.clock import now_ns

if TYPE_CHECKING:
    from ..recorder.record import Recorder

TRAINER: Final = "transformers.Trainer"
DCP: Final = "torch.distributed.checkpoint"

METHODS: Final = (
    ("transformers.trainer", "Trainer", "_save_checkpoint", TRAINER),
    ("accelerate.accelerator", "Accelerator", "save_state", "accelerator.save_state"),
)
"""Module, class, method, and what users call it."""

SHORTEST_IN_MEMORY_NS: Final = 1_000_000
"""Into memory, scripts also write small things that they send elsewhere, and quickly. A checkpoint on its way to a
remote file system takes longer."""


class _Saving(threading.local):
    """Whether this thread is saving a checkpoint."""

    depth: int = 0


_saving = _Saving()


def enter() -> None:
    """This thread saves a checkpoint of which somebody else tells."""
    _saving.depth += 1


def leave() -> None:
    """It is done."""
    _saving.depth -= 1


def install(capture: OpenCapture) -> list[Uninstall]:
    """Record checkpoints from now on, those of libraries that are not imported yet too."""
    import torch

    recorder = capture.recorder
    places = (torch.serialization, torch)
    of_libraries: dict[str, Hook] = {
        f"{DCP}.state_dict_saver": functools.partial(_watch_dcp, recorder),
        "safetensors.torch": functools.partial(_watch_safetensors, recorder),
        "lightning.fabric.plugins.io.torch_io": functools.partial(_watch_lightning, recorder),
        "lightning_fabric.plugins.io.torch_io": functools.partial(_watch_lightning, recorder),
        **{module: functools.partial(_watch_method, recorder, of, name, known) for module, of, name, known in METHODS},
    }
    parts = (
        HookPart("checkpoints by torch.save are not recorded", lambda: _watch(recorder, places, "save", "torch.save")),
        *(
            HookPart(f"checkpoints by {name} are not recorded", functools.partial(when_imported, name, hook))
            for name, hook in of_libraries.items()
        ),
    )
    return install_each("checkpoints", parts)


def _watch_dcp(recorder: Recorder, module: ModuleType) -> Uninstall:
    package = sys.modules.get(DCP)  # on its way, it takes over the module's functions, which are ours by then
    places = (module,) if package is None else (module, package)
    return in_reverse(
        _watch(recorder, places, name, f"{DCP}.{name}") for name in ("save", "async_save", "save_state_dict")
    )


def _watch_safetensors(recorder: Recorder, module: ModuleType) -> Uninstall:
    # transformers and others have `save_file` by name, from before the capture: it is seen by what it calls.
    names = {"save_file": "save_file", "save_model": "save_model", "serialize_file": "save_file"}
    return in_reverse(_watch(recorder, (module,), name, f"safetensors.torch.{known}") for name, known in names.items())


def _watch_lightning(recorder: Recorder, module: ModuleType) -> Uninstall:
    # It saves into memory, and writes that.
    private.need(f"{module.__name__}:_atomic_save")
    return _watch(recorder, (module,), "_atomic_save", "save_checkpoint")


def _watch_method(recorder: Recorder, of: str, name: str, known: str, module: ModuleType) -> Uninstall:
    if private.known(path := f"{module.__name__}:{of}.{name}"):
        private.need(path)
    return _watch(recorder, (getattr(module, of, None),), name, known)


def _watch(recorder: Recorder, places: tuple[Any, ...], name: str, known: str) -> Uninstall:
    """Wrap what `places` have as `name`, whether the same function or, where somebody has put his own into one of them,
    several; `known` is what users call it."""
    found = {id(original): original for place in places if (original := getattr(place, name, None)) is not None}
    return in_reverse(_wrap(recorder, places, name, known, original) for original in found.values())


def _wrap(
    recorder: Recorder, places: tuple[Any, ...], name: str, known: str, original: Callable[..., Any]
) -> Uninstall:
    phase = recorder.intern("checkpoint")

    # Not `timed`: where a signal's handler raises, as for a preemption, the depth must be right again.
    @stands_for(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        if _saving.depth or dynamo.compiling() or _called_by_dcp():
            return original(*args, **kwargs)
        in_memory = isinstance(args[1] if len(args) > 1 else kwargs.get("f"), io.BytesIO)
        start_ns = now_ns()
        handle = 0 if in_memory else recorder.begin(Kind.PHASE, phase)
        _saving.depth += 1
        try:
            return original(*args, **kwargs)
        finally:
            _saving.depth -= 1
            if not in_memory:
                recorder.end(handle)
                _state(known)
            elif now_ns() - start_ns >= SHORTEST_IN_MEMORY_NS:
                recorder.put(Kind.PHASE, phase, start_ns, now_ns())
                _state(known)

    return in_reverse(
        [replace_attribute(place, name, save) for place in places if getattr(place, name, None) is original]
    )


def _called_by_dcp() -> bool:
    """Whether our caller was called by DCP itself."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith(DCP)


def _state(function: str) -> None:
    try:
        facts.state({"fact": "checkpoint", "function": function, "site": caller_site()})
    except Exception as error:
        count_error("facts", error)
