"""`tensor_parallel`, `context_parallel` and `pipeline`: a model's layers sharded over ranks, sequences divided among
them, and layers divided among them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from .model import Complaint, Section, Whole, shown


def _partition(value: object) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and all(type(bound) is int for bound in value):
        return tuple(value)
    raise Complaint(
        f'{shown(value)} is no way to divide layers; write "parameters", "uniform", "type:REGEX", "measured", or the '
        "layers at which stages begin and end, as [0, 3, 8]"
    )


Partition = Annotated[str | tuple[int, ...], BeforeValidator(_partition)]


class TensorParallelConfig(Section):
    """Layers sharded over several ranks (`dsprof.engine.tensor`)."""

    autotp_size: Whole = Field(default=0, ge=0)
    """Ranks that share each layer; 0 and 1 mean none."""

    sequence_parallel: bool = False
    """dsprof's own. Between the sharded layers, shard activations along the sequence too."""

    plan: dict[str, str] | None = None
    """dsprof's own. Names of modules, where `*` stands for any part of a name, and how each is sharded: `column`,
    `row`, `vocab`, ...; by default that is found out from the model."""

    @property
    def size(self) -> int:
        """Ranks that share each layer, at least 1."""
        return max(1, self.autotp_size)


class ContextParallelConfig(Section):
    """dsprof's own. How ranks that share a sequence (`sequence_parallel_size`) compute its attention
    (`dsprof.engine.sequence`)."""

    attention: Literal["ulysses", "ring"] = "ulysses"
    """`ulysses`: all-to-alls bring each rank the whole sequence for some of the heads; `ring`: keys and values go round
    the ranks, for any number of heads."""

    order: Literal["contiguous", "zigzag"] = "zigzag"
    """Which positions a rank has, with `ring`. `contiguous`: one piece, of which under a causal mask the last costs
    most, 1 : 3 : 5 : 7 of four ranks; `zigzag`: two, one from the front and one from the back, which cost all alike."""

    check: bool = True
    """Before the first micro-batch, run the model on a few of its positions, whole and divided, and raise an error
    where the results differ: with attention that the engine does not see, or positions that a rank counts from 0."""


class PipelineConfig(Section):
    """The model divided into stages, one after the other (`dsprof.engine.pipe`)."""

    stages: Whole = Field(default=1, ge=1)
    """Stages of the pipeline; a PipelineModule with `num_stages` says it itself."""

    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    """dsprof's own. In what order stages work on micro-batches."""

    virtual_stages: Whole = Field(default=1, ge=1)
    """dsprof's own. Parts of the model that each rank holds, with the schedule `interleaved`."""

    partition_method: Partition = "parameters"
    """How layers are divided among stages: `parameters`, `uniform`, `type:REGEX`, counting layers whose class matches,
    `measured`, by `layer_costs`, or by what ranks measure at the start (`heterogeneous.speeds`), or the layers at which
    stages begin and end: `[0, 3, 8]`, two stages of 8 layers."""

    layer_costs: str | None = None
    """dsprof's own. The file with the seconds that each layer takes, for the partition method `measured`:
    `layer_costs.json` of a run under dsprof, or what `dsprof.engine.pipe.layer_costs.measure` writes."""

    activation_checkpoint_interval: Whole = Field(default=0, ge=0)
    """Layers between two activation checkpoints; 0 keeps all activations."""
