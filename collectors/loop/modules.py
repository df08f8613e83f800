"""Forward: the outermost module call of each thread, as a phase whose value is the number of input elements, and which
says whether gradients were on. Inside a backward pass it is `recompute`. At level full each call of a module that has
a name is a `module` row besides.

The native helper hooks the call itself (`native/modules.hpp`); here is its twin, a wrapper in Python. The helper also
records, at level full, what a module takes in backward (`native/calls.hpp`), which Python is not told.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

from dsprof.ondisk import Flag
from dsprof.schema import Kind

from ..capture.open_capture import OpenCapture
from ..hooking import dynamo
from ..hooking.signals import by_handler
from ..hooking.uninstall import Uninstall, replace_attribute
from ..hooking.wrap import stands_for
from ..native import NativeRecorder
from ..recorder.python_recorder import PyRecorder
from ..recorder.record import Recorder
from ..system.clock import now_ns
from . import linear_layers
from .backward import graph_task
from .batch_size import Batches

WRAPPERS: Final = ("module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")
"""Parts of a qualified name that a wrapper adds (DDP, FSDP, torch.compile, activation checkpointing)."""


def install(capture: OpenCapture) -> list[Uninstall]:
    """Record forwards; at level full each module."""
    return [watch(capture.recorder, every=capture.full)]


def watch(recorder: Recorder, *, every: bool = False) -> Uninstall:
    """Record forwards from now on, until the returned function is called; `every`: and each module that has a name."""
    if isinstance(recorder, NativeRecorder):
        if every:
            _install_every(recorder)
        else:
            recorder.install_modules(None)
        uninstall_native: Uninstall = recorder.uninstall_modules
        return uninstall_native
    if not isinstance(recorder, PyRecorder):
        raise TypeError(f"cannot record modules with a {type(recorder).__name__}")

    import torch

    return replace_attribute(torch.nn.Module, "__call__", _wrapper(torch.nn.Module.__call__, recorder, every))


def _install_every(recorder: NativeRecorder) -> None:
    ids: dict[int, int] = {}

    def name_module(address: int, name: int) -> None:
        recorder.name_module(address, name)
        if name:
            ids[address] = name
        else:
            ids.pop(address, None)

    names = Names(recorder.intern, name_module)
    batches = Batches(recorder, lambda address: ids.get(address, 0))

    def name_all(root: Any) -> None:
        try:
            names.name_all(root)
        except Exception as error:
            recorder.count_error("names of modules", error)

    def note(module: Any, /, *args: Any, **kwargs: Any) -> None:
        try:
            batches.note(module, *args, **kwargs)
        except Exception as error:
            recorder.count_error("size of a batch", error)

    recorder.install_modules(name_all, note)


class Names:
    """Names modules when the outermost one that has them is first called, and forgets them when they die.

    The first model's are as it calls them. Those of another, which does not hold that one, begin with its class; what
    is part of a larger model that is called later has from then on the name that it has there.
    """

    def __init__(self, intern: Callable[[str], int], name_module: Callable[[int, int], None]) -> None:
        self._intern, self._name_module = intern, name_module
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._roots: dict[int, str] = {}
        """By address: what the names of what it has begin with."""

    def name_all(self, root: Any) -> None:
        """`root` under its class's name, what it has under the names that it gives it."""
        import torch

        found = list(torch.nn.Module.named_modules(root))  # a class of the user's may have one that does more
        inside = {id(module) for _, module in found}
        kind = type(root).__name__
        first = ""
        if self._roots.keys() - inside:
            like_it = sum(other.split("#")[0] == f"{kind}." for other in self._roots.values())
            first = f"{kind}#{like_it + 1}." if like_it else f"{kind}."
        self._roots = {address: other for address, other in self._roots.items() if address not in inside}
        self._roots[id(root)] = first
        named = []
        for name, module in found:
            address = id(module)
            own = qualified(name)
            whole = first + own if own else first[:-1] or type(module).__name__
            named.append((whole, module))
            self._name_module(address, self._intern(whole))
            if address not in self._alive:
                self._alive[address] = weakref.ref(module, functools.partial(self._forget, address))
        linear_layers.state(named)

    def _forget(self, address: int, _: object) -> None:
        del self._alive[address]
        self._roots.pop(address, None)
        self._name_module(address, 0)


def qualified(name: str) -> str:
    """A module's name without what wrappers add to it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _wrapper(original: Callable[..., Any], recorder: PyRecorder, every: bool) -> Callable[..., Any]:
    import torch

    forward, recompute = recorder.intern("forward"), recorder.intern("recompute")
    phase, kind, gradients_on = int(Kind.PHASE), int(Kind.MODULE), int(Flag.GRAD)
    thread = threading.local()
    compiling = dynamo.check()
    in_task = graph_task()
    grad_enabled = torch.is_grad_enabled
    ids: dict[int, int] = {}

    def name_module(address: int, name: int) -> None:
        if name:
            ids[address] = name
        else:
            ids.pop(address, None)

    names = Names(recorder.intern, name_module)
    note_input = Batches(recorder, lambda address: ids.get(address, 0)).note if every else None

    def begin(size: tuple[int, int]) -> int:
        flags = gradients_on if grad_enabled() else 0
        name = forward if in_task() == -1 else recompute
        now = now_ns()
        # What `recorder.begin` writes, but for the flags.
        return recorder.span(phase, name, now, 0, 0, float(size[0]), size[1], flags, 0, -1, -1, 0, 0)

    def begin_module(module: torch.nn.Module, outermost: bool) -> int:
        if outermost and id(module) not in ids:
            names.name_all(module)
        name = ids.get(id(module), 0)
        return recorder.begin(kind, name) if name else 0

    @stands_for(original)
    def __call__(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Dynamo takes the first way out and so traces torch's own code only.
        if compiling() or (getattr(thread, "inside", False) and not every):
            return original(self, *args, **kwargs)
        outermost = not getattr(thread, "inside", False)
        handle = module = 0
        try:
            size = count_inputs((*args, *kwargs.values())) if outermost else None
            if size is not None:
                handle = begin(size)
            if every and (size is not None or not outermost):
                # A block that is computed again may be called by itself, and have no name but in its model.
                forward = outermost and in_task() == -1
                module = begin_module(self, forward)
                if note_input is not None and forward and grad_enabled():
                    note_input(self, *args, **kwargs)
        except Exception as error:
            recorder.count_error("forward", error)
        thread.inside = True
        try:
            return original(self, *args, **kwargs)
        finally:
            thread.inside = not outermost
            recorder.end(module)
            recorder.end(handle)

    return __call__


def count_inputs(inputs: tuple[Any, ...]) -> tuple[int, int] | None:
    """Elements and bytes of all tensors in `inputs`, one level of list, tuple or dict down; None where one is fake:
    such a call is no forward."""
    import torch

    elements = nbytes = 0
    for value in inputs:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        for tensor in inner:
            if not isinstance(tensor, torch.Tensor):
                continue
            if dynamo.fake(tensor):
                return None
            try:
                size = tensor.nbytes
            except Exception as error:  # a tensor without a plain size, such as a nested one
                if by_handler(error):
                    raise
                continue
            nbytes += size
            elements += size // tensor.itemsize  # numel() would be recorded by torch.jit.trace
    return elements, nbytes
