"""The verdict on a terminal: what is slow, what to change, where the step goes; 80 columns, readable as plain text too.

It shows the same list of sections as the other reports, as far as they are words and short tables: the headline, the
fix of the worst finding, the run and the step, then each finding.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TextIO

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dsprof.analyzer import text
from dsprof.analyzer.analysis import Analysis

from . import wording
from .sections import report_of
from .sections.findings import FINDINGS
from .sections.judged import JUDGED
from .sections.memory_tables import ALLOCATORS, USE
from .sections.on_devices import DEVICE_TIME, EFFICIENCY
from .sections.section import Codes, FindingCard, FixCard, Folded, Heading, Report, Row, Said, Section, flat
from .sections.section import Table as TableBlock
from .sections.time_and_step import STEP, TIME

WIDTH: Final = 80
BAR_WIDTH: Final = 20
SHOWN_FINDINGS: Final = 5
SHOWN_INFO: Final = 3
SHOWN_DEVICES: Final = 2
LISTED_WITHOUT_STEP: Final = 5
"""Codes that could not be judged for one reason."""
SHOWN_ROWS: Final = 5
"""Of a table that is no tree."""
KEPT = "\ue000"
"""A blank at which rich breaks no line, as it does at every space that Unicode has."""
SECTIONS: Final = tuple(maker.id for maker in (FINDINGS, STEP, TIME, DEVICE_TIME, EFFICIENCY, USE, ALLOCATORS, JUDGED))
"""Those of the list that are words and short tables."""

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

    `color`: None follows the terminal and NO_COLOR. `width`: None takes the terminal's, at most 80.
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
    report = report_of(analysis, SECTIONS)
    section = {one.id: one for one in report.sections}
    problems, remarks = _cards(section.get(FINDINGS.id))
    _headline(console, glyphs, report, "so far: " if so_far else "[dsprof] verdict: ")
    if problems and problems[0].fixes:
        grid = _labelled(0)
        _fix(grid, problems[0].fixes[0], "fix")
        console.print(grid)
    if analysis.time or analysis.step_ms is not None:
        console.print()
    _run_line(console, glyphs, analysis, section.get(TIME.id))
    _step(console, glyphs, analysis, section.get(STEP.id))
    for maker in (DEVICE_TIME, EFFICIENCY):
        if maker.id in section:
            _said(console, [one for one in section[maker.id].blocks if isinstance(one, Said)])
    if USE.id in section:
        _said(console, [Said((("memory", section[USE.id].lead.removesuffix(".")),))])
    _devices_memory(console, glyphs, section.get(ALLOCATORS.id))
    for index, card in enumerate(problems[:SHOWN_FINDINGS], 1):
        console.print()
        _finding(console, index, card)
    if len(problems) > SHOWN_FINDINGS:
        hidden = problems[SHOWN_FINDINGS:]
        codes = ", ".join(card.code for card in hidden)
        console.print(Text(f"\nand {text.count(len(hidden), 'more finding')}: {codes}"))
    _rest(console, analysis, section.get(JUDGED.id), remarks, so_far=so_far)


def _cards(section: Section | None) -> tuple[list[FindingCard], list[FindingCard]]:
    """The findings that are problems, and the remarks."""
    blocks = () if section is None else section.blocks
    folded = flat([block for block in blocks if isinstance(block, Folded)])
    problems, remarks = ([one for one in some if isinstance(one, FindingCard)] for some in (blocks, folded))
    return problems, remarks


def _console(file: TextIO, color: bool | None, width: int | None) -> Console:
    if color is None:
        color = file.isatty() and not os.environ.get("NO_COLOR")
    if width is None:
        width = min(Console(file=file).width, WIDTH) if file.isatty() else WIDTH
    return Console(
        file=file, width=width, color_system="auto" if color else None, force_terminal=color,
        highlight=False, markup=False, emoji=False, legacy_windows=False, force_jupyter=False,
    )  # fmt: skip


def _can_encode(file: TextIO, characters: str) -> bool:
    try:
        characters.encode(getattr(file, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _headline(console: Console, glyphs: Glyphs, report: Report, title: str) -> None:
    head = report.head
    run = f" {head.run} "
    fill = max(2, console.width - len(title) - len(head.status) - len(run) - 2)
    style = TONE_STYLE[head.tone]
    rule = Text.assemble((title, "bold"), (head.status, style), " ", (f"{glyphs.rule * fill}{run}{glyphs.rule}", "dim"))
    console.print(rule, overflow="ellipsis", no_wrap=True)
    console.print(_prose(head.headline, style))


# --- the run and the step as a tree ---------------------------------------------------------------


def _run_line(console: Console, glyphs: Glyphs, analysis: Analysis, section: Section | None) -> None:
    """What the run's wall time went to, and the findings that lose it beside the ordinary steps."""
    rows = [] if section is None else _rows(section.blocks)
    if not rows:
        return
    line = Text(f"run {wording.duration(sum(analysis.time.values()))}", style="bold")
    gap = "  "
    for row in rows:
        share = f" ({row.cells[2]})" if row is rows[0] else ""
        kind = f"{row.cells[0]} {row.cells[1]}{share}"
        named = f" {glyphs.mark} {', '.join(row.codes)}" if row.codes else ""
        comma = "" if row is rows[-1] else ","
        if line.cell_len + len(gap) + len(f"{kind}{named}{comma}") > console.width:
            console.print(line)
            line, gap = Text(), " " * 4
        line.append_text(Text.assemble((f"{gap}{kind}", "dim"), (named, "bold"), (comma, "dim")))
        gap = " "
    console.print(line)


def _step(console: Console, glyphs: Glyphs, analysis: Analysis, section: Section | None) -> None:
    step = analysis.step_ms
    if step is None:
        return
    ranks = text.count(len(analysis.ranks_captured), "rank")
    facts = f"  {wording.spread(step)}, {wording.steps_judged(analysis)}, {ranks}"
    console.print(_prose_of(("step", "bold"), (f" {text.ms(step.mean)}", "bold"), (facts, "dim")))
    if analysis.step_is:
        console.print(Padding(Text(wording.step_is(analysis), style="dim"), (0, 0, 0, 5)))
    if section is not None:
        _tree(console, glyphs, _rows(section.blocks))


def _rows(blocks: Iterable[object]) -> list[Row]:
    """Those of the first table."""
    return next((list(block.rows) for block in blocks if isinstance(block, TableBlock)), [])


def _tree(console: Console, glyphs: Glyphs, rows: Sequence[Row]) -> None:
    """Parts of a whole: name, amount, share, a bar as wide as the share, and the findings about it; below a part what
    says more of it."""
    grid = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "right"):
        grid.add_column(justify=justify, no_wrap=True, overflow="ellipsis")
    grid.add_column(justify="left")  # so many findings are named in two lines, rather than numbers cut off
    for row in rows:
        last = row is rows[-1]
        name, amount, share = row.cells[:3]
        marked = f" {glyphs.mark} {', '.join(row.codes)}" if row.codes else ""
        grid.add_row(
            Text.assemble((f"{glyphs.last if last else glyphs.branch} ", "dim"), (name, "bold" if marked else "")),
            Text(amount), Text(share),
            Text.assemble((_bar(glyphs, (row.share or 0.0) / 100), row.swatch), (marked, "bold")),
        )  # fmt: skip
        stem = "   " if last else f"{glyphs.pipe} "
        for one in row.below:
            twig = glyphs.last if one is row.below[-1] else glyphs.branch
            style = "bold" if one.marked else "dim"
            name, amount, share, said = one.cells
            grid.add_row(
                Text.assemble((f"{stem}{twig} ", "dim"), (name, style)), Text(amount, style=style), Text(share),
                Text(said, style=style),
            )  # fmt: skip
    console.print(grid)


def _bar(glyphs: Glyphs, share: float) -> str:
    """A bar whose full width is the whole."""
    cells = len(glyphs.bar)
    eighths = round(min(max(share, 0.0), 1.0) * BAR_WIDTH * cells)
    if cells == 1:
        return glyphs.bar * eighths
    rest = eighths % cells
    return glyphs.bar[-1] * (eighths // cells) + (glyphs.bar[rest - 1] if rest else "")


# --- lines, and memory of devices -----------------------------------------------------------------


def _said(console: Console, blocks: Sequence[Said]) -> None:
    grid = _labelled()
    for label, words in (line for block in blocks for line in block.lines):
        grid.add_row(Text(label, style="bold"), _prose(words, "dim" if label == "not counted" else ""))
    console.print()
    console.print(grid)


def _devices_memory(console: Console, glyphs: Glyphs, section: Section | None) -> None:
    """What the devices' allocators held in the end, and which lines hold most of what is in use."""
    devices = 0
    for block in () if section is None else section.blocks:
        devices += isinstance(block, Heading)
        if devices > SHOWN_DEVICES:
            continue
        if isinstance(block, Heading):
            console.print(Text.assemble(("\nmemory", "bold"), f"  {block.text}"))
        elif isinstance(block, TableBlock) and not block.wide:
            if block.bare:
                _tree(console, glyphs, block.rows)
            else:
                _table(console, block)
    if devices > SHOWN_DEVICES:
        console.print(Text(f"and {text.count(devices - SHOWN_DEVICES, 'more device')}", style="dim"))


def _table(console: Console, block: TableBlock) -> None:
    """The first rows of a table below each other."""
    grid = Table.grid(padding=(0, 2))
    for column in block.columns:
        grid.add_column(justify="right" if column.number else "left", no_wrap=True, overflow="ellipsis")
    grid.add_row(*(Text(column.title, style="dim") for column in block.columns))
    for row in block.rows[:SHOWN_ROWS]:
        grid.add_row(*map(Text, row.cells))
    console.print(Padding(grid, (0, 0, 0, INDENT)))


# --- findings -------------------------------------------------------------------------------------


INDENT: Final = 3
"""Of what stands below a finding's number."""
LEAST_WIDTH: Final = 20


def _finding(console: Console, index: int, card: FindingCard) -> None:
    """A finding; the first fix of the first one stands below the headline."""
    head = Text.assemble(
        f"{index}. ", (card.severity, SEVERITY_STYLE[card.severity]), "  ", (card.code, "bold"), "  ",
        wording.unbroken(card.title, KEPT),
    )  # fmt: skip
    first, *others = head.wrap(console, max(console.width - INDENT, LEAST_WIDTH))
    console.print(first)
    for rest in others:
        console.print(Padding(rest, (0, 0, 0, INDENT)))
    grid = _labelled()
    for label, words in (
        ("gain", ", ".join(filter(None, (card.gain, card.confidence)))),
        ("", card.measured),
        ("where", card.where),
    ):
        if words:
            label = "cost" if words.startswith("costs") else label
            grid.add_row(Text(label, style="dim"), _prose(words))
    label = "why"
    for metric, value, *expected in _evidence(card):
        told = f"{metric}: {value}" + (f" (expected {expected[0]})" if expected and expected[0] else "")
        grid.add_row(Text(label, style="dim"), _prose(told))
        label = ""
    label = "fix"
    for fix in card.fixes:
        if index == 1 and fix is card.fixes[0]:
            grid.add_row(Text(label, style="dim"), Text("as said above"))
        else:
            _fix(grid, fix, label)
        label = ""
    console.print(Padding(grid, (0, 0, 0, INDENT)))


def _evidence(card: FindingCard) -> list[tuple[str, ...]]:
    numbers = [] if card.evidence is None else [row.cells for row in card.evidence.rows]
    return [*numbers, *(() if card.also is None else card.also.lines)]


def _fix(grid: Table, fix: FixCard, label: str) -> None:
    grid.add_row(Text(label, style="dim"), _prose(fix.title + (f" ({fix.gain})" if fix.gain else "")))
    for edit in fix.edits:
        grid.add_row("", Text(f"  {edit}", style="bold"))


def _prose(words: str, style: str = "") -> Text:
    """Text whose numbers stay on one line with their units."""
    return Text(wording.unbroken(words, KEPT), style=style)


def _prose_of(*parts: tuple[str, str]) -> Text:
    return Text.assemble(*((wording.unbroken(words, KEPT), style) for words, style in parts))


def _labelled(least: int = 5) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, min_width=least)
    grid.add_column(overflow="fold")
    return grid


# --- the rest -------------------------------------------------------------------------------------


def _rest(
    console: Console, analysis: Analysis, judged: Section | None, remarks: Sequence[FindingCard], *, so_far: bool
) -> None:
    """Remarks, what was judged, and how well it was captured."""
    grid = _labelled(8)
    for card in remarks[:SHOWN_INFO]:
        remark = f"{card.code}: {card.title}" + (f"; {card.gain}, {card.doubt}" if card.doubt else "")
        grid.add_row(Text("info", style="dim"), _prose(remark, "dim"))
    if len(remarks) > SHOWN_INFO:
        grid.add_row(Text("info", style="dim"), Text(f"and {len(remarks) - SHOWN_INFO} more", style="dim"))
    if not so_far:
        codes = [block for block in (() if judged is None else judged.blocks) if isinstance(block, Codes)]
        _judged_and_captured(grid, analysis, codes, {card.code for card in remarks})
    if grid.row_count:
        console.print()
        console.print(grid)


def _judged_and_captured(grid: Table, analysis: Analysis, judged: Sequence[Codes], remarked: set[str]) -> None:
    """In one line, unless something is wrong with the capture or the run."""
    passed = [code for block in judged if block.good for code in block.codes if code not in remarked]
    for block in judged:
        if not block.good:
            # That nothing can be judged without a step goes without a list of all there is.
            few = analysis.step_ms is not None or len(block.codes) <= LISTED_WITHOUT_STEP
            codes = ", ".join(block.codes) if few else text.count(len(block.codes), "check")
            grid.add_row(Text("unjudged", style="dim"), _prose(f"{codes}: {block.reason}", "dim"))
    for note in analysis.notes:
        grid.add_row(Text("note", style="dim"), _prose(text.clean(note)))
    warnings = wording.capture_warnings(analysis)
    if analysis.is_sound and not warnings:
        told = f"{text.count(len(passed), 'check')} passed; {wording.capture_facts(analysis, brief=True)}"
        grid.add_row(Text("capture", style="dim"), _prose(told, "dim"))
        return
    if passed:
        grid.add_row(Text("passed", style="green"), Text(", ".join(passed)))
    grid.add_row(Text("capture", style="dim"), _prose(wording.capture_facts(analysis), "dim"))
    for warning in warnings:
        grid.add_row(Text("warning", style="yellow"), _prose(warning))
