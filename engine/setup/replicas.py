"""Parameters that several ranks of a replica hold: tied across stages, or replicated over tensor-parallel ranks."""

from __future__ import annotations

from torch import nn

from ..comm.comm import open_comm
from ..comm.consensus import gather_objects
from ..comm.lane import Inline
from ..comm.mesh import Mesh, Parallel
from ..hooks import Hooks
from ..pipe.module import PipelineModule, TiedParameters
from ..tensor.sharding import partial_parameters, shard_of
from ..zero.shared_params import SharedParameters, Sharing


def share(model: nn.Module, parallel: Parallel, hooks: Hooks) -> SharedParameters:
    """What this rank has in common with others of its replica, once layers are sharded. On all ranks."""
    mesh = parallel.mesh
    sharings: list[Sharing] = []
    copies: list[nn.Parameter] = []
    if isinstance(model, PipelineModule):
        sharings += [_tied(tie, mesh, hooks) for tie in model.ties()]
    if mesh.tp > 1:
        partial = set(partial_parameters(model))
        whole = [param for param in model.parameters() if shard_of(param) is None]
        first = mesh.tp_rank == 0
        for is_partial in (False, True):
            params = [param for param in whole if (param in partial) == is_partial]
            sharings.append(Sharing(parallel.tensor, params, counted=first, partial=is_partial))
        shards = [(param, shard_of(param)) for param in model.parameters()]
        copies = [param for param, shard in shards if shard is not None and shard.rank % shard.copies]
    return SharedParameters(sharings, copies)


def _tied(tie: TiedParameters, mesh: Mesh, hooks: Hooks) -> Sharing:
    """Among the ranks of its stages, those of the same replica and part share it."""
    sets = [[ranks[at] for at in tie.ranks] for ranks in mesh.sets("pp")]
    comm = open_comm(sets, lambda: Inline(hooks))
    shapes = gather_objects([tuple(param.shape) for param in tie.params], comm)
    if any(other != shapes[0] for other in shapes):
        raise ValueError(
            f"tensor_parallel.plan: {tie.name} is tied across the pipeline stages {list(tie.ranks)}, which shard it to "
            f'{shapes}; give its layers the same style on all, or "whole"'
        )
    return Sharing(comm, tie.params, counted=mesh.pp_rank == tie.ranks[0], partial=True)
