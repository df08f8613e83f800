"""What a recorder is. The native one is `native/recorder.hpp`, the one in Python `python_recorder.py`.

A recorder never raises into the training job and never slows it down for long: when a name or a record cannot be
written (the disk is full, the capture reached its size limit) it stops and counts what it drops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, NewType, Protocol

from dsprof.ranges import DEFAULT_LIMIT

from ..hooking import private
from ..hooking.errors import describe
from ..hooking.signals import by_handler

LIMIT_BYTES: Final = DEFAULT_LIMIT
"""Default size limit of one rank's capture."""
PATIENCE_S: Final = 0.005
"""How long a hook waits for room that is not ready. Then the records of all are dropped until it is."""

NOTHING, CALLS, CALLS_AND_WAITS = 0, 1, 2
"""What of c10d is passed over on a thread, because the engine tells of it."""


Context = NewType("Context", object)
"""What a thread communicates for, as one recorder makes it: another has no use for it."""


class Recorder(Protocol):
    """One rank's capture, open for writing. Thread-safe. Arguments are positional: some are C functions.

    `name` is an id from `intern`; times are ns of the monotonic clock; `bytes` -1 and `value` None mean "none".
    """

    @property
    def records(self) -> int:
        """Records written."""

    @property
    def dropped(self) -> int:
        """Records that could not be written: the disk was full, or too slow. What was written and given up for the
        size limit is not among them."""

    @property
    def errors(self) -> int:
        """Errors inside the hooks, caught and of no consequence to the job."""

    def intern(self, name: str, /) -> int:
        """The id of a name, from 1. Its line is in names.txt when this returns."""

    def begin(self, kind: int, name: int, bytes: int = -1, value: float | None = None, /) -> int:
        """Record that something begins now; a handle for `end`, 0 if it was not recorded. A wait may be passed over.

        `kind` is no communication, nor of the family KERNEL."""

    def end(self, handle: int, value: float | None = None, bytes: int = -1, /) -> None:
        """It ended now. `value` and `bytes` replace what the record has, where given. Handle 0: nothing to do."""

    def put(
        self, kind: int, name: int, start_ns: int, end_ns: int, value: float | None = None, bytes: int = -1, /
    ) -> None:
        """Record something that is over; `end_ns` is not 0."""

    def mark(self, kind: int, name: int, value: float | None = None, bytes: int = -1, /) -> None:
        """Record an instant or a sample: it begins and ends now."""

    def begin_wait(self, name: int, waited: object, /) -> int:
        """Record that this thread begins to wait now; a handle for `end`, 0 if it was not recorded.

        `waited` is a c10d work, or what `target` gave of one. Where it is known the record names it, and bears its
        name in place of `name`.
        """

    def target(self, work: object, /) -> object | None:
        """What a wait for this c10d work waits for, for `begin_wait`; None where nobody knows. Of None: the collective
        that this thread issued last."""

    def stands_for_issued(self, work: object, /) -> None:
        """A work that no c10d operator returned: it is of the collective that this thread issued last."""

    def begin_coalescing(self) -> None:
        """What this thread issues from now on is begun together, by `issue_coalesced`."""

    def issue_coalesced(self) -> None:
        """All of it has been given: it is issued now, until `end_coalescing`."""

    def end_coalescing(self) -> None:
        """It has been issued, or that has failed."""

    def enter_blocking(self) -> None:
        """This thread enters a call that waits inside C++ for the collectives it issues. From the first of them on it
        waits, always for the last; where it issues none, nothing is recorded. Calls may nest."""

    def leave_blocking(self) -> None:
        """It left the innermost one."""

    def group(self, name: str, /) -> int:
        """The id of the process group that has this name now."""

    def number(self, group: str, /) -> int:
        """Take the next number of a process group's collectives, whoever makes them."""

    def comm(
        self, kind: int, name: int, start_ns: int, end_ns: int, issue_ns: int, bytes: int, group: int, seq: int,
        peer: int, dtype: int, flags: int, stage: int, microbatch: int, module: int, purpose: int, /,
    ) -> int:  # fmt: skip
        """Record a communication that c10d does not show, or a wait for one (`kind`); a handle for `span_end`, 0 if it
        was not recorded.

        `end_ns` 0: it is under way. `seq` -1: it has no number. `peer` -1: a collective, else a send or a receive.
        `stage` and `microbatch` -1, `module` and `purpose` 0: none.
        """

    def span(
        self, kind: int, name: int, start_ns: int, end_ns: int, issue_ns: int, value: float | None, bytes: int,
        flags: int, lane: int, stage: int, microbatch: int, module: int, purpose: int, corr: int = -1, site: int = 0, /,
    ) -> int:  # fmt: skip
        """Record anything else, with its place; a handle for `span_end`, 0 if it was not recorded.

        `issue_ns` is of kinds of the family KERNEL, 0: unknown; `lane` 0: the thread's; `corr`: what a copy and the
        waits for it have in common, -1: none; `site`, 0: unknown, is of kinds of the family SPAN.
        """

    def span_end(self, handle: int, start_ns: int, end_ns: int, seq: int, /) -> None:
        """It ended, and began when it turned out to have begun. `seq` -1: as it was, or no communication. Handle 0:
        nothing to do."""

    def make_context(self, stage: int, microbatch: int, module: int, purpose: int, /) -> Context:
        """What a thread may call c10d for, for `set_context`. `stage` and `microbatch` -1, `module` and `purpose` 0:
        none."""

    def context(self) -> Context:
        """What this thread calls c10d for now: asked before `set_context`, it can be put back whatever comes in
        between."""

    def set_context(self, context: Context, /) -> None:
        """What this thread calls c10d for from now on: the records of what c10d does have it, and those of waits."""

    def pass_over(self, what: int, /) -> None:
        """On this thread, from now on: NOTHING, CALLS of c10d, or CALLS_AND_WAITS are not recorded, nor numbered."""

    def count_error(self, hook: str, error: BaseException, /) -> None:
        """Count an error that this hook has caught. Raises it again if it is not ours but a signal handler's of the
        job."""

    def note_error(self, hook: str, said: str, /) -> None:
        """The same of what is known to be ours, in words."""

    def failures(self) -> list[tuple[str, int, str]]:
        """Each hook that failed, how often, and what its first error said."""

    def count_step(self) -> None:
        """The training thread has taken a step: how many there were is written into each chunk as it is begun."""

    def enter_backward(self) -> int:
        """This thread enters a backward pass: how many it is in now (more than 1: re-entrant checkpointing)."""

    def leave_backward(self) -> None:
        """It left the innermost one."""

    def mute(self, muted: bool, /) -> None:
        """From now on nothing is written, nor counted as dropped, while communications go on to be numbered; or it is
        again."""

    def disarm_after_fork(self) -> None:
        """In a forked child: never write again, as the files are the parent's."""

    def close(self) -> None:
        """Stop recording; the counters stay readable."""


class SharedParts:
    """What both kinds of `Recorder` have in common."""

    note_error: Callable[[str, str], None]

    def __init__(self) -> None:
        self._local = threading.local()

    def count_error(self, hook: str, error: BaseException, /) -> None:
        if by_handler(error):
            raise error
        private.told_of(error)
        self.note_error(hook, describe(error))

    def enter_backward(self) -> int:
        depth = self._local.depth = getattr(self._local, "depth", 0) + 1
        return int(depth)

    def leave_backward(self) -> None:
        self._local.depth -= 1
