"""The allocator twin: its rules one by one, properties under all settings, and recordings of real devices."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import allocations
import pytest
from allocations import Device, MiB, OutOfMemory
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dsprof.analyzer.allocator import (
    Allocator,
    AllocatorSettings,
    Limits,
    Recording,
    ReservedMemory,
    Unplayable,
    pinned_at,
    prove,
    record,
    replay,
)
from dsprof.analyzer.allocator.addresses import DeviceAddresses
from dsprof.analyzer.allocator.pool_blocks import Block
from dsprof.importers import import_trace
from dsprof.trace.snapshot import SnapshotTables

REAL = Path(os.environ.get("DSPROF_REAL_TRACES", Path(__file__).parents[2] / "shared" / "data" / "traces"))
KiB = 1 << 10


def recorded(device: Device) -> Recording:
    memory = SnapshotTables(Path("snapshot"), 1 << 30).of(device.snapshot())
    return record(memory, 0, device.settings)


# --- sizes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requested", "divisions", "size"),
    [
        (1, 0, 512), (512, 0, 512), (513, 0, 1024), (1200, 0, 1536), (1200, 2, 1536), (2000, 2, 2048), (1200, 4, 1536),
        (5 * MiB, 4, 5 * MiB), (5 * MiB + 1, 4, 6 * MiB), (9 * MiB, 2, 12 * MiB), (8 * MiB, 2, 8 * MiB),
        (9 * MiB, 1, 9 * MiB), (17 * MiB, 8, 18 * MiB), (3000 * MiB, 16, 3072 * MiB),
    ],
)  # fmt: skip
def test_sizes_are_rounded(requested: int, divisions: int, size: int) -> None:
    assert AllocatorSettings(divisions=(divisions,) * 16).round_size(requested) == size


def test_each_size_has_its_own_divisions() -> None:
    divided = AllocatorSettings(divisions=(0, 4, *(2,) * 14))
    assert [divided.round_size(size * MiB + 1) for size in (1, 2, 9)] == [MiB + 512, 2 * MiB + 512 * KiB, 12 * MiB]


def test_settings_are_read_from_a_snapshot_and_written_as_torch_takes_them() -> None:
    told = {
        "PYTORCH_CUDA_ALLOC_CONF": "", "max_split_size": 128 * MiB, "garbage_collection_threshold": 0.8,
        "expandable_segments": False, "roundup_power2_divisions": {str(1 << power): 4 for power in range(16)},
    }  # fmt: skip
    known = AllocatorSettings.of_snapshot(told)
    assert known == AllocatorSettings(128 * MiB, (4,) * 16, 0.8)
    assert str(known) == "max_split_size_mb:128,roundup_power2_divisions:4,garbage_collection_threshold:0.8"
    assert AllocatorSettings.of_snapshot({"max_split_size": -1}) == AllocatorSettings()
    assert str(AllocatorSettings(expandable=True)) == "expandable_segments:True"
    assert str(AllocatorSettings(divisions=(0, *(2,) * 15))).startswith("roundup_power2_divisions:[1:0,2:2,4:2,")
    with pytest.raises(ValueError, match="powers of two"):
        AllocatorSettings.of_snapshot({"roundup_power2_divisions": {"1": 3}})


def test_rounding_of_unsplit_blocks_is_read_from_what_was_set_where_a_snapshot_does_not_say_it() -> None:
    told = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,max_non_split_rounding_mb:40", "max_split_size": 64 * MiB}
    assert AllocatorSettings.of_snapshot(told) == AllocatorSettings(64 * MiB, max_rounding_bytes=40 * MiB)
    assert (
        AllocatorSettings.of_snapshot({**told, "max_non_split_rounding_size": 30 * MiB}).max_rounding_bytes == 30 * MiB
    )


# --- where the device puts segments ---------------------------------------------------------------


def test_segments_lie_where_an_h100_put_them() -> None:
    """As recorded there: MiB, and address from the first in MiB."""
    seen = [
        (34, 0), (26, 34), (42, -64), (50, -128), (56, -192), (2, -192 + 56), (40, -256), (40, -320), (2, -320 + 40),
        (60, -384), (50, -448), (60, -512), (2, -512 + 60),
    ]  # fmt: skip
    addresses = DeviceAddresses()
    first = addresses.place(seen[0][0] * MiB)
    assert [(addresses.place(size * MiB) - first) // MiB for size, _ in seen[1:]] == [at for _, at in seen[1:]]


def test_addresses_that_are_given_up_are_taken_again_from_the_top() -> None:
    addresses = DeviceAddresses()
    starts = [addresses.place(size * MiB) for size in (60, 54, 64, 54)]
    addresses.give_back(starts[0])
    addresses.give_back(starts[1])
    assert addresses.place(60 * MiB) == starts[0]
    assert addresses.place(30 * MiB) == starts[1] + 32 * MiB
    addresses.give_back(starts[3])
    assert addresses.place(200 * MiB) == starts[3] + 64 * MiB - 224 * MiB, "the lowest stretch was given up"
    addresses.give_back(7)  # nothing of ours


# --- segments and blocks ------------------------------------------------------------------------


def given_by(allocator: Allocator, *sizes: int) -> list[Block]:
    blocks = [allocator.malloc(size) for size in sizes]
    assert None not in blocks
    return [block for block in blocks if block is not None]


def test_small_blocks_share_2_mib_middle_ones_20_mib_and_large_ones_have_their_own() -> None:
    allocator = Allocator()
    given_by(allocator, 100 * KiB, MiB, 2 * MiB, 10 * MiB - 1, 10 * MiB, 33 * MiB - 1)
    assert [size // MiB for _, size in allocator.memory.made] == [2, 20, 10, 34]


def test_what_is_left_of_a_large_block_is_split_off_above_1_mib_only() -> None:
    allocator = Allocator()
    first, second = given_by(allocator, 19 * MiB, 20 * MiB)
    allocator.free(first)
    (again,) = given_by(allocator, 18 * MiB - 512)
    assert (again.start, again.size) == (first.start, 18 * MiB - 512)
    allocator.free(again)
    (whole,) = given_by(allocator, 19 * MiB)
    assert (whole.start, whole.size, second.size) == (first.start, 20 * MiB, 20 * MiB)


def test_the_smallest_block_that_fits_is_taken_of_its_own_stream_and_pool() -> None:
    allocator = Allocator()
    blocks = given_by(allocator, 60 * MiB, 40 * MiB, 50 * MiB)
    for block in blocks:
        allocator.free(block)
    assert given_by(allocator, 38 * MiB)[0].start == blocks[1].start
    assert allocator.malloc(45 * MiB, stream=7).start not in {block.start for block in blocks}  # type: ignore[union-attr]
    assert allocator.malloc(45 * MiB, 0, "0.3").start not in {block.start for block in blocks}  # type: ignore[union-attr]
    assert given_by(allocator, 45 * MiB)[0].start == blocks[2].start
    assert allocator.counts.reserved == (60 + 40 + 50 + 46 + 46) * MiB


def test_freed_neighbours_merge() -> None:
    allocator = Allocator()
    blocks = given_by(allocator, 6 * MiB, 6 * MiB, 6 * MiB)
    allocator.free(blocks[0])
    allocator.free(blocks[2])
    assert sorted(block.size for block in allocator.free_blocks()) == [6 * MiB, 8 * MiB]
    assert allocator.releasable() == 0
    allocator.free(blocks[1])
    assert [block.size for block in allocator.free_blocks()] == [20 * MiB]
    assert allocator.releasable() == 20 * MiB


def test_what_another_stream_uses_neither_merges_nor_is_given_away() -> None:
    allocator = Allocator()
    (block,) = given_by(allocator, 20 * MiB)
    allocator.await_free(block)
    assert given_by(allocator, 20 * MiB)[0].start != block.start
    allocator.release_cached()
    assert allocator.counts.reserved == 20 * MiB


# --- settings -----------------------------------------------------------------------------------


def test_blocks_above_max_split_size_are_neither_split_nor_given_to_smaller_ones() -> None:
    allocator = Allocator(AllocatorSettings(max_split_bytes=32 * MiB))
    (large,) = given_by(allocator, 64 * MiB)
    allocator.free(large)
    assert given_by(allocator, 8 * MiB)[0].start != large.start
    assert given_by(allocator, 44 * MiB)[0].start != large.start  # 20 MiB less: too little of it
    assert given_by(allocator, 45 * MiB)[0].start == large.start
    assert large.size == 64 * MiB


def test_on_a_full_device_oversize_blocks_go_first_then_all() -> None:
    settings_ = AllocatorSettings(max_split_bytes=32 * MiB)
    allocator = Allocator(settings_, ReservedMemory(Limits(100 * MiB)))
    first, second, third = given_by(allocator, 40 * MiB, 34 * MiB, 20 * MiB)
    for block in (first, second, third):
        allocator.free(block)
    assert allocator.malloc(64 * MiB) is not None
    assert (allocator.counts.retries, allocator.counts.device_frees, allocator.counts.reserved) == (0, 2, 84 * MiB)
    assert allocator.malloc(36 * MiB) is not None
    assert (allocator.counts.retries, allocator.counts.ooms, allocator.counts.reserved) == (1, 0, 100 * MiB)
    assert allocator.malloc(2 * MiB) is None
    assert (allocator.counts.retries, allocator.counts.ooms) == (2, 1)


def test_a_full_device_gets_back_what_waits_for_other_streams() -> None:
    allocator = Allocator(memory=ReservedMemory(Limits(40 * MiB)))
    one, other = given_by(allocator, 20 * MiB, 20 * MiB)
    allocator.await_free(one)
    assert allocator.malloc(20 * MiB) is not None
    assert (allocator.counts.retries, allocator.counts.ooms, other.used) == (1, 0, True)


def test_garbage_is_collected_above_the_threshold_the_oldest_first() -> None:
    allocator = Allocator(AllocatorSettings(gc_threshold=0.5), ReservedMemory(Limits(allowed_bytes=200 * MiB)))
    old, young, used = given_by(allocator, 40 * MiB, 30 * MiB, 50 * MiB)
    allocator.free(old)
    allocator.free(allocator.malloc(2 * MiB, stream=3))  # type: ignore[arg-type]
    allocator.free(young)
    assert allocator.malloc(60 * MiB) is not None
    assert [block.size // MiB for block in allocator.free_blocks()] == [30, 20]
    assert (allocator.counts.device_frees, allocator.counts.retries, used.used) == (1, 0, True)


def test_expandable_segments_grow_at_their_end_and_give_back_whole_pages() -> None:
    allocator = Allocator(AllocatorSettings(expandable=True))
    first, second = given_by(allocator, 30 * MiB, 50 * MiB)
    assert second.start == first.end
    assert allocator.counts.reserved == 80 * MiB
    allocator.free(first)
    allocator.release_cached()
    assert allocator.counts.reserved == 60 * MiB, "the page that the second block begins in stays"
    (third,) = given_by(allocator, 24 * MiB)
    assert (third.start, allocator.counts.reserved) == (first.start, 80 * MiB)
    (small,) = given_by(allocator, 512)
    assert small.pool.small
    assert allocator.counts.reserved == 82 * MiB


def test_an_expandable_segment_is_mapped_as_far_as_the_device_has_room() -> None:
    allocator = Allocator(AllocatorSettings(expandable=True), ReservedMemory(Limits(100 * MiB)))
    first, second = given_by(allocator, 40 * MiB, 40 * MiB)
    allocator.free(first)
    (both,) = given_by(allocator, 20 * MiB)
    assert both.start == first.start
    assert allocator.malloc(50 * MiB) is None
    assert allocator.counts.ooms == 1
    allocator.free(second)
    assert allocator.malloc(80 * MiB) is not None


def test_parts_of_expandable_segments_are_not_given_back_as_segments() -> None:
    """Their pages are, at the last resort: what a block that is never split has."""
    allocator = Allocator(
        AllocatorSettings(expandable=True, max_split_bytes=20 * MiB), ReservedMemory(Limits(100 * MiB, 100 * MiB))
    )
    (first,) = given_by(allocator, 90 * MiB)
    allocator.free(first)
    given_by(allocator, 2 * MiB)
    assert (allocator.counts.retries, allocator.counts.reserved) == (1, 20 * MiB)
    assert allocator.malloc(80 * MiB) is not None
    assert (allocator.counts.retries, allocator.counts.reserved) == (1, 100 * MiB)


# --- properties ---------------------------------------------------------------------------------

SETTINGS = st.builds(
    AllocatorSettings,
    max_split_bytes=st.sampled_from([None, 20 * MiB, 32 * MiB, 64 * MiB]),
    divisions=st.sampled_from([0, 2, 8]).map(lambda parts: (parts,) * 16),
    gc_threshold=st.sampled_from([0.0, 0.6]),
    expandable=st.booleans(),
)
SIZES = st.one_of(st.integers(1, 2 * MiB), st.integers(1, 24 * MiB), st.integers(10, 90).map(lambda size: size * MiB))
PROGRAM = st.lists(
    st.tuples(st.sampled_from("aaaaaafffpe"), SIZES, st.integers(0, 1), st.integers(0, 1 << 16)), max_size=40
)
"""What is done: allocate, free, free what another stream uses, empty the cache; a size, a stream, which block."""


def held(allocator: Allocator, used: list[Block]) -> list[list[Block]]:
    """The mapped stretches of segments, block by block."""
    every = [*allocator.free_blocks(), *used]
    found = []
    for head in (block for block in every if block.prev is None or not block.prev.mapped):
        chain, here = [], head
        while here is not None and here.mapped:
            chain.append(here)
            here = here.next  # type: ignore[assignment]
        found.append(chain)
    assert sum(map(len, found)) == len(every)
    return found


@settings(max_examples=60, deadline=None)
@given(SETTINGS, PROGRAM, st.sampled_from([None, 120 * MiB, 300 * MiB]))
def test_whatever_the_settings_memory_is_kept_account_of(
    chosen: AllocatorSettings, program: list[tuple[str, int, int, int]], limit: int | None
) -> None:
    allocator = Allocator(chosen, ReservedMemory(Limits(limit, limit)))
    used: list[Block] = []
    waiting: list[tuple[Block, int]] = []
    for act, size, stream, which in program:
        if act == "a":
            block = allocator.malloc(size, stream)
            if block is None:
                assert limit is not None
                assert not allocator.releasable() or chosen.expandable, "nothing is left that could be given back"
            else:
                assert block.used
                assert block.size >= chosen.round_size(size)
                left = block.size - chosen.round_size(size)
                most = chosen.max_split_bytes
                unsplit = most is not None and chosen.round_size(size) >= most and not chosen.expandable
                assert left < 512 if block.pool.small or chosen.expandable else left <= MiB or unsplit
                if unsplit:
                    assert left < 20 * MiB
                used.append(block)
        elif act == "e":
            allocator.release_cached()
        elif used:
            block = used.pop(which % len(used))
            if act == "p":
                allocator.await_free(block)
                waiting.append((block, block.serial))
            else:
                allocator.free(block)
        pending = [block for block, serial in waiting if block.used and block.serial == serial]
        stretches = held(allocator, [*used, *pending])
        assert allocator.counts.active == sum(block.size for block in (*used, *pending))
        assert allocator.counts.reserved == sum(block.size for stretch in stretches for block in stretch)
        assert limit is None or allocator.counts.reserved <= limit
        assert allocator.counts.reserved <= allocator.counts.peak_reserved
        for stretch in stretches:
            for one, other in pairwise(stretch):
                assert one.end == other.start
                assert one.used or other.used, "free neighbours are one block"
        assert allocator.releasable() == sum(block.releasable for block in allocator.free_blocks())
    for block in used:
        allocator.free(block)
    allocator.release_cached()
    assert (allocator.counts.active, allocator.counts.reserved) == (0, 0)


@settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.generate],
)
@given(SETTINGS, PROGRAM, st.sampled_from([None, 200 * MiB]), st.floats(0, 1))
def test_a_recording_is_played_as_it_was_from_any_moment_on(
    chosen: AllocatorSettings, program: list[tuple[str, int, int, int]], limit: int | None, lost: float
) -> None:
    """Also where the ring of the history has lost its beginning. (Of an expandable segment whose first pages had been
    given back by then, nothing tells where it begins: the proof fails, and no rule speaks.)"""
    device = Device(replace(chosen, gc_threshold=0.0), limit)
    used: list[Block] = []
    for act, size, stream, which in program:
        device.stream = stream
        if act == "a":
            try:
                used.append(device.alloc(size))
            except OutOfMemory:
                break
        elif act == "e":
            device.empty_cache()
        elif used:
            device.free(used.pop(which % len(used)))
    if not (chosen.expandable and "e" in {act for act, *_ in program}):
        del device.events[: int(lost * len(device.events))]
    if device.events:
        proof = prove(recorded(device))
        assert proof.holds, proof


# --- recordings ---------------------------------------------------------------------------------


def test_a_history_is_undone_to_the_state_before_it() -> None:
    device = Device()
    kept, gone = device.alloc(12 * MiB), device.alloc(3 * MiB)
    device.events.clear()
    device.free(gone)
    device.alloc(30 * MiB)
    begin = recorded(device).begin
    assert {start: piece.size for start, piece in begin.pieces.items()} == {kept.start: 12 * MiB, gone.start: 3 * MiB}
    assert [held.size for held in begin.segments.values()] == [12 * MiB, 20 * MiB]


def test_a_history_that_lost_its_beginning_between_a_segment_and_its_block() -> None:
    device = Device(AllocatorSettings(max_split_bytes=20 * MiB))
    first = device.alloc(2 * MiB)
    device.alloc(3 * MiB)
    del device.events[0]
    recording = recorded(device)
    assert list(recording.begin.pieces) == [first.start]
    assert [event.size for event in recording.events] == [3 * MiB]
    assert prove(recording).holds


def test_what_could_not_be_split_off_belongs_to_the_block_before_it() -> None:
    device = Device()
    block = device.alloc(19 * MiB + 512)
    device.free(block)
    device.alloc(19 * MiB + 512)
    device.events.clear()
    device.free(block)
    device.alloc(19 * MiB + 512)
    recording = recorded(device)
    assert [piece.size for piece in recording.begin.pieces.values()] == [20 * MiB]
    assert prove(recording).holds


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda told: told["device_traces"][0].clear(), "no history was recorded"),
        (lambda told: told["segments"].clear(), "history is not that of its last state"),
        (lambda told: told["device_traces"][0].append(told["device_traces"][0][0]), "segment that was not there yet"),
        (lambda told: told["device_traces"][0].append(told["device_traces"][0][-1]), "history is not that of its last"),
    ],
)
def test_what_cannot_be_played_is_said(spoil: Any, why: str) -> None:
    device = Device()
    device.alloc(20 * MiB)
    told = device.snapshot()
    spoil(told)
    memory = SnapshotTables(Path("snapshot"), 1 << 30).of(told)
    with pytest.raises(Unplayable, match=why):
        record(memory, 0, AllocatorSettings())


def test_retries_an_oom_and_an_emptied_cache_are_told_apart() -> None:
    device = Device(device_bytes=100 * MiB)
    device.free(device.alloc(60 * MiB))
    device.empty_cache()
    device.free(device.alloc(60 * MiB))
    device.alloc(80 * MiB)
    with pytest.raises(OutOfMemory):
        device.alloc(30 * MiB)
    recording = recorded(device)
    assert (recording.retries, recording.ooms, recording.oom_bytes) == (2, 1, 100 * MiB)
    assert prove(recording).holds
    again = replay(recording, AllocatorSettings(), Limits(100 * MiB))
    assert (again.retries, again.ooms, again.peak_reserved) == (2, 1, 80 * MiB)
    roomy = replay(recording, AllocatorSettings(), Limits(200 * MiB))
    assert (roomy.retries, roomy.ooms, roomy.peak_reserved) == (0, 0, 140 * MiB)


def test_a_fragmented_history_under_other_settings() -> None:
    device = Device()
    allocations.pinned(device)
    recording = recorded(device)
    now, grown, whole = (
        replay(recording, chosen)
        for chosen in (AllocatorSettings(), AllocatorSettings(expandable=True), AllocatorSettings(32 * MiB))
    )
    assert (now.peak_reserved, now.active, now.stranded, now.cached) == (
        2200 * MiB, 1030 * MiB, 1120 * MiB, 0,
    )  # fmt: skip
    assert (grown.peak_reserved, grown.stranded) == (1240 * MiB, 130 * MiB)
    assert whole.stranded == 0
    assert pinned_at(recording, AllocatorSettings(), Limits(), now.peak_at).keys() == {
        event.stack for event in recording.events if event.size == 4 * MiB
    }


@pytest.mark.parametrize(("name", "segments", "reserved"), [("forward", 289, 18_756), ("fullstep", 783, 58_280)])
def test_real_devices_are_played_as_they_were(name: str, segments: int, reserved: int) -> None:
    path = REAL / "memory_snapshots" / f"memory_ctx128_{name}.pickle"
    if not path.exists():
        pytest.skip(f"{path}: not here; DSPROF_REAL_TRACES names the folder of real traces")
    memory = import_trace(path).memory[0]
    recording = record(memory, 0, AllocatorSettings())
    proof = prove(recording)
    assert proof.holds
    assert (proof.segments_alike, proof.blocks_alike) == (segments, {"forward": 2058, "fullstep": 6771}[name])
    assert proof.reserved_twin == reserved * MiB == int(memory.segments["bytes"].sum())
    assert replay(recording, AllocatorSettings()).peak_reserved == reserved * MiB
