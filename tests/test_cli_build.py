"""`dsprof build`: what it makes, where, and what it says of what it cannot make."""

from __future__ import annotations

import stat
import sysconfig
from pathlib import Path

import pytest
import torch

from dsprof import cli
from dsprof.collectors.native import build, places
from dsprof.collectors.native.places import FILE, GIVEN
from dsprof.collectors.native.target import built_for

KEY = build.running_target().key


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that writes an empty file, whose trial import is left out; nothing was built before."""
    path = tmp_path / "cxx"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && echo fake 1.0 && exit\necho run >> {tmp_path}/runs\n'
        'while [ "$1" != -o ]; do shift; done\n: > $2\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(path))
    monkeypatch.setenv("DSPROF_CACHE", str(tmp_path.resolve() / "cache"))
    monkeypatch.setattr(places.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setattr(places, "PACKAGE", tmp_path / "built")
    monkeypatch.delenv(GIVEN, raising=False)
    run = build._run
    monkeypatch.setattr(build, "_run", lambda command, log: None if "-c" in command else run(command, log))
    monkeypatch.chdir(tmp_path)
    return path


def runs(compiler: Path) -> int:
    return len((compiler.parent / "runs").read_text().splitlines())


def test_into_a_folder(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["build", "-o", "image/native", "--torch-version", str(torch.__version__).partition("+")[0]]) == 0
    said = capsys.readouterr()
    folder = tmp_path / "image" / "native"
    path = folder / KEY / FILE
    assert said.out == f"{path}\n"
    assert said.err.splitlines() == [
        f"[dsprof] building the native helper for torch {torch.__version__} (about 20 s, once)",
        f"[dsprof] jobs find it with {GIVEN}={folder}",
    ]
    assert built_for(path.parent).compiler_version == "fake 1.0"
    monkeypatch.setenv(GIVEN, str(folder))
    assert build.find() == path
    for again in (str(folder), "image/../image/native"):
        assert cli.main(["build", "-o", again]) == 0
        assert capsys.readouterr().out == f"{path}\n"
    assert runs(compiler) == 1


def test_into_the_package_where_it_is_installed_else_into_the_cache(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["build"]) == 0  # tests run from a checkout
    assert capsys.readouterr().out == f"{tmp_path.resolve() / 'cache' / 'native' / KEY / FILE}\n"
    installed = str(Path(places.__file__).resolve().parents[1])
    of_python = sysconfig.get_paths()
    monkeypatch.setattr(places.sysconfig, "get_paths", lambda: of_python | {"purelib": installed})
    assert cli.main(["build"]) == 0
    assert capsys.readouterr().out == f"{places.PACKAGE / KEY / FILE}\n"
    assert build.find() == places.PACKAGE / KEY / FILE


def test_another_torch_than_the_image_is_to_have(compiler: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["build", "--torch-version", "2.11.0"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("[dsprof] error: --torch-version 2.11.0: ")
    assert said.endswith(
        f"imports torch {torch.__version__}, and a helper fits one torch only; run the `dsprof build` of a Python that"
        " has torch 2.11.0, or install that one first"
    )
    assert not (compiler.parent / "runs").exists()


def test_a_full_version_is_meant_as_it_is_written(compiler: Path) -> None:
    assert cli.main(["build", "--torch-version", str(torch.__version__)]) == 0
    assert cli.main(["build", "--torch-version", f"{str(torch.__version__).partition('+')[0]}+other"]) == 2


def test_what_failed_is_tried_again(compiler: Path, capsys: pytest.CaptureFixture[str]) -> None:
    works = compiler.read_text()
    compiler.write_text(works.replace(": > $2", "echo 'fatal error: planted' >&2; exit 1"))
    for _ in range(2):
        assert cli.main(["build"]) == 1
        assert "error: no native helper for torch" in (said := capsys.readouterr().err)
        assert "fatal error: planted" in said
    compiler.write_text(works)
    assert cli.main(["build"]) == 0
    assert runs(compiler) == 3


def test_no_compiler(compiler: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert cli.main(["build"]) == 1
    why = f"no native helper for torch {torch.__version__}: no C++ compiler found (set CXX, or install g++)"
    assert capsys.readouterr().err == f"[dsprof] error: {why}\n"


def test_a_folder_that_others_may_write_to(compiler: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is built there, as it may be copied elsewhere."""
    shared = tmp_path.resolve() / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert cli.main(["build", "-o", str(shared)]) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    path = shared / KEY / FILE
    assert last.startswith(f"[dsprof] warning: as it lies there, {path} is not loaded: everybody may write to {shared}")


def test_a_folder_that_is_none(compiler: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (compiler.parent / "file").touch()
    assert cli.main(["build", "-o", "file/below"]) == 1
    assert "Not a directory" in capsys.readouterr().err
