"""What a section of a report is made of: blocks of words, tables and figures, whichever report shows them.

All strings are ready to be shown: names from the run are on one line and without control characters. None is markup.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from dsprof.analyzer.analysis import Analysis, Tone

from ..edits import Edit

# --- blocks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Words:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Heading:
    """A title inside a section."""

    text: str


@dataclass(frozen=True)
class Figure:
    """A plotly figure, as the report has it.

    name:  unique in a report
    label: what it is, for somebody who cannot see it
    draw:  makes it, once, when somebody wants to see it
    note:  which part of the data it shows, where that is not all of it
    """

    name: str
    label: str
    draw: Callable[[], Any] = field(compare=False)

    @cached_property
    def drawn(self) -> Any:
        return self.draw()

    @property
    def note(self) -> str:
        note: str = self.drawn.layout.meta["note"]
        return note

    @property
    def height(self) -> int:
        """Pixels."""
        return int(self.drawn.layout.height)

    def plain(self) -> dict[str, Any]:
        """The figure as JSON; its title and note stand beside it instead. meta: which step it is of, if of one."""
        import json

        plain: dict[str, Any] = json.loads(self.drawn.to_json())
        plain["layout"].pop("title", None)
        meta = plain["layout"].pop("meta", {})
        if "step" in meta:
            plain["layout"]["meta"] = {"step": meta["step"]}
        return plain


@dataclass(frozen=True)
class Column:
    """Of a table. number: to the right; code: in a typewriter's face; strong: the cells that matter."""

    title: str
    number: bool = False
    code: bool = False
    strong: bool = False
    soft: bool = False


@dataclass(frozen=True)
class Row:
    """Of a table. swatch: the colour that stands for it in a figure; codes: the findings that are about it.

    share: percent of the whole, for whatever draws it as a bar
    below: rows that say more of this one
    """

    cells: tuple[str, ...]
    swatch: str = ""
    marked: bool = False
    bad: bool = False
    codes: tuple[str, ...] = ()
    share: float | None = None
    below: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Table:
    """tall: scrolls by itself; bare: its columns need no titles; wide: needs more room than a terminal has."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    tall: bool = False
    bare: bool = False
    wide: bool = False


@dataclass(frozen=True)
class Share:
    """Of a stacked bar: `percent` of the whole, in `color`, with text in `ink`."""

    label: str
    percent: float
    color: str
    ink: str
    told: str


@dataclass(frozen=True)
class Stack:
    """A stacked bar whose numbers are in the table that follows it."""

    label: str
    shares: tuple[Share, ...]


@dataclass(frozen=True)
class Said:
    """Lines, each with what it is about."""

    lines: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Tiles:
    """The main numbers, each with what it is."""

    values: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Codes:
    """Codes of findings, with what holds for all of them."""

    label: str
    codes: tuple[str, ...]
    reason: str = ""
    good: bool = False


@dataclass(frozen=True)
class FixCard:
    """A change to make. edits: what to write, and where; diff: the same as a unified diff of the user's file, where it
    could be made; applied_by: what is typed to try it without an edit; gain: where it is another one than its
    finding's."""

    title: str
    edits: tuple[Edit, ...]
    diff: str
    applied_by: str
    gain: str


@dataclass(frozen=True)
class FindingCard:
    """A finding.

    id:     unique in a report, its code where it is the first of it
    saving: what fixing it saves, and `how` that is known; gain: both in short, the interval in brackets
    doubt:  of a remark, how sure its gain is
    """

    id: str
    code: str
    severity: str
    title: str
    color: str
    saving: str
    how: str
    gain: str
    doubt: str
    measured: str
    confidence: str
    where: str
    fixes: tuple[FixCard, ...]
    evidence: Table | None
    also: Said | None
    """Evidence in words."""


@dataclass(frozen=True)
class Folded:
    """Blocks that are shown on demand."""

    summary: str
    blocks: tuple[Block, ...]


Block = Words | Heading | Figure | Table | Stack | Said | Tiles | Codes | FindingCard | Folded

# --- sections -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Section:
    """id: what a link to it ends in; lead: what it shows, in a sentence or two."""

    id: str
    title: str
    lead: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Maker:
    """One section that reports have.

    needs: why a run has none; empty: it has one
    lead, blocks: what it says
    """

    id: str
    title: str
    needs: Callable[[Analysis], str]
    lead: Callable[[Analysis], str]
    blocks: Callable[[Analysis], Sequence[Block]]

    def make(self, analysis: Analysis) -> Section | None:
        """The section; None where there is nothing that it could show."""
        if self.needs(analysis):
            return None
        blocks = tuple(self.blocks(analysis))
        return Section(self.id, self.title, self.lead(analysis), blocks) if blocks else None


@dataclass(frozen=True)
class Head:
    """What stands above all sections."""

    name: str
    run: str
    status: str
    tone: Tone
    headline: str
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    tiles: Tiles
    step_is: str


@dataclass(frozen=True)
class Report:
    head: Head
    sections: tuple[Section, ...]

    @property
    def figures(self) -> dict[str, Figure]:
        """Those of all sections, by name."""
        return {block.name: block for section in self.sections for block in flat(section.blocks)
                if isinstance(block, Figure)}  # fmt: skip


def kind(value: object) -> str:
    """What a block is called in templates and in JSON."""
    return type(value).__name__.lower()


def flat(blocks: Sequence[Block]) -> list[Block]:
    """The blocks, and those that are folded in them."""
    return [
        one for block in blocks for one in ((block, *flat(block.blocks)) if isinstance(block, Folded) else (block,))
    ]


def without_figures(blocks: Sequence[Block]) -> tuple[Block, ...]:
    """What is left where no figure can be drawn: no figure, and no title that nothing else stood below."""
    left = [block for block in blocks if not isinstance(block, Figure)]
    below = [*left[1:], None][: len(left)]
    return tuple(
        block for block, next_one in zip(left, below, strict=True)
        if not isinstance(block, Heading) or not (next_one is None or isinstance(next_one, Heading))
    )  # fmt: skip


def always(_: Analysis) -> str:
    """The `needs` of a section that every run has."""
    return ""


def table(
    columns: Sequence[Column], rows: Sequence[Row], *, tall: bool = False, bare: bool = False, wide: bool = False
) -> Table:
    return Table(tuple(columns), tuple(rows), tall, bare, wide)
