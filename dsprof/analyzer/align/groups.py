"""Process groups by their members, and the dimensions of the job's mesh that like groups form.

Groups of the same ranks are one *team*, whatever they are called. Teams of one size and purpose whose members do not
overlap form a *dimension*: of 2 x 2 ranks, the teams 0 1 and 2 3 are one, 0 2 and 1 3 the other. What a dimension is
for is told by the DeviceMesh, if the job made one (torch describes its groups as `mesh_tp`), else by what its groups
communicate. Dimensions that cover the whole job say where in the mesh a rank is: its coordinate.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Final

import numpy as np
import pandas as pd

from dsprof.run import RunInfo

from ..arrays import Int, different_rows
from ..columns import RankRows, as_rows
from .participants import is_issued
from .topology import Topology

DP, TP, PP, EP, CP, SHARD, REPLICATE = "dp", "tp", "pp", "ep", "cp", "shard", "replicate"
AVERAGED: Final = (DP, SHARD, REPLICATE)
"""What dimensions are for whose ranks have batches of their own, and average their gradients."""
CALLED: Final = {
    **dict.fromkeys(("dp", "ddp", "data", "data_parallel", "batch"), DP),
    **dict.fromkeys(("tp", "tensor", "tensor_parallel", "model", "model_parallel"), TP),
    **dict.fromkeys(("pp", "pipe", "pipeline", "pipeline_parallel"), PP),
    **dict.fromkeys(("ep", "expert", "experts", "expert_parallel"), EP),
    **dict.fromkeys(("cp", "context", "context_parallel", "ulysses"), CP),
    **dict.fromkeys(("shard", "dp_shard", "fsdp", "inner_dp"), SHARD),
    **dict.fromkeys(("replicate", "dp_replicate", "outer_dp"), REPLICATE),
}
"""What jobs call the dimensions of their DeviceMesh -> what they are for."""
OF_MESH: Final = "mesh_"
UNNAMED: Final = ("mesh_default", "mesh_dim_")
"""How torch describes the groups of a DeviceMesh, and those of one whose dimensions have no names."""
TENSOR_PARALLEL, PIPELINE, GRADIENT, PARAMETER = "tensor-parallel", "pipeline", "gradient", "parameter"
CONTEXT_PARALLEL: Final = "context-parallel"
EXCHANGE, RING = "all_to_all", "messages"
MAIN: Final = (TENSOR_PARALLEL, CONTEXT_PARALLEL, PIPELINE, EXCHANGE, RING, PARAMETER, GRADIENT)
"""Purposes, and operations of no known purpose, that tell groups of one dimension from those of another."""


@dataclass(frozen=True)
class Dimension:
    """Like groups.

    name:    what the job calls it, else its role; empty: not known
    role:    DP, TP, PP, EP, CP, SHARD or REPLICATE: what it is for; empty: not known
    teams:   the ranks of each of its teams, in the order that they have in the group
    groups:  the names of the process groups, of all teams
    purposes: of MAIN, what they communicate
    whole:   whether each captured rank is in one of them
    stated:  whether the name is the job's own
    """

    name: str
    role: str
    teams: tuple[tuple[int, ...], ...]
    groups: frozenset[str]
    purposes: frozenset[str]
    whole: bool
    stated: bool = False

    @property
    def size(self) -> int:
        """Ranks of its largest team."""
        return max(map(len, self.teams))

    @cached_property
    def place(self) -> Mapping[int, int]:
        """Rank -> which of its team it is."""
        return {rank: place for team in self.teams for place, rank in enumerate(team)}

    def team_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that it shares a group with, itself too; none where it is in none."""
        return self._team.get(rank, ())

    @cached_property
    def _team(self) -> dict[int, tuple[int, ...]]:
        return {rank: team for team in self.teams for rank in team}


@dataclass(frozen=True)
class Mesh:
    """dimensions: the job's, those with the largest stride first; one that is no grid has those of its groups.
    axes: those that say where a rank is, none where the job is not divided into groups
    """

    dimensions: tuple[Dimension, ...] = ()
    axes: tuple[Dimension, ...] = field(default=())

    def coordinate(self, rank: int) -> dict[str, int]:
        """Name of each axis -> which of its group the rank is: {"dp": 1, "tp": 0}."""
        return {axis.name: axis.place[rank] for axis in self.axes if rank in axis.place}

    def in_common(self, ranks: Sequence[int]) -> dict[str, int]:
        """The part of their coordinates that these ranks have in common."""
        every = [self.coordinate(rank) for rank in ranks]
        return {
            name: place for name, place in (every[0] if every else {}).items()
            if all(one.get(name) == place for one in every)
        }  # fmt: skip

    def words(self, ranks: Sequence[int]) -> str:
        """The same behind the name of a rank: ` (dp 1 tp 0)`, or nothing."""
        common = self.in_common(ranks)
        return f" ({' '.join(f'{name} {place}' for name, place in common.items())})" if common else ""

    def of_group(self, group: str) -> Dimension | None:
        """The dimension of a process group, or of what two of its ranks send each other."""
        return self._of_group.get(group) or self._of_group.get(group.partition(" ")[0])

    @cached_property
    def _of_group(self) -> dict[str, Dimension]:
        return {group: dimension for dimension in self.dimensions for group in dimension.groups}

    def replicas_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that average gradients with this one, itself too: over so many memory and batches are divided."""
        if rank not in self._replicas:
            found, new, seen = {rank}, [rank], set()
            while new:
                for number, team in enumerate([one.team_of(new[-1]) for one in self._averaged]):
                    if team and (number, team[0]) not in seen:  # those of a dimension have no rank in common
                        seen.add((number, team[0]))
                        new[:0] = set(team) - found
                        found |= set(team)
                new.pop()
            self._replicas.update(dict.fromkeys(found, tuple(sorted(found))))
        return self._replicas[rank]

    @cached_property
    def _averaged(self) -> list[Dimension]:
        """Over which gradients are averaged."""
        averaged = [one for one in self.dimensions if GRADIENT in one.purposes and one.role in AVERAGED]
        # Beside these, weights that two stages share are summed over ranks that are no replicas of one another.
        return [one for one in averaged if one.whole] or averaged

    @cached_property
    def _replicas(self) -> dict[int, tuple[int, ...]]:
        """`replicas_of` those ranks that it was asked of, and of their replicas."""
        return {}

    def data_parallel_size(self, rank: int, world_size: int) -> int:
        """Over how many ranks the states of an optimizer, gradients and parameters can be divided, or a batch is. Where
        no gradients were seen to be averaged, the job's ranks by those that share what a rank computes."""
        replicas = len(self.replicas_of(rank))
        if replicas > 1:
            return replicas
        shared = 1
        for one in self.dimensions:
            if one.role in (TP, PP, CP) and one.whole:
                shared *= one.size
        return max(world_size // shared, 1)


def find_mesh(rows: pd.DataFrame | RankRows, run: RunInfo, topology: Topology) -> Mesh:
    """The dimensions of a job. rows: of all ranks; of these their communications."""
    rows = as_rows(rows)
    ranks = tuple(np.unique(rows.whole("rank")).tolist())
    teams = _teams(rows, run, topology)
    unnamed = [one for like in _alike(teams) for one in _dimensions(like, ranks)]
    sharded = any({PARAMETER, GRADIENT} <= team.purposes for one in unnamed for team in one)
    named = _named([_dimension(one, ranks, teams, sharded) for one in unnamed])
    ordered = sorted(named, key=lambda one: (-_stride(one.teams[0]), one.size, one.teams))
    return Mesh(tuple(ordered), _axes(ordered, ranks))


# --- teams


@dataclass(frozen=True)
class _Team:
    """The process groups of the same ranks; those that are said to be for sequences apart, since the same ranks may
    average gradients, too. unequal: whether ranks get unequal shares of what they exchange."""

    ranks: tuple[int, ...]
    groups: frozenset[str]
    purposes: frozenset[str]
    said: str
    unequal: bool


def _teams(rows: RankRows, run: RunInfo, topology: Topology) -> list[_Team]:
    """Those whose groups have communicated, by their ranks."""
    issued = rows.are("kind", "comm") & rows.known("group") & is_issued(rows) & (rows.whole("step") >= 0)
    chosen = np.flatnonzero(issued)
    if not len(chosen):
        return []
    (group_of, group_names), (name, operations), (purpose, stated) = map(rows.codes, ("group", "name", "purpose"))
    columns = group_of, name, purpose, rows.known("peer").astype(np.int64), rows.whole("rank")
    members: dict[str, set[int]] = {}
    purposes: dict[str, set[str]] = {}
    for of, operation, why, message, rank in different_rows(*(column[chosen] for column in columns)):
        members.setdefault(group_names[of], set()).add(rank)
        told = _kind(operations[operation], stated[why] if why >= 0 else "", bool(message))
        purposes.setdefault(group_names[of], set()).add(told)
    unequal = _unequal_exchanges(rows, np.flatnonzero(issued & rows.are("name", EXCHANGE)))
    for group in topology.pipelines:
        purposes.setdefault(group, set()).add(PIPELINE)
    together: dict[tuple[tuple[int, ...], bool], list[tuple[str, tuple[int, ...]]]] = {}
    for group, seen in members.items():
        known = tuple(int(rank) for rank in run.group(group).get("ranks") or sorted(seen))
        if len(known) > 1:
            of_sequences = CONTEXT_PARALLEL in purposes[group]
            together.setdefault((tuple(sorted(known)), of_sequences), []).append((group, known))
    parallel = {str(fact.get("group")) for fact in run.facts if fact.get("fact") == "tensor_parallel"}
    found = []
    for groups in together.values():
        names = frozenset(group for group, _ in groups)
        said = {_said(str(run.group(group).get("desc") or "")) for group in names} - {""}
        kind = {purpose for group in names for purpose in purposes[group]}
        if names & parallel:
            kind.add(TENSOR_PARALLEL)
        team = _Team(groups[0][1], names, frozenset(kind & {*MAIN}), min(said, default=""), bool(names & unequal))
        found.append(team)
    return sorted(found, key=lambda team: team.ranks)


def _kind(name: str, purpose: str, message: bool) -> str:
    if purpose in MAIN:
        return purpose
    return RING if message else name


def _said(description: str) -> str:
    """What the job calls the dimension of a group; empty: nothing."""
    if not description.startswith(OF_MESH) or description.startswith(UNNAMED):
        return ""
    return description.removeprefix(OF_MESH)


def _unequal_exchanges(rows: RankRows, exchanges: Int) -> set[str]:
    """Groups of which a rank gets more of what is exchanged than another does, as experts do."""
    if not len(exchanges):
        return set()
    table = rows.take(("group", "seq", "bytes"), exchanges).astype({"group": str})
    spread = table.groupby(["group", "seq"])["bytes"].agg(["min", "max"])
    return set(spread.index.get_level_values("group")[(spread["min"] < spread["max"]).to_numpy(bool, na_value=False)])


# --- dimensions


def _alike(teams: Sequence[_Team]) -> Iterator[list[_Team]]:
    """Teams that may be of one dimension: called the same, or of one size and purpose."""
    kinds: dict[object, list[_Team]] = {}
    for team in teams:
        kinds.setdefault(team.said or (len(team.ranks), team.purposes), []).append(team)
    yield from kinds.values()


def _dimensions(alike: Sequence[_Team], ranks: Sequence[int]) -> Iterator[list[_Team]]:
    """These teams, divided into such as do not overlap: all if none do, else those of one stride, else each."""
    if _disjoint(alike):
        yield list(alike)
        return
    strides: dict[int, list[_Team]] = {}
    for team in alike:
        strides.setdefault(_stride(team.ranks), []).append(team)
    for same in strides.values():
        if _disjoint(same):
            yield same
        else:
            yield from ([team] for team in same)


def _disjoint(teams: Sequence[_Team]) -> bool:
    every = [rank for team in teams for rank in team.ranks]
    return len(every) == len(set(every))


def _stride(ranks: Sequence[int]) -> int:
    ordered = sorted(ranks)
    return min((b - a for a, b in pairwise(ordered)), default=0)


def _dimension(alike: Sequence[_Team], ranks: Sequence[int], teams: Sequence[_Team], sharded: bool) -> Dimension:
    said = alike[0].said
    purposes = frozenset(purpose for team in alike for purpose in team.purposes)
    role = CALLED.get(said.lower()) or _role(alike, purposes, teams, sharded)
    covered = {rank for team in alike for rank in team.ranks}
    groups = frozenset(group for team in alike for group in team.groups)
    return Dimension(
        name=said or role,
        role=role,
        teams=tuple(team.ranks for team in alike),
        groups=groups,
        purposes=purposes,
        whole=covered >= set(ranks),
        stated=bool(said),
    )


def _role(alike: Sequence[_Team], purposes: frozenset[str], teams: Sequence[_Team], sharded: bool) -> str:
    """What a dimension is for, as far as what is communicated in it tells."""
    if TENSOR_PARALLEL in purposes:
        return TP
    if CONTEXT_PARALLEL in purposes:
        return CP
    if PIPELINE in purposes:
        return PP
    if PARAMETER in purposes:
        return SHARD if _reduced_across(alike, teams) else DP
    if GRADIENT in purposes:
        return REPLICATE if sharded and _reduces_shards(alike, teams) else DP
    if EXCHANGE in purposes:
        return _exchanges(alike, teams)
    return CP if RING in purposes else ""


def _reduced_across(alike: Sequence[_Team], teams: Sequence[_Team]) -> bool:
    """Whether each of these ranks reduces gradients with such as hold the same shard: weights that the first and the
    last stage share are no replicas of the others'."""
    reducing = [team for team in teams if GRADIENT in team.purposes]
    whole = [team for team in reducing if team.purposes.isdisjoint({PARAMETER, PIPELINE, TENSOR_PARALLEL})]
    return _cross_everywhere(alike, whole)


def _reduces_shards(alike: Sequence[_Team], teams: Sequence[_Team]) -> bool:
    return _cross_everywhere(alike, [team for team in teams if {PARAMETER, GRADIENT} <= team.purposes])


def _cross_everywhere(alike: Sequence[_Team], others: Sequence[_Team]) -> bool:
    """Whether each rank of these teams is in one of the others, with which it has no second rank in common."""
    teams_of = _teams_of(others)
    crossing: set[int] = set()
    for mine in alike:
        common = _in_common(mine, teams_of)
        crossing |= {rank for rank in mine.ranks if any(common[other] == 1 for other in teams_of.get(rank, ()))}
    return crossing >= {rank for mine in alike for rank in mine.ranks}


def _exchanges(alike: Sequence[_Team], teams: Sequence[_Team]) -> str:
    """Experts, if shares are unequal or some gradients are reduced across the ranks that exchange; positions of a
    sequence, if all are reduced over these too; else it is not known."""
    if any(team.unequal for team in alike):
        return EP
    reduced = [team for team in teams if GRADIENT in team.purposes]
    teams_of = _teams_of(reduced)
    common = [(len(set(mine.ranks)), count) for mine in alike for count in _in_common(mine, teams_of).values()]
    if any(count == 1 for _, count in common):
        return EP
    return CP if reduced and all(count == size for size, count in common) else ""


def _teams_of(teams: Sequence[_Team]) -> Mapping[int, list[int]]:
    """Rank -> which of these teams it is in."""
    found: dict[int, list[int]] = defaultdict(list)
    for number, team in enumerate(teams):
        for rank in set(team.ranks):
            found[rank].append(number)
    return found


def _in_common(mine: _Team, teams_of: Mapping[int, list[int]]) -> Counter[int]:
    """Of the teams (by rank in `teams_of`) that have a rank in common with `mine`, how many they have. Of a thousand
    teams and a thousand others, few have any."""
    return Counter(number for rank in set(mine.ranks) for number in teams_of.get(rank, ()))


def _named(dimensions: Sequence[Dimension]) -> list[Dimension]:
    """No two of one name: of two that are called the same, all but the one with the largest groups say their size."""
    taken: set[str] = set()
    found = []
    for one in sorted(dimensions, key=lambda one: (not one.stated, -len(one.teams) * one.size, -one.size)):
        name = one.name
        if name and name in taken:
            name = f"{name}-of-{one.size}"
        if name in taken:
            name = ""
        taken.add(name)
        found.append(replace(one, name=name))
    return found


def _axes(dimensions: Iterable[Dimension], ranks: Sequence[int]) -> tuple[Dimension, ...]:
    """Of the named dimensions that cover the job with several groups, as many as tell its ranks apart, those with
    small groups first."""
    candidates = [one for one in dimensions if one.name and one.whole and len(one.teams) > 1]
    chosen: list[Dimension] = []
    apart = 1
    for one in sorted(candidates, key=lambda one: (one.size, not one.stated)):
        told = len({tuple(axis.place[rank] for axis in (*chosen, one)) for rank in ranks})
        if told > apart:
            chosen.append(one)
            apart = told
    return tuple(one for one in candidates if one in chosen)
