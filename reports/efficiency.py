"""How well the devices are used, in words; and which modules were not seen in backward. Of runs at level full."""

from __future__ import annotations

import math
from typing import Any, Final

from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.text import clean, number, percent, ranks
from dsprof.analyzer.work.mfu import Efficiency, Throughput

PREFIXES: Final = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))
MOST_NAMED: Final = 6


def operations(value: float, unit: str = "FLOP") -> str:
    """`7.81 GFLOP`, `23.3 GFLOP/s`."""
    factor, prefix = next(((factor, prefix) for factor, prefix in PREFIXES if value >= factor), (1e3, "k"))
    return f"{number(value / factor)} {prefix}{unit}"


def lines(analysis: Analysis) -> list[tuple[str, str]]:
    """What each line is about, and what it says; empty below level full."""
    found = analysis.efficiency
    if found is None:
        return []
    said = [("operations", _operations(found, analysis)), ("MFU", _mfu(found))]
    said += [(f"{item.what}/s", _throughput(item)) for item in found.throughput]
    said += [("not counted", note) for note in found.notes]
    return [(label, words) for label, words in said if words]


def tiles(analysis: Analysis) -> list[tuple[str, str]]:
    """The main numbers and what they are."""
    found = analysis.efficiency
    if found is None:
        return []
    shown = []
    if found.mfu is not None and found.hfu is not None:
        shown += [("MFU", percent(100 * found.mfu)), ("HFU", percent(100 * found.hfu))]
    if found.flops_a_second is not None:
        shown.append(("model operations", operations(found.flops_a_second, "FLOP/s")))
    for item in found.throughput:
        each = "" if item.a_second is not None else " and rank"
        shown.append((f"{item.what} a second{each}", number(item.each if item.a_second is None else item.a_second)))
    return shown


def _operations(found: Efficiency, analysis: Analysis) -> str:
    if not found.flops:
        return ""
    forward, backward = found.flops["forward"], found.flops["backward"]
    whose = " on each rank, mean" if len(found.counted) > 1 else ""
    words = f"{operations(forward + backward)} a step{whose}: forward {operations(forward)}, backward "
    words += operations(backward)
    if found.flops["recompute"]:
        words += f"; beside it {operations(found.flops['recompute'])} computed again"
    if found.flops["other"]:
        words += f"; {operations(found.flops['other'])} neither (evaluation, the optimizer)"
    if len(found.counted) < len(analysis.ranks_captured):
        words += f"; counted on {ranks(found.counted)}"
    return words


def _mfu(found: Efficiency) -> str:
    if found.mfu is None or found.hfu is None:
        return f"none: {found.why_no_mfu}"
    again = f", {percent(100 * found.hfu)} with what is computed again (HFU)" if found.flops["recompute"] else ""
    return f"{percent(100 * found.mfu)}{again}, of {found.peak}"


def _throughput(item: Throughput) -> str:
    if item.a_second is None:
        return f"{number(item.each)} each rank; {item.how}"
    return f"{number(item.a_second)}; {item.how}"


# --- modules ------------------------------------------------------------------------------------


def module_rows(analysis: Analysis, most: int) -> list[dict[str, Any]]:
    """The modules that take most time of their own, as the cells of a table."""
    table = analysis.modules.head(most)
    several = len(analysis.ranks_captured) > 1
    rows = []
    for item in table.to_dict("records"):
        slowest = f"{number(item['slowest_own_ms'])} on {int(item['slowest_rank'])}" if several else ""
        rows.append(
            {
                "module": clean(item["module"]),
                "calls": f"{item['calls']:,.0f}" if float(item["calls"]).is_integer() else number(item["calls"]),
                **{name: _ms(item[name]) for name in ("ms", "own_ms", "backward_ms", "backward_own_ms")},
                "recompute_ms": _ms(item["recompute_ms"]),
                "gflop": "" if math.isnan(item["gflop"]) else _ms(item["gflop"]),
                "slowest": slowest,
            }
        )
    return rows


def _ms(value: float) -> str:
    return "–" if math.isnan(value) else number(value)


def unseen(analysis: Analysis) -> str:
    """Which modules were not timed in backward, though they took part in it; empty: none."""
    table = analysis.modules
    missing = list(table.loc[table["backward_ms"].isna(), "module"])
    if not missing:
        return ""
    if len(missing) == len(table):
        native = bool(analysis.run.ranks) and all(info.native for info in analysis.run.ranks)
        why = "" if native else ": that needs the native helper, which was not there"
        return f"No module was timed in backward{why}."
    named = ", ".join(clean(name) for name in missing[:MOST_NAMED])
    more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
    return (
        f"Not timed in backward: {named}{more}. They prepared gradients that were not seen to be computed: not needed, "
        "or computed elsewhere."
    )
