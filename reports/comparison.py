"""What `dsprof compare` prints: on a terminal, and as Markdown for a pull request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dsprof.analyzer.text import clean, ms, unit_of
from dsprof.compare.sides import commits

if TYPE_CHECKING:
    from dsprof.compare.comparison import Changed, RunComparison

HEAD: Final = ("", "A", "B", "change", "of A's step", "95 % interval")
TITLES: Final = (("parts", "Where the step goes"), ("ranks", "Own work of a rank"), ("collectives", "Communication"),
                 ("modules", "Modules"))  # fmt: skip
ESCAPED: Final = str.maketrans(
    {**{character: f"\\{character}" for character in "\\`*_[]|#"}, "<": "&lt;", ">": "&gt;", "@": "@\u200b"}
)


def text(comparison: RunComparison) -> str:
    """For a terminal."""
    lines = [f"{_outcome(comparison)}: {comparison.headline}", *_facts(comparison), ""]
    for title, rows in _tables(comparison):
        widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
        lines.append(title)
        lines += [
            "  " + "  ".join(f"{cell:{'<' if i == 0 else '>'}{widths[i]}}" for i, cell in enumerate(row)).rstrip()
            for row in rows
        ]
        lines.append("")
    lines += [f"new      {code}: {clean(title)}" for code, title in comparison.appeared.items()]
    lines += [f"gone     {code}: {clean(title)}" for code, title in comparison.gone.items()]
    lines += [f"warning  {clean(warning)}" for warning in comparison.warnings]
    return "\n".join(lines).rstrip() + "\n"


def markdown(comparison: RunComparison) -> str:
    """For a pull request."""
    lines = [f"### dsprof: {_outcome(comparison)}", "", f"**{_escape(comparison.headline)}**", ""]
    lines += [f"- {_escape(fact)}" for fact in _facts(comparison)]
    for title, rows in _tables(comparison):
        lines += ["", f"**{title}**", "", _row(rows[0]), "|" + "---|" + "--:|" * (len(HEAD) - 1)]
        lines += [_row(row) for row in rows[1:]]
    changes = [("new finding", comparison.appeared), ("finding gone", comparison.gone)]
    said = [f"- {what} `{code}`: {_escape(title)}" for what, of in changes for code, title in of.items()]
    said += [f"- warning: {_escape(warning)}" for warning in comparison.warnings]
    return "\n".join([*lines, *([""] if said else []), *said]) + "\n"


def _outcome(comparison: RunComparison) -> str:
    return "regression" if comparison.regression else comparison.decision.outcome


def _facts(comparison: RunComparison) -> list[str]:
    decision = comparison.decision
    before, after = comparison.step.before, comparison.step.after
    facts = [
        f"step {ms(before)} -> {ms(after)}, {100 * decision.change:+.1f} % "
        f"[{100 * decision.low:+.1f}, {100 * decision.high:+.1f}]; from {decision.rests_on}"
    ]
    a, b = commits(comparison.before), commits(comparison.after)
    if a or b:
        facts.append(f"commits {a or 'commit not known'} -> {b or 'commit not known'}")
    if comparison.limit is not None:
        accepted = f", with what was accepted: {clean(comparison.accepted)}" if comparison.accepted else ""
        facts.append(f"allowed: {100 * comparison.limit:.3g} % slower{accepted}")
    return facts


def _tables(comparison: RunComparison) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Those that have a row, each with its head."""
    found = []
    for field, title in TITLES:
        changes: tuple[Changed, ...] = getattr(comparison, field)
        rows = [_cells(change, comparison.step.before) for change in changes if change.before or change.after]
        if field == "parts":
            rows.append(_cells(comparison.step, comparison.step.before))
        if rows:
            found.append((title, [HEAD, *rows]))
    return found


def _cells(change: Changed, step_ms: float) -> tuple[str, ...]:
    name = clean(change.name.replace("_", " ") if change.name.isidentifier() else change.name, 60)
    known = "" if change.low is None or change.high is None else f"[{_signed(change.low)}, {_signed(change.high)}]"
    share = _share(change.ms / step_ms) if step_ms else ""
    return name, ms(change.before), ms(change.after), _signed(change.ms), share, known


def _share(share: float) -> str:
    return "0 %" if abs(share) < 0.0005 else f"{100 * share:+.1f} %"


def _signed(value_ms: float) -> str:
    unit = unit_of(value_ms)
    number = unit.number(abs(value_ms))
    return f"{'-' if value_ms < 0 else '+'}{number} {unit.name}" if number != "0" else "0 ms"


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(_escape(cell) for cell in cells) + " |"


def _escape(text: str) -> str:
    """Names come from the job: they must not make a table, a link or HTML, or mention somebody."""
    return clean(text).translate(ESCAPED)
