"""Captures of a run folder on a network file system: written to a local disk, and copied by a process of its own."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import forked_python
import numpy as np
import pytest
from armed import both
from clocks import SleepingClock
from jobs import environment, profile

from dsprof import ondisk
from dsprof.collectors.capture import copier, scratch
from dsprof.collectors.capture.copier import Copier, watch
from dsprof.launch.gather import Gathering
from dsprof.launch.talk import Talk
from dsprof.names import host_name
from dsprof.ranges import parse_exit_wait
from dsprof.run import RunFolder
from dsprof.schema import CONTROL_FILE, COPYING_FILE, Kind
from dsprof.trace import load
from dsprof.trace.capture import read_capture

MOUNTS = """\
22 1 0:1 / / rw - ext4 /dev/vda rw
23 22 0:2 / /home rw - nfs4 server:/home rw
24 23 0:3 / /home/me/disk rw - xfs /dev/vdb rw
25 22 0:4 / /my\\040data rw shared:1 - fuse.sshfs me@there rw
26 22 0:5 / /net rw - autofs systemd-1 rw
27 22 0:6 / /net rw - lustre 10.0.0.1@tcp:/fs rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "network"),
    [
        ("/tmp/run", "ext4", False),
        ("/homeless/run", "ext4", False),
        ("/home/me/run", "nfs4", True),
        ("/home", "nfs4", True),
        ("/home/me/disk/run", "xfs", False),
        ("/my data/run", "fuse.sshfs", True),
        ("/net/run", "lustre", True),
    ],
)
def test_the_file_system_is_that_of_the_innermost_mount(tmp_path: Path, path: str, kind: str, network: bool) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTS)
    assert scratch.file_system(Path(path), str(tmp_path / "mountinfo")) == kind
    assert scratch.on_network(kind) == network


def test_where_mounts_are_not_told_captures_go_into_the_run_folder(tmp_path: Path) -> None:
    assert scratch.file_system(tmp_path, str(tmp_path / "none")) == ""
    assert scratch.choose(tmp_path, type_of=lambda path: "") == scratch.Place(None)


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "lustre", "ceph", "gpfs", "beegfs", "fuse", "fuse.s3fs", "9p", "cifs", "smb3"]
)
def test_a_network_file_system_has_a_local_stand_in(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    run = tmp_path / "shared" / "run"
    place = scratch.choose(run, type_of=lambda path: kind if path == run else "xfs")
    assert place.note == ""
    assert place.folder == scratch.stand_in(run, tmp_path / "tmp")
    assert scratch.choose(run, "off", type_of=lambda path: kind) == scratch.Place(None)
    assert scratch.choose(run, str(tmp_path / "fast"), type_of=lambda path: "ext4").folder == scratch.stand_in(
        run, tmp_path / "fast"
    )


def test_without_a_fit_local_disk_the_run_folder_is_used_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: "/tmp")
    everywhere = scratch.choose(tmp_path, type_of=lambda path: "nfs")
    assert everywhere == scratch.Place(
        None,
        "captured into the run folder on a network file system (nfs): /tmp is on a network file system too; name a "
        "local folder by DSPROF_SCRATCH",
    )
    full = scratch.choose(tmp_path, str(tmp_path), type_of=lambda path: "xfs", free_bytes=lambda *_: 255 << 20)
    assert full == scratch.Place(
        None,
        f"captured into the run folder directly: {tmp_path} has 255 MiB free; name a local folder by DSPROF_SCRATCH",
    )
    (tmp_path / "file").touch()
    nowhere = scratch.choose(tmp_path, str(tmp_path / "file"), type_of=lambda path: "xfs")
    assert "cannot be written (Not a directory)" in nowhere.note


GiB = 1 << 30


def test_the_whole_limit_of_all_ranks_must_fit_or_it_is_lowered_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large, run = tmp_path / "small", tmp_path / "large", tmp_path / "run"
    monkeypatch.setattr(scratch, "parents", lambda given: [small, large])
    free = {small: 10 * GiB, large: 16 * GiB}

    def choose(ranks: int, kind: str = "xfs") -> scratch.Place:
        types = {run: "nfs", small: "xfs", large: kind}
        return scratch.choose(run, "", 2 * GiB, ranks, types.__getitem__, lambda folder, _: free[folder.parent])

    assert choose(5) == scratch.Place(scratch.stand_in(run, small))
    assert choose(8) == scratch.Place(scratch.stand_in(run, large))  # another place
    assert choose(16) == scratch.Place(
        scratch.stand_in(run, large),
        f"its capture may take 1024 MiB, not 2048 MiB (--limit): {large} has 16384 MiB free, for the 16 ranks of this "
        "host; name a larger local folder by --scratch DIR, or write a smaller --limit",
        GiB,
    )
    free[small], free[large] = 0, GiB
    lowered = choose(1, kind="tmpfs")
    assert lowered.limit == GiB
    assert f"{large} has 1024 MiB of memory for captures (tmpfs), for one rank; name" in lowered.note
    assert choose(257).note == (  # 3 MiB each
        f"captured into the run folder on a network file system (nfs): {small} has 0 MiB free, {large} has 1024 MiB "
        "free; name a local folder by DSPROF_SCRATCH"
    )


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Shared memory that survives the job, in a folder of the test's."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(scratch, "SHARED_MEMORY", folder)
    monkeypatch.setattr(scratch.free_space, "ends_with_job", lambda environ: False)
    monkeypatch.setattr(scratch.free_space, "is_removed_at_logout", lambda user: False)
    return folder


def test_captures_of_a_run_folder_on_a_local_disk_are_written_to_memory_where_they_fit(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, kinds = tmp_path / "run", {"run": "ext4", "shm": "tmpfs"}

    def choose(given: str = "", free: int = 4 * GiB) -> scratch.Place:
        return scratch.choose(run, given, 2 * GiB, 2, lambda path: kinds[path.name], lambda *_: free)

    chosen = scratch.Place(scratch.stand_in(run, memory), in_memory=True)
    assert choose() == chosen
    assert scratch.stand_in(run, memory) in scratch.places(run)
    directly = scratch.Place(None)
    assert choose("off") == directly
    assert choose(free=4 * GiB - 1) == directly
    with monkeypatch.context() as patched:
        patched.setitem(kinds, "run", "tmpfs")
        assert choose() == directly  # it is memory already
    with monkeypatch.context() as patched:
        patched.setitem(kinds, "shm", "overlay")
        assert choose() == directly
    with monkeypatch.context() as patched:
        patched.setattr(scratch, "SHARED_MEMORY", tmp_path / "none" / "shm")
        assert choose() == directly
        assert not (tmp_path / "none").exists()
    for ends in ("ends_with_job", "is_removed_at_logout"):  # then a kill, or a logout, would lose it
        with monkeypatch.context() as patched:
            patched.setattr(scratch.free_space, ends, lambda *_: True)
            assert choose() == directly
    assert choose() == chosen


# --- copying, step by step ----------------------------------------------------------------------


def local_capture(tmp_path: Path, name: str) -> Path:
    """The folder of a capture of the run tmp_path/run on the local disk tmp_path/local."""
    folder = scratch.stand_in(tmp_path / "run", tmp_path / "local") / "capture" / name
    scratch.make_private(folder)
    return folder


@pytest.fixture
def local(tmp_path: Path) -> Path:
    folder = local_capture(tmp_path, "rank00003.0.host.7")
    for index in range(5):
        (folder / f"chunk-{index:05d}.bin").write_bytes(bytes([index]) * 10)
    for name in ("names.txt", "facts.jsonl", "meta.json"):
        (folder / name).write_text(name)
    return folder


def chunk(number: int, kept: int = 1, given_up: int = 0, finished: int = 0) -> bytes:
    """A chunk file's header, and a record's worth of bytes."""
    header = ondisk.CHUNK_HEADER.pack(ondisk.CHUNK_MAGIC, ondisk.FORMAT_VERSION, 64, ondisk.CHUNK_RECORDS, number, 7)
    place = ondisk.CHUNK_PLACE.pack(kept, given_up, 0) + ondisk.CHUNK_FINISHED.pack(finished)
    return (header + place).ljust(ondisk.CHUNK_HEADER_BYTES, b"\0") + bytes([number]) * 64


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_chunks_are_copied_as_they_close_and_the_rest_at_the_end(tmp_path: Path, local: Path) -> None:
    run = tmp_path / "run"
    target = run / "capture" / local.name
    copying = Copier(local, run, "host")
    copying.step()
    assert set(files(target)) == {
        "chunk-00000.bin", "chunk-00001.bin", "names.txt", "facts.jsonl", "meta.json", COPYING_FILE,
    }  # fmt: skip
    assert json.loads((target / COPYING_FILE).read_text())["left"] == 3
    (run / CONTROL_FILE).write_text('{"capture": "off"}')
    (local / "names.txt").write_text("more names")
    (local / "chunk-00005.bin").write_bytes(chunk(5, kept=1, given_up=0))
    copying.step()
    assert files(target)["names.txt"] == b"more names"
    assert files(target)["chunk-00002.bin"] == b"\2" * 10
    assert (local / CONTROL_FILE).read_text() == '{"capture": "off"}'
    # A collective in flight ends in a chunk that is copied already, by a store that leaves the file's time alone; and
    # the capture gives up its second chunk, as its newest one says.
    status = (local / "chunk-00000.bin").stat()
    (local / "chunk-00000.bin").write_bytes(b"ended 0000")
    os.utime(local / "chunk-00000.bin", ns=(status.st_atime_ns, status.st_mtime_ns))
    (local / "chunk-00001.bin").unlink()
    (local / "chunk-00006.bin").write_bytes(chunk(6, kept=1, given_up=1))
    copying.step()
    assert "chunk-00001.bin" not in files(target), "a size limit holds there too"
    wanted = {name: content for name, content in files(local).items() if name not in (CONTROL_FILE, COPYING_FILE)}
    assert copying.finish()
    assert files(target) == wanted
    assert not scratch.stand_in(run, tmp_path / "local").exists()


def moving(local: Path) -> None:
    """Eight chunks: 0 has a record under way, the others that are closed are finished."""
    for index in range(8):
        (local / ondisk.chunk_name(index)).write_bytes(chunk(index, finished=index > 0))


def numbers(folder: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("chunk-")) for path in folder.glob("chunk-*.bin"))


def test_a_chunk_that_is_finished_is_moved(tmp_path: Path, local: Path) -> None:
    moving(local)
    target = tmp_path / "run" / "capture" / local.name
    copying = Copier(local, tmp_path / "run", "host")
    copying.step()
    assert numbers(local) == [0, 5, 6, 7]
    assert numbers(target) == [0, 1, 2, 3, 4]
    (local / ondisk.chunk_name(0)).write_bytes(chunk(0, finished=1))  # what was under way has ended
    (local / ondisk.chunk_name(8)).write_bytes(chunk(8, kept=2, given_up=2))
    copying.step()
    assert numbers(local) == [6, 7, 8]
    assert numbers(target) == [0, 1, 4, 5]
    assert copying.finish()
    assert numbers(target) == [0, 1, 4, 5, 6, 7, 8]
    assert (target / ondisk.chunk_name(0)).read_bytes() == chunk(0, finished=1)


class Killed(BaseException):
    pass


def copy_all(local: Path, run: Path) -> None:
    copying = Copier(local, run, "host")
    copying.step()
    copying.finish()


@pytest.mark.parametrize("dies_at", range(30))
def test_a_copier_killed_anywhere_loses_nothing(
    tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    """It dies before, or right after, one of the calls that change a file; another one copies the same folder."""
    moving(local)
    wanted = {path.name: path.read_bytes() for path in local.glob("*")}
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls == dies_at + 1:
            raise Killed

    def dying(call: Callable[..., object]) -> Callable[..., object]:
        def called(*args: object, **more: object) -> object:
            count()
            result = call(*args, **more)
            count()
            return result

        return called

    with monkeypatch.context() as patched:
        patched.setattr(copier, "write_atomically", dying(copier.write_atomically))
        patched.setattr(copier, "_sync", dying(copier._sync))
        patched.setattr(Path, "unlink", dying(Path.unlink))
        with pytest.raises(Killed):
            copy_all(local, tmp_path / "run")
    again = Copier(local, tmp_path / "run", "host")
    again.step()
    assert again.finish()
    assert files(tmp_path / "run" / "capture" / local.name) == wanted
    assert not local.exists()


def test_a_chunk_that_the_other_disk_does_not_take_stays(
    tmp_path: Path, local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may say so only when it is asked whether it has all of it."""
    moving(local)

    def full(path: Path) -> None:
        raise OSError(122, "Disk quota exceeded")

    copying = Copier(local, tmp_path / "run", "host")
    with monkeypatch.context() as patched:
        patched.setattr(copier, "_sync", full)
        copying.step()
    assert copying.state.error == "Disk quota exceeded"
    assert numbers(local) == list(range(8))
    copying.step()
    assert numbers(local) == [0, 5, 6, 7]


def test_what_is_still_written_is_copied_now_and_then_where_that_is_asked_for(tmp_path: Path, local: Path) -> None:
    moving(local)
    time = SleepingClock()
    target = tmp_path / "run" / "capture" / local.name
    copying = Copier(local, tmp_path / "run", "host", 10.0, time.clock)
    copying.step()
    assert numbers(target) == [0, 1, 2, 3, 4]
    time.sleep(10.0)
    copying.step()
    assert numbers(target) == list(range(8))
    (local / ondisk.chunk_name(7)).write_bytes(chunk(7) + b"more")
    copying.step()
    assert (target / ondisk.chunk_name(7)).read_bytes() == chunk(7, finished=1)
    time.sleep(10.0)
    copying.step()
    assert (target / ondisk.chunk_name(7)).read_bytes() == chunk(7) + b"more"
    assert numbers(local) == [0, 5, 6, 7]


def test_a_local_folder_that_vanishes_is_said_with_what_to_do(
    tmp_path: Path, local: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    moving(local)
    time = Time(ends=50.0)
    time.at[5.0] = lambda: shutil.rmtree(local)
    assert not time.watch(Copier(local, tmp_path / "run", "elsewhere"))
    assert time.now < 8  # there is nothing to wait for
    run = RunFolder(tmp_path / "run")
    Gathering(run, Talk(), (), lambda: time.now, time.sleep).finish()
    assert capfd.readouterr().err == (
        f"[dsprof] warning: the capture of rank 3 is not all in {tmp_path}/run/capture/: {local} on elsewhere was "
        "removed before all of it was copied; what was copied is analyzed. Keep cleaners of temporary files away from "
        "it, or name another folder by --scratch DIR\n"
    )
    (problem,) = [text for text in read_capture(run.capture / local.name).problems if "removed" in text]
    assert problem == (
        f"{local} on elsewhere was removed before all of it was copied: the newest part of its capture is lost"
    )


def test_a_chunk_that_vanishes_before_it_is_copied_is_said_with_what_to_do(tmp_path: Path, local: Path) -> None:
    moving(local)
    target = tmp_path / "run" / "capture" / local.name
    copying = Copier(local, tmp_path / "run", "host")
    copying.step()
    (local / ondisk.chunk_name(5)).unlink()
    assert copying.finish()
    assert numbers(target) == [0, 1, 2, 3, 4, 6, 7]
    (problem,) = [text for text in read_capture(target).problems if "chunk-00005" in text]
    assert problem == (
        "chunk-00005.bin: missing, and its records with it: something else removed it; keep cleaners of temporary "
        "files away from the run folder and from where captures are written (--scratch DIR)"
    )


class Time(SleepingClock):
    """That of a rank that ends at `ends`."""

    def __init__(self, ends: float = 0.0) -> None:
        super().__init__()
        self._ends = ends

    def rank_writes(self) -> bool:
        return self.now < self._ends

    def watch(self, copying: Copier) -> bool:
        return watch(copying, self.rank_writes, self.clock, self.sleep)


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[OSError | None], None]:
    """Has every write below tmp_path/run fail in that way, or none."""
    failure: list[OSError] = []
    write = copier.write_atomically

    def fail(path: Path, content: bytes) -> None:
        if failure and path.is_relative_to(tmp_path / "run"):
            raise failure[0]
        write(path, content)

    monkeypatch.setattr(copier, "write_atomically", fail)

    def refuse(error: OSError | None) -> None:
        failure[:] = [error] if error else []

    return refuse


FULL = OSError(28, "No space left on device")
READ_ONLY = OSError(30, "Read-only file system")
QUOTA = OSError(122, "Disk quota exceeded")


def test_a_destination_that_recovers_gets_everything(
    tmp_path: Path, local: Path, refusing: Callable[[OSError | None], None]
) -> None:
    time, wanted = Time(ends=5.0), files(local)
    refusing(FULL)
    time.at[40.0] = lambda: refusing(None)
    assert time.watch(Copier(local, tmp_path / "run", "host"))
    assert files(tmp_path / "run" / "capture" / local.name) == wanted
    assert not local.exists()
    assert 40 <= time.now < 42


@pytest.mark.parametrize("error", [FULL, READ_ONLY, QUOTA], ids=lambda error: error.strerror)
def test_what_cannot_be_copied_stays_and_it_is_said(
    tmp_path: Path, local: Path, refusing: Callable[[OSError | None], None], error: OSError,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    time, wanted = Time(ends=5.0), files(local)
    refusing(error)
    assert not time.watch(Copier(local, tmp_path / "run", host_name()))
    assert time.now == pytest.approx(5 + copier.PATIENCE_S, abs=1.5)
    state = json.loads((local / COPYING_FILE).read_text())
    assert (state["error"], state["given_up"], state["local"]) == (error.strerror, True, str(local))
    assert {name: content for name, content in files(local).items() if name != COPYING_FILE} == wanted
    folder = RunFolder(tmp_path / "run")
    Gathering(folder, Talk(), (local.parents[1],), lambda: time.now, time.sleep).finish()
    assert capfd.readouterr().err == (
        f"[dsprof] warning: the capture of rank 3 is not all in {tmp_path}/run/capture/ ({error.strerror}); the rest "
        f"is kept on {host_name()}: cp -r {local} {tmp_path}/run/capture/\n"
    )
    refusing(None)  # somebody made room: what is left is brought, and nothing said
    Gathering(folder, Talk(), (local.parents[1],), lambda: time.now, time.sleep).finish()
    assert capfd.readouterr().err == ""
    assert files(folder.capture / local.name) == wanted


def test_the_launcher_brings_what_a_killed_copier_left(tmp_path: Path, local: Path) -> None:
    wanted = files(local)
    copying = Copier(local, tmp_path / "run", host_name())
    with subprocess.Popen(["sleep", "60"]) as gone:
        copying.state.copier, copying.state.copier_began = gone.pid, copier.began(gone.pid)
        copying.step()
        gone.kill()
    Gathering(RunFolder(tmp_path / "run"), Talk(), (local.parents[1],)).finish()
    assert files(tmp_path / "run" / "capture" / local.name) == wanted


def test_waiting_for_another_host_has_an_end(tmp_path: Path, local: Path, capfd: pytest.CaptureFixture[str]) -> None:
    Copier(local, tmp_path / "run", "elsewhere").step()
    time = Time()
    Gathering(RunFolder(tmp_path / "run"), Talk(), (), lambda: time.now, time.sleep).finish()
    assert 60 <= time.now < 61
    assert capfd.readouterr().err == (
        f"[dsprof] waiting for one capture to be copied to {tmp_path}/run\n"
        f"[dsprof] warning: the capture of rank 3 is not all in {tmp_path}/run/capture/; the rest is kept on "
        f"elsewhere: cp -r {local} {tmp_path}/run/capture/\n"
    )


# --- real jobs ----------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(20):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
print("trained", flush=True)
if sys.argv[1:] == ["killed"]:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path / "train.py"


@both
@pytest.mark.parametrize("ending", ["", "killed"])
def test_a_job_of_one_process_leaves_all_in_the_run_folder(
    tmp_path: Path, script: Path, native: str, ending: str
) -> None:
    flags = ("--scratch", str(tmp_path / "disk"), "--native", "on" if native == "1" else "off")
    finished = profile(tmp_path, script, *filter(None, [ending]), ranks=None, flags=flags)
    assert finished.status == (137 if ending else 0), finished.stderr
    assert finished.stdout == "trained\n"
    place = scratch.stand_in(finished.folder.path, tmp_path / "disk")
    assert f"[dsprof] captures are written to {place} and copied into it\n" in finished.stderr
    assert not place.exists()
    (capture,) = finished.folder.capture.iterdir()
    assert {"chunk-00000.bin", "names.txt", "facts.jsonl", "meta.json"} <= set(files(capture))
    assert COPYING_FILE not in files(capture)
    (rank,) = load(finished.folder).run.ranks
    assert (rank.last_step, rank.damaged, rank.closed) == (19, 0, not ending)


def test_a_job_without_launcher_is_copied_after_its_kill_by_who_outlives_it(tmp_path: Path, script: Path) -> None:
    """Its whole process group is killed, and its stdout ends at once: the copier has neither."""
    run, disk = tmp_path / "run", tmp_path / "disk"
    env = environment(DSPROF="1", DSPROF_RUN=str(run), DSPROF_NATIVE="off", DSPROF_SCRATCH=str(disk))
    script.write_text(SCRIPT + "import time\ntime.sleep(600)\n")
    job = forked_python.start(
        [sys.executable, str(script)], cwd=tmp_path, env=env, stdout=subprocess.PIPE, start_new_session=True
    )
    assert job.stdout is not None
    assert job.stdout.readline() == "trained\n"
    os.killpg(job.pid, signal.SIGKILL)
    assert job.stdout.read() == ""
    assert job.wait(timeout=60) == -signal.SIGKILL
    place = scratch.stand_in(run, disk)
    Gathering(RunFolder(run), Talk(), (place,)).finish()
    (rank,) = load(RunFolder(run)).run.ranks
    assert (rank.last_step, rank.closed) == (19, False)
    while place.exists():  # all is in the run folder, and the copier takes away what it has here
        time.sleep(0.01)


LONG = """
import os, signal, sys, time, torch, dsprof
from pathlib import Path
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
written = 0
def write(chunks):
    global written
    for number in range(chunks * 64):
        for _ in range(256):
            dsprof.mark("tick", written)
            written += 1
        time.sleep(0.002)
for step in range(3):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
write(7)
print("waits", flush=True)
sys.stdin.readline()
write(2)
print(written, flush=True)
if sys.argv[1:] == ["killed"]:
    os.kill(os.getpid(), signal.SIGKILL)
"""


@both
@pytest.mark.parametrize("ending", ["", "killed"])
def test_a_capture_in_memory_is_moved_while_it_is_written_and_no_kill_loses_any(
    tmp_path: Path, native: str, ending: str
) -> None:
    """By default, on a local disk. The copier is killed in the middle, and, in one case, the rank at the end."""
    run = tmp_path / "run"
    if not scratch.choose(run).in_memory:
        pytest.skip("captures do not go into memory here")
    (tmp_path / "train.py").write_text(LONG)
    more = {"DSPROF_SCRATCH": "", "DSPROF_EXIT_WAIT": "60", "DSPROF_LIMIT": "64MiB"}
    job = forked_python.start(
        [sys.executable, str(tmp_path / "train.py"), *filter(None, [ending])],
        cwd=tmp_path,
        env=environment(DSPROF="1", DSPROF_RUN=str(run), DSPROF_NATIVE="on" if native == "1" else "off", **more),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    place = scratch.stand_in(run, scratch.SHARED_MEMORY)
    assert job.stdout is not None
    assert job.stdin is not None
    assert job.stdout.readline() == "waits\n"
    (local,) = (place / "capture").iterdir()
    target = run / "capture" / local.name
    while not {1, 2} <= set(numbers(target)) - set(numbers(local)):
        time.sleep(0.01)
    assert len(numbers(local)) <= 6
    assert {stat.S_IMODE(path.stat().st_mode) for path in local.iterdir()} == {0o600}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (local, *local.parents[:3])} == {0o700}
    state = json.loads((local / COPYING_FILE).read_bytes())
    os.kill(state["copier"], signal.SIGKILL)
    job.stdin.write("go on\n")
    job.stdin.flush()
    written = int(job.stdout.readline())
    job.stdin.close()
    assert job.wait(timeout=120) == (-signal.SIGKILL if ending else 0)
    job.stdout.close()
    if ending:
        assert local.exists()
        Gathering(RunFolder(run), Talk(), (place,)).finish()
    assert not place.exists()
    capture = read_capture(target)
    ticks = capture.records["value"][capture.records["kind"] == Kind.MARK]
    ticks = sorted(ticks[~np.isnan(ticks)].tolist())
    assert len(ticks) + capture.dropped >= written == len({*ticks}) + capture.dropped
    assert capture.problems == []


def test_in_a_container_the_copy_is_there_when_the_first_process_ends(tmp_path: Path, script: Path) -> None:
    """With it, all that is in the container ends at once, the copier too."""
    alone = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("a process namespace is not permitted here")
    run, disk = tmp_path / "run", tmp_path / "disk"
    env = environment(DSPROF="1", DSPROF_RUN=str(run), DSPROF_NATIVE="off", DSPROF_SCRATCH=str(disk))
    done = subprocess.run([*alone, sys.executable, str(script)], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
    (rank,) = load(RunFolder(run)).run.ranks
    assert (rank.last_step, rank.closed) == (19, True)
    assert [*scratch.stand_in(run, disk).glob("capture/*")] == []


def test_a_copier_that_was_killed_has_a_successor_when_the_capture_closes(tmp_path: Path) -> None:
    local = local_capture(tmp_path, "rank00000.0.here.1")
    (local / "names.txt").write_text("1\ttick\n")
    scratch.start_copier(local, tmp_path / "run", "here")
    process = json.loads((local / COPYING_FILE).read_bytes())["copier"]
    os.kill(process, signal.SIGKILL)
    while copier.began(process) is not None:
        pass
    scratch.close(local, tmp_path / "run", "here", 60.0)
    assert not local.exists()
    assert (tmp_path / "run" / "capture" / local.name / "names.txt").read_text() == "1\ttick\n"


def test_at_its_end_a_rank_waits_for_its_copier_no_longer_than_it_may(tmp_path: Path) -> None:
    local = local_capture(tmp_path, "rank00000.0.here.1")
    time = SleepingClock()
    copying = Copier(local, tmp_path / "run", "here")  # this process is the copier
    time.at[3.0] = copying.finish
    scratch.close(local, tmp_path / "run", "here", 5.0, time.clock, time.sleep)
    assert 3 <= time.now < 3.1
    scratch.make_private(local)
    Copier(local, tmp_path / "run", "here")
    scratch.close(local, tmp_path / "run", "here", 5.0, time.clock, time.sleep)
    assert 8 <= time.now < 8.1  # it could not bring it there, and goes on
    assert local.exists()


def test_the_wait_at_the_end_is_a_setting() -> None:
    assert (parse_exit_wait(""), parse_exit_wait("0"), parse_exit_wait("2.5")) == (5.0, 0.0, 2.5)
    for wrong in ("-1", "nan", "soon", "1e9"):
        with pytest.raises(ValueError, match=f"'{wrong}' is no number of seconds from 0 to 3600; write one, such as 5"):
            parse_exit_wait(wrong)


@pytest.fixture
def dead(tmp_path: Path) -> Iterator[Path]:
    """A real FUSE file system whose server does not answer: whoever asks it for anything stands still until the end."""
    folder = tmp_path / "dead"
    folder.mkdir()
    try:
        server = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        pytest.skip(f"no FUSE here ({error.strerror})")
    options = f"fd={server},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}".encode()
    library = ctypes.CDLL(None, use_errno=True)
    if library.mount(b"dead", os.fsencode(folder), b"fuse", 6, options):  # MS_NOSUID, MS_NODEV
        os.close(server)
        pytest.skip(f"mounting is not permitted here ({os.strerror(ctypes.get_errno())})")
    yield folder
    library.umount2(os.fsencode(folder), 2)  # MNT_DETACH
    os.close(server)


def test_a_network_that_does_not_answer_does_not_hold_up_the_job(tmp_path: Path, script: Path, dead: Path) -> None:
    assert scratch.file_system(dead / "runs" / "a") == "fuse"
    (tmp_path / "tmp").mkdir()
    env = environment(
        DSPROF="1",
        DSPROF_RUN=f"{dead}/runs/a",
        DSPROF_NATIVE="off",
        TMPDIR=str(tmp_path / "tmp"),
        DSPROF_SCRATCH="",
        DSPROF_EXIT_WAIT="0.1",
    )
    done = forked_python.run([sys.executable, str(script)], cwd=tmp_path, env=env, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
    place = scratch.stand_in(dead / "runs" / "a", tmp_path / "tmp")
    (item,) = scratch.waiting(place)
    assert item.under_way(host_name())
    os.kill(item.state.copier, signal.SIGKILL)
    assert load(RunFolder(place)).run.ranks[0].last_step == 19


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "shared"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=8m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_read_only_run_folder_costs_the_copy_not_the_capture(tmp_path: Path, script: Path, read_only: Path) -> None:
    disk = tmp_path / "disk"
    run = read_only / "run"
    env = environment(DSPROF="1", DSPROF_RUN=str(run), DSPROF_NATIVE="off", DSPROF_SCRATCH=str(disk))
    done = forked_python.run([sys.executable, str(script)], cwd=tmp_path, env=env, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
    place = scratch.stand_in(run, disk)
    (item,) = scratch.waiting(run, (place,))
    assert item.state.error == "Read-only file system"
    subprocess.run(["mount", "-o", "remount,rw", str(read_only)], check=True)
    Gathering(RunFolder(run), Talk(), (place,)).finish()
    assert load(RunFolder(run)).run.ranks[0].last_step == 19
