"""Which ranks share what: a grid of pipeline stages, data-parallel replicas and tensor-parallel ranks, and its groups.

Tensor-parallel ranks are next to each other, for they communicate in every layer; pipeline stages are farthest apart,
for they communicate least (Narayanan et al. 2021, arXiv 2104.04473, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ..hooks import Hooks
from .comm import Comm, open_comm, open_host_group
from .lane import Inline
from .launch import rank_and_size

Axis = Literal["pp", "dp", "tp"]
AXES: Final[tuple[Axis, ...]] = ("pp", "dp", "tp")


@dataclass(frozen=True, slots=True)
class Mesh:
    """`pp` stages of `dp` data-parallel ranks of `tp` ranks each, and where this `rank` is.

    rank = (stage x dp + data-parallel rank) x tp + part. Of the data-parallel ranks, `sp` neighbours share each
    sequence: they are one replica, which reads data of its own. Raises ValueError if the rank is not one of the grid,
    or `sp` does not divide `dp`.
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    rank: int = 0
    sp: int = 1

    def __post_init__(self) -> None:
        if min(self.pp, self.dp, self.tp, self.sp) < 1 or not 0 <= self.rank < self.size:
            raise ValueError(f"rank {self.rank} is not in a mesh of {self.pp} x {self.dp} x {self.tp} ranks")
        if self.dp % self.sp:
            raise ValueError(f"{self.sp} ranks that share sequences do not divide {self.dp} data-parallel ranks")

    @property
    def size(self) -> int:
        """Ranks of the job."""
        return self.pp * self.dp * self.tp

    @property
    def pp_rank(self) -> int:
        """This rank's place in its pipeline."""
        return self.rank // (self.dp * self.tp)

    @property
    def dp_rank(self) -> int:
        """Which of the ranks with the same part of the model this is: of those that average gradients."""
        return self.rank // self.tp % self.dp

    @property
    def replicas(self) -> int:
        """How many data-parallel ranks read data of their own."""
        return self.dp // self.sp

    @property
    def replica(self) -> int:
        """Which of them this rank is of."""
        return self.dp_rank // self.sp

    @property
    def sp_rank(self) -> int:
        """Which part of each sequence this rank has."""
        return self.dp_rank % self.sp

    @property
    def tp_rank(self) -> int:
        """Which part of each layer this rank has."""
        return self.rank % self.tp

    def sets(self, *axes: Axis) -> list[list[int]]:
        """All ranks of the job in sets that differ along `axes` alone, each in order."""
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.size):
            other = Mesh(self.pp, self.dp, self.tp, rank)
            place = tuple(getattr(other, f"{axis}_rank") for axis in AXES if axis not in axes)
            found.setdefault(place, []).append(rank)
        return list(found.values())

    def sequence_sets(self) -> list[list[int]]:
        """All ranks of the job in sets that share sequences, each in order."""
        return [ranks[first : first + self.sp] for ranks in self.sets("dp") for first in range(0, self.dp, self.sp)]

    def peers(self, *axes: Axis) -> list[int]:
        """That of these sets which this rank is in."""
        return next(ranks for ranks in self.sets(*axes) if self.rank in ranks)

    def __str__(self) -> str:
        return f"{self.pp} pipeline stages x {self.dp} data-parallel x {self.tp} tensor-parallel ranks"


@dataclass(slots=True)
class Parallel:
    """This rank's place in the mesh, and the groups whose collectives run on its main thread."""

    mesh: Mesh
    data: Comm
    """Ranks with the same part of the model, those that share sequences among them."""
    model: Comm
    """Ranks with the rest of it: the same data, other stages, other parts of layers."""
    tensor: Comm
    """Of those, the ones on the same stage."""
    everyone: Comm
    data_hosts: Comm
    """The ranks of `data` for what is in host memory: no rank waits for its device then. The same where `data` does."""
    hosts: Comm
    """Everyone, likewise."""

    def all(self) -> list[Comm]:
        """Each of them."""
        return [self.data, self.model, self.tensor, self.everyone, self.data_hosts, self.hosts]

    def close(self) -> None:
        """Destroy the groups. On all ranks."""
        for comm in self.all():
            comm.close()


def open_parallel(mesh: Mesh, hooks: Hooks) -> Parallel:
    """The groups of this rank. Every rank of the job must call this."""

    def inline() -> Inline:
        return Inline(hooks)

    def on_hosts(comm: Comm, sets: list[list[int]]) -> Comm:
        if comm.group is None or comm.device is None:
            return comm
        return Comm(open_host_group(sets, comm.group), inline())

    everyone_sets = [list(range(mesh.size))]
    data = open_comm(mesh.sets("dp"), inline)
    data_hosts = on_hosts(data, mesh.sets("dp"))
    if mesh.pp * mesh.tp == 1:
        return Parallel(mesh, data, Comm(None, None), Comm(None, None), data, data_hosts, data_hosts)
    model = open_comm(mesh.sets("pp", "tp"), inline)
    tensor = model if mesh.pp == 1 else open_comm(mesh.sets("tp"), inline)
    everyone = model if mesh.dp == 1 else open_comm(everyone_sets, inline)
    return Parallel(mesh, data, model, tensor, everyone, data_hosts, on_hosts(everyone, everyone_sets))


def mesh_of(pp: int, tp: int, sp: int = 1) -> Mesh:
    """The mesh of this job, whose ranks `pp`, `tp` and `sp` must divide."""
    rank, size = rank_and_size()
    return Mesh(pp, size // (pp * tp), tp, rank, sp)
