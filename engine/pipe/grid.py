"""Where a rank is, by the names of DeepSpeed's `engine.grid` and Megatron's `mpu`."""

from __future__ import annotations

from torch.distributed import ProcessGroup

from ..parallel import Parallel


class PipelineGrid:
    """A rank's place among stages, replicas and tensor-parallel ranks. A group of one is None."""

    def __init__(self, parallel: Parallel) -> None:
        self._mesh = parallel.mesh
        self._parallel = parallel

    def get_global_rank(self) -> int:
        """Among all ranks."""
        return self._mesh.rank

    def get_stage_id(self) -> int:
        """Which place in the pipeline."""
        return self._mesh.pp_rank

    get_pipe_parallel_rank = get_stage_id

    def get_pipe_parallel_world_size(self) -> int:
        """Ranks of a pipeline."""
        return self._mesh.pp

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

    def get_model_parallel_rank(self) -> int:
        """Among the ranks that share layers, as DeepSpeed's grid has it."""
        return self._mesh.tp_rank

    get_slice_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_rank = get_model_parallel_rank

    def get_model_parallel_world_size(self) -> int:
        """Ranks that share layers."""
        return self._mesh.tp

    get_slice_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_model_parallel_group(self) -> ProcessGroup | None:
        """Those ranks."""
        return self._parallel.tensor.group

    get_slice_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_group = get_model_parallel_group
