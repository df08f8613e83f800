"""The DataLoader that training waits for: which one it is, when it starts anew, and where its arguments are set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pandas as pd

from dsprof.trace.derive.phases import LOADING

from ..context import Context
from ..finding import Fix, Gain
from .base import at, settings_fix, written

Fact = dict[str, Any]

UNNUMBERED: Final = -1
"""Of a DataLoader that was entered before capturing began, by a collector that could not tell which it was."""

RESTART_COLUMNS: Final = ("rank", "step", "number", "excess_ms", "start_ms")


def loading_rows(context: Context) -> pd.DataFrame:
    """What training threads spent in the DataLoaders that feed training: rank, step, name, number, ms, start_ns.

    A DataLoader feeds training if most of its batches are followed by a forward with gradients, a backward or an
    optimizer's step before the next one is loaded. Of an evaluation's loader that is only what it says when it ends.
    """
    rows = context.rows
    phases = rows[
        (rows["kind"] == "phase")
        & (rows["lane"] == "main")
        & (rows["source"] == "measured")
        & rows["name"].isin([*LOADING, "forward", "backward", "optimizer"])
        & rows["dur_ns"].notna()
    ].sort_values(["rank", "start_ns"])
    names = phases["name"].astype(str).to_numpy(object)
    loads = np.isin(names, LOADING)
    with_gradients = phases["grad"].fillna(True).to_numpy(bool)  # captures of before format 3 do not tell
    trains = np.where(names == "forward", with_gradients, ~loads)
    phases = phases.assign(name=names, number=phases["value"].fillna(UNNUMBERED).astype("int64"), trains=False)
    parts = []
    for where in phases.groupby("rank").indices.values():
        load, other = np.flatnonzero(loads[where]), np.flatnonzero(~loads[where])
        so_far = np.concatenate([[0], np.cumsum(trains[where])])
        after = np.append(other, len(where))[np.searchsorted(other, load)]
        until = np.append(load, len(where))[np.searchsorted(load, after)]
        parts.append(phases.iloc[where[load]].assign(trains=so_far[until] > so_far[after]))
    columns = ["rank", "step", "name", "number", "ms", "start_ns"]
    if not parts:
        return pd.DataFrame(columns=columns)
    found = pd.concat(parts)
    found = found.assign(ms=found["dur_ns"].astype("int64") / 1e6)
    mostly = found["trains"].groupby([found["rank"], found["number"]]).transform("mean") > 0.5
    return found.loc[mostly, columns]


def training_loader(context: Context, loading: pd.DataFrame) -> Fact | None:
    """What the DataLoader that training waits for most said of itself; None where that is not known."""
    waited = loading[loading["step"].isin(context.step_numbers)]
    if waited.empty:
        waited = loading
    if waited.empty:
        return None
    rank, number = waited.groupby(["rank", "number"])["ms"].sum().idxmax()
    return loader_fact(context, int(rank), int(number))


def loader_fact(context: Context, rank: int, number: int) -> Fact | None:
    """What the DataLoader of that number said of itself, on its rank or else on another.

    Rows without a number are of the one DataLoader that is left when those of other rows are set aside.
    """
    facts = context.facts.get("dataloader", [])
    same = [fact for fact in facts if fact.get("number") == number]
    if number == UNNUMBERED or not any(fact.get("number") for fact in facts):
        rows = context.rows
        numbered = rows.loc[(rows["kind"] == "phase") & rows["name"].isin(LOADING), "value"].dropna()
        left = [fact for fact in facts if fact.get("number") not in set(numbered.astype("int64"))]
        same = left if len({fact.get("site") for fact in left}) == 1 else []
    if not same:
        return None
    return next((fact for fact in same if fact.get("rank") == rank), same[0])


def restarts(context: Context, loading: pd.DataFrame) -> pd.DataFrame:
    """Steps after warm-up in which training's loaders started their workers anew (RESTART_COLUMNS).

    excess_ms: time in the loader beyond the typical step's: ending the old workers, starting the new ones, and waiting
    for the first batch. start_ms: of that, in `DataLoader.__iter__`.
    """
    numbers = context.irregular.steps
    found = []
    for (rank, number), of_loader in loading.groupby(["rank", "number"]):
        fact = loader_fact(context, int(rank), int(number))
        if fact is None or not fact.get("num_workers") or fact.get("persistent_workers"):
            continue
        begun = of_loader[of_loader["name"] == "loader_start"]
        by_step = of_loader.groupby("step")["ms"].sum()
        anew = begun.iloc[1:].groupby("step")["ms"].sum()  # the first start is no restart
        usual = by_step[~by_step.index.isin(begun["step"]) & by_step.index.isin(numbers)]
        typical = float(usual.median()) if len(usual) else 0.0
        for step in anew.index[anew.index.isin(numbers)]:
            excess = max(float(by_step[step]) - typical, 0.0)
            found.append((int(rank), int(step), int(number), excess, float(anew[step])))
    return pd.DataFrame(found, columns=list(RESTART_COLUMNS))


def made_by_user(context: Context, fact: Fact) -> Fact | None:
    """The DataLoader in the user's own code that a framework made `fact`'s from: it kept the user's settings."""
    if not fact.get("framework"):
        return fact
    of_rank = [item for item in context.facts.get("dataloader", []) if item.get("rank") == fact.get("rank")]
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


def loader_site(context: Context, fact: Fact | None) -> str | None:
    """Where the user wrote the DataLoader, `file:line`; None where he did not write it, or it was not seen."""
    user = made_by_user(context, fact) if fact is not None else None
    site = user.get("site") if user is not None else None
    return str(site) if site else None


def loader_fix(
    context: Context, fact: Fact | None, settings: Mapping[str, Any], gain: Gain | None = None, note: str = ""
) -> Fix:
    """Other values for arguments of the training's DataLoader, as its user would write them. `note` ends the title."""
    arguments = ", ".join(f"{name}={written(value)}" for name, value in settings.items())
    site = loader_site(context, fact)
    if fact is None:
        return settings_fix(f"DataLoader({arguments}), where the training data are loaded{note}", settings, None, gain)
    if fact.get("by_engine"):
        call = f"DataLoader(..., {arguments})"
        title = f"initialize(training_data={call}){at(site)}; of a data set it makes a DataLoader with "
        title += f"{fact.get('num_workers') or 0} workers"
        return settings_fix(title + note, {"training_data": call}, site, gain)
    framework = fact.get("framework")
    if framework == "transformers":
        flags = {f"--dataloader_{name}": value for name, value in settings.items()}
        typed = " ".join(f"{flag} {written(value)}" for flag, value in flags.items())
        return settings_fix(typed + ", or the same of TrainingArguments" + note, flags, None, gain)
    if framework == "deepspeed" and site is None:
        title = (
            f"engine.deepspeed_io(dataset, num_local_io_workers={settings.get('num_workers', '...')}) for the loader"
        )
        return settings_fix(title + note, {"num_local_io_workers": settings.get("num_workers", "")}, None, gain)
    made = f", which {framework} prepares" if framework and site is None else ""
    return settings_fix(f"DataLoader({arguments}){at(site)}{made}{note}", settings, site, gain)
