"""Where a rank of a pipeline is, as scripts ask its engine: names and meanings are DeepSpeed's."""

from __future__ import annotations

from ..train.engine import Engine
from .absent import TellsAbsent
from .grid import PipelineGrid
from .module import PipelineModule


class PlacedEngine(TellsAbsent, Engine):
    """That part of a PipelineEngine."""

    told_as = "PipelineEngine"

    module: PipelineModule

    @property
    def grid(self) -> PipelineGrid:
        """Where this rank is, by DeepSpeed's names."""
        return self.module.mpu()

    @property
    def mpu(self) -> PipelineGrid:
        """The same, as Megatron's scripts ask for it."""
        return self.grid

    @property
    def stage_id(self) -> int:
        """This rank's place in the pipeline."""
        return self.parallel.mesh.pp_rank

    @property
    def num_stages(self) -> int:
        """Ranks of the pipeline."""
        return self.parallel.mesh.pp

    @property
    def micro_batches(self) -> int:
        """Micro-batches a step."""
        return self.gradient_accumulation_steps()

    @property
    def micro_batch_size(self) -> int:
        """Samples of each, on one replica."""
        return self.train_micro_batch_size_per_gpu()

    @property
    def prev_stage(self) -> int:
        """`stage_id` - 1."""
        return self.stage_id - 1

    @property
    def next_stage(self) -> int:
        """`stage_id` + 1."""
        return self.stage_id + 1

    def get_pipeline_parallel_rank(self) -> int:
        """`stage_id`."""
        return self.stage_id

    @property
    def is_pipe_parallel(self) -> bool:
        """Whether there are several stages."""
        return self.parallel.mesh.pp > 1

    @property
    def is_data_parallel(self) -> bool:
        """Whether there are several replicas."""
        return self.parallel.mesh.dp > 1

    @property
    def is_model_parallel(self) -> bool:
        """Whether layers are cut over ranks."""
        return self.parallel.mesh.tp > 1

    def is_first_stage(self) -> bool:
        """Whether this rank has the first layers."""
        return 0 in self.module.stages

    def is_last_stage(self) -> bool:
        """Whether this rank has the last layers."""
        return len(self.module.bounds) - 2 in self.module.stages

    def reset_activation_shape(self) -> None:
        """Nothing to reset: messages say their shapes themselves."""

    def set_has_attention_mask(self, value: bool) -> None:
        """Nothing to set: whatever stages pass on arrives, masks of bools as well."""
