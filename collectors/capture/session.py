"""One capture of one rank: opens it, installs the collectors, follows the steps, closes it."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Final

from dsprof.permissions import make_folders
from dsprof.schema import Kind

from .. import catalogue
from ..catalogue import COLLECTORS
from ..hooking import errors, statements
from ..hooking.errors import count_error
from ..hooking.hook_parts import HookPart, count_loss, install_each
from ..hooking.statements import Fact
from ..hooking.uninstall import Uninstall
from ..native import NativeRecorder
from ..recorder.record import Recorder
from . import facts, identity
from .files import FactsFile, MetaFile
from .hook_time import HookTime
from .open_capture import Install, OpenCapture
from .step_end import StepEnd
from .window import Switch, Window

PACKAGE: Final = __name__.rpartition(".")[0].rpartition(".")[0]
"""Whose modules the catalogue names."""

_current: Session | None = None
_lock = threading.Lock()

_OF_THE_JOB: Final = (
    HookPart("how DDP is set up is not known", facts.watch_ddp),
    HookPart("which script it was, and how many cores it had, is not known", lambda: facts.state(facts.process())),
)


def current() -> Session | None:
    """The capture under way in this process."""
    return _current


class Session:
    """The capture of one rank. Use `start` and `stop`, which keep it to one a process.

    close_copy: called at the end, where `folder` is not in the run folder and a copier brings it there
    without: collectors that somebody switched off
    left_out: those that are not installed as there is no native helper
    run: the run folder; None: the one that `folder` lies in
    """

    def __init__(
        self,
        folder: Path,
        who: identity.Identity,
        recorder: Recorder,
        native: bool,
        switch: Switch | None = None,
        close_copy: Callable[[], None] | None = None,
        without: frozenset[str] = frozenset(),
        left_out: frozenset[str] = frozenset(),
        run: Path | None = None,
    ) -> None:
        self.folder = folder
        self.recorder = recorder
        self._close_copy = close_copy
        self.pid = os.getpid()
        self.forked = False
        self._step_end = StepEnd()
        self._hook_time = HookTime(recorder, self._step_end) if isinstance(recorder, NativeRecorder) else None
        self._switch = switch
        self._without, self._left_out = without, left_out
        self._facts = FactsFile(folder, who.rank)
        level = identity.setting("DSPROF_LEVEL") or "light"
        self._meta = MetaFile(folder, who, level, native)
        self._capture = OpenCapture(
            recorder,
            folder,
            level,
            lambda: switch is None or switch.on,
            self.on_step,
            self.write_fact,
            ends_after=switch.ends_after if switch is not None else None,
            run=folder.parents[1] if run is None else run,
        )
        if switch is not None:
            switch.when_told = self._capture.when_told
        self._uninstall: list[Uninstall] = []

    def install(self) -> None:
        """Install every collector; one that fails is counted and the others still go in."""
        errors.send_to(self.recorder.note_error)
        statements.send_to(self.write_fact)
        install_each("facts", _OF_THE_JOB)
        if self._without:
            self.write_fact({"fact": "without", "collectors": sorted(self._without)})
        if self._left_out:
            self.write_fact({"fact": "left_out", "collectors": sorted(self._left_out)})
        for name, collector in COLLECTORS.items():
            if name in self._without | self._left_out:
                continue
            try:
                install: Install = import_module(f"{PACKAGE}.{collector.module}").install
                self._uninstall += install(self._capture)
            except Exception as error:
                count_loss(name, f"{collector.records}: not recorded", error, decisive=True)
        self._meta.write(self.recorder, closed=False)

    def uninstall(self) -> None:
        if self._step_end.since and not self.forked:
            self._sample()  # of the last steps
        if self._hook_time is not None and not self.forked:
            _call_each((self._hook_time.close,))
        _call_each(self._capture.before_end)
        while self._uninstall:
            try:
                self._uninstall.pop()()
            except Exception as error:
                count_error("uninstalling", error)
        statements.send_to(None)

    def close(self) -> None:
        """Remove the hooks and close the files; what was recorded is already on disk."""
        self.uninstall()
        if self._switch is not None:
            self._switch.close()
        self._meta.write(self.recorder, closed=True)
        errors.send_to(None)
        self.recorder.close()
        self._facts.close()
        if self._close_copy is not None:
            self._close_copy()

    def on_step(self) -> None:
        """After a training step. Most of them end here soon: a step may take no more than a millisecond."""
        if self.forked:  # a child that trains something of its own
            return
        self.recorder.count_step()
        end = self._step_end
        end.taken += 1
        if self._hook_time is not None and end.taken >= self._hook_time.due:
            _call_each((self._hook_time.after_step,))
        if self._capture.after_step:
            _call_each(self._capture.after_step)
        if end.taken >= end.due:
            self._sample()

    def _sample(self) -> None:
        """What was set up, and the use of the host, since the last time; whether to go on recording."""
        end = self._step_end
        end.begin()
        steps, soon = end.since, False
        _call_each(self._capture.before_end)  # before what they write may no longer be written
        for sample in tuple(self._capture.samples):
            try:
                soon = bool(sample(steps)) or soon
            except Exception as error:
                count_error("after a step", error)
        try:
            if self._switch is not None and self._switch.after_step(steps):
                soon = True
                _call_each(self._capture.when_on)
        except Exception as error:
            count_error("after a step", error)
        end.end(soon)
        if self._switch is not None and self._switch.next_change is not None:
            end.no_later_than(self._switch.next_change)

    def write_fact(self, fact: Fact) -> None:
        """Append to facts.jsonl, once."""
        self._facts.write(fact)

    # --- what the user's spans need

    def begin_span(self, name: str) -> int:
        """A handle for `recorder.end`; 0 if it could not be recorded."""
        try:
            return self.recorder.begin(Kind.MARK, self.recorder.intern(str(name)))
        except Exception as error:
            count_error("span", error)
            return 0

    def put_mark(self, name: str, now_ns: int, value: float | None) -> None:
        try:
            number = None if value is None else float(value)
            self.recorder.put(Kind.MARK, self.recorder.intern(str(name)), now_ns, now_ns, number, -1)
        except Exception as error:
            count_error("mark", error)


def _call_each(hooks: Iterable[Callable[[], None]]) -> None:
    for hook in tuple(hooks):
        try:
            hook()
        except Exception as error:
            count_error("after a step", error)


def start() -> Session | None:
    """Open the capture of this process and install the hooks; None where this rank is not to be profiled."""
    global _current
    with _lock:
        if _current is not None:
            return _current
        who = identity.identify()
        if not identity.selected(who.rank, identity.setting("DSPROF_RANKS")):
            return None
        from . import recorder_setup, scratch

        # What raises does so before anything is opened.
        window = Window.of_settings(identity.setting)
        limit, wait_s = recorder_setup.limit(), recorder_setup.exit_wait_s()
        without = catalogue.without(identity.setting("DSPROF_WITHOUT"))
        run = identity.run_folder(who)
        place = recorder_setup.place(run, who, limit)
        folder = make_folders(place.root, ("capture", who.folder_name))
        recorder, native, left_out = recorder_setup.recorder(folder, place.limit, place.copied)
        switch = Switch(recorder, window, folder if place.copied else place.root)
        close_copy = partial(scratch.close, folder, run, who.host, wait_s) if place.copied else None
        session = Session(folder, who, recorder, native, switch, close_copy, without, left_out.collectors, run)
        if place.written_first is not None:
            session.write_fact(place.written_first)
        for note in filter(None, (*place.notes, left_out.note)):
            session.write_fact({"fact": "note", "text": note})
        session.install()
        _current = session
        atexit.register(stop)
        return session


def stop() -> None:
    """Close the capture of this process, if there is one."""
    global _current
    with _lock:
        session, _current = _current, None
    if session is None or session.pid != os.getpid():
        return
    session.close()
    atexit.unregister(stop)


def _in_child() -> None:
    """A forked child (a DataLoader worker) shares our mappings: it must not write to them. A thread that was opening or
    closing the capture is not there to free the lock."""
    global _current, _lock
    _lock = threading.Lock()
    if _current is not None:
        _current.forked = True
        _current.recorder.disarm_after_fork()
        errors.send_to(None)
        statements.send_to(None)
        _current = None


os.register_at_fork(after_in_child=_in_child)
