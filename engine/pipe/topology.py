"""Grids of ranks with named axes, as DeepSpeed's scripts describe them, and where a rank is in its own.

The last axis is the innermost: ranks that are neighbours along it have neighbouring numbers.

At the end: which layers each stage of a pipeline has, and which stages a rank has.
"""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from torch.distributed import ProcessGroup

from ..comm.launch import rank_and_size
from ..comm.mesh import Parallel

_make_class: Final[Callable[..., Any]] = namedtuple
"""Of fields that are not known before; a type checker wants them to be."""


class ProcessTopology:
    """Ranks 0, 1, ... in a grid of `dims[i]` along axis `axes[i]`; `ProcessCoord` is a named tuple of those axes.

    Raises ValueError for axes that are not names, or not as many as `dims`, and for a length below 1.
    """

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        if len(axes) != len(dims):
            raise ValueError(f"topology: {len(axes)} axes and {len(dims)} dims; give a length for each axis")
        for axis, dim in zip(axes, dims, strict=True):
            if isinstance(dim, bool) or not isinstance(dim, int) or dim < 1:
                raise ValueError(f"topology: axis {axis} has length {dim!r}; it must be a whole number above 0")
        self.axes = list(axes)
        self.dims = list(dims)
        self.ProcessCoord = _make_class("ProcessCoord", self.axes)
        self.mapping: dict[Any, int] = {
            self.ProcessCoord(*place): rank for rank, place in enumerate(itertools.product(*map(range, self.dims)))
        }
        """Where each rank is, in the order of ranks."""
        self._coords = list(self.mapping)

    def world_size(self) -> int:
        """Ranks in the grid."""
        return len(self._coords)

    def get_rank(self, **coord: int) -> int:
        """The rank at one place along every axis. Raises ValueError if there is none, or an axis is left out."""
        if coord.keys() != set(self.axes):
            raise ValueError(
                f"get_rank: give a place along each of {', '.join(self.axes)} and nothing else (filter_match finds all "
                "ranks along some of them)"
            )
        place = self.ProcessCoord(**coord)
        if place not in self.mapping:
            raise ValueError(f"get_rank: {place} is not in a grid of {self._lengths()}")
        return self.mapping[place]

    def get_coord(self, rank: int) -> Any:
        """The place of `rank`, as a named tuple. Raises ValueError if there is no such rank."""
        if not 0 <= rank < len(self._coords):
            raise ValueError(f"get_coord: there is no rank {rank} in a grid of {self._lengths()}")
        return self._coords[rank]

    def get_dim(self, axis: str) -> int:
        """Ranks along `axis`; 0 if there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_axis_names(self) -> list[str]:
        """The axes, outermost first."""
        return self.axes

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """All ranks in lists that differ along `axis` alone, which is who communicates along it."""
        if axis not in self.axes:
            return []
        lists: dict[tuple[int, ...], list[int]] = {}
        at = self.axes.index(axis)
        for rank, coord in enumerate(self._coords):
            lists.setdefault(coord[:at] + coord[at + 1 :], []).append(rank)
        return list(lists.values())

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """The ranks at place `idx` along `axis`."""
        return self.filter_match(**{axis: idx})

    def filter_match(self, **coord: int) -> list[int]:
        """The ranks at these places, along as many axes as are given. Raises ValueError for an axis there is not."""
        for axis in coord:
            if axis not in self.axes:
                raise ValueError(f"topology: there is no axis {axis}; there are {', '.join(self.axes)}")
        return [
            rank
            for rank, place in enumerate(self._coords)
            if all(getattr(place, axis) == index for axis, index in coord.items())
        ]

    def get_rank_repr(
        self, rank: int, omit_axes: Iterable[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """The place of `rank` in words for names of files, as in `model_01`, but for `omit_axes`."""
        coord, left_out = self.get_coord(rank), set(omit_axes)
        return outer_sep.join(
            f"{axis}{inner_sep}{getattr(coord, axis):02d}" for axis in self.axes if axis not in left_out
        )

    def __str__(self) -> str:
        return str(self.mapping)

    def _lengths(self) -> str:
        return " x ".join(f"{dim} {axis}" for axis, dim in zip(self.axes, self.dims, strict=True))


class PipeDataParallelTopology(ProcessTopology):
    """Pipelines of `num_pp` stages, and `num_dp` of them, side by side."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """The same with every stage's layers sharded over `num_mp` ranks (the axis `model`), which are innermost."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


def stages_asked(num_stages: int | None, topology: ProcessTopology | None) -> int | None:
    """The pipeline ranks that a PipelineModule's arguments ask for; None if they leave that to the configuration.

    Raises ValueError if they contradict each other, or the topology's first axis is not `pipe`.
    """
    if topology is None:
        if num_stages is not None and num_stages < 1:
            raise ValueError(f"PipelineModule: num_stages is {num_stages}; write 1 or more")
        return num_stages
    axes = topology.get_axis_names()
    if "pipe" not in axes or axes[0] != "pipe":
        raise ValueError(f"PipelineModule: the topology's axes are {axes}; `pipe` must be the first of them")
    if num_stages not in (None, topology.get_dim("pipe")):
        raise ValueError(
            f"PipelineModule: num_stages is {num_stages}, and the topology has {topology.get_dim('pipe')}; pass one"
        )
    return topology.get_dim("pipe")


class PipelineGrid:
    """A rank's place among stages, replicas and tensor-parallel ranks. A group of one is None.

    As in DeepSpeed, `model_parallel` means all ranks of a replica, of whichever stage, and `slice_parallel` and
    `tensor_model_parallel` those that share its layers.
    """

    def __init__(self, parallel: Parallel) -> None:
        mesh = parallel.mesh
        self._mesh = mesh
        self._parallel = parallel
        self.global_rank, self.world_size = mesh.rank, mesh.size
        self.stage_id, self.data_parallel_id = mesh.pp_rank, mesh.dp_rank
        self.pipe_parallel_size, self.data_parallel_size = mesh.pp, mesh.dp
        self.model_parallel_size = self.slice_parallel_size = mesh.tp
        self.is_first_stage, self.is_last_stage = mesh.pp_rank == 0, mesh.pp_rank == mesh.pp - 1
        self.pp_group, self.dp_group = mesh.peers("pp"), mesh.peers("dp")
        """Global ranks of this rank's pipeline, and of those with the same part of the model."""

    def topology(self) -> ProcessTopology:
        """The same with named axes, for all ranks."""
        pp, dp, tp = self._mesh.pp, self._mesh.dp, self._mesh.tp
        return PipeModelDataParallelTopology(pp, tp, dp) if tp > 1 else PipeDataParallelTopology(pp, dp)

    def stage_to_global(self, stage_id: int, data: int | None = None, model: int | None = None) -> int:
        """The global rank at `stage_id`, in the place of this rank along the other axes unless that is given."""
        mesh = self._mesh
        replica, part = mesh.dp_rank if data is None else data, mesh.tp_rank if model is None else model
        for value, size, name in (
            (stage_id, mesh.pp, "stage_id"),
            (replica, mesh.dp, "data"),
            (part, mesh.tp, "model"),
        ):
            if not 0 <= value < size:
                raise ValueError(f"stage_to_global: {name}={value}; there are {size}, from 0 on")
        return (stage_id * mesh.dp + replica) * mesh.tp + part

    def __getattr__(self, name: str) -> Callable[[], Any]:
        if name in ANSWERS:
            return partial(ANSWERS[name], self._parallel)
        raise AttributeError(f"the engine's grid has no {name!r}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *ANSWERS})


def _pipeline_group(parallel: Parallel) -> ProcessGroup | None:
    """Raises RuntimeError if layers are sharded, too: the engine has no group of them for others then."""
    if parallel.mesh.tp > 1:
        raise RuntimeError(
            "get_pipe_parallel_group: the pipeline's own groups are in use; make one of engine.grid.pp_group, on all "
            "ranks, with torch.distributed.new_group"
        )
    return parallel.model.group


def _along(axes: Sequence[str], **answers: Callable[[Parallel], Any]) -> dict[str, Callable[[Parallel], Any]]:
    """`get_{axis}_{what}` for each of the names that an axis has."""
    return {f"get_{axis}_{what}": answer for axis in axes for what, answer in answers.items()}


ANSWERS: Final[Mapping[str, Callable[[Parallel], Any]]] = {
    "get_global_rank": lambda parallel: parallel.mesh.rank,
    "get_stage_id": lambda parallel: parallel.mesh.pp_rank,
    "get_pipe_parallel_group": _pipeline_group,
    **_along(
        ["pipe_parallel", "pipeline_model_parallel"],
        rank=lambda parallel: parallel.mesh.pp_rank, world_size=lambda parallel: parallel.mesh.pp,
    ),
    **_along(
        ["data_parallel"], id=lambda parallel: parallel.mesh.replica, rank=lambda parallel: parallel.mesh.replica,
        world_size=lambda parallel: parallel.mesh.replicas, group=lambda parallel: parallel.data.group,
        group_ranks=lambda parallel: parallel.mesh.peers("dp"),
    ),
    **_along(
        ["model_parallel"], rank=lambda parallel: parallel.mesh.pp_rank * parallel.mesh.tp + parallel.mesh.tp_rank,
        world_size=lambda parallel: parallel.mesh.pp * parallel.mesh.tp, group=lambda parallel: parallel.model.group,
    ),
    **_along(
        ["slice_parallel", "tensor_model_parallel"], rank=lambda parallel: parallel.mesh.tp_rank,
        world_size=lambda parallel: parallel.mesh.tp, group=lambda parallel: parallel.tensor.group,
    ),
}  # fmt: skip
"""Name -> what calling it returns."""


# --- Where the layers of a pipeline are: which of them each stage has, and which stages this rank has


UNKNOWN: Final = "PipelineModule: its stages are not known yet; pass num_stages, or give it to initialize first"


@dataclass
class Placement:
    """Of the layers of one PipelineModule. What is public here, a PipelineModule has, too, as DeepSpeed's has it."""

    num_stages: int | None
    """Pipeline ranks; None until they are known."""
    virtual_stages: int
    """Stages that each rank has."""
    asked: ProcessTopology | None
    """The grid that the script passed."""
    bounds: list[int] = field(default_factory=list)
    """Layers `bounds[s]` to before `bounds[s + 1]` are stage s; empty until the stages are known."""
    stage_id: int = 0
    """This rank's place in the pipeline."""
    grid: PipelineGrid | None = None
    """Where this rank is among all, once there is an engine."""

    def num_pipeline_stages(self) -> int:
        """Ranks of the pipeline. Raises RuntimeError if they are not known yet."""
        if self.num_stages is None:
            raise RuntimeError(UNKNOWN)
        return self.num_stages

    @property
    def stages(self) -> list[int]:
        """The stages that are here."""
        ranks = self.num_pipeline_stages()
        return [self.stage_id + turn * ranks for turn in range(self.virtual_stages)]

    @property
    def last_stage(self) -> int:
        """The number of the last stage."""
        return len(self.bounds) - 2

    def is_first(self) -> bool:
        """Whether this rank has the first layers."""
        return 0 in self.stages

    def is_last(self) -> bool:
        """Whether this rank has the last layers."""
        return self.last_stage in self.stages

    def stage_owner(self, layer_idx: int) -> int:
        """The pipeline rank that has layer number `layer_idx`. Raises ValueError if there is no such layer."""
        layers = self.bounds[-1] if self.bounds else 0
        if not 0 <= layer_idx < layers:
            raise ValueError(f"stage_owner: there is no layer {layer_idx}; there are {layers}, from 0 on")
        stage = next(s for s in range(len(self.bounds) - 1) if layer_idx < self.bounds[s + 1])
        return stage % self.num_pipeline_stages()

    def owners(self, layers: Sequence[int]) -> tuple[int, ...]:
        """Pipeline ranks that have at least one of `layers`, in the order of their first stage."""
        return tuple(dict.fromkeys(map(self.stage_owner, sorted(layers))))

    @property
    def parts(self) -> list[int]:
        """`bounds`."""
        return self.bounds

    def partitions(self) -> list[int]:
        """`bounds`."""
        return self.bounds

    def topology(self) -> ProcessTopology:
        """The grid of ranks by its axes: what was passed, else `pipe` and `data`, and `model` if layers are sharded."""
        if self.asked is not None:
            return self.asked
        if self.grid is not None:
            return self.grid.topology()
        stages = self.num_pipeline_stages()
        return PipeDataParallelTopology(stages, rank_and_size()[1] // stages)

    def mpu(self) -> PipelineGrid:
        """Where this rank is. Raises RuntimeError before there is an engine, which divides the ranks."""
        if self.grid is None:
            raise RuntimeError("PipelineModule.mpu: ranks are divided by initialize; call it first, without mpu=")
        return self.grid


NAMES: Final = frozenset({
    "bounds", "grid", "is_first", "is_last", "mpu", "num_pipeline_stages", "num_stages", "partitions", "parts",
    "stage_id", "stage_owner", "stages", "topology", "virtual_stages",
})  # fmt: skip
"""What a PipelineModule answers by its placement."""
