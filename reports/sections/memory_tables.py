"""Memory: what it was for over the steps, and what the devices' allocators held in the end."""

from __future__ import annotations

from typing import Any, Final

from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.budget.irregular import profiled_steps
from dsprof.analyzer.memory.allocated_over_time import allocation_history
from dsprof.analyzer.memory.allocator_state import DeviceMemory, segment_uses
from dsprof.analyzer.text import clean, count, percent, size

from .. import memory, wording
from .section import Block, Column, Figure, Heading, Maker, Row, Words, table

MOST_SNAPSHOTS: Final = 8
"""Devices whose segments are drawn."""

# --- over the steps -------------------------------------------------------------------------------


def _needs_samples(analysis: Analysis) -> str:
    return "" if memory.line(analysis.memory_uses) else "memory was not sampled"


def _use(analysis: Analysis) -> list[Block]:
    uses = memory.main_uses(analysis.memory_uses)
    return [
        Figure("memory", "memory in use over the steps, by rank", lambda: _over_steps(analysis)),
        Heading("What it was for"),
        Figure("memory-parts", "stacked bars of what memory was for, by rank", lambda: memory.by_part(uses)),
        Words(
            "Parameters, gradients, optimizer states and buffers are counted by the storage of the tensors that are "
            "alive when a step has ended, in the first steps and then ever more rarely. Activations are what was "
            "allocated, or the process had grown by, when backward began."
        ),
    ]


def _over_steps(analysis: Analysis) -> Any:
    uses = memory.main_uses(analysis.memory_uses)
    return memory.over_steps(
        analysis.memory_steps, uses, profiled_steps(analysis.run), highlight=analysis.hungry_rank
    )  # fmt: skip


# --- allocators -----------------------------------------------------------------------------------


def _needs_snapshots(analysis: Analysis) -> str:
    return "" if analysis.memory else "no snapshot of a device's allocator was taken"


def _allocators(analysis: Analysis) -> list[Block]:
    return [block for at, held in enumerate(analysis.memory) for block in _device(analysis, at, held)]


def _device(analysis: Analysis, at: int, held: DeviceMemory) -> list[Block]:
    reserved = held.total("reserved")
    parts = [
        Row((label, size(value), percent(100 * value / reserved)), share=100 * value / reserved)
        for label, value in wording.memory_parts(held)
    ]
    blocks: list[Block] = [
        Heading(f"{wording.device(held)}: {size(reserved)} reserved, {count(held.total('segments'), 'segment')}"),
        table([Column("what"), Column("bytes", number=True), Column("share", number=True)], parts, bare=True),
    ]
    if at < MOST_SNAPSHOTS and held.total("reserved"):
        label = "segments of the allocator, the largest first, and what their bytes are"
        blocks.append(Figure(f"segments-{at}", label, lambda: _segments(analysis, held)))
    numbers = ("stream", "segments", "reserved", "in use", "asked for", "pending", "free, whole segments",
               "free, between blocks", "largest free block")  # fmt: skip
    pools = []
    for pool in held.pools:
        bytes_of = (
            pool.reserved, pool.allocated, pool.requested, pool.pending, pool.releasable, pool.split, pool.largest_free,
        )  # fmt: skip
        pools.append(Row((clean(pool.pool), str(pool.stream), f"{pool.segments:,}", *map(size, bytes_of))))
    blocks.append(table([Column("pool"), *(Column(name, number=True) for name in numbers)], pools, wide=True))
    if held.holders:
        blocks.append(Words("Who holds what is in use: the innermost line of the stack that is the script's own."))
        columns = [
            Column("allocated at", code=True), Column("in"), Column("in use", number=True),
            Column("blocks", number=True),
        ]  # fmt: skip
        cwd = analysis.run.cwd
        holders = [
            Row((wording.allocated_at(item, cwd), clean(item.function), size(item.bytes), f"{item.blocks:,}"))
            for item in held.holders
        ]  # fmt: skip
        blocks.append(table(columns, holders))
    return [*blocks, *(_history(analysis, at, held) if at < MOST_SNAPSHOTS else [])]


def _history(analysis: Analysis, at: int, held: DeviceMemory) -> list[Block]:
    """How much was in use over the recorded history, and what the peak was made of."""
    found = allocation_history(analysis.trace.memory[held.rank], held.device)
    if found is None:
        return []
    most, cwd = int(found.in_use[found.peak]), analysis.run.cwd
    columns = [
        Column("in use at the peak, allocated at", code=True), Column("in"), Column("bytes", number=True),
        Column("share", number=True), Column("blocks", number=True),
    ]  # fmt: skip
    rows = [
        Row((wording.allocated_at(item, cwd), clean(item.function), size(item.bytes),
             percent(100 * item.bytes / max(most, 1)), f"{item.blocks:,}"))
        for item in found.holders
    ]  # fmt: skip
    return [
        Figure(f"history-{at}", "bytes in use over the recorded history of the allocator, with its peak",
               lambda: memory.over_history(found)),
        Words(f"Most was in use {found.seconds[found.peak]:,.2f} s after the history began: {size(most)}."),
        table(columns, rows, wide=True),
    ]  # fmt: skip


USE = Maker(
    "memory-use", "Memory", _needs_samples, lambda analysis: f"{memory.line(analysis.memory_uses)}.", _use
)  # fmt: skip


def _segments(analysis: Analysis, held: DeviceMemory) -> Any:
    return memory.segments(segment_uses(analysis.trace.memory[held.rank], held.device))


ALLOCATORS = Maker(
    "memory", "Device memory", _needs_snapshots,
    lambda _: "What the caching allocator held in the end. A segment is as wide as it is large, so areas are bytes. "
    "What is free in whole segments can go back to the device; what is free between blocks in use cannot.",
    _allocators,
)  # fmt: skip
