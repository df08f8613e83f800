"""A helper is loaded only where nobody but the user and root can have put it there. Owners are injected: a test cannot
give a file away."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
import torch  # noqa: F401  (the helper is for the torch of this process)

from dsprof.collectors import native
from dsprof.collectors.native import build, places
from dsprof.collectors.native.places import FILE
from dsprof.collectors.native.trust import Untrusted, trusted

ME, OTHER = os.geteuid(), os.geteuid() + 4242


def owned(owners: dict[Path, int], modes: dict[Path, int] | None = None) -> Callable[[Path], os.stat_result]:
    """`lstat`, but that these paths belong to these users, and have these permissions."""

    def lstat(path: Path) -> os.stat_result:
        status = list(os.lstat(path))
        if path in owners:
            status[stat.ST_UID] = owners[path]
        if modes and path in modes:
            status[stat.ST_MODE] = stat.S_IFMT(status[stat.ST_MODE]) | modes[path]
        return os.stat_result(status)

    return lstat


@pytest.fixture
def helper(tmp_path: Path) -> Path:
    """A file in a folder of its own, both mine alone."""
    folder = tmp_path.resolve() / "cache"
    folder.mkdir(mode=0o700)
    path = folder / "helper.so"
    path.write_bytes(b"")
    path.chmod(0o600)
    return path


def test_mine_and_roots(helper: Path) -> None:
    assert trusted(helper) == helper
    assert trusted(helper, ME, owned({helper: 0, helper.parent: 0})) == helper


@pytest.mark.parametrize("above", [0, 1, 2])
def test_somebody_elses(helper: Path, above: int) -> None:
    """The file, its folder, or one further up."""
    place = [helper, *helper.parents][above]
    with pytest.raises(Untrusted) as raised:
        trusted(helper, ME, owned({place: OTHER}))
    assert str(raised.value) == (
        f"{place} belongs to the user number {OTHER}, who could change what is loaded into the job; use a folder of"
        " your own (set DSPROF_CACHE, or `dsprof build -o` and DSPROF_NATIVE_PATH)"
    )


def test_root_takes_nothing_of_a_users(helper: Path) -> None:
    above = dict.fromkeys(helper.parents, 0)
    with pytest.raises(Untrusted, match="belongs to the user number"):
        trusted(helper, 0, owned(above | {helper: OTHER}))


@pytest.mark.parametrize(("mode", "who"), [(0o020, "its group"), (0o002, "everybody"), (0o022, "everybody")])
@pytest.mark.parametrize("above", [0, 1])
def test_others_may_write(helper: Path, above: int, mode: int, who: str) -> None:
    place = [helper, helper.parent][above]
    place.chmod(0o700 | mode)
    with pytest.raises(Untrusted) as raised:
        trusted(helper)
    assert str(raised.value) == (
        f"{who} may write to {place}, and so could change what is loaded into the job; type `chmod go-w {place}`"
    )
    place.chmod(0o700)  # what it says to type
    assert trusted(helper) == helper


def test_in_a_folder_like_tmp_who_owns_the_entry_counts(helper: Path) -> None:
    """There each may only rename and remove what is their own."""
    shared = helper.parent.parent / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "mine").mkdir(mode=0o700)
    moved = helper.rename(shared / "mine" / "helper.so")
    assert trusted(moved) == moved
    with pytest.raises(Untrusted, match=f"{shared / 'mine'} belongs to"):
        trusted(moved, ME, owned({shared / "mine": OTHER}))
    with pytest.raises(Untrusted, match=f"{shared} belongs to"):  # whose owner may rename everything in it
        trusted(moved, ME, owned({shared: OTHER}))
    with pytest.raises(Untrusted, match=f"everybody may write to {moved}"):  # the bit means nothing on a file
        trusted(moved, ME, owned({}, {moved: 0o1666}))


def test_what_a_link_leads_to_is_what_is_loaded(helper: Path) -> None:
    link = helper.parent.parent / "link"
    link.symlink_to("./cache/../cache/helper.so")
    assert trusted(link) == helper
    link.unlink()
    link.symlink_to(helper.parent)
    assert trusted(link / "helper.so") == helper


def test_a_link_that_somebody_else_can_change(helper: Path) -> None:
    """What it leads to is mine, but it could lead elsewhere by the time it is loaded, or to another file of mine."""
    shared = helper.parent.parent / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    (shared / "link").symlink_to(helper.parent)
    assert trusted(shared / "link" / "helper.so") == helper
    with pytest.raises(Untrusted, match=f"{shared / 'link'} belongs to"):
        trusted(shared / "link" / "helper.so", ME, owned({shared / "link": OTHER}))
    shared.chmod(0o777)
    with pytest.raises(Untrusted, match=f"everybody may write to {shared}"):
        trusted(shared / "link" / "helper.so")


def test_a_link_into_a_folder_that_somebody_else_can_change(helper: Path) -> None:
    open_to_all = helper.parent.parent / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    planted = open_to_all / "helper.so"
    planted.write_bytes(b"")
    helper.unlink()
    helper.symlink_to("../open/helper.so")
    with pytest.raises(Untrusted, match=f"everybody may write to {open_to_all}"):
        trusted(helper)


def test_links_that_go_round(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(OSError, match="symbolic links"):
        trusted(tmp_path / "one")
    with pytest.raises(FileNotFoundError):
        trusted(tmp_path / "none")


# --- what that means for the cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a helper that fits, and nothing anywhere else."""
    folder = tmp_path.resolve() / "dsprof"
    monkeypatch.setenv("DSPROF_CACHE", str(folder))
    monkeypatch.setattr(places, "PACKAGE", tmp_path / "none")
    monkeypatch.setattr(places.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    places.make_private(folder / "native" / build.running_target().key)
    (folder / "native" / build.running_target().key / FILE).write_bytes(b"not to be loaded")
    return folder


def pretend(monkeypatch: pytest.MonkeyPatch, owners: dict[Path, int]) -> None:
    """For whatever asks whether it may load something."""
    monkeypatch.setattr(places, "trusted", lambda path: trusted(path, ME, owned(owners)))


def test_a_cache_of_another_user(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert build.find() is not None
    pretend(monkeypatch, {cache: OTHER})
    said: list[str] = []
    assert native.load(said.append) is None
    path = cache / "native" / build.running_target().key / FILE
    assert said == [
        f"{path} is not loaded: {cache} belongs to the user number {OTHER}, who could change what is loaded into the"
        " job; use a folder of your own (set DSPROF_CACHE, or `dsprof build -o` and DSPROF_NATIVE_PATH)",
        native.NOT_BUILT,
    ]


def test_nothing_is_built_into_a_cache_of_another_user(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    pretend(monkeypatch, {cache: OTHER})
    last_resort = tmp_path.resolve() / "tmp" / f"dsprof-{os.getuid()}" / "native"
    said: list[str] = []
    assert places.writable_cache(said.append) == last_resort
    assert said[0].startswith(f"{cache / 'native'} is not used: {cache} belongs to ")
    assert stat.S_IMODE(last_resort.stat().st_mode) == stat.S_IMODE(last_resort.parent.stat().st_mode) == 0o700
    pretend(monkeypatch, {cache: OTHER, last_resort.parent: OTHER})
    with pytest.raises(
        OSError, match=f"{cache} belongs to .*; {last_resort} is not used: {last_resort.parent} belongs"
    ):
        places.writable_cache()


def test_a_cache_that_others_may_write_to(cache: Path) -> None:
    """Everybody's is left as it is, and not used; one of our own, of a generous umask, is closed."""
    cache.parent.chmod(0o777)
    said: list[str] = []
    assert native.load(said.append) is None
    assert said[0].endswith(f"type `chmod go-w {cache.parent}`")
    assert stat.S_IMODE(cache.parent.stat().st_mode) == 0o777
    cache.parent.chmod(0o700)
    cache.chmod(0o775)
    assert build.find() is None
    assert places.writable_cache() == cache / "native"
    assert stat.S_IMODE(cache.stat().st_mode) == 0o755
    assert build.find() is not None


def test_whatever_the_umask_what_was_built_is_loaded(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cache / "native" / build.running_target().key / FILE
    path.unlink()
    compiler = tmp_path / "cxx"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit\nwhile [ "$1" != -o ]; do shift; done; : > $2\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    run = build._run  # but the trial import, which would fail
    monkeypatch.setattr(build, "_run", lambda command, log: None if "-c" in command else run(command, log))
    before = os.umask(0)
    try:
        assert build.obtain(build.running_target(), Path("python"), lambda text: None) == path == build.find()
    finally:
        os.umask(before)


def test_the_package_is_trusted_like_its_modules(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "built"
    monkeypatch.setattr(places, "PACKAGE", package)
    pretend(monkeypatch, {cache: OTHER, tmp_path: OTHER})
    path = package / build.running_target().key / FILE
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    assert build.find() == path
