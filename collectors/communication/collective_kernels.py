"""Kernels in front of c10d's operators in Python, for where there is no native helper. What they are there for is in
`collective_rows.py`; their twins are in `native/collectives.hpp`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, Protocol

from dsprof.schema import COLLECTIVE_NAMES

from ..hooking import dynamo, private
from ..hooking.errors import count_error

WAIT_TENSOR: Final = "_c10d_functional::wait_tensor"


class OperatorHooks(Protocol):
    """Who is called while something is recorded. `rest` calls what is behind the kernel, whose result is returned;
    `tracing`: a compiler calls."""

    def issue(self, call: Call, args: tuple[Any, ...], rest: Callable[[], Any], tracing: bool) -> Any:
        """A c10d operator is called with `args`."""

    def issue_functional(self, rest: Callable[[], Any]) -> Any:
        """An operator is called that issues a collective, or several, and returns tensors in place of works."""

    def wait(self, tensor: Any, rest: Callable[[], Any], tracing: bool) -> Any:
        """wait_tensor is called."""


class Call:
    """Where the arguments of one c10d operator are."""

    def __init__(self, op_name: str, op: Any) -> None:
        self.op = op
        self.name = COLLECTIVE_NAMES[op_name]
        self.barrier = self.name == "barrier"
        self.send = op_name == "send"
        arguments = op._schema.arguments
        at = {argument.name: i for i, argument in enumerate(arguments)}
        self.group = at["process_group"]
        self.async_op, self.tag = at.get("async_op"), at.get("tag")
        self.peer = at.get("dst", at.get("src", at.get("root_rank")))
        self.p2p = self.tag is not None
        self._defaults = [argument.default_value for argument in arguments]

    def argument(self, args: tuple[Any, ...], at: int | None, absent: int) -> int:
        if at is None:
            return absent
        return int(args[at] if at < len(args) else self._defaults[at])  # torch leaves trailing defaults out


class Kernels:
    """The kernels in front of the operators. Once there they stay, and pass on while nothing is recorded: taken out, a
    thread that is in front of one would find nothing behind it."""

    def __init__(self) -> None:
        self.hooks: OperatorHooks | None = None
        """Whose rows are recorded."""
        self._libraries: list[Any] = []
        """torch takes the kernels out when these are collected."""

    def install(self, hooks: OperatorHooks) -> None:
        if not self._libraries:
            self._register()
        self.hooks = hooks

    def give_way(self) -> None:
        """To the native helper's, which go in front: not while another thread may be in front of one of these."""
        for each in self._libraries:
            private.need("torch.library:Library._destroy")(each)
        self._libraries = []

    def _register(self) -> None:
        import torch

        library: Any = torch.library.Library
        keys = private.need("torch._C:DispatchKey")
        after = private.need("torch._C:_dispatch_keyset_full_after")(keys.BackendSelect)
        calls = [
            Call(name, op.default)
            for name in COLLECTIVE_NAMES
            if (op := getattr(torch.ops.c10d, name, None)) is not None
        ]
        c10d = library("c10d", "IMPL")
        self._libraries = [c10d]
        for call in calls:
            c10d.impl(call.op, self._kernel(call, after, keys.Meta), "BackendSelect", with_keyset=True)
        try:
            functional = library("_c10d_functional", "IMPL")
            self._libraries.append(functional)
            for op in _functional_operators():
                kernel = self._wait_kernel if op.name() == WAIT_TENSOR else self._functional_kernel
                functional.impl(op, kernel(op, after, keys.Meta), "BackendSelect", with_keyset=True)
        except Exception as error:
            count_error("functional collectives", error)

    def _kernel(self, call: Call, after: Any, meta: Any) -> Callable[..., Any]:
        redispatch = call.op.redispatch

        def kernel(keys: Any, *args: Any) -> Any:
            hooks, rest = self.hooks, functools.partial(redispatch, keys & after, *args)
            return rest() if hooks is None else hooks.issue(call, args, rest, keys.has(meta))

        dynamo.skip(kernel)
        return kernel

    def _functional_kernel(self, op: Any, after: Any, meta: Any) -> Callable[..., Any]:
        redispatch = op.redispatch

        def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
            hooks, rest = self.hooks, functools.partial(redispatch, keys & after, *args, **kwargs)
            return rest() if hooks is None else hooks.issue_functional(rest)

        dynamo.skip(kernel)
        return kernel

    def _wait_kernel(self, op: Any, after: Any, meta: Any) -> Callable[..., Any]:
        redispatch = op.redispatch

        def kernel(keys: Any, tensor: Any) -> Any:
            hooks, rest = self.hooks, functools.partial(redispatch, keys & after, tensor)
            return rest() if hooks is None else hooks.wait(tensor, rest, keys.has(meta))

        dynamo.skip(kernel)
        return kernel


KERNELS: Final = Kernels()
"""Of this process, as torch's operators are."""


def _functional_operators() -> list[Any]:
    """Those of `_c10d_functional`, every overload."""
    import torch

    private.find("torch.ops:_c10d_functional.wait_tensor")
    all_names = private.need("torch._C:_dispatch_get_all_op_names")
    names = (name.partition("::") for name in all_names())
    found = {name.partition(".")[0] for space, _, name in names if space == "_c10d_functional"}
    packets = [getattr(torch.ops._c10d_functional, name) for name in sorted(found)]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
