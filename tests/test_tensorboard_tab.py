"""The dsprof tab of TensorBoard: its entry point, its routes, and how it looks in a real TensorBoard."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import factories
import pytest
from browsers import PATIENCE_S, running_browser
from synthetic import Job, write_capture
from werkzeug.test import Client

from dsprof.analyzer.finding import Evidence, Fix
from dsprof.reports import html
from dsprof.reports.sections import report_of
from dsprof.reports.sections.as_json import report_json
from dsprof.reports.tab import plugin
from dsprof.reports.tab.loader import TabLoader
from dsprof.reports.tab.plugin import DsprofTab
from dsprof.reports.tab.run_listing import RunListing

ROOT = Path(__file__).parents[1]
EVIL = "<img src=x onerror='window.parent.hacked = 1'>"
LONG = "unbroken" * 30


def slow(rank: int, step: int) -> float:
    return 70.0 if rank == 1 else 40.0


def write_run(folder: Path, **job: Any) -> Path:
    for capture in Job(**{"steps": 30, **job}).captures().values():
        write_capture(capture, folder / "capture")
    return folder


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log folder with a run, one of evil names, a folder of another program's, and a link to a run outside."""
    folder = tmp_path_factory.mktemp("logs")
    write_run(folder / "gpt" / "slow-20261102T100000Z-000002", forward=slow)
    evil = write_run(folder / f"{EVIL}-20261101T100000Z-000001".replace("/", ""), buckets=(1 << 16,))
    info = {
        "id": EVIL,
        "name": EVIL,
        "command": [EVIL, LONG],
        "hints": [EVIL, LONG],
        "facts": [{"fact": EVIL, "rank": 0, "x": EVIL}],
    }
    (evil / "run.json").write_text(json.dumps(info))
    (folder / "plain").mkdir()
    outside = write_run(tmp_path_factory.mktemp("outside") / "run")
    (folder / "link").symlink_to(outside)
    return folder


# --- the entry point ------------------------------------------------------------------------------


def test_the_entry_point_imports_nothing_but_tensorboard() -> None:
    """Of every TensorBoard on the machine: it must not be slow, and cannot fail for want of anything."""
    entry = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["tensorboard_plugins"]
    module, name = entry["dsprof"].split(":")

    def modules(statement: str) -> set[str]:
        code = f"import site; site.main(); import sys; {statement}; print(*sys.modules)"
        return set(subprocess.check_output([sys.executable, "-S", "-c", code], text=True, timeout=60, cwd=ROOT).split())

    # What the interpreter loads by itself (finders of editable installations among it) is no cost of ours.
    added = modules(f"import {module} as m; m.{name}") - modules("pass")
    packages = {module.partition(".")[0] for module in added}
    assert packages - set(sys.stdlib_module_names) <= {"dsprof", "tensorboard", "google"}, added
    assert not any(module.startswith(("dsprof.analyzer", "dsprof.reports.tab.plugin")) for module in added)


def test_a_tab_that_cannot_be_had_is_none_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert TabLoader().load(object()) is None
    assert "the dsprof tab is left out: AttributeError" in caplog.text
    assert isinstance(TabLoader().load(SimpleNamespace(logdir="")), DsprofTab)


def test_tensorboard_serves_its_own_plugins_beside_it(logs: Path) -> None:
    from tensorboard import default

    from dsprof.cli.tensorboard import _from_elsewhere, _plugins

    plugins = _plugins()
    assert plugins.count(TabLoader) == 1
    assert set(default.get_plugins()) <= set(plugins)
    assert _from_elsewhere("http://localhost:6006/").startswith("from your own machine: ssh -L 6006:localhost:6006 ")


# --- which runs -----------------------------------------------------------------------------------


def test_runs_have_ids_and_no_link_is_followed(logs: Path) -> None:
    runs = RunListing(str(logs)).runs()
    assert list(runs) == ["gpt/slow-20261102T100000Z-000002", f"{EVIL}-20261101T100000Z-000001"]
    assert RunListing(str(logs / "plain")).runs() == {}
    for nothing in ("", "gs://bucket/logs", str(logs / "missing"), "a:/x,b:/y"):
        assert RunListing(nothing).runs() == {}


def test_a_run_itself_and_its_own_tensorboard_folder(logs: Path) -> None:
    run = logs / "gpt" / "slow-20261102T100000Z-000002"
    (run / "tensorboard").mkdir(exist_ok=True)
    for logdir in (run, run / "tensorboard"):
        runs = RunListing(str(logdir)).runs()
        assert list(runs) == ["."]
        assert runs["."].path == run


def test_a_listing_is_taken_anew_when_it_is_old(tmp_path: Path) -> None:
    now = [0.0]
    listing = RunListing(str(tmp_path), clock=lambda: now[0])
    assert listing.runs() == {}
    (tmp_path / "new" / "capture").mkdir(parents=True)
    assert listing.runs() == {}
    now[0] = 11.0
    assert list(listing.runs()) == ["new"]


# --- routes ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tab(logs: Path) -> DsprofTab:
    return DsprofTab(SimpleNamespace(logdir=str(logs)))


def get(tab: DsprofTab, route: str, **asked: Any) -> tuple[int, Any]:
    response = Client(tab.get_plugin_apps()[route]).get("/", query_string=asked)
    return response.status_code, json.loads(response.data)


RUN = "gpt/slow-20261102T100000Z-000002"


def test_the_runs_and_a_report(tab: DsprofTab) -> None:
    assert tab.is_active()
    status, answer = get(tab, "/runs")
    assert (status, answer["runs"][0]["name"]) == (200, "slow-20261102T100000Z-000002")
    status, report = get(tab, "/report", run=RUN)
    assert status == 200
    assert report["head"]["status"] == "bottleneck"
    assert (report["steps"], report["ranks"]) == ([0, 29], [0, 1])
    ids = [section["id"] for section in report["sections"]]
    assert ids[:2] == ["findings", "step"]
    assert {"heatmap", "timeline", "ranks", "run"} < set(ids)
    card = report["sections"][0]["blocks"][0]
    assert (card["kind"], card["code"], card["id"]) == ("findingcard", "rank.straggler", "rank.straggler")


def test_another_step_of_the_timeline(tab: DsprofTab) -> None:
    status, block = get(tab, "/timeline", run=RUN, step=7, ranks="1")
    assert (status, block["kind"], block["note"]) == (200, "figure", "step 7")
    assert get(tab, "/timeline", run=RUN, step=99) == (422, {"error": "there is no complete step 99"})
    for asked in ({"step": "x"}, {"step": "1", "ranks": "1,;"}, {}):
        assert get(tab, "/timeline", run=RUN, **asked) == (400, {"error": "step and ranks are numbers"})


def test_two_runs_are_compared(tab: DsprofTab) -> None:
    status, answer = get(tab, "/comparison", before=RUN, after=f"{EVIL}-20261101T100000Z-000001")
    assert status == 200
    assert "Where the step goes" in answer["text"]


@pytest.mark.parametrize("name", ["../outside/run", "link", "/etc", "plain", "", "gpt"])
def test_what_is_not_listed_is_not_read(tab: DsprofTab, name: str) -> None:
    assert get(tab, "/report", run=name) == (404, {"error": "no such run below the log folder"})


def test_a_run_that_is_damaged_says_so(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    tab = DsprofTab(SimpleNamespace(logdir=str(tmp_path)))
    status, answer = get(tab, "/report", run="broken")
    assert status == 422
    assert "run.json: cannot be read" in answer["error"]


def test_a_run_is_read_again_when_more_of_it_has_come(tmp_path: Path) -> None:
    captures = Job(steps=12).captures()
    write_capture(captures[0], tmp_path / "run" / "capture")
    tab = DsprofTab(SimpleNamespace(logdir=str(tmp_path)))
    assert get(tab, "/report", run="run")[1]["ranks"] == [0]
    write_capture(captures[1], tmp_path / "run" / "capture")
    assert get(tab, "/report", run="run")[1]["ranks"] == [0, 1]


# --- in a browser ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(logs: Path) -> Iterator[str]:
    """A TensorBoard with the tab, in this process."""
    from tensorboard import program

    from dsprof.cli.tensorboard import _plugins

    board = program.TensorBoard(plugins=_plugins())
    board.configure(logdir=str(logs), host="127.0.0.1", port=0, load_fast="false", reload_interval=0)
    app = board._make_server()
    threading.Thread(target=app.serve_forever, daemon=True).start()
    yield str(app.get_url())
    with suppress(Exception):
        app.shutdown()
        app.server_close()


class Look:
    """The tab, opened in a browser, and all that was complained of."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.errors: list[str] = []
        self.outside: list[str] = []
        self.page = browser.new_page(viewport={"width": 1300, "height": 900}, **options)
        self.page.set_default_timeout(PATIENCE_S * 1000)
        self.page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on(
            "request",
            lambda request: (
                request.url.startswith(("http://127.0.0.1", "data:", "blob:")) or self.outside.append(request.url)
            ),
        )
        self.page.goto(url)
        self.until("document.querySelectorAll('main section').length > 5")
        self.until("[...document.querySelectorAll('.canvas')].every(one => one.querySelector('svg.main-svg'))")

    @property
    def frame(self) -> Any:
        return next((frame for frame in self.page.frames if "plugin_entry" in frame.url), None)

    def until(self, condition: str) -> None:
        until = time.monotonic() + PATIENCE_S
        while self.frame is None or not self.ask(condition):
            assert time.monotonic() < until, f"never came true: {condition}; {self.errors}"
            self.page.wait_for_timeout(100)

    def ask(self, expression: str) -> Any:
        return self.frame.evaluate(expression)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with running_browser() as running:
        yield running


def test_the_tab_shows_a_run_as_the_address_asks(browser: Any, server: str) -> None:
    look = Look(browser, f"{server}#dsprof&run={RUN}&at=rank.straggler&step=7", color_scheme="light")
    assert look.ask("document.querySelector('h1').textContent").startswith("rank 1 arrives")
    assert look.ask("document.querySelector('[aria-current=true]').dataset.run") == RUN
    assert look.ask("document.getElementById('rank.straggler').getBoundingClientRect().top") < 900
    look.until("document.querySelector('#timeline figcaption').textContent === 'Shown: step 7.'")
    assert look.ask("document.querySelectorAll('#plot-timeline .bars path').length") > 15
    ids = look.ask("[...document.querySelectorAll('main section')].map(one => one.id)")
    assert [name for name in ids if not look.ask(f"document.getElementById('{name}').innerText.length > 40")] == []
    look.frame.locator("nav a", has_text="Ranks").click()
    assert look.page.evaluate("location.hash") == "#dsprof&run=gpt%2Fslow-20261102T100000Z-000002&at=ranks&step=7"
    look.page.evaluate("document.body.classList.add('dark-mode')")
    look.until("getComputedStyle(document.body).backgroundColor === 'rgb(20, 23, 27)'")
    look.frame.locator(".runs button").nth(1).focus()
    look.page.keyboard.press("Enter")
    look.until("document.querySelector('h1')?.textContent.startsWith('nothing found')")
    assert look.ask("document.querySelectorAll('img').length") == 0
    assert look.page.evaluate("window.hacked") is None
    look.frame.locator("#compare button").click()
    look.until("document.querySelector('#compare pre').textContent.includes('Where the step goes')")
    assert (look.errors, look.outside) == ([], [])


def test_the_tab_never_scrolls_sideways(browser: Any, server: str) -> None:
    """As it is opened, and after its window has become narrow or wide."""
    look = Look(browser, f"{server}#dsprof&run={RUN}")
    plots = "[...document.querySelectorAll('main svg.main-svg')].map(one => one.getBoundingClientRect().right)"
    fits = f"document.documentElement.scrollWidth <= innerWidth && {plots}.every(right => right <= innerWidth)"
    look.frame.locator("#compare button").click()
    look.until("document.querySelector('#compare pre').textContent.includes('Where the step goes')")
    assert look.ask("getComputedStyle(document.querySelector('#compare pre')).whiteSpace") == "pre"  # its tables
    for width in (390, 950, 390, 1300):
        look.page.set_viewport_size({"width": width, "height": 900})
        look.until(f"innerWidth === {width} && {fits}")
    look.page.set_viewport_size({"width": 390, "height": 900})
    look.frame.locator(".runs button").nth(1).click()
    look.until("document.querySelector('main').textContent.includes('unbroken')")
    look.until(fits)
    assert look.errors == []


def test_a_rank_and_a_step_are_deep_links(browser: Any, server: str) -> None:
    """They are marked in the heat map, the step is shown, and an address that is changed is followed."""
    look = Look(browser, f"{server}#dsprof&run={RUN}&rank=1&step=7", color_scheme="light")
    look.until("document.querySelector('#timeline figcaption').textContent === 'Shown: step 7.'")
    frames = "document.getElementById('plot-heatmap').layout.shapes.map(one => [one.x0, one.x1, one.y0, one.y1])"
    assert look.ask(frames) == [[6.5, 7.5, 0, 1], [0, 1, 0.5, 1.5]]
    assert look.ask("document.getElementById('heatmap').getBoundingClientRect().top") < 900
    look.page.evaluate(f"location.hash = '#dsprof&run={RUN}&rank=0&step=99'")
    look.until(
        "document.getElementById('not-captured')?.textContent === "
        "'The address names step 99, which this run has not captured.'"
    )
    look.until(f"JSON.stringify({frames}) === '[[0,1,-0.5,0.5]]'")
    look.until("document.querySelector('#timeline [role=status]').textContent === 'there is no complete step 99'")
    look.page.evaluate("location.hash = '#dsprof&run=%E0%A4%A'")  # not well encoded
    look.until("!document.getElementById('not-captured')")
    click = "document.getElementById('plot-heatmap').emit('plotly_click', {points: [{x: 5, y: 'rank 1'}]})"
    look.page.evaluate(f"location.hash = '#dsprof&run={RUN}'")
    look.ask(click)
    look.until("document.querySelector('#timeline figcaption').textContent === 'Shown: step 5.'")
    assert look.page.evaluate("location.hash").endswith("&rank=1&step=5")
    assert look.outside == []


def test_the_tab_draws_sections_with_the_words_of_the_report(browser: Any, tmp_path: Path) -> None:
    fix = Fix("code", "larger buckets", patch=({"argument": "bucket_cap_mb", "value": 25},),
              knobs=(("ddp.bucket_cap_mb", 25),))  # fmt: skip
    made = factories.straggler()
    many = ("comm.exposed", "data.stall")
    first, *rest = made.findings
    evidence = (*first.evidence, Evidence("cause", "not known: it neither computes more nor lacks a core", ""))
    analysis = replace(
        made, findings=(replace(first, fixes=(fix, *first.fixes), evidence=evidence), *rest),
        passed=many, not_judged=dict.fromkeys(many, "too few steps"),
    )  # fmt: skip
    (tmp_path / "report.html").write_text(html.render(analysis))
    page = browser.new_page()
    page.goto((tmp_path / "report.html").as_uri())
    said = """(section) => {
        for (const canvas of section.querySelectorAll('.canvas')) canvas.replaceChildren();
        return section.textContent.replace(/\\s/g, '');
    }"""
    tab = (Path(plugin.__file__).parent / "tab.js").read_text().replace("export async", "async")
    draw = f"(sections) => {{ {tab}; return sections.map(drawSection).map({said}); }}"
    sections = report_json(report_of(analysis))["sections"]
    in_the_tab = page.evaluate(draw, sections)
    in_the_report = page.evaluate(f"[...document.querySelectorAll('main section')].map({said})")
    assert in_the_tab == in_the_report
    page.close()
