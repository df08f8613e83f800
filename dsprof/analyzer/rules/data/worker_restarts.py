"""DataLoader workers that end with each epoch and are started anew: what that costs, and what keeping them saves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ...candidate import Candidate, Excess, Price
from ...effect import Effect
from ...finding import Evidence, Finding, Where
from ...price.excess import excess_gain
from ...study import Study
from ...text import count, ms
from ..base import NotJudged
from .loader import Fact, loader_fact, loader_fix, loading_rows, restarts


@dataclass(frozen=True)
class Restarted:
    """Workers that are started anew. anew: `restarts` of their loader; fact: what that said of itself; costs: ms by
    step."""

    anew: pd.DataFrame
    fact: Fact
    costs: pd.Series
    excess: Excess


def restarted(study: Study) -> Restarted | None:
    """Workers of the training's loader that end with each epoch and are started anew, where epochs are short."""
    anew = restarts(study)
    if anew.empty:
        return None
    rank, number = (int(key) for key in anew.groupby(["rank", "number"])["excess_ms"].sum().idxmax())
    anew = anew[anew["number"] == number]
    fact = loader_fact(study, rank, number) or {}
    by_step = anew.groupby("step")["excess_ms"]
    # Ranks that communicate wait for the last of them.
    together = study.collectives["step"].isin(study.step_numbers).any()
    costs = by_step.max() if together else by_step.sum() / len(study.ranks)
    excess = Excess(costs.to_numpy(np.float64), "occasion", less_ms=_first_batches(study, fact, anew))
    return Restarted(anew, fact, costs, excess)


def started_anew(study: Study) -> list[Candidate]:
    """What starting them anew costs."""
    found = restarted(study)
    if found is None:
        return []
    anew, fact, costs = found.anew, found.fact, found.costs
    steps = len(study.irregular.steps)
    between = int(np.median(np.diff(costs.index.to_numpy()))) if len(costs) > 1 else steps
    often = (
        "for each step"
        if between == 1
        else f"every {between} steps"
        if len(costs) > 1
        else f"once in {count(steps, 'step')}"
    )
    workers = int(fact.get("num_workers") or 0)
    title = f"the DataLoader's {count(workers, 'worker')} {'is' if workers == 1 else 'are'} started anew {often}, "
    title += f"{ms(costs.mean())} each time"
    evidence = (
        Evidence("loading where workers are started, beyond the usual", round(float(costs.mean()), 3), "ms", 0.0),
        Evidence("of that, in DataLoader.__iter__", round(float(anew["start_ms"].mean()), 3), "ms"),
        Evidence("starts in the judged steps", len(costs), "count", 0),
        Evidence("persistent_workers", "False", "", "True"),
    )
    who = tuple(int(each) for each in np.sort(anew["rank"].unique()))
    where = Where(ranks=who, op="DataLoader", steps=(int(costs.index.min()), int(costs.index.max())))

    def say(price: Price) -> Finding:
        fix = loader_fix(study, fact, {"persistent_workers": True}, price.gain)
        return Finding("data.stall", title, "info", where, evidence, price.gain, (fix,))

    return [Candidate("data.stall", found.excess, say)]


def with_persistent_workers(study: Study) -> Effect:
    """Workers that stay when an epoch ends: what starting them anew costs, divided over the steps, is saved."""
    if loading_rows(study).empty:
        raise NotJudged("no DataLoader of training is seen in this run")
    found = restarted(study)
    if found is None:
        return Effect("data.stall", notes=("no workers are started anew in the judged steps of this run",))
    gain = excess_gain(study, found.excess)
    ends = (gain.high / gain.ms, gain.low / gain.ms) if gain.ms else (1.0, 1.0)
    note = "workers are started anew where an epoch begins: what that costs is divided over the steps"
    return Effect("data.stall", costs_ms=-gain.ms, costs_between=ends, notes=(note,))


def _first_batches(study: Study, fact: Fact, anew: pd.DataFrame) -> float:
    """What of starting the workers is not saved by keeping them, at most: ms, divided over the steps.

    The loop would still wait for the first batch of an epoch. What it takes to load is not known: no longer than the
    wait outside of `__iter__`, and than `num_workers` steps, or the workers would not keep up.
    """
    outside = float((anew["excess_ms"] - anew["start_ms"]).clip(lower=0).mean())
    first_batch = min(outside, study.step_ms * int(fact.get("num_workers") or 0))
    occasions = anew["step"].nunique() / max(len(study.irregular.steps), 1)
    return float(occasions * first_batch)
