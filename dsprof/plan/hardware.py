"""The devices that can be planned for, and what to expect of a machine that nothing was measured on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from dsprof.data_sheets import Device, find_device
from dsprof.words import did_you_mean

from .cost import COEFFICIENTS, Expected

LINK_REACHED: Final = 0.7
"""Share of a link's one-way rate that a large all-reduce reaches inside a node: 210 of 300 GB/s on A100, measured by
vTrain's tables of all-reduces."""
UNCHECKED: Final = 0.7
"""Standard deviation of the logarithm of a figure that rests on what no data sheet was compared with."""
MEMORY_BOUND: Final = ("elementwise_passes", "score_passes", "optimizer_bytes")
NETWORK_REACHED: Final = 0.8
"""The same of a network between nodes. A guess."""
LEARNT: Final[Mapping[str, float]] = {
    "matrix_tflops": 225, "elementwise_passes": 40, "score_passes": 25, "layer_device_us": 700, "layer_host_us": 2500,
    "all_reduce_us": 35, "logit_tflops": 160, "hand_over_us": 300, "hand_over_exposed": 0.4, "gradient_bytes": 2.4,
    "optimizer_bytes": 25,
}  # fmt: skip
"""Figures of A100: between those learnt from vTrain's two tables, on one node and on several (`benchmarks/plan.py`),
but for the latency of an all-reduce, which is a little above both, and matrix products, which are as tables 1 and 2 of
Narayanan et al. (2021) have them. So none of these tests the figures."""


def _gpu(driver: str) -> Device:
    """By what its driver calls it; its memory and link are in the table."""
    found = find_device(driver)
    assert found is not None
    assert None not in (found.tb_a_second, found.memory_gib, found.link_gb_s)
    return found


GPUS: Final[Mapping[str, Device]] = {
    "b200": _gpu("NVIDIA B200"),
    "h200": _gpu("NVIDIA H200"),
    "h200-nvl": _gpu("NVIDIA H200 NVL"),
    "h100": _gpu("NVIDIA H100 80GB HBM3"),
    "h100-nvl": _gpu("NVIDIA H100 NVL"),
    "h100-pcie": _gpu("NVIDIA H100 PCIe"),
    "a100": _gpu("NVIDIA A100-SXM4-80GB"),
    "a100-40gb": _gpu("NVIDIA A100-SXM4-40GB"),
    "a100-pcie": _gpu("NVIDIA A100 80GB PCIe"),
    "l40s": _gpu("NVIDIA L40S"),
    "v100": _gpu("Tesla V100-SXM2-32GB"),
    "v100-pcie": _gpu("Tesla V100-PCIE-32GB"),
    "rtx-4090": _gpu("NVIDIA GeForce RTX 4090"),
    "rtx-3090": _gpu("NVIDIA GeForce RTX 3090"),
}
"""What is typed after --gpu, of the devices that `dsprof.data_sheets` lists."""
NETWORK_GB_S: Final = 100.0
"""Of a node, where it is not told: four adapters of 200 Gb/s. A guess."""
A100: Final = GPUS["a100"]


class UnknownGpu(Exception):
    """No such device is known; the message lists those that are."""


def find_gpu(word: str) -> Device:
    """By its name, with or without signs. Raises UnknownGpu."""
    plain = {name.replace("-", ""): gpu for name, gpu in GPUS.items()}
    found = plain.get("".join(sign for sign in word.lower() if sign.isalnum()))
    if found is None:
        near = did_you_mean(word, GPUS, show=str)
        raise UnknownGpu(f"--gpu {word}: is not known{near}; there are {', '.join(GPUS)}")
    return found


@dataclass(frozen=True)
class Cluster:
    """gpu: what computes. dtype: in which matrix products are made. network_gb_s: of a node, all of its adapters
    together, one way; None where it is not told. latency_us: of the network."""

    gpu: Device
    dtype: str
    network_gb_s: float | None = None
    latency_us: float | None = None

    @property
    def peak(self) -> float | None:
        """Operations a second by the data sheet; None where it has none for `dtype`."""
        return self.gpu.flops(self.dtype, tf32=True)

    def expected(self) -> Expected:
        """A100's figures, scaled by the data sheet."""
        peak, typical = self.peak, A100.flops("bfloat16", tf32=False)
        assert peak is not None
        assert typical is not None
        assert self.gpu.tb_a_second is not None
        assert A100.tb_a_second is not None
        assert self.gpu.link_gb_s is not None
        memory = A100.tb_a_second / self.gpu.tb_a_second
        figure = {
            **LEARNT,
            "matrix_tflops": LEARNT["matrix_tflops"] * peak / typical,
            "logit_tflops": LEARNT["logit_tflops"] * peak / typical,
            "node_link_gb_s": self.gpu.link_gb_s * LINK_REACHED,
            "network_gb_s": (self.network_gb_s or NETWORK_GB_S) * NETWORK_REACHED,
        }
        for name in MEMORY_BOUND:
            figure[name] *= memory
        if self.latency_us is not None:
            figure["all_reduce_us"] += self.latency_us
            figure["hand_over_us"] += self.latency_us
        # The same figures on another machine or another program: what the two tables differ by.
        spread = {one.name: min(one.spread, 0.5) for one in COEFFICIENTS}
        spread |= {"matrix_tflops": 0.12, "network_gb_s": 0.6 if self.network_gb_s is None else 0.3}
        most = {"matrix_tflops": peak / 1e12, "logit_tflops": peak / 1e12, "node_link_gb_s": self.gpu.link_gb_s}
        if "link_gb_s" in self.gpu.unchecked:
            spread["node_link_gb_s"] = UNCHECKED
            del most["node_link_gb_s"]
        if "tb_a_second" in self.gpu.unchecked:
            spread |= dict.fromkeys(MEMORY_BOUND, UNCHECKED)
        names = [one.name for one in COEFFICIENTS]
        return Expected(
            np.array([figure[name] for name in names]),
            np.array([spread[name] for name in names]),
            np.array([most.get(name, math.inf) for name in names]),
        )


def read_rate(word: str) -> float:
    """`400Gb`, `50GB` or `50GB/s` as GB/s. Raises ValueError."""
    text = word.strip().removesuffix("/s").removesuffix("ps")
    for unit, factor in (("Gb", 1 / 8), ("GB", 1.0), ("Tb", 125.0), ("Mb", 1 / 8000), ("MB", 1 / 1000)):
        if text.endswith(unit):
            return _positive(text.removesuffix(unit)) * factor
    raise ValueError(f"{word!r} is no rate; write 400Gb (bits) or 50GB (bytes), a second")


def read_latency(word: str) -> float:
    """`5us` or `0.02ms` as microseconds. Raises ValueError."""
    for unit, factor in (("us", 1.0), ("ms", 1000.0)):
        if word.strip().endswith(unit):
            return _positive(word.strip().removesuffix(unit)) * factor
    raise ValueError(f"{word!r} is no time; write 5us or 0.02ms")


def _positive(word: str) -> float:
    """Raises ValueError."""
    try:
        value = float(word)
    except ValueError:
        raise ValueError(f"{word!r} is not a number") from None
    if not math.isfinite(value) or value <= 0:
        raise ValueError(f"{word} is not above 0")
    return value
