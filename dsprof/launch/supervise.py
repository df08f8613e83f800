"""Runs the job in the foreground and outlives it: signals reach it exactly once, and its status comes back.

Where the launcher is killed all the same, what it started ends with it (`end_with`).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Final

FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
SI_KERNEL: Final = 128
"""Linux's si_code of a signal that the kernel sent, so by the terminal to the whole foreground group."""
REPEAT_S: Final = 0.5
"""A signal sent by a program again within this time is the same one sent twice, to the process and to its group."""
PR_SET_PDEATHSIG: Final = 1
KILL_AFTER_S: Final = 5.0
"""How long a job may live on after the second Ctrl-C, and a hung one after each signal that is to end it."""
LOOK_S: Final = 1.0
"""How often the job is looked after."""
HUNG: Final = 124
"""Status of a job that was ended because it hung; timeout(1) returns the same."""


@dataclass(frozen=True)
class Ending:
    """How the one process that was started ended."""

    pid: int
    code: int | None
    """Exit status as the operating system gave it; None when it ended by a signal."""
    signal: int | None
    ended_ns: int
    """Monotonic clock, when it had ended."""
    interrupted: bool = False
    """A signal was typed or passed on to it before."""
    killed: bool = False
    """We killed it because Ctrl-C was pressed again: that is what ended the job."""
    hung: bool = False
    """We ended it because it hung."""

    @property
    def status(self) -> int:
        """What a shell would report: the exit code, or 128 + the signal; HUNG of a job that we ended for that."""
        if self.hung:
            return HUNG
        if self.signal is not None:
            return 128 + (signal.SIGINT if self.killed else self.signal)
        return self.code or 0


class Supervisor:
    """One child process and what is done about signals while it lives."""

    def __init__(self, say: Callable[[str], None], look: Callable[[], bool] | None = None) -> None:
        """`look` is called about once a second while the job runs; whether it is to be ended."""
        self._say = say
        self._look = look
        self._looked = time.monotonic()
        self._ending: list[tuple[float, signal.Signals]] = []
        """When which signal is still to be sent to a job that hung."""
        self._hung = False
        self._presses = 0
        self._last: dict[int, float] = {}
        self._kill_at: float | None = None

    def run(
        self, command: Sequence[str], env: Mapping[str, str], *, before: Callable[[], None] | None = None
    ) -> Ending:
        """Run `command` to its end. Raises OSError if it cannot start.

        The child stays in our process group, so that it keeps the terminal. What the terminal sends (Ctrl-C) has
        reached it already; what was sent to this process alone is passed on. Signals ignored at our start stay so.
        `before` is called in the child, just before it becomes `command`.
        """
        handled = {number for number in FORWARDED if signal.getsignal(number) != signal.SIG_IGN}
        early: list[int] = []

        def note(number: int, _frame: FrameType | None) -> None:
            early.append(number)

        previous = {number: signal.signal(number, note) for number in handled}
        try:
            # Blocked only after the start: a child would inherit the mask.
            child = subprocess.Popen(list(command), env=dict(env), preexec_fn=before)
            signal.pthread_sigmask(signal.SIG_BLOCK, handled | {signal.SIGCHLD})
            try:
                for number in early:
                    self._react(child, number, from_terminal=False)
                self._wait(child, handled)
                ended_ns = time.monotonic_ns()
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, handled | {signal.SIGCHLD})
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        ended_by = -child.returncode if child.returncode < 0 else None
        return Ending(
            pid=child.pid,
            code=child.returncode if ended_by is None else None,
            signal=ended_by,
            ended_ns=ended_ns,
            interrupted=bool(self._last) or self._hung,
            hung=self._hung,
            killed=ended_by == signal.SIGKILL and self._presses >= 2,
        )

    def _wait(self, child: subprocess.Popen[bytes], handled: set[signal.Signals]) -> None:
        while child.poll() is None:
            info = signal.sigtimedwait(handled | {signal.SIGCHLD}, 1.0)
            if info is not None and info.si_signo != signal.SIGCHLD:
                self._react(child, info.si_signo, from_terminal=info.si_code == SI_KERNEL)
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                child.kill()
            self._look_after(child)

    def _look_after(self, child: subprocess.Popen[bytes]) -> None:
        now = time.monotonic()
        # Once interrupted, ranks end because they were told to: that is no hang, and no progress after one.
        if self._look is not None and not self._hung and not self._last and now - self._looked >= LOOK_S:
            self._looked = now
            try:
                self._hung = self._look()
            except Exception as error:  # whatever is wrong with the watch, the job goes on
                self._say(f"warning: the ranks are not watched for hangs any more ({type(error).__name__}: {error})")
                self._look = None
            if self._hung:  # torchrun's own agent kills the ranks at a SIGINT behind a SIGTERM
                later = enumerate((signal.SIGTERM, signal.SIGINT, signal.SIGKILL))
                self._ending = [(now + i * KILL_AFTER_S, number) for i, number in later]
        while self._ending and now >= self._ending[0][0]:
            child.send_signal(self._ending.pop(0)[1])

    def _react(self, child: subprocess.Popen[bytes], number: int, *, from_terminal: bool) -> None:
        now = time.monotonic()
        if not from_terminal and now - self._last.get(number, float("-inf")) < REPEAT_S:
            return
        self._last[number] = now
        if not from_terminal:
            child.send_signal(number)
        if number != signal.SIGINT:
            self._say(f"{signal.Signals(number).name}: waiting for the job to end")
            return
        self._presses += 1
        if self._presses == 1:
            self._say("interrupted: waiting for the job to end (Ctrl-C again kills it)")
        elif self._presses == 2:
            self._say("interrupted again: killing the job")
            self._kill_at = now + KILL_AFTER_S
        else:
            child.kill()


def end_with(parent: int) -> None:
    """Have SIGTERM sent to this process when the launcher dies, so that a killed launcher leaves no job behind."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it was already dead
        sys.exit(128 + signal.SIGTERM)
