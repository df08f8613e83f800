"""Which process groups are alike, and what dimensions of a mesh they form; on made-up communications."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd
import pytest

from dsprof.analyzer.align.groups import Mesh, find_mesh
from dsprof.analyzer.align.topology import Topology
from dsprof.run import RunInfo

Team = Sequence[int]
Issued = tuple[str, str]
"""Name and purpose of a collective."""

GRADIENTS: Issued = ("all_reduce", "gradient")
GATHERS: Issued = ("all_gather", "parameter")
SCATTERS: Issued = ("reduce_scatter", "gradient")
LAYERS: Issued = ("all_reduce", "tensor-parallel")
SEQUENCES: Issued = ("all_to_all", "context-parallel")
EXCHANGES: Issued = ("all_to_all", "other")
MESSAGES: Issued = ("send", "pipeline")
METRICS: Issued = ("all_reduce", "other")
BARRIERS: Issued = ("barrier", "barrier")
SHARDS = (GATHERS, SCATTERS)


class Job:
    """Groups, and what their members have issued."""

    def __init__(self) -> None:
        self.groups: dict[str, dict[str, Any]] = {}
        self.rows: list[dict[str, Any]] = []

    def uses(self, teams: Iterable[Team], *issued: Issued, desc: str = "", sizes: Sequence[int] = ()) -> Job:
        """A group of each team, in which every member issues each of these once. sizes: bytes, by place in the team."""
        for team in teams:
            group = str(len(self.groups))
            self.groups[group] = {"ranks": list(team), "size": len(team), "desc": desc}
            for seq, (name, purpose) in enumerate(issued):
                for place, rank in enumerate(team):
                    size, peer = sizes[place] if sizes else 1024, 1 if name == "send" else None
                    self.rows.append(
                        {"rank": rank, "step": 1, "kind": "comm", "name": name, "purpose": purpose, "group": group,
                         "seq": seq, "peer": peer, "bytes": size, "issue_ns": 1, "arrival_ns": 1}
                    )  # fmt: skip
        return self

    def mesh(self, pipelines: Iterable[str] = (), facts: Sequence[dict[str, Any]] = ()) -> Mesh:
        rows = pd.DataFrame(self.rows)
        rows["peer"] = rows["peer"].astype("Int32")
        run = RunInfo("job", "job", [], groups=self.groups, facts=list(facts))
        return find_mesh(rows, run, Topology(pipelines=frozenset(pipelines)))


def named(mesh: Mesh) -> dict[str, list[tuple[int, ...]]]:
    return {one.name: sorted(one.teams) for one in mesh.dimensions}


ROWS, COLUMNS = [(0, 1), (2, 3)], [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    ("job", "dimensions", "of_rank_3"),
    [
        (Job().uses([range(4)], GRADIENTS, BARRIERS), {"dp": [(0, 1, 2, 3)]}, {}),
        (Job().uses([range(8)], *SHARDS), {"dp": [tuple(range(8))]}, {}),
        (Job().uses([(0, 1)], LAYERS), {"tp": [(0, 1)]}, {}),
        (Job().uses(ROWS, LAYERS).uses(COLUMNS, *SHARDS), {"tp": ROWS, "dp": COLUMNS}, {"dp": 1, "tp": 1}),
        (Job().uses(ROWS, *SHARDS).uses(COLUMNS, GRADIENTS), {"shard": ROWS, "replicate": COLUMNS},
         {"replicate": 1, "shard": 1}),
        (Job().uses(COLUMNS, MESSAGES).uses(ROWS, GRADIENTS), {"pp": COLUMNS, "dp": ROWS}, {"pp": 1, "dp": 1}),
        (Job().uses([range(4)], GRADIENTS).uses(COLUMNS, GRADIENTS).uses(ROWS, EXCHANGES),
         {"dp": [(0, 1, 2, 3)], "dp-of-2": COLUMNS, "ep": ROWS}, {"dp-of-2": 1, "ep": 1}),
        (Job().uses([range(4)], GRADIENTS).uses(ROWS, EXCHANGES), {"dp": [(0, 1, 2, 3)], "cp": ROWS}, {"cp": 1}),
        (Job().uses([range(4)], GRADIENTS).uses(ROWS, EXCHANGES, sizes=(512, 1536)),
         {"dp": [(0, 1, 2, 3)], "ep": ROWS}, {"ep": 1}),
        (Job().uses([range(4)], *SHARDS).uses([range(4)], SEQUENCES), {"dp": [(0, 1, 2, 3)], "cp": [(0, 1, 2, 3)]}, {}),
        (Job().uses([range(4)], *SHARDS).uses(ROWS, SEQUENCES, sizes=(512, 1536)), {"dp": [(0, 1, 2, 3)], "cp": ROWS},
         {"cp": 1}),
    ],
    ids=["DDP", "8 x 1", "tensor-parallel", "tp and FSDP", "HSDP", "pp and dp", "dp and ep", "Ulysses", "unequal",
         "sequences of all ranks", "sequences"],
)  # fmt: skip
def test_what_groups_communicate_tells_what_they_are_for(
    job: Job, dimensions: dict[str, list[Team]], of_rank_3: dict[str, int]
) -> None:
    mesh = job.mesh()
    assert named(mesh) == dimensions
    assert mesh.coordinate(3) == of_rank_3


def test_three_dimensions_of_eight_ranks_are_told_apart_and_ordered_by_stride() -> None:
    tensor = [(i, i + 1) for i in range(0, 8, 2)]
    data = [(0, 2), (1, 3), (4, 6), (5, 7)]
    stages = [(i, i + 4) for i in range(4)]
    mesh = Job().uses(tensor, LAYERS).uses(data, GRADIENTS).uses(stages, MESSAGES).mesh()
    assert [one.name for one in mesh.dimensions] == ["pp", "dp", "tp"]
    assert mesh.coordinate(6) == {"pp": 1, "dp": 1, "tp": 0}
    assert mesh.in_common([4, 6]) == {"pp": 1, "tp": 0}
    assert mesh.replicas_of(6) == (4, 6)


def test_the_names_of_a_device_mesh_are_the_jobs_own() -> None:
    job = Job().uses(ROWS, *SHARDS, desc="mesh_inner").uses(COLUMNS, GRADIENTS, desc="mesh_dp_replicate")
    mesh = job.mesh()
    assert named(mesh) == {"inner": ROWS, "dp_replicate": COLUMNS}
    assert [one.role for one in mesh.dimensions] == ["replicate", "shard"]
    assert mesh.coordinate(2) == {"dp_replicate": 1, "inner": 0}


def test_a_mesh_without_names_is_told_by_what_it_communicates() -> None:
    mesh = Job().uses(ROWS, LAYERS, desc="mesh_dim_1").uses(COLUMNS, *SHARDS, desc="mesh_dim_0").mesh()
    assert named(mesh) == {"tp": ROWS, "dp": COLUMNS}


def test_a_group_in_which_modules_were_parallelized_is_tensor_parallel() -> None:
    facts = [{"fact": "tensor_parallel", "group": "0", "rank": 0}]
    assert named(Job().uses([(0, 1)], METRICS).mesh(facts=facts)) == {"tp": [(0, 1)]}


def test_messages_of_a_pipeline_are_of_its_stages() -> None:
    mesh = Job().uses(COLUMNS, ("send", "other")).uses(ROWS, GRADIENTS).mesh(pipelines=("0", "1"))
    assert named(mesh) == {"pp": COLUMNS, "dp": ROWS}


def test_groups_of_the_same_ranks_are_one_team() -> None:
    mesh = Job().uses(ROWS, LAYERS).uses(ROWS, METRICS).uses([range(4)], GRADIENTS).uses([range(4)], METRICS).mesh()
    assert named(mesh) == {"dp": [(0, 1, 2, 3)], "tp": ROWS}
    assert {one.name: sorted(one.groups) for one in mesh.dimensions} == {"dp": ["4", "5"], "tp": ["0", "1", "2", "3"]}


def test_a_group_for_metrics_has_no_name_and_says_nothing_of_where_a_rank_is() -> None:
    mesh = Job().uses([range(4)], GRADIENTS).uses([(0, 1)], METRICS).uses([(0, 2)], METRICS).mesh()
    assert sorted(one.name for one in mesh.dimensions) == ["", "", "dp"]
    assert mesh.axes == ()


def test_groups_of_unequal_size_are_dimensions_of_their_own() -> None:
    mesh = Job().uses([(0, 1, 2), (3, 4, 5, 6, 7)], GRADIENTS).mesh()
    assert [(one.name, one.teams, one.whole) for one in mesh.dimensions] == [
        ("dp-of-3", ((0, 1, 2),), False), ("dp", ((3, 4, 5, 6, 7),), False),
    ]  # fmt: skip
    assert mesh.coordinate(3) == {}
    assert mesh.replicas_of(1) == (0, 1, 2)


def test_groups_that_do_not_cover_the_job_are_no_axis() -> None:
    mesh = Job().uses([range(6)], GRADIENTS).uses([(0, 1), (2, 3)], LAYERS).mesh()
    assert {one.name: one.whole for one in mesh.dimensions} == {"dp": True, "tp": False}
    assert mesh.axes == ()


def test_what_tied_weights_share_is_apart_from_the_replicas() -> None:
    """The first and the last of four stages sum the gradients of an embedding, in groups as large as the replicas'."""
    replicas = [(i, i + 1) for i in range(0, 8, 2)]
    mesh = Job().uses(replicas, GRADIENTS).uses([(0, 6), (1, 7)], GRADIENTS).mesh()
    assert [(one.teams, one.whole) for one in mesh.dimensions] == [
        (((0, 6), (1, 7)), False), (tuple(replicas), True),
    ]  # fmt: skip
    assert mesh.coordinate(7) == {"dp": 1}
    assert mesh.replicas_of(7) == (6, 7)


def test_shards_of_stages_that_share_an_embedding_have_no_replicas() -> None:
    """Of three stages the first and the last sum its gradients."""
    replicas = [(0, 1), (2, 3), (4, 5)]
    stages = [(0, 2, 4), (1, 3, 5)]
    mesh = Job().uses(replicas, *SHARDS).uses(stages, MESSAGES).uses([(0, 4), (1, 5)], GRADIENTS).mesh()
    assert mesh.coordinate(3) == {"pp": 1, "dp": 1}
    two = Job().uses(ROWS, *SHARDS).uses(COLUMNS, MESSAGES, GRADIENTS).mesh()
    assert named(two) == {"pp": COLUMNS, "dp": ROWS}


def test_a_flattened_dimension_adds_nothing_to_where_a_rank_is() -> None:
    tensor = [(i, i + 1) for i in range(0, 8, 2)]
    context = [(0, 2), (1, 3), (4, 6), (5, 7)]
    data = [(i, i + 4) for i in range(4)]
    both = [(0, 2, 4, 6), (1, 3, 5, 7)]
    job = Job().uses(tensor, LAYERS, desc="mesh_tp").uses(context, EXCHANGES, desc="mesh_cp")
    job.uses(both, *SHARDS, desc="mesh_dp_cp").uses(data, METRICS, desc="mesh_dp")
    mesh = job.mesh()
    assert mesh.coordinate(7) == {"dp": 1, "cp": 1, "tp": 1}
    assert mesh.replicas_of(7) == (1, 3, 5, 7)


def test_without_communications_there_is_no_mesh() -> None:
    rows = pd.DataFrame({name: [] for name in ("rank", "step", "kind", "name", "purpose", "group", "peer")})
    assert find_mesh(rows.assign(issue_ns=[], arrival_ns=[]), RunInfo("job", "job", []), Topology()) == Mesh()


def test_states_are_divided_over_the_data_parallel_ranks() -> None:
    mesh = Job().uses(ROWS, LAYERS).uses(COLUMNS, GRADIENTS).mesh()
    assert mesh.data_parallel_size(3, 4) == 2
    assert Job().uses([range(4)], GRADIENTS).mesh().data_parallel_size(3, 4) == 4
    before_any_reduction = Job().uses(ROWS, LAYERS).mesh()
    assert before_any_reduction.data_parallel_size(3, 4) == 2
    assert Mesh().data_parallel_size(0, 8) == 8


def test_what_experts_exchange_may_not_be_told() -> None:
    job = Job().uses([(0, 1)], EXCHANGES).uses([(2, 3)], EXCHANGES, sizes=(512, 1536))
    for row in job.rows[:2]:
        row["bytes"] = pd.NA
    rows = pd.DataFrame(job.rows).astype({"bytes": "Int64", "peer": "Int32"})
    mesh = find_mesh(rows, RunInfo("job", "job", [], groups=job.groups), Topology())
    assert [team for one in mesh.dimensions for team in one.teams] == [(0, 1), (2, 3)]
