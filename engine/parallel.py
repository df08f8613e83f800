"""Which ranks this one works with: replicas that train on other data, and those that have the rest of its replica."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn

from .comm import Comm, open_comm
from .hooks import Hooks
from .lane import Inline
from .mesh import Mesh
from .pipe.module import PipelineModule, Tie
from .shared import SharedParameters, Sharing


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
    shared: SharedParameters = field(default_factory=SharedParameters)

    @property
    def apart(self) -> bool:
        """Whether no rank has the whole model."""
        return self.mesh.pp * self.mesh.tp > 1

    def close(self) -> None:
        """Destroy the groups. On all ranks."""
        for comm in (self.data, self.model, self.tensor, self.everyone):
            comm.close()
        self.shared.close()


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


def share(model: nn.Module, parallel: Parallel, hooks: Hooks) -> SharedParameters:
    """What this rank has in common with others of its replica, once layers are cut. On all ranks."""
    mesh = parallel.mesh
    sharings: list[Sharing] = []
    copies: list[nn.Parameter] = []
    if isinstance(model, PipelineModule):
        sharings += [_tied(tie, mesh, hooks) for tie in model.ties()]
    if mesh.tp > 1:
        from .tensor import cut_of, partial_parameters

        partial = set(partial_parameters(model))
        whole = [param for param in model.parameters() if cut_of(param) is None]
        first = mesh.tp_rank == 0
        for is_partial in (False, True):
            params = [param for param in whole if (param in partial) == is_partial]
            sharings.append(Sharing(parallel.tensor, params, counted=first, partial=is_partial))
        cuts = [(param, cut_of(param)) for param in model.parameters()]
        copies = [param for param, cut in cuts if cut is not None and cut.rank % cut.copies]
    return SharedParameters(sharings, copies)


def _tied(tie: Tie, mesh: Mesh, hooks: Hooks) -> Sharing:
    """Among the ranks of its stages, those of the same replica and part share it."""
    sets = [[ranks[at] for at in tie.ranks] for ranks in mesh.sets("pp")]
    comm = open_comm(sets, lambda: Inline(hooks))
    if comm.group is not None:
        shapes: list[Any] = [None] * comm.size
        dist.all_gather_object(shapes, [tuple(param.shape) for param in tie.params], group=comm.group)
        if any(other != shapes[0] for other in shapes):
            raise ValueError(
                f"tensor_parallel.plan: {tie.name} is tied across the pipeline stages {list(tie.ranks)}, which cut it "
                f'to {shapes}; give its layers the same style on all, or "whole"'
            )
    return Sharing(comm, tie.params, counted=mesh.pp_rank == tie.ranks[0], partial=True)


def mesh_of(pp: int, tp: int) -> Mesh:
    """The mesh of this job, whose ranks `pp` and `tp` must divide."""
    there = dist.is_initialized()
    size = dist.get_world_size() if there else 1
    return Mesh(pp, size // (pp * tp), tp, dist.get_rank() if there else 0)
