"""The notebook runs from top to bottom on a run folder, and is kept without outputs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from synthetic import Job, write_capture

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "explore_run.ipynb"


def test_no_outputs_are_stored() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


def test_it_runs_on_a_run_with_a_straggler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="needs the notebook extra")
    nbclient = pytest.importorskip("nbclient", reason="needs the notebook extra")
    pytest.importorskip("ipykernel", reason="needs the notebook extra")
    for capture in Job(forward=lambda rank, step: 70 if rank == 1 else 40).captures().values():
        write_capture(capture, tmp_path / "run" / "capture")
    monkeypatch.setenv("DSPROF_RUN_PATH", str(tmp_path / "run"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    for name in [name for name in os.environ if name.startswith("DSPROF") and name != "DSPROF_RUN_PATH"]:
        monkeypatch.delenv(name)

    resources = {"metadata": {"path": str(tmp_path)}}
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()

    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    verdict = "".join(output.get("text", "") for output in cells[1].outputs)
    assert verdict.startswith("[dsprof] verdict: bottleneck ")
    assert "rank.straggler" in verdict
    assert "rank 1" in verdict
    shown = [sorted({kind for output in cell.outputs for kind in output.get("data", {})}) for cell in cells[2:]]
    assert ["application/vnd.plotly.v1+json" in kinds for kinds in shown] == [
        True, True, True, True, False, True, False, False,
    ]  # fmt: skip
    assert ["text/html" in kinds for kinds in shown if "application/vnd.plotly.v1+json" not in kinds] == [True] * 3
