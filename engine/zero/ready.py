"""Gradients as they come in a backward: noted without running Python, and processed where something can be done with
them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .bucket import Bucket
from .shard import ShardedParam


class ReadyGradients:
    """The parameters whose gradients have come since they were last taken.

    Parameters note in a list that their gradient has come, which runs no Python; those after which something can be
    done with what has come, the last of a run and of a bucket, have the list processed.
    """

    def __init__(self, params: Sequence[ShardedParam], process: Callable[[], None]) -> None:
        """`process` is a method; its object is not kept alive, and nothing is noted before `watch`."""
        self._params = params
        self._by_id = {id(param.param): param for param in params}
        self._process = weakref.WeakMethod(process)
        self._came: list[Tensor] = []
        self._notes: list[RemovableHandle] = []
        self._processing: dict[ShardedParam, RemovableHandle] = {}

    @property
    def watched(self) -> bool:
        """Whether gradients are noted."""
        return bool(self._notes)

    def watch(self, buckets: Iterable[Bucket]) -> None:
        """From now on note gradients as they come, and process them as `divide` says."""
        self._notes = [_hook_gradient(param, self._came.append) for param in self._params]
        self.divide(buckets)

    def divide(self, buckets: Iterable[Bucket]) -> None:
        """Have the gradients that have come processed after the last one of each run and bucket, if they are
        noted."""
        wanted: set[ShardedParam] = set()
        for bucket in buckets if self._notes else ():
            for run in bucket.runs(range(len(bucket.params))):
                wanted.add(bucket.params[run[-1]])
        for param in self._processing.keys() - wanted:
            self._processing.pop(param).remove()
        # torch cannot collect a hook that leads back to its own parameter, so this one must not keep us alive.
        method, came = self._process, self._came

        def process(_: Tensor) -> None:
            call = method()
            if call is None:
                came.clear()
            else:
                call()

        for param in wanted - self._processing.keys():
            self._processing[param] = _hook_gradient(param, process)

    def begin(self) -> None:
        """A backward begins: nothing has come, and the script's own hooks come before the gradient is taken."""
        for param, handle in self._processing.items():
            hooks = param.param._post_accumulate_grad_hooks
            if next(reversed(hooks)) != handle.id:
                hooks[handle.id] = hooks.pop(handle.id)
        self._came.clear()

    def take(self) -> list[ShardedParam]:
        """Those that have come since. torch calls hooks also where a function's backward has returned None."""
        params = [self._by_id[id(param)] for param in self._came if param.grad is not None]
        self._came.clear()
        return params

    def close(self) -> None:
        """Take every hook out of the model."""
        for handle in (*self._notes, *self._processing.values()):
            handle.remove()


def _hook_gradient(param: ShardedParam, call: Callable[[Tensor], None]) -> RemovableHandle:
    """Have `call` called when a gradient of it has come, also if the script has frozen it for now."""
    tensor = param.param
    trains = tensor.requires_grad
    try:
        tensor.requires_grad_(True)  # else torch refuses the hook
        handle: RemovableHandle = tensor.register_post_accumulate_grad_hook(call)
        return handle
    finally:
        tensor.requires_grad_(trains)
