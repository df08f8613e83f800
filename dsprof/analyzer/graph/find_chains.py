"""Which chains a rank has, of its rows."""

from __future__ import annotations

import pandas as pd

from dsprof.run import RunInfo

from ..align.match import Matches
from ..budget.step_budget import RankTime
from ..columns import RankRows, as_rows
from .chains import RankChains, of_thread
from .events import find_program
from .kernel_chains import kernel_chains
from .phase_chain import phase_chain


def find_chains(
    time: RankTime,
    rows: pd.DataFrame | RankRows,
    collectives: pd.DataFrame,
    matches: Matches,
    run: RunInfo | None = None,
) -> RankChains:
    """Of one rank: `rows` and `time` are its own. Where its device's phases were timed by events, the stream that they
    are on leads; where its kernels were traced, the stream that computes most; else the training thread is its only
    chain."""
    rows = as_rows(rows)
    program = find_program(time.of_thread, rows, matches, run)
    given = time, program, rows.table, collectives, matches, run
    return phase_chain(*given) or kernel_chains(*given) or of_thread(time, program)
