"""One job of a comparison, from its run folder."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsprof.run import RunError, RunFolder
from dsprof.schema import TRIAL_FILE

from .losses import Losses


@dataclass(frozen=True)
class Trial:
    """step_ms:  mean of the ordinary steps; None: there was none, or the job failed, and `why` says so
    failed:   the job did; where it ended well and has no `step_ms`, nothing is known of the change
    whole_ms: mean of all steps, irregular ones included
    lost:     knobs that were not applied, as warnings say it
    losses:   of each rank by step, as far as they were captured
    """

    step_ms: float | None
    why: str
    lost: tuple[str, ...] = ()
    whole_ms: float | None = None
    losses: Losses = field(default_factory=dict)
    failed: bool = False


def read_trial(folder: Path) -> Trial | None:
    """What became of the job in a run folder; None: there is none that has ended."""
    run = RunFolder(folder)
    try:
        info: dict[str, Any] = json.loads(run.run_json.read_text())
    except (OSError, ValueError, RunError):
        return None
    if info.get("status") is None:
        return None
    try:
        found: dict[str, Any] = json.loads(run.findings_json.read_text())
    except (OSError, ValueError):
        ended = f"it ended with status {info['status']}"
        return Trial(None, f"{ended} and could not be analyzed", failed=info["status"] != 0)
    if info["status"] != 0:
        return Trial(None, f"it ended with status {info['status']}: {found['verdict']['headline']}", failed=True)
    warnings = found["capture"]["warnings"]
    lost = tuple(warning for warning in warnings if warning.startswith("--set ") and "was not applied" in warning)
    step_ms = (found["run"]["step_ms"] or {}).get("mean")
    why = "" if step_ms else "none of its steps is ordinary: run more steps"
    return Trial(step_ms, why, lost, found["run"].get("whole_step_ms"), _losses(folder))


def _losses(folder: Path) -> Losses:
    found: dict[int, dict[int, float]] = {}
    for path in folder.glob(TRIAL_FILE.format(rank="*", pid="*")):
        with suppress(OSError, ValueError, KeyError, TypeError):  # they are then not compared
            told = json.loads(path.read_text())
            found[int(told["rank"])] = {int(step): float(loss) for step, loss in told["losses"]}
    return found
