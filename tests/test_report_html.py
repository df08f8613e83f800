"""The HTML report: its text, its safety, and how it opens in a real browser."""

from __future__ import annotations

import base64
import functools
import hashlib
import html as html_lib
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import factories
import pytest
from browsers import PATIENCE_S, running_browser

from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.finding import Evidence, Fix
from dsprof.reports import html
from dsprof.reports.diffs import with_diffs
from dsprof.run import RunFolder
from dsprof.trace import Trace

HERE = Path(html.__file__).parent
EVIL = "</script><script>window.hacked = 1</script><img src=x onerror=alert(1)>"


def evil_run() -> Analysis:
    """A run whose every name tries to break out of the page."""
    finding = replace(
        factories.STRAGGLER,
        title=f"title {EVIL}",
        where=replace(factories.STRAGGLER.where, module=EVIL, op=EVIL),
        evidence=(replace(factories.STRAGGLER.evidence[0], metric=EVIL),),
        fixes=(replace(factories.STRAGGLER.fixes[0], title=EVIL, patch=({"argument": EVIL, "value": "\u2028"},)),),
    )
    job = factories.Job(steps=8, name=f"name {EVIL}", command=("train.py", EVIL))
    analysis = factories.build(job, findings=(finding,), not_judged={"comm.exposed": EVIL})
    analysis.run.facts.append({"fact": "ddp", "rank": 0, "site": EVIL, "note": EVIL})
    rows = analysis.rows.assign(name=analysis.rows["name"].astype(object).replace({"all_reduce": EVIL, "gc": EVIL}))
    collectives = analysis.collectives.assign(name=EVIL, purpose=EVIL)
    return replace(analysis, trace=Trace.of(analysis.run, rows), collectives=collectives)


@functools.cache
def rendered(made: Callable[[], Analysis]) -> str:
    """The page of one of `factories`, made once for all tests that read it."""
    return html.render(made())


def scripts(page: str) -> list[tuple[str, str]]:
    """(attributes, content) of each script element, as an HTML parser finds them."""
    return re.findall(r"<script([^>]*)>(.*?)</script>", page, flags=re.DOTALL)


def figures(page: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(scripts(page)[0][1])
    return found


def text_of(page: str) -> str:
    """What the page says, without tags, scripts and styles."""
    body = re.sub(r"<(script|style).*?</\1>", " ", page.partition("<body>")[2], flags=re.DOTALL)
    return " ".join(html_lib.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def test_straggler_says_what_matters() -> None:
    text = text_of(rendered(factories.straggler))
    for phrase in (
        "rank 1 arrives late in every step: its forward takes longer; fixing it saves 37.9 ms of each 212 ms step",
        "peer wait 19.0 ms 8.9 % standing still until the last rank arrives rank.straggler "
        "rank 0 38.0 ms own work 162.4 ms rank 1 0.0 ms own work 200.4 ms",
        "Saves 37.9 ms a step (18 %) 95 % interval 31.2 to 44.6 ms, predicted by replay",
        "confidence 97 % where rank 1, all_reduce, group 0, steps 0-39",
        "forward on rank 1 88.0 ms 50.0 ms",
        "Fix 1 the slow part is called here; move it off the training thread",
        "examples/train_gpt.py:112 slow_rank=None copy",
        "Fix 2 or leave it the cores export OMP_NUM_THREADS=1",
        "verdict bottleneck rank 1 arrives late in every step",
        "ordinary step 212 ms median 212 ms p10 to p90 212 to 213 ms ordinary steps 35 of 40 ranks 2",
        "Where the run goes Its wall time, 12.9 s; mean over the ranks.",
        "training 8.5 s 66 % training steps",
        "Mean over the ranks and 35 ordinary steps of 40.",
        "Noise of this run: 0.60 ms.",
        "Shown: step 5, the ordinary one nearest to the mean.",
        "1 node0 212.4 200.4 178.0 12.0 0.0 4.4 16.0 2.0 39 360 exit status 0",
        "Passed: comm.exposed data.imbalance data.stall pause.gc run.rank-died",
        "started 2026-11-20 10:15:00 UTC, ended 2026-11-20 10:15:30 UTC",
        "command examples/train_gpt.py --steps 40",
    ):
        assert phrase in text
    assert text.index("rank.straggler rank 1 arrives") < text.index("comm.small-messages all-reduces of")


def test_healthy_dead_and_empty() -> None:
    healthy = text_of(rendered(factories.healthy))
    assert "nothing found that is sure to shorten the 175 ms step" in healthy
    assert "1 remark, not sure to save more than noise" in healthy
    dead = text_of(rendered(factories.dead_rank))
    assert "rank 1 was killed by SIGKILL in step 12, during forward" in dead
    assert "Shown: step 12, the last one begun; hatched: never ended." in dead
    assert "killed by SIGTERM (143)" in dead
    assert "rank 1: 1 record torn" in dead
    page = rendered(factories.empty)
    assert "no complete step was captured, so nothing can be said about its speed" in text_of(page)
    assert figures(page) == {}


def test_a_cost_beside_the_ordinary_steps() -> None:
    page = rendered(factories.evaluates)
    text = text_of(page)
    for phrase in (
        "a step is an iteration of 6 optimizer steps: 5 of Adam 1, 1 of Adam 2.",
        "steps are slower from step 41 on",
        "evaluation 1.3 s 6.8 % forwards without gradients, between training steps eval.uneven",
        "Saves 42.0 ms a step on average (17 % of the run's time per step)"
        " 95 % interval 38.1 to 45.9 ms, measured as excess over ordinary steps",
        "Marked: what made a step longer than these.",
        "Not judged: rank.straggler : the ranks do different work",
    ):
        assert phrase in text
    assert "in bold" not in text  # nobody waits in ordinary steps
    marks = [trace for trace in figures(page)["steps"]["data"] if trace.get("mode") == "markers"]
    assert [trace["name"] for trace in marks] == ["checkpointing", "evaluation", "stop"]


def test_the_fix_comes_before_all_else_that_is_told_of_a_finding() -> None:
    text = text_of(rendered(factories.straggler))
    body = text[text.rindex("What to do, worst first") :]
    places = [body.index(words) for words in (
        "Saves 37.9 ms", "Fix 1", "forward on rank 1", "Where the step goes", "Where the run goes", "Who was slower",
    )]  # fmt: skip
    assert places == sorted(places)


def test_evidence_that_is_as_expected_is_left_out() -> None:
    evidence = (Evidence("own work a step", 256.0, "ms", 180.0), Evidence("CPU time a step", 177.0, "ms", 177.2))
    finding = replace(factories.STRAGGLER, evidence=evidence)
    text = text_of(html.render(replace(factories.straggler(), findings=(finding,))))
    assert "own work a step 256 ms 180 ms" in text
    assert "CPU time a step" not in text


def test_a_fix_that_is_known_as_a_diff_is_shown_as_one() -> None:
    diff = "--- a/train.py\n+++ b/train.py\n@@ -3,1 +3,1 @@\n-model = DDP(model)\n+model = DDP(model, <b>=5)\n"
    fixes = (replace(factories.STRAGGLER.fixes[0], diff=diff),)
    finding = replace(factories.STRAGGLER, fixes=fixes)
    page = html.render(replace(factories.straggler(), findings=(finding,)))
    assert '<span class="del">-model = DDP(model)</span>' in page
    assert '<span class="add">+model = DDP(model, &lt;b&gt;=5)</span>' in page
    assert "slow_rank=None" not in page
    assert finding.to_dict()["fixes"][0]["diff"] == diff


def test_a_diff_is_made_of_the_users_own_files_and_only_where_the_run_was_started_here(tmp_path: Path) -> None:
    script = "from torch.nn.parallel import DistributedDataParallel\n\nmodel = DistributedDataParallel(model)\n"
    (tmp_path / "train.py").write_text(script)
    analysis = factories.straggler()
    analysis.run.cwd = str(tmp_path)
    analysis.run.facts.append({"fact": "ddp", "rank": 0, "site": "train.py:3"})
    fix = Fix("code", "larger buckets", knobs=(("ddp.bucket_cap_mb", 50),))
    by_hand = Fix("env", "more threads", knobs=(("ddp.bucket_cap_mb", 50), ("env.OMP_NUM_THREADS", "2")))
    analysis = replace(analysis, findings=(replace(factories.STRAGGLER, fixes=(fix, by_hand)),))
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    assert with_diffs(analysis, folder) == analysis
    folder.write_rerun({"command": []})
    made = [fix.diff for fix in with_diffs(analysis, folder).findings[0].fixes]
    assert "-model = DistributedDataParallel(model)\n" in made[0]
    assert "+model = DistributedDataParallel(model, bucket_cap_mb=50)\n" in made[0]
    assert made[1] == ""
    (tmp_path / "train.py").unlink()
    assert with_diffs(analysis, folder).findings[0].fixes[0].diff == ""
    analysis.run.facts.append({"fact": "ddp", "rank": 0, "site": ["no", "site"]})  # a verdict is not lost for that
    assert with_diffs(analysis, folder).findings[0].fixes[0].diff == ""


def test_what_was_measured_stands_beside_what_was_predicted() -> None:
    analysis = factories.straggler()
    analysis.run.verified["rank.straggler"] = {
        "ms": 35.0, "low": 30.0, "high": 40.0, "percent": 16.5, "outcome": "kept",
    }  # fmt: skip
    assert "measured: saves 35.0 ms a step (16 %) [30.0, 40.0], kept" in text_of(html.render(analysis))


def test_evidence_in_words_stands_below_the_numbers() -> None:
    """In a table it would leave the numbers' names no room."""
    cause = Evidence("cause", "not known: it neither computes more nor lacks a core", "")
    finding = replace(factories.STRAGGLER, evidence=(cause, Evidence("own work a step", 256.0, "ms", 180.0)))
    page = html.render(factories.build(factories.Job(), (finding,)))
    assert "<dt>cause</dt><dd>not known: it neither computes more nor lacks a core</dd>" in page
    assert page.index(">own work a step<") < page.index("<dt>cause</dt>")


def test_evidence_without_anything_expected_has_no_such_column() -> None:
    finding = replace(factories.EVAL_UNEVEN, evidence=(Evidence("one evaluation", 420.0, "ms"),))
    text = text_of(html.render(replace(factories.evaluates(), findings=(finding,))))
    assert "evidence measured one evaluation 420 ms" in text


def test_an_inconclusive_verdict_promises_nothing() -> None:
    page = rendered(factories.inconclusive)
    text = text_of(page)
    assert "verdict inconclusive nothing found that is sure to shorten the 263 ms step, but 34 % is" in text
    assert "No fix is sure to shorten the step. Where the step goes" in text
    assert '<h1 class="unsure">' in page
    assert "34\N{NO-BREAK SPACE}% is" in page


def test_kinds_of_time_that_are_not_known_are_not_shown() -> None:
    page = html.render(replace(factories.healthy(), time={}))
    assert "Where the run goes" not in page
    assert "time" not in figures(page)


def test_collectives_of_which_none_was_timed_have_no_figure() -> None:
    analysis = factories.healthy()
    untimed = analysis.collectives.assign(transfer_ns=0)
    assert "collectives" not in figures(html.render(replace(analysis, collectives=untimed)))


def test_a_part_next_to_nothing_has_no_line() -> None:
    job = factories.Job(pauses={(0, 20): 1.0})
    page = html.render(factories.build(job))
    assert "garbage collection" not in text_of(page)
    assert "pause" not in [trace["name"] for trace in figures(page)["budget"]["data"]]


def test_missing_ranks_have_a_row() -> None:
    text = text_of(html.render(factories.build(factories.Job(ranks=3, steps=8, captured=(0, 2)))))
    assert "1 node0 not captured exit status 0" in text
    assert "ranks 2 of 3" in text


def test_nothing_from_the_run_becomes_markup() -> None:
    page = html.render(evil_run())
    assert [attributes for attributes, _ in scripts(page)] == [' type="application/json" id="figures"', "", ""]
    assert "<img" not in page
    drawn = scripts(page)[0][1]
    assert not set("<>&\u2028\u2029") & set(drawn)
    assert "title </script><script>window.hacked = 1</script><img src=x onerror=alert(1)>" in text_of(page)


def test_the_policy_names_exactly_the_two_scripts() -> None:
    page = rendered(factories.straggler)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    allowed = re.findall(r"'(sha256-[^']+)'", html_lib.unescape(policy[1]))
    code = [content for attributes, content in scripts(page) if "json" not in attributes]
    assert allowed == [
        f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}" for content in code
    ]
    directives = html_lib.unescape(policy[1]).split("; ")
    assert directives[0] == "default-src 'none'"
    assert "connect-src 'none'" in directives
    assert not any("unsafe" in directive for directive in directives if directive.startswith("script-src"))


def test_the_page_refers_to_nothing_outside() -> None:
    page = rendered(factories.wide)
    own = page.replace((HERE / "plotly-cartesian.min.js").read_text(encoding="utf-8"), "")
    links = set(re.findall(r"""\b(?:src|href|action)\s*=\s*"(\S+?)"[\s>]""", own))
    assert {"#rank.straggler", "#timeline", "#run"} < links
    inside = set(re.findall(r"""\bid="(\S+?)"[\s>]""", own))
    assert {link.removeprefix("#") for link in links} < inside  # to places of its own, which are there
    assert "http" not in own.replace("http-equiv", "")


def test_the_vendored_bundle_is_what_its_page_says() -> None:
    told = (HERE / "VENDORED.md").read_text()
    bundle = (HERE / "plotly-cartesian.min.js").read_bytes()
    assert hashlib.sha256(bundle).hexdigest() in told
    version = re.search(rb"plotly\.js \(cartesian - minified\) v(\S+)", bundle)
    assert version is not None
    assert f"| version | {version[1].decode()}," in told
    assert b"</script" not in bundle
    assert b"<!--" not in bundle
    assert b"\r" not in bundle
    assert "MIT" in (HERE / "plotly-LICENSE.txt").read_text()


def test_a_large_run_stays_small() -> None:
    own = html.render(factories.wide(ranks=64, steps=60))
    assert len(own) - (HERE / "plotly-cartesian.min.js").stat().st_size < 250_000


# --- in a browser -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with running_browser() as running:
        yield running


def test_columns_that_are_empty_and_figures_of_one_step_are_left_out() -> None:
    analysis = factories.straggler()
    whole = html.render(analysis)
    assert '<th scope="col">host</th>' in whole
    assert '<th scope="col">ended</th>' in whole
    assert "steps" in figures(whole)
    run = replace(analysis.run, ranks=[replace(item, host="") for item in analysis.run.ranks], exits=[])
    one = analysis.steps[analysis.steps["step"] == analysis.steps["step"].max()]
    bare = html.render(replace(analysis, run=run, steps=one))
    assert '<th scope="col">host</th>' not in bare
    assert '<th scope="col">ended</th>' not in bare
    assert "steps" not in figures(bare)


class Visit:
    """A report opened in the browser, and all that it did beyond showing itself."""

    def __init__(self, browser: Any, path: Path, page: str, **options: Any) -> None:
        path.write_text(page, encoding="utf-8")
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.page.set_default_timeout(PATIENCE_S * 1000)
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.until("[...document.querySelectorAll('.canvas')].every(canvas => canvas.querySelector('svg.main-svg'))")
        self.requests = [url for url in self.requests if not url.startswith(("file:", "data:", "blob:"))]

    def until(self, condition: str) -> None:
        """Wait for it. Playwright's own waiting evaluates strings, which the policy forbids."""
        until = time.monotonic() + PATIENCE_S
        while not self.page.evaluate(condition):
            assert time.monotonic() < until, f"never came true: {condition}"
            self.page.wait_for_timeout(50)

    def count(self, selector: str) -> int:
        return int(self.page.locator(selector).count())

    def check_drawing(self, paper: str, ink: str) -> None:
        """All plots of the straggler's report are there, in these colours."""
        assert self.complaints == []
        assert self.requests == []
        assert self.count(".canvas") == 6
        assert self.count("#plot-time .bars path") == 3
        assert self.count("#plot-budget .bars path") > 10
        assert self.count("#plot-heatmap image") == 1
        assert self.count("#plot-timeline .bars path") > 15
        assert self.page.locator("#plot-timeline .ytick").first.text_content() == "rank 0"
        assert self.page.evaluate("getComputedStyle(document.body).backgroundColor") == paper
        assert self.page.evaluate(f"getComputedStyle({AXIS}).fill") == ink
        assert self.count("a.modebar-btn[data-title*='loud'], a.modebar-btn[data-title*='hare']") == 0

    def scrolls_sideways(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth > window.innerWidth"))


JUPYTER = "body td { text-align: right; } body tbody tr:nth-child(odd) { background: rgb(255, 0, 0); }"
CARD = '[id="rank.straggler"]'
AXIS = "document.querySelector('#plot-budget .xtick text')"


@pytest.fixture(scope="module")
def straggler(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Visit:
    """One page for all tests that leave it as it is: to open one takes two seconds of a processor."""
    page = rendered(factories.straggler)
    return Visit(browser, tmp_path_factory.mktemp("straggler") / "report.html", page, color_scheme="light")


def test_plots_are_drawn_without_a_complaint_or_a_request(straggler: Visit) -> None:
    straggler.check_drawing("rgb(246, 247, 249)", "rgb(27, 31, 36)")
    assert not straggler.scrolls_sideways()


def test_the_toolbar_covers_nothing(straggler: Visit) -> None:
    """Of plain bars there is none; elsewhere it lies above what is drawn."""
    assert straggler.count("#plot-time .modebar-btn") == straggler.count("#plot-budget .modebar-btn") == 0
    for name in ("heatmap", "timeline", "steps", "collectives"):
        parts = (straggler.page.locator(f"#plot-{name} {part}") for part in (".modebar", ".nsewdrag"))
        bar, plot = (part.bounding_box() for part in parts)
        assert bar["y"] + bar["height"] <= plot["y"] + 1, name


def test_a_fix_can_be_copied(straggler: Visit) -> None:
    straggler.page.locator(f"{CARD} button.copy").first.click()
    straggler.until(f"document.querySelector('{CARD} button.copy').textContent === 'copied'")


def test_a_link_to_a_remark_unfolds_it(browser: Any, tmp_path: Path) -> None:
    finding = factories.EXPOSED_INFO
    page = html.render(replace(factories.straggler(), findings=(factories.STRAGGLER, finding)))
    visit = Visit(browser, tmp_path / "report.html", page)
    folded = "document.querySelector('details').open"
    assert visit.page.evaluate(folded) is False
    visit.page.evaluate("location.hash = '#comm.exposed'")
    visit.until(folded)
    assert visit.page.evaluate("document.querySelector(':target').id") == "comm.exposed"
    assert visit.complaints == []


def test_a_link_to_a_rank_and_a_step_marks_them(browser: Any, tmp_path: Path) -> None:
    """And says how to have that step as a timeline, where it is of another one."""
    analysis = factories.straggler()
    of, _ = analysis.step_to_show
    other = max(step for step in analysis.steps["step"] if step != of)
    visit = Visit(browser, tmp_path / "report.html", rendered(factories.straggler))
    frames = "document.getElementById('plot-heatmap').layout.shapes"
    visit.page.evaluate(f"location.hash = '#rank=1&step={other}'")
    visit.until(f"({frames} ?? []).length === 2")
    column, row = visit.page.evaluate(frames)
    assert (column["x0"], column["x1"]) == (other - 0.5, other + 0.5)
    assert (row["y0"], row["y1"]) == (0.5, 1.5)
    said = visit.page.locator("#other-step").inner_text()
    assert said == f"This timeline is of step {of}. For step {other}: dsprof report RUN --step {other} --ranks 1"
    visit.page.evaluate("location.hash = '#budget'")
    visit.until(f"({frames} ?? []).length === 0")
    assert visit.count("#other-step") == 0
    assert visit.complaints == []


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("rank=99", "The link to this page names rank 99, which this run has not captured."),
        ("rank=1&step=4000", "The link to this page names step 4000, which this run has not captured."),
        ("%", None),
        ("rank=%E0%A4%A", None),
        ("rank=&step=-1", None),
    ],
)
def test_a_link_to_what_is_not_there_marks_nothing_in_its_place(
    browser: Any, tmp_path: Path, address: str, says: str | None
) -> None:
    visit = Visit(browser, tmp_path / "report.html", rendered(factories.straggler))
    visit.page.evaluate(f"location.hash = '#{address}'")
    if says is not None:
        visit.until("document.getElementById('other-step') !== null")
        assert visit.page.locator("#other-step").inner_text() == says
    visit.page.wait_for_timeout(300)  # for what would be drawn
    marked = visit.page.evaluate("document.getElementById('plot-heatmap').layout.shapes ?? []")
    assert len(marked) == (1 if address.startswith("rank=1") else 0)
    assert visit.complaints == []


def test_the_row_of_several_ranks_is_marked_for_each_of_them(browser: Any, tmp_path: Path) -> None:
    visit = Visit(browser, tmp_path / "report.html", rendered(factories.straggler))
    row = "dsprofFigures.rowOf({ data: [{ y: %s }] }, %d)"
    joined, single = "['ranks 0-', 'ranks 4-', 'ranks 8-']", "['rank 0', 'rank 8']"
    for labels, rank, expected in (
        (joined, 3, 0), (joined, 4, 1), (joined, 11, 2), (joined, 12, -1), (single, 8, 1), (single, 3, -1),
    ):  # fmt: skip
        assert visit.page.evaluate(row % (labels, rank)) == expected


def test_the_timeline_is_of_the_step_that_is_asked_for() -> None:
    analysis = factories.straggler()
    other = max(analysis.steps["step"])
    page = html.render(analysis, step=other, ranks=(1,))
    assert f"Shown: step {other}." in page
    assert figures(page)["timeline"]["layout"]["meta"] == {"step": other}


def test_plots_are_drawn_in_the_dark_and_follow_a_change_of_scheme(browser: Any, tmp_path: Path) -> None:
    visit = Visit(browser, tmp_path / "report.html", rendered(factories.straggler), color_scheme="dark")
    visit.check_drawing("rgb(20, 23, 27)", "rgb(230, 233, 237)")
    for scheme, ink in (("light", "rgb(27, 31, 36)"), ("dark", "rgb(230, 233, 237)")):
        visit.page.emulate_media(color_scheme=scheme)
        visit.until(f"getComputedStyle({AXIS}).fill === '{ink}'")


def test_what_stands_in_a_notebook_is_legible_in_its_theme_and_changes_nothing_around_it(
    browser: Any, tmp_path: Path
) -> None:
    shown = html.as_fragment(factories.straggler(), ("findings", "step"))
    page = browser.new_page(color_scheme="light")
    for light, paper, ink in (("false", "rgb(20, 23, 27)", "rgb(230, 233, 237)"),
                              ("true", "rgb(246, 247, 249)", "rgb(27, 31, 36)")):  # fmt: skip
        around = "<table id='mine'><tbody><tr><td>a</td></tr></tbody></table>"
        path = tmp_path / "cell.html"
        head = f"<!doctype html><meta charset='utf-8'><style>{JUPYTER}</style>"
        path.write_text(f"{head}<body data-jp-theme-light='{light}'>{around}{shown}{around}</body>")
        page.goto(path.as_uri())

        def style(selector: str, name: str) -> str:
            return str(page.evaluate(f"getComputedStyle(document.querySelector('{selector}')).{name}"))

        assert style(".dsprof", "backgroundColor") == paper
        assert style(".dsprof h2", "color") == style(".dsprof td", "color") == ink
        assert style(".dsprof table", "borderCollapse") == "collapse"
        assert style(".dsprof tbody tr", "backgroundColor") == "rgba(0, 0, 0, 0)"
        assert style(".dsprof td", "textAlign") == "left"
        mine = [style("#mine", "borderCollapse"), style("#mine td", "textAlign"), style("#mine tr", "backgroundColor")]
        assert mine == ["separate", "right", "rgb(255, 0, 0)"]
    page.close()


def test_what_stands_in_a_notebook_has_no_title_above_nothing() -> None:
    assert "<h3>By rank</h3>" in html.render(factories.straggler())
    shown = html.as_fragment(factories.straggler(), ("step",))
    assert '<h2 id="title-step">Where the step goes</h2>' in shown
    assert "By rank" not in shown


def test_the_page_never_scrolls_sideways(browser: Any, tmp_path: Path) -> None:
    page = html.render(factories.wide(steps=20))
    visit = Visit(browser, tmp_path / "report.html", page, viewport={"width": 420, "height": 900})
    assert not visit.scrolls_sideways()
    visit.page.set_viewport_size({"width": 1280, "height": 900})
    visit.until("document.querySelector('#plot-timeline svg.main-svg').getBoundingClientRect().width > 600")
    assert not visit.scrolls_sideways()


def test_no_script_runs_that_was_injected_or_gets_in_anyway(browser: Any, tmp_path: Path) -> None:
    visit = Visit(browser, tmp_path / "report.html", html.render(evil_run()))
    for name in ("timeline", "collectives"):  # bring up the pointer's boxes, which plotly fills with HTML-like text
        visit.page.locator(f"#plot-{name} .draglayer .nsewdrag").hover()
    assert visit.page.evaluate("typeof window.hacked") == "undefined"
    assert visit.count("img") == 0
    assert visit.complaints == []
    assert visit.requests == []

    visit.page.evaluate("""() => {
        const script = document.createElement('script');
        script.textContent = 'window.hacked = 1';
        document.body.append(script);
    }""")
    assert visit.page.evaluate("typeof window.hacked") == "undefined"
    assert visit.page.evaluate("fetch('https://example.invalid/').then(() => 'sent', () => 'stopped')") == "stopped"
    assert any("Content Security Policy" in complaint for complaint in visit.complaints)


def test_what_stands_between_backticks_is_code_and_nothing_in_it_is_markup() -> None:
    finding = replace(factories.STRAGGLER, title="`x < <b>y</b>` takes 12 ms, and so does a lone ` of <i>z</i>")
    page = html.render(factories.build(factories.Job(steps=8), findings=(finding,)))
    assert (
        "<code>x &lt; &lt;b&gt;y&lt;/b&gt;</code> takes 12\N{NO-BREAK SPACE}ms, and so does a lone ` of &lt;i&gt;z"
        in page
    )
