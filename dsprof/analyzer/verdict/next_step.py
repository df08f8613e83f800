"""What to type next where a verdict is inconclusive: the one thing that would settle it, as a command."""

from __future__ import annotations

import re
from typing import Final

from dsprof.run import RunInfo

from ..analysis import Verdict

NOT_YET: Final = Verdict("inconclusive", "")
"""Of an analysis from which none has been drawn."""
COMMAND: Final = re.compile(r"`dsprof [a-z]")
DEEP: Final = "`dsprof run --deep 10:13` traces the kernels of three steps"
ORDINARY: Final = "`dsprof run --deep 10:13` times the other steps, too"
AGAIN: Final = "run it again with `dsprof run`"
EVERY_RANK: Final = f"{AGAIN}, all of its ranks on all of its hosts"
HANG: Final = "run it again with `dsprof run --hang-timeout 60`, which says which rank the others wait for"


def inconclusive(text: str, settles: str) -> Verdict:
    """text: what is not known; settles: what would tell, with a command. It is left out where the text has one."""
    return Verdict("inconclusive", text if COMMAND.search(text) else f"{text}: {settles}")


def look_closer(run: RunInfo) -> str:
    """A capture that holds more than this one."""
    if run.imported:
        return f"{AGAIN}, which records more than traces of other tools hold"
    if any(fact.get("fact") == "device" for fact in run.facts):
        return DEEP
    if run.level != "full":
        return "`dsprof run --level full` also tells what each module takes, and samples the stacks of all ranks"
    return "`dsprof run` of several times as many steps tells it better"
