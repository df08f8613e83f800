"""Wheel and sdist hold every file of the four folders under its import name, and nothing else.

`dsprof/engine`, `dsprof/collectors` and `dsprof/reports` are links in the checkout and folders in what is shipped.
"""

from __future__ import annotations

import configparser
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SOME = {
    "dsprof/__init__.py",
    "dsprof/py.typed",
    "dsprof/analyzer/rules/comm/ddp_buckets.py",
    "dsprof/cli/run.py",
    "dsprof/engine/__init__.py",
    "dsprof/collectors/arm.py",
    "dsprof/collectors/bootstrap/sitecustomize.py",
    "dsprof/collectors/native/build.py",
    "dsprof/collectors/native/hooks.cpp",
    "dsprof/collectors/native/recorder.hpp",
    "dsprof/reports/terminal.py",
    "dsprof/reports/html/page.html.j2",
    "dsprof/reports/html/page.css",
    "dsprof/reports/html/page.js",
    "dsprof/reports/html/plotly-cartesian.min.js",
    "dsprof/reports/html/plotly-LICENSE.txt",
    "dsprof/reports/tensorboard/__init__.py",
}
"""Of each sort one, by name: what is compared with the folders below must not be empty by mistake."""


@dataclass(frozen=True)
class Built:
    """What was made of a copy of this repository, the wheel from the sdist, as `python -m build` does."""

    wheel: Path
    sdist: Path
    wheel_from_tree: Path
    """Built without the sdist in between."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("packaging")
    unwanted = [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().split()]
    copy = shutil.copytree(ROOT, folder / "checkout", symlinks=True, ignore=shutil.ignore_patterns(".git", *unwanted))
    sdist = build("sdist", copy, folder / "dist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return Built(build("wheel", unpacked, folder / "dist"), sdist, build("wheel", copy, folder / "dist-tree"))


def build(what: str, source: Path, into: Path) -> Path:
    """What the hook of the build backend makes that `pip` and `python -m build` call: the latter would start it five
    times more, to ask what it requires."""
    into.mkdir(exist_ok=True)
    program = f"import sys; from setuptools import build_meta; print(build_meta.build_{what}(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, str(into)],
        capture_output=True, text=True, timeout=240, cwd=source, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return into / done.stdout.splitlines()[-1]


def environment(**extra: str) -> dict[str, str]:
    """Nothing of this checkout on the path, and nothing that arms a profiler."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DSPROF", "PYTHON"))}
    return {**kept, **extra}


def shipped_files() -> set[str]:
    """Every file of the four folders, by its path under the import name."""
    found = set()
    for folder, folders, files in os.walk(ROOT / "dsprof", followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found |= {(Path(folder) / name).relative_to(ROOT).as_posix() for name in files if not name.startswith(".")}
    return found


def test_the_folders_are_joined_by_relative_links() -> None:
    if not (ROOT / "engine").is_dir():
        pytest.skip("an unpacked sdist: the folders lie under dsprof/")
    links = {name: os.readlink(ROOT / "dsprof" / name) for name in ("engine", "collectors", "reports")}
    assert links == {"engine": "../engine", "collectors": "../collectors", "reports": "../reports"}


def test_the_wheel_holds_every_file_and_nothing_else(built: Built) -> None:
    names = set(zipfile.ZipFile(built.wheel).namelist())
    assert {name.split("/")[0] for name in names} == {"dsprof", "dsprof-0.1.0.dist-info"}
    inside = {name for name in names if name.startswith("dsprof/")}
    assert inside >= SOME
    assert inside == shipped_files()


def test_the_wheel_is_for_every_python_and_machine(built: Built) -> None:
    assert built.wheel.name == "dsprof-0.1.0-py3-none-any.whl"


def test_the_sdist_holds_files_in_place_of_links(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    assert not [name for name, member in members.items() if member.issym() or member.islnk()]
    assert shipped_files() <= set(members)
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "tests/factories.py"} <= set(
        members
    )
    assert not [name for name in members if "__pycache__" in name or name.endswith(".pyc")]


def test_sdist_and_tree_build_the_same_wheel(built: Built) -> None:
    def content(path: Path) -> dict[str, bytes]:
        with zipfile.ZipFile(path) as archive:
            return {name: archive.read(name) for name in archive.namelist()}

    assert content(built.wheel) == content(built.wheel_from_tree)


def test_metadata(built: Built) -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(built.wheel) as archive:
        entry_points = configparser.ConfigParser()
        entry_points.read_string(archive.read("dsprof-0.1.0.dist-info/entry_points.txt").decode())
        metadata = Parser().parsestr(archive.read("dsprof-0.1.0.dist-info/METADATA").decode())
        names = archive.namelist()
    assert {name: dict(entry_points[name]) for name in entry_points.sections()} == {
        "console_scripts": {"dsprof": "dsprof.cli:main"},
        "tensorboard_plugins": {"dsprof": "dsprof.reports.tab.loader:TabLoader"},
        "torch.backends": {"dsprof": "dsprof.collectors.arm:autoload"},
    }
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "dsprof-0.1.0.dist-info/licenses/LICENSE" in names
    assert set(metadata.get_all("Provides-Extra", [])) == {
        "test", "frameworks", "trainers", "notebook", "perfetto", "dask", "docs",
    }  # fmt: skip
    assert metadata["Requires-Python"] == declared["requires-python"] == ">=3.11"


def test_the_version_is_said_once_more_in_the_code() -> None:
    import dsprof

    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == dsprof.__version__


def test_the_wheel_works_in_an_empty_folder(built: Built, tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    command = [*pip, "--target", str(target), str(built.wheel)]
    subprocess.run(command, check=True, timeout=120, capture_output=True, env=environment())
    assert sorted(path.name for path in target.iterdir()) == ["bin", "dsprof", "dsprof-0.1.0.dist-info"]

    program = """
import json, sys
import dsprof.collectors.arm, dsprof.engine, dsprof.reports, dsprof.cli
from dsprof.collectors.native import build
print(json.dumps({
    "files": [m.__file__ for name, m in sorted(sys.modules.items()) if name.partition(".")[0] == "dsprof"],
    "sources": [str(source) for source in build.SOURCES if source.is_file()],
    "all_sources": len(build.SOURCES),
}))
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment(PYTHONPATH=str(target)),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["files"]) > 5
    assert all(file.startswith(f"{target}/dsprof/") for file in found["files"])
    assert len(found["sources"]) == found["all_sources"]


def test_the_checkout_itself_is_a_package_folder(tmp_path: Path) -> None:
    """`python -m dsprof` from the checkout, links and all, with nothing installed."""
    done = subprocess.run(
        [sys.executable, "-m", "dsprof", "--version"],
        capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment(PYTHONPATH=str(ROOT)),
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "dsprof 0.1.0\n"), done.stderr
