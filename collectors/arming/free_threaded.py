"""Python without a global interpreter lock (3.13t and later): nothing is recorded there, and it is said so.

The recorder in Python and the tables of the hooks rely on that lock, and the native helper, as any module that does not
declare otherwise, would have the interpreter switch it on again for the whole job. So nothing is put into torch but
what notices that this process is a rank, to leave a word in its run folder.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from typing import Any

from ..capture.without_capture import leave_word
from ..hooking.wrap import stands_for


def refusal() -> str | None:
    """Why nothing is recorded by this interpreter, and what to do; None: it has the lock."""
    gil_enabled: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    if "t" not in sys.abiflags and gil_enabled():  # the flag stands for Py_GIL_DISABLED
        return None
    return (
        f"nothing is recorded: this Python ({platform.python_version()}, {sys.executable}) is free-threaded, and dsprof"
        " relies on the global interpreter lock; run the job with the ordinary build of the same Python"
    )


def decline(why: str) -> None:
    """Leave the word `why` in the run folder once this process joins a process group or steps an optimizer."""
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    told: list[bool] = []

    def tell() -> None:
        if not told:  # twice, by two threads, does no harm
            told.append(True)
            leave_word(why)

    def before_step(*_: object) -> None:
        stepping.remove()
        tell()

    stepping = register_optimizer_step_pre_hook(before_step)
    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    join = c10d.init_process_group

    @stands_for(join)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        result = join(*args, **kwargs)
        tell()
        return result

    c10d.init_process_group = init_process_group
    dist.init_process_group = init_process_group
