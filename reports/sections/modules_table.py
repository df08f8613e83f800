"""What each module takes."""

from __future__ import annotations

from typing import Final

from dsprof.analyzer.analysis import Analysis

from .. import efficiency
from .section import Block, Column, Maker, Row, Words, table

MOST_MODULES: Final = 40
"""That are listed."""


def _needs(analysis: Analysis) -> str:
    return "" if len(analysis.modules) else "modules are timed at --level full"


def _lead(analysis: Analysis) -> str:
    most = min(MOST_MODULES, len(analysis.modules))
    left = (
        f"; the {most} that take most of their own, of {len(analysis.modules)}" if most < len(analysis.modules) else ""
    )
    return (
        f"Time on the CPU's clock, ms a step, mean over ranks and the steps after the first{left}. Own time is without "
        "the modules called inside. Backward is with the hooks on a module's gradients, such as a framework's "
        "communication, and without what is computed again."
    )


def _blocks(analysis: Analysis) -> list[Block]:
    modules = analysis.modules
    shown = {
        "module": Column("module", code=True),
        "calls": Column("calls", number=True),
        "ms": Column("forward", number=True),
        "own_ms": Column("own", number=True, strong=True),
        "backward_ms": Column("backward", number=True),
        "backward_own_ms": Column("own", number=True, strong=True),
    }
    if (modules["recompute_ms"] > 0).any():
        shown["recompute_ms"] = Column("computed again", number=True)
    if modules["gflop"].notna().any():
        shown["gflop"] = Column("own GFLOP", number=True)
    if len(analysis.ranks_captured) > 1:
        shown["slowest"] = Column("own time on the slowest rank", number=True)
    rows = [
        Row(tuple(str(cells[name]) for name in shown)) for cells in efficiency.module_rows(analysis, MOST_MODULES)
    ]  # fmt: skip
    unseen = efficiency.unseen(analysis)
    words: list[Block] = [Words(unseen)] if unseen else []
    return [table(list(shown.values()), rows, tall=True), *words]


MODULES = Maker("modules", "Modules", _needs, _lead, _blocks)
