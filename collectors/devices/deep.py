"""When a few steps are traced with torch.profiler: those that `--deep 20:23` names; else three, once in a run, where
the light records of a rank are suspicious.

They are where its device is for more than MOST_UNSEEN of the step in phases that the host is still launching: how long
it stands idle inside is then not known, and no verdict can be drawn. Each rank looks at its own records after some
steps of warm-up, and again after twice as many. The first one that is suspicious asks all ranks for the same steps, by
the run's control file; a rank by itself asks nobody. Nothing is traced where that might harm the job: see `_refusal`.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dsprof import control
from dsprof.control import Control, DeepRequest
from dsprof.ranges import NEVER, parse_deep
from dsprof.schema import CONTROL_FILE, MOST_UNSEEN

from ..capture import identity
from ..capture.identity import setting
from ..capture.open_capture import OpenCapture
from ..hooking.errors import count_error
from ..hooking.uninstall import Uninstall
from ..native import NativeRecorder
from ..system.clock import now_ns
from .launching import Launching
from .torch_profiler import (
    TEARDOWN,
    DeepWindow,
    Profile,
    begin_profile,
    can_be_torn_down,
    sees_devices,
    silently,
    uses_device,
    watch_others,
)

WARM_UP: Final = 5
JUDGED: Final = 10
"""Steps at the beginning that nothing is told of, and after them at least, of which it is."""
AGAIN: Final = 2
MOST_LOOKS: Final = 8
"""What is not suspicious is looked at again after so many times as many steps, and so often at most."""
STEPS: Final = 3
MOST_TRACED_S: Final = 3.0
"""That are traced, and how long they may take as they were: of a step that is longer there are fewer, or none, since
what the profiler writes grows with what is launched."""
MOST_RANKS: Final = 8
"""That trace at once, besides the one that asks."""
LEAST_FREE: Final = 256 << 20
"""Bytes that the device must have left for what its profiler needs."""
TOLD_WITHIN_S: Final = 2.5
TOLD_ELSEWHERE_S: Final = 15.0
"""Until every rank has read what is asked: on this host; on several, which share a folder on a network."""
OTHER_TOOLS: Final = (
    "NSYS_PROFILING_SESSION_ID", "CUDA_INJECTION64_PATH", "NVTX_INJECTION64_PATH", "KINETO_USE_DAEMON",
    "ROCP_TOOL_LIBRARIES", "HSA_TOOLS_LIB",
)  # fmt: skip
"""Variables that tell of another profiler, which the device's tracing can be taken by only once."""
PARTS_ONLY: Final = ("DSPROF_STEPS", "DSPROF_DELAY", "DSPROF_DURATION", "DSPROF_TRIAL")
"""Settings of who wants a part of the run only, or measures it to compare."""


def install(capture: OpenCapture) -> list[Uninstall]:
    """Trace the steps that DSPROF_DEEP names; without it, watch whether any are to be."""
    asked = setting("DSPROF_DEEP")
    if asked and asked != NEVER:
        first, last = parse_deep(asked)
        window = DeepWindow(first, last, capture.folder, capture.recorder, capture.write_fact, begin_profile)
        unwatch = watch_others(window)
        window.install()
        capture.after_step.append(window.after_step)
        return [unwatch, window.close]
    if asked == NEVER or capture.full or any(map(setting, PARTS_ONLY)):
        return []
    if not isinstance(capture.recorder, NativeRecorder):  # the other one does not time the device
        return []
    who = identity.identify()
    if who.restart or _asked_before(capture.run / CONTROL_FILE) or any(map(os.environ.get, OTHER_TOOLS)):
        return []
    launching = Launching(capture.folder, capture.recorder)
    return Suspicion(capture, capture.recorder, who, launching.share, silently(begin_profile)).install()


class Suspicion:
    """Watches one rank.

    share:    what `Launching.share` tells
    profile:  begins a profiler
    clock_ns: tells the time
    write:    runs what writes the control file, beside the training
    """

    def __init__(
        self, capture: OpenCapture, recorder: NativeRecorder, who: identity.Identity,
        share: Callable[[int], tuple[float, float] | None], profile: Profile, *,
        clock_ns: Callable[[], int] = now_ns, write: Callable[[Callable[[], None]], None] | None = None,
    ) -> None:  # fmt: skip
        self._capture, self._recorder, self._who = capture, recorder, who
        self._share, self._clock_ns = share, clock_ns
        self._write = write or _beside
        self._window = DeepWindow(0, 0, capture.folder, recorder, capture.write_fact, profile, refuses=self._refusal)
        self._early = self._sampled = 0
        """Steps so far: until the first look all are counted, later those until the last sample."""
        self._since: tuple[int, int] | None = None
        """The step after which the steps begin that are looked at, and when that was."""
        self._looks = 0
        self._next_look = WARM_UP + JUDGED
        self._largest_gap = 1
        """Steps between two samples, at most."""
        self._asked = self._over = False
        self._unwatch: list[Uninstall] = []

    @property
    def _steps(self) -> int:
        """That this process has taken."""
        return max(self._early, self._sampled)

    def install(self) -> list[Uninstall]:
        self._capture.after_step.append(self.after_step)
        self._capture.samples.append(self.sample)
        self._capture.when_told.append(self.told)
        self._unwatch.append(watch_others(self._window))  # one that is prepared for later does not show yet
        return [self.close]

    def after_step(self) -> None:
        """A step has ended: until the first look each is seen, so that a short job is looked at early, too."""
        self._early += 1
        if self._early >= WARM_UP:
            self._watch()
        if (self._looks or self._asked) and not self._over:
            self._capture.after_step.remove(self.after_step)

    def sample(self, steps: int) -> None:
        """So many steps were taken since the last time."""
        self._sampled += steps
        self._largest_gap = max(self._largest_gap, steps)
        if self._window.over:
            self._end()
        elif self._looks:
            self._watch()

    def told(self, said: Control) -> None:
        """The control file is new: steps are to be traced on some ranks."""
        if said.deep is None or self._over or self._asked:
            return
        if self._who.rank in said.deep.ranks and said.deep.first > self._steps and uses_device():
            self._open(said.deep)
        else:  # once in a run is enough
            self._end()

    def close(self) -> None:
        """The capture closes."""
        if self._asked:
            self._window.close()
        self._end()

    # --- looking

    def _watch(self) -> None:
        """Look, where that is due."""
        if self._asked or self._over:
            return
        try:
            if not uses_device():  # it trains on the CPU
                self._end()
            elif self._since is None:
                self._since, self._next_look = (self._steps, self._clock_ns()), self._steps + JUDGED
            elif self._steps >= self._next_look:
                self._look(*self._since)
        except Exception as error:  # what fails once would fail after each step
            count_error("deep", error)
            self._end()

    def _look(self, since: int, since_ns: int) -> None:
        now = self._clock_ns()
        shares = self._share(since_ns) if self._capture.is_on() else None
        # Where a stop of the host's makes one half suspicious, the other half tells.
        if shares is not None and min(shares) > MOST_UNSEEN:
            self._ask(sum(shares) / 2, (now - since_ns) / 1e9 / (self._steps - since))
            return
        self._since = self._steps, now
        self._look_later()

    def _look_later(self) -> None:
        self._looks += 1
        self._next_look = AGAIN * self._steps
        if self._looks >= MOST_LOOKS:
            self._end()

    def _ask(self, share: float, step_s: float) -> None:
        """share: see `DeepRequest`; step_s: how long a step takes."""
        steps = min(STEPS, int(MOST_TRACED_S / step_s))
        if not steps:
            self._end()
            return
        who = self._who
        if who.world_size == 1:
            self._open(DeepRequest(self._steps + 1, self._steps + 1 + steps, (who.rank,), share))
            return
        within_s = TOLD_WITHIN_S if who.world_size == _ranks_here() else TOLD_ELSEWHERE_S
        first = self._steps + math.ceil(within_s / step_s) + 2 * self._largest_gap
        wanted = setting("DSPROF_RANKS")
        captured = [rank for rank in range(who.world_size) if identity.selected(rank, wanted)]
        ranks = tuple(sorted({*captured[:MOST_RANKS], who.rank}))
        request = DeepRequest(first, first + steps, ranks, share)
        self._look_later()  # another rank may be quicker, or the run folder be full
        self._write(lambda: _ask_once(self._capture, request))

    # --- tracing

    def _open(self, request: DeepRequest) -> None:
        self._asked = True
        self._window.move(request.first, request.last, self._steps, request.share)
        self._capture.after_step.append(self._window.after_step)

    def _end(self) -> None:
        """Nothing is traced any more."""
        self._over = True
        steps = self._capture.after_step
        steps[:] = [hook for hook in steps if hook not in (self._window.after_step, self.after_step)]
        samples = self._capture.samples
        samples[:] = [sample for sample in samples if sample != self.sample]
        while self._unwatch:
            self._unwatch.pop()()

    def _refusal(self) -> str:
        """Why the steps may not be traced now; empty: they may."""
        import torch

        if self._recorder.graphs_seen or torch.cuda.is_current_stream_capturing():
            return "the job has captured a CUDA graph, which a profiler that begins later could break"
        if not sees_devices():
            return "the profiler of this torch does not see what devices do"
        if not (can_be_torn_down() or os.environ.get(TEARDOWN) == "1"):
            return "the profiler would stay in the process (CUDA before 12.6) and slow down its launches"
        if not self._capture.is_on():
            return "the capture is switched off"
        free, _ = torch.cuda.mem_get_info()
        if free < LEAST_FREE:
            return f"the device has only {free >> 20} MiB left, which its profiler may need"
        return ""


def _asked_before(path: Path) -> bool:
    """Whether ranks of this run were asked to trace before this one began: it is another job's turn, or another try."""
    try:
        return control.read(path).deep is not None
    except (OSError, ValueError):
        return False


def _ranks_here() -> int:
    """Ranks of this job on this host; 0 where that is not known."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() else 0


def _ask_once(capture: OpenCapture, request: DeepRequest) -> None:
    try:
        control.ask_once(capture.run / CONTROL_FILE, request)
    except OSError as error:
        count_error("deep", error)


def _beside(act: Callable[[], None]) -> None:
    """On a thread of its own: the run folder may lie on a slow network."""
    threading.Thread(target=act, name="dsprof-asks", daemon=True).start()
