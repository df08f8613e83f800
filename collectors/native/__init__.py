"""The native helper: the recorder and the hot hooks in C++, built by `build.ensure` before the ranks start.

build        compiles it
target       what it is built for, and what is said of one that was built for something else
places       where it is kept and looked for
trust        whether it may be loaded from there
layout       the header that says how a record is laid out
hooks.cpp    the helper itself, with a table of its headers
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from dsprof import ondisk, permissions

from ..hooking.signals import by_handler
from ..recorder.record import LIMIT_BYTES, PATIENCE_S, SharedParts
from ..recorder.source_locations import LIBRARY, passed_over
from . import build
from .places import MODULE
from .target import running_target

LONGEST_WAIT_S: Final = 120.0
"""For a helper that is being built, where DSPROF_NATIVE=on."""
NOT_BUILT: Final = "not built for this torch (`dsprof run` builds it before the job starts, `dsprof build` at any time)"


class Native:
    """The loaded helper. There is one of it in a process, and so one open recorder."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def open(
        self,
        folder: str | os.PathLike[str],
        limit_bytes: int = LIMIT_BYTES,
        copied: bool = False,
        patience_s: float = PATIENCE_S,
    ) -> NativeRecorder:
        """Record into `folder`; `copied`: a copier takes full chunks from there. Raises OSError when it cannot be
        opened, RuntimeError while another is open."""
        self.module.pass_over_sites(passed_over(), LIBRARY)
        self.module.open(os.fspath(folder), limit_bytes, copied, patience_s, permissions.file_mode())
        return NativeRecorder(self.module)


class NativeLockWatch:
    """Writes Python's stacks where no Python can run (`lock_watch.hpp`). There is one of it in a process."""

    def __init__(self, module: Any) -> None:
        self.start: Callable[[str, float, float], None] = module.lock_watch_start
        self.feed: Callable[[int], None] = module.lock_watch_feed
        self.stop: Callable[[], None] = module.lock_watch_stop


class NativePulse:
    """Tells how long the whole process stood still (`pulse.hpp`). There is one of it in a process."""

    def __init__(self, module: Any) -> None:
        self.start: Callable[[float], None] = module.pulse_start
        self.stop: Callable[[], None] = module.pulse_stop
        self.stopped_s: Callable[[], float] = module.pulse_stopped


class NativeRecorder(SharedParts):
    """A `Recorder` whose methods are C functions, and the switch of the native hooks."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.graphs_seen = 0
        """How often a CUDA graph began or ended to be captured, or was replayed for the first time."""
        self._counters = module.counters
        self.intern = module.intern
        self.begin = module.begin
        self.end = module.end
        self.put = module.put
        self.mark = module.mark
        self.begin_wait = module.begin_wait
        self.target = module.target
        self.stands_for_issued = module.stands_for_issued
        self.enter_blocking = module.enter_blocking
        self.leave_blocking = module.leave_blocking
        self.group = module.group
        self.number = module.number
        self.comm = module.comm
        self.span = module.span
        self.make_context = module.make_context
        self.context = module.context
        self.set_context = module.set_context
        self.span_end = module.span_end
        self.pass_over = module.pass_over
        self.note_error = module.note_error
        self.failures = module.failures
        self.count_step = module.count_step
        self.time_hooks = module.time_hooks
        self.mute = module.mute
        self.disarm_after_fork = module.disarm_after_fork
        self.close = module.close
        self.renew_groups = module.renew_groups
        self.uninstall_collectives = module.uninstall_collectives
        self.name_module = module.name_module
        self.uninstall_modules = module.uninstall_modules
        self.start_counting = module.start_counting
        self.stop_counting = module.stop_counting
        self.start_device = module.start_device
        self.stop_device = module.stop_device
        self.communications_in_graphs = module.communications_in_graphs
        self.collect_device = module.collect_device
        self.begin_on_stream = module.begin_on_stream
        self.end_on_stream = module.end_on_stream
        self.begin_coalescing = module.begin_coalescing
        self.issue_coalesced = module.issue_coalesced
        self.end_coalescing = module.end_coalescing
        self.uninstall_syncs = module.uninstall_syncs
        self.install_syncs = module.install_syncs
        self.uninstall_call_sites = module.uninstall_call_sites
        self.install_call_sites = module.install_call_sites
        self.lock_watch = NativeLockWatch(module)
        self.pulse = NativePulse(module)
        self._install_collectives = module.install_collectives
        self._install_modules = module.install_modules

    @property
    def records(self) -> int:
        return int(self._counters()[0])

    @property
    def dropped(self) -> int:
        return int(self._counters()[1])

    @property
    def errors(self) -> int:
        return int(self._counters()[2])

    def install_collectives(self, names: Mapping[str, str]) -> None:
        """Record every c10d operator of `names` (operator -> name in the trace), and wait_tensor."""
        from torch.distributed import Work

        self._install_collectives(dict(names), Work)

    def install_modules(
        self, name_all: Callable[[Any], None] | None, note_input: Callable[..., None] | None = None
    ) -> None:
        """Record the outermost call of a module in each thread; with `name_all`, which is called with an outermost
        module that is unknown, every call of one that `name_module` named, and its time in backward. `note_input` is
        called with each outermost module and its arguments where it is trained. Both raise what is the job's only."""
        import torch

        self._install_modules(torch.nn.Module.__call__, torch.Tensor, name_all, note_input, by_handler)


def load(explain: Callable[[str], None] = lambda reason: None) -> Native | None:
    """The helper built for the torch of this process; None, with a reason to `explain`, where there is none.

    Never raises, never builds.
    """
    try:
        path = build.find(explain)
        if path is None:
            explain(NOT_BUILT)
            return None
        module = _import(path)
        target = running_target()
        built = (module.TORCH_VERSION, module.TORCH_GIT, module.FORMAT_VERSION, module.RECORD_BYTES)
        wanted = (target.torch_version, target.torch_git, ondisk.FORMAT_VERSION, ondisk.RECORD_BYTES)
        if built != wanted:
            explain(f"{path} was built for {built}, not {wanted}")
            return None
        return Native(module)
    except ImportError as error:
        explain(f"{type(error).__name__}: {error}; if it was built in another image, run `dsprof build` in this one")
        return None
    except Exception as error:
        explain(f"{type(error).__name__}: {error}")
        return None


def load_or_build(*, wait: bool, explain: Callable[[str], None]) -> Native | None:
    """As `load`, but a helper that is not there is built in the background. With `wait` it is waited for, else it is
    there for the next run."""
    try:
        if build.find() is None:
            reason = build.begin()
            if wait:
                build.wait(LONGEST_WAIT_S)
            if build.find(explain) is None:
                explain(build.begin() if wait else reason)
                return None
    except Exception as error:
        explain(f"{type(error).__name__}: {error}")
        return None
    return load(explain)


def _import(path: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    if spec is None:
        raise ImportError(f"{path}: not a module")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
