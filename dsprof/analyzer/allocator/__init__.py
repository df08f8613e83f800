"""The allocator simulator: a model of torch's CUDA caching allocator that plays a recorded history again.

alloc_conf         PYTORCH_CUDA_ALLOC_CONF, and how sizes are rounded
pool_blocks        blocks and pools
addresses          where the device puts a segment
reserved           what was got of the device
expandable         segments that are mapped page by page
caching_allocator  the allocator
history            what a recording's program did, and the state it began with
simulate           the history played as it was, to prove the simulator, and under other settings
"""

from __future__ import annotations

from .alloc_conf import AllocatorSettings
from .caching_allocator import Allocator
from .history import Recording, Unplayable, devices, record
from .reserved import NO_LIMITS, Limits, ReservedMemory
from .simulate import Outcome, Proof, in_use_at, pinned_at, prove, replay

__all__ = [
    "NO_LIMITS",
    "Allocator",
    "AllocatorSettings",
    "Limits",
    "Outcome",
    "Proof",
    "Recording",
    "ReservedMemory",
    "Unplayable",
    "devices",
    "in_use_at",
    "pinned_at",
    "prove",
    "record",
    "replay",
]  # fmt: skip
