"""What `dsprof whatif` prints: a row for each question."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dsprof.analyzer.memory.rank_memory import in_words, most
from dsprof.analyzer.text import aligned, count, ms, percent, unit_of

if TYPE_CHECKING:
    from dsprof.analyzer.ask import Answered, Answers

HEAD = ("asked", "step now", "then", "saved a step, with 95 % interval")


def render(answers: Answers) -> str:
    """The table, what changes hold of memory where they do, and what it rests on."""
    rows = [HEAD, *(_row(answers.step_ms, row) for row in answers.rows)]
    lines = []
    for line, notes in zip(aligned(rows), [(), *(answered.notes for answered in answers.rows)], strict=True):
        lines += [line, *(f"    {note}" for note in notes)]
    held = answers.held_out
    rests = f"replayed: {count(answers.steps, 'step')}"
    if held is not None:
        rests += (
            f"; steps held out were missed by {percent(100 * held.missed)}, and half of the steps differs from the "
            f"other by {percent(100 * held.differs)}"
        )
    return "\n".join([*lines, *_memory(answers), "", rests]) + "\n"


def _memory(answers: Answers) -> list[str]:
    """A line for each row that holds memory: of the rank that would take most."""
    told = [(" + ".join(row.asked), worst) for row in answers.rows if (worst := most(row.memory)) is not None]
    if not told:
        return []
    width = max(len(asked) for asked, _ in told)
    return ["", "most memory of a rank", *(f"{asked:{width}}  {in_words(worst)}" for asked, worst in told)]


def _row(step_ms: float, row: Answered) -> tuple[str, str, str, str]:
    asked = " + ".join(row.asked)
    gain = row.gain
    if gain is None:
        return asked, ms(step_ms), "?", f"not predicted: {row.reason}"
    unit = unit_of(max(abs(gain.ms), abs(gain.low), abs(gain.high)))
    share = ("-" if gain.percent < 0 else "") + percent(abs(gain.percent))
    saved = f"{unit.number(gain.ms)} {unit.name} ({share}) [{unit.number(gain.low)}, {unit.number(gain.high)}]"
    return asked, ms(step_ms), ms(step_ms - gain.ms), saved
