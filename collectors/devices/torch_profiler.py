"""The deep look: a window of torch.profiler over a few steps, exported into the capture's folder. `deep` opens it.

It begins and ends where steps do, so that whole steps are in it; merging reads it (`dsprof.trace.deep`). What beginning
and ending take is in the step after each, and all of these steps are marked as profiled. A profiler of the job's own is
left alone: where one is at work the window is given up, and where one begins later ours ends first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from dsprof.atomic import replacing
from dsprof.schema import DEEP_FILE, Kind

from ..hooking import private
from ..hooking.errors import count_error
from ..hooking.statements import Fact
from ..hooking.uninstall import Uninstall, in_reverse, replace_attribute
from ..hooking.wrap import stands_for
from ..recorder.record import Recorder
from ..system.clock import now_ns

NOTHING_DISTURBED: Final = "so no steps were profiled by --deep"
NOT_BY_ITSELF: Final = "so dsprof traced no steps by itself to see for how long the device stands idle"
Profile = Callable[[], Callable[["Path | None"], None]]
"""Begins a profiler, and gives back what ends it, called with the file to write, or None for nothing."""
LOG_LEVEL: Final = "KINETO_LOG_LEVEL"
SILENT: Final = "6"
"""Of LOG_LEVEL, as `dsprof run --deep` sets it (`launch.launch.KINETO_SILENT`)."""
TEARDOWN: Final = "TEARDOWN_CUPTI"
"""The environment variable by which torch's profiler is told, when it ends, to take CUPTI out of the process again.
Left in, it slows down all launches for as long as the job runs: steps of small kernels took 44.7 ms after traced ones
on an H100, and 35.2 where it was taken out (benchmarks/results/gpu_pairs.json, "small kernels", and "by phases")."""
TEARS_DOWN: Final = (12, 6)
"""Version of CUDA from which on that does not crash CUDA graphs; before, torch says the same."""


class DeepWindow:
    """From the end of step `first` - 1 to that of step `last` - 1.

    refuses: asked when it is to begin, why it may not, in words; empty: it may
    """

    def __init__(
        self, first: int, last: int, folder: Path, recorder: Recorder, write_fact: Callable[[Fact], None],
        profile: Profile, refuses: Callable[[], str] = str,
    ) -> None:  # fmt: skip
        self._first, self._last = first, last
        self._share: float | None = None
        self._refuses = refuses
        self._file, self._recorder, self._write_fact = folder / DEEP_FILE, recorder, write_fact
        self._profile = profile
        self._end: Callable[[Path | None], None] | None = None
        self._over = False
        self._steps = 0
        self._began_ns = 0
        self._of_device = False
        self._pid = os.getpid()
        self.beginning = False
        """Our own profiler begins now, and no other."""
        self.others = 0
        """Profilers of the job's own that are prepared or at work."""

    def install(self) -> None:
        if self._first == 0:
            self._begin()

    def move(self, first: int, last: int, taken: int, share: float) -> None:
        """It is to be these steps, of which `taken` were taken already: dsprof opens it by itself, and nobody asked for
        it. share: why (`control.DeepRequest`)."""
        self._first, self._last, self._steps, self._share = first, last, taken, share

    def after_step(self) -> None:
        """A training step has ended."""
        if self._over:
            return
        self._steps += 1
        if self._end is None and self._steps >= self._first:
            self._begin()
        elif self._end is not None and self._steps >= self._last and not _is_capturing():
            self.close()

    def other_begins(self) -> None:
        """A profiler of the job's own is about to begin."""
        if not self.beginning:
            self.others += 1
            if self._end is not None:
                self._give_up("the job began a torch.profiler of its own")

    def other_ended(self) -> None:
        self.others = max(self.others - 1, 0)

    def close(self) -> None:
        """End the window, if it is open, and keep what is in it."""
        end, self._end, over, self._over = self._end, None, self._over, True
        if self._pid != os.getpid():
            return
        if end is None:
            if not over and self._share is None:
                self._note(
                    f"steps {self._first}:{self._last} were asked for, and the job ended after {self._steps}, "
                    f"{NOTHING_DISTURBED}"
                )
            return
        if self._steps < self._last:
            self._note(f"of steps {self._first}:{self._last} the job took the first {self._steps - self._first} only")
        handle = self._recorder.begin(Kind.MARK, self._recorder.intern("torch.profiler ends"))
        try:
            end(self._file)
        except Exception as error:
            count_error("deep", error)
            self._note(f"the window of torch.profiler could not be kept ({type(error).__name__}: {error})")
        finally:
            self._recorder.end(handle)
            # Also of one that failed: its steps were slowed down all the same.
            self._write_fact(
                {"fact": "deep", "start_ns": self._began_ns, "end_ns": now_ns(), **self._why(),
                 "first": self._first, "last": self._steps - 1, "device": self._of_device}
            )  # fmt: skip

    def _begin(self) -> None:
        try:
            others = self.others or _at_work()
            why = f"a torch.profiler of the job's own was at work at step {self._steps}" if others else self._refuses()
        except Exception as error:
            self._over = True
            count_error("deep", error)
            return
        if why:
            self._over = True
            self._note(f"{why}, {NOTHING_DISTURBED}")
            return
        self._began_ns = now_ns()
        handle = self._recorder.begin(Kind.MARK, self._recorder.intern("torch.profiler begins"))
        self.beginning = True
        try:
            self._end = self._profile()
            self._of_device = uses_device()
        except Exception as error:
            self._over = True
            count_error("deep", error)
            self._note(f"torch.profiler could not begin ({type(error).__name__}: {error}), {NOTHING_DISTURBED}")
        finally:
            self.beginning = False
            self._recorder.end(handle)

    def _give_up(self, why: str) -> None:
        end, self._end, self._over = self._end, None, True
        assert end is not None
        try:
            end(None)
        except Exception as error:
            count_error("deep", error)
        self._note(f"{why} at step {self._steps}, {NOTHING_DISTURBED}")
        window = {"start_ns": self._began_ns, "end_ns": now_ns(), **self._why()}
        self._write_fact({"fact": "deep", **window, "given_up": True})

    @property
    def over(self) -> bool:
        """It has been, or will not be any more."""
        return self._over

    def _why(self) -> Fact:
        return {} if self._share is None else {"share": round(self._share, 4)}

    def _note(self, text: str) -> None:
        asked_for = self._share is None
        text = f"--deep: {text}" if asked_for else text.replace(NOTHING_DISTURBED, NOT_BY_ITSELF)
        self._write_fact({"fact": "note", "text": text})


def _at_work() -> bool:
    """Whether any profiler of torch's is. Raises `private.Gone` where torch does not tell any more."""
    flagged = private.need("torch.autograd.profiler:_is_profiler_enabled")
    return bool(flagged or private.need("torch._C._autograd:_profiler_enabled")())


def _is_capturing() -> bool:
    """Whether what this thread launches goes into a CUDA graph now, which ending a profiler could break."""
    import torch

    return uses_device() and torch.cuda.is_current_stream_capturing()


def uses_device() -> bool:
    """Whether the job has begun to."""
    import torch

    return bool(torch.cuda.is_initialized())


def sees_devices() -> bool:
    """Whether this torch's profiler sees what devices do. One that does not would put events around each operator, and
    take very long."""
    from torch.profiler import ProfilerActivity, supported_activities

    return ProfilerActivity.CUDA in supported_activities()


def begin_profile() -> Callable[[Path | None], None]:
    """torch.profiler over the CPU, and the device if the job uses one."""
    from torch.profiler import ProfilerActivity, profile

    activities, more = [ProfilerActivity.CPU], dict[str, Any]()
    if uses_device() and sees_devices():
        activities.append(ProfilerActivity.CUDA)
        config = private.find("torch.profiler:_ExperimentalConfig")
        if config is not None:  # which stream waited for which
            more["experimental_config"] = config(enable_cuda_sync_events=True)
    profiler = profile(activities=activities, **more)
    as_it_was = _torn_down(os.environ)
    try:
        profiler.start()
    except BaseException:  # which may come after it has begun: one that is never ended breaks the job at its exit
        with suppress(Exception):
            profiler.stop()
        as_it_was()
        raise

    def end(file: Path | None) -> None:
        try:
            profiler.stop()
        finally:
            as_it_was()
        if file is not None:
            with replacing(file) as temporary:
                profiler.export_chrome_trace(str(temporary))

    return end


def can_be_torn_down() -> bool:
    """Whether CUPTI can be taken out of the process again."""
    import torch

    return tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2]) >= TEARS_DOWN


def _torn_down(environment: MutableMapping[str, str]) -> Uninstall:
    """Have CUPTI taken out of the process when the profiler that begins now has ended, unless the job or torch wants it
    otherwise. The result leaves the environment as it was."""
    if TEARDOWN in environment or not can_be_torn_down():
        return lambda: None
    environment[TEARDOWN] = "1"

    def as_it_was() -> None:
        if environment.get(TEARDOWN) == "1":
            del environment[TEARDOWN]

    return as_it_was


def silently(profile: Profile) -> Profile:
    """One whose library says nothing on the job's stderr, unless the user has it speak: it reads that when the first
    profiler of the process begins. The environment is left as it was."""

    def begin() -> Callable[[Path | None], None]:
        if LOG_LEVEL in os.environ:
            return profile()
        os.environ[LOG_LEVEL] = SILENT
        try:
            return profile()
        finally:
            os.environ.pop(LOG_LEVEL, None)

    return begin


def watch_others(window: DeepWindow) -> Uninstall:
    """See profilers of the job's own begin and end."""
    import torch.autograd.profiler as profiler

    kind: Any = profiler.profile
    prepare, leave = private.need("torch.autograd.profiler:profile._prepare_trace"), kind.__exit__
    starts: Any = private.need("torch.autograd.profiler:_run_on_profiler_start")
    ours: set[int] = set()

    @stands_for(prepare)
    def _prepare_trace(self: Any) -> Any:
        if window.beginning:
            ours.add(id(self))
        else:
            _tell(window.other_begins)
        return prepare(self)

    @stands_for(leave)
    def __exit__(self: Any, *error: Any) -> Any:
        try:
            return leave(self, *error)
        finally:
            if id(self) in ours:
                ours.discard(id(self))
            else:
                _tell(window.other_ended)

    @stands_for(starts)
    def _run_on_profiler_start() -> Any:
        if not window.beginning and not window.others:  # NVTX's and ITT's, which prepare nothing
            _tell(window.other_begins)
            window.others = 0  # nor say when they end: `_at_work` sees them
        return starts()

    return in_reverse(
        [
            replace_attribute(kind, "_prepare_trace", _prepare_trace),
            replace_attribute(kind, "__exit__", __exit__),
            replace_attribute(profiler, "_run_on_profiler_start", _run_on_profiler_start),
        ]
    )


def _tell(what: Callable[[], None]) -> None:
    try:
        what()
    except Exception as error:
        count_error("deep", error)
