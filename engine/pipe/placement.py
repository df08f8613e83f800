"""Where the layers of a pipeline are: which of them each stage has, and which stages this rank has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from ..comm.launch import rank_and_size
from .topology import PipeDataParallelTopology, PipelineGrid, ProcessTopology

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
