"""A real job whose command line, environment, configuration, titles and errors hold secrets: none is in what is
written, and nobody else may read it. And children of dsprof's own, which import nothing from the working directory."""

from __future__ import annotations

import json
import multiprocessing
import os
import stat
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import jobs
import pyarrow.parquet as pq
import pytest
from captures import build_helper
from jobs import environment, profile

from dsprof import cli
from dsprof.collectors.capture import scratch
from dsprof.collectors.native import build, places
from dsprof.importers import kineto
from dsprof.launch import peak

CANARY = "canary7f3a91c4"
SCRIPT = f"""
import os, sys, threading, time
import ctypes, torch
ctypes.CDLL(None).prctl(15, b"tok={CANARY}")  # PR_SET_NAME
thread = threading.Thread(target=time.sleep, args=(0.5,), name="worker --password {CANARY}h", daemon=True)
thread.start()
os.environ["LATE_API_KEY"] = "{CANARY}i"
class Wrapped(torch.nn.Linear):
    def __deepcopy__(self, memo):
        raise RuntimeError("Bearer {CANARY}j")
model = Wrapped(2, 2)
loader = torch.utils.data.DataLoader(torch.ones(16, 2), batch_size=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in loader:
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
from dsprof.collectors.hooking import errors
from dsprof.collectors.capture import facts
try:
    raise ValueError("401 for https://me:{CANARY}k@host with " + os.environ["HF_TOKEN"])
except ValueError as error:
    errors.count_error("a hook", error)  # as where a hook of ours meets an error of the job's
facts.state({{"fact": "settings", "config": {{"wandb": {{"api_key": "{CANARY}l"}}, "lr": 0.1}}, "site": __file__}})
raise RuntimeError("no access with --token {CANARY}m")
"""
TYPED = (
    "--api-key", f"{CANARY}a", f"--db-password={CANARY}b", f"SECRET={CANARY}c", "--config",
    json.dumps({"wandb": {"api_key": f"{CANARY}d"}}), f"https://me:{CANARY}e@host/x", "--tokenizer", "gpt2",
    "--max-tokens", "512",
)  # fmt: skip


def everything_in(folder: Path) -> dict[str, bytes]:
    """The bytes of all files below it; of Parquet, which is compressed, what is in them, too."""
    found = {}
    for path in (one for one in folder.rglob("*") if one.is_file()):
        found[str(path.relative_to(folder))] = path.read_bytes()
        if path.suffix == ".parquet":
            table = pq.read_table(path)
            found[f"{path.name}, read"] = f"{table.schema.metadata}{table.to_pydict()}".encode()
    return found


@pytest.mark.parametrize("shared", ["", "1"])
def test_no_secret_of_a_job_is_in_what_is_written_and_it_is_the_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shared, it is copied from a local disk, and the umask would hide it from the group."""
    (tmp_path / "train.py").write_text(SCRIPT)
    for name, value in (("HF_TOKEN", "f"), ("MY_SERVICE_PASSWORD", "g")):
        monkeypatch.setenv(name, CANARY + value)
    monkeypatch.setenv("DATABASE_URL", f"postgres://me:{CANARY}n@host/db")
    monkeypatch.setattr(jobs, "environment", lambda: environment(DSPROF_SHARED=shared))
    flags: tuple[str, ...] = ("--level", "full", "--deep", "3:5")
    before = os.umask(0o077 if shared else 0)
    try:
        if shared:
            flags += ("--scratch", str(tmp_path / "disk"))
        finished = profile(tmp_path, tmp_path / "train.py", *TYPED, ranks=None, flags=flags, fresh=not shared)
    finally:
        os.umask(before)
    assert finished.status == 1, finished.stderr
    folder = finished.folder
    (tmp_path / "out").mkdir()
    assert cli.main(["report", str(folder.path), "-o", str(tmp_path / "out" / "report.html")]) == 0
    assert cli.main(["analyze", "--json", str(folder.path)]) == 0
    assert cli.main(["tensorboard", "--no-serve", str(folder.path)]) == 0
    said = capsys.readouterr()
    assert CANARY not in said.out + said.err
    written = {**everything_in(folder.path), **everything_in(tmp_path / "out")}
    assert {"run.json", "findings.json", "report.html"} <= set(written)
    assert [name for name in written if name.endswith(("meta.json", "facts.jsonl", "counters.bin", "deep.json"))]
    assert [name for name, content in written.items() if CANARY.encode() in content] == ["rerun.json"]

    again = json.loads(folder.rerun_json.read_text())
    assert again["command"][-len(TYPED) :] == list(TYPED), "what it takes to run it again is there"
    assert (again["cwd"], again["python"]) == (str(tmp_path), sys.executable)
    command = folder.read_info().command
    assert command[-4:] == ["--tokenizer", "gpt2", "--max-tokens", "512"]
    assert command[-len(TYPED) :][:3] == ["--api-key", "[redacted]", "--db-password=[redacted]"]
    assert b"a hook" in written[next(name for name in written if name.endswith("counters.bin"))]

    file, inner = (0o640, 0o750) if shared else (0o600, 0o700)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [folder.path, *folder.path.rglob("*")]}
    wrong = {path: oct(mode) for path, mode in modes.items() if mode != (inner if path.is_dir() else file)}
    by_hand = ("report.html", "findings.json", "tensorboard")  # written by this process, which does not share
    wrong = {path: mode for path, mode in wrong.items() if not any(name in str(path) for name in by_hand)}
    assert wrong == ({folder.rerun_json: "0o600"} if shared else {})


def test_doctor_tells_no_secret(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MALLOC_CONF", f"password={CANARY},background_thread:true")
    for words in (["doctor"], ["doctor", "--json"]):
        cli.main(words)
        said = capsys.readouterr().out
        assert "MALLOC_CONF" in said
        assert "background_thread:true" in said
        assert CANARY not in said


# --- children of dsprof's own -------------------------------------------------------------------------

COMPILER = """#!/bin/sh
while [ $# -gt 1 ]; do [ "$1" = -o ] && cp {helper} "$2"; shift; done
"""


@pytest.fixture
def hostile_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with modules of names that every program imports, and the file that they would leave."""
    place = tmp_path / "place"
    place.mkdir()
    for name in ("torch", "json", "struct", "pickle", "os", "sysconfig", "pathlib", "hashlib", "dsprof"):
        (place / f"{name}.py").write_text(f"open({str(tmp_path / 'was-imported')!r}, 'a').write({name!r} + ' ')\n")
    monkeypatch.chdir(place)
    return tmp_path / "was-imported"


def test_no_child_of_ours_imports_from_the_working_directory(
    tmp_path: Path, hostile_place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_helper()
    helper = build.ensure(Path(sys.executable), print)
    assert "place" not in build.probe_target(Path(sys.executable)).torch_folder
    fake = tmp_path / "compiler"
    fake.write_text(COMPILER.format(helper=helper))
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    monkeypatch.setenv("DSPROF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(places.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    assert build.ensure(Path(sys.executable), print).is_relative_to(tmp_path / "cache"), "its trial import went well"
    assert peak.measure(["float32"], 1, None, 0.01)["float32"] > 0
    local = scratch.stand_in(tmp_path / "run", tmp_path / "local") / "capture" / "rank00000.0.here.1"
    scratch.make_private(local)
    scratch.start_copier(local, tmp_path / "run", "here")
    (local / ".closed").touch()
    with kineto._nothing_from_here(), ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(os.getpid).result() != os.getpid()
    assert not hostile_place.exists(), hostile_place.read_text()


def test_the_job_imports_what_lies_beside_it(tmp_path: Path) -> None:
    """-P is for our own processes only."""
    (tmp_path / "colleague.py").write_text("print('imported')\n")
    (tmp_path / "train.py").write_text("import sys, colleague\nprint(sys.flags.safe_path)\n")
    finished = profile(tmp_path, tmp_path / "train.py", ranks=1, flags=("--native", "off"))
    assert finished.stdout == "imported\nFalse\n", finished.stderr
