"""What the autograd engine tells: which backward a thread computes, and for `PyRecorder` where one has made its last
gradient. The native twin is in `native/backward.hpp`.

DDP's reducer queues its finalizer, which waits in C++, on the autograd engine with its last bucket. A callback that is
queued with the first collective of the backward runs just before.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from dsprof.schema import BACKWARD_DONE, Kind

from ..hooking import dynamo, private
from ..hooking.forks import renew_in_child

if TYPE_CHECKING:
    from ..recorder.python_recorder import PyRecorder

LATEST: Final = 64
"""Graph tasks of the autograd engine that are remembered: a re-entrant backward comes back to the outer one's."""


@functools.cache
def graph_task() -> Callable[[], int]:
    """What gives the number of the backward that the calling thread computes, whatever thread the autograd engine uses;
    -1: none, always where torch does not tell any more."""
    task: Callable[[], int] | None = private.find("torch._C:_current_graph_task_id")
    return task or (lambda: -1)


class _LastTask(threading.local):
    task: int = -1
    """That this thread issued a collective in."""


class BackwardDone:
    """Marks the end of each backward that a collective is issued in."""

    def __init__(self, recorder: PyRecorder) -> None:
        self._recorder = recorder
        self._latest: deque[int] = deque(maxlen=LATEST)
        self._lock = threading.RLock()  # a signal's handler may come in between
        renew_in_child(self, "_lock")
        self._last = _LastTask()
        self._task = graph_task()
        self._engine: Any = private.find("torch.autograd:Variable._execution_engine")
        self._node: Callable[[], object] | None = private.find("torch._C:_current_autograd_node")
        dynamo.skip(self._mark)

    def watch(self, cpu: bool) -> None:
        """A collective is about to be issued, on CPU tensors or not."""
        task = self._task()
        if self._engine is None or task in (-1, self._last.task):
            return
        self._last.task = task
        with self._lock:
            if task in self._latest:
                return
            self._latest.append(task)
        if not cpu and _capturing():
            return
        if self._in_node():
            self._engine.queue_callback(functools.partial(self._mark, task))
        else:  # this is a callback at its end already, such as DDP's with a static graph
            self._mark(task)

    def _in_node(self) -> bool:
        """Whether this thread is computing a gradient, and not running the callbacks after the last one."""
        return self._node is None or self._node() is not None

    def _mark(self, task: int) -> None:
        if self._last.task > task:  # the last collective was issued, and waited for, in a re-entrant backward inside
            return
        try:
            self._recorder.mark(Kind.MARK, self._recorder.intern(BACKWARD_DONE))
        except Exception as error:
            self._recorder.count_error("the end of backward", error)


def _capturing() -> bool:
    """Whether the call becomes part of a CUDA graph, which will not come by here when it is replayed."""
    import torch

    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
