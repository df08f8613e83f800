"""Importing dumps of torch's Flight Recorder: real ones of gloo, tiny ones, hostile and damaged ones."""

from __future__ import annotations

import json
import os
import pickle
import random
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import forked_python
import pytest
from jobs import environment

from dsprof import cli
from dsprof.analyzer import analyze
from dsprof.analyzer.finding import Finding
from dsprof.importers import import_trace
from dsprof.run import RunError
from dsprof.trace import room


def entry(seq: int, name: str = "nccl:all_reduce", state: str = "completed", **more: Any) -> dict[str, Any]:
    at = 1_700_000_000_000_000_000 + seq * 1_000_000
    return {
        "record_id": seq - 1, "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": seq,
        "p2p_seq_id": 0, "op_id": seq, "profiling_name": name, "time_created_ns": at, "input_sizes": [[16]],
        "input_dtypes": ["Float"], "output_sizes": [[16]], "output_dtypes": ["Float"], "state": state,
        "time_discovered_started_ns": at + 1000 if state == "completed" else None,
        "time_discovered_completed_ns": at + 5000 if state == "completed" else None, "retired": state == "completed",
        "is_p2p": False, "frames": [
            {"name": "all_reduce", "filename": "/x/site-packages/torch/distributed/c10d.py", "line": 9},
            {"name": "train", "filename": "/home/me/train.py", "line": 40 + seq},
        ],
        **more,
    }  # fmt: skip


def dump(entries: list[dict[str, Any]], ranks: int = 3) -> dict[str, Any]:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(ranks)))}}
    return {"version": "2.10", "pg_config": config, "entries": entries, "nccl_comm_state": {}}


def write(folder: Path, dumps: dict[int, dict[str, Any]], *, as_json: bool = False) -> Path:
    for rank, content in dumps.items():
        path = folder / (f"trace_{rank}.json" if as_json else f"nccl_trace_rank_{rank}")
        path.write_bytes(json.dumps(content).encode() if as_json else pickle.dumps(content, protocol=2))
    return folder


def first(folder: Path) -> Finding:
    analysis = analyze(import_trace(folder))
    assert analysis.verdict.status == "failed", analysis.verdict
    return analysis.findings[0]


formats = pytest.mark.parametrize("as_json", [False, True], ids=["pickle", "json"])


@pytest.mark.plants("run.hang")
@formats
def test_the_rank_that_did_not_come(tmp_path: Path, as_json: bool) -> None:
    waits = [entry(1), entry(2, state="started")]
    found = first(write(tmp_path, {0: dump(waits), 1: dump([entry(1)]), 2: dump(waits)}, as_json=as_json))
    assert (found.code, found.where.ranks, found.where.op, found.where.group) == ("run.hang", (1,), "all_reduce", "0")
    assert "rank 1 has not reached all_reduce 2 of group 0, in which ranks 0, 2 wait" in found.title
    assert any("train (train.py:42)" in str(item.value) for item in found.evidence)


@pytest.mark.plants("run.desync")
@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (entry(2, "nccl:_reduce_scatter_base", "started"), "reduce_scatter of 64 bytes of float32 on rank 1"),
        (entry(2, state="started", input_sizes=[[17]]), "all_reduce of 68 bytes of float32 on rank 1"),
        (entry(2, state="started", input_dtypes=["Int"], output_dtypes=["Int"]), "64 bytes of int32 on rank 1"),
    ],
)
def test_ranks_that_disagree(odd: dict[str, Any], words: str, tmp_path: Path) -> None:
    waits = [entry(1), entry(2, state="started")]
    found = first(write(tmp_path, {0: dump(waits), 1: dump([entry(1), odd]), 2: dump(waits)}))
    assert (found.code, found.where.ranks) == ("run.desync", (1,))
    assert words in found.title
    assert "rank 1 is at train.py:42" in found.title
    issued = {item.metric: item.value for item in found.evidence}
    assert issued["ranks 0, 2 issued"] == "all_reduce of 64 bytes of float32 at train.py:42"


def test_a_message_that_was_never_sent(tmp_path: Path) -> None:
    receives = entry(1, "nccl:recv 0<-1", "started", is_p2p=True, collective_seq_id=0, p2p_seq_id=1)
    found = first(write(tmp_path, {0: dump([receives], 2), 1: dump([], 2)}))
    assert (found.code, found.where.ranks, found.where.op) == ("run.hang", (1,), "recv")


def test_what_was_coalesced_counts_once(tmp_path: Path) -> None:
    together = [entry(1, "nccl:_all_gather_base"), entry(1), entry(1, "nccl:coalesced")]
    run = import_trace(write(tmp_path, {0: dump(together, 2), 1: dump(together, 2)}))
    assert run.rows["name"].tolist() == ["coalesced", "coalesced"]
    assert not [found for found in analyze(run).findings if found.code.startswith("run.")]


def test_nobody_is_accused_whose_dump_is_not_there(tmp_path: Path) -> None:
    waits = [entry(1), entry(2, state="started")]
    analysis = analyze(import_trace(write(tmp_path, {0: dump(waits), 2: dump(waits)})))
    assert [found.code for found in analysis.findings] == []
    assert analysis.verdict.status == "inconclusive"


REAL = """
import os, sys
os.environ["TORCH_FR_BUFFER_SIZE"] = "100"
import torch, torch.distributed as dist
rank, store, out = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2), sys.argv[3]
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
for _ in range(2):
    dist.all_reduce(torch.ones(4))
if rank == 0:
    late = dist.all_reduce(torch.ones(4), async_op=True)
    store.set("issued", "1")
store.wait(["issued"])
c10d = torch._C._distributed_c10d
open(out, "wb").write(c10d._dump_fr_trace_json() if out.endswith("json") else c10d._dump_fr_trace())
store.set(f"written{rank}", "1")
store.wait([f"written{1 - rank}"])
os._exit(0)
"""


@formats
def test_real_dumps_of_gloo(tmp_path: Path, as_json: bool) -> None:
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    names = [f"fr_{rank}.json" if as_json else f"fr_rank_{rank}" for rank in range(2)]
    ranks = [
        forked_python.start(
            [sys.executable, "-c", REAL, str(rank), str(tmp_path / "store"), str(dumps / name)], env=environment()
        )
        for rank, name in enumerate(names)
    ]
    assert [process.wait(120) for process in ranks] == [0, 0]
    found = first(dumps)
    assert (found.code, found.where.ranks) == ("run.hang", (1,))
    assert "rank 1 has not reached all_reduce 3 of group 0" in found.title


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    waits = [entry(1), entry(2, state="started")]
    write(dumps, {0: dump(waits), 1: dump([entry(1)]), 2: dump(waits)})
    assert cli.main(["import", str(dumps), "-o", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert cli.main(["analyze", str(tmp_path / "run")]) == 0
    assert "run.hang  rank 1 has not reached all_reduce 2 of group 0" in " ".join(capsys.readouterr().out.split("\n"))


# --- what is wrong with a file -------------------------------------------------------------------


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch executed",)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (pickle.dumps({"pg_config": {}, "entries": [Bomb()]}, protocol=2), "imports a name"),
        (b'{"pg_config": {}, "entries": 3}', "entries has no list"),
        (b'{"pg_config": 3, "entries": []}', "pg_config has no dictionary"),
        (b'{"pg_config": {"0": {"ranks": "__import__(1)"}}, "entries": []}', "no list of ranks"),
        (b'{"pg_config": {"0": {"ranks": [-1]}}, "entries": []}', "no list of ranks"),
        (b'{"pg_config": {}, "entries": [{}]}', "entry 0 has no process_group"),
        (b'{"pg_config": {}, "entries": [' + b"[" * 100_000, "damaged or cut short"),
        (b'{"pg_config": {}, "entries": [', "damaged or cut short"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(content: bytes, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rank_0").write_bytes(content)
    with pytest.raises(RunError) as error:
        import_trace(tmp_path / "rank_0")
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "content",
    [
        b'{"pg_config": {}, "entries": [' + b"{}," * 500_000 + b"{}]}",
        b'{"pg_config": {}, "entries": [' + b"[]," * 500_000 + b"{}]}",
        b"\x80\x02}(X\x09\0\0\0pg_config}X\x07\0\0\0entries](" + b"}" * 300_000 + b"eu.",
    ],
    ids=["dictionaries", "lists", "pickle"],
)
def test_what_would_fill_the_memory_is_refused(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the bound the first, of 1.5 MB, took 40."""
    monkeypatch.setattr(room, "FREE", 0)
    path = tmp_path / "rank_0"
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(RunError) as error:
        import_trace(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "MiB of memory, which a Flight Recorder dump never does; dump it again" in str(error.value)
    assert peak < 11_000_000, peak


def test_what_a_pickle_names_again_and_again_is_refused(tmp_path: Path) -> None:
    """One message 300,000 times, and 1,000 groups of the same 100,000 ranks: half a MB each, and were 400 and 800."""
    message = entry(1, "nccl:recv 0<-1", "started", is_p2p=True)
    path = tmp_path / "rank_0"
    path.write_bytes(pickle.dumps(dump([message] * 300_000, 2), protocol=2))
    with pytest.raises(RunError, match="entries has 300,000 communications in 60"):
        import_trace(path)
    members = list(range(100_000))
    config = {str(number): {"ranks": members} for number in range(1000)}
    path.write_bytes(pickle.dumps({"pg_config": config, "entries": []}, protocol=2))
    with pytest.raises(RunError, match="more members in its process groups than the file has room for"):
        import_trace(path)


@formats
def test_communications_of_many_tensors_have_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    """All-to-alls, without stacks."""
    monkeypatch.setattr(room, "FREE", 0)
    tensors: dict[str, Any] = {"frames": []}
    for side in ("input", "output"):
        tensors |= {f"{side}_sizes": [[16]] * 100, f"{side}_dtypes": ["Float"] * 100}
    many = dump([entry(number + 1, **tensors) for number in range(200)], 1)
    assert len(import_trace(write(tmp_path, {0: many}, as_json=as_json)).rows) == 200


@formats
@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 60))])
def test_damage_is_one_line_and_costs_one_rank(seed: int, as_json: bool, tmp_path: Path) -> None:
    chance = random.Random(seed)
    waits = [entry(1), entry(2, state="started")]
    write(tmp_path, {0: dump(waits), 1: dump([entry(1)]), 2: dump(waits)}, as_json=as_json)
    path = tmp_path / ("trace_2.json" if as_json else "nccl_trace_rank_2")
    content = bytearray(path.read_bytes())
    for _ in range(chance.randint(1, 8)):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content[: chance.randrange(1, len(content))] if seed % 2 else content)
    analyze(import_trace(tmp_path))  # those that are whole count
    said = ""
    try:
        import_trace(path)
    except RunError as error:
        said = str(error)
    assert "\n" not in said
    assert len(said) < 600
