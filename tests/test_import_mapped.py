"""Chrome traces of other tools, by a mapping file: MegaScan's, Megatron's timers, and one of nobody's."""

from __future__ import annotations

import gzip
import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from dsprof import cli
from dsprof.analyzer import analyze
from dsprof.importers import import_trace, mapped
from dsprof.importers.mapping import load_mapping, packaged
from dsprof.importers.search_limit import SearchLimit
from dsprof.run import RunError

MINE = """
rank = 'process:worker (\\d+)'
[[events]]
name = "^it$"
kind = "step"
[[events]]
name = '^reduce (?P<group>\\w+)$'
category = "net"
kind = "comm"
as = "all_reduce"
bytes = "args.how.many"
seq = "args.turn"
[[events]]
name = "^f$"
kind = "phase"
as = "forward"
[[events]]
name = "noise"
kind = "ignore"
"""

Event = dict[str, Any]


def span(name: str, start: float, length: float, pid: Any = 0, tid: Any = 0, cat: str = "", **args: Any) -> Event:
    return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": length, "pid": pid, "tid": tid, "args": args}


def write(path: Path, events: list[Event], **about: Any) -> Path:
    path.write_text(json.dumps({"traceEvents": events, **about}))
    return path


def mapping(folder: Path, text: str = MINE) -> str:
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


def shown(path: Path, rank: int, *columns: str, mapping: str = "", kinds: str = "") -> list[list[Any]]:
    rows = import_trace(path, mapping=mapping).read(rank)
    rows = rows.loc[rows["kind"].isin(kinds.split()) if kinds else rows["kind"].notna(), list(columns)].astype(object)
    return rows.where(rows.notna(), None).to_numpy().tolist()


# --- a mapping file -------------------------------------------------------------------------------


def two_workers() -> list[Event]:
    """As one file of both ranks: begins and ends, moments, events of no rule, and names of processes."""
    events: list[Event] = []
    for pid, rank in ((901, 0), (902, 1)):
        events += [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"worker {rank}"}},
            span("it", 0, 100, pid, 5),
            {"ph": "B", "name": "f", "ts": 10, "pid": pid, "tid": 5},
            {"ph": "E", "name": "f", "ts": 40 + 20 * rank, "pid": pid, "tid": 5},
            {"ph": "b", "name": "reduce world", "cat": "net", "id": 7 + pid, "ts": 40 + 20 * rank, "pid": pid, "tid": 5,
             "args": {"turn": 3}},
            {"ph": "e", "name": "reduce world", "cat": "net", "id": 7 + pid, "ts": 70, "pid": pid, "tid": 5,
             "args": {"how": {"many": 4096}}},
            span("it", 100, 50, pid, 5), span("noise", 101, 1, pid, 5), span("io", 105, 5, pid, 6),
            {"ph": "i", "name": "saved", "ts": 110, "pid": pid, "tid": 5},
        ]  # fmt: skip
    return events


def test_events_are_what_a_mapping_file_says(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", two_workers())
    columns = ("kind", "name", "lane", "step", "start_ns", "dur_ns", "group", "seq", "bytes")
    assert shown(path, 1, *columns, mapping=mapping(tmp_path)) == [
        ["step", "step", "main", 0, 0, 100_000, None, None, None],
        ["phase", "forward", "main", 0, 10_000, 50_000, None, None, None],
        ["comm", "all_reduce", "comm.world", 0, 60_000, 10_000, "world", 3, 4096],
        ["wait", "all_reduce", "main", 0, 60_000, 10_000, "world", 3, 4096],
        ["step", "step", "main", 1, 100_000, 50_000, None, None, None],
        ["mark", "io", "thread.6", 1, 105_000, 5_000, None, None, None],
        ["mark", "saved", "main", 1, 110_000, 0, None, None, None],
    ]
    run = import_trace(path, mapping=mapping(tmp_path)).run
    assert run.groups["world"] == {"ranks": [0, 1], "size": 2, "desc": "", "backend": ""}
    (warning,) = run.facts[0]["warnings"]
    assert warning.startswith("4 of 14 events fit no rule of")
    assert "(io, saved)" in warning


def test_a_unit_is_what_the_mapping_says_and_large_numbers_stay_exact(tmp_path: Path) -> None:
    text = 'unit = "ns"\nrank = "args.r"\n[[events]]\nname = "f"\nkind = "phase"\n'
    start = 1_790_000_000_123_456_789
    path = write(tmp_path / "t.json", [span("f", start, 7, r=3)])
    assert shown(path, 3, "start_ns", "dur_ns", mapping=mapping(tmp_path, text), kinds="phase") == [[start, 7]]


def test_ranks_by_the_names_of_files(tmp_path: Path) -> None:
    for rank in (0, 1):
        content = json.dumps({"traceEvents": [span("f", 5, 10, 1234, step=4)]}).encode()
        (tmp_path / f"prof_rank{rank}.json.gz").write_bytes(gzip.compress(content))
    text = 'step = "args.step"\n[[events]]\nname = "f"\nkind = "phase"\n'
    trace = import_trace(tmp_path, mapping=mapping(tmp_path, text))
    assert trace.ranks == (0, 1)
    assert trace.read(1)[["kind", "step"]].to_numpy().tolist() == [["step", 4], ["phase", 4]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("events = 3", "it has no [[events]], which say what events are"),
        ("rule = 1\n" + MINE, "`rule` is none of clock, events, rank, stage, step, steps_together, telling, unit"),
        (MINE.replace('kind = "step"', 'kind = "stride"'), "rule 1 of events: kind 'stride' is none of step, phase"),
        (MINE.replace('name = "^it$"', 'name = "("'), "rule 1 of events: name: '(' is no regular expression"),
        (MINE.replace('name = "^it$"\n', ""), "rule 1 of events: it has neither a name nor a category"),
        (MINE.replace("P<group>", "P<grp>"), "rule 2 of events: (?P<grp>...) is no column that it can fill"),
        (MINE.replace("args.how.many", "how"), "rule 2 of events: bytes: 'how' is no place: args.KEY, pid, tid"),
        (MINE.replace("(\\d+)'", "'"), "'process:worker ' has no group, such as rank (\\d+), that is the number"),
        ("[[events", "no TOML"),
    ],
)  # fmt: skip
def test_a_mapping_file_that_is_wrong_is_told_where(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(RunError) as error:
        load_mapping(mapping(tmp_path, text))
    assert said in str(error.value)
    assert str(error.value).startswith(f"{tmp_path}/mine.toml: ")


def test_what_cannot_be_read_by_a_mapping_is_a_sentence(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", [span("f", 5, 10, pid=41_235)])
    text = 'rank = "pid"\n[[events]]\nname = "f"\nkind = "phase"\n'
    with pytest.raises(RunError, match=r"`pid` tells rank 41235, of 1 ranks; say with `rank`"):
        import_trace(path, mapping=mapping(tmp_path, text))
    with pytest.raises(RunError, match=r"none of its events tells its rank \(`process:worker .*or rename the file"):
        import_trace(path, mapping=mapping(tmp_path))
    with pytest.raises(RunError, match=r"--mapping nobodys: no such file, and dsprof has megascan and megatron"):
        import_trace(path, mapping="nobodys")


def test_one_damaged_file_costs_itself(tmp_path: Path) -> None:
    write(tmp_path / "rank0.json", [span("f", 5, 10), span("f", "5", 10), span("f", 20, float("nan")), span("f", 9, 1)])
    (tmp_path / "rank1.json").write_text('{"traceEvents": [{"ph": "X"}}')
    (tmp_path / "rank2.json").write_text(json.dumps({"traceEvents": [span("f", 5, 10)] * 3})[:-60])
    trace = import_trace(tmp_path, mapping=mapping(tmp_path, '[[events]]\nname = "f"\nkind = "phase"\n'))
    assert trace.ranks == (0, 2)
    warnings = [text for fact in trace.run.facts for text in fact.get("warnings", [])]
    assert any(text.startswith("2 events without a name or a possible time are left out such as") for text in warnings)
    assert any(text.startswith("rank1.json was left out: brackets that do not match") for text in warnings)
    assert any(text.startswith("breaks off after") for text in warnings)


# --- those that come with dsprof ------------------------------------------------------------------


def megascan(slow: int, steps: int = 12) -> list[Event]:
    """Of two replicas of two stages, each a rank, as aggregate.py writes it: four micro-batches a step, and then the
    gradients. Rank `slow` takes 1.6 times as long to compute."""
    events: list[Event] = []
    now = dict.fromkeys(range(4), 0)

    def add(rank: int, name: str, start: int, end: int, step: int, group: list[int] | None = None) -> int:
        args = {"iteration": step, "dp_rk": rank // 2, "pp_rk": rank % 2, "tp_rk": 0, "g_rk": rank}
        events.append(span(name, start, end - start, rank, **args, **({"group": group} if group else {})))
        return end

    def work(rank: int, ms: int, step: int) -> int:
        return int(1000 * ms * (1.6 if rank == slow else 1) * (1 + 0.01 * ((7 * rank + 3 * step) % 5)))

    for step in range(steps):
        now = dict.fromkeys(now, max(now.values()))
        for first, second in ((0, 1), (2, 3)):
            a, b, sent = now[first], now[second], []
            for _ in range(4):
                a = add(first, "forward", a, a + work(first, 10, step), step)
                a = add(first, "send-forward", a, a + 200, step, [second])
                b = add(second, "recv-forward", b, max(a, b + 200), step, [first])
                b = add(second, "forward", b, b + work(second, 10, step), step)
                b = add(second, "backward", b, b + work(second, 20, step), step)
                b = add(second, "send-backward", b, b + 200, step, [first])
                sent.append(b)
            for done in sent:
                a = add(first, "recv-backward", a, max(a + 10, done), step, [second])
                a = add(first, "backward", a, a + work(first, 20, step), step)
            now[first], now[second] = a, b
        for pair in ((0, 2), (1, 3)):
            end = max(now[rank] for rank in pair) + 5000
            for rank in pair:
                add(rank, "allreduce", now[rank], end, step, [one for one in pair if one != rank])
                now[rank] = add(rank, "optimizer", end, end + 3000, step)
    return events


def test_megascan_is_known_by_itself_and_its_slow_rank_is_found(tmp_path: Path) -> None:
    (tmp_path / "benchmark.json").write_text(json.dumps(megascan(slow=2)))
    trace = import_trace(tmp_path)
    assert trace.run.groups["ranks 0,2"]["ranks"] == [0, 2]
    pipe = trace.read(3).query("kind == 'pipe' and step == 1")[["name", "stage", "microbatch"]]
    assert pipe.to_numpy().tolist() == [[name, 1, number] for number in range(4) for name in "FB"]
    first = analyze(trace).findings[0]
    assert (first.code, first.where.ranks) == ("rank.straggler", (2,))
    healthy = tmp_path / "healthy"
    healthy.mkdir()
    (healthy / "benchmark.json").write_text(json.dumps(megascan(slow=-1)))
    assert not [one for one in analyze(import_trace(healthy)).findings if one.code == "rank.straggler"]


def test_megatrons_timers_are_phases_and_communications(tmp_path: Path) -> None:
    events = [span("interval-time", 0, 1000), span("forward-backward", 5, 700), span("batch-generator", 6, 50),
              span("forward-compute", 60, 200), span("forward-send-backward-recv", 260, 40),
              span("backward-compute", 300, 400), span("layernorm-grads-all-reduce", 705, 20),
              span("all-grads-sync", 725, 75), span("optimizer", 800, 150), span("optimizer-inner-step", 810, 100),
              span("params-all-gather", 950, 40)]  # fmt: skip
    for rank in (0, 1):
        write(tmp_path / f"timers_rank{rank}.json", events)
    assert shown(tmp_path, 1, "kind", "name", "group", "purpose", kinds="step phase comm") == [
        ["step", "step", None, None],
        ["phase", "data", None, None],
        ["phase", "forward", None, None],
        ["comm", "send_recv", None, "pipeline"],
        ["phase", "backward", None, None],
        ["comm", "all_reduce", "layernorm-grads", "gradient"],
        ["comm", "all_reduce", "all_reduce (group not told)", "gradient"],
        ["phase", "optimizer", None, None],
        ["comm", "all_gather", "all_gather (group not told)", "parameter"],
    ]


def test_every_mapping_in_the_package_can_be_loaded() -> None:
    assert packaged() == ("megascan", "megatron")
    assert [load_mapping(name).name for name in packaged()] == ["megascan", "megatron"]


def test_the_command_reads_by_a_mapping(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "t.json", two_workers())
    run = tmp_path / "run"
    command = ["import", str(tmp_path / "t.json"), "--mapping", mapping(tmp_path), "-o", str(run), "--no-report"]
    assert cli.main(command) == 0
    assert "imported 2 ranks, 2 steps" in capsys.readouterr().err
    assert cli.main(["import", str(tmp_path / "t.json"), "--mapping", "no.toml"]) == 3
    assert "--mapping no.toml: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "where"),
    [("[[events]]\nname = '^x'\nkind = 'mark'\n[[events]]\nname = '(a+)+$'\nkind = 'mark'", "rule 2 of events"),
     (r"step = 'process:(a|a)*(\d)$'" "\n[[events]]\nname = 'a'\nkind = 'mark'", r"process:(a|a)*(\d)$")],
)  # fmt: skip
def test_a_pattern_that_takes_for_ever_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, where: str
) -> None:
    monkeypatch.setattr(mapped, "SearchLimit", lambda: SearchLimit(0.2))
    before = signal.getsignal(signal.SIGVTALRM)
    name = "a" * 60 + "!"
    events = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": name}},
              {"ph": "X", "name": name, "ts": 1, "dur": 2, "pid": 0, "tid": 0}]  # fmt: skip
    (tmp_path / "rank0.json").write_text(json.dumps(events))
    (tmp_path / "m.toml").write_text(line)
    with pytest.raises(RunError, match=rf"m.toml: {re.escape(where)}: its pattern takes too long on 'aaaa.*\(a\+, not"):
        import_trace(tmp_path / "rank0.json", mapping=str(tmp_path / "m.toml"))
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)
