"""One line a rank: how it ran and ended, its mean step and own work."""

from __future__ import annotations

from dsprof.analyzer.analysis import Analysis, own_work_of_budget
from dsprof.analyzer.text import clean
from dsprof.run import last_processes

from .. import palette, wording
from .section import Block, Column, Maker, Row, always, table

LEAST_MS = 0.005


def _blocks(analysis: Analysis) -> list[Block]:
    by_rank = analysis.budget_by_rank
    parts = [part for part in by_rank if (by_rank[part] > LEAST_MS).any()]
    own = own_work_of_budget(by_rank)
    infos = {info.rank: info for info in analysis.run.ranks}
    exits = {item.rank: item for item in last_processes(analysis.run.exits)}
    everyone = sorted({*by_rank.index, *infos, *exits, *analysis.ranks_captured, *analysis.missing_ranks})
    host_of = {rank: clean(found.host) for rank in everyone if (found := infos.get(rank) or exits.get(rank))}
    hosts, blamed = any(host_of.values()), analysis.blamed_rank
    rows = []
    for rank in everyone:
        if rank in by_rank.index:
            mine = by_rank.loc[rank]
            times = [f"{mine.sum():,.1f}", f"{own[rank]:,.1f}", *(f"{mine[part]:,.1f}" for part in parts)]
        else:
            missing = rank not in analysis.ranks_captured
            times = ["not captured" if missing else "no complete step", *[""] * (1 + len(parts))]
        info, end = infos.get(rank), exits.get(rank)
        last = "" if info is None else str(info.last_step) if info.last_step >= 0 else "none"
        records = "" if info is None else f"{info.records:,}"
        ended = [wording.ended(end) if end is not None else ""] if exits else []
        cells = (str(rank), *([host_of.get(rank, "")] if hosts else []), *times, last, records, *ended)
        rows.append(Row(cells, marked=rank == blamed, bad=end is not None and end.status != 0))
    columns = [
        Column("rank"), *([Column("host")] if hosts else []), Column("step", number=True),
        Column("own work", number=True), *(Column(clean(palette.part(part).label), number=True) for part in parts),
        Column("last step", number=True), Column("records", number=True), *([Column("ended")] if exits else []),
    ]  # fmt: skip
    return [table(columns, rows, tall=True)]


def _lead(analysis: Analysis) -> str:
    if analysis.step_ms is None:
        return ""
    bold = " The rank that the others wait for is in bold." if analysis.blamed_rank is not None else ""
    return f"Times in ms, mean of the ordinary steps.{bold}"


RANKS = Maker("ranks", "Ranks", always, _lead, _blocks)
