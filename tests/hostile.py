"""Run folders and traces as somebody hostile makes them, and a folder outside of them that nobody may touch.

A case is a function that changes a good run folder. `Outside` knows by inotify whether anything in it was opened.
"""

from __future__ import annotations

import ctypes
import gzip
import json
import os
import shutil
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from dsprof.ondisk import CHUNK_HEADER, CHUNK_HEADER_BYTES, CHUNK_MAGIC, FORMAT_VERSION, RECORD_BYTES

CANARY: Final = "canary-7f3a91c4e2"
"""In every file outside; it may turn up nowhere else."""
IN_ANY: Final = 0x00000FFF
"""All that inotify tells: opened, read, written, created, moved, removed, attributes changed."""
IN_DIRECTORY: Final = 0x40000000
OPENED: Final = 0x20

Change = Callable[[Path, Path], None]
"""Called with the run folder, or the folder of traces, and the folder outside."""


class Outside:
    """A folder that looks like all that dsprof might want to read, write or remove."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in ("capture/rank00000.0.host.1", "trace", "memory", "exits", "hosts", "tensorboard/mean", "empty"):
            (path / name).mkdir(parents=True)
        for name in (
            "secret.txt", "run.json", "capture/rank00000.0.host.1/chunk-00000.bin", "trace/rank00000.parquet",
            "capture/rank00000.0.host.1/names.txt", "exits/host.json", "hosts/host.json", "findings.json",
            "tensorboard/mean/events.out.tfevents.0.dsprof", "memory/rank00000.segments.parquet", "rank0.json",
            "capture/rank00000.0.host.1/facts.jsonl", "rank0.pt.trace.json", "memory/rank00000.parquet",
        ):  # fmt: skip
            (path / name).write_text(
                json.dumps({"id": CANARY, "name": CANARY, "command": [CANARY], "traceEvents": [], "fact": CANARY})
                + "\n"
            )
        os.mkfifo(path / "pipe")
        self._before = self._look()
        self._library = ctypes.CDLL(None, use_errno=True)
        self._watch = self._library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._watch >= 0
        for folder in (path, *(one for one in path.rglob("*") if one.is_dir())):
            assert self._library.inotify_add_watch(self._watch, os.fsencode(folder), IN_ANY) >= 0

    def _look(self) -> list[tuple[str, int, int, int]]:
        found = []
        for one in sorted(self.path.rglob("*")):
            status = one.lstat()
            found.append((str(one), status.st_mode, status.st_size, status.st_mtime_ns))
        return found

    def touched(self) -> list[str]:
        """What was done in it since it was made, or since the last look."""
        said = []
        with_content = b""
        while True:
            try:
                with_content += os.read(self._watch, 1 << 16)
            except BlockingIOError:
                break
        at = 0
        while at < len(with_content):
            _, mask, _, length = struct.unpack_from("iIII", with_content, at)
            name = with_content[at + 16 : at + 16 + length].rstrip(b"\0").decode()
            said.append(f"{name or 'a folder'}: {mask:#x}")
            at += 16 + length
        if self._look() != self._before:
            said.append("something was changed")
        while True:  # looking opens folders
            try:
                os.read(self._watch, 1 << 16)
            except BlockingIOError:
                return said

    def close(self) -> None:
        os.close(self._watch)


class Waited(Exception):
    """Something took so long that it must have waited for somebody hostile."""


@contextmanager
def impatient(seconds: int) -> Iterator[None]:
    """Nothing may wait: raises Waited."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise Waited(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# --- what is put in the place of something -----------------------------------------------------------


def put(path: Path) -> Path:
    """The path, with nothing there any more, and the folders above it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def link_to_file(path: Path, outside: Path) -> None:
    put(path).symlink_to(outside / "run.json")


def link_to_folder(path: Path, outside: Path) -> None:
    put(path).symlink_to(outside / "capture" / "rank00000.0.host.1")


def link_up(path: Path, outside: Path) -> None:
    put(path).symlink_to(os.path.relpath(outside / "secret.txt", path.parent))


def link_to_pipe(path: Path, outside: Path) -> None:
    put(path).symlink_to(outside / "pipe")


def dangling(path: Path, outside: Path) -> None:
    put(path).symlink_to(outside / "empty" / "made-by-a-link")


def link_to_itself(path: Path, outside: Path) -> None:
    put(path).symlink_to(path.name)


def device(path: Path, outside: Path) -> None:
    put(path).symlink_to("/dev/zero")


def pipe(path: Path, outside: Path) -> None:
    os.mkfifo(put(path))


def a_socket(path: Path, outside: Path) -> None:
    here = os.getcwd()
    os.chdir(put(path).parent)  # the name of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def a_folder(path: Path, outside: Path) -> None:
    put(path).mkdir()


def huge(path: Path, outside: Path) -> None:
    """A file of a terabyte, of which nothing is on the disk."""
    with open(put(path), "wb") as file:
        file.truncate(1 << 40)


def without_rights(path: Path, outside: Path) -> None:
    content = path.read_bytes() if path.is_file() else b"x"
    put(path).write_bytes(content)
    path.chmod(0)


def nothing(path: Path, outside: Path) -> None:
    put(path).touch()


def noise(path: Path, outside: Path) -> None:
    put(path).write_bytes(bytes(range(256)) * 64)


def deep_json(path: Path, outside: Path) -> None:
    put(path).write_text("[" * 200_000)


def binary_lines(path: Path, outside: Path) -> None:
    put(path).write_bytes(b"\xff\x1b[2J\x00\n{}\n[]\nnull\n" * 100)


INSTEAD: Final[tuple[Callable[[Path, Path], None], ...]] = (
    link_to_file, link_to_folder, link_up, link_to_pipe, dangling, link_to_itself, device, pipe, a_socket, a_folder,
    huge, without_rights, nothing, noise, deep_json, binary_lines,
)  # fmt: skip
CAPTURE: Final = "capture/rank00000.0.host.1"
PARTS: Final = (
    "run.json", f"{CAPTURE}/meta.json", f"{CAPTURE}/names.txt", f"{CAPTURE}/facts.jsonl",
    f"{CAPTURE}/chunk-00000.bin", f"{CAPTURE}/counters.bin", f"{CAPTURE}/stacks.txt", f"{CAPTURE}/copying.json",
    f"{CAPTURE}/memory.pickle",
)  # fmt: skip
"""Files that are read of each run."""
SELDOM: Final = (
    "trace/rank00000.parquet", "memory/rank00000.segments.parquet", "exits/host.json", "hosts/host.json", "hangs.json",
    "hint.7.json", "error.7.txt", "findings.json", "control.json",
)  # fmt: skip
FOLDERS: Final = ("capture", CAPTURE, "trace", "memory", "exits", "hosts", "tensorboard", "tensorboard/mean")
LINKS: Final = (link_to_folder, dangling, link_to_itself, pipe)


def replaced() -> Iterator[tuple[str, Change]]:
    """Something else in the place of each file and each folder of a run."""

    def change(part: str, how: Callable[[Path, Path], None]) -> Change:
        return lambda run, outside: how(run / part, outside)

    for part in PARTS:
        for how in INSTEAD:
            yield f"{part} {how.__name__}", change(part, how)
    for part in SELDOM:
        for how in (link_to_file, dangling, pipe, huge, deep_json, noise):
            yield f"{part} {how.__name__}", change(part, how)
    for part in FOLDERS:
        for how in LINKS:
            yield f"{part}/ {how.__name__}", change(part, how)


# --- contents ----------------------------------------------------------------------------------------


def write_json(part: str, content: Any) -> Change:
    def change(run: Path, outside: Path) -> None:
        text = json.dumps(content).replace("OUTSIDE", str(outside))
        put(run / part).write_text(text)

    return change


def merged_json(part: str, **values: Any) -> Change:
    """run.json or meta.json with other values."""

    def change(run: Path, outside: Path) -> None:
        path = run / part
        found = json.loads(path.read_text()) if path.is_file() else {}
        text = json.dumps({**found, **values}).replace("OUTSIDE", str(outside))
        put(path).write_text(text)

    return change


def facts(*lines: Any) -> Change:
    return lambda run, outside: (
        (run / CAPTURE / "facts.jsonl").write_text(
            "".join(json.dumps(line).replace("OUTSIDE", str(outside)) + "\n" for line in lines)
        ),
        None,
    )[1]


def renamed(to: str) -> Change:
    def change(run: Path, outside: Path) -> None:
        (run / CAPTURE).rename(run / "capture" / to)

    return change


def chunk(index: int, number: int, kept: int = 0, given_up: int = 0, body: bytes = b"") -> Change:
    """A chunk whose header says so, in the file of `number`."""

    def change(run: Path, outside: Path) -> None:
        header = CHUNK_HEADER.pack(CHUNK_MAGIC, FORMAT_VERSION, RECORD_BYTES, 1 << 31, index, 1)
        header += struct.pack("<QQQ", kept, given_up, 1 << 62)
        whole = header.ljust(CHUNK_HEADER_BYTES, b"\0") + body
        (run / CAPTURE / f"chunk-{number:05d}.bin").write_bytes(whole)

    return change


def many(pattern: str, count: int) -> Change:
    def change(run: Path, outside: Path) -> None:
        for number in range(count):
            path = run / pattern.format(number)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    return change


def parquet(part: str, columns: dict[str, Any], **metadata: str) -> Change:
    def change(run: Path, outside: Path) -> None:
        table = pa.Table.from_pandas(pd.DataFrame(columns))
        table = table.replace_schema_metadata({key.replace("_", "."): value for key, value in metadata.items()})
        pq.write_table(table, put(run / part))
        shutil.rmtree(run / "capture")

    return change


def repeated_parquet(run: Path, outside: Path) -> None:
    """A small file that says the same a hundred million times."""
    table = pa.table({"start_ns": pa.nulls(5_000_000, pa.int64())})
    with pq.ParquetWriter(put(run / "trace/rank00000.parquet"), table.schema, compression="zstd") as writer:
        for _ in range(20):
            writer.write_table(table)
    shutil.rmtree(run / "capture")


def no_world_size(run: Path, outside: Path) -> None:
    merged_json("run.json", world_size=None)(run, outside)
    merged_json(f"{CAPTURE}/meta.json", world_size=10**15)(run, outside)


def copying(local: str, **more: Any) -> Change:
    told = {"host": "here", "local": local, "copier": 1, "copier_began": 1, "left": 1, "error": None, **more}
    return write_json(f"{CAPTURE}/copying.json", told)


BIG: Final = 2**62
TEXT: Final = "\x1b[2J\x1b]0;x\x07<script>alert(1)</script>\u202e" * 20


def contents() -> Iterator[tuple[str, Change]]:
    """Files that say what dsprof would not write."""
    for name, value in (
        ("world_size", 10**15), ("world_size", -1), ("world_size", "many"), ("facts", [1, None, "x"]), ("facts", {}),
        ("ranks", [{"rank": BIG}]), ("ranks", [None]), ("exits", [{"rank": -5, "host": 1}]), ("exits", "all"),
        ("groups", {"0": {"ranks": "OUTSIDE", "size": BIG}}), ("groups", [1]), ("id", ["OUTSIDE"]), ("id", "../../x"),
        ("command", "rm -rf OUTSIDE"), ("command", [TEXT, "OUTSIDE/secret.txt"]), ("cwd", "OUTSIDE"),
        ("name", "../OUTSIDE"), ("started", "yesterday"), ("started_ns", BIG * 8), ("nnodes", "9" * 5000),
        ("versions", {"torch": ["OUTSIDE"]}), ("cpu_peaks", [{"ranks": "x", "flops": 3}]), ("hangs", [TEXT]),
        ("hints", [TEXT]), ("oom_kills", [{"path": "OUTSIDE", "ranks": 4}]), ("warnings", [TEXT]), ("token", 5),
        ("level", {"full": "OUTSIDE"}), ("status", 1e308), ("ended", {}),
    ):  # fmt: skip
        yield f"run.json {name}={str(value)[:40]!r}", merged_json("run.json", **{name: value})
    for name, value in (
        ("world_size", 10**15), ("world_size", "OUTSIDE"), ("clock", {"monotonic_ns": BIG, "epoch_ns": -BIG, "id": []}),
        ("clock", "now"), ("versions", ["OUTSIDE"]), ("opened_ns", BIG), ("closed_ns", "x"), ("dropped", BIG),
        ("errors", [TEXT] * 50), ("errors", "OUTSIDE"), ("argv", {"x": "OUTSIDE"}), ("closed", "perhaps"),
    ):  # fmt: skip
        yield f"meta.json {name}={str(value)[:40]!r}", merged_json(f"{CAPTURE}/meta.json", **{name: value})
    for fact in (
        {"fact": "process", "script": "OUTSIDE/secret.txt", "cpus": "OUTSIDE", "threads": BIG, "cores": -1},
        {"fact": "group", "name": "0", "ranks": list(range(100_000)), "desc": TEXT},
        {"fact": "group", "name": None, "ranks": "OUTSIDE"}, {"fact": "group", "name": "0", "ranks": {"a": 1}},
        {"fact": "note", "text": TEXT}, {"fact": "note", "rank": "x"}, {"fact": "device", "type": ["OUTSIDE"]},
        {"fact": "ddp", "site": "OUTSIDE/secret.txt:1", "gradient_bytes": "x", "bucket_cap_mb": BIG},
        {"fact": "ddp", "gradient_bytes": [BIG] * 100, "bucket_cap_mb": -1, "site": 5},
        {"fact": "dataloader", "number": BIG, "num_workers": -BIG, "site": "OUTSIDE/secret.txt:3", "batch_size": "x"},
        {"fact": "deep", "start_ns": -BIG, "end_ns": BIG, "file": "OUTSIDE/secret.txt"},
        {"fact": "memory_limits", "path": "OUTSIDE", "cgroup": BIG, "oom_kills": -1},
        {"fact": "gpu", "rank": BIG, "name": TEXT, "uuid": "OUTSIDE"}, {"fact": "allocator", "settings": "OUTSIDE"},
        {"fact": "out_of_memory", "place": "host", "asked": "x", "stack": "OUTSIDE", "variables": [1]},
        {"fact": "checkpoint", "site": "OUTSIDE/secret.txt:1", "function": 5}, {"fact": "fsdp", "units": "x"},
        {"fact": "optimizer", "number": "x", "parameters": "OUTSIDE"}, {"fact": "batch", "shape": [BIG] * 9},
        {"fact": "standstill", "threads": "OUTSIDE", "at_ns": "x"}, {"fact": "import", "warnings": 5, "file": 7},
        {"fact": "flops", "operations": [["x"]], "torch_threads": BIG}, {"fact": "without", "collectors": BIG},
        {"fact": "pipeline", "stage": BIG, "schedule": [], "site": "OUTSIDE/secret.txt:9"}, {"fact": ["process"]},
        {"fact": "device_times", "streams": BIG}, {"fact": "tensor_parallel", "group": ["OUTSIDE"]},
    ):  # fmt: skip
        yield f"fact {json.dumps(fact)[:60]}", facts(fact)
    for to in (
        "rank99999999999999999999.0.host.1", "rank00000.99999999.host.1", "rank00000.0.host.99999999999999999999",
        "rank00000.0...1", "rank00000.0.\x1b[2J.1", "rank-0001.0.host.1", "rank999999.0.host.1", "rank00000.0.a\nb.1",
    ):  # fmt: skip
        yield f"capture {to!r}", renamed(to)
    yield "nobody tells the number of ranks", no_world_size
    yield "a chunk of another number", chunk(4_000_000_000, 1)
    yield "a chunk behind four thousand million", chunk(0, 4_000_000_000)
    yield "a chunk that gave up all", chunk(1, 1, 1, 2**63)
    yield "a chunk that kept all", chunk(1, 1, 2**63, 2**63, b"\xff" * RECORD_BYTES * 64)
    yield "records of noise", chunk(0, 0, body=bytes(range(256)) * 4096)
    yield "half a record", chunk(0, 0, body=b"\1" * 63)
    yield "five thousand captures", many("capture/rank00000.0.h.{0}/x", 500)
    yield "many errors", many("error.{0}.txt", 2000)
    yield "many hints", many("hint.{0}.json", 2000)
    yield "many exits", many("exits/{0}.json", 2000)
    yield "copying from outside", copying("OUTSIDE/capture/rank00000.0.host.1")
    yield "copying from outside, with an error", copying("OUTSIDE", error=TEXT, given_up=True)
    yield "copying, of nonsense", write_json(f"{CAPTURE}/copying.json", {"local": ["OUTSIDE"], "host": 5})
    yield "exits that are no list", write_json("exits/host.json", {"rank": "OUTSIDE"})
    yield "exits of a huge rank", write_json("exits/host.json", [{"rank": BIG, "host": "h", "pid": 1, "code": 1}])
    yield "hosts of nonsense", write_json("hosts/host.json", {"host": ["OUTSIDE"], "node": "x"})
    yield "hangs of nonsense", write_json("hangs.json", [{"operation": "OUTSIDE", "waiters": BIG}, 5])
    yield "a hang of text", write_json("hangs.json", [{"words": TEXT, "code": TEXT, "kind": 5, "culprits": [BIG]}])
    yield "a trace without its account", parquet("trace/rank00000.parquet", {"start_ns": [1]})
    yield (
        "a trace with a false account",
        parquet("trace/rank00000.parquet", {"start_ns": [1]}, dsprof_rank='{"ranks": 5, "facts": "OUTSIDE"}'),
    )
    yield "a trace with an empty account", parquet(
        "trace/rank00000.parquet", {"kind": ["step"], "step": [BIG], "start_ns": [BIG]},
        dsprof_rank='{"ranks": [], "facts": [], "versions": {}, "problems": [], "errors": []}',
    )  # fmt: skip
    yield "a trace of texts", parquet(
        "trace/rank00000.parquet", {"start_ns": ["a"], "dur_ns": [b"b"], "rank": [None]},
        dsprof_rank='{"ranks": [], "facts": [{"fact": "x"}], "versions": {}, "problems": [], "errors": []}',
    )  # fmt: skip
    yield "a trace of a name of its own", parquet("trace/rankOUTSIDE.parquet", {"start_ns": [1]})
    yield "memory of a name of its own", parquet("memory/rankx.segments.parquet", {"address": [1]})
    yield "memory of nonsense", parquet("memory/rank00000.segments.parquet", {"address": ["x"], "bytes": [-1]})
    yield "a trace that repeats itself", repeated_parquet


def all_runs() -> list[tuple[str, Change]]:
    return [*replaced(), *contents()]


# --- traces ------------------------------------------------------------------------------------------


def _gzip_bomb(folder: Path, outside: Path) -> None:
    with gzip.open(folder / "rank0.json", "wb", compresslevel=1) as file:
        file.write(b'{"schemaVersion": 1, "traceEvents": [')
        for _ in range(400):
            file.write(b" " * (1 << 20))


def _text(name: str, text: str) -> Change:
    return lambda folder, outside: ((folder / name).write_text(text.replace("OUTSIDE", str(outside))), None)[1]


def _bytes(name: str, content: bytes) -> Change:
    return lambda folder, outside: ((folder / name).write_bytes(content), None)[1]


def _into(name: str, how: Callable[[Path, Path], None]) -> Change:
    return lambda folder, outside: how(folder / name, outside)


def _step(number: int) -> str:
    about = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{10**number}", "pid": 1, "tid": 1}
    return json.dumps({**about, "ts": number, "dur": 1})


def traces() -> list[tuple[str, Change]]:
    """Changes of an empty folder, which is imported."""
    event = '{"ph": "X", "cat": "cpu_op", "name": "x", "pid": 1, "tid": 1, "ts": %s, "dur": %s, "args": %s}'
    whole = '{"schemaVersion": 1, "distributedInfo": %s, "traceEvents": [%s]}'
    pickled = b"\x80\x04c" + b"os\nsystem\n" + b"(S'touch canary-was-run'\ntR."
    cases: list[tuple[str, Change]] = [
        (f"{name} {how.__name__}", _into(name, how))
        for name in ("rank0.json", "trace.parquet", "snapshot_0.pickle", "nccl_trace_rank_0", "meta.yaml")
        for how in INSTEAD
    ]
    cases += [
        ("a gzip bomb", _gzip_bomb),
        ("huge times", _text("rank0.json", whole % ("{}", event % (1e300, 1e300, "{}")))),
        ("negative times", _text("rank0.json", whole % ("{}", event % (-1e18, -5, "{}")))),
        ("a huge rank", _text("rank0.json", whole % ('{"rank": 1e30, "world_size": 9e99}', event % (1, 1, "{}")))),
        ("a rank of text", _text("rank0.json", whole % ('{"rank": "OUTSIDE"}', event % (1, 1, "{}")))),
        ("deep arguments", _text("rank0.json", whole % ("{}", event % (1, 1, "[" * 100_000)))),
        ("paths in arguments", _text("rank0.json", whole % ("{}", event % (1, 1, '{"path": "OUTSIDE/secret.txt"}')))),
        ("an event that never ends", _text("rank0.json", whole % ("{}", event % (1, 1, '{"x": "' + "y" * 5_000_000)))),
        ("steps of all numbers", _text("rank0.json", whole % ("{}", ",".join(map(_step, range(18)))))),
        ("a pickle that runs something, as a snapshot", _bytes("snapshot.pickle", pickled + b"segments device_traces")),
        ("a pickle that runs something, as a dump", _bytes("nccl_trace_rank_0", pickled + b"entries pg_config")),
        ("a dump of nonsense", _text("rank_0.json", '{"entries": [{"frames": "OUTSIDE"}], "pg_config": {"0": 5}}')),
        ("a dump of a huge group", _text("rank_0.json", json.dumps(
            {"entries": [], "pg_config": {"0": {"ranks": str([*range(90_000)])}}}))),
        ("a dump of a huge rank", _text("rank_0.json", json.dumps({"rank": 10**30, "entries": [], "pg_config": {}}))),
        ("a table of nonsense", lambda folder, outside: pq.write_table(
            pa.table({name: ["x"] for name in ("dp_rank", "optype", "start_ts")}), folder / "trace.parquet")),
        ("a table of huge numbers", lambda folder, outside: pq.write_table(pa.table({
            "dp_rank": [2**40], "stage": [0], "step": [2**40], "seq_id": [2**40], "mb_id": [0], "optype": ["optimizer"],
            "start_ts": [1e300], "duration": [1e300]}), folder / "trace.parquet")),
    ]  # fmt: skip
    return cases
