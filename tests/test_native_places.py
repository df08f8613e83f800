"""Where a helper is found, and what is said of one that does not fit."""

from __future__ import annotations

import dataclasses
import platform
from pathlib import Path

import pytest
import torch  # noqa: F401  (the helper is for the torch of this process)

from dsprof.collectors import native
from dsprof.collectors.native import places
from dsprof.collectors.native.places import FILE, GIVEN
from dsprof.collectors.native.target import BUILT_FOR, BuildTarget, BuiltFor, built_for, running_target


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What DSPROF_NATIVE_PATH names; there is no helper anywhere."""
    monkeypatch.setenv("DSPROF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(places.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setattr(places, "PACKAGE", tmp_path / "package" / "built")
    given = tmp_path.resolve() / "given"
    given.mkdir()
    monkeypatch.setenv(GIVEN, str(given))
    return given


def put(target: BuildTarget, place: Path, **otherwise: str) -> Path:
    """A helper for `target`, as a build leaves it."""
    of = BuiltFor.of(target, compiler="g++", compiler_version="14", warnings=("-w",))
    path = place / (str(otherwise.get("key", "")) or target.key) / FILE
    path.parent.mkdir(parents=True)
    path.write_bytes(b"not to be loaded")
    dataclasses.replace(of, **otherwise).write(path.parent)
    return path


def found() -> tuple[Path | None, list[str]]:
    said: list[str] = []
    return places.find(running_target(), said.append), said


def test_what_is_asked_for_comes_first_then_the_package_then_the_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = running_target()
    cached = put(target, places.caches()[0])
    assert found() == (cached.resolve(), [f"{GIVEN}: {folder} holds no helper: {mend(folder)}"])
    packed = put(target, places.PACKAGE)
    monkeypatch.delenv(GIVEN)
    assert found() == (packed, [])
    monkeypatch.setenv(GIVEN, str(folder))
    given = put(target, folder)
    assert found() == (given, [])


def mend(folder: Path) -> str:
    return f"run `dsprof build -o {folder}` with the job's Python"


def test_the_file_itself_may_be_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(running_target(), folder)
    moved = folder / "lib" / FILE
    path.parent.rename(moved.parent)
    for given in (moved, moved.parent):
        monkeypatch.setenv(GIVEN, str(given))
        assert found() == (moved, [])
    (moved.parent / BUILT_FOR).unlink()
    no_words = f"{GIVEN}: {moved} has no {BUILT_FOR} beside it, so nobody can tell what it was built for"
    assert found() == (None, [f"{no_words}: {mend(moved.parent)}"])
    monkeypatch.setenv(GIVEN, str(moved))
    (moved.parent / BUILT_FOR).write_text("[1]")
    assert found() == (None, [f"{no_words}: {mend(moved.parent)}, and set {GIVEN} to that folder"])


def test_nothing_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GIVEN, str(folder / "none"))
    why = f"{GIVEN}: {folder / 'none'} does not exist: name the folder that was given to `dsprof build -o`"
    assert found() == (None, [why])


@pytest.mark.parametrize(
    ("field", "theirs", "what"),
    [
        ("torch_version", "2.11.0+cu126", "torch 2.11.0+cu126, and here it is {torch_version}"),
        ("torch_git", "0123abcd", "torch of the git commit 0123abcd, and here it is {torch_git}"),
        ("machine", "riscv64", f"the platform riscv64, and here it is {platform.machine()}"),
        ("soabi", "cpython-399-linux", "Python of the ABI cpython-399-linux, and here it is {soabi}"),
    ],
)
def test_one_that_does_not_fit_is_told_in_words(folder: Path, field: str, theirs: str, what: str) -> None:
    """And is not loaded to find out, which could crash: what it says is read from beside it."""
    path = put(running_target(), folder, **{"key": "of-another", field: theirs})
    unfit = f"{path} was built for {what.format(**vars(running_target()))}"
    assert found() == (None, [f"{GIVEN}: {unfit}: {mend(folder)}"])
    said: list[str] = []
    assert native.load(said.append) is None
    assert said == [f"{GIVEN}: {unfit}: {mend(folder)}", native.NOT_BUILT]
    assert built_for(path.parent).why_not(running_target(), path) == unfit


def test_one_of_another_dsprof(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the package, where an older one may be left."""
    path = put(running_target(), folder, key="old")
    assert found() == (None, [f"{GIVEN}: {path} was built by another version of dsprof: {mend(folder)}"])
    monkeypatch.delenv(GIVEN)
    left = put(running_target(), places.PACKAGE, key="old")
    assert found() == (None, [f"{left} was built by another version of dsprof: run `dsprof build` again"])


def test_one_that_fits_and_that_others_may_change(folder: Path) -> None:
    path = put(running_target(), folder)
    path.chmod(0o666)
    path_found, (why,) = found()
    assert path_found is None
    assert why == (
        f"{path} is not loaded: everybody may write to {path}, and so could change what is loaded into the job;"
        f" type `chmod go-w {path}`"
    )


def test_a_library_that_this_machine_cannot_load(folder: Path) -> None:
    """Of an image with a newer C library, say."""
    put(running_target(), folder)
    said: list[str] = []
    assert native.load(said.append) is None
    assert said[0].startswith("ImportError: ")
    assert said[0].endswith("; if it was built in another image, run `dsprof build` in this one")
