"""`tensor_parallel` and `pipeline`: read and checked; the engine cannot do more than one of either yet."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .model import Section, Whole


class TensorParallelConfig(Section):
    """Layers cut over several ranks. Not available yet: 0 or 1 rank."""

    autotp_size: Whole = Field(default=0, ge=0)
    """Ranks that share each layer; 0 and 1 mean none."""

    @property
    def size(self) -> int:
        """Ranks that share each layer, at least 1."""
        return max(1, self.autotp_size)


class PipelineConfig(Section):
    """The model cut into stages, one after the other. Not available yet: 1 stage."""

    stages: Whole = Field(default=1, ge=1)
    """Stages of the pipeline."""

    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    """dsprof's own. In what order stages work on micro-batches."""

    virtual_stages: Whole = Field(default=1, ge=1)
    """dsprof's own. Parts of the model that each rank holds, with the schedule `interleaved`."""

    partition_method: str = "parameters"
    """How layers are divided among stages: `parameters`, `uniform`, or `type:REGEX`, counting layers whose class
    matches."""

    activation_checkpoint_interval: Whole = Field(default=0, ge=0)
    """Layers between two activation checkpoints; 0 keeps all activations."""
