"""One capture: opens the recorder in the run folder, installs the hooks, keeps meta.json and facts.jsonl, closes."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from dsprof.schema import FORMAT_VERSION, Kind, describe_failure, parse_size

from . import errors, facts, host, identity
from .errors import count_error
from .record import Recorder
from .window import Switch, Window

MOST_FACTS: Final = 1000
"""Of a kind: each DataLoader of a script that makes one every epoch is another fact, and the others must still fit."""

FULL: Final = "full"
"""The level at which every module is timed."""

_current: Session | None = None
_lock = threading.Lock()


def current() -> Session | None:
    """The capture under way in this process."""
    return _current


class Session:
    """The capture of one rank. Use `start` and `stop`, which keep it to one a process."""

    def __init__(
        self, folder: Path, who: identity.Identity, recorder: Recorder, native: bool, switch: Switch | None = None
    ) -> None:
        self.folder = folder
        self.switch = switch
        self.who = who
        self.recorder = recorder
        self.native = native
        self.is_copied = False
        """`folder` is not in the run folder, and a copier brings it there."""
        self.level = identity.setting("DSPROF_LEVEL") or "light"
        self.pid = os.getpid()
        self.opened_ns = time.monotonic_ns()
        self._uninstall: list[Callable[[], None]] = []
        self._each_step: list[Callable[[], None]] = []
        self._after_step: list[Callable[[], None]] = []
        self._groups_seen = 0
        self._stepped = False
        self._facts_written: set[str] = set()
        self._facts_of_a_kind: Counter[str] = Counter()
        self._facts = open(folder / "facts.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    # --- hooks

    def install(self) -> None:
        """Install every hook; one that fails is counted and the others still go in."""
        from . import (
            checkpoints,
            collectives,
            compilation,
            engine_events,
            modules,
            optimizers,
            phases,
            pipelining,
            sharding,
        )
        from .frameworks import deepspeed, tensor_parallel

        errors.send_to(self.recorder.note_error)
        facts.watch_ddp()
        facts.send_to(self.write_fact)
        self.write_fact(facts.process())
        hooks: tuple[tuple[str, Callable[[], list[Callable[[], None]]]], ...] = (
            ("collectives", lambda: [collectives.install(self.recorder)]),
            ("modules", lambda: [modules.install(self.recorder, every=self.level == FULL)]),
            ("operations", self._count_operations),
            ("phases", lambda: phases.install(self.recorder)),
            ("optimizers", lambda: [optimizers.install(self.recorder, self.on_step)]),
            ("pipelining", lambda: pipelining.install(self.recorder)),
            ("checkpoints", lambda: checkpoints.install(self.recorder)),
            ("compilation", lambda: [compilation.install(self.recorder)]),
            ("sharding", lambda: sharding.install(self.recorder, self._each_step.append)),
            ("tensor parallelism", tensor_parallel.install),
            ("DeepSpeed", lambda: deepspeed.install(self.recorder, self.on_step)),
            ("host", lambda: [host.install(self.recorder)]),
            ("engine events", lambda: [engine_events.install(self.recorder, self.on_step)]),
        )
        for name, hook in hooks:
            try:
                self._uninstall += hook()
            except Exception as error:
                count_error(f"installing {name}", error)
        self.write_meta(closed=False)

    def uninstall(self) -> None:
        self._look()
        while self._uninstall:
            try:
                self._uninstall.pop()()
            except Exception as error:
                count_error("uninstalling", error)
        facts.send_to(None)

    def on_step(self) -> None:
        """After an optimizer step: the use of the host so far, and what was set up since the last one."""
        if self.pid != os.getpid():  # a forked child that trains something of its own
            return
        self.recorder.count_step()
        self._look()
        try:
            host.sample(self.recorder)
            for count in self._after_step:  # before what was counted may no longer be written
                count()
            if self.switch is not None and self.switch.after_step():
                host.sample(self.recorder)
            if not self._stepped:
                self._stepped = True
                self._note_device()
            from torch.distributed import distributed_c10d as c10d

            if len(c10d._world.pg_map) == self._groups_seen:
                return
            self._groups_seen = len(c10d._world.pg_map)
            for group, name in list(c10d._world.pg_names.items()):
                if group in c10d._world.pg_group_ranks:
                    described = {"ranks": c10d.get_process_group_ranks(group), "desc": group.group_desc}
                    backend = cpu_backend(str(c10d._world.pg_map[group][0]))
                    self.write_fact({"fact": "group", "name": name, **described, "backend": backend})
        except Exception as error:
            count_error("after a step", error)

    def _count_operations(self) -> list[Callable[[], None]]:
        from . import flops

        if self.level != FULL:
            return []
        return flops.install(self.recorder, lambda: self.switch is None or self.switch.on, self._after_step.append)

    def _look(self) -> None:
        for look in self._each_step:
            try:
                look()
            except Exception as error:
                count_error("after a step", error)

    def _note_device(self) -> None:
        """By the first step the script has chosen its device. Asking the driver earlier could spoil a fork."""
        import torch

        if torch.cuda.is_initialized():
            self.write_fact({"fact": "device", "type": "cuda", **(self._describe_gpu() if self.level == FULL else {})})

    def _describe_gpu(self) -> dict[str, object]:
        """What its peak depends on."""
        import torch

        tf32 = torch.get_float32_matmul_precision() != "highest"
        return {"name": torch.cuda.get_device_name(), "tf32": tf32}

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

    # --- files

    def write_fact(self, fact: facts.Fact) -> None:
        """Append a fact, once: a script may make the same model, or the same group, again and again."""
        try:
            kind = str(fact["fact"])
            line = json.dumps({**fact, "rank": self.who.rank}, default=str) + "\n"
            if line in self._facts_written or self._facts_of_a_kind[kind] >= MOST_FACTS:
                return
            self._facts_written.add(line)
            self._facts_of_a_kind[kind] += 1
            self._facts.write(line)
        except (OSError, ValueError) as error:
            count_error("facts.jsonl", error)

    def write_meta(self, closed: bool) -> None:
        import torch

        meta = {
            "format": FORMAT_VERSION,
            "rank": self.who.rank,
            "world_size": self.who.world_size,
            "local_rank": self.who.local_rank,
            "restart": self.who.restart,
            "host": self.who.host,
            "pid": self.who.pid,
            "argv": sys.argv,
            "native": self.native,
            "level": self.level,
            "versions": {"python": sys.version.split()[0], "torch": torch.__version__},
            # Both clocks at one moment: traces of other tools are stamped with the epoch.
            "clock": {
                "monotonic_ns": time.monotonic_ns(),
                "epoch_ns": time.time_ns(),
                "process_start_ns": host.process_start_ns(),
                "id": host.clock_id(),
            },
            "opened_ns": self.opened_ns,
            "closed_ns": time.monotonic_ns() if closed else None,
            "records": self.recorder.records,
            "dropped": self.recorder.dropped,
            "errors": [describe_failure(*failure) for failure in self.recorder.failures()],
            "closed": closed,
        }
        temporary = self.folder / ".meta.json.tmp"
        try:
            temporary.write_text(json.dumps(meta, indent=1))
            os.replace(temporary, self.folder / "meta.json")
        except OSError as error:
            count_error("meta.json", error)


def start() -> Session | None:
    """Open the capture of this process and install the hooks; None where this rank is not to be profiled."""
    global _current
    with _lock:
        if _current is not None:
            return _current
        who = identity.identify()
        if not identity.selected(who.rank, identity.setting("DSPROF_RANKS")):
            return None
        window, limit = Window.of_settings(identity.setting), _limit()  # raise before anything is opened
        run = identity.run_folder(who)
        place, notes = _place(run, who)
        folder = place / "capture" / who.folder_name
        folder.mkdir(parents=True, exist_ok=True)
        recorder, native = _recorder(folder, limit, notes)
        switch = Switch(recorder, window, folder if place != run else run)
        session = Session(folder, who, recorder, native, switch)
        session.is_copied = place != run
        for note in notes:
            session.write_fact({"fact": "note", "text": note})
        session.install()
        _current = session
        atexit.register(stop)
        os.register_at_fork(after_in_child=_in_child)
        return session


def stop() -> None:
    """Remove the hooks and close the capture; what was recorded is already on disk."""
    global _current
    with _lock:
        session, _current = _current, None
    if session is None or session.pid != os.getpid():
        return
    session.uninstall()
    if session.switch is not None:
        session.switch.close()
    session.write_meta(closed=True)
    errors.send_to(None)
    session.recorder.close()
    with suppress(OSError):  # what could not be written was counted
        session._facts.close()
    if session.is_copied:
        from . import scratch

        scratch.close(session.folder)
    atexit.unregister(stop)


def _in_child() -> None:
    """A forked child (a DataLoader worker) shares our mappings: it must not write to them."""
    global _current
    if _current is not None:
        _current.recorder.disarm_after_fork()
        errors.send_to(None)
        facts.send_to(None)
        _current = None


def _place(run: Path, who: identity.Identity) -> tuple[Path, list[str]]:
    """The folder whose capture/ is written to, with a copier beside it if it is not the run folder, and notes."""
    from . import scratch

    try:
        place = scratch.choose(run, identity.setting("DSPROF_SCRATCH"))
        if place.folder is None:
            return run, [place.note] if place.note else []
        local = place.folder / "capture" / who.folder_name
        local.mkdir(parents=True, exist_ok=True)
        scratch.start_copier(local, run, who.host)
        return place.folder, []
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return run, [f"captured into the run folder directly, as it cannot be copied from elsewhere: {error}"]


def _limit() -> int:
    """How large the capture may become, bytes. Raises ValueError."""
    from .record import LIMIT_BYTES

    given = identity.setting("DSPROF_LIMIT")
    return parse_size(given) if given else LIMIT_BYTES


def _recorder(folder: Path, limit: int, notes: list[str]) -> tuple[Recorder, bool]:
    from . import native
    from .python_recorder import PyRecorder

    choice = identity.setting("DSPROF_NATIVE").lower()
    if choice not in ("0", "off", "false", "no"):
        reasons: list[str] = []
        helper = native.load_or_build(wait=choice in ("1", "on", "true", "yes"), explain=reasons.append)
        if helper is not None:
            return helper.open(folder, limit), True
        notes.append(f"recorded in Python, which is slower, as there is no native helper: {'; '.join(reasons)}")
    return PyRecorder(folder, limit), False


def cpu_backend(config: str) -> str | None:
    """What a process group uses on CPU, of a backend as `init_process_group` takes it; None: torch chose."""
    of_device = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    chosen = of_device.get("cpu") if of_device else config
    return None if chosen in (None, "", "undefined") else chosen
