"""The collectors inside a process that trains: nothing they meet may reach the job."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import pytest
from armed import both, captured, train

from dsprof.collectors.recorder.python_recorder import PyRecorder
from dsprof.ondisk import CHUNK_RECORDS
from dsprof.schema import Kind
from dsprof.trace.capture import read_capture
from dsprof.trace.derive import trace_rows


@both
def test_bad_marks_and_spans_are_counted_and_do_not_raise(native: str, tmp_path: Path) -> None:
    done = train(
        tmp_path,
        """
        import torch, dsprof
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad(); model(torch.ones(1, 2)).sum().backward(); optimizer.step()
            dsprof.mark("text", "abc"); dsprof.mark("zero", 0.0); dsprof.mark(["list"])
            with dsprof.span(["list"]):
                pass
        print("trained")
        """,
        native=native,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
    (folder,) = (tmp_path / "run" / "capture").iterdir()
    rows = trace_rows(read_capture(folder), 0, 0)
    assert rows.loc[rows["name"] == "zero", "value"].tolist() == [0.0] * 3
    assert "mark" in (folder / "meta.json").read_text()


@both
def test_an_optimizer_that_raised_does_not_hide_the_steps_of_another(native: str, tmp_path: Path) -> None:
    done = train(
        tmp_path,
        """
        import torch
        class Broken(torch.optim.SGD):
            def step(self, closure=None):
                raise RuntimeError("planted")
        model = torch.nn.Linear(2, 2)
        broken = Broken(model.parameters(), lr=0.1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            model(torch.ones(1, 2)).sum().backward()
            if step == 1:
                try:
                    broken.step()
                except RuntimeError:
                    pass
            optimizer.step()
        """,
        native=native,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "run" / "capture").iterdir()
    rows = trace_rows(read_capture(folder), 0, 0)
    assert int((rows["kind"] == "step").sum()) == 5


def test_a_collection_inside_the_recorder_does_not_deadlock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsprof.collectors.host import gc_and_cpu_time
    from dsprof.collectors.recorder import chunks

    make = chunks.make_chunk

    def make_and_collect(*args: object) -> object:
        chunk = make(*args)  # type: ignore[arg-type]
        gc.collect()  # as an automatic collection would, at any allocation where a chunk is made
        return chunk

    monkeypatch.setattr(chunks, "make_chunk", make_and_collect)
    recorder = PyRecorder(tmp_path, patience_s=60.0)
    monkeypatch.setattr(gc_and_cpu_time, "SHORTEST_NS", 0)
    uninstall = gc_and_cpu_time.watch_collections(recorder)
    try:
        for _ in range(CHUNK_RECORDS + 1):
            recorder.put(Kind.MARK, recorder.intern("first"), 1, 2)
    finally:
        uninstall()
    recorder.close()
    assert recorder.dropped == 0
    capture = read_capture(tmp_path)
    assert {capture.names[int(row["name"])] for row in capture.records} == {"first", "gc"}


def test_sampling_from_one_thread_after_another_leaks_no_file(tmp_path: Path) -> None:
    import threading

    from dsprof.collectors.host import gc_and_cpu_time

    recorder = PyRecorder(tmp_path)
    sample = gc_and_cpu_time.sampler(recorder)
    sample()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        thread = threading.Thread(target=sample)
        thread.start()
        thread.join()
    assert len(os.listdir("/proc/self/fd")) <= before + 1
    recorder.close()


def test_many_facts_of_a_kind_leave_room_for_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsprof.collectors.capture import files

    monkeypatch.setattr(files, "MOST_FACTS", 3)
    written = files.FactsFile(tmp_path, rank=0)
    for number in range(5):
        written.write({"fact": "dataloader", "number": number})
    for _ in range(2):
        written.write({"fact": "device", "type": "cuda"})
    written.close()
    facts = [json.loads(line) for line in (tmp_path / "facts.jsonl").read_text().splitlines()]
    assert [(fact["fact"], fact.get("number")) for fact in facts] == [
        ("dataloader", 0),
        ("dataloader", 1),
        ("dataloader", 2),
        ("device", None),
    ]


def test_an_error_in_a_hook_around_a_wait_does_not_reach_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch import distributed

    from dsprof.collectors.communication import collective_rows, waits

    class Work:
        def _get_op_type(self) -> int:
            raise RuntimeError("not of this backend")

        def wait(self) -> str:
            return "waited"

    class Broken:
        @property
        def here(self) -> object:
            raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(distributed, "Work", Work)
    recorder = PyRecorder(tmp_path)
    hooks = collective_rows.PythonHooks(recorder)
    hooks._targets = Broken()  # type: ignore[assignment]
    uninstall = waits._works(recorder, hooks)
    try:
        assert Work().wait() == "waited"
        hooks.returned()
        assert recorder.errors == 3
    finally:
        uninstall()
        recorder.close()


@both
def test_a_script_that_cleans_its_environment_is_captured_all_the_same(native: str, tmp_path: Path) -> None:
    done = train(
        tmp_path,
        """
        import os, torch
        for name in [name for name in os.environ if name.startswith("DSPROF")]:
            del os.environ[name]
        os.chdir("/")
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        """,
        native=native,
    )
    assert (done.returncode, done.stderr) == (0, "")
    (folder,) = (tmp_path / "run" / "capture").iterdir()
    assert int((trace_rows(read_capture(folder), 0, 0)["kind"] == "step").sum()) == 3


@both
def test_a_compiled_step_is_compiled_as_without_us(native: str, tmp_path: Path) -> None:
    done = train(
        tmp_path,
        """
        import torch
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        @torch.compile(backend="eager")
        def step(x):
            optimizer.zero_grad()
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
            return loss
        for _ in range(3):
            step(torch.ones(1, 2))
        print("trained")
        """,
        native=native,
    )
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert "dsprof" not in done.stderr
    assert "perf_counter" not in done.stderr
    # The optimizer is part of what was compiled; backward runs between the parts.
    assert captured(tmp_path).told("backward", "optimizer") == [("backward", None)] * 3


@both
def test_a_work_written_in_python_is_called_as_without_us(native: str, tmp_path: Path) -> None:
    code = """
    import torch, torch.distributed as dist
    class Bare(dist.Work):
        pass
    class Super(dist.Work):
        def get_future(self):
            return super().get_future()
    for work in Bare(), Super():
        try:
            work.get_future()
        except RuntimeError as error:
            print(type(error).__name__, str(error).splitlines()[0])
    done = torch.futures.Future()
    done.set_result(1)
    print(done.then(callback=lambda future: future.value() + 1).wait())
    """
    without, done = (train(tmp_path, code, native=native, DSPROF=armed) for armed in "01")
    assert (done.returncode, done.stdout, done.stderr) == (without.returncode, without.stdout, without.stderr)
    assert "2\n" in without.stdout
