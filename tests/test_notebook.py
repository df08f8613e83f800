"""The notebooks run from top to bottom on a run, are made of public names alone, and are kept without outputs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic import Job, write_capture

from dsprof.interactive.loaded_run import Run

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
ZERO = "examples/train_engine.py --deepspeed_config examples/zero2.json --layers 2 --context 32 --steps 24"
MADE_BY = {
    "straggler": "examples/train_gpt.py --slow-rank 1 --layers 2 --context 32 --steps 24",
    "pipeline_bubbles": "examples/train_3d.py --stages 2 --tensor 1 --schedule gpipe --layers 2 --steps 24",
    "zero_communication": ZERO,
    "memory": ZERO,
    "whatif_and_plan": "examples/train_gpt.py --bucket-mb 0.05 --slow-loader --layers 2 --context 32 --steps 24",
}
"""Of each notebook but the first, the job whose run it is executed on."""


def sources(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_each_notebook_is_executed() -> None:
    assert {notebook.stem for notebook in NOTEBOOKS} == {"quickstart", *MADE_BY}


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_outputs_are_stored(notebook: Path) -> None:
    cells = json.loads(notebook.read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_use_nothing_but_public_names(notebook: Path) -> None:
    lines = "\n".join(sources(notebook))
    imported = set(re.findall(r"^(?:import|from) (\S+)", lines, flags=re.MULTILINE))
    errors = {"dsprof.knobs", "dsprof.knobs.questions", "dsprof.plan.from_run"}
    assert imported <= {"dsprof", *errors, "numpy", "os", "pandas", "time", "torch"}
    assert set(re.findall(r"dsprof\.(?!knobs|plan)(\w+)", lines)) <= {"load", "profile"}


@pytest.mark.parametrize("name", ["straggler", "whatif_and_plan"])
def test_their_cells_run_in_any_python(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a made-up run, without a kernel: the fast twin of the test below."""
    for capture in Job(forward=lambda rank, step: 70 if rank == 1 else 40).captures().values():
        write_capture(capture, tmp_path / "run" / "capture")
    monkeypatch.setenv("DSPROF_RUN_PATH", str(tmp_path / "run"))
    names: dict[str, object] = {}
    for source in sources(ROOT / "notebooks" / f"{name}.ipynb"):
        exec(compile(source, name, "exec"), names)
    assert isinstance(names["run"], Run)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MADE_BY))
def test_they_run_on_a_real_run_of_their_job(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each figure is drawn, each table has rows, and nothing raises."""
    nbformat = pytest.importorskip("nbformat", reason="needs the notebook extra")
    nbclient = pytest.importorskip("nbclient", reason="needs the notebook extra")
    pytest.importorskip("ipykernel", reason="needs the notebook extra")
    for variable in [variable for variable in os.environ if variable.startswith("DSPROF")]:
        monkeypatch.delenv(variable)
    run = tmp_path / "run"
    command = [sys.executable, "-m", "dsprof", "run", "--output", str(run), "--nproc-per-node", "2"]
    subprocess.run([*command, *MADE_BY[name].split()], cwd=ROOT, check=True, timeout=300, capture_output=True)
    monkeypatch.setenv("DSPROF_RUN_PATH", str(run))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()

    for cell in (cell for cell in notebook.cells if cell.cell_type == "code"):
        shown = {kind for output in cell.outputs for kind in output.get("data", {})}
        assert ("application/vnd.plotly.v1+json" in shown) == cell.source.startswith("run.plot."), cell.source
        assert cell.outputs, cell.source
        assert "stderr" not in {output.get("name") for output in cell.outputs}, cell.outputs


def test_the_quickstart_runs_on_a_run_with_a_straggler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs the notebook extra")
    nbclient = pytest.importorskip("nbclient", reason="needs the notebook extra")
    pytest.importorskip("ipykernel", reason="needs the notebook extra")
    for capture in Job(forward=lambda rank, step: 70 if rank == 1 else 40).captures().values():
        write_capture(capture, tmp_path / "run" / "capture")
    for name in [name for name in os.environ if name.startswith("DSPROF")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DSPROF_RUN_PATH", str(tmp_path / "run"))
    monkeypatch.setenv("DSPROF_NATIVE", "0")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))

    resources = {"metadata": {"path": str(tmp_path)}}
    notebook = nbformat.read(ROOT / "notebooks" / "quickstart.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()

    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = [
        {kind: value for output in cell.outputs for kind, value in output.get("data", {}).items()} for cell in cells
    ]
    assert "rank\N{NO-BREAK SPACE}1 arrives" in shown[0]["text/html"]
    assert shown[0]["text/plain"].startswith("[dsprof] verdict: bottleneck ")
    assert "rank.straggler" in shown[1]["text/html"]
    assert "without rank.straggler + link x 10 + compute x 0.9" in shown[2]["text/plain"]
    figures = ["application/vnd.plotly.v1+json" in kinds for kinds in shown]
    assert figures == [False, False, False, True, True, False, False, False, False, False]
    assert ["text/html" in kinds for kinds in shown[5:]] == [True] * 5
    compared = shown[-1]["text/plain"]
    assert "Where the step goes" in compared
    assert compared.partition(":")[0].strip("'") in ("better", "worse", "same", "not certain")
    assert sorted(path.name.partition("-2")[0] for path in (tmp_path / "dsprof-out").iterdir()) == [
        "fast-input", "slow-input",
    ]  # fmt: skip
