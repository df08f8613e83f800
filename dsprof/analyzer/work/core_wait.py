"""How long training threads were ready to run and had no core to run on, and in which parts of a step that may lie.

The kernel counts it for each thread (schedstat), and it is read where a step ends. In which part of the step a thread
waited is not seen: it is taken to lie in all that the thread does there by itself, and in its waking up after a wait,
in proportion to how long those take. While it waits for another rank it sleeps, and wants no core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from dsprof import gauges

from ..arrays import Bool, Float
from ..graph.chain_work import chain_work
from ..graph.step_graph import PARTS, WAKE_UP_DELAY
from ..study import Study, once

CORE_WAIT: Final = "core_wait_seconds"
RUNS_IN: Final = ("compute", "optimizer", "data", "pause", "other")
"""Parts of the budget in which the training thread runs, or would."""
WOKEN: Final = PARTS[WAKE_UP_DELAY]
LEAST: Final = 0.05
"""Share of the step from which on ranks lack cores."""
LEAST_MS: Final = 0.1
"""Of a step, that this has to be at least. A thread waits each time that it wakes, on an idle host, too: 6 to
65 us where that was measured, or 0.5 to 4 % of steps of 1.4 to 4.3 ms in which it wakes once to eight times."""


@dataclass(frozen=True, eq=False)
class CoreWait:
    """How long each rank's training thread waited for a core in each ordinary step.

    ms:      [R, S], with `stopped`; 0 on ranks of which it is not known
    stopped: [R, S] ms of it in which nothing of the rank's process could run, though the kernel does not say that it
             waited for a core: as where a quota stops it
    known:   [R] of which ranks it is
    split:   part of RUNS_IN, or WOKEN -> the share of it that lies there, [R, S], as far as that is known
    """

    ms: Float
    stopped: Float
    known: Bool
    split: dict[str, Float]

    def within(self, part: str) -> Float:
        """What of it lies in a part, ms, [R, S]."""
        return self.ms * self.split[part] if part in self.split else np.zeros(self.ms.shape)

    def of_step(self, study: Study) -> Float:
        """Its share of the mean step, mean over the steps, [R]."""
        share: Float = self.ms.mean(axis=1) / max(study.step_ms, 1e-9)
        return share

    def usual(self, study: Study) -> float:
        """The share of the step that at least half of the ranks wait, more than half where their number is odd."""
        each = np.sort(self.of_step(study)[self.known])
        return float(each[(len(each) - 1) // 2]) if len(each) else 0.0


@once
def core_wait(study: Study) -> CoreWait | None:
    """None where devices compute, where it is not known of any rank, and without an ordinary step."""
    waited = study.gauges.spent(CORE_WAIT)
    shape = (len(study.ranks), len(study.step_numbers))
    if waited.shape != shape:
        return None
    known = np.asarray(np.isfinite(waited).all(axis=1), bool)
    if study.on_gpu or not known.any() or not shape[1]:
        return None
    runs = {part: study.work(part) for part in RUNS_IN}
    woken = _woken(study, shape)
    if woken is not None:
        runs[WOKEN] = woken
    whole = np.sum([np.nan_to_num(of) for of in runs.values()], axis=0)
    length = np.nan_to_num(study.gauges.wall_ms, nan=study.step_ms)
    stopped = np.nan_to_num(study.gauges.spent(gauges.STOPPED)) * np.clip(whole / np.maximum(length, 1e-9), 0.0, 1.0)
    found = np.where(known[:, None], np.nan_to_num(waited) + stopped, 0.0)
    return CoreWait(
        ms=np.minimum(found, whole),
        stopped=np.where(known[:, None], stopped, 0.0),
        known=known,
        split={part: np.nan_to_num(of) / np.maximum(whole, 1e-9) for part, of in runs.items()},
    )


def _woken(study: Study, shape: tuple[int, int]) -> Float | None:
    """How much later threads went on than what they waited for had ended, [R, S] ms; None: not known."""
    if study.graph is None:
        return None
    delays = chain_work(study.graph, WOKEN)
    return np.clip(delays, 0.0, None) if delays.shape == shape else None


def lacks_cores(study: Study) -> CoreWait | None:
    """How long ranks wait for cores, where that is so much, of most of them, that it makes steps longer than their work
    is; else None."""
    waited = core_wait(study)
    if waited is None:
        return None
    usual = waited.usual(study)
    return waited if usual >= LEAST and usual * study.step_ms >= LEAST_MS else None


def work_with_cores(study: Study, part: str) -> Float:
    """Time of a budget part, [R, S] ms, without what the threads waited for a core in it: what there is to compare
    between ranks that do different work."""
    waited = core_wait(study)
    return study.work(part) if waited is None else np.clip(study.work(part) - waited.within(part), 0.0, None)
