"""Where a thread stands still for communication: `Work.wait`, waits for the futures of works, and calls that issue
collectives and wait for them inside C++. (`wait_tensor`, of functional collectives, is an operator and belongs to the
kernels. Waits of DDP's reducer inside C++ are derived on merge.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakKeyDictionary

from . import dynamo
from .interrupts import by_handler
from .uninstall import Uninstall, replace_attribute
from .wrap import stands_for

if TYPE_CHECKING:
    from .record import Recorder

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

BLOCKING: Final = (
    ("", "_broadcast_coalesced"),  # DDP sends its buffers in forward, and DDP and FSDP the parameters when they wrap
    ("", "_verify_params_across_processes"),
    ("ProcessGroup", "monitored_barrier"),
    ("Reducer", "_rebuild_buckets"),  # DDP's in the second forward, which agrees on their order
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


def install(recorder: Recorder, ends: Ends | None) -> Iterator[Uninstall]:
    """Record waits from now on: each hook is there once what takes it away is given. `ends` None: the helper has the
    ends of collectives from elsewhere."""
    yield _works(recorder, ends)
    yield from _futures(recorder, ends)
    yield from _coalesced(recorder)
    yield from _blocking(recorder, ends)


def _works(recorder: Recorder, ends: Ends | None) -> Uninstall:
    from torch.distributed import Work

    names = {op_type: recorder.intern(name) for op_type, name in OP_TYPES.items()}
    other, begin, end = recorder.intern("wait"), recorder.begin_wait, recorder.end

    def watched(original: Function) -> Function:
        def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                handle = begin(names.get(self._get_op_type(), other), self)
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
    from torch import distributed
    from torch._C import Future
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

    future: Any = Future
    yield replace_method(Work, "get_future", given)
    yield replace_method(future, "then", following)
    yield replace_method(future, "wait", watched)
    yield replace_method(getattr(distributed, "Reducer", None), "_run_comm_hook", of_reducer)


def _coalesced(recorder: Recorder) -> Iterator[Uninstall]:
    """What is coalesced by the backend (NCCL) has one work, which no operator of c10d returns."""
    from torch.distributed import ProcessGroup

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

    yield replace_method(ProcessGroup, "_start_coalescing", begun)
    yield replace_method(ProcessGroup, "_end_coalescing", watched)


def _blocking(recorder: Recorder, ends: Ends | None) -> Iterator[Uninstall]:
    from torch import distributed

    enter, leave = recorder.enter_blocking, recorder.leave_blocking

    def watched(original: Function) -> Function:
        def call(*args: Any, **kwargs: Any) -> Any:
            if dynamo.compiling():
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

    for owner, name in BLOCKING:
        yield replace_method(getattr(distributed, owner, None) if owner else distributed, name, watched)


def replace_method(owner: Any, name: str, watched: Callable[[Function], Function]) -> Uninstall:
    """Put `watched(original)` in the place of an attribute, where there is one: some are private to torch."""
    original = getattr(owner, name, None)
    if original is None:
        return lambda: None
    replacement = stands_for(original)(watched(original))
    dynamo.skip_frame(replacement)  # called between the parts of a compiled step, it is no part of it
    return replace_attribute(owner, name, replacement)
