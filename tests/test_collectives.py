"""What two gloo ranks communicate becomes the same rows with the native hooks and with the Python ones."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import forked_python
import pytest
import torch
from captures import RECORDERS, Row, build_helper, has_compiler, read_rows
from collective_job import SECTIONS

from dsprof.collectors.communication.completion_thread import CompletionThread
from dsprof.ondisk import NO_SEQ, Flag, State
from dsprof.schema import BACKWARD_DONE, Kind

TESTS = Path(__file__).parent
MS = 1_000_000

Key = tuple[str, str, int, int, int]
"""Name, group, number, peer and tag: what a wait says of a collective."""


class Job(NamedTuple):
    """One run of collective_job.py."""

    kind: str
    ranks: list[list[Row]]
    counters: list[dict[str, int]]
    kept: list[list[str]]

    def rows(self, rank: int, section: str, kind: Kind = Kind.COMM) -> list[Row]:
        """The rows of one section, in the order of issue."""
        rows = self.ranks[rank]
        marks = [i for i, row in enumerate(rows) if row.name.startswith("section ")] + [len(rows)]
        begin = next(i for i in marks[:-1] if rows[i].name == f"section {section}")
        end = marks[marks.index(begin) + 1]
        return [row for row in rows[begin + 1 : end] if row.kind is kind]


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    return {**os.environ, "PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def run_job(kind: str, folder: Path) -> Job:
    command = [sys.executable, str(TESTS / "collective_job.py"), kind]
    processes = [forked_python.start([*command, str(rank), str(folder)], env=environment()) for rank in range(2)]
    codes = [process.wait(timeout=240) for process in processes]
    assert codes == [0, 0]
    return Job(
        kind,
        [read_rows(folder / f"rank{rank}") for rank in range(2)],
        [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)],
        [json.loads((folder / f"rank{rank}-kept.json").read_text()) for rank in range(2)],
    )


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """The job, once with each kind of recorder that can be had here."""
    if has_compiler():
        build_helper()
    kinds = RECORDERS if has_compiler() else ("python",)
    return {kind: run_job(kind, tmp_path_factory.mktemp(kind)) for kind in kinds}


def run_alone(script: str, kind: str, folder: Path) -> None:
    """Run a script in one process, with a recorder of that kind, which writes into the folder."""
    if kind == "native":
        build_helper()
    command = [sys.executable, "-c", script, kind, str(folder)]
    done = forked_python.run(command, env=environment(), capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(params=RECORDERS)
def job(request: pytest.FixtureRequest, jobs: dict[str, Job]) -> Job:
    if request.param not in jobs:
        pytest.skip("no C++ compiler")
    return jobs[request.param]


usually_native = pytest.mark.parametrize("kind", ["native", pytest.param("python", marks=pytest.mark.slow)])
"""Of what takes processes of its own: that both write the same is tested by one job."""


def described(rows: list[Row]) -> list[tuple[str, int, str]]:
    return [(row.name, row.bytes, row.dtype) for row in rows]


EVERY = [
    ("all_reduce", 400, "float32"),
    ("broadcast", 400, "float32"),
    ("reduce", 400, "float32"),
    ("all_gather", 800, "float32"),
    ("all_gather", 800, "float32"),
    ("reduce_scatter", 400, "float32"),
    ("reduce_scatter", 400, "float32"),
    ("all_to_all", 400, "float32"),
    ("gather", 800, "float32"),
    ("scatter", 800, "float32"),
    ("all_reduce", 64, "int64"),
    ("barrier", 0, ""),
]
ELSEWHERE = [(name, 400 if name in ("gather", "scatter") else size, dtype) for name, size, dtype in EVERY]
"""On rank 1, which is not the root and so passes no list of parts."""


def test_both_recorders_write_the_same_rows(jobs: dict[str, Job]) -> None:
    if len(jobs) < 2:
        pytest.skip("no C++ compiler")
    for rank in range(2):
        native, python = jobs["native"], jobs["python"]
        for section in SECTIONS:
            for kind in (Kind.COMM, Kind.WAIT, Kind.PHASE, Kind.MARK):
                if section == "threads":  # in any order
                    continue
                if section == "many_messages" and kind is Kind.WAIT:  # the native helper forgets what some are for
                    continue
                assert [row.identity for row in native.rows(rank, section, kind)] == [
                    row.identity for row in python.rows(rank, section, kind)
                ]


def test_nothing_is_dropped_and_no_hook_fails(job: Job) -> None:
    for counters, rows in zip(job.counters, job.ranks, strict=True):
        assert counters == {"records": len(rows), "dropped": 0, "errors": 0}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("section", "flags"), [("sync", Flag(0)), ("async", Flag.ASYNC)])
def test_every_collective(job: Job, rank: int, section: str, flags: Flag) -> None:
    rows = job.rows(rank, section)
    assert described(rows) == (EVERY if rank == 0 else ELSEWHERE)
    assert {row.flags & ~Flag.START_MEASURED for row in rows} == {flags}
    assert {(row.group, row.tag) for row in rows} == {("0", -1)}
    assert [row.root for row in rows] == [0 if row.name in ROOTED else -1 for row in rows]


ROOTED = ("broadcast", "reduce", "gather", "scatter")


def test_roots_are_ranks_in_the_group(job: Job) -> None:
    rows = job.rows(1, "roots")
    assert [(row.name, row.root) for row in rows] == [*((name, 1) for name in ROOTED), ("broadcast", 0)]
    assert [row.root for row in job.rows(0, "roots")] == [1] * 4


def test_numbering_is_the_same_on_both_ranks(job: Job) -> None:
    def numbers(rank: int) -> dict[tuple[str, int], str]:
        comm = [row for row in job.ranks[rank] if row.kind is Kind.COMM and not row.p2p]
        found = {(row.group, row.seq): row.name for row in comm}
        assert len(found) == len(comm)
        return found

    shared = numbers(0).keys() & numbers(1).keys()
    assert {key: numbers(0)[key] for key in shared} == {key: numbers(1)[key] for key in shared}
    assert [row.seq for row in job.rows(0, "sync")] == list(range(len(EVERY)))


def test_times_are_in_order(job: Job) -> None:
    for rows in job.ranks:
        for row in rows:
            if row.kind is Kind.COMM and row.end_ns:
                assert row.issue_ns <= row.start_ns <= row.end_ns
                assert row.state is State.DONE


def key(row: Row) -> Key:
    """Of a comm or a wait; a collective's root is none of it."""
    return row.name, row.group, row.seq, row.peer, row.tag


UNTOLD = ("failing", "lost_peer", "functional_messages", "many_messages")
"""Sections with waits that do not name what they wait for, which was forgotten."""


@pytest.mark.parametrize("section", [name for name in SECTIONS if name not in UNTOLD])
def test_waits_name_what_they_wait_for(job: Job, section: str) -> None:
    """It was issued before the wait was over, and is over with it."""
    for rank in range(2):
        comm = {key(row): row for row in job.rows(rank, section)}
        assert len(comm) == len(job.rows(rank, section))
        for wait in job.rows(rank, section, Kind.WAIT):
            if wait.seq == NO_SEQ:
                assert (section, wait.name, wait.group) == ("functional_waits", "wait_tensor", "")
                continue
            waited_for = comm[key(wait)]
            assert waited_for.issue_ns <= wait.end_ns
            if waited_for.flags & Flag.ENGINE:
                continue  # the engine tells its end
            assert waited_for.end_ns > 0
            # Who waits for a future itself may be woken before others that it calls back, such as we.
            assert waited_for.end_ns <= wait.end_ns or section == "ddp_join"


@pytest.mark.parametrize("section", ["sync", "p2p", "subgroups", "monitored", "late_peer", "roots"])
def test_each_call_that_blocks_has_one_wait(job: Job, section: str) -> None:
    for rank in range(2):
        rows = job.rows(rank, section)
        assert rows
        assert [key(row) for row in job.rows(rank, section, Kind.WAIT)] == [key(row) for row in rows]


def test_waits_of_every_sort(job: Job) -> None:
    """Late, again, of a batch, of coalesced calls, of a future that follows from a work's, and of objects."""
    comm = [key(row) for row in job.rows(0, "waits")]
    assert [name for name, *_ in comm] == [
        "all_reduce", "broadcast", "recv", "send", "all_reduce", "all_reduce", "all_gather", "all_gather", "broadcast",
        "broadcast",
    ]  # fmt: skip
    first, second, *others = comm
    assert [key(row) for row in job.rows(0, "waits", Kind.WAIT)] == [second, first, second, *others]


def test_no_tensor_is_kept_that_the_job_lets_go_of(job: Job) -> None:
    assert job.kept == [[], []]


def test_functional_waits_find_their_tensors(job: Job) -> None:
    one, several, two = (key(row) for row in job.rows(0, "functional_waits"))
    unknown = ("wait_tensor", "", NO_SEQ, -1, -1)
    waits = [key(row) for row in job.rows(0, "functional_waits", Kind.WAIT)]
    assert waits == [two, several, several, one, unknown]


def test_a_call_that_waits_in_cpp_is_one_wait(job: Job) -> None:
    """For the last that it issued, from the first: shapes compared, parameters and buffers sent, buckets agreed on."""
    rows, waits = job.rows(0, "ddp_buffers"), job.rows(0, "ddp_buffers", Kind.WAIT)
    issued = [[row.name for row in rows if wait.start_ns <= row.issue_ns <= wait.end_ns] for wait in waits]
    assert issued == [["all_gather", "broadcast"], *[["broadcast"] * 2] * 4]
    for wait in waits:
        inside = [row for row in rows if wait.start_ns <= row.issue_ns <= wait.end_ns]
        assert wait.start_ns == inside[0].issue_ns
        assert key(wait) == key(inside[-1])
        assert max(row.end_ns for row in inside) <= wait.end_ns


def test_a_rank_without_input_waits_for_the_others_gradients(job: Job) -> None:
    gradients = [key(row) for row in job.rows(0, "ddp_join") if row.bytes == 44 and row.name == "all_reduce"]
    waits = [key(row) for row in job.rows(0, "ddp_join", Kind.WAIT)]
    assert len(gradients) == 3
    assert [gradient in waits for gradient in gradients] == [False, True, True]


def test_what_the_engine_told_is_what_its_wait_is_for(job: Job) -> None:
    told, other = job.rows(0, "told")
    assert told.flags & Flag.ENGINE
    assert [key(row) for row in job.rows(0, "told", Kind.WAIT)] == [key(told), key(other)]


@pytest.mark.parametrize(
    ("section", "marks"),
    [
        ("ddp", 2),
        ("ddp_buffers", 2),
        ("ddp_static", 2),
        ("ddp_several", 1),
        ("retained", 2),
        ("ddp_reentrant", 2),
        ("reentrant", 2),
        ("no_gradients", 0),
    ],
)
def test_backwards_with_collectives_are_marked(job: Job, section: str, marks: int) -> None:
    """Once each. One inside another stands for itself, and for the outer one if that issues no more."""
    for rank in range(2):
        assert [row.name for row in job.rows(rank, section, Kind.MARK)] == [BACKWARD_DONE] * marks


@pytest.mark.parametrize("section", ["ddp_late_peer", "ddp_reentrant"])
def test_backward_is_done_where_the_reducer_begins_to_wait(job: Job, section: str) -> None:
    """Rank 1 issues its last all-reduce 500 ms late."""
    for rank in range(2):
        issued = job.rows(rank, section)[-1]
        mark = job.rows(rank, section, Kind.MARK)[-1]
        assert issued.issue_ns < mark.start_ns
        assert mark.start_ns - issued.issue_ns < 250 * MS
        assert (issued.end_ns - mark.start_ns > 250 * MS) is (rank == 0)


def test_starts_on_gloo_are_measured_natively(jobs: dict[str, Job]) -> None:
    if "native" not in jobs:
        pytest.skip("no C++ compiler")
    for section in ("sync", "async", "overlapping", "coalesced", "ddp", "subgroups", "functional"):
        for row in jobs["native"].rows(0, section):
            assert row.flags & Flag.START_MEASURED, (section, row)
    python = [row for row in jobs["python"].ranks[0] if row.kind is Kind.COMM]
    assert not any(row.flags & Flag.START_MEASURED for row in python)


def test_waits_are_named_after_what_they_wait_for(job: Job) -> None:
    names = [row.name for row in job.rows(0, "sync", Kind.WAIT)]
    assert names == [name for name, _, _ in EVERY]
    assert all(row.end_ns >= row.start_ns for row in job.rows(0, "sync", Kind.WAIT))


def test_overlapping_collectives_each_get_an_end(job: Job) -> None:
    rows = job.rows(0, "overlapping")
    assert [row.bytes for row in rows] == [40, 80, 120, 160, 200, 240]
    assert all(row.end_ns for row in rows)


def test_a_collective_that_is_queued_begins_when_a_worker_is_free(jobs: dict[str, Job]) -> None:
    """gloo has two workers a group. Rank 1 issues none before rank 0 has issued all four."""
    if "native" not in jobs:
        pytest.skip("no C++ compiler")
    first, second, third, fourth = jobs["native"].rows(0, "queued")
    free = min(first.end_ns, second.end_ns)
    assert max(first.start_ns, second.start_ns) < fourth.issue_ns < free
    for queued in (third, fourth):
        assert queued.flags & Flag.START_MEASURED
        assert free <= queued.start_ns <= queued.end_ns


@pytest.mark.parametrize("section", ["functional_messages", "many_messages", "profiled_messages"])
def test_messages_end_with_their_waits(jobs: dict[str, Job], section: str) -> None:
    """Whoever waits for them, and whether or not it is known what the wait is for, or that somebody else listens."""
    if "native" not in jobs:
        pytest.skip("no C++ compiler")
    for rank in range(2):
        assert all(row.state is State.DONE and row.end_ns for row in jobs["native"].rows(rank, section))


def test_a_message_that_nobody_waits_for_ends_with_its_work(jobs: dict[str, Job]) -> None:
    if "native" not in jobs:
        pytest.skip("no C++ compiler")
    send, barrier = jobs["native"].rows(0, "dropped_messages")
    assert send.state is State.DONE
    assert send.end_ns >= barrier.end_ns > 0


@pytest.mark.parametrize("section", ["queued_behind_unrecorded", "queued_behind_unrecorded_scatter"])
def test_a_collective_begins_after_what_is_not_recorded(jobs: dict[str, Job], section: str) -> None:
    """The engine's own calls are passed over, and have both workers until rank 1 issues them, too."""
    if "native" not in jobs:
        pytest.skip("no C++ compiler")
    (behind,), (issued,) = jobs["native"].rows(0, section), jobs["native"].rows(0, section, Kind.MARK)
    assert behind.issue_ns < issued.start_ns < behind.start_ns
    assert behind.flags & Flag.START_MEASURED


def test_coalesced_collectives_are_one(job: Job) -> None:
    assert described(job.rows(0, "coalesced")) == [
        ("all_reduce", 120, "float32"),
        ("all_gather", 160, "float32"),
        ("reduce_scatter", 80, "float32"),
    ]
    assert all(row.end_ns for row in job.rows(0, "coalesced"))


def test_monitored_barrier_ends_with_its_call(job: Job) -> None:
    (row,) = job.rows(0, "monitored")
    assert (row.name, row.bytes, row.state) == ("barrier", 0, State.DONE)
    assert row.end_ns - row.start_ns >= row.host_ns > 0


def test_p2p_counts_within_peer_tag_and_direction(job: Job) -> None:
    sends, receives = job.rows(0, "p2p"), job.rows(1, "p2p")
    assert [(row.name, row.peer, row.tag, row.seq) for row in sends] == [
        ("send", 1, 0, 0),
        ("send", 1, 7, 0),
        ("send", 1, 7, 1),
        ("send", 1, 0, 1),
        ("recv", 1, 0, 0),
        ("send", 1, 9, 0),
    ]
    assert [(row.name, row.peer, row.tag, row.seq) for row in receives] == [
        ("recv", 0, 0, 0),
        ("recv", 0, 7, 0),
        ("recv", 0, 7, 1),
        ("send", 0, 0, 0),
        ("recv", 0, 0, 1),
        ("recv", -1, 9, 0),  # from any source
    ]
    for row in sends + receives:
        assert (row.p2p, row.flags) == (True, Flag(0))
        assert row.bytes == 100
        assert row.end_ns > 0


def test_ddp_reducer_is_seen(job: Job) -> None:
    gradients = [row for row in job.rows(0, "ddp") if row.name == "all_reduce"]
    assert [(row.bytes, row.flags & Flag.ASYNC) for row in gradients] == [(484, Flag.ASYNC)] * 2
    assert all(row.end_ns for row in gradients)


def test_forward_is_the_outermost_call(job: Job) -> None:
    forwards = job.rows(0, "ddp", Kind.PHASE)
    assert [(row.name, row.value, row.bytes) for row in forwards] == [("forward", 40.0, 160)] * 2


def test_groups_are_told_apart(job: Job) -> None:
    numbers = [(row.group, row.seq) for row in job.rows(0, "subgroups")]
    first, second, again, alone, remade = numbers
    assert (first[1], second[1], again, alone[1], remade[1]) == (0, 0, (first[0], 1), 0, 0)
    assert len({first[0], second[0], alone[0], remade[0], "0"}) == 5


def test_groups_of_a_second_world_are_others(job: Job) -> None:
    before, after = job.rows(0, "renewed")
    assert before.group == "0"
    assert (after.group, after.seq) == ("0#2", 0)


def test_functional_collectives_are_waited_for_by_an_operator(job: Job) -> None:
    assert described(job.rows(0, "functional")) == [("all_reduce", 12, "float32")]
    (wait,) = job.rows(0, "functional", Kind.WAIT)
    assert wait.name == "all_reduce"
    assert wait.end_ns > wait.start_ns


def test_threads_keep_their_groups_numbering(job: Job) -> None:
    by_group: dict[str, list[int]] = {}
    for row in job.rows(0, "threads"):
        by_group.setdefault(row.group, []).append(row.seq)
        assert row.end_ns
    assert list(by_group.values()) == [list(range(20))] * 3


def test_what_fails_has_no_end(job: Job) -> None:
    in_call, in_wait = job.rows(0, "failing")
    assert (in_call.name, in_call.state, in_call.end_ns) == ("broadcast", State.BEGUN, 0)
    assert (in_wait.name, in_wait.state, in_wait.end_ns) == ("all_reduce", State.BEGUN, 0)


def test_lost_peer_leaves_what_failed_open(job: Job) -> None:
    rows = {row.name: row for row in job.rows(0, "lost_peer")}
    for failed in ("all_reduce", "recv"):
        assert (rows[failed].state, rows[failed].end_ns) == (State.BEGUN, 0)
    assert rows["barrier"].end_ns > 0


def test_late_peer_is_waited_for(job: Job) -> None:
    """Rank 1 sleeps 200 ms before each: rank 0's collectives last that long, its own do not."""
    for name in ("all_reduce", "reduce_scatter"):
        (early,) = [row for row in job.rows(0, "late_peer") if row.name == name]
        (late,) = [row for row in job.rows(1, "late_peer") if row.name == name]
        assert early.end_ns - early.start_ns > 100 * MS
        assert late.end_ns - late.start_ns < early.end_ns - early.start_ns
        assert late.issue_ns - early.issue_ns > 100 * MS


class LateWork:
    """It ends, well or not, just as the first wait for it gives up."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.completed = False

    def is_completed(self) -> bool:
        return self.completed

    def wait(self, patience: object) -> None:
        gave_up, self.completed = not self.completed, True
        if gave_up or self.fails:
            raise RuntimeError("Operation timed out!" if gave_up else "planted")


@pytest.mark.parametrize("fails", [False, True])
def test_work_that_ends_as_the_threads_patience_does(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed.Work, "wait", LateWork.wait)
    ended: queue.SimpleQueue[tuple[str, object]] = queue.SimpleQueue()
    watcher = CompletionThread(lambda work: ended.put(("over", work)), lambda work: ended.put(("failed", work)))
    work = LateWork(fails)
    watcher.add(work)
    assert ended.get(timeout=60) == ("failed" if fails else "over", work)
    watcher.stop()


# One rank; hooks installed and removed over and over, a fork in between, compiled code with a collective in it.
TOGGLED = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from captures import open_recorder
from dsprof.collectors.communication import collectives
from dsprof.collectors.loop import modules
kind, folder = sys.argv[1], Path(sys.argv[2])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
HOOKED = [(torch.nn.Module, "__call__"), (dist, "destroy_process_group"), (dist, "_broadcast_coalesced"),
          (dist.Work, "wait"), (dist.Work, "get_future"), (torch._C.Future, "wait"), (torch._C.Future, "then"),
          (dist.ProcessGroup, "monitored_barrier"), (dist.ProcessGroup, "_end_coalescing")]
before = [getattr(owner, name) for owner, name in HOOKED]
for number in range(3):
    recorder = open_recorder(kind, folder / str(number))
    undo = [collectives.watch(recorder), modules.watch(recorder)]
    dist.all_reduce(torch.ones(4))
    if number == 1:
        child = os.fork()
        if child == 0:
            recorder.disarm_after_fork()
            torch.nn.Identity()(torch.ones(1))
            recorder.mark(13, 1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    for function in undo:
        function()
    recorder.close()
    dist.all_reduce(torch.ones(4))
    torch.nn.Identity()(torch.ones(1))
assert before == [getattr(owner, name) for owner, name in HOOKED]
dist.all_reduce(torch.ones(4), async_op=True).get_future().then(lambda future: None).wait()
dist.monitored_barrier()

recorder = open_recorder(kind, folder / "compiled")
undo = [collectives.watch(recorder), modules.watch(recorder)]
model = torch.nn.Linear(2, 2)
function = torch.compile(lambda x: functional.all_reduce(model(x), "sum", dist.group.WORLD) + 1,
                         backend="aot_eager", fullgraph=True)
x = torch.ones(3, 2)
with torch.no_grad():
    assert torch.equal(function(x), model(x) + 1)
for undoing in undo:
    undoing()
assert recorder.errors == 0
recorder.close()
"""


@usually_native
def test_hooks_come_and_go(kind: str, tmp_path: Path) -> None:
    run_alone(TOGGLED, kind, tmp_path)
    for number in range(3):
        rows = read_rows(tmp_path / str(number))
        assert [row.name for row in rows if row.kind is Kind.COMM] == ["all_reduce"]
        assert {row.kind for row in rows} == {Kind.COMM, Kind.WAIT}
        assert rows[0].seq == 0
    compiled = read_rows(tmp_path / "compiled")
    assert [row.name for row in compiled if row.kind is Kind.COMM] == ["all_reduce"]
    assert [row.name for row in compiled if row.kind is Kind.WAIT] == ["all_reduce"]


# Captures that open and close while other threads communicate.
TOGGLED_BESIDE = """
import sys, threading, time
from pathlib import Path
import torch
import torch.distributed as dist
from captures import open_recorder
from dsprof.collectors.communication import collectives
kind, folder = sys.argv[1], Path(sys.argv[2])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
over, failed = threading.Event(), []
sys.setswitchinterval(1e-4)  # else each time that a hook comes or goes waits for the lock for 5 ms or more

def communicate(group):
    tensor = torch.ones(4)
    while not over.is_set():
        try:
            dist.all_reduce(tensor, group=group)
        except BaseException as error:
            failed.append(error)
            return

threads = [threading.Thread(target=communicate, args=(dist.new_group([0]),)) for _ in range(3)]
for thread in threads:
    thread.start()
for number in range(5):
    recorder = open_recorder(kind, folder / str(number))
    for _ in range(200):
        undo = collectives.watch(recorder)
        time.sleep(0)
        undo()
    assert recorder.errors == 0, recorder.failures()
    recorder.close()
over.set()
for thread in threads:
    thread.join()
assert not failed, failed
"""


@pytest.mark.parametrize("kind", RECORDERS)
def test_hooks_come_and_go_while_other_threads_communicate(kind: str, tmp_path: Path) -> None:
    """The kernels stay for the threads that are in front of them."""
    run_alone(TOGGLED_BESIDE, kind, tmp_path)
    for number in range(5):
        assert {row.name for row in read_rows(tmp_path / str(number)) if row.kind is Kind.COMM} == {"all_reduce"}


# DDP with buffers, re-entrant checkpointing and a hook of its own, trained with hooks and without.
TRAINED = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from captures import open_recorder
from dsprof.collectors.communication import collectives
from dsprof.collectors.loop import modules
from torch.utils.checkpoint import checkpoint
kind, folder = sys.argv[1], Path(sys.argv[2])
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
    def forward(self, x):
        return self.last(checkpoint(self.norm, self.first(x), use_reentrant=True))

def train():
    torch.manual_seed(3)
    model = torch.nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=1e-4)
    model.register_comm_hook(None, lambda state, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future()
                             .then(lambda future: future.value()[0]))
    optimizer, seen = torch.optim.Adam(model.parameters()), []
    for step in range(6):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(loss).hex())
    return seen + [p.detach().numpy().tobytes() for p in model.parameters()]

plain = train()
recorder = open_recorder(kind, folder / "capture")
undo = [collectives.watch(recorder), modules.watch(recorder)]
hooked = train()
for function in undo:
    function()
assert recorder.errors == 0
recorder.close()
assert plain == hooked == train()
"""


@usually_native
def test_training_is_bit_identical(kind: str, tmp_path: Path) -> None:
    run_alone(TRAINED, kind, tmp_path)
    rows = read_rows(tmp_path / "capture")
    assert sum(row.name == BACKWARD_DONE for row in rows) == 6
    waits = [row for row in rows if row.kind is Kind.WAIT]
    assert {row.name for row in waits} >= {"broadcast"}
    assert NO_SEQ not in {row.seq for row in waits}


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
import torch.distributed as dist
from captures import open_recorder
from dsprof.collectors.communication import collectives
kind, rank, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
recorder = open_recorder(kind, folder / f"rank{rank}")
collectives.watch(recorder)
dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
dist.all_reduce(torch.ones(4))
if rank == 0:
    dist.all_reduce(torch.ones(4), async_op=True)  # rank 1 never comes
os.kill(os.getpid(), signal.SIGKILL)
"""


@usually_native
def test_killed_rank_leaves_what_was_under_way(kind: str, tmp_path: Path) -> None:
    if kind == "native":
        build_helper()
    command = [sys.executable, "-c", KILLED, kind]
    processes = [forked_python.start([*command, str(rank), str(tmp_path)], env=environment()) for rank in range(2)]
    assert [process.wait(timeout=120) for process in processes] == [-9, -9]
    first, second = [row for row in read_rows(tmp_path / "rank0") if row.kind is Kind.COMM]
    assert (first.seq, first.state) == (0, State.DONE)
    assert (second.seq, second.state, second.end_ns) == (1, State.BEGUN, 0)


EXITS = {"raise SystemExit(7)": 7, "pass": 0}
EXITING = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from captures import open_recorder
from dsprof.collectors.communication import collectives
kind, rank, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
recorder = open_recorder(kind, folder / f"rank{rank}")
uninstall = collectives.watch(recorder)
import atexit
atexit.register(uninstall)
dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
dist.barrier()
if rank == 0:
    work = dist.all_reduce(torch.ones(4), async_op=True)  # rank 1 never comes
"""


@usually_native
@pytest.mark.parametrize("ending", EXITS)
def test_exit_status_is_the_jobs_own(kind: str, ending: str, tmp_path: Path) -> None:
    """With a collective under way that its peer abandoned."""
    if kind == "native":
        build_helper()
    command = [sys.executable, "-c", EXITING + ending, kind]
    processes = [
        forked_python.start([*command, str(rank), str(tmp_path)], env=environment(), stderr=subprocess.DEVNULL)
        for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in processes] == [EXITS[ending]] * 2


MUTED = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from captures import open_recorder
from dsprof.collectors.communication import collectives
recorder = open_recorder(sys.argv[1], Path(sys.argv[2]))
uninstall = collectives.watch(recorder)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for muted in (False, True):
    recorder.mute(muted)
    tensors = [torch.ones(4) for _ in range(40)]
    for _ in range(2):  # addresses of works and tensors are used again
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        known = [recorder.target(work) is not None for work in works]
        assert all(known) if not muted else not any(known), known
        for work in works:
            work.wait()
    assert (recorder.target(None) is not None) == (not muted)
recorder.mute(False)
dist.all_reduce(torch.ones(4))
assert recorder.errors == 0
uninstall()
recorder.close()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("kind", RECORDERS)
def test_what_is_issued_while_nothing_is_written_is_no_other_collective(kind: str, tmp_path: Path) -> None:
    run_alone(MUTED, kind, tmp_path / "capture")
    rows = [row for row in read_rows(tmp_path / "capture") if row.kind is Kind.COMM]
    assert [row.seq for row in rows] == [*range(80), 160]
