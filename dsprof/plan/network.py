"""The network between nodes, as a user tells of it."""

from __future__ import annotations

from dataclasses import dataclass

from .hardware import read_latency, read_rate


@dataclass(frozen=True)
class Network:
    """gpus_per_node: ranks that share the run's link. gb_s: rate of a node's network, None: not told. latency_us."""

    gpus_per_node: int
    gb_s: float | None = None
    latency_us: float | None = None

    @classmethod
    def of_words(cls, gpus_per_node: int, bandwidth: str | None, latency: str | None) -> Network:
        """bandwidth: such as 400Gb; latency: such as 5us. Raises ValueError for what is neither."""
        return cls(
            gpus_per_node,
            None if bandwidth is None else read_rate(bandwidth),
            None if latency is None else read_latency(latency),
        )
