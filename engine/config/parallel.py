"""`tensor_parallel`, `context_parallel` and `pipeline`: a model's layers sharded over ranks, sequences divided among
them, and layers divided among them; and `heterogeneous`: ranks of unequal speed or memory."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field

from .model import Complaint, Section, Whole, real, shown


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


# --- `heterogeneous`: ranks of unequal speed and memory, and what each gets then of a batch, of layers and of state


Amount = float | None
"""A rank's, in any unit; None: a rank that gets nothing of what is divided by it."""


def _of_ranks(what: str, instead: str) -> BeforeValidator:
    """A number for each rank, its `what`; `instead` is what to write where one is none."""

    def numbers(value: object) -> object:
        if value is None or value == "measure":
            return value
        if not isinstance(value, list | tuple) or not value:
            raise Complaint(
                f'{shown(value)} is neither "measure" nor a list with the {what} of each rank, such as [1, 2]'
            )
        return tuple(number(each, rank) for rank, each in enumerate(value))

    def number(value: object, rank: int) -> Amount:
        if value is None:
            return None
        try:
            found = real(value)
        except ValueError:
            found = 0.0
        if found <= 0:
            raise Complaint(f"{shown(value)} for rank {rank} is not a number above 0; write {instead}")
        return found

    return BeforeValidator(numbers)


_SPEED: Final = _of_ranks(
    "speed",
    "how fast it is beside the others, such as 0.5 for half as fast, or null for a rank that is to get no samples",
)
_MEMORY: Final = _of_ranks(
    "memory", "how much it has, such as 40 for 40 GiB, or null for a rank that is to hold no shards"
)


class HeterogeneousConfig(Section):
    """dsprof's own. Ranks of unequal speed: each data-parallel replica gets samples, and each pipeline stage layers,
    in proportion. The result is that of the same batch in one process. And ranks of unequal memory, each of which
    holds shards in proportion."""

    speeds: Annotated[Literal["measure"] | tuple[Amount, ...] | None, _SPEED] = None
    """How fast each rank is, in order, in any unit: `[1, 2]`, the second twice as fast. `null` in the place of a speed:
    a rank without samples, which keeps its shards. `"measure"`: every rank times the job's own model at the start.
    `train_micro_batch_size_per_gpu` is then the mean of the replicas. Default: all are equally fast."""

    memory: Annotated[Literal["measure"] | tuple[Amount, ...] | None, _MEMORY] = None
    """How much memory each rank has, in order, in any unit: `[80, 40]`, of which the second holds half as much as the
    first of what ZeRO shards. `null`: a rank that holds none. Of the ranks of one replica the smallest counts.
    `"measure"`: that of its device, or its part of the host's, where the optimizer steps. Default: equal shards."""


def stage_speeds(speeds: Sequence[Amount], stages: int, tensor: int) -> list[float]:
    """How fast each pipeline stage is, all its replicas together; of ranks that share each layer, the slowest counts.

    Rank = (stage x replicas + replica) x `tensor` + part. Replicas without samples do not count.
    """
    rows = _grid(speeds, stages, tensor)
    return [sum(row[at] or 0.0 for at in range(len(row)) if all(other[at] for other in rows)) for row in rows]


def replica_speeds(speeds: Sequence[Amount], stages: int, tensor: int) -> list[float]:
    """How fast each data-parallel replica is beside the others: as its slowest stage, for the layers that this has
    (`stage_speeds`). 0 for one that is to get no samples."""
    rows, whole = _grid(speeds, stages, tensor), stage_speeds(speeds, stages, tensor)
    return [
        min((each or 0.0) / all_ if all_ else 0.0 for each, all_ in zip(column, whole, strict=True))
        for column in zip(*rows, strict=True)
    ]


def replica_memory(memory: Sequence[Amount], stages: int, tensor: int) -> list[float]:
    """What each data-parallel replica holds beside the others: as its rank with the least. 0 for one without any."""
    return [min(each or 0.0 for each in column) for column in zip(*_grid(memory, stages, tensor), strict=True)]


def _grid(speeds: Sequence[Amount], stages: int, tensor: int) -> list[list[Amount]]:
    """The speed, or memory, of each stage of each replica [stages, replicas]."""
    parts = [speeds[at : at + tensor] for at in range(0, len(speeds), tensor)]
    slowest = [None if None in part else min(each for each in part if each is not None) for part in parts]
    replicas = len(parts) // stages
    return [slowest[at : at + replicas] for at in range(0, len(slowest), replicas)]


def divide(samples: int, speeds: Sequence[float]) -> list[int]:
    """Whole numbers that add up to `samples`, such that the rank which takes longest, its number / its speed, takes as
    short as it can. Ranks of speed 0 get none."""
    total = sum(speeds)
    found = [int(samples * speed / total) for speed in speeds]
    queue = [((number + 1) / speed, at) for at, (number, speed) in enumerate(zip(found, speeds, strict=True)) if speed]
    heapq.heapify(queue)
    for _ in range(samples - sum(found)):
        _, at = queue[0]
        found[at] += 1
        heapq.heapreplace(queue, ((found[at] + 1) / speeds[at], at))
    return found
