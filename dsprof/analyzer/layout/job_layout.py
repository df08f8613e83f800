"""What a layout of a job is."""

from __future__ import annotations

from dataclasses import dataclass

from ..text import number


@dataclass(frozen=True)
class Layout:
    """How a model and its batch are divided among ranks.

    pp, dp, tp:    pipeline stages (ranks of a pipeline), replicas, tensor-parallel ranks
    zero:          0 to 3: what replicas share of the optimizer's states, gradients, parameters
    micro_batch:   its size, times that of the run
    micro_batches: of a replica's step
    recompute:     whether backward computes activations again
    offload:       whether something is in the host's memory between its uses
    schedule, chunks: of a pipeline: its name in `dsprof.engine.schedule`, and parts of the model on each rank
    boundaries:    layers at which stages begin, and the number of all; None: as they ran, or the lightest there are
    """

    pp: int = 1
    dp: int = 1
    tp: int = 1
    zero: int = 0
    micro_batch: float = 1.0
    micro_batches: int = 1
    recompute: bool = False
    offload: bool = False
    schedule: str = "1f1b"
    chunks: int = 1
    boundaries: tuple[int, ...] | None = None

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.tp

    @property
    def batch(self) -> float:
        """Of a step, all ranks together, in micro-batches of the run."""
        return self.dp * self.micro_batches * self.micro_batch

    def share(self, least: int) -> float:
        """What a rank has of what replicas share from stage `least` on."""
        return 1 / self.dp if self.zero >= least else 1.0

    @property
    def says(self) -> str:
        """`tp 2, dp 4, pp 1, ZeRO 1, 8 micro-batches`."""
        parts = [f"tp {self.tp}", f"dp {self.dp}", f"pp {self.pp}", f"ZeRO {self.zero}"]
        parts.append(f"{self.micro_batches} micro-batch{'es' * (self.micro_batches != 1)}")
        if self.micro_batch != 1:
            parts[-1] += f" {number(self.micro_batch)} times as large"
        if self.pp > 1:
            parts.append(self.schedule + (f" with {self.chunks} parts a rank" if self.chunks > 1 else ""))
        said = {"recompute": self.recompute, "offload": self.offload}
        return ", ".join([*parts, *(name for name, is_so in said.items() if is_so)])
