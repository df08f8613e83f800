"""What the devices did, what they told of themselves, and how well they are used."""

from __future__ import annotations

from typing import Final

from dsprof.analyzer.analysis import Analysis

from .. import device, efficiency, plots, tables
from .section import Block, Figure, Maker, Said, Tiles, Words

DEVICE_RANKS: Final = 8


def _needs_kernels(analysis: Analysis) -> str:
    return "" if analysis.device is not None else "no device's kernels were traced"


def _device_time(analysis: Analysis) -> list[Block]:
    return [Said(tuple(device.lines(analysis)))]


def _watched(analysis: Analysis) -> list[int]:
    return sorted({int(fact["rank"]) for fact in analysis.run.facts if fact.get("fact") == "gpu"})


def _needs_gauges(analysis: Analysis) -> str:
    return "" if _watched(analysis) else "no device told of itself"


def _devices(analysis: Analysis) -> list[Block]:
    watched = _watched(analysis)
    told = tables.device_gauges(analysis.trace, tables.pick_ranks(watched, analysis.named_ranks, DEVICE_RANKS))
    if not len(told):
        return []
    label = "clock, power, temperature and utilization over time"
    return [Figure("devices", label, lambda: plots.devices(told, of_ranks=len(watched)))]


def _needs_counts(analysis: Analysis) -> str:
    return "" if efficiency.lines(analysis) else "operations are counted at --level full"


def _efficiency(analysis: Analysis) -> list[Block]:
    tiles = tuple(efficiency.tiles(analysis))
    said: list[Block] = [Tiles(tiles)] if tiles else []
    return [
        *said,
        Said(tuple(efficiency.lines(analysis))),
        Words(
            "Counted in one step, by the shapes that matrix products, convolutions and attention are given; a "
            "multiplication and an addition are two, and a causal mask saves nothing. MFU is what the model needs, as "
            "a share of what the devices could do in the same time; HFU is with what is computed again."
        ),
    ]


DEVICE_TIME = Maker(
    "device-time", "What the devices did", _needs_kernels,
    lambda _: "By the kernels of the steps that were traced. The budget above is of the host's time, so a device may "
    "be idle while its host computes.",
    _device_time,
)  # fmt: skip
DEVICES = Maker(
    "devices", "Devices", _needs_gauges,
    lambda _: "What each rank's device told of itself about once a second. Held down by power or heat, a clock falls "
    "while the utilization stays.",
    _devices,
)  # fmt: skip
EFFICIENCY = Maker("efficiency", "How well the devices are used", _needs_counts, lambda _: "", _efficiency)
