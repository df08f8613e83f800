"""Histories of a caching allocator, written as torch writes them: what a snapshot's file holds.

The allocator is the twin under torch's own default settings, which `tests/test_allocator.py` holds against snapshots of
real devices where they are.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from dsprof.analyzer.allocator import Allocator, AllocatorSettings, Limits, ReservedMemory
from dsprof.analyzer.allocator.pool_blocks import Block

MiB = 1 << 20
PYTHON = "/venv/lib/python3.12/site-packages/torch/nn/functional.py"


class OutOfMemory(Exception):
    """The device has no more."""


class WatchedMemory(ReservedMemory):
    """Keeps what was got from the device and given back: (action, address, bytes, stream)."""

    def __init__(self, settings: AllocatorSettings, limits: Limits) -> None:
        super().__init__(limits)
        self._taken = "segment_map" if settings.expandable else "segment_alloc"
        self.log: list[tuple[str, int, int, int | None]] = []

    def take(self, start: int, size: int) -> None:
        self.log.append((self._taken, start, size, None))
        super().take(start, size)

    def give_back(self, block: Block) -> None:
        action = "segment_free" if block.range is None else "segment_unmap"
        self.log.append((action, block.start, block.size, block.stream))
        super().give_back(block)


class Device:
    """A device whose allocator's history is recorded. `stream` and `line` are of what comes next."""

    def __init__(self, settings: AllocatorSettings | None = None, device_bytes: int | None = None) -> None:
        self.settings = settings or AllocatorSettings()
        self._memory = WatchedMemory(self.settings, Limits(device_bytes))
        self.allocator = Allocator(self.settings, self._memory)
        self.stream = 0
        self.line = 1
        self.events: list[dict[str, Any]] = []
        self._blocks: dict[int, Block] = {}
        self._stacks: dict[int, list[dict[str, Any]]] = {}

    def alloc(self, requested: int) -> Block:
        allocator = self.allocator
        block = allocator.malloc(requested, self.stream)
        self._noted()
        if block is None:
            limit = self._memory.limits.device_bytes or 0
            self._note("oom", None, requested, device_free=limit - allocator.counts.reserved)
            raise OutOfMemory
        self._note("alloc", block.start, requested)
        self._blocks[block.start] = block
        self._stacks[block.start] = self.frames()
        return block

    def free(self, *blocks: Block) -> None:
        for block in blocks:
            self._note("free_requested", block.start, block.requested, stream=block.stream)
            self._note("free_completed", block.start, block.requested, stream=block.stream)
            del self._blocks[block.start]
            self.allocator.free(block)

    def free_later(self, block: Block) -> None:
        self._note("free_requested", block.start, block.requested, stream=block.stream)
        self.allocator.await_free(block)

    def empty_cache(self) -> None:
        self.allocator.release_cached()
        self._noted("empty_cache")

    def frames(self, function: str = "linear") -> list[dict[str, Any]]:
        return [
            {"name": function, "filename": PYTHON, "line": 2000},
            {"name": "forward", "filename": "/home/me/train.py", "line": self.line},
            {"name": "<module>", "filename": "/home/me/train.py", "line": 900},
        ]

    def _noted(self, function: str = "linear") -> None:
        """What the allocator gave back to the device and got from it."""
        for action, start, size, stream in self._memory.log:
            self._note(action, start, size, function, **({} if stream is None else {"stream": stream}))
        self._memory.log.clear()

    def _note(self, action: str, address: int | None, size: int, function: str = "linear", **more: int) -> None:
        event = {"action": action, "size": size, "stream": self.stream, "time_us": 1_000_000 + len(self.events)}
        event |= {"addr": address} if address is not None else {}
        self.events.append({**event, **more, "frames": self.frames(function)})

    def _held(self) -> list[dict[str, Any]]:
        """Its segments, as a snapshot lists them."""
        blocks = {block.start: block for block in self.allocator.free_blocks()}
        every = {**blocks, **self._blocks}
        found = []
        heads = [block for block in every.values() if block.prev is None or not block.prev.mapped]
        for head in sorted(heads, key=lambda block: block.start):
            parts, here = [], head
            while here is not None and here.mapped:
                state = "active_allocated" if here.used else "inactive"
                parts.append(
                    {"address": here.start, "size": here.size, "requested_size": here.requested, "state": state,
                     "frames": self._stacks.get(here.start, []) if here.used else []}
                )  # fmt: skip
                here = here.next
            found.append(
                {"device": 0, "address": head.start, "total_size": sum(part["size"] for part in parts),
                 "stream": head.stream, "segment_type": "small" if head.pool.small else "large",
                 "segment_pool_id": (0, 0), "is_expandable": head.range is not None, "blocks": parts,
                 "frames": self.frames()}
            )  # fmt: skip
        return found

    def snapshot(self) -> dict[str, Any]:
        most = self.settings.max_split_bytes
        return {
            "segments": self._held(),
            "device_traces": [self.events],
            "allocator_settings": {
                "PYTORCH_CUDA_ALLOC_CONF": str(self.settings),
                "max_split_size": -1 if most is None else most,
                "garbage_collection_threshold": self.settings.gc_threshold,
                "expandable_segments": self.settings.expandable,
                "roundup_power2_divisions": {str(1 << n): each for n, each in enumerate(self.settings.divisions)},
            },
            "external_annotations": [],
        }

    def write(self, path: Path) -> Path:
        path.write_bytes(pickle.dumps(self.snapshot()))
        return path


# --- programs -----------------------------------------------------------------------------------


def pinned(device: Device, segments: int = 20) -> None:
    """Segments of 60 MiB in each of which one block of 4 MiB is kept: nothing of 50 MiB fits beside it."""
    device.line = 5
    device.free(*[device.alloc(60 * MiB) for _ in range(segments)])
    short = []
    for _ in range(segments):
        device.line = 10
        short.append(device.alloc(30 * MiB))
        device.line = 20
        device.alloc(4 * MiB)
        device.line = 10
        short.append(device.alloc(26 * MiB))
    device.free(*short)
    device.line = 30
    for _ in range(segments):
        device.alloc(50 * MiB)


def scattered(device: Device, segments: int = 40) -> None:
    """Segments of 20 MiB in each of which one block of 2 MiB is kept: less than any setting's page."""
    short = []
    for _ in range(segments):
        device.line = 10
        short += [device.alloc(6 * MiB), device.alloc(6 * MiB)]
        device.line = 20
        device.alloc(2 * MiB)
        device.line = 10
        short.append(device.alloc(5 * MiB))
    device.free(*short)
    device.line = 30
    for _ in range(segments // 4):
        device.alloc(60 * MiB)


def growing(device: Device, steps: int = 30) -> None:
    """A sequence that grows by each step: no segment of an earlier one is large enough."""
    device.line = 40
    weights = [device.alloc(64 * MiB) for _ in range(4)]
    for step in range(steps):
        device.line = 50
        held = [device.alloc((40 + 3 * step + layer) * MiB) for layer in range(6)]
        device.free(*held)
    device.free(*weights[:1])


def mixed(device: Device, rounds: int = 60, seed: int = 0) -> None:
    """Blocks of very different sizes and lives."""
    import random

    chance = random.Random(seed)
    alive: list[tuple[int, Block]] = []
    for number in range(rounds * 10):
        large = chance.random() < 0.35
        device.line = 60 if large else 70
        size = chance.randrange(24, 90) if large else chance.randrange(2, 9)
        life = chance.randrange(5, 25) if large else chance.randrange(20, 400)
        alive.append((number + life, device.alloc(size * MiB)))
        ended = [block for until, block in alive if until <= number]
        alive = [(until, block) for until, block in alive if until > number]
        device.free(*ended)


def steady(device: Device, steps: int = 20) -> None:
    """The same in every step, as most training does."""
    weights = [device.alloc(48 * MiB) for _ in range(10)]
    for _ in range(steps):
        held = [device.alloc(size * MiB) for size in (30, 12, 30, 12, 60)]
        device.free(*reversed(held))
    assert weights
