"""What a rank holds of a model that is trained, by its configuration: for `dsprof doctor`, and for what-ifs.

The sums are those of ZeRO's paper (Rajbhandari et al. 2020, arXiv 1910.02054, section 3): of E elements in half
precision, 2 E bytes of parameters, 2 E of gradients, and 4 E of masters with 8 E of Adam's moments, each divided among
the ranks from the stage on that shards it. Beside these there are the buffers that communications pass through.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from .config import Config
from .zero import OffloadConfig

ELEMENT_BYTES: Final = {"fp32": 4, "fp16": 2, "bf16": 2}
"""Data type of a configuration -> bytes of a number."""
MASTER: Final = 4
MOMENTS: Final = {"sgd": 0, "lion": 1, "muon": 1, "adagrad": 1}
"""Optimizer, in lower case -> how many numbers it keeps for each element; of others two, as Adam has."""


@dataclass(frozen=True)
class Held:
    """Bytes on each rank's device, or on the host where there is none.

    optimizer_states: masters, which are a wider copy of the parameters, and moments
    buckets:          what gradients are reduced from
    gathered:         what parameters are gathered into, beyond what the module that computes needs itself
    """

    parameters: float
    gradients: float
    optimizer_states: float
    buckets: float
    gathered: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer_states + self.buckets + self.gathered


def held(config: Config, elements: float, share: float, *, deepspeed: bool = True) -> Held:
    """What a data-parallel rank holds of a model of so many elements. share: its part of what is sharded, of equal
    ranks 1 / their number; deepspeed: DeepSpeed trains it, and not dsprof's engine."""
    zero, item = config.zero_optimization, ELEMENT_BYTES[config.trained_type]
    of_parameters, of_gradients, of_states = (elements * (share if zero.stage >= least else 1) for least in (3, 2, 1))
    states = of_states * ((MASTER if item < MASTER else 0) + MASTER * _moments(config))
    of_a_gradient = item
    if not deepspeed:  # what is reduced is as wide as the masters, and from stage 1 on of one rank's part
        of_gradients, of_a_gradient = of_states, MASTER
    if _is_away(zero.offload_optimizer):
        assert zero.offload_optimizer is not None
        states *= 1 - zero.offload_optimizer.ratio
        of_gradients = 0.0 if zero.stage >= 1 else of_gradients
    return Held(
        parameters=0.0 if _is_away(zero.offload_param) else of_parameters * item,
        gradients=of_gradients * of_a_gradient,
        optimizer_states=states,
        buckets=_buckets(config, elements, deepspeed=deepspeed),
        gathered=_gathered(config, elements, deepspeed=deepspeed) * item,
    )


def _moments(config: Config) -> int:
    if config.optimizer is None:
        return 2
    kind = config.optimizer.type.lower()
    if kind == "sgd":
        return int(bool(config.optimizer.params.arguments().get("momentum")))
    return MOMENTS.get(kind, 2)


def _is_away(offloaded: OffloadConfig | None) -> bool:
    return offloaded is not None and offloaded.device != "none"


def _buckets(config: Config, elements: float, *, deepspeed: bool) -> float:
    """DeepSpeed allocates one of the whole size, and a second one to fill while the first is reduced. dsprof's engine
    takes no more than all gradients, and has two on their way while it fills a third."""
    zero, item = config.zero_optimization, ELEMENT_BYTES[config.communication_type]
    if deepspeed:
        if zero.stage < 1 or not zero.contiguous_gradients:
            return 0.0
        return float(zero.reduce_bucket_size) * item * (2 if zero.overlap_comm and zero.stage < 3 else 1)
    if zero.stage == 0 and item == MASTER:
        return 0.0  # gradients stay where they were reduced
    return min(float(zero.reduce_bucket_size) * (3 if zero.overlap_comm else 1), elements) * item


def _gathered(config: Config, elements: float, *, deepspeed: bool) -> float:
    """Elements that are gathered ahead of their use; or after a step, where DeepSpeed gathers them in place."""
    zero = config.zero_optimization
    if zero.stage == 3:
        return float(min(zero.stage3_prefetch_bucket_size, zero.stage3_max_live_parameters, elements))
    if zero.stage == 0 or deepspeed:
        return 0.0
    return min(float(zero.allgather_bucket_size) * (3 if zero.overlap_comm else 1), elements)
