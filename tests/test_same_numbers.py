"""One run says the same numbers in findings.json, HTML, the TensorBoard tab, Markdown, the terminal and a notebook."""

from __future__ import annotations

import html as html_lib
import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import factories
import pytest
from werkzeug.test import Client

from dsprof.analyzer.analysis import LEAST_SHARE, Analysis
from dsprof.interactive.loaded_run import Run
from dsprof.reports import html, palette, terminal
from dsprof.reports.sections import MAKERS, report_of
from dsprof.reports.sections.as_json import report_json
from dsprof.reports.sections.section import Figure
from dsprof.reports.tab.plugin import DsprofTab
from dsprof.reports.tab.run_views import RunViews
from dsprof.reports.tensorboard.text import markdown_texts
from dsprof.run import RunFolder

MADE = [factories.straggler, factories.healthy, factories.evaluates, factories.dead_rank]


def words_of(page: str) -> str:
    """What is to be read of a page, without markup, each number on one line with its unit."""
    body = re.sub(r"<(script|style).*?</\1>", " ", page, flags=re.DOTALL)
    return plain(html_lib.unescape(re.sub(r"<[^>]+>", " ", body)))


def plain(text: str) -> str:
    return " ".join(text.replace("\N{NO-BREAK SPACE}", " ").split())


def strings(value: Any) -> list[str]:
    """All that a JSON value says, but what is drawn in figures."""
    if isinstance(value, dict):
        return [word for key, one in value.items() if key != "figure" for word in strings(one)]
    if isinstance(value, list):
        return [word for one in value for word in strings(one)]
    return [value] if isinstance(value, str) else []


def in_the_tab(analysis: Analysis, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the tab's route answers of it."""
    monkeypatch.setattr(RunViews, "_analysis", lambda self, folder: analysis)
    tab = DsprofTab(SimpleNamespace(logdir=""))
    monkeypatch.setattr(tab._listing, "runs", lambda: {"run": RunFolder(factories.CWD)})  # type: ignore[arg-type]
    response = Client(tab.get_plugin_apps()["/report"]).get("/", query_string={"run": "run"})
    assert response.status_code == 200, response.data
    return plain(" ".join(strings(json.loads(response.data))))


def shown(analysis: Analysis, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Where -> what is said there."""
    file = io.StringIO()
    terminal.render(analysis, file, color=False, width=4000)
    run = Run.__new__(Run)
    run.__dict__["analysis"] = analysis
    markdown = "".join(markdown_texts(analysis).values())
    return {
        "html": words_of(html.render(analysis)),
        "tab": in_the_tab(analysis, monkeypatch),
        "notebook": words_of(run._repr_html_()),
        "terminal": plain(file.getvalue()),
        "markdown": plain(re.sub(r"\\(.)", r"\1", markdown)),
    }


@pytest.mark.parametrize("made", MADE, ids=lambda made: made.__name__)
def test_the_same_numbers_everywhere(made: Callable[[], Analysis], monkeypatch: pytest.MonkeyPatch) -> None:
    analysis = made()
    told = analysis.to_dict()
    places = shown(analysis, monkeypatch)
    for where, said in places.items():
        assert told["verdict"]["headline"] in said, where
        assert told["verdict"]["status"] in said.lower(), where
        total = told["run"]["step_ms"]["mean"]
        assert f"{total:.0f} ms" in said, where
        for part, ms in told["budget"].items():
            if ms < LEAST_SHARE * total:
                continue
            share = 100 * ms / total
            digits = {f"{ms:.2f}", f"{ms:.1f}", f"{ms:.0f}"} | ({f"{ms:.3g}"} if ms else set())
            line = rf"{palette.part(part).label}\W+(?:{'|'.join(map(re.escape, digits))}) ms\W+{share:.1f} %"
            rounded = rf"{palette.part(part).label}\W+(?:{'|'.join(map(re.escape, digits))}) ms\W+{share:.0f} %"
            assert re.search(f"{line}|{rounded}", said), (where, part, line)
        for finding in told["findings"]:
            if finding["severity"] == "info":
                continue
            assert finding["code"] in said, where
            assert finding["title"] in said, where
            gain = finding["gain"]
            if gain["ms"] > 0:
                assert re.search(rf"[Ss]aves {gain['ms']:.1f}0? ms|[Ss]aves {gain['ms']:.2f} ms", said), where
                ends = [f"{gain['low']:.3g}", f"{gain['high']:.3g}"]
                assert all(end in said for end in ends), (where, ends)
            for item in finding["evidence"]:
                assert item["metric"] in said or item["value"] == item["expected"], where


def test_a_small_part_of_a_long_step_reads_alike_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    analysis = replace(factories.straggler(), budget={"compute": 2490.0, "data": 3.0, "optimizer": 7.0})
    for where, said in shown(analysis, monkeypatch).items():
        for label, amount in (("compute", "2.49 s"), ("data", "3.00 ms"), ("optimizer", "7.00 ms")):
            assert re.search(rf"{label}\W+{amount}", said), (where, label)


def test_what_ranks_spend_in_a_marked_part_stands_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    for where, said in shown(factories.straggler(), monkeypatch).items():
        for rank, waits, works in ((0, "38.0", "162.4"), (1, "0.0", "200.4")):
            assert re.search(rf"rank {rank}\W+{waits} ms\W+own work {works} ms", said), (where, rank)


def test_the_terminal_shows_sections_of_the_one_list_and_draws_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(terminal.SECTIONS) <= {maker.id for maker in MAKERS}
    drawn: list[str] = []
    monkeypatch.setattr(Figure, "plain", lambda self: drawn.append(self.name))
    monkeypatch.setattr(Figure, "drawn", property(lambda self: drawn.append(self.name)))
    terminal.render(factories.straggler(), io.StringIO(), color=False)
    assert drawn == []


def test_what_the_page_draws_is_what_the_tab_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    analysis = factories.straggler()
    page = html.render(analysis)
    drawn = json.loads(re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, flags=re.DOTALL)[0])
    report = report_json(report_of(analysis))
    sent = {
        block["name"]: block["figure"]
        for section in report["sections"] for block in section["blocks"] if block["kind"] == "figure"
    }  # fmt: skip
    assert json.loads(json.dumps(sent)) == drawn
    assert {"budget", "heatmap", "timeline", "steps", "collectives", "time"} == set(drawn)
