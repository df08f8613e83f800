"""One program of the random tester, from its text to what is wrong with it."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import usage_engine
from ranks import RankFailed, Ranks
from usage_plain import judge
from usage_program import Program


def fault_of(program: Program, ranks: Ranks, within: Path) -> str | None:
    """What `ranks` did wrong in `program`; None if all of it ended right or refused by name.

    A rank that hangs, that died, or that cannot make its engine is a fault, too. Files are `within`, and gone after.
    """
    folder = Path(tempfile.mkdtemp(dir=within))
    try:
        made = program.configuration
        return judge(program, ranks.run(made.world_size, usage_engine.run, program, str(folder)))
    except RankFailed as error:
        return "\n".join([str(error), *usage_engine.progress(folder)])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
