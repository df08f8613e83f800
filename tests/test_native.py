"""Building, caching and loading the native helper; what it records is tested with its Python twin elsewhere."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import torch  # noqa: F401  (the helper is for the torch of this process)
from captures import STRICT, build_helper, has_compiler

from dsprof.collectors import native
from dsprof.collectors.native import build, layout
from dsprof.collectors.native.places import FILE
from dsprof.collectors.native.target import built_for

PYTHON = Path(sys.executable)


@pytest.fixture
def helper() -> Path:
    """The real helper, from the cache of whoever runs the tests."""
    return build_helper()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; a helper in the folder of last resort is out of sight."""
    monkeypatch.setenv("DSPROF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    return tmp_path / "cache"


def compiler(folder: Path, body: str) -> Path:
    """A compiler that counts its runs in the file `runs`, then does `body` ($out is what it is to write)."""
    path = folder / "cxx"
    path.write_text(
        f"""#!/bin/sh
if [ "$1" = --version ]; then echo fake compiler 1.0; exit 0; fi
echo run >> {folder}/runs
while [ "$1" != -o ]; do shift; done; out=$2
{body}
"""
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def runs(folder: Path) -> int:
    path = folder / "runs"
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_probe_finds_the_torch_of_another_python() -> None:
    assert build.probe_target(PYTHON) == build.running_target()


def test_probe_does_not_import_torch() -> None:
    script = f"import sys\n{build._PROBE}\nassert 'torch' not in sys.modules"
    subprocess.run([PYTHON, "-c", script], check=True, capture_output=True)


def test_it_compiles_without_a_warning(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """With the flags that `build_helper` compiles by; in a cache that somebody else filled, it is compiled here, once
    for each version of its sources, of torch and of the compiler."""
    if not has_compiler():
        pytest.skip("no C++ compiler")
    built = built_for(build_helper().parent)
    if built.warnings == STRICT:
        return
    kept: pytest.Cache | None = getattr(pytestconfig, "cache", None)  # none with -p no:cacheprovider
    what = f"{build.running_target().key} {built.compiler} {built.compiler_version} {' '.join(STRICT)}"
    if kept is not None and kept.get("native/compiles_without_a_warning", "") == what:
        return
    (tmp_path / "layout.hpp").write_text(layout.header())
    command = build.command(build.running_target(), build._compiler() or [], tmp_path / FILE, STRICT)
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    if kept is not None:
        kept.set("native/compiles_without_a_warning", what)


def test_built_once_and_found(helper: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(compiler(tmp_path, f"cp {helper} $out")))
    said: list[str] = []
    assert build.find() is None
    path = build.ensure(PYTHON, said.append)
    assert path == build.ensure(PYTHON, said.append) == build.find()
    assert path is not None
    assert path.is_relative_to(cache)
    assert runs(tmp_path) == 1
    assert len(said) == 1
    assert said[0].startswith("building the native helper for torch ")
    assert [p.name for p in path.parent.iterdir() if p.name.startswith(".")] == []


def test_concurrent_launchers_build_once(
    helper: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(compiler(tmp_path, f"sleep 0.2; cp {helper} $out")))
    paths: list[Path | None] = []
    threads = [threading.Thread(target=lambda: paths.append(build.ensure(PYTHON, print))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 3
    assert set(paths) == {build.find()}
    assert runs(tmp_path) == 1


def test_failed_build_says_why_once_and_is_not_repeated(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = compiler(tmp_path, "echo 'hooks.cpp:1: fatal error: no such thing' >&2; exit 1")
    monkeypatch.setenv("CXX", str(fake))
    said: list[str] = []
    with pytest.raises(build.NoHelper, match="no such thing") as failure:
        build.ensure(PYTHON, said.append)
    (log,) = cache.rglob("build.log")
    assert str(log) in str(failure.value)
    assert "no such thing" in log.read_text()
    with pytest.raises(build.NoHelper, match="failed before"):
        build.ensure(PYTHON, said.append)
    assert runs(tmp_path) == 1
    fake.write_text(fake.read_text().replace("1.0", "2.0"))  # another version of it: worth another try
    with pytest.raises(build.NoHelper, match="no such thing"):
        build.ensure(PYTHON, said.append)
    assert runs(tmp_path) == 2
    assert len([line for line in said if line.startswith("building")]) == len(said) == 2


def test_helper_that_does_not_load_is_not_kept(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(compiler(tmp_path, "echo nonsense > $out")))
    with pytest.raises(build.NoHelper, match="python"):
        build.ensure(PYTHON, print)
    assert build.find() is None


def test_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(build.NoHelper, match=r"^no C\+\+ compiler found \(set CXX, or install g\+\+\)$"):
        build.ensure(PYTHON, print)


def test_missing_cxx_is_not_replaced_by_another(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(build.NoHelper, match=r"no C\+\+ compiler"):
        build.ensure(PYTHON, print)


def test_python_without_torch(cache: Path, tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 'no torch here' >&2; exit 1\n")
    fake.chmod(0o755)
    with pytest.raises(build.NoHelper, match="no torch here"):
        build.ensure(fake, print)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_cache_that_cannot_be_written(
    helper: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.mkdir(mode=0o500)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("CXX", str(compiler(tmp_path, f"cp {helper} $out")))
    path = build.ensure(PYTHON, print)
    assert path is not None
    assert path.is_relative_to(tmp_path / "tmp")


def test_cache_under_a_file_falls_back(
    helper: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("not a folder")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("CXX", str(compiler(tmp_path, f"cp {helper} $out")))
    path = build.ensure(PYTHON, print)
    assert path is not None
    assert path.is_relative_to(tmp_path / "tmp" / f"dsprof-{os.getuid()}")
    assert build.find() == path


def test_key_changes_with_what_the_helper_depends_on() -> None:
    target = build.running_target()
    other_torch = build.BuildTarget(**{**vars(target), "torch_git": "0" * 40})
    other_python = build.BuildTarget(**{**vars(target), "soabi": "cpython-399-x86_64-linux-gnu"})
    moved = build.BuildTarget(**{**vars(target), "torch_folder": "/elsewhere/torch"})
    assert len({target.key, other_torch.key, other_python.key}) == 3
    assert moved.key == target.key


def test_load_explains_what_is_missing(cache: Path) -> None:
    said: list[str] = []
    assert native.load(said.append) is None
    assert said == [native.NOT_BUILT]


def test_load_refuses_a_helper_for_another_torch(helper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = build.BuildTarget(**{**vars(build.running_target()), "torch_version": "9.9.9"})
    monkeypatch.setattr(build, "find", lambda refused: helper)
    monkeypatch.setattr(native, "running_target", lambda: other)
    said: list[str] = []
    assert native.load(said.append) is None
    assert "9.9.9" in said[0]


def test_load_survives_a_broken_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "dsprof_native.so"
    broken.write_bytes(b"nonsense")
    monkeypatch.setattr(build, "find", lambda refused: broken)
    said: list[str] = []
    assert native.load(said.append) is None
    assert "ImportError" in said[0]


def test_one_recorder_at_a_time(helper: Path, tmp_path: Path) -> None:
    loaded = native.load()
    assert loaded is not None
    recorder = loaded.open(tmp_path)
    try:
        with pytest.raises(RuntimeError, match="open already"):
            loaded.open(tmp_path)
    finally:
        recorder.close()
