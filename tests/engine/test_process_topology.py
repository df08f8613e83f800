"""Grids of ranks under DeepSpeed's names; the numbers are those that DeepSpeed 0.19.8 gives."""

from __future__ import annotations

import pytest

from dsprof.engine.comm.mesh import Mesh
from dsprof.engine.pipe import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology

CUBE = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)


def test_the_last_axis_is_the_innermost() -> None:
    grid = ProcessTopology(axes=["x", "y"], dims=[2, 3])
    assert [tuple(grid.get_coord(rank)) for rank in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert (grid.get_rank(x=1, y=0), grid.get_coord(4).y) == (3, 1)
    assert (grid.world_size(), grid.get_dim("y"), grid.get_dim("z")) == (6, 3, 0)
    assert grid.get_axis_names() == ["x", "y"]


def test_ranks_that_communicate_along_an_axis() -> None:
    assert CUBE.get_axis_names() == ["pipe", "data", "model"]
    assert CUBE.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert CUBE.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert CUBE.get_axis_comm_lists("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert CUBE.get_axis_comm_lists("expert") == []
    assert PipeDataParallelTopology(num_pp=2, num_dp=2).get_axis_comm_lists("pipe") == [[0, 2], [1, 3]]


def test_ranks_at_given_coordinates() -> None:
    assert CUBE.filter_match(pipe=0, data=1) == [2, 3]
    assert CUBE.get_axis_list("model", 1) == [1, 3, 5, 7]
    assert (CUBE.get_rank_repr(3), CUBE.get_rank_repr(5, omit_axes=["data"])) == ("model_01", "pipe_01-model_01")


def test_ranks_lie_as_in_the_engines_mesh() -> None:
    grid = PipeModelDataParallelTopology(num_pp=2, num_mp=3, num_dp=4)
    for rank in range(24):
        mesh = Mesh(pp=2, dp=4, tp=3, rank=rank)
        assert tuple(grid.get_coord(rank)) == (mesh.pp_rank, mesh.dp_rank, mesh.tp_rank)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: ProcessTopology(["x"], [2, 3]), "1 axes and 2 dims"),
        (lambda: ProcessTopology(["x"], [0]), "axis x has length 0"),
        (lambda: CUBE.get_rank(pipe=0), "give a place along each of pipe, data, model"),
        (lambda: CUBE.get_rank(pipe=0, data=0, model=2), "model=2. is not in a grid of 2 pipe x 2 data x 2 model"),
        (lambda: CUBE.get_coord(8), "there is no rank 8 in a grid of 2 pipe x 2 data x 2 model"),
        (lambda: CUBE.filter_match(expert=0), "there is no axis expert; there are pipe, data, model"),
    ],
)
def test_coordinates_outside_the_grid_are_refused(call: object, says: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=says):
        call()
