"""Settings of DeepSpeed's JSON that are valid and slow: what `dsprof doctor` warns of before a GPU hour is spent.

Only keys that the file has are judged, and only by what the file says: whether a setting costs anything in a job is
told by a run, and `dsprof whatif` predicts it. Sizes count elements, as DeepSpeed's do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from .words import joined

if TYPE_CHECKING:
    from dsprof.engine.config import Config

SHORTEST_MESSAGE: Final = 256 << 10
"""Bytes. At 10 GB/s, as between GPUs of two machines, so many take 26 us: about what a collective takes to begin."""
ENOUGH: Final = 50_000_000
"""Elements: a size that is advised. DeepSpeed's own examples have it."""
ZERO: Final = "zero_optimization"
OWN: Final = " under dsprof's engine (DeepSpeed does not go by it)"
"""After what a key costs in the one, and not in the other."""


@dataclass(frozen=True)
class _Size:
    """A key of the section zero_optimization that says how much is done at a time, and the stages that read it.

    does: what is done with so many elements, in words; none: what 0 means, in words; empty: it cannot be 0
    of_parameters: the elements are of parameters, not of gradients
    own: stages at which dsprof's engine reads it and DeepSpeed does not
    """

    key: str
    stages: tuple[int, ...]
    does: str
    none: str = ""
    of_parameters: bool = False
    own: tuple[int, ...] = ()


SIZES: Final = (
    _Size("reduce_bucket_size", (0, 1, 2, 3), "gradients are reduced", own=(0,)),
    _Size("allgather_bucket_size", (1, 2), "parameters are gathered after a step", "one at a time", True),
    _Size("stage3_prefetch_bucket_size", (3,), "parameters are gathered ahead of their use", "none", True),
)


@dataclass(frozen=True)
class _Switch:
    """A switch that costs time where it has this value.

    section: empty at the top; own: dsprof's engine acts upon it, and DeepSpeed reads it without any effect on time
    """

    section: str
    key: str
    slow: bool
    costs: str
    write: str
    stages: tuple[int, ...] = (0, 1, 2, 3)
    own: bool = False


SWITCHES: Final = (
    _Switch(
        ZERO, "overlap_comm", False, "backward stands still while a bucket is reduced",
        "write true, which takes a second buffer of reduce_bucket_size", (1, 2, 3),
    ),
    _Switch(
        ZERO, "reduce_scatter", False, "gradients are reduced by all-reduce, which moves twice the bytes",
        "write true", (1, 2), own=True,
    ),
    _Switch(
        ZERO, "allgather_partitions", False, "updated parameters come by a broadcast from each rank in turn",
        "write true", (1, 2), own=True,
    ),
    _Switch(
        f"{ZERO}.offload_optimizer", "pin_memory", False,
        "copies from and to the device are slower, and nothing runs beside them", "write true", (1, 2, 3),
    ),
    _Switch(
        f"{ZERO}.offload_param", "pin_memory", False,
        "copies from and to the device are slower, and nothing runs beside them", "write true", (3,),
    ),
    _Switch(
        "", "wall_clock_breakdown", True, "DeepSpeed waits for the device around each part of a step to time it",
        "write false; `dsprof run` times them without waiting",
    ),
    _Switch(
        "comms_logger", "enabled", True, "DeepSpeed waits for the device after each communication to time it",
        "write false; `dsprof run` times them without waiting",
    ),
)  # fmt: skip


def slow_settings(config: Config) -> Iterator[str]:
    """A sentence for each key of the file that makes training slow, which begins with the key."""
    yield from _sizes(config)
    yield from _prefetching(config)
    yield from _switches(config)


def _sizes(config: Config) -> Iterator[str]:
    from dsprof.engine.config import ELEMENT_BYTES

    zero = config.zero_optimization
    for size in SIZES:
        each = ELEMENT_BYTES[config.trained_type if size.of_parameters else config.communication_type]
        if zero.stage not in size.stages or size.key not in zero.model_fields_set:
            continue
        value = int(getattr(zero, size.key))
        if value * each >= SHORTEST_MESSAGE:
            continue
        if value:
            at_a_time = f"{size.does} {value:,} elements at a time, which are {value * each / 1024:.3g} KiB"
            why = "it counts elements, not bytes, and so small a message mostly waits for its latency"
        else:
            at_a_time, why = f"{size.does}: {size.none}", "each pays the latency of a message"
        default = type(zero).model_fields[size.key].default
        own = OWN if zero.stage in size.own else ""
        yield f"{ZERO}.{size.key}: {at_a_time}{own}; {why}; write {ENOUGH:,}, or remove it: the default is {default:,}"


def _prefetching(config: Config) -> Iterator[str]:
    """Fewer parameters may be there at once than are to be gathered ahead."""
    zero, live = config.zero_optimization, "stage3_max_live_parameters"
    ahead = zero.stage3_prefetch_bucket_size
    if zero.stage == 3 and live in zero.model_fields_set and zero.stage3_max_live_parameters < ahead:
        default = type(zero).model_fields[live].default
        yield (
            f"{ZERO}.{live}: {zero.stage3_max_live_parameters:,} elements may be there at once, fewer than the "
            f"{ahead:,} of stage3_prefetch_bucket_size, so parameters are gathered when they are needed and not ahead; "
            f"write at least {2 * ahead:,}, or remove it: the default is {default:,}"
        )


def _switches(config: Config) -> Iterator[str]:
    for switch in SWITCHES:
        if config.zero_optimization.stage not in switch.stages:
            continue
        section = _section(config, switch.section)
        if section is None or switch.key not in section.model_fields_set:
            continue
        if getattr(section, switch.key) is switch.slow and getattr(section, "device", "") != "none":
            value = "true" if switch.slow else "false"
            costs = f"{switch.costs}{OWN if switch.own else ''}"
            yield f"{joined(switch.section, switch.key)}: {value}, so {costs}; {switch.write}"


def _section(config: Config, path: str) -> Any:
    """None where the configuration has no such section."""
    place: Any = config
    for name in path.split(".") if path else ():
        place = None if place is None else getattr(place, name)
    return place
