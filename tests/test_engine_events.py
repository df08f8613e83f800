"""What dsprof's engine tells becomes rows of the trace: everything it knows, each fact once, on both recorders."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked_python
import numpy as np
import pandas as pd
import pytest
import torch
from captures import RECORDERS, build_helper, open_recorder, read_names, read_rows
from clocks import Clock
from jobs import ROOT, environment, profile
from records import Record, capture_of
from synthetic import MS, write_capture

from dsprof.collectors.frameworks import dsprof_engine
from dsprof.collectors.loop import optimizers
from dsprof.collectors.recorder.record import Recorder
from dsprof.engine.hooks import Hooks
from dsprof.ondisk import Flag, State
from dsprof.schema import SHARDING, SMALL_GRADIENTS, Kind
from dsprof.trace.capture import Capture, read_capture
from dsprof.trace.derive import trace_rows


class Told:
    """A capture of what one engine tells."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.folder = folder
        self.recorder: Recorder = open_recorder(kind, folder)
        self.hooks = Hooks(stage=2, clock=Clock(tick=1000))
        self.steps = 0
        optimizers.watch(self.recorder, lambda: None)
        self._unsubscribe = dsprof_engine.watch(self.recorder, self.count_step)

    def count_step(self) -> None:
        self.steps += 1

    def rows(self) -> pd.DataFrame:
        return trace_rows(read_capture(self.folder), 0, 0)

    def close(self) -> None:
        self._unsubscribe()
        self.recorder.close()


@pytest.fixture(params=RECORDERS)
def told(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Told]:
    if request.param == "native":
        build_helper()
    told = Told(request.param, tmp_path / "rank00000.0.host.1")
    yield told
    told.close()


def of(rows: pd.DataFrame, *columns: str) -> list[tuple[Any, ...]]:
    """Those columns, with None for null."""
    return [tuple(None if pd.isna(value) else value for value in row) for row in rows[list(columns)].to_numpy(object)]


COMM = ("name", "lane", "group", "seq", "bytes", "dtype", "purpose", "module", "stage", "microbatch")


def test_a_communication_keeps_all_that_was_told(told: Told) -> None:
    span = told.hooks.begin(
        "comm", "all_gather", lane="comm.parameters", issue_ns=400, module="blocks.3.mlp", purpose="parameter",
        group="4", seq=0, bytes=4096, dtype="bfloat16", at=(0, 5, 2),
    )  # fmt: skip
    (under_way,) = read_rows(told.folder)
    assert (under_way.state, under_way.start_ns, under_way.end_ns) == (State.BEGUN, 1000, 0)
    told.hooks.end(span)
    (record,) = read_rows(told.folder)
    assert record.flags == Flag.ENGINE | Flag.START_MEASURED | Flag.ASYNC
    rows = told.rows()
    assert of(rows, *COMM) == [
        ("all_gather", "comm.4", "4", 0, 4096, "bfloat16", "parameter", "blocks.3.mlp", 2, 5),
    ]
    times = ("issue_ns", "start_ns", "dur_ns", "ended", "source", "host_ns", "peer", "tag", "value")
    assert of(rows, *times) == [(400, 1000, 1000, True, "measured", None, None, None, None)]


def test_what_a_pipeline_does_keeps_stage_micro_batch_and_peer(told: Told) -> None:
    hooks = told.hooks
    with hooks.span("pipe", "B"):
        with hooks.span("wait", "recv", purpose="pipeline", group="7", seq=3, peer=1, at=(0, 6, 1)):
            pass
        with hooks.span(
            "comm", "send", lane="comm.pipe.send_B", purpose="pipeline", group="7", seq=2, peer=0, bytes=64
        ):
            pass
    rows = told.rows()
    columns = ("kind", "name", "stage", "microbatch", "group", "seq", "peer", "tag", "module", "purpose")
    assert of(
        rows[rows["name"].isin(["B", "recv", "send"])].sort_values("kind", key=lambda k: k.astype(str)), *columns
    ) == [
        ("comm", "send", 2, 0, "7", 2, 0, None, None, "pipeline"),
        ("pipe", "B", 2, 0, None, None, None, None, None, None),
        ("wait", "recv", 1, 6, "7", 3, 1, None, None, "pipeline"),
    ]


def test_an_end_that_is_known_otherwise_replaces_both_times(told: Told) -> None:
    """A GPU's lane learns from events when a communication ran."""
    span = told.hooks.begin("comm", "all_reduce", lane="comm.gradients", issue_ns=400, group="4", seq=0)
    assert span is not None
    span.start_ns = 600
    told.hooks.end(span, at_ns=900)
    assert of(told.rows(), "issue_ns", "start_ns", "dur_ns") == [(400, 600, 300)]


def test_numbers_of_a_group_are_given_once_whoever_communicates(told: Told) -> None:
    """A lane counts its own calls, a norm says no number, and c10d's interception has the group's count."""
    hooks = told.hooks
    for seq in range(2):
        hooks.end(hooks.begin("comm", "reduce_scatter", lane="comm.gradients", group="4", seq=seq))
    hooks.end(hooks.begin("comm", "all_reduce", group="4", purpose="norm"))
    assert told.recorder.number("4") == 3
    wait = hooks.begin("wait", "reduce_scatter", group="4", seq=2)
    hooks.end(hooks.begin("comm", "reduce_scatter", lane="comm.gradients", group="4", seq=2))
    hooks.end(wait)
    rows = told.rows()
    assert of(rows[rows["kind"] == "comm"], "name", "seq", "purpose") == [
        ("reduce_scatter", 0, "other"), ("reduce_scatter", 1, "other"), ("all_reduce", 2, "norm"),
        ("reduce_scatter", 4, "other"),
    ]  # fmt: skip
    assert of(rows[rows["kind"] == "wait"], "group", "seq") == [("4", 4)]


def test_groups_of_a_second_world_are_others(told: Told) -> None:
    told.hooks.end(told.hooks.begin("comm", "all_reduce", group="0"))
    renew = told.recorder.groups.renew if hasattr(told.recorder, "groups") else told.recorder.renew_groups  # type: ignore[attr-defined]
    renew()
    told.hooks.end(told.hooks.begin("comm", "all_reduce", group="0"))
    assert of(told.rows(), "group", "seq", "lane") == [("0", 0, "comm.0"), ("0#2", 0, "comm.0#2")]


def test_waits_copies_and_marks(told: Told) -> None:
    hooks = told.hooks
    hooks.microbatch = 3
    with hooks.span("wait", "all_gather", module="head", purpose="parameter", group="4", seq=7):
        pass
    with hooks.span("copy", "write", lane="io.nvme", purpose="optimizer", bytes=1 << 20, value=0.5):
        pass
    with hooks.span("phase", "recompute", lane="autograd", module="blocks.1"):
        pass
    hooks.mark("overflow", value=65536.0)
    hooks.mark("allocated", kind="mem", bytes=77)
    hooks.mark("loss scale", kind="gauge", value=0.0)
    columns = ("kind", "name", "lane", "module", "purpose", "group", "seq", "bytes", "value", "dur_ns")
    assert of(told.rows(), *columns) == [
        ("wait", "all_gather", "main", "head", "parameter", "4", 7, None, None, 1000),
        ("copy", "write", "io.nvme", None, "optimizer", None, None, 1 << 20, 0.5, 1000),
        ("phase", "recompute", "autograd", "blocks.1", None, None, None, None, None, 1000),
        ("mark", "overflow", "main", None, None, None, None, None, 65536.0, 0),
        ("mem", "allocated", "main", None, None, None, None, 77, None, 0),
        ("gauge", "loss scale", "main", None, None, None, None, None, 0.0, 0),
    ]
    assert set(told.rows()["microbatch"]) == {3}


def test_phases_that_are_seen_anyway_are_recorded_once(told: Told) -> None:
    """Forward by the hook on modules; backward and step by the engine, which knows where they end."""
    hooks = told.hooks
    parameter = torch.nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizers.register()
    with hooks.span("phase", "forward"):
        pass
    with hooks.span("phase", "backward"):
        assert told.recorder.enter_backward() == 2  # so the hook on the autograd engine records nothing
        told.recorder.leave_backward()
    assert told.recorder.enter_backward() == 1
    told.recorder.leave_backward()
    with hooks.span("phase", "step"):
        for tile in range(2):
            with hooks.span("phase", "optimizer", purpose="optimizer", value=float(tile)):
                optimizer.step()
        assert told.steps == 0
    assert told.steps == 1
    phases = [(row.name, row.value, bool(row.flags & Flag.ENGINE)) for row in read_rows(told.folder)]
    assert phases == [("backward", None, True), ("optimizer", None, True), ("tile", 0.0, True), ("tile", 1.0, True)]
    rows = told.rows()
    assert int((rows["kind"] == "step").sum()) == 1

    with hooks.span("phase", "optimizer"):  # outside a step of the engine the optimizer's own hook sees it
        optimizer.step()
    assert [(row.name, row.flags) for row in read_rows(told.folder)][4:] == [("optimizer", Flag(0))]


def test_what_cannot_be_recorded_is_counted_and_does_not_reach_the_engine(told: Told) -> None:
    told.hooks.end(told.hooks.begin("comm", "all_reduce", lane="comm.x", group="4", bytes="many"))  # type: ignore[arg-type]
    told.hooks.end(told.hooks.begin("wait", "all_reduce"))
    assert told.recorder.errors >= 1
    assert [row.kind for row in read_rows(told.folder)] == [Kind.WAIT]


def test_waits_are_passed_over_beside_the_computation_only(told: Told) -> None:
    begin, wait, names = told.recorder.begin, int(Kind.WAIT), told.recorder.intern
    with told.hooks.span("comm", "all_reduce", lane="comm.gradients", group="4"):
        assert begin(wait, names("inside")) == 0
        assert begin(Kind.MARK, names("mine")) != 0
    with told.hooks.span("comm", "all_reduce", group="4", purpose="norm"):
        assert begin(wait, names("norm")) != 0
    assert begin(wait, names("after")) != 0


def test_a_call_that_goes_on_on_a_device_is_passed_over_while_it_is_issued(told: Told) -> None:
    begin, wait, names = told.recorder.begin, int(Kind.WAIT), told.recorder.intern
    with told.hooks.span("launch", "all_reduce", purpose="gradient"):
        assert begin(wait, names("inside")) == 0
    assert begin(wait, names("after")) != 0
    later = told.hooks.begin("comm", "all_reduce", lane="comm.gradients", group="4")
    told.hooks.end(later, at_ns=50_000)
    assert of(told.rows(), "kind", "name")[0] == ("launch", "all_reduce")


def test_a_span_that_began_before_is_left_to_others(told: Told) -> None:
    told._unsubscribe()

    class Other:
        def begin(self, span: object) -> None: ...
        def end(self, span: object) -> None: ...

    from dsprof.engine import hooks

    stop = hooks.subscribe(Other())
    span = told.hooks.begin("phase", "step")
    told._unsubscribe = dsprof_engine.watch(told.recorder, told.count_step)
    told.hooks.end(span)
    stop()
    assert (read_rows(told.folder), told.steps) == ([], 0)


# --- on merging


def engine_capture(*records: Record) -> Capture:
    """One rank of the engine: kind, name, start and end in ms, and fields that differ from the usual."""
    return capture_of(
        *(
            (kind, name, start, end, {"flags": Flag.ENGINE, "stage": 0, "microbatch": 0, **more})
            for kind, name, start, end, more in records
        )
    )


GRADIENT = {"group": "4", "seq": 0, "issue_ns": 20 * MS, "purpose": "gradient", "thread": 9}


def test_no_wait_is_derived_for_what_the_engine_communicates() -> None:
    """Overlapped whole: nobody waited. DDP's reducer would have, in C++, and the same rows of it say so."""
    records = [
        (Kind.PHASE, "forward", 0, 10, {"flags": 0}),
        (Kind.PHASE, "backward", 10, 50, {}),
        (Kind.COMM, "all_reduce", 20, 48, GRADIENT),
        (Kind.PHASE, "optimizer", 50, 60, {}),
    ]
    assert of(trace_rows(engine_capture(*records), 0, 0).query("kind == 'wait'"), "name") == []
    records[2] = (Kind.COMM, "all_reduce", 20, 48, {"group": "4", "seq": 0, "issue_ns": 20 * MS, "flags": 0})
    waits = trace_rows(engine_capture(*records), 0, 0).query("kind == 'wait'")
    assert of(waits, "name", "source", "dur_ns") == [("all_reduce", "derived", 28 * MS)]


def test_the_purpose_that_was_told_beats_the_guess() -> None:
    records = [
        (Kind.PHASE, "backward", 10, 50, {}),
        (Kind.COMM, "all_reduce", 20, 30, {**GRADIENT, "purpose": "norm"}),
        (Kind.COMM, "all_reduce", 30, 40, {**GRADIENT, "seq": 1, "purpose": 0}),
    ]
    rows = trace_rows(engine_capture(*records), 0, 0).query("kind == 'comm'")
    assert of(rows, "seq", "purpose") == [(0, "norm"), (1, "gradient")]


def test_an_engines_record_with_names_that_do_not_exist_is_damaged(tmp_path: Path) -> None:
    capture = engine_capture(
        (Kind.COMM, "all_reduce", 20, 30, {**GRADIENT, "module": "head"}),
        (Kind.COMM, "all_reduce", 30, 40, {**GRADIENT, "module": 99}),
        (Kind.COMM, "all_reduce", 40, 50, {**GRADIENT, "purpose": 99}),
    )
    read = read_capture(write_capture(capture, tmp_path))
    assert (len(read.records), read.damaged) == (1, 2)


# --- in real jobs

KILLED = """
import os, signal, sys, threading
from pathlib import Path
import torch
from captures import open_recorder
from dsprof.collectors.frameworks import dsprof_engine
from dsprof.engine.hooks import Hooks
from dsprof.engine.comm.lane import CpuLane
dsprof_engine.watch(open_recorder(sys.argv[1], Path(sys.argv[2])), lambda: None)
lane = CpuLane("gradients", Hooks())
begun = threading.Event()
def work():
    begun.set()
    threading.Event().wait()  # a peer that never comes
about = {"purpose": "gradient", "dtype": "float32", "group": "1"}
lane.submit(lambda: None, "all_reduce", bytes=400, seq=0, **about).wait()
lane.submit(work, "all_reduce", bytes=800, seq=1, **about)
begun.wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("kind", RECORDERS)
def test_killed_rank_leaves_what_its_lane_was_doing(kind: str, tmp_path: Path) -> None:
    if kind == "native":
        build_helper()
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])
    done = forked_python.run(
        [sys.executable, "-c", KILLED, kind, str(tmp_path / "c")],
        env=environment(PYTHONPATH=path, TORCH_DEVICE_BACKEND_AUTOLOAD="0"), timeout=120,
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    first, second = [row for row in read_rows(tmp_path / "c") if row.kind is Kind.COMM]
    assert (first.seq, first.bytes, first.state) == (0, 400, State.DONE)
    assert (second.seq, second.bytes, second.state, second.end_ns) == (1, 800, State.BEGUN, 0)
    assert "gradient" in read_names(tmp_path / "c").values()


# Two ranks. The script's own collectives and the engine's share the default group, and others are the engine's alone.
MIXED = """
import os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from captures import open_recorder
from dsprof.collectors.communication import collectives
from dsprof.collectors.frameworks import dsprof_engine
from dsprof.engine.comm.comm import Comm, open_comm
from dsprof.engine.hooks import Hooks
from dsprof.engine.comm.lane import CpuLane, Inline
from dsprof.engine.optim.loss_scaler import global_norm
kind, rank, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
torch.set_num_threads(1)
recorder = open_recorder(kind, folder / f"rank0000{rank}.0.host.{rank + 1}")
undo = [collectives.watch(recorder), dsprof_engine.watch(recorder, lambda: None)]
dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
hooks = Hooks()
comm, everyone = open_comm([[0, 1]], lambda: CpuLane("gradients", hooks)), Comm(dist.group.WORLD, Inline(hooks))
for number in range(3):
    dist.all_reduce(torch.ones(100))
    mine, rows = torch.empty(50), torch.ones(2, 50)
    comm.reduce_scatter(rows, mine, "gradient", False).wait()
    work = dist.all_reduce(torch.ones(10), async_op=True)
    comm.all_reduce(torch.ones(7), "gradient").wait()
    work.wait()
    global_norm([torch.ones(3)], [everyone])
    comm.broadcast(torch.ones(5), 0, "parameter").wait()
    dist.all_reduce(torch.ones(20), group=comm.group)
    dist.barrier()
for function in undo:
    function()
assert recorder.errors == 0
recorder.close()
os._exit(0)
"""


@pytest.mark.parametrize("kind", RECORDERS)
def test_each_collective_is_recorded_once_and_numbered_alike_on_both_ranks(kind: str, tmp_path: Path) -> None:
    if kind == "native":
        build_helper()
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])
    env = environment(PYTHONPATH=path, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    ranks = [forked_python.start([sys.executable, "-c", MIXED, kind, str(r), str(tmp_path)], env=env) for r in range(2)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    for rank in range(2):
        rows = trace_rows(read_capture(tmp_path / f"rank0000{rank}.0.host.{rank + 1}"), rank, 0)
        comm = rows[rows["kind"] == "comm"]
        for turn in range(3):
            default, own = 4 * turn, 4 * turn
            expected = {
                ("0", default, "all_reduce", 400, "other"), ("0", default + 1, "all_reduce", 40, "other"),
                ("0", default + 2, "all_reduce", 8, "norm"), ("0", default + 3, "barrier", 0, "barrier"),
                ("1", own, "reduce_scatter", 400, "gradient"), ("1", own + 1, "all_reduce", 28, "gradient"),
                ("1", own + 2, "broadcast", 20, "parameter"), ("1", own + 3, "all_reduce", 80, "other"),
            }  # fmt: skip
            found = comm[comm["seq"].between(4 * turn, 4 * turn + 3)]
            assert set(of(found, "group", "seq", "name", "bytes", "purpose")) == expected
            assert len(found) == len(expected)
        assert len(comm) == 24
        assert comm["ended"].all()
        # The lane's thread told nothing but its communications, and the script waited for what it asked for.
        (lane,) = set(comm.loc[comm["purpose"] == "gradient", "thread"])
        assert set(rows.loc[rows["thread"] == lane, "kind"]) == {"comm"}
        waits = rows[rows["kind"] == "wait"]
        names = {(group, seq): name for group, seq, name in of(comm, "group", "seq", "name")}
        assert all(names[group, seq] == name for group, seq, name in of(waits, "group", "seq", "name"))
        told = waits[(waits["group"] == "1") & (waits["seq"] % 4 < 3)]  # at most: the lane may have been quicker
        waits = waits.drop(told.index)
        # Two of the default group, the norm, the one on the lane's group, the barrier.
        asked = {("0", 0), ("0", 1), ("0", 2), ("0", 3), ("1", 3)}
        assert sorted(of(waits, "group", "seq")) == sorted((g, 4 * turn + n) for turn in range(3) for g, n in asked)
        norms = waits[waits["purpose"] == "norm"]
        assert len(norms) == 3
        assert of(norms, "stage", "microbatch") == [(0, 0)] * 3
        assert waits["purpose"].notna().sum() == 3


TRAIN = """
import time
import torch
import torch.distributed as dist
import dsprof.engine

torch.set_num_threads(1)
torch.manual_seed(0)


class Sleepy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(32, 32)

    def forward(self, x):
        time.sleep(0.02)
        return torch.relu(self.linear(x))


engine, *_ = dsprof.engine.initialize(
    model=torch.nn.Sequential(Sleepy(), Sleepy(), torch.nn.Linear(32, 1)),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 500},
    },
)
for step in range(8):
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 32)).square().mean())
        engine.step()
    dist.barrier()
dist.destroy_process_group()
"""


def test_an_engine_run_needs_no_flag(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    done = profile(tmp_path, script)
    assert done.status == 0, done.stderr
    analysis = done.analysis()
    assert not [warning for warning in analysis.capture.warnings if "error" in warning]
    assert analysis.step_count == 8
    assert analysis.step_ms is not None
    assert sum(analysis.budget.values()) == pytest.approx(analysis.step_ms.mean)
    assert analysis.budget["other"] < 0.05 * analysis.step_ms.mean
    assert analysis.budget["compute"] > 60

    told = [fact for fact in done.folder.read_info().facts if fact["fact"] == "optimizer"]
    assert [(fact["rank"], fact["class"], fact["groups"], fact["implementation"]) for fact in told] == [
        (rank, "AdamW", 1, "fused") for rank in range(2)
    ]
    assert all(SMALL_GRADIENTS not in fact for fact in told)

    rows = analysis.rows
    for rank in range(2):
        mine = rows[rows["rank"] == rank]
        phases = mine[(mine["kind"] == "phase") & (mine["source"] == "measured")]
        assert phases["name"].astype(str).value_counts().to_dict() == {
            "forward": 16, "backward": 16, "optimizer": 8, "tile": 8 * 4,
        }  # fmt: skip
        comm = mine[(mine["kind"] == "comm") & (mine["step"] >= 1)]
        assert set(comm["purpose"].dropna()) >= {"gradient", "parameter", "norm", "barrier"}
        told = comm[comm["purpose"].isin(["gradient", "parameter", "norm"])]
        assert set(told["stage"]) == {0}
        assert set(told["microbatch"]) == {0, 1}
        assert set(told.loc[told["purpose"] == "parameter", "module"].dropna()) >= {"0.linear"}
        worked = mine[(mine["kind"] == "module") & (mine["name"] == SHARDING) & (mine["step"] >= 1)]
        inside = {}
        for phase in ("forward", "backward"):
            spans = phases[(phases["name"] == phase) & (phases["step"] >= 1)]
            ends = spans["start_ns"] + spans["dur_ns"]
            inside[phase] = [
                ((spans["start_ns"] <= row.start_ns) & (row.start_ns + row.dur_ns <= ends)).any()
                for row in worked.itertuples()
            ]
            # At least where its one bucket is launched and where it is awaited, and before and after each module.
            assert sum(inside[phase]) >= 2 * len(spans)
        assert all(np.logical_or(*inside.values()))
        # One gradient bucket a micro-batch, one norm a step, one barrier of the script's own.
        count = comm[comm["step"].between(1, 7)].groupby("purpose", observed=True).size()
        assert (count["gradient"], count["norm"]) == (14, 7)
        assert (comm["lane"].astype(str) == "comm." + comm["group"].astype(str)).all()
    keys = rows[rows["kind"] == "comm"].groupby(["group", "seq"], observed=True)
    assert set(keys["rank"].agg(lambda ranks: tuple(sorted(ranks)))) == {(0, 1)}
    assert (keys["name"].nunique() == 1).all()
    assert (keys["bytes"].nunique() == 1).all()


ONE_BIT = """
import torch
import dsprof.engine

torch.set_num_threads(1)
torch.manual_seed(0)
engine, *_ = dsprof.engine.initialize(
    model=torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)),
    config={
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3, "freeze_step": 3}},
    },
)
for step in range(8):
    engine.backward(engine(torch.randn(4, 256)).square().mean())
    engine.step()
"""


@pytest.mark.slow  # tests/engine/test_onebit_convergence.py has the same of the spans that the rows are made of
def test_one_bit_adam_sends_a_sixteenth_of_an_fp32_all_reduce(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ONE_BIT)
    done = profile(tmp_path, script)
    assert done.status == 0, done.stderr
    rows = done.analysis().rows
    comm = rows[(rows["kind"] == "comm") & (rows["purpose"] == "gradient") & (rows["rank"] == 0)]
    # On the wire, of two ranks: an all-reduce sends all of its bytes, the others half of what they hold.
    sent = comm["bytes"].astype(float) * comm["name"].astype(str).map({"all_reduce": 1.0}).fillna(0.5)
    of_step = sent.groupby(comm["step"]).sum()
    parameters = 256 * 256 + 256 + 256 + 1
    assert (of_step[of_step.index < 3] >= 4 * parameters).all()
    frozen = of_step[of_step.index >= 3]
    assert len(frozen) == 5
    assert (frozen > 0).all()
    assert (16 * frozen <= 4 * parameters).all()


PLAIN = """
import sys, torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
print(*sorted(name for name in list(sys.modules) if name.startswith("dsprof.engine")))
"""


def test_a_rank_without_the_engine_loads_its_hooks_only(tmp_path: Path) -> None:
    env = environment(DSPROF="1", DSPROF_RUN=str(tmp_path / "run"))
    done = subprocess.run([sys.executable, "-c", PLAIN], env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["dsprof.engine", "dsprof.engine.hooks"]
