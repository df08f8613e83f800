"""What cannot be judged since somebody switched a collector off (`--without`, the fact `without`), or since it could
not be installed (the fact `lost`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from dsprof.schema import LOST_FACT

EVERYTHING: Final = "everything"
"""What the budget and every gain rest on."""

NEEDED_FOR: Final[dict[str, tuple[str, ...]]] = {
    "collectives": (EVERYTHING,),
    "modules": (EVERYTHING,),
    "phases": (EVERYTHING,),
    "optimizers": (EVERYTHING,),
    "process-groups": (EVERYTHING,),
    "engine": (EVERYTHING,),
    "deepspeed": (EVERYTHING,),
    "devices": (EVERYTHING, "compute.throttle", "compute.host-sync"),
    "pipelining": ("pipeline.bubble", "pipeline.imbalance", "rank.straggler", "data.imbalance"),
    "checkpoints": ("checkpoint.stall", "pause.stop"),
    "compilation": ("pause.stop",),
    "sharding": ("comm.small-messages",),
    "tensor-parallelism": ("comm.exposed", "comm.small-messages"),
    "host": ("pause.gc", "data.stall", "pause.stop"),
    "nvml": ("compute.throttle",),
    "host-sync": ("compute.host-sync",),
}
"""Collector -> codes of what cannot be told without it. Others cost a line of evidence, or the MFU."""


def reasons(facts: Mapping[str, Sequence[Mapping[str, Any]]], codes: Iterable[str]) -> dict[str, str]:
    """Of these codes, and of EVERYTHING, those that cannot be judged -> why."""
    off = sorted({str(name) for fact in facts.get("without", []) for name in fact.get("collectors", ())})
    found: dict[str, list[str]] = {}
    for collector in off:
        for code in NEEDED_FOR.get(collector, ()):
            found.setdefault(code, []).append(collector)
    why = {code: _said(collectors) for code, collectors in found.items()}
    for fact in facts.get(LOST_FACT, []):
        if fact.get("decisive"):
            for collector in fact.get("collectors", ()):
                for code in NEEDED_FOR.get(str(collector), ()):
                    why.setdefault(code, f"{fact.get('what')} ({fact.get('because')})")
    return {code: why[code] for code in (*codes, EVERYTHING) if code in why}


def _said(collectors: Sequence[str]) -> str:
    what = "collector {} was" if len(collectors) == 1 else "collectors {} were"
    return f"the {what.format(', '.join(collectors))} switched off (--without)"
