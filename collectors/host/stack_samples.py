"""Where the training thread is, some times a second: samples of its Python stack.

A thread beside the training looks, at moments drawn at random, so that no rhythm of the job's is met again and again:
often at first, and less and less, down to what a small share of a core allows.
It calls nothing of torch's or CUDA's and sets no signal handler. Each different stack is a fact, each sample a row with
its number. Of the script's own frames the lines are kept; below the innermost of them, which function of a library it
called, and which one ran.
"""

from __future__ import annotations

import math
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Final

from dsprof.schema import STACK, STACK_FACT, Kind

from ..capture import facts
from ..capture.open_capture import OpenCapture
from ..capture.side_thread import Poller, SideThread
from ..hooking.caller import COMMANDS, HOME, STANDARD_LIBRARY
from ..hooking.uninstall import Uninstall
from ..system.clock import now_ns

EVERY_S: Final = 0.04
"""On average between two samples, at least."""
SHARE: Final = 0.001
"""Of a core that they take in the long run, from the first step on: where one takes longer, there are fewer."""
IN_ADVANCE_S: Final = 0.007
"""Of a core that they may take besides in each doubling of the time from the first step on, counted from a second on:
so that a short job has as many samples as tell something, whenever it ends. The first quarter of its steps is left out
as warm-up, so that what is taken at once tells nothing. With SHARE it is 0.22 % of a core in 30 s, and 0.11 % in ten
minutes."""
BEFORE_TRAINING_S: Final = 0.5
"""Between two looks whether the first step was taken: what comes before it is no step's."""
MOST_STACKS: Final = 900
"""Different ones that are told apart; further ones are number 0."""
DEEPEST: Final = 12
"""Frames of the script's own that are kept, the innermost ones."""
LONGEST: Final = 400
"""Frames that are looked at."""


class Samples:
    """The samples of one thread. `trains`: the thread that took the last step."""

    def __init__(self, capture: OpenCapture) -> None:
        self._capture = capture
        self._name = capture.recorder.intern(STACK)
        self.trains = threading.get_ident()
        self._numbers: dict[tuple[str, ...], int] = {}
        self._is_library: dict[tuple[str, str], str] = {}
        """Of a function of a library, by its file and name, `torch/nn/modules/module.py:forward`; empty: it is the
        script's. Code itself is no key: it would be kept alive, and is read whole each time that it is looked up."""
        self._random = random.Random(0x5EED)
        self._began_s: float | None = None
        self._pause_s = BEFORE_TRAINING_S

    def stepped(self, _: int = 0) -> None:
        self.trains = threading.get_ident()
        if self._began_s is None:
            self._began_s = time.monotonic()

    def pause_s(self) -> float:
        """How long to the next look."""
        return self._pause_s * self._random.uniform(0.5, 1.5)

    def looks(self, stopping: Callable[[], bool]) -> Poller:
        spent = 0.0
        yield
        while self._began_s is None:
            yield
        while True:
            begin = time.thread_time()
            if self._capture.is_on() and not stopping():
                self.sample()
            spent += 2 * (time.thread_time() - begin)  # to wake up costs as much again
            since_s = time.monotonic() - self._began_s
            due = SHARE * since_s + IN_ADVANCE_S * math.log2(1 + since_s)
            self._pause_s = max(EVERY_S, (spent - due) / SHARE)
            yield

    def sample(self) -> None:
        frame = sys._current_frames().get(self.trains)
        if frame is None:
            return
        now = now_ns()
        number = self._number(self._frames(frame))
        self._capture.recorder.put(Kind.GAUGE, self._name, now, now, float(number), -1)

    def _number(self, frames: tuple[str, ...]) -> int:
        number = self._numbers.get(frames)
        if number is None:
            if len(self._numbers) >= MOST_STACKS or not frames:
                return 0
            number = self._numbers[frames] = len(self._numbers) + 1
            facts.state({"fact": STACK_FACT, "number": number, "frames": list(frames)})
        return number

    def _frames(self, frame: FrameType | None) -> tuple[str, ...]:
        """From the outermost in: the script's own frames with their lines; below the last of them the function of a
        library that it called, and the innermost one."""
        own: list[str] = []
        called: list[str] = []
        seen = 0
        while frame is not None and len(own) < DEEPEST and seen < LONGEST:
            seen += 1
            code = frame.f_code
            key = code.co_filename, code.co_name
            name = self._is_library.get(key)
            if name is None:
                name = self._is_library[key] = library_function(*key)
            if not name:
                own.append(f"{code.co_filename}:{frame.f_lineno}")
            elif not own and name != HIDDEN:
                called.append(name)
            frame = frame.f_back
        below = [called[-1], called[0]] if len(called) > 1 else called
        return (*reversed(own), *below)


HIDDEN: Final = "-"


def library_function(file: str, function: str) -> str:
    """Of a function of a library what it is called; HIDDEN of dsprof's own and what has no file; empty: it is the
    script's."""
    if file.startswith((str(HOME), "<")) and not file.startswith("<ipython"):
        return HIDDEN
    for home in ("/site-packages/", "/dist-packages/"):
        if home in file:
            return f"{file.rpartition(home)[2]}:{function}"
    if file.startswith(STANDARD_LIBRARY) or os.path.dirname(file) in COMMANDS:
        return f"{file.removeprefix(STANDARD_LIBRARY).lstrip('/')}:{function}"
    return ""


def install(capture: OpenCapture) -> list[Uninstall]:
    """Sample from now on."""
    samples = Samples(capture)
    capture.samples.append(samples.stepped)
    beside = SideThread("stacks", lambda: samples.looks(lambda: beside.stopping), samples.pause_s)
    beside.start()
    return [beside.stop]
