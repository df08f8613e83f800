"""Importing memory snapshots: a tiny one, hostile and damaged ones, and the real ones where they are."""

from __future__ import annotations

import gzip
import os
import pickle
import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from allocations import Device, MiB
from damage import damaged

from dsprof import cli, reports, trace
from dsprof.analyzer import analyze
from dsprof.analyzer.analysis import Analysis
from dsprof.analyzer.memory.allocator_state import segment_uses
from dsprof.importers import import_trace
from dsprof.reports import memory as memory_figures
from dsprof.run import RunError, RunFolder, open_run
from dsprof.schema import COLUMNS
from dsprof.trace import room

REAL = Path(os.environ.get("DSPROF_REAL_TRACES", Path(__file__).parents[2] / "shared" / "data" / "traces"))


def tiny() -> dict[str, Any]:
    """One segment of 20 MiB: 6 MiB in use, 4 MiB that another stream still uses, 10 MiB free."""
    device = Device()
    device.line = 12
    used = device.alloc(6 * MiB - 100)
    device.line = 13
    device.free_later(device.alloc(4 * MiB))
    told = device.snapshot()
    for block in told["segments"][0]["blocks"]:
        if block["address"] == used.end:
            block["state"] = "active_pending_free"
    return told


def write(content: Any, folder: Path, name: str = "snapshot.pickle") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content))
    return path


def refusal(content: Any, folder: Path) -> str:
    """The one line that importing it ends with."""
    with pytest.raises(RunError) as error:
        import_trace(write(content, folder))
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 600
    return text.replace(str(folder), "")


# --- what is read -------------------------------------------------------------------------------


def test_segments_blocks_history_and_stacks(tmp_path: Path) -> None:
    memory = import_trace(write(tiny(), tmp_path)).memory[0]
    assert memory.segments[["device", "bytes", "stream", "pool", "small", "expandable"]].values.tolist() == [
        [0, 20 * MiB, 0, "0.0", False, False]
    ]
    assert memory.blocks[["segment", "bytes", "requested", "state"]].values.tolist() == [
        [0, 6 * MiB - 0, 6 * MiB - 100, "allocated"], [0, 4 * MiB, 4 * MiB, "pending"], [0, 10 * MiB, 0, "free"],
    ]  # fmt: skip
    assert memory.history[["action", "bytes"]].values.tolist() == [
        ["segment_alloc", 20 * MiB], ["alloc", 6 * MiB - 100], ["alloc", 4 * MiB], ["free_requested", 4 * MiB],
    ]  # fmt: skip
    first = memory.stacks[memory.stacks["stack"] == int(memory.blocks["stack"][0])]
    assert first[["function", "line"]].values.tolist() == [["linear", 2000], ["forward", 12], ["<module>", 900]]
    assert memory.stacks["stack"].nunique() == 2


def test_rows_are_samples_of_what_was_reserved_and_asked_for(tmp_path: Path) -> None:
    rows = import_trace(write(tiny(), tmp_path)).rows
    assert rows[["kind", "name", "lane", "start_ns", "bytes", "source"]].values.tolist() == [
        ["mem", "reserved", "cuda.0", 1_000_000_000, 20 * MiB, "imported"],
        ["mem", "requested", "cuda.0", 1_000_001_000, 6 * MiB - 100, "imported"],
        ["mem", "requested", "cuda.0", 1_000_002_000, 10 * MiB - 100, "imported"],
        ["mem", "requested", "cuda.0", 1_000_003_000, 6 * MiB - 100, "imported"],
    ]
    assert dict(rows.dtypes.astype(str)) == COLUMNS


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_binary_protocol(tmp_path: Path, protocol: int) -> None:
    path = write(pickle.dumps(tiny(), protocol=protocol), tmp_path)
    assert len(import_trace(path).memory[0].blocks) == 3


def test_by_pool_and_by_line(tmp_path: Path) -> None:
    (held,) = analyze(import_trace(write(tiny(), tmp_path))).memory
    (pool,) = held.pools
    assert (pool.pool, pool.segments, pool.reserved, pool.allocated, pool.requested, pool.pending) == (
        "large", 1, 20 * MiB, 6 * MiB, 6 * MiB - 100, 4 * MiB,
    )  # fmt: skip
    assert (pool.releasable, pool.split, pool.largest_free) == (0, 10 * MiB, 10 * MiB)
    assert [(item.site, item.function, item.bytes, item.blocks) for item in held.holders] == [
        ("/home/me/train.py:12", "forward", 6 * MiB, 1)
    ]


def test_a_snapshot_without_history_is_of_use_and_says_what_it_lacks(tmp_path: Path) -> None:
    analysis = analyze(import_trace(write({**tiny(), "device_traces": []}, tmp_path)))
    assert analysis.memory[0].total("reserved") == 20 * MiB
    assert analysis.verdict.status == "inconclusive"
    assert "no history was recorded" in analysis.verdict.headline
    assert "`dsprof run`" in analysis.verdict.headline
    assert "no history was recorded" in analysis.not_judged["memory.fragmentation"]


def test_the_headline_says_where_all_of_it_is(tmp_path: Path) -> None:
    """20 MiB in a segment with tensors, 20 in one that could go back to the device."""
    told = tiny()
    empty = {"address": 1 << 50, "size": 20 * MiB, "requested_size": 0, "state": "inactive"}
    told["segments"].append({**told["segments"][0], "address": 1 << 50, "blocks": [empty]})
    analysis = analyze(import_trace(write(told, tmp_path)))
    assert analysis.verdict.headline.startswith(
        "40.0 MiB of device memory reserved when the snapshot was taken: 6.00 MiB in use, 4.00 MiB freed that another "
        "stream may still use, 10.0 MiB free between blocks in use and 20.0 MiB free in whole segments"
    )
    segments = segment_uses(analysis.trace.memory[0], 0)
    assert segments.drop(columns=["pool", "stream"]).to_numpy().tolist() == [
        [0, 20 * MiB, 6 * MiB, 4 * MiB, 10 * MiB, 0], [1, 20 * MiB, 0, 0, 0, 20 * MiB],
    ]  # fmt: skip
    bars = {bar.name: bar for bar in memory_figures.segments(segments).data}
    assert list(bars) == [
        "in use 6.00 MiB", "freed, another stream may still use it 4.00 MiB", "free between blocks in use 10.0 MiB",
        "free in whole segments 20.0 MiB",
    ]  # fmt: skip
    assert [sum(bar.y[at] for bar in bars.values()) for at in (0, 1)] == [100, 100]
    assert bars["in use 6.00 MiB"].x.tolist() == [0, 20]
    assert bars["in use 6.00 MiB"].width.tolist() == [20, 20]
    small = memory_figures.segments(segments, most=1)
    assert small.layout.meta["note"] == "the 2 smallest of 2 segments are one bar"
    assert small.data[0].width.tolist() == [40]


# --- as a run -----------------------------------------------------------------------------------


def test_the_command_makes_a_run_that_other_commands_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, run = write(tiny(), tmp_path), tmp_path / "run"
    assert cli.main(["import", str(path), "-o", str(run)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{run}\n"
    assert "imported the memory of 1 rank\n" in said.err
    loaded = trace.load(open_run(run))
    assert loaded.memory[0].blocks.equals(import_trace(path).memory[0].blocks)
    assert cli.main(["analyze", str(run)]) == 0
    said = capsys.readouterr()
    assert "verdict: inconclusive" in said.out
    assert "healthy" not in said.out
    assert "memory  device 0 of rank 0: 20.0 MiB reserved, 1 segment" in said.out
    assert "\n   me/train.py:12  forward" in said.out
    assert cli.main(["report", str(run)]) == 0
    page = (run / "report.html").read_text()
    assert ">Device memory</h2>" in page
    assert 'id="plot-segments-0"' in page
    assert "<code>me/train.py:12</code>" in page


def test_importing_again_with_force_leaves_nothing_of_the_old(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert cli.main(["import", str(write(tiny(), tmp_path)), "-o", str(run)]) == 0
    device = Device()
    device.alloc(40 * MiB)
    other = device.write(tmp_path / "other.pickle")
    assert cli.main(["import", str(other), "-o", str(run), "--force"]) == 0
    assert reports.examine(RunFolder(run)).memory[0].total("reserved") == 40 * MiB


def test_damaged_tables_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert cli.main(["import", str(write(tiny(), tmp_path)), "-o", str(run)]) == 0
    (run / "memory" / "rank00000.blocks.parquet").write_bytes(b"PAR1 no more")
    capsys.readouterr()
    assert cli.main(["analyze", str(run)]) != 0
    assert "rank00000.blocks.parquet: unreadable" in capsys.readouterr().err


def test_names_in_the_file_are_shown_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = tiny()
    for frame in told["segments"][0]["blocks"][0]["frames"]:
        frame["filename"] = frame["filename"].replace("train", "<script>alert(1)</script>\x1b[2J\u202e")
    run = tmp_path / "run"
    assert cli.main(["import", str(write(told, tmp_path)), "-o", str(run)]) == 0
    assert cli.main(["analyze", str(run)]) == 0
    assert cli.main(["report", str(run)]) == 0
    assert "\x1b[2J" not in capsys.readouterr().out
    assert "<script>alert(1)" not in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("names", "ranks"),
    [
        (["rank3.pickle", "rank0.pickle"], [0, 3]),
        (["job_rank_1.pkl", "job_rank_0.pkl"], [0, 1]),
        (["snapshot_1.pickle", "snapshot_0.pickle"], [0, 1]),
        (["rank2.pickle"], [2]),
        (["snapshot_7.pickle"], [0]),
    ],
)
def test_a_folder_of_snapshots_is_one_a_rank(tmp_path: Path, names: list[str], ranks: list[int]) -> None:
    for size, name in enumerate(names, 1):
        device = Device()
        device.alloc(size * 20 * MiB)
        device.write(tmp_path / name)
    found = import_trace(tmp_path)
    assert list(found.memory) == [info.rank for info in found.run.ranks] == ranks
    files = {fact["rank"]: fact["file"] for fact in found.run.facts if fact["fact"] == "import"}
    sizes = {names[size - 1]: size * 20 * MiB for size in range(1, len(names) + 1)}
    assert {rank: int(found.memory[rank].segments["bytes"].sum()) for rank in ranks} == {
        rank: sizes[file] for rank, file in files.items()
    }
    assert sorted(set(found.rows["rank"])) == ranks


@pytest.mark.parametrize("names", [("before", "after"), ("a_1", "b_1"), ("step100", "step200")])
def test_snapshots_that_may_be_of_one_rank_are_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    for name in names:
        write(tiny(), tmp_path, f"{name}.pickle")
    with pytest.raises(
        RunError, match="2 memory snapshots whose names do not tell their ranks: name one of them, or call"
    ):
        import_trace(tmp_path)


def test_a_snapshot_that_is_damaged_costs_its_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    snapshots, run = tmp_path / "snapshots", tmp_path / "run"
    snapshots.mkdir()
    for rank in range(3):
        write(tiny(), snapshots, f"rank{rank}.pickle")
    (snapshots / "rank1.pickle").write_bytes(pickle.dumps(tiny())[:300])
    assert cli.main(["import", str(snapshots), "-o", str(run)]) == 0
    assert "imported the memory of 2 ranks" in capsys.readouterr().err
    loaded = trace.load(open_run(run))
    assert list(loaded.memory) == [0, 2]
    assert "rank1.pickle: damaged or cut short" in " ".join(warnings_of(loaded))
    assert {held.rank for held in analyze(loaded).memory} == {0, 2}


def warnings_of(found: trace.Trace) -> list[str]:
    return [word for fact in found.run.facts if fact["fact"] == "import" for word in fact["warnings"]]


# --- hostile ------------------------------------------------------------------------------------


class Calls:
    """Would call a function when it is read."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


SEGMENTS = b"\x80\x04}\x8c\x08segments"
HOSTILE = {
    "posix.system": pickle.dumps({"segments": Calls(os.system, "touch executed")}),
    "__builtin__.eval": pickle.dumps({"segments": Calls(eval, "open('executed', 'w')")}, protocol=2),
    "builtins.exec": SEGMENTS + b"cbuiltins\nexec\n\x8c\x18open('executed','w').close()\x85Rs.",
    "os.system": SEGMENTS + b"(S'touch executed'\nios\nsystem\ns.",
    "torch.load": SEGMENTS + b"\x8c\x05torch\x8c\x04load\x93s.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_pickle_that_would_run_something_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    text = refusal(HOSTILE[name], tmp_path)
    if b"(S'" in HOSTILE[name]:
        assert "damaged" in text
    else:
        assert f"imports a name, '{name}'" in text
        assert "nothing of it was executed" in text
        assert "_dump_snapshot" in text
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "content",
    [
        SEGMENTS + b"\x82\x01s.",  # a registered name
        SEGMENTS + b"\x8c\x01xQs.",  # an object outside of the file
        SEGMENTS + b"}}bs.",  # the state of an object
        SEGMENTS + b"})\x81s.",  # a new object
        SEGMENTS + b"\x97s.",  # a buffer outside of the file
        SEGMENTS + b"\x8e" + struct.pack("<Q", 1 << 60) + b"s.",  # bytes beyond its end
        SEGMENTS + b"\x8d" + struct.pack("<Q", 1 << 62) + b"s.",
        SEGMENTS + b"\x8b" + struct.pack("<I", 1 << 31) + b"s.",
        SEGMENTS + b"]" + b"\x85" * 100_000 + b"Ns.",  # deep tuples as a key
        SEGMENTS + b"\x80\x04" + b")\x85" + b"\x85" * 100_000 + b"NsNs.",
        SEGMENTS + b"(" * 100_000 + b"l.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\xff}\x8c\x08segments]s",
        b"\x80\x09" + SEGMENTS[2:] + b"]s.",
    ],
    ids=range(13),
)
def test_what_no_snapshot_holds_is_refused(tmp_path: Path, content: bytes) -> None:
    refusal(content, tmp_path)


def test_deep_nesting_neither_crashes_nor_is_followed(tmp_path: Path) -> None:
    deep = SEGMENTS + b"]" * 200_000 + b"a" * 199_999 + b"s."
    assert "no list `segments`" in refusal(deep, tmp_path) or "segment 0" in refusal(deep, tmp_path)


def test_a_list_that_is_named_again_and_again_takes_no_more_room_than_its_file(tmp_path: Path) -> None:
    """Each of 2,000 segments holds the same 2,000 blocks: four million in 60 kB."""
    block = {"address": 0, "size": 512, "requested_size": 1, "state": "inactive", "frames": []}
    segment = {"address": 0, "total_size": 512, "blocks": [block] * 2000}
    path = write({"segments": [segment] * 2000, "device_traces": []}, tmp_path)
    tracemalloc.start()
    with pytest.raises(RunError):
        import_trace(path)
    assert tracemalloc.get_traced_memory()[1] < 20 * MiB
    tracemalloc.stop()


LIST_OF_SEGMENTS = SEGMENTS + b"]("
MANY = 300_000


@pytest.mark.parametrize(
    "content",
    [
        LIST_OF_SEGMENTS + b"}" * MANY + b"es.",  # dictionaries
        LIST_OF_SEGMENTS + b"]" * MANY + b"es.",
        LIST_OF_SEGMENTS + b"}K\x01K\x01s" * (MANY // 6) + b"es.",
        SEGMENTS + b"]" + b"\x94" * MANY + b"s.",  # one list, under many numbers
        SEGMENTS + b"N" + b"\x85" * MANY + b"s.",  # a tuple in a tuple in a tuple
    ],
    ids=["dictionaries", "lists", "items", "memo", "tuples"],
)
def test_a_byte_may_ask_for_a_hundred_but_no_file_gets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    """Without the bound each of them, of 0.3 MB, took 12 to 60 MB."""
    monkeypatch.setattr(room, "FREE", 0)
    tracemalloc.start()
    text = refusal(content, tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "would take more than" in text
    assert "MiB of memory, which a memory snapshot never does; dump it again" in text
    assert peak < 11_000_000, peak


def test_a_history_that_is_named_again_and_again_is_gone_through_once(tmp_path: Path) -> None:
    """The same 2,000 events on 2,000 devices, and the same one 300,000 times."""
    event = {"action": "alloc", "addr": 0, "size": 1, "stream": 0, "time_us": 1}
    for traces in ([[event] * 2000] * 2000, [[event] * MANY]):
        told = refusal({"segments": [], "device_traces": traces}, tmp_path)
        assert "more entries than the file has room for" in told


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_history_without_stacks_has_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: int) -> None:
    """The densest that torch writes: 5,000 events of some 60 bytes."""
    monkeypatch.setattr(room, "FREE", 0)
    events = [
        {
            "action": "alloc",
            "addr": (1 << 46) + at,
            "size": 512 * at,
            "stream": 0,
            "time_us": (1 << 50) + at,
            "frames": [],
        }
        for at in range(5000)
    ]
    path = write(pickle.dumps({"segments": [], "device_traces": [events]}, protocol=protocol), tmp_path)
    assert path.stat().st_size < 350_000
    assert len(import_trace(path).memory[0].history) == 5000


def test_a_gzip_bomb_stays_packed(tmp_path: Path) -> None:
    assert "not a trace that dsprof knows" in refusal(gzip.compress(b"\0" * 50 * MiB), tmp_path)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda told: told.update(segments={}), "no list `segments`"),
        (lambda told: told["segments"].append(7), "segment 1: `device` is no whole number"),
        (lambda told: told["segments"][0].update(total_size=1), "longer or shorter than its blocks"),
        (lambda told: told["segments"][0].update(address=-5), "`address` is no whole number"),
        (lambda told: told["segments"][0]["blocks"][1].update(address=0), "not where the one before it ends"),
        (lambda told: told["segments"][0]["blocks"][1].update(size=1 << 70), "`size` is no whole number"),
        (lambda told: told["segments"][0]["blocks"][1].update(state="lost"), "a state that is none of"),
        (lambda told: told["segments"].append(told["segments"][0]), "two segments at one place"),
        (lambda told: told["device_traces"].append("x"), "the history of device 1: no list"),
        (lambda told: told["device_traces"][0].append({}), "event 4 of device 0: `action` is no text"),
        (lambda told: told["device_traces"][0][0].update(size=None), "event 0 of device 0: `size`"),
        (lambda told: told["device_traces"][0][1].update(frames=[[]]), "event 1 of device 0, frames"),
    ],
    ids=range(12),
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, spoil: Any, why: str) -> None:
    told = tiny()
    spoil(told)
    assert why in refusal(told, tmp_path)


def test_unknown_actions_and_settings_are_left_out(tmp_path: Path) -> None:
    told = tiny()
    told["device_traces"][0].append({"action": "worker_\x1b[2J"})
    told["allocator_settings"]["new"] = [[]]
    run = import_trace(write(told, tmp_path)).run
    assert "unknown actions" in run.facts[0]["warnings"][0]
    assert "\x1b" not in run.facts[0]["warnings"][0]
    assert "new" not in run.facts[1]["settings"]


def analyzed_unless_refused(path: Path) -> Analysis | None:
    try:
        trace_of = import_trace(path)
    except RunError as error:
        if "\n" in str(error) or len(str(error)) > 600:
            raise
        return None
    return analyze(trace_of)


@pytest.mark.parametrize("seed", range(10))
def test_damaged_files_end_in_one_message_or_in_a_run(tmp_path: Path, seed: int) -> None:
    """Thirty a seed: cut, bits flipped, bytes removed, put in or repeated."""
    chance, whole = random.Random(seed), pickle.dumps(tiny(), protocol=2 + seed % 4)
    for _ in range(30):
        analysis = analyzed_unless_refused(write(damaged(chance, whole), tmp_path))
        if analysis is not None:
            assert analysis.verdict.status != "healthy"
            assert not [why for why in analysis.not_judged.values() if "the rule failed" in why]


# --- the real ones ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "segments", "reserved", "allocated", "events"),
    [("forward", 516, 18_756, 18_595, 4657), ("fullstep", 1010, 58_280, 52_332, 19_342)],
)
def test_real_snapshots(name: str, segments: int, reserved: int, allocated: int, events: int) -> None:
    path = REAL / "memory_snapshots" / f"memory_ctx128_{name}.pickle"
    if not path.exists():
        pytest.skip(f"{path}: not here; DSPROF_REAL_TRACES names the folder of real traces")
    analysis = analyze(import_trace(path))
    (held,) = analysis.memory
    assert (held.total("segments"), held.total("reserved") // MiB) == (segments, reserved)
    assert round(held.total("allocated") / MiB) == allocated
    assert len(analysis.trace.memory[0].history) == events
    assert "memory.fragmentation" in analysis.passed
    assert not [finding for finding in analysis.findings if finding.code.startswith("memory.")]
    assert analysis.verdict.status == "inconclusive"
    assert held.holders[1].site.endswith("transformer.py:22" if name == "forward" else "BmmBackward0, in backward")
