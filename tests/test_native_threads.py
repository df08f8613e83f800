"""The recorder, its chunks, names and counters under ThreadSanitizer: `sanitize/threads.cpp`, which needs no torch."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from captures import STRICT

from dsprof.collectors.native import build, layout

PROGRAM = Path(__file__).parent / "sanitize" / "threads.cpp"
NATIVE = Path(build.__file__).parent


def compiled(folder: Path, include: Path) -> Path:
    """The program, of the headers in `include`."""
    compiler = build._compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    (folder / "layout.hpp").write_text(layout.header())
    # A fence is not seen by the sanitizer, says -Wtsan: ours is for readers of the file, not for other threads.
    flags = ["-std=c++20", "-O1", "-g", "-fsanitize=thread", *STRICT, "-Wno-tsan", "-pthread"]
    includes = [f"-I{folder}", f"-I{include}"]
    command = [*compiler, *flags, *includes, str(PROGRAM), "-o", str(folder / "threads")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    if "cannot find" in done.stderr and "tsan" in done.stderr:
        pytest.skip("the compiler has no ThreadSanitizer")
    assert done.returncode == 0, done.stderr
    return folder / "threads"


def run(program: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    return subprocess.run([program, folder], capture_output=True, text=True, timeout=200, check=False)


def test_no_race_and_every_record_accounted_for(tmp_path: Path) -> None:
    done = run(compiled(tmp_path, NATIVE), tmp_path / "captures")
    assert (done.returncode, done.stdout, done.stderr) == (0, "passed\n", "")


@pytest.mark.slow
def test_a_race_would_be_seen(tmp_path: Path) -> None:
    """With the lock around the names taken away."""
    include = tmp_path / "headers"
    include.mkdir()
    for header in NATIVE.glob("*.hpp"):
        text = header.read_text()
        if header.name == "names.hpp":
            assert text.count("std::lock_guard<std::mutex> lock(mutex_);") == 2
            text = text.replace("std::lock_guard<std::mutex> lock(mutex_);", "")
        (include / header.name).write_text(text)
    done = run(compiled(tmp_path, include), tmp_path / "captures")
    assert done.returncode != 0
    assert "ThreadSanitizer: data race" in done.stderr
