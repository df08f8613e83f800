"""Where a thread stands still for communication: `Work.wait`, waits for the futures of works, and calls that issue
collectives and wait for them inside C++. (`wait_tensor`, of functional collectives, is an operator and belongs to the
kernels. Waits of DDP's reducer inside C++ are derived on merge.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakKeyDictionary

from ..hooking import dynamo, private
from ..hooking.hook_parts import HookPart
from ..hooking.signals import by_handler
from ..hooking.uninstall import Uninstall, in_reverse, replace_attribute
from ..hooking.wrap import stands_for

if TYPE_CHECKING:
    from ..recorder.record import Recorder

OP_TYPES: Final = {
    0: "broadcast",
    1: "all_reduce",
    2: "all_reduce",
    3: "reduce",
    4: "all_gather",
    5: "all_gather",
    6: "all_gather",
    7: "gather",
    8: "scatter",
    9: "reduce_scatter",
    10: "all_to_all",
    11: "all_to_all",
    12: "send",
    13: "recv",
    14: "recv",
    15: "barrier",
    16: "reduce_scatter",
    19: "reduce_scatter",
}
"""`c10d::OpType` of a work (Work.hpp) -> the name of its wait, where nobody knows which work it is; else `wait`."""

UNKNOWN: Final = 100
"""The type of a composite work."""

BLOCKING: Final = (
    "_broadcast_coalesced",  # DDP sends its buffers in forward, and DDP and FSDP the parameters when they wrap
    "_verify_params_across_processes",
    "ProcessGroup.monitored_barrier",
    "Reducer._rebuild_buckets",  # DDP's in the second forward, which agrees on their order
)
"""Functions and methods of torch.distributed that wait inside C++ for the collectives they issue."""

Function = Callable[..., Any]


class Ends(Protocol):
    """Who has the ends of collectives from their waits: the hooks on c10d's operators in Python. Nothing of this
    raises."""

    def waited(self, work: Any) -> None:
        """A wait for it has returned."""

    def raised(self, work: Any) -> None:
        """A wait for it has raised an exception."""

    def waited_for(self, target: Any) -> None:
        """A wait for what `Recorder.target` gave of a work has returned."""

    def returned(self) -> None:
        """The call has returned that waited in C++ for what this thread issued in it."""


def parts(recorder: Recorder, ends: Ends | None) -> tuple[HookPart, ...]:
    """What records waits. `ends` None: the helper has the ends of collectives from elsewhere."""

    def all_of(hooks: Callable[[], Iterator[Uninstall]]) -> Callable[[], Uninstall]:
        return lambda: in_reverse(hooks())

    return (
        HookPart("waits for collectives are not recorded", lambda: _works(recorder, ends), decisive=True),
        HookPart("waits for the futures of collectives are not recorded", all_of(lambda: _futures(recorder, ends))),
        HookPart("collectives that the backend coalesces begin too early", all_of(lambda: _coalesced(recorder))),
        HookPart("waits of DDP inside C++ are not recorded", all_of(lambda: _blocking(recorder, ends))),
    )


def _works(recorder: Recorder, ends: Ends | None) -> Uninstall:
    from torch.distributed import Work

    names = {op_type: recorder.intern(name) for op_type, name in OP_TYPES.items()}
    other, begin, end = recorder.intern("wait"), recorder.begin_wait, recorder.end
    op_type_of = op_type_reader()

    def watched(original: Function) -> Function:
        def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                handle = begin(names.get(op_type_of(self), other), self)
            except Exception as error:
                recorder.count_error("a wait", error)
                handle = 0
            try:
                result = original(self, *args, **kwargs)
            except BaseException:
                if ends is not None:
                    ends.raised(self)
                raise
            else:
                if ends is not None:
                    ends.waited(self)
                return result
            finally:
                end(handle)

        return wait

    return replace_method(Work, "wait", watched)


def _futures(recorder: Recorder, ends: Ends | None) -> Iterator[Uninstall]:
    """A future that `Work.get_future` gave, or that follows from such a one, may be waited for in place of the work.
    So is that of DDP's reducer where a rank has run out of input (`join`)."""
    from torch.distributed import Work

    targets: WeakKeyDictionary[Any, object] = WeakKeyDictionary()
    name = recorder.intern("wait")

    def carry(future: Any, target: object | None) -> Any:
        if target is not None:
            try:
                targets[future] = target
            except TypeError as error:  # of a class that cannot be hashed
                if by_handler(error):
                    raise
        return future

    def target_of(future: Any) -> object | None:
        try:
            return targets.get(future)
        except TypeError as error:
            if by_handler(error):
                raise
            return None

    def given(original: Function) -> Function:
        # By this name and `self` pybind11 knows a call of its own: of a Work written in Python it would call us again.
        def get_future(self: Any) -> Any:
            return carry(original(self), recorder.target(self))

        return get_future

    def of_reducer(original: Function) -> Function:
        return lambda self, *args, **kwargs: carry(original(self, *args, **kwargs), recorder.target(None))

    def following(original: Function) -> Function:
        return lambda self, *args, **kwargs: carry(original(self, *args, **kwargs), target_of(self))

    def watched(original: Function) -> Function:
        def wait(self: Any) -> Any:
            target = target_of(self)
            if target is None:
                return original(self)
            try:
                handle = recorder.begin_wait(name, target)
            except Exception as error:
                recorder.count_error("a wait", error)
                handle = 0
            try:
                result = original(self)
                if ends is not None:
                    ends.waited_for(target)
                return result
            finally:
                recorder.end(handle)

        return wait

    future = private.find("torch._C:Future")
    if future is not None:
        yield replace_method(Work, "get_future", given)
        yield replace_method(future, "then", following)
        yield replace_method(future, "wait", watched)
        yield replace_private("torch.distributed:Reducer._run_comm_hook", of_reducer)


def _coalesced(recorder: Recorder) -> Iterator[Uninstall]:
    """What is coalesced by the backend (NCCL) has one work, which no operator of c10d returns."""

    def watched(original: Function) -> Function:
        def _end_coalescing(*args: Any, **kwargs: Any) -> Any:
            recorder.issue_coalesced()
            try:
                work = original(*args, **kwargs)
            finally:
                recorder.end_coalescing()
            recorder.stands_for_issued(work)
            return work

        return _end_coalescing

    def begun(original: Function) -> Function:
        def _start_coalescing(*args: Any, **kwargs: Any) -> Any:
            recorder.begin_coalescing()
            return original(*args, **kwargs)

        return _start_coalescing

    yield replace_private("torch.distributed:ProcessGroup._end_coalescing", watched)
    if private.has("torch.distributed:ProcessGroup._end_coalescing"):  # what begins must end
        yield replace_private("torch.distributed:ProcessGroup._start_coalescing", begun)


def _blocking(recorder: Recorder, ends: Ends | None) -> Iterator[Uninstall]:
    enter, leave, compiling = recorder.enter_blocking, recorder.leave_blocking, dynamo.check()

    def watched(original: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            if compiling():
                return original(*args, **kwargs)
            enter()
            try:
                result = original(*args, **kwargs)
                if ends is not None:
                    ends.returned()
                return result
            finally:
                leave()

        return call

    for name in BLOCKING:
        yield replace_private(f"torch.distributed:{name}", watched)


def op_type_reader() -> Callable[[Any], int]:
    """What gives a work's `c10d::OpType`; UNKNOWN always, where torch does not tell any more."""
    read: Callable[[Any], int] | None = private.find("torch.distributed:Work._get_op_type")
    return read or (lambda work: UNKNOWN)


def replace_private(path: str, watched: Callable[[Function], Function]) -> Uninstall:
    """`replace_method` of a name of the table (`private_names.py`), or of a public one that is written so. Of one that
    is gone it is told what is lost."""
    if private.known(path) and private.find(path) is None:
        return lambda: None
    module, _, attributes = path.partition(":")
    owner: Any = sys.modules[module]
    *owners, name = attributes.split(".")
    for one in owners:
        owner = getattr(owner, one, None)
    return replace_method(owner, name, watched)


def replace_method(owner: Any, name: str, watched: Callable[[Function], Function]) -> Uninstall:
    """Put `watched(original)` in the place of an attribute, where there is one."""
    original = getattr(owner, name, None)
    if original is None:
        return lambda: None
    replacement = stands_for(original)(watched(original))
    dynamo.skip_frame(replacement)  # called between the parts of a compiled step, it is no part of it
    return replace_attribute(owner, name, replacement)
