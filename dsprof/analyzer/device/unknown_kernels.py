"""Whether most of what the devices do beside no computation is in kernels whose kind nothing tells."""

from __future__ import annotations

from collections import Counter
from typing import Final

from dsprof.run import RunInfo

from ..text import clean, percent
from .comparison import Devices

MOSTLY: Final = 0.5
"""Share of the exposed time."""
MATTERS: Final = 0.05
"""Share of the devices' time below which it says nothing."""
MOST_NAMED: Final = 3
LONGEST_NAME: Final = 60


def unknown_kernels(devices: Devices | None, run: RunInfo) -> str:
    """A sentence that says so, and what to do; empty where it is not so, or the job has no rank to communicate with."""
    if devices is None or not ((run.world_size or 0) > 1 or any(len(one.comm) for one in devices.ranks.values())):
        return ""
    names: Counter[str] = Counter()
    for one in devices.ranks.values():
        names.update(one.unknown)
    unknown = sum(names.values())
    exposed = sum(one.exposed_ns for one in devices.ranks.values())
    whole = sum(one.kernel_time_ns for one in devices.ranks.values())
    if unknown <= MOSTLY * exposed or unknown < MATTERS * whole:
        return ""
    told = ", ".join(clean(name, LONGEST_NAME) for name, _ in names.most_common(MOST_NAMED))
    more = ", ..." if len(names) > MOST_NAMED else ""
    return (
        f"{percent(100 * unknown / exposed)} of the time in which the devices do nothing that surely computes is in "
        f"kernels of unknown kind ({told}{more}): if they communicate, import again with --comm-kernels PATTERN, part "
        "of their names; until then this time counts as computation"
    )
