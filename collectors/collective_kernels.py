"""The hooks on c10d operators in Python, for where there is no native helper. Used by `collectives.py`.

The same rows as from `native/collectives.hpp` but for two things: starts are when a collective was issued,
and ends come from the caller's own wait, or from a thread that waits for one after the other.
"""

from __future__ import annotations

import datetime
import itertools
import queue
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from dsprof.live.activity import name_thread
from dsprof.ondisk import Flag
from dsprof.schema import COLLECTIVE_NAMES, DTYPES

from . import dynamo
from .backward import BackwardDone
from .groups import Group
from .interrupts import by_handler
from .python_recorder import PyRecorder
from .record import CALLS, NOTHING
from .targets import Target

SEND, RECV_ANY, UNKNOWN = 12, 14, 100
"""c10d::OpType (Work.hpp): the first and the last of the p2p operations, and that of a composite work."""

MAX_PENDING: Final = 128
"""Operations remembered until they are over: a job that never waits for its sends must not have its tensors kept."""

REAPER_PATIENCE: Final = datetime.timedelta(seconds=0.2)


class PythonHooks:
    """The hooks in Python."""

    def __init__(self, recorder: PyRecorder) -> None:
        self._recorder = recorder
        self._names: dict[str, int] = {}
        self._groups = recorder.groups
        self._targets = recorder.targets
        self._backward = BackwardDone(recorder)
        self._p2p: dict[tuple[int, int, int, bool], itertools.count[int]] = {}
        self._pending: OrderedDict[int, tuple[Any, _Issued]] = OrderedDict()
        """id of a work -> the work, kept so that the id stays its own, and what was issued."""
        self._reaper = Reaper(self.waited, self._failed)
        self._libraries: list[Any] = []
        """torch takes the kernels out when these are collected."""

    def install(self) -> Callable[[], None]:
        import torch
        from torch._C import DispatchKey

        library: Any = torch.library.Library
        self._libraries = libraries = [library(space, "IMPL") for space in ("c10d", "_c10d_functional")]
        after = torch._C._dispatch_keyset_full_after(DispatchKey.BackendSelect)
        for name in COLLECTIVE_NAMES:
            op = getattr(torch.ops.c10d, name, None)
            if op is not None:
                libraries[0].impl(name, self._kernel(_Call(name, op.default), after), "BackendSelect", with_keyset=True)
        wait = torch.ops._c10d_functional.wait_tensor.default
        libraries[1].impl("wait_tensor", self._wait_kernel(wait, after), "BackendSelect", with_keyset=True)

        def uninstall() -> None:
            for each in libraries:
                each._destroy()
            self._reaper.stop()
            self._pending.clear()
            self._targets.here.work = None

        return uninstall

    def renew_groups(self) -> None:
        self._groups.renew()

    def waited(self, work: Any) -> None:
        """Somebody's wait for this work has returned: it is over."""
        try:
            if self._targets.here.work is work:
                self._targets.here.work = None
            found = self._pending.pop(id(work), None)
            if found is not None:
                self._recorder.comm_end(found[1].handle, time.perf_counter_ns())
        except Exception as error:
            self._recorder.count_error("the end of a collective", error)

    def waited_for(self, target: Target) -> None:
        """Somebody's wait for what it made has returned: it is over."""
        try:
            for work, issued in list(self._pending.values()):
                if issued.target is target:
                    self.waited(work)
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

    def _failed(self, work: Any) -> None:
        """Its record stays open, which is evidence; its tensors need not stay."""
        self._pending.pop(id(work), None)

    def _kernel(self, call: _Call, after: Any) -> Callable[..., Any]:
        from torch._C import DispatchKey

        redispatch, meta, passed_over = call.op.redispatch, DispatchKey.Meta, self._recorder.passed_over

        def kernel(keys: Any, *args: Any) -> Any:
            issued = None
            if not keys.has(meta) and passed_over.what == NOTHING:  # meta: a compiler tracing
                try:
                    issued = self._begin(call, args)
                except Exception as error:
                    self._recorder.count_error("a collective", error)
            if issued is None:
                result = redispatch(keys & after, *args)
                if passed_over.what == CALLS:
                    self._remember_told(result)
                return result
            began = time.perf_counter_ns()
            result = redispatch(keys & after, *args)
            try:
                if not issued.target.p2p:
                    self._recorder.comm_issued(issued.handle, time.perf_counter_ns() - began)
                self._watch(issued, result)
            except Exception as error:
                self._recorder.count_error("the end of backward", error)
            return result

        dynamo.skip(kernel, self._begin, self._watch, self._remember, self._remember_told)
        return kernel

    def _begin(self, call: _Call, args: tuple[Any, ...]) -> _Issued | None:
        from torch.distributed import ProcessGroup

        nbytes, dtype, cpu = payload(args)
        if call.barrier:  # its tensor is a dummy
            nbytes, dtype = 0, 0
        try:
            self._backward.watch(cpu)
        except Exception as error:
            self._recorder.count_error("the work of a collective", error)
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
        name = self._names.get(call.name)
        if name is None:
            name = self._names[call.name] = self._recorder.intern(call.name)
        handle = self._recorder.comm_begin(name, group.id, seq, peer, tag, nbytes, dtype, flags, call.p2p)
        target = self._targets.here.issued
        if not handle or target is None:
            self._targets.here.issued = None
            self._targets.forget_tensors(args[0])  # nobody is to take it for what was there before
            return None
        self._targets.remember_tensors(args[0], target)
        return _Issued(handle, group, cpu, target)

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
            self._recorder.comm_end(issued.handle, time.perf_counter_ns())
            return
        self._pending[id(work)] = work, issued
        if self._targets.here.blocking:
            self._targets.here.inside.append(work)
        if len(self._pending) > MAX_PENDING:
            self._recorder.comm_end(self._pending.popitem(last=False)[1][1].handle, 0)
        op_type = work._get_op_type()
        # Sends, receives and gloo's composite works (no type) do their last part in the caller's own wait.
        if issued.group.gloo and op_type != UNKNOWN and not SEND <= op_type <= RECV_ANY:
            self._reaper.add(work)

    def _wait_kernel(self, op: Any, after: Any) -> Callable[..., Any]:
        from torch._C import DispatchKey

        recorder, redispatch, meta = self._recorder, op.redispatch, DispatchKey.Meta
        name = recorder.intern("wait_tensor")

        def begin(tensor: Any) -> tuple[int, Target | None]:
            try:
                target = self._targets.of_tensor(tensor)
                return recorder.wait_begin(name, target, time.perf_counter_ns()), target
            except Exception as error:
                recorder.count_error("wait_tensor", error)
                return 0, None

        def kernel(keys: Any, tensor: Any) -> Any:
            handle, target = (0, None) if keys.has(meta) else begin(tensor)
            try:
                result = redispatch(keys & after, tensor)
                if target is not None:
                    self.waited_for(target)
                return result
            finally:
                recorder.end(handle)

        dynamo.skip(kernel, begin, self.waited_for)
        return kernel


class _Issued(NamedTuple):
    handle: int
    group: Group
    cpu: bool
    target: Target


class _Call:
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


class Reaper:
    """A thread that waits for works in the order of issue, so that ends are known where the job itself does not wait
    in Python. gloo runs two works of a group at once: the end of one that overtakes another is seen late."""

    def __init__(self, over: Callable[[Any], None], failed: Callable[[Any], None]) -> None:
        self._over = over
        self._failed = failed
        self._works: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def add(self, work: Any) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dsprof-reaper", daemon=True)
            self._thread.start()
        # Weakly: when its turn comes, which may be late on busy cores, its tensors may be nobody's any more.
        self._works.put(weakref.ref(work))

    def stop(self) -> None:
        """End the thread, with what it waits for unfinished if need be."""
        self._stopping = True
        if self._thread is not None:
            self._works.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        from torch.distributed import Work

        name_thread("dsprof-reaper")
        wait = getattr(Work.wait, "__wrapped__", Work.wait)  # torch's own, under our wrapper
        while True:
            waiting = self._works.get()
            if waiting is None:
                return
            work = waiting()
            if work is None:  # somebody's wait for it has returned
                continue
            # Never for long: a thread inside torch when the interpreter ends would take the process down with it.
            while not self._stopping or work.is_completed():
                ended = work.is_completed()
                try:
                    wait(work, REAPER_PATIENCE)
                except Exception:  # not yet; or it failed, which its owner's wait will tell him
                    if ended:
                        self._failed(work)
                        break
                else:
                    self._over(work)
                    break
            del work


def _on_gloo(pg: Any) -> bool:
    import torch

    try:
        return bool(pg._get_backend(torch.device("cpu")).name() == "gloo")
    except RuntimeError as error:
        if by_handler(error):
            raise
        return False  # no CPU backend in this group


def payload(args: tuple[Any, ...]) -> tuple[int, int, bool]:
    """Bytes (nccl-tests' S: the largest of the tensor arguments), index in DTYPES, and whether on the CPU."""
    import torch

    first: Any = None

    def total(value: Any) -> int:
        nonlocal first
        if isinstance(value, torch.Tensor):
            if first is None:
                first = value
            return value.nbytes if value.layout is torch.strided else 0
        return sum(map(total, value)) if isinstance(value, (list, tuple)) else 0

    nbytes = max(map(total, args))
    if first is None:
        return nbytes, 0, True
    return nbytes, _DTYPE_INDEX.get(str(first.dtype), 0), first.device.type == "cpu"


_DTYPE_INDEX: Final = {f"torch.{name}": index for index, name in enumerate(DTYPES) if name}
