"""`dsprof.load`: a run's tables, findings, figures and what-ifs, as a notebook has them."""

from __future__ import annotations

import html as html_lib
import json
import re
from pathlib import Path

import factories
import pandas as pd
import pytest
from synthetic import Job, write_capture

import dsprof
from dsprof.cli import main
from dsprof.interactive.loaded_run import Run
from dsprof.interactive.run_tables import COLUMNS
from dsprof.knobs import KnobError
from dsprof.run import RunError
from dsprof.trace import Trace

ROOT = Path(__file__).parents[1]


def write_run(folder: Path, **job: object) -> Path:
    for capture in Job(**job).captures().values():  # type: ignore[arg-type]
        write_capture(capture, folder / "capture")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Rank 1's forward takes 70 ms, rank 0's 40."""
    folder = tmp_path_factory.mktemp("runs") / "slow"
    return dsprof.load(write_run(folder, forward=lambda rank, step: 70 if rank == 1 else 40))


# --- finding it -----------------------------------------------------------------------------------


def test_the_newest_run_of_dsprof_out_is_found_from_a_folder_below(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a-20261101T100000Z-000001", "b-20261102T100000Z-000002"):
        (tmp_path / "dsprof-out" / name / "capture").mkdir(parents=True)
    (tmp_path / "notebooks" / "deep").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "notebooks" / "deep")
    assert dsprof.load().path.name == "b-20261102T100000Z-000002"
    assert dsprof.load(tmp_path).path.name == "b-20261102T100000Z-000002"
    assert dsprof.load(tmp_path / "dsprof-out").path.name == "b-20261102T100000Z-000002"
    assert dsprof.load(tmp_path / "dsprof-out" / "a-20261101T100000Z-000001").path.name.startswith("a-")


def test_what_is_no_run_is_refused_with_what_makes_one(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no run in it.*dsprof run train\.py"):
        dsprof.load(tmp_path)
    with pytest.raises(RunError, match="no such run folder"):
        dsprof.load(tmp_path / "nothing")


def test_a_folder_that_is_named_is_not_left_for_a_run_above_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dsprof-out" / "a-20261101T100000Z-000001" / "capture").mkdir(parents=True)
    below = tmp_path / "mine"
    below.mkdir()
    with pytest.raises(RunError, match="no run in it, nor in a dsprof-out/ there; make one"):
        dsprof.load(below)
    monkeypatch.chdir(below)
    found = dsprof.load(".")
    assert found.path.parent == tmp_path / "dsprof-out"


def test_a_run_is_found_again_when_the_directory_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "dsprof-out" / "a-20261101T100000Z-000001", forward=lambda rank, step: 40)
    monkeypatch.chdir(tmp_path)
    newest, named = dsprof.load(), dsprof.load("dsprof-out/a-20261101T100000Z-000001")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert len(newest.steps) == len(named.steps) == 80


# --- tables ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", list(COLUMNS))
def test_each_table_has_the_columns_that_are_documented(run: Run, table: str) -> None:
    assert list(getattr(run, table).columns) == list(COLUMNS[table])
    assert list(run.describe(table).index) == list(COLUMNS[table])
    page = (ROOT / "docs" / "notebooks.md").read_text()
    assert f"`run.{table}`" in page


def test_steps_are_a_row_for_each_rank_and_step(run: Run) -> None:
    steps = run.steps
    assert len(steps) == 80
    assert steps.set_index(["step", "rank"]).index.is_unique
    parts = [name for name in steps if name.endswith("_ms") and name not in ("step_ms", "own_work_ms")]
    assert len(parts) == 9
    assert (steps[parts].sum(axis=1) - steps["step_ms"]).abs().max() < 1e-6
    own = steps[steps["ordinary"]].groupby("rank")["own_work_ms"].mean()
    assert own[1] - own[0] == pytest.approx(30, abs=1)
    assert steps["start_s"].min() == 0


def test_collectives_say_who_came_last_and_how_fast_they_were(run: Run) -> None:
    found = run.collectives
    assert len(found) == 80
    assert set(found["late_rank"]) == {1}
    one = found[found["bytes"] == 4 << 20].iloc[0]
    assert one["transfer_ms"] == pytest.approx(4.2)
    assert one["busbw_gbps"] == pytest.approx((4 << 20) / 4.2e6)  # of two ranks: 2 (n - 1) / n is 1
    assert 25 < one["skew_ms"] < 35


def test_events_may_be_written_to(run: Run) -> None:
    events = run.events
    empty = [name for name in events if events[name].isna().all() and events[name].dtype == "Int64"]
    assert empty
    for name in empty:
        events.loc[events["rank"] == 0, name] = 1
        assert events[name].sum() == (events["rank"] == 0).sum()


def test_events_are_all_rows_on_one_clock(run: Run) -> None:
    events = run.events
    assert len(events) == len(run.analysis.rows)
    assert events["start_s"].min() == 0
    assert all(of_rank["start_s"].is_monotonic_increasing for _, of_rank in events.groupby("rank"))


def test_actions_of_a_pipeline_have_their_place_in_the_step() -> None:
    analysis = factories.straggler()
    rows = analysis.rows
    pipe = rows[(rows["kind"] == "phase") & rows["name"].isin(["forward", "backward"])].copy()
    pipe["kind"], pipe["stage"], pipe["microbatch"] = "pipe", pipe["rank"], 0
    pipe["name"] = pipe["name"].astype(str).replace({"forward": "F", "backward": "B"})
    run = Run.__new__(Run)
    run.__dict__["analysis"] = dsprof_analysis(analysis, pd.concat([rows, pipe.astype({"kind": "object"})]))
    found = run.pipeline
    assert list(found.columns) == list(COLUMNS["pipeline"])
    assert set(found["action"]) == {"F", "B"}
    assert set(found["stage"]) == {0, 1}
    assert (found.groupby("step")["start_ms"].min() == 0).all()
    assert len(found) == len(pipe[pipe["step"] >= 0])


def dsprof_analysis(analysis: object, rows: pd.DataFrame) -> object:
    from dataclasses import replace

    assert isinstance(analysis, type(factories.straggler()))
    return replace(analysis, trace=Trace.of(analysis.run, rows))


# --- what it says ---------------------------------------------------------------------------------


def test_findings_and_their_table(run: Run) -> None:
    assert run.verdict.status == "bottleneck"
    assert run.findings[0].code == "rank.straggler"
    row = run.findings.table.iloc[0]
    assert (row["severity"], row["code"]) == ("high", "rank.straggler")
    assert row["gain_ms"] == run.findings[0].gain.ms
    assert row["low_ms"] < row["gain_ms"] < row["high_ms"]
    assert repr(run.findings).splitlines()[0].startswith("1. high    rank.straggler  rank 1 arrives")


def test_a_run_shows_its_verdict(run: Run) -> None:
    page = run._repr_html_()
    text = html_lib.unescape(re.sub(r"<style>.*?</style>|<[^>]+>", " ", page, flags=re.DOTALL))
    words = " ".join(text.split())
    assert run.verdict.headline in words.replace("\N{NO-BREAK SPACE}", " ")
    assert "What to do, worst first" in words
    assert "Where the step goes" in words
    assert "<script" not in page
    assert "Capture and run" not in words
    assert repr(run).startswith("[dsprof] verdict: bottleneck ")
    outside = re.sub(r"\.dsprof \{.*\}", "", page.partition("<style>")[2].partition("</style>")[0], flags=re.DOTALL)
    assert "table" not in outside  # no rule is for what is around it


def test_questions_in_pythons_words_get_the_command_lines_answers(run: Run) -> None:
    asked = run.whatif("rank.straggler:1", scale={"link": 10})
    table = asked.table
    assert list(table["asked"]) == [
        "without rank.straggler:1", "link x 10", "without rank.straggler:1 + link x 10",
    ]  # fmt: skip
    assert table["saved_ms"][0] == pytest.approx(30, abs=1)
    assert list(table["then_ms"] + table["saved_ms"]) == pytest.approx([asked.step_ms] * 3)
    assert "without rank.straggler:1" in repr(asked)
    assert "<pre" in asked._repr_html_()
    with pytest.raises(KnobError, match=r"rank\.stragler: no finding has this code; did you mean rank\.straggler"):
        run.whatif("rank.stragler")
    with pytest.raises(KnobError, match="nothing to ask"):
        run.whatif()


def test_a_plan_says_what_the_verb_does(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    planned = run.plan(8, bandwidth="100Gb", latency="10us")
    assert list(planned.table.index) == [2, 4, 8]
    assert planned.table["efficiency"].loc[2] == pytest.approx(1.0)
    assert (planned.table["low_ms"] <= planned.table["step_ms"]).all()
    assert main(["plan", str(run.path), "--ranks", "8", "--bandwidth", "100Gb", "--latency", "10us"]) == 0
    assert repr(planned) == capsys.readouterr().out.rstrip()
    with pytest.raises(ValueError, match="fast"):
        run.plan(8, bandwidth="fast")


def test_figures(run: Run) -> None:
    assert run.plot.timeline(step=5).layout.meta["note"] == "step 5"
    assert run.plot.timeline().layout.meta["note"].endswith("the ordinary one nearest to the mean")
    assert len(run.plot.heatmap().data) == 1
    assert {trace.name for trace in run.plot.budget().data} >= {"compute", "peer wait"}
    with pytest.raises(RunError, match="step 99: none of this run; it has steps 0 to 39"):
        run.plot.timeline(step=99)
    with pytest.raises(RunError, match="memory was not sampled"):
        run.plot.memory()


def test_a_run_without_a_step_has_none_to_draw() -> None:
    run = Run.__new__(Run)
    run.__dict__["analysis"] = factories.empty()
    for draw in (run.plot.timeline, run.plot.pipeline):
        with pytest.raises(RunError, match="nothing to draw: no step was begun"):
            draw()


def test_two_runs_beside_each_other(run: Run, tmp_path: Path) -> None:
    found = run.compare(write_run(tmp_path / "even"))
    table = found.table
    assert table["change_ms"].sum() == pytest.approx(-30, abs=1)
    assert set(table.index[:2]) == {"compute", "peer_wait"}
    assert list(found.comparison.gone) == ["rank.straggler"]
    assert found.outcome == found.comparison.decision.outcome
    assert found.comparison.headline in repr(found)
    assert html_lib.escape(found.comparison.headline) in found._repr_html_()


def test_a_run_that_grows_is_read_again_when_it_is_asked_to(tmp_path: Path) -> None:
    captures = Job().captures()
    write_capture(captures[0], tmp_path / "run" / "capture")
    run = dsprof.load(tmp_path / "run")
    assert run.analysis.ranks_captured == (0,)
    write_capture(captures[1], tmp_path / "run" / "capture")
    assert run.analysis.ranks_captured == (0,)
    assert run.reload().analysis.ranks_captured == (0, 1)


def test_the_public_names_are_lazy_and_listed() -> None:
    assert {"load", "profile", "Run", "span", "mark"} <= set(dir(dsprof))
    assert json.dumps(sorted(dsprof.__all__)) == json.dumps(
        ["Run", "__version__", "load", "mark", "profile", "span"]
    )  # fmt: skip
