"""Where a rank is, by the names of DeepSpeed's `engine.grid` and Megatron's `mpu`."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from ..comm.groups import Parallel
from ..comm.mesh import Mesh
from .topology import PipeDataParallelTopology, PipeModelDataParallelTopology, ProcessTopology


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
        self.pp_group, self.dp_group = _ranks(mesh, mesh.sets("pp")), _ranks(mesh, mesh.sets("dp"))
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

    def get_global_rank(self) -> int:
        """Among all ranks."""
        return self._mesh.rank

    def get_stage_id(self) -> int:
        """Which place in the pipeline."""
        return self._mesh.pp_rank

    get_pipe_parallel_rank = get_stage_id
    get_pipeline_model_parallel_rank = get_stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """Ranks of a pipeline."""
        return self._mesh.pp

    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size

    def get_pipe_parallel_group(self) -> ProcessGroup | None:
        """Those ranks. Raises RuntimeError if layers are cut, too: the engine has no group of them for others then."""
        if self._mesh.tp > 1:
            raise RuntimeError(
                "get_pipe_parallel_group: the pipeline's own groups are in use; make one of engine.grid.pp_group, on "
                "all ranks, with torch.distributed.new_group"
            )
        return self._parallel.model.group

    def get_data_parallel_id(self) -> int:
        """Which replica."""
        return self._mesh.dp_rank

    get_data_parallel_rank = get_data_parallel_id

    def get_data_parallel_world_size(self) -> int:
        """Replicas."""
        return self._mesh.dp

    def get_data_parallel_group(self) -> ProcessGroup | None:
        """The ranks with the same part of the model."""
        return self._parallel.data.group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Their global ranks."""
        return self.dp_group

    def get_model_parallel_rank(self) -> int:
        """Among the ranks that have the model together."""
        return self._mesh.pp_rank * self._mesh.tp + self._mesh.tp_rank

    def get_model_parallel_world_size(self) -> int:
        """Ranks that have the model together."""
        return self._mesh.pp * self._mesh.tp

    def get_model_parallel_group(self) -> ProcessGroup | None:
        """Those ranks."""
        return self._parallel.model.group

    def get_slice_parallel_rank(self) -> int:
        """Among the ranks that share layers."""
        return self._mesh.tp_rank

    get_tensor_model_parallel_rank = get_slice_parallel_rank

    def get_slice_parallel_world_size(self) -> int:
        """Ranks that share layers."""
        return self._mesh.tp

    get_tensor_model_parallel_world_size = get_slice_parallel_world_size

    def get_slice_parallel_group(self) -> ProcessGroup | None:
        """Those ranks."""
        return self._parallel.tensor.group

    get_tensor_model_parallel_group = get_slice_parallel_group


def _ranks(mesh: Mesh, sets: list[list[int]]) -> list[int]:
    """That of the sets which has this rank."""
    return next(ranks for ranks in sets if mesh.rank in ranks)
