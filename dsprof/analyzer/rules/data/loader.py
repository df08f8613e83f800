"""The DataLoader that training waits for: which one it is, when it starts anew, and where its arguments are set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pandas as pd

from dsprof.schema import LOADING

from ...arrays import Int
from ...columns import RankRows
from ...finding import Fix, Gain
from ...study import Study, once
from ...text import count
from ..base import at, settings_fix, written

Fact = dict[str, Any]

UNNUMBERED: Final = -1
"""Of a DataLoader that was entered before capturing began, by a collector that could not tell which it was."""


@once
def loading_rows(study: Study) -> pd.DataFrame:
    """What training threads spent in the DataLoaders that feed training: rank, step, name, number, ms, by rank and
    start.

    A DataLoader feeds training if most of its batches are followed by a forward with gradients, a backward or an
    optimizer's step before the next one is loaded. Of an evaluation's loader that is only what it says when it ends.
    """
    rows = RankRows(study.training_phases)
    used = rows.are("name", *LOADING, "forward", "backward", "optimizer")
    if not study.run.imported:  # another tool's trace tells of loading, and forward and backward are derived from it
        used = used & rows.are("source", "measured")
    place = np.flatnonzero(used)
    loads = rows.are("name", *LOADING)[place]
    with_gradients = rows.true("grad", missing=True)[place]  # captures of before format 3 do not tell
    trains = np.where(rows.are("name", "forward")[place], with_gradients, ~loads)
    load, other, rank = np.flatnonzero(loads), np.flatnonzero(~loads), rows.whole("rank")[place]
    # Of each loading: what comes after it and is none, and the next loading after that, or the end of its rank's.
    end = np.searchsorted(rank, rank[load], "right")
    after = np.minimum(np.append(other, len(rank))[np.searchsorted(other, load)], end)
    until = np.minimum(np.append(load, len(rank))[np.searchsorted(load, after)], end)
    so_far = np.concatenate([[0], np.cumsum(trains)])
    number = np.nan_to_num(rows.real("value")[place[load]], nan=UNNUMBERED).astype(np.int64)
    of = _numbered(rank[load], number)[1]
    followed = np.bincount(of, so_far[until] > so_far[after]) / np.maximum(np.bincount(of), 1)
    chosen = followed[of] > 0.5
    found = rows.take(("rank", "step", "name"), place[load[chosen]])
    return found.assign(number=number[chosen], ms=rows.whole("dur_ns")[place[load[chosen]]] / 1e6)


def _numbered(rank: Int, number: Int) -> tuple[Int, Int]:
    """The different DataLoaders, rank and number of each, and which of them is meant where."""
    loaders, of = np.unique(np.stack([rank, number], axis=1), axis=0, return_inverse=True)
    return loaders, of.reshape(-1)


@once
def training_loader(study: Study) -> Fact | None:
    """What the DataLoader that training waits for most said of itself; None where that is not known."""
    loading = loading_rows(study)
    if loading.empty:
        return None
    inside = np.flatnonzero(np.isin(loading["step"].to_numpy(np.int64), study.step_numbers))
    waited = loading.take(inside) if len(inside) else loading
    loaders, of = _numbered(waited["rank"].to_numpy(np.int64), waited["number"].to_numpy(np.int64))
    rank, number = loaders[np.bincount(of, waited["ms"].to_numpy(np.float64)).argmax()].tolist()
    return loader_fact(study, rank, number)


def loader_fact(study: Study, rank: int, number: int) -> Fact | None:
    """What the DataLoader of that number said of itself, on its rank or else on another.

    Rows without a number are of the one DataLoader that is left when those of other rows are set aside.
    """
    numbered = _facts(study)
    same = numbered.get(number, {}) if number != UNNUMBERED and any(numbered) else _left(study)
    return same.get(rank) or next(iter(same.values()), None)


@once
def _facts(study: Study) -> dict[int | None, dict[int | None, Fact]]:
    """What DataLoaders said of themselves, by their number and rank: the first of each."""
    found: dict[int | None, dict[int | None, Fact]] = {}
    for fact in study.facts.get("dataloader", []):
        found.setdefault(fact.get("number"), {}).setdefault(fact.get("rank"), fact)
    return found


@once
def _left(study: Study) -> dict[int | None, Fact]:
    """By rank, what a DataLoader said of itself whose number no row has, if there is only one."""
    rows = study.phase_rows
    seen = set(rows.real("value")[rows.are("name", *LOADING) & rows.known("value")].astype(np.int64).tolist())
    left = [fact for fact in study.facts.get("dataloader", []) if fact.get("number") not in seen]
    if len({fact.get("site") for fact in left}) != 1:
        return {}
    found: dict[int | None, Fact] = {}
    for fact in left:
        found.setdefault(fact.get("rank"), fact)
    return found


@once
def restarts(study: Study) -> pd.DataFrame:
    """Steps after warm-up in which training's loaders started their workers anew: rank, step, number, excess_ms,
    start_ms.

    excess_ms: time in the loader beyond the typical step's: ending the old workers, starting the new ones, and waiting
    for the first batch. start_ms: of that, in `DataLoader.__iter__`.
    """
    loading = loading_rows(study)
    key = ["rank", "number"]
    loaders, of = _numbered(*(loading[name].to_numpy(np.int64) for name in key))
    facts = [loader_fact(study, rank, number) for rank, number in loaders.tolist()]
    ending = np.array([bool(fact and fact.get("num_workers") and not fact.get("persistent_workers")) for fact in facts])
    if not ending.any():
        return loading[["rank", "step", "number"]].iloc[:0].assign(excess_ms=0.0, start_ms=0.0)
    loading = loading.take(np.flatnonzero(ending[of])).reset_index(drop=True)
    started = loading["name"] == "loader_start"
    anew = started & loading[key].where(started).duplicated()  # the first start is no restart
    by_step = (
        loading.assign(started=started, anew=anew, start_ms=loading["ms"].where(anew, 0.0))
        .groupby([*key, "step"], as_index=False)[["ms", "started", "anew", "start_ms"]]
        .agg({"ms": "sum", "started": "any", "anew": "any", "start_ms": "sum"})
    )
    judged = by_step[by_step["step"].isin(study.irregular.steps)]
    typical = judged["ms"].where(~judged["started"]).groupby([judged[name] for name in key]).transform("median")
    excess_ms = (judged["ms"] - typical.fillna(0.0)).clip(lower=0.0)
    return judged.assign(excess_ms=excess_ms)[judged["anew"]][["rank", "step", "number", "excess_ms", "start_ms"]]


def begun_again(study: Study) -> int:
    """In how many steps after warm-up training's loaders are entered once more, as at the start of an epoch."""
    loading = loading_rows(study)
    started = loading[loading["name"] == "loader_start"]
    again = started[started[["rank", "number"]].duplicated()]
    return int(np.isin(study.irregular.steps, again["step"]).sum())


def made_by_user(study: Study, fact: Fact) -> Fact | None:
    """The DataLoader in the user's own code that a framework made `fact`'s from: it kept the user's settings."""
    if not fact.get("framework"):
        return fact
    of_rank = [item for item in study.facts.get("dataloader", []) if item.get("rank") == fact.get("rank")]
    number = fact.get("number") or 0
    before = [item for item in of_rank if (item.get("number") or 0) < number]
    own = [item for item in before if not item.get("framework") and _alike(item, fact)]
    wrapped = [item for item in before if item.get("framework") and any(_alike(item, user) for user in own)]
    return own[min(len(wrapped), len(own) - 1)] if own else None


def _alike(one: Fact, other: Fact) -> bool:
    """Whether two DataLoaders agree in what a framework keeps; one that is given a batch sampler has no batch size."""
    told = ("batch_size", "num_workers", "iterable", "dataset")
    pairs = [(one.get(name), other.get(name)) for name in told]
    return all(mine == theirs for mine, theirs in pairs if mine is not None and theirs is not None)


def loader_site(study: Study, fact: Fact | None) -> str | None:
    """Where the user wrote the DataLoader, `file:line`; None where he did not write it, or it was not seen."""
    user = made_by_user(study, fact) if fact is not None else None
    site = user.get("site") if user is not None else None
    return str(site) if site else None


def loader_fix(
    study: Study, fact: Fact | None, settings: Mapping[str, Any], gain: Gain | None = None, note: str = ""
) -> Fix:
    """Other values for arguments of the training's DataLoader, as its user would write them. `note` ends the title."""
    arguments = ", ".join(f"{name}={written(value)}" for name, value in settings.items())
    site, knobs = loader_site(study, fact), {f"loader.{name}": value for name, value in settings.items()}
    if fact is not None and fact.get("iterable") and not fact.get("num_workers"):
        knobs = {}  # the script has to split its data set first
    if fact is None:
        if study.run.imported:
            note += (
                "; the trace does not tell how many workers there are: if it has some, more, as far as there are cores"
            )
        return settings_fix(
            f"DataLoader({arguments}), where the training data are loaded{note}", settings, None, gain, knobs
        )
    if fact.get("by_engine"):
        call = f"DataLoader(..., {arguments})"
        title = f"initialize(training_data={call}){at(site)}; of a data set it makes a DataLoader with "
        title += count(int(fact.get("num_workers") or 0), "worker")
        return settings_fix(title + note, {"training_data": call}, site, gain, knobs)
    framework = fact.get("framework")
    if framework == "transformers":
        flags = {f"--dataloader_{name}": value for name, value in settings.items()}
        typed = " ".join(f"{flag} {written(value)}" for flag, value in flags.items())
        return settings_fix(typed + ", or the same of TrainingArguments" + note, flags, None, gain, knobs)
    if framework == "deepspeed" and site is None:
        title = (
            f"engine.deepspeed_io(dataset, num_local_io_workers={settings.get('num_workers', '...')}) for the loader"
        )
        return settings_fix(title + note, {"num_local_io_workers": settings.get("num_workers", "")}, None, gain, knobs)
    made = f", which {framework} prepares" if framework and site is None else ""
    return settings_fix(f"DataLoader({arguments}){at(site)}{made}{note}", settings, site, gain, knobs)
