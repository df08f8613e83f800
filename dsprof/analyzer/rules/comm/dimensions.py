"""What is communicated in each dimension of the job, and how long ranks wait for it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import pandas as pd

from ...align.groups import TENSOR_PARALLEL, Dimension
from ...align.match import SEND_RECV
from ...arrays import Int, places
from ...budget.lane_tasks import kinds_of
from ...columns import RankRows
from ...effect import Fewer
from ...finding import Where
from ...graph.link import Link, fit_link
from ...study import Study, once
from ...whatif.select import Communications
from ..base import NotJudged

GRADIENT: Final = "gradient"
MOMENTS: Final = ("start_ns", "arrival_ns", "end_ns")
NOWHERE: Final = np.iinfo(np.int64).min
IN_TIME: Final = 0.01
"""Of the step: where no group can have waited so long for ranks that were not captured, it is not for these that others
wait."""


@dataclass(frozen=True, eq=False)
class Domain:
    """The collectives of one dimension, or of one group whose ranks are not known, in the ordinary steps.

    table: `match.COLLECTIVE_COLUMNS` of them
    name:  of the dimension; empty where it has none, or the job has no other
    alone: whether nothing else is communicated but messages
    on_device: whether devices communicate it
    """

    dimension: Dimension | None
    name: str
    table: pd.DataFrame
    alone: bool
    on_device: bool = False

    @property
    def role(self) -> str:
        return self.dimension.role if self.dimension is not None else ""

    @property
    def inside(self) -> str:
        """` in dimension dp`, or nothing."""
        return f" in dimension {self.name}" if self.name else ""

    def of(self, *purposes: str) -> Domain:
        """The part of it that is for these purposes."""
        chosen = self.rows.are("purpose", *purposes)
        if chosen.all():
            return self
        table = self.table.take(np.flatnonzero(chosen))
        return Domain(self.dimension, self.name, table, self.alone, self.on_device)

    @cached_property
    def rows(self) -> RankRows:
        """The table, column by column."""
        return RankRows(self.table)

    @property
    def groups(self) -> tuple[str, ...]:
        """Of the table, in order of their first collective."""
        codes, names = self.rows.codes("group")
        return tuple(names[list(dict.fromkeys(codes.tolist()))])

    def links(self) -> dict[str, Link]:
        """Each group's link, fitted to its own collectives of the table."""
        return {group: fit_link(self.of_group(group), on_device=self.on_device) for group in self.groups}

    @cached_property
    def kinds(self) -> dict[Communications, Int]:
        """Of each group and kind of collective, its rows of the table."""
        kind = pd.Series(kinds_of(self.table), self.table.index)
        every = self.table.groupby([self.table["group"], kind], sort=False, observed=True).indices
        return {
            Communications(kinds=(str(kind),), groups=(str(group),)): np.asarray(rows, np.int64)
            for (group, kind), rows in every.items()
        }

    def median_bytes(self, of: Communications) -> float:
        """Of those of its collectives that these are; NaN where none is."""
        purpose = self.table["purpose"].astype(object)
        chosen = [
            rows
            for one, rows in self.kinds.items()
            if one.meets(of) and (of.purposes is None or purpose.iloc[rows[0]] in of.purposes)
        ]
        return float(self.table["bytes"].iloc[np.concatenate(chosen)].median()) if chosen else float("nan")

    def of_group(self, group: str) -> pd.DataFrame:
        """The collectives of one of the groups."""
        return self.table.take(np.flatnonzero(self.rows.are("group", group)))

    def a_step(self, study: Study) -> float:
        """How many collectives each rank takes part in a step, mean over the ranks that do in any."""
        return len(self.table) / len(study.step_numbers) / max(len(self.groups), 1)

    def where(self, study: Study, op: str) -> Where:
        group = str(self.table["group"].mode().iloc[0])
        return Where(group=group, op=op, steps=study.step_range, dimension=self.name or None)


def need_every_rank(study: Study) -> None:
    """Raises NotJudged where the steps of some rank were not captured, and who is waited for may be one of those."""
    if study.ranks_missing and _waited_for_missing_ms(study) > IN_TIME * study.step_ms:
        raise NotJudged("without every rank's capture, waiting for a late peer looks the same")


@once
def _waited_for_missing_ms(study: Study) -> float:
    """How long the groups that ranks are missing of may have waited for these, ms a step, of the one that did most: by
    what their collectives took longer, once all captured ranks had come, than those of like groups that are whole."""
    longest = 0.0
    for domain in domains(study):
        missing = [group for group in domain.groups if not _is_whole(study, group)]
        table = domain.table.assign(ms=domain.table["transfer_ns"].to_numpy(np.float64) / 1e6)
        lacks = table["group"].isin(missing)
        kind = ["name", "purpose", "bytes"]
        usual = table[~lacks].groupby(kind, observed=True, dropna=False)["ms"].median().rename("usual")
        late = table[lacks].join(usual, on=kind)
        beyond = (late["ms"] - late["usual"].fillna(0.0)).clip(lower=0.0)
        of_group = beyond.groupby(late["group"], observed=True).sum()
        longest = max(longest, float(of_group.max()) / len(study.step_numbers) if len(of_group) else 0.0)
    return longest


def _is_whole(study: Study, group: str) -> bool:
    """Whether all members of a process group are known to have been captured."""
    told = study.run.group(group).get("ranks")
    return isinstance(told, list) and set(told) <= set(study.ranks)


@once
def domains(study: Study) -> list[Domain]:
    """Of the collectives of the ordinary steps, those with most bytes first."""
    rows = study.judged_collectives
    table = rows.table.take(np.flatnonzero(~rows.are("name", SEND_RECV)))
    parts_of_it = table["group"].nunique()
    together = table["ranks"] > 1
    # A group of one rank moves nothing: shards of a mesh whose shard dimension has size 1 are gathered in such.
    table = table[together] if together.any() else table[~table["group"].isin(_of_one_rank(study))]
    of_group = {group: study.mesh.of_group(str(group)) for group in table["group"].unique()}
    number = {group: id(one) if one is not None else group for group, one in of_group.items()}
    parts = [part for _, part in table.groupby(table["group"].map(number), sort=False)]
    divided = len(study.mesh.dimensions) > 1 or any(len(one.teams) > 1 for one in study.mesh.dimensions)
    found = []
    for part in parts:
        dimension = of_group[part["group"].iloc[0]]
        name = dimension.name if dimension is not None and divided else ""
        alone = len(parts) == 1 and part["group"].nunique() == parts_of_it
        found.append(Domain(dimension, name, part, alone, study.on_gpu))
    return sorted(found, key=lambda one: -float(one.table["bytes"].sum()))


def _of_one_rank(study: Study) -> set[str]:
    """Names of the groups that are known to have no other rank."""
    return {
        str(fact["name"])
        for fact in study.facts.get("group", [])
        if isinstance(fact.get("ranks"), list) and len(fact["ranks"]) == 1
    }


@once
def _waited(study: Study) -> pd.DataFrame:
    """group, purpose, ms that ranks wait in a step for collectives of it once all were there, mean over all ranks."""
    issued = study.judged_collectives
    (group, groups), (purpose, purposes), seq = issued.codes("group"), issued.codes("purpose"), issued.whole("seq")
    least, most = (int(bound) for bound in (seq.min(initial=0), seq.max(initial=0)))
    span = most - least + 1
    theirs = group * span + seq - least
    known = np.flatnonzero((purpose >= 0) & (group >= 0))
    known = known[np.argsort(theirs[known], kind="stable")]
    theirs = theirs[known]
    kind = group[known] * len(purposes) + purpose[known]
    total, waited = np.zeros(len(groups) * len(purposes)), np.zeros(len(groups) * len(purposes), bool)
    for waits in study.waits.blocks():  # of many ranks there are many: numbers take less room than names
        waited_for = waits["seq"].to_numpy(np.int64, na_value=NOWHERE)
        of_wait = pd.Index(groups).get_indexer(waits["group"].to_numpy(object))
        chosen = np.flatnonzero((of_wait >= 0) & (waited_for >= least) & (waited_for <= most))
        start, arrival, end = (waits[name].to_numpy(np.float64, na_value=np.nan)[chosen] for name in MOMENTS)
        exposed = np.maximum(end - np.fmax(start, arrival), 0.0) / 1e6
        key = of_wait[chosen] * span + waited_for[chosen] - least
        # A number that was used again has several rows: what waits for it counts for each.
        begin, end = (np.searchsorted(theirs, key, side) for side in ("left", "right"))
        times = end - begin
        for_kind = kind[places(begin, times)]
        total += np.bincount(for_kind, np.repeat(exposed, times), len(total))
        waited[for_kind] = True
    at, of = np.divmod(np.flatnonzero(waited), max(len(purposes), 1))
    ms = total[waited] / max(len(study.step_numbers) * len(study.ranks), 1)
    return pd.DataFrame({"group": groups[at], "purpose": purposes[of], "ms": ms})


def moved_bytes(study: Study, table: pd.DataFrame) -> float:
    """By the collectives of a domain's table, of one rank in a step."""
    return float((table["bytes"] * table["ranks"]).sum()) / len(study.step_numbers) / max(len(study.ranks), 1)


def fewer_of(study: Study, share: float, *tables: pd.DataFrame) -> Fewer:
    """A change that removes so large a part of the collectives of these tables, each of a domain."""
    rows = study.judged_collectives
    every = [one.table for one in domains(study)] + [rows.table.take(np.flatnonzero(rows.are("name", SEND_RECV)))]
    these, whole = (sum(float(table["ranks"].sum()) for table in of) for of in (tables, every))
    return Fewer(share, min(these / max(whole, 1.0), 1.0), sum(moved_bytes(study, table) for table in tables))


def waited_ms(study: Study, domain: Domain) -> float:
    """How long a step waits for the collectives of a domain's table, mean over all ranks: of a job that has no other
    domain, all of its exposed communication but for what it waits for of another purpose, such as a barrier."""
    table = _waited(study)
    purposes = domain.table["purpose"].unique()
    if domain.alone and not (table["purpose"] == TENSOR_PARALLEL).any():
        others = float(table["ms"][table["purpose"].notna() & ~table["purpose"].isin(purposes)].sum())
        return max(float(study.ordinary["comm_exposed"].mean()) - others, 0.0)
    chosen = table["group"].isin(domain.groups) & table["purpose"].isin(purposes)
    return float(table["ms"][chosen].sum())


def waited_for_most(study: Study) -> str:
    """What ranks wait for longest: `all_to_all in dimension ep`; empty where they wait for nothing that is known."""
    table = _waited(study)
    if not (table["ms"] > 0).any():
        return ""
    ms_of = table.groupby("group")["ms"].sum()

    def waited(domain: Domain) -> float:
        return float(ms_of.reindex(domain.groups).fillna(0.0).sum())

    most = max(domains(study), key=waited)
    return f"{most.table['name'].mode().iloc[0]}{most.inside}"


def waits_mostly_for_layers(study: Study) -> bool:
    """Whether what is waited for is mostly tensor parallelism's."""
    table = _waited(study)
    of_layers = float(table["ms"][table["purpose"] == TENSOR_PARALLEL].sum())
    return of_layers > float(table["ms"].sum()) / 2
