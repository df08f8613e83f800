"""The sitecustomize that arms where torch's autoload is off, with a torch and a dsprof made up for the purpose."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dsprof.launch.job import home

BOOTSTRAP = home() / "dsprof" / "collectors" / "bootstrap"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with a `torch`, and one beside it with a `dsprof`, both of which say when they are at work."""
    write(tmp_path / "site" / "torch" / "__init__.py", "print('torch')")
    write(tmp_path / "home" / "dsprof" / "__init__.py", "")
    write(tmp_path / "home" / "dsprof" / "collectors" / "__init__.py", "")
    write(tmp_path / "home" / "dsprof" / "collectors" / "arming" / "__init__.py", "")
    write(tmp_path / "home" / "dsprof" / "collectors" / "arming" / "process.py", "def arm():\n    print('armed')")
    return tmp_path / "site"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def python(site: Path, code: str, **variables: str) -> list[str]:
    """Lines printed by a fresh Python with the bootstrap and `site` on its path."""
    (site / "main.py").write_text(code)
    env = {"PYTHONPATH": f"{BOOTSTRAP}:{site}", "DSPROF_HOME": str(site.parent / "home"), "DSPROF": "1", **variables}
    # -S would leave sitecustomize out; an environment without site-packages keeps the real dsprof and torch away.
    base = sys._base_executable  # type: ignore[attr-defined]
    done = subprocess.run([base, str(site / "main.py")], env=env, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.returncode == 0
    return done.stdout.split()


def test_arms_after_torch_and_leaves_no_trace(site: Path) -> None:
    code = (
        "import sys, torch\nloader = torch.__spec__.loader\n"
        "print('ready', type(loader).__name__, torch.__loader__ is loader)\n"
        "print('exec_module' in vars(torch.__loader__), sum('Torch' in type(f).__name__ for f in sys.meta_path))\n"
        "print(sum('bootstrap' in entry for entry in sys.path))"
    )
    assert python(site, code) == ["torch", "armed", "ready", "SourceFileLoader", "True", "False", "0", "0"]


def test_looking_for_torch_does_not_use_it_up(site: Path) -> None:
    code = "import importlib.util as u\nprint(u.find_spec('torch').name)\nprint(u.find_spec('nothing'))\nimport torch"
    assert python(site, code) == ["torch", "None", "torch", "armed"]


@pytest.mark.parametrize("value", ["", "0"])
def test_does_nothing_without_dsprof_in_the_environment(site: Path, value: str) -> None:
    code = "import torch, sys\nprint([type(f).__name__ for f in sys.meta_path if 'Torch' in type(f).__name__])"
    assert python(site, code, DSPROF=value) == ["torch", "[]"]


def test_the_agent_can_still_decline(site: Path) -> None:
    assert python(site, "import os\nos.environ['DSPROF'] = '0'\nimport torch") == ["torch"]


def test_imports_dsprof_only_after_torch(site: Path) -> None:
    assert python(site, "import sys\nprint('dsprof' in sys.modules)") == ["False"]


def test_runs_the_users_own_sitecustomize_in_its_place(site: Path) -> None:
    write(site / "sitecustomize.py", "print('user')\nNAME = 3")
    code = "import sitecustomize, torch\nprint(sitecustomize.NAME, sitecustomize.__file__)"
    assert python(site, code) == ["user", "torch", "armed", "3", str(site / "sitecustomize.py")]


def test_survives_a_script_folder_with_our_names(site: Path) -> None:
    for name in ("engine", "collectors", "reports", "schema", "run"):
        write(site / f"{name}.py", f"print('{name}')")
    code = "import torch, engine, collectors, reports, schema, run"
    assert python(site, code) == ["torch", "armed", "engine", "collectors", "reports", "schema", "run"]


def test_never_raises(site: Path) -> None:
    write(site.parent / "home" / "dsprof" / "collectors" / "arming" / "process.py", "raise RuntimeError")
    assert python(site, "import torch\nprint('on')") == ["torch", "on"]
    assert python(site, "import torch\nprint('on')", DSPROF_HOME="/nowhere") == ["torch", "on"]


def test_a_torch_that_fails_to_import_fails_as_ever(site: Path) -> None:
    write(site / "torch" / "__init__.py", "raise ImportError('no libcuda')")
    assert python(site, "try:\n    import torch\nexcept ImportError as error:\n    print(error)") == ["no", "libcuda"]
