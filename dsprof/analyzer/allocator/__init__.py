"""The allocator twin: a model of torch's CUDA caching allocator that plays a recorded history again.

settings    PYTORCH_CUDA_ALLOC_CONF, and how sizes are rounded
blocks      blocks and pools
addresses   where the device puts a segment
reserved    what was got of the device
expandable  segments that are mapped page by page
model       the allocator
history     what a recording's program did, and the state it began with
replay      played as it was, to prove the twin, and under other settings
"""

from __future__ import annotations

from .history import Recording, Unplayable, devices, record
from .model import Allocator
from .replay import Outcome, Proof, in_use_at, pinned_at, prove, replay
from .reserved import NO_LIMITS, Limits, ReservedMemory
from .settings import AllocatorSettings

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
