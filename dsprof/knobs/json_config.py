"""Any key of a JSON configuration of DeepSpeed or of dsprof's engine, such as zero_optimization.reduce_bucket_size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dsprof.words import did_you_mean

from .knob import DIFFERS, ROUNDING, SAME, Facts, Json, Knob, KnobError, Numbers, Stated, TrueOrFalse

_CONFIG: Final = "deepspeed.initialize or dsprof.engine.initialize"
OPEN: Final = ("optimizer.params", "scheduler.params")
"""Sections whose keys are those of the optimizer or the schedule."""
_ZERO: Final = "zero_optimization"
_OFFLOADED: Final = (f"{_ZERO}.offload_optimizer", f"{_ZERO}.offload_param")
MAY_CHANGE: Final[Mapping[str, Numbers]] = {
    **{
        f"{_ZERO}.{key}": SAME
        for key in (
            "allgather_bucket_size", "allgather_partitions", "contiguous_gradients", "overlap_comm",
            "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
            "stage3_max_live_parameters", "stage3_max_reuse_distance", "sub_group_size", "zero_hpz_partition_size",
        )
    },
    **{
        f"{_ZERO}.{key}": ROUNDING
        for key in (
            "stage", "reduce_bucket_size", "reduce_scatter", "round_robin_gradients", "offload_optimizer",
            "offload_optimizer.device", "offload_param", "offload_param.device", "zero_quantized_weights",
            "zero_quantized_gradients",
        )
    },
    **{f"{section}.{key}": SAME for section in _OFFLOADED for key in ("pin_memory", "buffer_count")},
    **{f"{_OFFLOADED[0]}.{key}": SAME for key in ("pipeline_read", "pipeline_write")},
    **{f"{_OFFLOADED[1]}.{key}": SAME for key in ("buffer_size", "max_in_cpu")},
    "aio.block_size": SAME, "aio.queue_depth": SAME, "aio.intra_op_parallelism": SAME,
    "activation_checkpointing.policy": SAME, "activation_checkpointing.every": SAME,
    "activation_checkpointing.cpu_checkpointing": SAME,
    "communication_data_type": ROUNDING, "pipeline.partition_method": ROUNDING, "pipeline.schedule": ROUNDING,
    "pipeline.virtual_stages": ROUNDING, "tensor_parallel.autotp_size": ROUNDING,
    "heterogeneous.speeds": ROUNDING, "heterogeneous.memory": ROUNDING,
    "tensor_parallel.sequence_parallel": ROUNDING,
    "context_parallel.attention": ROUNDING, "context_parallel.order": ROUNDING,
    "fp8": DIFFERS, "fp8.enabled": DIFFERS,
    "steps_per_print": SAME, "wall_clock_breakdown": SAME,
    "memory_breakdown": SAME, "comms_logger.enabled": SAME, "flops_profiler.enabled": SAME,
    "gradient_accumulation_steps": DIFFERS, "train_micro_batch_size_per_gpu": DIFFERS, "train_batch_size": DIFFERS,
    "bf16.enabled": DIFFERS, "fp16.enabled": DIFFERS,
}  # fmt: skip
"""Key -> what it may change in the numbers that are trained; any other key may change all. `docs/knobs.md` lists these.
"""


@dataclass(frozen=True)
class OfKey:
    """What a key of the configuration takes."""

    key: str

    def read(self, text: str) -> Any:
        """Raises ValueError."""
        from dsprof.engine.config import key_can_be

        value = Json().read(text)
        if str(self) == str(TrueOrFalse()) and value not in (None, "auto"):
            value = TrueOrFalse().read(text)
        if not key_can_be(self.key, value):
            raise ValueError
        return value

    def __str__(self) -> str:
        from dsprof.engine.config import key_takes

        return key_takes(self.key)


def knob_of(key: str) -> Knob:
    """The knob of a key that there is."""
    from dsprof.engine.config import key_says

    what = key_says(key) or "a key of the JSON configuration"
    return Knob(key, what, OfKey(key), MAY_CHANGE.get(key, DIFFERS), _CONFIG, states=_states(key))


def known_keys() -> set[str]:
    """Every key of a configuration, with its sections: `zero_optimization.reduce_bucket_size`."""
    from dsprof.engine.config import Config, known_paths

    own, of_deepspeed = known_paths(Config)
    return own | of_deepspeed


def _is_open(key: str) -> bool:
    """Whether it lies in a section that may have any keys."""
    from dsprof.engine.config import Config, known_paths

    _, of_deepspeed = known_paths(Config)
    return key.startswith(tuple(f"{section}." for section in (*OPEN, *of_deepspeed)))


def find(key: str) -> Knob | None:
    """The knob of a key; None: there is no such key. Raises KnobError for one at the wrong place, and for an unknown
    one of a section that there is."""
    known = known_keys()
    if key in known or _is_open(key):
        return knob_of(key)
    section, _, last = key.rpartition(".")
    if section and section not in known:
        section = ""
    elsewhere = sorted(one for one in known if one.rpartition(".")[2] == last)
    if elsewhere and last:
        raise KnobError(f"{key}: no such key in a configuration; did you mean {elsewhere[0]}?")
    if section:
        hint = did_you_mean(key, [one for one in known if one.startswith(f"{section}.")], show=str)
        raise KnobError(f"{key}: the section {section} has no such key{hint}")
    return None


def of_config(facts: Facts) -> list[Knob]:
    """A knob for each key that the configurations of a run have."""
    contents = [fact.get("content") for fact in facts.get("config", ())]
    keys = dict.fromkeys(key for content in contents for key in _leaves(content))
    return [knob_of(key) for key in keys]


def _leaves(content: Any, above: str = "") -> Iterator[str]:
    if isinstance(content, Mapping):
        for key, value in content.items():
            yield from _leaves(value, f"{above}.{key}" if above else str(key))
    elif above:
        yield above


def _states(key: str) -> Any:
    def states(facts: Facts) -> Iterator[Stated]:
        for fact in facts.get("config", ()):
            place: Any = fact.get("content")
            for part in key.split("."):
                place = place.get(part) if isinstance(place, Mapping) else None
            if place is not None:
                path = fact.get("path")
                where = f"{path}#/{key.replace('.', '/')}" if path else fact.get("site")
                yield Stated(place, where)

    return states
