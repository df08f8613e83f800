"""torchrun, which tells how each rank ended: `python -m dsprof.launch.torchrun RUN PARENT -- FLAGS -- SCRIPT ARGS`.

torchrun flattens every failure to status 1 and stamps failures by the second. This process is the ranks' parent, so
it can know better: it writes RUN/exits/<host>.json and returns the first failing rank's own status.
It is never profiled itself, and leaves torchrun's own output as it is.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import Popen
from types import FrameType
from typing import Any, Final

from dsprof import regular_files
from dsprof.atomic import write_atomically
from dsprof.names import host_name
from dsprof.permissions import make_folders
from dsprof.run import RankExit, RunFolder

from .hosts import MEETING, Meeting
from .supervise import end_with

REPEAT_NS: Final = 500_000_000
"""A signal that comes again within this time was sent both to this process and to its group."""


@dataclass
class Child:
    """A rank's process."""

    rank: int
    local_rank: int
    restart: int
    attempt: int
    """Counts every start of the ranks; `restart` counts only those after a failure."""
    process: Popen[bytes]
    ended_ns: int | None = None
    stopped: bool = False
    """torchrun itself ended it."""

    def exit(self, host: str) -> RankExit:
        code = self.process.poll()
        wall_ns = time.time_ns() - time.monotonic_ns()
        ended_by = -code if code is not None and code < 0 else None
        return RankExit(
            rank=self.rank,
            host=host,
            pid=self.process.pid,
            code=code if ended_by is None else None,
            signal=ended_by,
            ended_ns=self.ended_ns,
            restart=self.restart,
            stopped=self.stopped,
            ended_epoch_ns=None if self.ended_ns is None else self.ended_ns + wall_ns,
        )


class DeathWatch:
    """Notes when each rank ended.

    One epoll over the ranks' pidfds: the kernel queues events in the order they happened, so the order is right
    even for ranks that end within one wake-up of this thread. Statuses are left to their `Popen`, which reaps them.
    """

    def __init__(self) -> None:
        self.children: list[Child] = []
        self._by_fd: dict[int, Child] = {}
        self._attempt = -1
        self._started: set[int] = set()
        self._epoll = select.epoll()
        self._stop_read, self._stop_write = os.pipe()
        self._epoll.register(self._stop_read, select.EPOLLIN)
        self._thread = threading.Thread(target=self._watch, name="dsprof-exits", daemon=True)

    def start(self) -> None:
        """Begin to take events; those of ranks added before are not lost."""
        self._thread.start()

    def add(self, process: Popen[bytes], env: dict[str, str]) -> Child:
        """Watch a rank just started with `env`."""
        local_rank = int(env["LOCAL_RANK"])
        if self._attempt < 0 or local_rank in self._started:
            self._attempt += 1
            self._started.clear()
        self._started.add(local_rank)
        restart = int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
        child = Child(int(env["RANK"]), local_rank, restart, self._attempt, process)
        self.children.append(child)
        try:
            fd = os.pidfd_open(process.pid)
        except OSError:  # no pidfd in this kernel or sandbox: its status is still known, its time is not
            return child
        self._by_fd[fd] = child
        self._epoll.register(fd, select.EPOLLIN)
        return child

    def close(self) -> None:
        """Stop, with everything noted that has happened until now."""
        if not self._thread.is_alive():
            return
        os.write(self._stop_write, b"x")
        self._thread.join()

    def _watch(self) -> None:
        last_ns = 0
        stopping = False
        while not stopping:
            for fd, _ in self._epoll.poll():
                if fd == self._stop_read:
                    stopping = True
                    continue
                # Strictly rising, so that the order survives in the times.
                last_ns = max(time.monotonic_ns(), last_ns + 1)
                self._by_fd.pop(fd).ended_ns = last_ns
                self._epoll.unregister(fd)
                os.close(fd)

    def send(self, number: int) -> None:
        """Send a signal to the ranks still running, each the leader of its own group."""
        for child in self.children:
            if child.process.poll() is None:
                child.stopped = True
                with suppress(ProcessLookupError):
                    os.killpg(child.process.pid, number)

    def first_failure(self) -> Child | None:
        """Of the last start of the ranks, the first that failed by itself. Ends the watch."""
        self.close()
        failed = [
            child
            for child in self.children
            if child.attempt == self._attempt and not child.stopped and child.process.poll()
        ]
        return min(failed, key=lambda child: child.ended_ns or sys.maxsize, default=None)


class Interrupts:
    """torchrun's signal handler, which a signal sent twice cannot break out of its orderly shutdown."""

    def __init__(self, watch: DeathWatch, handler: Any) -> None:
        self._raised = False
        self._last_ns: dict[int, int] = {}
        self._watch = watch
        self._handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic_ns()
        if now - self._last_ns.get(number, -REPEAT_NS) < REPEAT_NS:
            return
        self._last_ns[number] = now
        if not self._raised:
            self._raised = True
            self._handler(number, frame)
        else:
            self._watch.send(signal.SIGKILL if number == signal.SIGINT else number)


def launch(flags: list[str], words: list[str], watch: DeathWatch, meeting: Meeting | None = None) -> int:
    """torchrun with `flags` on the script `words`, to its end. Returns the job's status."""
    armed = os.environ.get("DSPROF", "")
    os.environ["DSPROF"] = "0"  # this process is no rank
    import torch.distributed.run as torchrun
    from torch.distributed.elastic.multiprocessing import api as elastic
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record

    os.environ["DSPROF"] = armed
    api: Any = elastic  # what is replaced there is not exported
    start_rank = api.get_subprocess_handler

    def get_subprocess_handler(*args: Any, **kwargs: Any) -> Any:
        handler = start_rank(*args, **kwargs)
        child = watch.add(handler.proc, kwargs["env"] if "env" in kwargs else args[2])
        close = handler.close

        def note_and_close(*args: Any, **kwargs: Any) -> Any:
            child.stopped = True
            return close(*args, **kwargs)

        handler.close = note_and_close
        return handler

    api.get_subprocess_handler = get_subprocess_handler
    if meeting is not None:
        meet_at_rendezvous(meeting)
    api._terminate_process_handler = Interrupts(watch, api._terminate_process_handler)

    # The script's arguments go round argparse, which would swallow a `--` among them.
    module = ["-m"] if words[0] == "-m" else []
    script, *arguments = words[len(module) :]
    options = torchrun.get_args_parser().parse_args([*flags, *module, script])
    options.training_script_args = arguments
    try:
        torchrun.determine_local_world_size(options.nproc_per_node)
    except ValueError as error:
        print(f"[dsprof] error: --nproc-per-node {options.nproc_per_node}: {error}", file=sys.stderr)
        return 2
    try:
        record(torchrun.run)(options)
    except ChildFailedError as error:
        print(error, file=sys.stderr)  # torchrun's table, without the traceback of its own frames
        first = watch.first_failure()
        if first is not None:
            return first.exit("").status
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    except api.SignalException as error:
        first = watch.first_failure()
        return 128 + error.sigval if first is None else first.exit("").status
    return 0


def meet_at_rendezvous(meeting: Meeting) -> None:
    """Have the hosts agree on their run folder when they have met, before they start ranks."""
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

    rendezvous = SimpleElasticAgent._rendezvous

    def _rendezvous(self: Any, worker_group: Any) -> None:
        rendezvous(self, worker_group)
        try:
            meeting.meet(worker_group.store, worker_group.group_rank)
            os.environ["DSPROF_RUN"] = str(meeting.folder.path)
        except Exception as error:  # the job goes on without a profile of this host
            os.environ["DSPROF"] = "0"
            print(f"[dsprof] warning: this host is not captured ({type(error).__name__}: {error})", file=sys.stderr)

    SimpleElasticAgent._rendezvous = _rendezvous  # type: ignore[method-assign]


def main(argv: list[str] | None = None) -> int:
    """RUN PARENT -- FLAGS -- SCRIPT ARGS. Returns the first failing rank's own status."""
    words = sys.argv[1:] if argv is None else argv
    folder, parent = RunFolder(Path(words[0])), int(words[1])
    rest = words[3:]
    split = rest.index("--")
    sys.argv[:] = ["torchrun", *rest[:split], *rest[split + 1 :]]  # what usage messages and torch's logs show
    end_with(parent)
    told = os.environ.pop(MEETING, "")
    meeting = Meeting(Path(told)) if told else None
    watch = DeathWatch()
    watch.start()
    try:
        return launch(rest[:split], rest[split + 1 :], watch, meeting)
    except KeyboardInterrupt:  # before torchrun has set its handlers
        return 128 + signal.SIGINT
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        watch.close()
        if meeting is None:
            write_exits(folder, watch)
        elif meeting.agreed:
            write_exits(meeting.folder, watch)


def write_exits(folder: RunFolder, watch: DeathWatch) -> None:
    """exits/<host>.json. A full disk costs this file, not the job's status."""
    host = host_name()
    path = folder.exits / f"{host}.json"
    try:
        before = regular_files.read_json(path) if path.exists() else []  # of a host that came back
        exits = [*before, *(asdict(child.exit(host)) for child in watch.children)]
        make_folders(folder.path, (folder.exits.name,))
        write_atomically(path, json.dumps(exits, indent=2) + "\n")
    except (OSError, ValueError) as error:
        print(f"[dsprof] warning: how the ranks ended could not be written to {folder.exits}: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
