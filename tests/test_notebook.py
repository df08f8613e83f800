"""The notebook runs from top to bottom on a run folder, is made of public names alone, and is kept without outputs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from synthetic import Job, write_capture

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "quickstart.ipynb"


def test_no_outputs_are_stored() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


def test_it_uses_nothing_but_public_names() -> None:
    code = [cell["source"] for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    lines = "".join(line for source in code for line in [*source, "\n"])
    assert sorted(set(re.findall(r"^(?:import|from) (\S+)", lines, flags=re.MULTILINE))) == [
        "dsprof", "os", "time", "torch",
    ]  # fmt: skip
    assert set(re.findall(r"dsprof\.(\w+)", lines)) == {"load", "profile"}


def test_it_runs_on_a_run_with_a_straggler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3", resources=resources).execute()

    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    shown = [
        {kind: value for output in cell.outputs for kind, value in output.get("data", {}).items()} for cell in cells
    ]
    assert "rank 1 arrives" in shown[0]["text/html"]
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
