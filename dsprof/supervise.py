"""Runs the job in the foreground and outlives it: signals reach it exactly once, and its status comes back."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Final

FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
SI_KERNEL: Final = 128
"""Linux's si_code of a signal that the kernel sent, so by the terminal to the whole foreground group."""
REPEAT_S: Final = 0.5
"""A signal sent by a program again within this time is the same one sent twice, to the process and to its group."""
KILL_AFTER_S: Final = 5.0
"""How long a job may live on after the second Ctrl-C."""


class Supervisor:
    """One child process and what is done about signals while it lives."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._presses = 0
        self._last: dict[int, float] = {}
        self._kill_at: float | None = None

    def run(self, command: Sequence[str], env: Mapping[str, str]) -> int:
        """Run `command` to its end. Returns its exit status, 128 + n for signal n. Raises OSError if it cannot start.

        The child stays in our process group, so that it keeps the terminal. What the terminal sends (Ctrl-C) has
        reached it already; what was sent to this process alone is passed on. Signals ignored at our start stay so.
        """
        handled = {number for number in FORWARDED if signal.getsignal(number) != signal.SIG_IGN}
        early: list[int] = []

        def note(number: int, _frame: FrameType | None) -> None:
            early.append(number)

        previous = {number: signal.signal(number, note) for number in handled}
        try:
            # Blocked only after the start: a child would inherit the mask.
            child = subprocess.Popen(list(command), env=dict(env))
            signal.pthread_sigmask(signal.SIG_BLOCK, handled | {signal.SIGCHLD})
            try:
                for number in early:
                    self._react(child, number, from_terminal=False)
                self._wait(child, handled)
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, handled | {signal.SIGCHLD})
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        if child.returncode < 0:
            # We killed it because Ctrl-C was pressed: that is what ended the job.
            by_us = -child.returncode == signal.SIGKILL and self._presses >= 2
            return 128 + (signal.SIGINT if by_us else -child.returncode)
        return child.returncode

    def _wait(self, child: subprocess.Popen[bytes], handled: set[signal.Signals]) -> None:
        while child.poll() is None:
            info = signal.sigtimedwait(handled | {signal.SIGCHLD}, 1.0)
            if info is not None and info.si_signo != signal.SIGCHLD:
                self._react(child, info.si_signo, from_terminal=info.si_code == SI_KERNEL)
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                child.kill()

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
