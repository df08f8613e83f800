"""The rows of collectives and waits in Python, for where there is no native helper: what the kernels of
`collective_kernels.py` are called for. Used by `collectives.py`.

The same rows as from `native/collectives.hpp` but for two things: starts are when a collective was issued,
and ends come from the caller's own wait, or from a thread that waits for one after the other.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from dsprof.ondisk import Flag
from dsprof.schema import DTYPES

from ..hooking import dynamo, private
from ..hooking.signals import by_handler
from ..hooking.uninstall import Uninstall
from ..loop.backward import BackwardDone
from ..recorder.groups import Group, watch_destroy
from ..recorder.python_recorder import PyRecorder
from ..recorder.record import CALLS, NOTHING
from ..recorder.wait_targets import Target
from ..system.clock import now_ns
from .collective_kernels import KERNELS, Call
from .completion_thread import CompletionThread
from .waits import UNKNOWN, op_type_reader

SEND, RECV_ANY = 12, 14
"""c10d::OpType (Work.hpp): the first and the last of the p2p operations."""

MAX_PENDING: Final = 128
"""Operations remembered until they are over."""


class PythonHooks:
    """The hooks in Python."""

    def __init__(self, recorder: PyRecorder) -> None:
        self._recorder = recorder
        self._names: dict[str, int] = {}
        self._groups = recorder.groups
        self._targets = recorder.targets
        self._backward = BackwardDone(recorder)
        self._op_type = op_type_reader()
        self._p2p: dict[tuple[int, int, int, bool], itertools.count[int]] = {}
        self._pending: OrderedDict[int, _Pending] = OrderedDict()
        """By the id of the work."""
        self._wait_tensor = recorder.intern("wait_tensor")
        self._completions = CompletionThread(self.waited, self._failed)

    @property
    def ends(self) -> PythonHooks:
        """Who has the ends of collectives from their waits."""
        return self

    def install(self) -> Callable[[], None]:
        dynamo.skip(self.issue, self.issue_functional, self.wait)
        KERNELS.install(self)

        def uninstall() -> None:
            KERNELS.hooks = None
            self._completions.stop()
            self._pending.clear()
            self._targets.here.work = None

        return uninstall

    def watch_destroy(self) -> Uninstall:
        return watch_destroy(self._groups.renew)

    def waited(self, work: Any) -> None:
        """Somebody's wait for this work has returned: it is over."""
        try:
            if self._targets.here.work is work:
                self._targets.here.work = None
            self._over(id(work))
        except Exception as error:
            self._recorder.count_error("the end of a collective", error)

    def _over(self, key: int) -> None:
        found = self._pending.pop(key, None)
        if found is not None:
            self._recorder.comm_end(found.issued.handle, now_ns())

    def waited_for(self, target: Target) -> None:
        """Somebody's wait for what it made has returned: it is over."""
        try:
            for key, found in list(self._pending.items()):
                if found.issued.target is target:
                    self._over(key)
        except Exception as error:
            self._recorder.count_error("the end of a collective", error)

    def returned(self) -> None:
        """The call has returned that waited in C++ for what this thread issued in it: that is over."""
        try:
            inside, self._targets.here.inside = self._targets.here.inside, []
        except Exception as error:
            self._recorder.count_error("the end of a collective", error)
            return
        for work in inside:
            self.waited(work)

    def raised(self, work: Any) -> None:
        """Somebody's wait for this work has not returned."""
        found = self._pending.get(id(work))
        if found is not None:
            self._pending[id(work)] = found._replace(raised=True)

    def _failed(self, work: Any) -> None:
        """Its record stays open, which is evidence; its tensors need not stay."""
        self._pending.pop(id(work), None)

    def _gone(self, key: int, reference: object) -> None:
        """Nobody has this work any more, so nobody will wait for it. Called wherever the last one lets go of it."""
        try:
            found = self._pending.get(key)
            if found is None or found.work is not reference:
                return
            del self._pending[key]
            if not found.raised:
                self._recorder.comm_end(found.issued.handle, 0)
        except Exception as error:
            self._recorder.count_error("the end of a collective", error)

    def issue(self, call: Call, args: tuple[Any, ...], rest: Callable[[], Any], tracing: bool) -> Any:
        """A c10d operator is called with `args`; `rest` calls what is behind it. `tracing`: a compiler calls."""
        issued, passed_over = None, self._recorder.passed_over
        if not tracing and passed_over.what == NOTHING:
            try:
                issued = self._begin(call, args)
            except Exception as error:
                self._recorder.count_error("a collective", error)
        if issued is None:
            result = rest()
            if passed_over.what == CALLS:
                self._remember_told(result)
            return result
        began = now_ns()
        result = rest()
        try:
            if not issued.target.p2p:
                self._recorder.comm_issued(issued.handle, now_ns() - began)
            self._watch(issued, result)
        except Exception as error:
            self._recorder.count_error("the work of a collective", error)
        return result

    def _begin(self, call: Call, args: tuple[Any, ...]) -> _Issued | None:
        from torch.distributed import ProcessGroup

        nbytes, dtype, cpu = payload(args)
        if call.barrier:  # its tensor is a dummy
            nbytes, dtype = 0, 0
        try:
            self._backward.watch(cpu)
        except Exception as error:
            self._recorder.count_error("the end of backward", error)
        name = self._names.get(call.name)
        if name is None:
            name = self._names[call.name] = self._recorder.intern(call.name)
        self._recorder.note_call(name, nbytes, dtype, 0)
        pg = ProcessGroup.unbox(args[call.group])
        peer, tag = call.argument(args, call.peer, -1), call.argument(args, call.tag, -1)
        flags = int(Flag.ASYNC) if call.argument(args, call.async_op, False) else 0
        group = self._groups.named(pg.group_name)
        if group.gloo is None:
            group.gloo = _on_gloo(pg)
        if call.p2p:
            seq = next(self._p2p.setdefault((group.id, peer, tag, call.send), itertools.count()))
        else:
            seq = next(group.numbers)
        handle = self._recorder.comm_begin(name, group.id, seq, peer, tag, nbytes, dtype, flags, call.p2p)
        target = self._targets.here.issued
        if not handle or target is None:
            self._targets.here.issued = None
            if self._targets.here.functional:
                self._targets.forget_tensors(args[0])  # nobody is to take it for what was there before
            return None
        if self._targets.here.functional:
            self._targets.remember_tensors(args[0], target)
        return _Issued(handle, group, cpu, bool(flags), target)

    def _remember(self, result: Any, target: Target) -> Any:
        """The work among what an operator returned, remembered for whoever waits for it; None where there is none."""
        from torch.distributed import Work

        boxed = result[-1] if isinstance(result, (tuple, list)) else result
        work = None if boxed is None else Work.unbox(boxed)
        self._targets.here.work = work
        if work is not None:
            self._targets.remember_work(work, target)
        return work

    def _remember_told(self, result: Any) -> None:
        """The engine told of this call: a wait for it is a wait for what the engine told."""
        try:
            told = self._targets.here.told
            if told is not None:
                self._remember(result, told)
        except Exception as error:
            self._recorder.count_error("the work of a collective", error)

    def _watch(self, issued: _Issued, result: Any) -> None:
        if not issued.cpu:  # device streams end where the host does not see it
            self._recorder.comm_end(issued.handle, 0)
        work = self._remember(result, issued.target)
        if not issued.cpu:
            return
        if work is None:  # it returns none: it was done in the call
            self._recorder.comm_end(issued.handle, now_ns())
            return
        key, op_type = id(work), self._op_type(work)
        if self._targets.here.blocking:
            self._targets.here.inside.append(work)
        # Sends, receives and gloo's composite works (no type) do their last part in the caller's own wait. So does
        # whoever does not ask for a work, and at once. What nobody waits for must not have its tensors kept.
        if issued.asynchronous and issued.group.gloo and op_type != UNKNOWN and not SEND <= op_type <= RECV_ANY:
            self._pending[key] = _Pending(work, issued)
            self._completions.add(work)
        else:
            self._pending[key] = _Pending(weakref.ref(work, functools.partial(self._gone, key)), issued)
        if len(self._pending) > MAX_PENDING:
            self._recorder.comm_end(self._pending.popitem(last=False)[1].issued.handle, 0)

    def issue_functional(self, rest: Callable[[], Any]) -> Any:
        """An operator is called that issues a collective, or several, and returns tensors in place of works."""
        here = self._targets.here
        here.functional += 1
        try:
            return rest()
        finally:
            here.functional -= 1

    def wait(self, tensor: Any, rest: Callable[[], Any], tracing: bool) -> Any:
        """wait_tensor is called."""
        handle, target = (0, None) if tracing else self._begin_wait(tensor)
        try:
            result = rest()
            if target is not None:
                self.waited_for(target)
            return result
        finally:
            self._recorder.end(handle)

    def _begin_wait(self, tensor: Any) -> tuple[int, Target | None]:
        try:
            target = self._targets.of_tensor(tensor)
            return self._recorder.wait_begin(self._wait_tensor, target, now_ns()), target
        except Exception as error:
            self._recorder.count_error("wait_tensor", error)
            return 0, None


class _Issued(NamedTuple):
    handle: int
    group: Group
    cpu: bool
    asynchronous: bool
    target: Target


class _Pending(NamedTuple):
    work: Any
    """What is given to the thread, else a weak reference. Either keeps the work's id its own."""
    issued: _Issued
    raised: bool = False
    """A wait for it has: unless another one returns, its record stays open, which is evidence."""


def _on_gloo(pg: Any) -> bool:
    import torch

    backend_of = private.find("torch.distributed:ProcessGroup._get_backend")
    try:
        return bool(backend_of is not None and backend_of(pg, torch.device("cpu")).name() == "gloo")
    except RuntimeError as error:
        if by_handler(error):
            raise
        return False  # no CPU backend in this group


def payload(args: tuple[Any, ...]) -> tuple[int, int, bool]:
    """Bytes (nccl-tests' S: the largest of the tensor arguments), index in DTYPES, and whether on the CPU."""
    import torch

    nbytes, first = 0, None
    for value in args:
        total = 0
        for tensor in _tensors(value):
            if first is None:
                first = tensor
            if tensor.layout is torch.strided:
                total += tensor.nbytes
        nbytes = max(nbytes, total)
    if first is None:
        return nbytes, 0, True
    return nbytes, _DTYPE_INDEX.get(str(first.dtype), 0), first.device.type == "cpu"


def _tensors(value: Any) -> Iterator[Any]:
    """A tensor, or those in a list of lists of them."""
    # Not inside another function: one that calls itself there is a cycle, and keeps what it found until garbage is
    # collected.
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


_DTYPE_INDEX: Final = {f"torch.{name}": index for index, name in enumerate(DTYPES) if name}
