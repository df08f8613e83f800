"""In which lines of the script a rank's step goes, and in which it differs from its peers."""

from __future__ import annotations

from typing import Final

from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.text import ms
from dsprof.analyzer.text import ranks as ranks_in_words

from .. import flame
from .section import Block, Column, Figure, Maker, Row, table

MOST_LINES: Final = 12


def _needs(analysis: Analysis) -> str:
    return "" if analysis.stack_difference is not None else "no rank's stack was sampled"


def _lead(analysis: Analysis) -> str:
    found = analysis.stack_difference
    assert found is not None
    who = ranks_in_words(found.ranks)
    if not found.others:
        return (
            f"Samples of the training thread of {who}, while it waits for nobody. A line stands below the one that "
            "calls it, as wide as the time in it and in what it calls."
        )
    return (
        f"Samples of the training threads, while they wait for nobody: {who} beside {ranks_in_words(found.others)}. A "
        f"line stands below the one that calls it, as wide as the time that {who} spends in it and in what it calls; "
        "follow the red ones down to where the difference is."
    )


def _blocks(analysis: Analysis) -> list[Block]:
    found = analysis.stack_difference
    if found is None:
        return []
    figure = Figure("stacks", f"flame graph of {flame.whom(found)}", lambda: flame.difference(found))
    # The innermost lines of those that differ: what calls them differs by as much, and says less.
    told = [node for node in found.nodes if node.differs or not found.others]
    inner = [
        node for node in told
        if not any(len(other.path) == len(node.path) + 1 and other.path[:-1] == node.path
                   and abs(other.more_ms) > flame.MOST_OF * abs(node.more_ms) for other in told)
    ]  # fmt: skip
    inner = sorted(inner, key=lambda node: -abs(node.more_ms))[:MOST_LINES]
    rows = [
        Row(
            (
                flame.short(node.path[-1]), _called_by(node.path), ms(node.ms),
                *([ms(node.others_ms), f"{'+' if node.more_ms > 0 else '−'}{ms(abs(node.more_ms))}"] if found.others
                  else []),
            ),
            swatch=(flame.LOOKS[flame.look_of(node, found)] if found.others else flame.ALONE)[1],
        )
        for node in inner
    ]  # fmt: skip
    if not rows:
        return [figure]
    columns = [
        Column("line", code=True, strong=True), Column("called by", code=True, soft=True),
        Column(f"on {ranks_in_words(found.ranks)}", number=True),
    ]  # fmt: skip
    if found.others:
        columns += [Column(f"on {ranks_in_words(found.others)}", number=True), Column("difference", number=True)]
    return [figure, table(columns, rows)]


def _called_by(path: tuple[str, ...]) -> str:
    """The line of the script that calls the last one, or else whatever does."""
    above = path[:-1]
    lines = [frame for frame in above if frame.rpartition(":")[2].isdigit()]
    return flame.short((lines or above or ("",))[-1])


LINES = Maker("stacks", "Time by line of code", _needs, _lead, _blocks)
