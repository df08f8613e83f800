"""What a script asks of a pipeline's module: names and meanings are DeepSpeed's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch.distributed as dist

from .absent import TellsAbsent
from .topology import PipeDataParallelTopology, ProcessTopology

if TYPE_CHECKING:
    from .grid import PipelineGrid

UNKNOWN: Final = "PipelineModule: its stages are not known yet; pass num_stages, or give it to initialize first"


class ModuleAnswers(TellsAbsent):
    """The part of a PipelineModule that says where things are."""

    told_as = "PipelineModule"

    num_stages: int | None
    bounds: list[int]
    grid: PipelineGrid | None
    activation_checkpoint_interval: int
    _rank: int
    _topology: ProcessTopology | None

    def topology(self) -> ProcessTopology:
        """The grid of ranks by its axes: what was passed, else `pipe` and `data`, and `model` if layers are cut."""
        if self._topology is not None:
            return self._topology
        if self.grid is not None:
            return self.grid.topology()
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        stages = self.num_pipeline_stages()
        return PipeDataParallelTopology(stages, ranks // stages)

    def mpu(self) -> PipelineGrid:
        """Where this rank is. Raises RuntimeError before there is an engine, which divides the ranks."""
        if self.grid is None:
            raise RuntimeError("PipelineModule.mpu: ranks are divided by initialize; call it first, without mpu=")
        return self.grid

    def num_pipeline_stages(self) -> int:
        """Ranks of the pipeline."""
        if self.num_stages is None:
            raise RuntimeError(UNKNOWN)
        return self.num_stages

    @property
    def parts(self) -> list[int]:
        """`bounds`."""
        return self.bounds

    def partitions(self) -> list[int]:
        """`bounds`."""
        return self.bounds

    @property
    def stage_id(self) -> int:
        """This rank's place in the pipeline."""
        return self._rank

    def stage_owner(self, layer_idx: int) -> int:
        """The pipeline rank that has layer number `layer_idx`. Raises ValueError if there is no such layer."""
        layers = self.bounds[-1] if self.bounds else 0
        if not 0 <= layer_idx < layers:
            raise ValueError(f"stage_owner: there is no layer {layer_idx}; there are {layers}, from 0 on")
        stage = next(s for s in range(len(self.bounds) - 1) if layer_idx < self.bounds[s + 1])
        return stage % self.num_pipeline_stages()

    def set_checkpoint_interval(self, interval: int) -> None:
        """Layers between two activation checkpoints from now on; 0 keeps all activations."""
        if interval < 0:
            raise ValueError(f"set_checkpoint_interval: {interval}; write 0, or the number of layers between two")
        self.activation_checkpoint_interval = interval
