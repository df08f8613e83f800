"""The verdict on a terminal: what is slow, why, what to change; about a page, readable as plain text too."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final, TextIO

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dsprof.analyzer import text
from dsprof.analyzer.analysis import WAITING, Analysis, kind_of, part_of
from dsprof.analyzer.finding import Finding
from dsprof.analyzer.memory.allocator_state import DeviceMemory

from . import device, edits, efficiency, memory, palette, tables, wording

DEFAULT_WIDTH = 100
MAX_WIDTH = 110
BAR_WIDTH = 24
SHOWN_FINDINGS = 5
SHOWN_INFO = 3
SHOWN_RANKS = 3
SHOWN_DEVICES = 2
SHOWN_HOLDERS = 5
KEPT = "\ue000"
"""A blank at which rich breaks no line, as it does at every space that Unicode has."""

SEVERITY_STYLE = {"high": "bold red", "medium": "bold yellow", "low": "bold cyan", "info": "dim"}
TONE_STYLE = {**SEVERITY_STYLE, "good": "bold green", "unsure": "bold yellow"}


@dataclass(frozen=True)
class Glyphs:
    """The few characters beyond ASCII, and what replaces them where they cannot be written."""

    rule: str
    branch: str
    last: str
    pipe: str
    bar: str
    """From an eighth of a character (or what stands for it) to a whole one."""
    mark: str


UNICODE = Glyphs(rule="─", branch="├─", last="└─", pipe="│ ", bar="▏▎▍▌▋▊▉█", mark="◀")
ASCII = Glyphs(rule="-", branch="|-", last="`-", pipe="| ", bar="#", mark="<-")


def render(analysis: Analysis, file: TextIO, *, color: bool | None = None, width: int | None = None) -> None:
    """Write the verdict to `file`.

    `color`: None follows the terminal and NO_COLOR. `width`: None takes the terminal's, at most 110.
    """
    file.write(rendered(analysis, file, color=color, width=width))


def rendered(
    analysis: Analysis, file: TextIO, *, color: bool | None = None, width: int | None = None, so_far: bool = False
) -> str:
    """What `render` writes to `file`. `so_far`: of a job that runs, so without what was checked and how well it was
    captured."""
    console = _console(file, color, width)
    glyphs = UNICODE if _can_encode(file, "".join(vars(UNICODE).values())) else ASCII
    with console.capture() as capture:
        _verdict(console, glyphs, analysis, so_far=so_far)
    written = "".join(f"{line.rstrip()}\n" for line in capture.get().replace(KEPT, " ").splitlines())
    encoding = getattr(file, "encoding", None) or "utf-8"
    return written.encode(encoding, "replace").decode(encoding)


def _verdict(console: Console, glyphs: Glyphs, analysis: Analysis, *, so_far: bool) -> None:
    _headline(console, glyphs, analysis, "so far: " if so_far else "[dsprof] verdict: ")
    if analysis.time or analysis.step_ms is not None:
        console.print()
    _run_line(console, glyphs, analysis)
    if analysis.step_ms is not None:
        _step_tree(console, glyphs, analysis)
    _lines(console, efficiency.lines(analysis))
    _lines(console, device.lines(analysis))
    memory_line = memory.line(analysis.memory_uses)
    _lines(console, [("memory", memory_line)] if memory_line else [])
    for held in analysis.memory[:SHOWN_DEVICES]:
        _memory(console, glyphs, held, analysis.run.cwd)
    if len(analysis.memory) > SHOWN_DEVICES:
        console.print(Text(f"and {text.count(len(analysis.memory) - SHOWN_DEVICES, 'more device')}", style="dim"))
    problems = analysis.problems
    for index, finding in enumerate(problems[:SHOWN_FINDINGS], 1):
        console.print()
        _finding(console, index, finding, analysis.run.cwd)
    if len(problems) > SHOWN_FINDINGS:
        hidden = problems[SHOWN_FINDINGS:]
        codes = ", ".join(finding.code for finding in hidden)
        console.print(Text(f"\nand {text.count(len(hidden), 'more finding')}: {codes}"))
    console.print()
    _notes(console, analysis, so_far=so_far)


def _console(file: TextIO, color: bool | None, width: int | None) -> Console:
    if color is None:
        color = file.isatty() and not os.environ.get("NO_COLOR")
    if width is None:
        width = min(Console(file=file).width, MAX_WIDTH) if file.isatty() else DEFAULT_WIDTH
    return Console(
        file=file, width=width, color_system="auto" if color else None, force_terminal=color,
        highlight=False, markup=False, emoji=False, legacy_windows=False,
    )  # fmt: skip


def _can_encode(file: TextIO, characters: str) -> bool:
    try:
        characters.encode(getattr(file, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _headline(console: Console, glyphs: Glyphs, analysis: Analysis, title: str) -> None:
    verdict = analysis.verdict
    run = f" {text.clean(analysis.run.id)} "
    fill = max(2, console.width - len(title) - len(verdict.status) - len(run) - 2)
    style = TONE_STYLE[wording.tone(analysis)]
    rule = Text.assemble(
        (title, "bold"), (verdict.status, style), " ", (f"{glyphs.rule * fill}{run}{glyphs.rule}", "dim")
    )
    console.print(rule, overflow="ellipsis", no_wrap=True)
    console.print(_prose(verdict.headline, style))


# --- the run and the step as a tree ---------------------------------------------------------------


def _run_line(console: Console, glyphs: Glyphs, analysis: Analysis) -> None:
    """What the run's wall time went to, and the findings that lose it beside the ordinary steps."""
    kinds = wording.kinds_of_time(analysis.time)
    if not kinds:
        return
    causes = wording.codes(analysis, kind_of)
    line = Text(f"run {wording.duration(sum(analysis.time.values()))}", style="bold")
    gap = "  "
    for kind in kinds:
        named = f" {glyphs.mark} {', '.join(causes[kind.name])}" if kind.name in causes else ""
        comma = "" if kind is kinds[-1] else ","
        if line.cell_len + len(gap) + len(f"{kind}{named}{comma}") > console.width:
            console.print(line)
            line, gap = Text(), " " * 4
        line.append_text(Text.assemble((f"{gap}{kind}", "dim"), (named, "bold"), (comma, "dim")))
        gap = " "
    console.print(line)


def _step_tree(console: Console, glyphs: Glyphs, analysis: Analysis) -> None:
    step = analysis.step_ms
    assert step is not None
    facts = (
        f"  {wording.spread(step)}, {wording.steps_judged(analysis)},"
        f" {text.count(len(analysis.ranks_captured), 'rank')}"
    )
    console.print(Text.assemble(("step", "bold"), (f" {text.ms(step.mean)}", "bold"), (facts, "dim")))
    if analysis.step_is:
        console.print(Padding(Text(wording.step_is(analysis), style="dim"), (0, 0, 0, 5)))
    causes = wording.codes(analysis, part_of)
    shown = [
        part for part, value in analysis.budget.items() if value >= palette.LEAST_SHARE * step.mean or part in causes
    ]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    unit = text.unit_of(step.mean)  # one for all rows, so that they can be compared
    digits = 1 if step.mean >= 100 * unit.ms else 2
    for part in shown:
        last = part == shown[-1]
        look, value = palette.part(part), analysis.budget[part]
        bar = _bar(glyphs, value / step.mean)
        codes = causes.get(part, [])
        grid.add_row(
            Text.assemble((f"{glyphs.last if last else glyphs.branch} ", "dim"), (look.label, "bold" if codes else "")),
            Text(f"{value / unit.ms:,.{digits}f} {unit.name}"),
            Text(f"{100 * value / step.mean:.1f} %"),
            Text.assemble((bar, look.color), (f" {glyphs.mark} {', '.join(codes)}" if codes else "", "bold")),
        )
        if codes:
            stem = "   " if last else f"{glyphs.pipe} "
            lines = _rank_lines(analysis, part)
            for line in lines:
                twig = glyphs.last if line == lines[-1] else glyphs.branch
                style = "bold" if line.named else "dim"
                grid.add_row(
                    Text.assemble((f"{stem}{twig} ", "dim"), (line.label, style)),
                    Text(f"{line.ms:,.{digits}f} ms", style=style), "",
                    Text(f"{line.said} {line.own_ms:,.{digits}f} ms" if part in WAITING else "", style=style),
                )  # fmt: skip
    console.print(grid)


def _lines(console: Console, lines: list[tuple[str, str]]) -> None:
    if not lines:
        return
    grid = _labelled()
    for label, words in lines:
        grid.add_row(Text(label, style="bold"), _prose(words, "dim" if label == "not counted" else ""))
    console.print()
    console.print(grid)


@dataclass(frozen=True)
class RankLine:
    """What one rank, or the median of the others, spends in a marked part and on its own work; or, where its device was
    traced, how long the others stand still for it."""

    label: str
    ms: float
    said: str
    own_ms: float
    named: bool


def _rank_lines(analysis: Analysis, part: str) -> list[RankLine]:
    """Below a marked part: the ranks that its findings name, the other extreme, the rest; nothing if none is named."""
    table = analysis.budget_by_rank
    named = {
        rank
        for finding in analysis.findings
        if finding.is_problem and part_of(finding.code) == part
        for rank in finding.where.ranks or ()
        if rank in table.index
    }
    if len(table) < 2 or not named:
        return []
    order = list(table[part].sort_values(ascending=False, kind="stable").index)
    picked = order
    if len(order) > SHOWN_RANKS:
        picked = sorted(named)[: SHOWN_RANKS - 1]
        picked.append(order[-1] if order[0] in picked else order[0])
    own, said = tables.own_work_of_budget(table), "own work"
    if analysis.delays is not None:
        own, said = analysis.delays.mean(axis=1).reindex(table.index, fill_value=0.0), "others wait for it"
    lines = [RankLine(f"rank {rank}", table[part][rank], said, own[rank], rank in named) for rank in sorted(picked)]
    others = table.index.difference(picked)
    if len(others):
        label = f"{text.count(len(others), 'other')} (median)"
        lines.append(RankLine(label, table[part][others].median(), said, own[others].median(), False))
    return lines


def _bar(glyphs: Glyphs, share: float) -> str:
    """A bar whose full width is the whole step; whatever is not nothing shows."""
    cells = len(glyphs.bar)
    eighths = round(min(max(share, 0.0), 1.0) * BAR_WIDTH * cells)
    if cells == 1:
        return glyphs.bar * eighths
    rest = eighths % cells
    return glyphs.bar[-1] * (eighths // cells) + (glyphs.bar[rest - 1] if rest else "")


def _memory(console: Console, glyphs: Glyphs, held: DeviceMemory, cwd: str) -> None:
    """What a device's allocator held in the end, and which lines hold most of what is in use."""
    reserved = held.total("reserved")
    facts = f"  {wording.device(held)}, {text.count(held.total('segments'), 'segment')}"
    console.print(Text.assemble(("\nmemory", "bold"), (f" {text.size(reserved)} reserved", "bold"), (facts, "dim")))
    grid = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "right", "left"):
        grid.add_column(justify=justify, no_wrap=True, overflow="ellipsis")
    parts = wording.memory_parts(held)
    for label, value in parts:
        last, in_use = label == parts[-1][0], label == parts[0][0]
        share = value / reserved
        twig = Text.assemble((f"{glyphs.last if last else glyphs.branch} ", "dim"), label)
        grid.add_row(twig, text.size(value), text.percent(100 * share), _bar(glyphs, share))
        if in_use and held.total("requested"):
            stem = "   " if last else f"{glyphs.pipe} "
            shown = held.holders[:SHOWN_HOLDERS]
            for item in shown:
                branch = glyphs.last if item is shown[-1] else glyphs.branch
                name = Text.assemble((f"{stem}{branch} ", "dim"), (wording.holder(item, cwd), "dim"))
                grid.add_row(name, Text(text.size(item.bytes), style="dim"), "", "")
    console.print(grid)


# --- findings -------------------------------------------------------------------------------------


INDENT: Final = 3
"""Of what stands below a finding's number."""
LEAST_WIDTH: Final = 20


def _finding(console: Console, index: int, finding: Finding, cwd: str) -> None:
    head = Text.assemble(
        f"{index}. ", (finding.severity, SEVERITY_STYLE[finding.severity]), "  ", (finding.code, "bold"), "  ",
        wording.unbroken(text.clean(finding.title), KEPT),
    )  # fmt: skip
    first, *others = head.wrap(console, max(console.width - INDENT, LEAST_WIDTH))
    console.print(first)
    for rest in others:
        console.print(Padding(rest, (0, 0, 0, INDENT)))
    grid = _labelled()
    saved = wording.saving(finding)
    if saved:
        sure = f", {how_sure}" if (how_sure := wording.confidence(finding)) else ""
        label = "cost" if wording.verb(finding.gain) == "costs" else "gain"
        grid.add_row(Text(label, style="dim"), _prose(saved + sure))
    place = wording.where(finding.where)
    if place:
        grid.add_row(Text("where", style="dim"), Text(place))
    label = "why"
    for item in finding.evidence:
        grid.add_row(Text(label, style="dim"), _prose(wording.evidence(item)))
        label = ""
    label = "fix"
    for fix in finding.fixes:
        own = fix.gain if fix.gain is not None and fix.gain != finding.gain else None
        title = text.clean(fix.title) + (f" ({wording.gain(own)})" if own and own.ms > 0 else "")
        grid.add_row(Text(label, style="dim"), _prose(title))
        for line in edits.changes(fix, cwd):
            grid.add_row("", Text(f"  {line}", style="bold"))
        label = ""
    console.print(Padding(grid, (0, 0, 0, INDENT)))


def _prose(words: str, style: str = "") -> Text:
    """Text whose numbers stay on one line with their units."""
    return Text(wording.unbroken(words, KEPT), style=style)


def _labelled() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, min_width=5)
    grid.add_column(overflow="fold")
    return grid


# --- the rest -------------------------------------------------------------------------------------


def _notes(console: Console, analysis: Analysis, *, so_far: bool) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, min_width=8)
    grid.add_column(overflow="fold")
    minor = analysis.remarks
    for finding in minor[:SHOWN_INFO]:
        saved = wording.saving(finding)
        uncertain = "not certain: the gain may be zero" if finding.gain.low <= 0 else "not certain"
        remark = f"{finding.code}: {text.clean(finding.title)}" + (f"; {saved}, {uncertain}" if saved else "")
        grid.add_row(Text("info", style="dim"), _prose(remark, "dim"))
    if len(minor) > SHOWN_INFO:
        grid.add_row(Text("info", style="dim"), Text(f"and {len(minor) - SHOWN_INFO} more", style="dim"))
    if not so_far:
        _judged_and_captured(grid, analysis, {finding.code for finding in minor})
    console.print(grid)


def _judged_and_captured(grid: Table, analysis: Analysis, remarked: set[str]) -> None:
    passed = [code for code in analysis.passed if code not in remarked]
    if passed:
        grid.add_row(Text("passed", style="green"), Text(", ".join(passed)))
    for reason, codes in wording.by_reason(analysis.not_judged):
        grid.add_row(Text("unjudged", style="dim"), _prose(f"{', '.join(codes)}: {reason}", "dim"))
    for note in analysis.notes:
        grid.add_row(Text("note", style="dim"), _prose(text.clean(note)))
    grid.add_row(Text("capture", style="dim"), _prose(wording.capture_facts(analysis), "dim"))
    for warning in wording.capture_warnings(analysis):
        grid.add_row(Text("warning", style="yellow"), _prose(warning))
