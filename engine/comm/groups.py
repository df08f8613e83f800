"""Which ranks this one works with: replicas that train on other data, and those that have the rest of its replica."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from ..hooks import Hooks
from .comm import Comm, open_comm
from .lane import Inline
from .mesh import Mesh


@dataclass(slots=True)
class Parallel:
    """This rank's place in the mesh, and the groups whose collectives run on its main thread."""

    mesh: Mesh
    data: Comm
    """Ranks with the same part of the model."""
    model: Comm
    """Ranks with the rest of it: the same data, other stages, other parts of layers."""
    tensor: Comm
    """Of those, the ones on the same stage."""
    everyone: Comm

    @property
    def apart(self) -> bool:
        """Whether no rank has the whole model."""
        return self.mesh.pp * self.mesh.tp > 1

    def close(self) -> None:
        """Destroy the groups. On all ranks."""
        for comm in (self.data, self.model, self.tensor, self.everyone):
            comm.close()


def open_parallel(mesh: Mesh, hooks: Hooks) -> Parallel:
    """The groups of this rank. Every rank of the job must call this."""

    def inline() -> Inline:
        return Inline(hooks)

    data = open_comm(mesh.sets("dp"), inline)
    if mesh.pp * mesh.tp == 1:
        return Parallel(mesh, data, Comm(None, None), Comm(None, None), data)
    model = open_comm(mesh.sets("pp", "tp"), inline)
    tensor = model if mesh.pp == 1 else open_comm(mesh.sets("tp"), inline)
    everyone = model if mesh.dp == 1 else open_comm([range(mesh.size)], inline)
    return Parallel(mesh, data, model, tensor, everyone)


def mesh_of(pp: int, tp: int) -> Mesh:
    """The mesh of this job, whose ranks `pp` and `tp` must divide."""
    there = dist.is_initialized()
    size = dist.get_world_size() if there else 1
    return Mesh(pp, size // (pp * tp), tp, dist.get_rank() if there else 0)
