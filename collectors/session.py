"""One capture of one rank: opens it, installs the collectors, follows the steps, closes it."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from dsprof.schema import Kind

from . import errors, facts, identity
from .capture_files import FactsFile, MetaFile
from .collector import OpenCapture
from .errors import count_error
from .facts import Fact
from .record import Recorder
from .uninstall import Uninstall
from .window import Switch, Window

_current: Session | None = None
_lock = threading.Lock()


def current() -> Session | None:
    """The capture under way in this process."""
    return _current


class Session:
    """The capture of one rank. Use `start` and `stop`, which keep it to one a process.

    close_copy: called at the end, where `folder` is not in the run folder and a copier brings it there
    without: collectors that are not installed
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
    ) -> None:
        self.folder = folder
        self.recorder = recorder
        self._close_copy = close_copy
        self.pid = os.getpid()
        self._switch = switch
        self._without = without
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
        )
        self._uninstall: list[Uninstall] = []

    def install(self) -> None:
        """Install every collector; one that fails is counted and the others still go in."""
        from .catalogue import COLLECTORS

        errors.send_to(self.recorder.note_error)
        facts.watch_ddp()
        facts.send_to(self.write_fact)
        self.write_fact(facts.process())
        if self._without:
            self.write_fact({"fact": "without", "collectors": sorted(self._without)})
        for name, install in COLLECTORS.items():
            if name in self._without:
                continue
            try:
                self._uninstall += install(self._capture)
            except Exception as error:
                count_error(f"installing {name}", error)
        self._meta.write(self.recorder, closed=False)

    def uninstall(self) -> None:
        _call_each(self._capture.before_end)
        while self._uninstall:
            try:
                self._uninstall.pop()()
            except Exception as error:
                count_error("uninstalling", error)
        facts.send_to(None)

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
        """After a training step: the use of the host so far, and what was set up since the last one."""
        if self.pid != os.getpid():  # a forked child that trains something of its own
            return
        self.recorder.count_step()
        _call_each(self._capture.before_end)
        _call_each(self._capture.after_step)  # before what they write may no longer be written
        try:
            turned_on = self._switch is not None and self._switch.after_step()
        except Exception as error:
            count_error("after a step", error)
            return
        if turned_on:
            _call_each(self._capture.when_on)

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
        from . import catalogue, opening, scratch

        # What raises does so before anything is opened.
        window, limit, wait_s = Window.of_settings(identity.setting), opening.limit(), opening.exit_wait_s()
        without = catalogue.without(identity.setting("DSPROF_WITHOUT"))
        run = identity.run_folder(who)
        place = opening.place(run, who, limit)
        folder = place.root / "capture" / who.folder_name
        folder.mkdir(parents=True, exist_ok=True)
        recorder, native, notes = opening.recorder(folder, place.limit, place.copied)
        switch = Switch(recorder, window, folder if place.copied else place.root)
        close_copy = partial(scratch.close, folder, run, who.host, wait_s) if place.copied else None
        session = Session(folder, who, recorder, native, switch, close_copy, without)
        for note in (*place.notes, *notes):
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
        _current.recorder.disarm_after_fork()
        errors.send_to(None)
        facts.send_to(None)
        _current = None


os.register_at_fork(after_in_child=_in_child)
