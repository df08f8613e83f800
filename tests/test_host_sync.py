"""Where the host waits for a device: on one that every machine has (`npy_device.py`), and by fakes of CUDA's calls."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked_python
import pytest
import torch
from captures import RECORDERS, Row, build_helper, open_recorder, read_rows
from jobs import environment

from dsprof.collectors.capture.facts import Fact
from dsprof.collectors.capture.open_capture import OpenCapture
from dsprof.collectors.devices import host_sync
from dsprof.collectors.recorder.python_recorder import PyRecorder
from dsprof.collectors.recorder.source_locations import SourceLocations
from dsprof.ondisk import State
from dsprof.schema import HOST_SYNC, Kind

BEGIN = """
import sys, time
import torch
import npy_device
late = [0.0]
made = npy_device.start(lambda: time.sleep(late[0]))
from dsprof.collectors.devices import host_sync
from dsprof.collectors import native
recorder = native.load(print).open(sys.argv[1])
host_sync.watch(recorder)
x, y = made(torch.tensor([3.0])), made(torch.zeros(250))
"""


def run(tmp_path: Path, code: str) -> list[tuple[str, str, int]]:
    """Call, line of `code` (from 1) and bytes of each wait that a script recorded."""
    build_helper()
    script, folder = tmp_path / "train.py", tmp_path / "capture"
    script.write_text(BEGIN + textwrap.dedent(code))
    folder.mkdir()
    done = forked_python.run(
        [sys.executable, str(script), str(folder)], capture_output=True, timeout=120, cwd=tmp_path,
        env={**environment(), "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    before = BEGIN.count("\n")
    found = []
    for row in read_rows(folder):
        assert (row.kind, row.name, row.state) == (Kind.MARK, HOST_SYNC, State.DONE)
        assert row.end_ns >= row.start_ns
        file, _, line = row.site.rpartition(":")
        assert file == str(script), row.site
        found.append((row.purpose, int(line) - before, row.bytes))
    return found


def test_every_way_to_wait_names_its_line(tmp_path: Path) -> None:
    assert run(
        tmp_path,
        """\
        x.item()
        if x:
            float(x)
        x.cpu()
        x.to("cpu").tolist()
        x.tolist()
        y.copy_(torch.ones(250))
        y.nonzero()
        """,
    ) == [
        ("item", 1, -1), ("item", 2, -1), ("item", 3, -1), ("copy to host", 4, 4), ("copy to host", 5, 4),
        ("copy to host", 6, 4), ("copy to device", 7, 1000), ("nonzero", 8, -1),
    ]  # fmt: skip


def test_what_does_not_wait_is_not_recorded(tmp_path: Path) -> None:
    """The host's own tensors; copies within the device; copies that need not wait, and do not."""
    assert run(
        tmp_path,
        """\
        torch.tensor([3.0]).item(), torch.tensor([3.0]).tolist(), torch.ones(3).nonzero()
        torch.zeros(3).copy_(torch.ones(3))
        y.copy_(y)
        y.copy_(torch.ones(250), non_blocking=True) if False else None
        late[0] = 0.05
        y.copy_(torch.ones(250), non_blocking=True)
        """,
    ) == [("copy to device", 6, 1000)]


def test_lines_of_torch_are_passed_over(tmp_path: Path) -> None:
    """A wait inside of torch's own code is of the line that called it."""
    assert run(
        tmp_path,
        """\
        def loss():
            return torch.nn.utils.rnn.pad_sequence([torch.ones(2), torch.ones(1)]), x.item()
        torch.autograd.functional.torch.utils._pytree.tree_map(lambda t: t.item(), [x])
        loss()
        """,
    ) == [("item", 3, -1), ("item", 2, -1)]


def test_gradients_compilation_and_transforms_go_on(tmp_path: Path) -> None:
    """A compiler traces through the hooks with tensors that have no values; what it makes is as without them."""
    assert run(
        tmp_path,
        """\
        w = made(torch.tensor([2.0])).requires_grad_()
        w.item()
        w.cpu()
        @torch.compile(backend="aot_eager", fullgraph=True)
        def half(a, b):
            return b.copy_(a.to(torch.float64)).to(torch.float32) / 2
        p = torch.ones(3, requires_grad=True)
        half(p, torch.zeros(3, dtype=torch.float64)).sum().backward()
        assert p.grad.tolist() == [0.5, 0.5, 0.5]
        assert torch.vmap(lambda a: a.clone().copy_(2 * a))(torch.ones(2, 3)).tolist() == [[2.0] * 3] * 2
        torch.empty(3, device="meta").copy_(torch.ones(3))
        torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
        """,
    ) == [("item", 2, -1), ("copy to host", 3, 4)]


def test_after_the_capture_nothing_is_recorded(tmp_path: Path) -> None:
    assert run(
        tmp_path,
        """\
        x.item()
        recorder.mute(True)
        x.item()
        recorder.mute(False)
        recorder.uninstall_syncs()
        x.item()
        host_sync.watch(recorder)
        x.item()
        recorder.close()
        x.item()
        """,
    ) == [("item", 1, -1), ("item", 8, -1)]


def test_an_error_of_the_device_reaches_the_job(tmp_path: Path) -> None:
    assert run(
        tmp_path,
        """\
        def fail():
            raise RuntimeError("the device")
        late[0] = "no number"
        try:
            x.cpu()
        except TypeError as error:
            assert "str" in str(error), error
        else:
            raise AssertionError
        late[0] = 0.0
        x.item()
        """,
    ) == [("copy to host", 5, 4), ("item", 11, -1)]


def test_other_threads_and_a_second_capture(tmp_path: Path) -> None:
    assert run(
        tmp_path,
        """\
        import threading, os
        def wait():
            x.item()
        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        recorder.close()
        os.mkdir("second")
        recorder = native.load(print).open("second")
        host_sync.watch(recorder)
        wait()
        recorder.close()
        """,
    ) == [("item", 3, -1)]
    (row,) = read_rows(tmp_path / "second")
    assert (row.purpose, row.site) == ("item", f"{tmp_path / 'train.py'}:{BEGIN.count(chr(10)) + 3}")


# --- calls without an operator --------------------------------------------------------------------


@pytest.fixture(params=RECORDERS)
def recorder(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "native":
        build_helper()
    opened = open_recorder(request.param, tmp_path / "capture")
    yield opened
    opened.close()


def test_synchronize(recorder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of CUDA, which this machine need not have, under whichever name they were imported."""
    called: list[Any] = []
    monkeypatch.setattr(torch._C, "_cuda_synchronize", lambda: called.append("device"), raising=False)
    monkeypatch.setattr(torch.cuda.Stream, "synchronize", lambda self: called.append(self))
    before = torch._C._cuda_synchronize, torch.cuda.Stream.synchronize, torch.cuda.Event.synchronize  # type: ignore[attr-defined]
    uninstalls = host_sync.watch(recorder)
    torch._C._cuda_synchronize()  # type: ignore[attr-defined]
    line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    torch.cuda.Stream.synchronize("a stream")  # type: ignore[arg-type]
    for uninstall in uninstalls:
        uninstall()
    assert before == (torch._C._cuda_synchronize, torch.cuda.Stream.synchronize, torch.cuda.Event.synchronize)  # type: ignore[attr-defined]
    torch.cuda.Stream.synchronize("another")  # type: ignore[arg-type]
    assert called == ["device", "a stream", "another"]
    first, second = read_rows(tmp_path / "capture")
    assert (first.kind, first.name, first.purpose, first.state) == (
        Kind.MARK, HOST_SYNC, "torch.cuda.synchronize", State.DONE,
    )  # fmt: skip
    assert (first.site, second.site) == (f"{__file__}:{line}", f"{__file__}:{line + 2}")
    assert second.purpose == "Stream.synchronize"
    assert 0 < first.start_ns <= first.end_ns <= second.start_ns <= second.end_ns


def test_a_call_that_raises_is_over(recorder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch._C, "_cuda_synchronize", fail, raising=False)
    uninstalls = host_sync.watch(recorder)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        torch._C._cuda_synchronize()  # type: ignore[attr-defined]
    for uninstall in uninstalls:
        uninstall()
    (row,) = read_rows(tmp_path / "capture")
    assert row.state is State.DONE


def test_it_begins_after_the_first_step_where_cuda_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "capture").mkdir()
    opened = PyRecorder(tmp_path / "capture")
    steps: list[Callable[[], None]] = []
    facts: list[Fact] = []
    capture = OpenCapture(opened, tmp_path, "light", lambda: True, lambda: None, facts.append, after_step=steps)
    monkeypatch.setattr(torch._C, "_cuda_synchronize", lambda: None, raising=False)
    untouched = torch._C._cuda_synchronize  # type: ignore[attr-defined]
    for in_use in (False, True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda in_use=in_use: in_use)
        (uninstall,) = host_sync.install(capture)
        steps[0]()
        assert steps == []
        assert (torch._C._cuda_synchronize is untouched) != in_use  # type: ignore[attr-defined]
        uninstall()
        assert torch._C._cuda_synchronize is untouched  # type: ignore[attr-defined]
    assert facts == [{"fact": "host_sync", "operators": False}]
    opened.close()


# --- places ---------------------------------------------------------------------------------------


def test_places_are_outside_of_torch_and_of_us(tmp_path: Path) -> None:
    (tmp_path / "capture").mkdir()
    opened = PyRecorder(tmp_path / "capture")
    names: dict[int, str] = {}
    sites = SourceLocations(opened)

    torch_file = str(Path(torch.__file__).parent / "optim" / "made_up.py")
    library = str(Path(inspect.getfile(inspect)).parent / "made_up.py")
    package = str(Path(torch.__file__).parents[1] / "trainer" / "loop.py")
    inner: dict[str, Any] = {"here": sites.here}
    for file, number in ((torch_file, 1), (library, 2)):
        exec(compile(f"def inner{number}():\n    return here()\n", file, "exec"), inner)
    ids = {}
    for file in ("/home/me/train.py", package):
        outer = dict(inner)
        exec(compile("a = inner1()\nb = [here(), inner2()]\n", file, "exec"), outer)
        ids[file] = (outer["a"], *outer["b"])
    opened.close()
    for line in (tmp_path / "capture" / "names.txt").read_text().splitlines():
        key, _, name = line.partition("\t")
        names[int(key)] = name
    assert {file: tuple(names[number] for number in numbers) for file, numbers in ids.items()} == {
        "/home/me/train.py": ("/home/me/train.py:1", "/home/me/train.py:2", "/home/me/train.py:2"),
        package: (f"{package}:1", f"{package}:2", f"{package}:2"),
    }
    assert ids["/home/me/train.py"][1] == ids["/home/me/train.py"][2]


def test_a_wait_that_is_under_way_is_on_disk(recorder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the device hangs."""
    seen: list[Row] = []
    monkeypatch.setattr(
        torch._C, "_cuda_synchronize", lambda: seen.extend(read_rows(tmp_path / "capture")), raising=False
    )
    uninstalls = host_sync.watch(recorder)
    torch._C._cuda_synchronize()  # type: ignore[attr-defined]
    for uninstall in uninstalls:
        uninstall()
    (row,) = seen
    assert (row.state, row.end_ns) == (State.BEGUN, 0)
    assert row.site.startswith(f"{__file__}:")
