"""Who may read what dsprof writes, and what is refused in a folder for everybody."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from captures import open_recorder

from dsprof import permissions
from dsprof.atomic import replacing, write_atomically
from dsprof.collectors.capture import copier, scratch
from dsprof.collectors.capture.copier import Copier
from dsprof.collectors.native import places
from dsprof.launch.gather import Gathering
from dsprof.launch.talk import Talk
from dsprof.names import host_name
from dsprof.permissions import LINK, check_own, create, make_folder, open_to_append, own_folder, own_name
from dsprof.run import RunFolder
from dsprof.schema import Kind

MASKS = [0o000, 0o022, 0o027, 0o077]


@pytest.fixture(autouse=True)
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DSPROF_SHARED", raising=False)
    monkeypatch.setattr(permissions, "_remembered", "")


@pytest.fixture(params=MASKS, ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield int(request.param)
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def modes(folder: Path) -> set[tuple[str, int]]:
    return {("folder" if path.is_dir() else "file", mode(path)) for path in [folder, *folder.rglob("*")]}


@pytest.mark.parametrize(("shared", "file", "folder"), [("", 0o600, 0o700), ("1", 0o640, 0o750), ("0", 0o600, 0o700)])
def test_modes_do_not_depend_on_the_umask(
    tmp_path: Path, umask: int, monkeypatch: pytest.MonkeyPatch, shared: str, file: int, folder: int
) -> None:
    monkeypatch.setenv("DSPROF_SHARED", shared)
    run = tmp_path / "above" / "run"
    make_folder(run, parents=True)
    write_atomically(run / "whole", "x")
    write_atomically(run / "mine", "x", mode=permissions.PRIVATE_FILE)
    os.close(open_to_append(run / "log"))
    with replacing(run / "replaced") as temporary:
        assert mode(temporary) == file, "from the beginning"
        temporary.unlink()  # as torch.profiler does it
        temporary.write_text("y")
    assert (mode(run), mode(run / "whole"), mode(run / "log")) == (folder, file, file)
    assert (mode(run / "replaced"), mode(run / "mine")) == (file, 0o600)
    write_atomically(run / "whole", "again")
    assert mode(run / "whole") == file


def test_a_capture_of_either_recorder(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, umask: int) -> None:
    for shared, file in (("", 0o600), ("1", 0o640)):
        monkeypatch.setenv("DSPROF_SHARED", shared)
        folder = tmp_path / f"capture{shared}"
        recorder = open_recorder(kind, folder)
        recorder.mark(Kind.MARK, recorder.intern("a name"), 1.0)
        recorder.close()
        written = {path.name for path in folder.iterdir()}
        assert {"names.txt", "chunk-00000.bin", "counters.bin"} <= written
        assert {mode(path) for path in folder.iterdir()} == {file}


def test_the_setting_is_that_of_the_arming(monkeypatch: pytest.MonkeyPatch) -> None:
    permissions.remember("1")
    monkeypatch.setenv("DSPROF_SHARED", "0")
    assert permissions.file_mode() == 0o640


# --- what is there already ------------------------------------------------------------------------


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("untouched")
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "there").mkdir()
    (tmp_path / "folder").symlink_to(tmp_path / "there")
    os.link(target, tmp_path / "second")
    with pytest.raises(FileExistsError):
        create(tmp_path / "link")
    for name, why in (("link", LINK), ("second", "a file that has another name elsewhere"), ("folder", LINK)):
        with pytest.raises(OSError, match=why):
            open_to_append(tmp_path / name)
    with pytest.raises(OSError, match=LINK):
        make_folder(tmp_path / "folder")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="No such device or address"):
        open_to_append(tmp_path / "pipe")
    (tmp_path / f".whole.{os.getpid()}.tmp").symlink_to(target)
    write_atomically(tmp_path / "whole", "new")
    write_atomically(tmp_path / "link", "in the place of the link")
    assert target.read_text() == "untouched"
    assert list((tmp_path / "there").iterdir()) == []


def test_the_users_own_folder_below_a_temporary_one(tmp_path: Path) -> None:
    mine = own_folder(tmp_path / "new")
    assert (mine.name, mode(mine)) == (f"dsprof-{os.getuid()}", 0o700)
    assert own_folder(tmp_path / "new") == mine
    mine.chmod(0o770)
    with pytest.raises(PermissionError, match=f"can be written by others \\(chmod go-w {mine}\\)"):
        own_folder(tmp_path / "new")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (tmp_path / own_name()).symlink_to(elsewhere)
    with pytest.raises(OSError, match=LINK):
        own_folder(tmp_path)
    (elsewhere / "a").mkdir()
    (elsewhere / "b").symlink_to("a")
    check_own(elsewhere, "a")
    with pytest.raises(OSError, match=LINK):
        check_own(elsewhere, "b")


@pytest.mark.skipif(os.getuid() != 0, reason="giving a folder to somebody else takes root")
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    os.chown(own_folder(tmp_path), 12345, -1)
    with pytest.raises(PermissionError, match="belongs to somebody else"):
        own_folder(tmp_path)
    reason = scratch._unfit(tmp_path, lambda path: "ext4")
    assert reason == f"cannot be used: {own_name()} in it belongs to somebody else"


def test_the_cache_of_helpers_below_a_temporary_folder_is_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / own_name()).symlink_to(tmp_path / "elsewhere")
    monkeypatch.setattr(places.tempfile, "gettempdir", lambda: str(tmp_path))
    (tmp_path / "file").touch()
    monkeypatch.setenv("DSPROF_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match=LINK):
        places.writable_cache()
    assert list((tmp_path / "elsewhere").iterdir()) == []


# --- copies ---------------------------------------------------------------------------------------

CAPTURE = "rank00003.0.host.7"


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A capture of tmp_path/run on the local disk tmp_path/local."""
    folder = scratch.stand_in(tmp_path / "run", tmp_path / "local") / "capture" / CAPTURE
    scratch.make_private(folder)
    write_atomically(folder / "names.txt", "1\ta\n")
    return folder


@pytest.mark.parametrize(("shared", "expected"), [("", (0o600, 0o700)), ("1", (0o640, 0o750))])
def test_a_copy_has_the_modes_of_the_run(
    tmp_path: Path, local: Path, shared: str, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSPROF_SHARED", shared)
    copying = Copier(local, tmp_path / "run", "host")
    copying.step()
    assert modes(tmp_path / "run") == {("file", expected[0]), ("folder", expected[1])}
    assert {mode(path) for path in tmp_path.joinpath("local").rglob("*") if path.is_dir()} == {0o700}, (
        "here it is private"
    )


def test_a_copier_touches_only_what_stands_for_its_run(tmp_path: Path, local: Path) -> None:
    """Whatever names a folder: a capture's name, another run's stand-in, what others may write, a link."""
    run, mine = tmp_path / "run", local.parents[2]
    victim = tmp_path / "victim" / "capture" / CAPTURE
    victim.mkdir(parents=True)
    (victim / "names.txt").write_text("precious")
    other = scratch.stand_in(tmp_path / "another", tmp_path / "local") / "capture" / CAPTURE
    other.mkdir(parents=True)
    (mine / "x").symlink_to(victim.parents[1])
    for folder in (victim, other, Path("/etc"), local.parent, local.parents[1], mine / "x" / "capture" / CAPTURE,
                   local / ".." / CAPTURE):  # fmt: skip
        with pytest.raises(OSError, match=f"is no folder of dsprof's that stands for {run}"):
            Copier(folder, run, "host")
    for folder in (mine, local.parents[1], local.parent, local):
        folder.chmod(0o777)
        with pytest.raises(OSError, match="can be written by others"):
            Copier(local, run, "host")
        folder.chmod(0o700)
    stand_in = local.parents[1]
    stand_in.rename(tmp_path / "moved")
    stand_in.symlink_to(tmp_path / "moved")
    with pytest.raises(OSError, match=LINK):
        Copier(local, run, "host")
    assert not run.exists()
    assert (victim / "names.txt").read_text() == "precious"
    assert {path.name for path in victim.iterdir()} == {"names.txt"}
    assert {path.name for path in (tmp_path / "moved" / "capture" / CAPTURE).iterdir()} == {"names.txt"}


@pytest.mark.parametrize("placed", [True, False])
def test_the_launcher_brings_nothing_that_a_file_in_the_run_folder_names(
    tmp_path: Path, local: Path, placed: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    """It would have removed that folder."""
    victim = tmp_path / "victim" / "capture" / CAPTURE
    victim.mkdir(parents=True)
    (victim / "precious").write_text("x")
    run = RunFolder(tmp_path / "run")
    told = copier.CopyState(host_name(), str(victim), 1, 1)
    (run.capture / CAPTURE).mkdir(parents=True)
    write_atomically(run.capture / CAPTURE / "copying.json", copier.json.dumps(vars(told)))
    Gathering(run, Talk(), (local.parents[1],) if placed else ()).finish()
    assert (victim / "precious").read_text() == "x"
    assert (local / "names.txt").exists()
    assert capfd.readouterr().err == (
        f"[dsprof] warning: the capture of rank 3 is not all in {run.capture}/; its copying.json names a folder that "
        "does not stand for this run, which is left alone\n"
    )
    assert not scratch.bring(scratch.waiting(run.path)[0], run.path, (Path("/"),))
