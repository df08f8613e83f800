"""Ranks analyzed by a Dask cluster: a real scheduler and workers on loopback, where `distributed` is installed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from synthetic import Job, write_capture
from test_map_ranks import assert_equal

from dsprof import cli, reports
from dsprof.run import RunFolder
from dsprof.trace import Trace, dask_cluster
from dsprof.trace.cluster_worker import WorkerRefused, check, common_with, sentence
from dsprof.trace.dask_cluster import ClusterError, ClusterExecutor, cluster
from dsprof.trace.load import EVERY_COLUMN
from dsprof.trace.map_ranks import map_ranks

ROOT = Path(__file__).parents[1]


def captured(folder: Path, ranks: int = 4) -> RunFolder:
    for capture in Job(ranks=ranks, steps=24, forward=lambda rank, step: 60 if rank == 1 else 40).captures().values():
        write_capture(capture, folder / "capture")
    return RunFolder(folder)


@contextmanager
def workers(count: int, **given: Any) -> Iterator[Any]:
    distributed = pytest.importorskip("distributed", reason="needs the extra `dask`")
    settings = {"threads_per_worker": 2, "processes": True, "dashboard_address": ":0", "silence_logs": 50, **given}
    with distributed.LocalCluster(n_workers=count, **settings) as local:
        yield local


@pytest.fixture(scope="module")
def two() -> Iterator[Any]:
    """A scheduler and two workers, which their nannies start again."""
    with workers(2) as local:
        yield local


def silent(text: str) -> None:
    raise AssertionError(text)


def test_workers_find_what_one_process_does(two: Any, tmp_path: Path) -> None:
    there, here = captured(tmp_path / "there"), captured(tmp_path / "here")
    with cluster(two.scheduler_address, there, silent) as executor:
        together = reports.measure(there, executor=executor)
    alone = reports.measure(here, jobs=1)
    assert_equal(alone, together)
    for rank in alone.trace.ranks:
        pd.testing.assert_frame_equal(alone.trace.read(rank), together.trace.read(rank), check_exact=True)
    assert together.run.warnings == alone.run.warnings
    assert [path.name for path in sorted(there.trace.iterdir())] == [f"rank{rank:05d}.parquet" for rank in range(4)]


class Deadly:
    """A source that kills the worker that first reads one of its ranks."""

    def __init__(self, trace: Trace, rank: int, done: Path) -> None:
        self._source, self._rank, self._done = trace.source, rank, done
        self.ranks, self._here = trace.ranks, os.getpid()

    def read(self, rank: int, columns: Sequence[str] = EVERY_COLUMN) -> pd.DataFrame:
        if rank == self._rank and not self._done.exists() and os.getpid() != self._here:
            self._done.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)
        return self._source.read(rank, columns)


def test_a_worker_that_is_killed_in_the_middle_changes_nothing(two: Any, tmp_path: Path) -> None:
    from dsprof.analyzer.study import study
    from dsprof.trace.strings import plain_strings

    folder, killed = captured(tmp_path / "run"), tmp_path / "killed"
    whole = Job(ranks=4, steps=24).trace()
    with plain_strings(), cluster(two.scheduler_address, folder, silent) as executor:
        measured = study(replace(whole, source=Deadly(whole, 2, killed)), executor)
        assert int(killed.read_text()) != os.getpid()
        assert_equal(study(whole), measured)


class Lethal:
    """Kills every worker, and is harmless here."""

    def __init__(self) -> None:
        self._here = os.getpid()

    def __call__(self, rank: int) -> int:
        if os.getpid() != self._here:
            os.kill(os.getpid(), signal.SIGKILL)
        return 2 * rank


@pytest.mark.slow
def test_without_a_worker_left_ranks_are_done_here(tmp_path: Path) -> None:
    folder = captured(tmp_path, ranks=1)
    with workers(1) as local:
        import distributed

        told: list[str] = []
        with distributed.Client(local, set_as_default=False) as client:
            executor = ClusterExecutor(client, "here", common_with(folder), told.append, patience_s=1.0)
            executor.find_workers()
            for worker in local.workers.values():
                worker.auto_restart = False
            assert map_ranks(Lethal(), (0, 1, 2), executor).found == {0: 0, 1: 2, 2: 4}
            executor.shutdown()
            assert len(told) == 1
            assert told[0].startswith("here: 3 tasks failed there, so their ranks were analyzed in this process (")
            with pytest.raises(RuntimeError, match="after shutdown"):
                executor.submit(len, "")


def test_a_worker_that_cannot_see_the_run_is_refused(tmp_path: Path) -> None:
    folder = captured(tmp_path / "run")
    wanted = common_with(folder)
    check(wanted)
    check.cache_clear()
    meta = sorted(folder.capture.iterdir())[3] / "meta.json"
    content = meta.read_text()
    meta.write_text(content + " ")
    with pytest.raises(WorkerRefused, match=r"rank00003\.\S+/meta\.json is another file than the one here"):
        check(wanted)
    meta.unlink()
    with pytest.raises(WorkerRefused, match=r"it cannot read /\S+meta\.json \(No such file or directory\); put"):
        check(wanted)
    meta.write_text(content)
    check(wanted)


def test_a_worker_with_other_code_or_packages_is_refused(tmp_path: Path) -> None:
    wanted = common_with(captured(tmp_path, ranks=1))
    with pytest.raises(WorkerRefused, match="its dsprof is not the one that is installed here"):
        check(replace(wanted, code="0"))
    other = tuple((name, "1.0" if name == "pandas" else version) for name, version in wanted.versions)
    with pytest.raises(WorkerRefused, match=f"it has pandas {re.escape(pd.__version__)}, and 1.0 is here"):
        check(replace(wanted, versions=other))


def test_workers_are_refused_in_one_sentence() -> None:
    assert sentence([("tcp://a:1", "no files"), ("tcp://b:1", "old"), ("tcp://b:2", "old")]) == (
        "worker tcp://a:1: no files; 2 workers, tcp://b:1, tcp://b:2: old"
    )


@pytest.mark.slow
def test_a_worker_of_another_dsprof_gets_no_ranks(two: Any, tmp_path: Path) -> None:
    for name in ("dsprof", "engine", "collectors", "reports"):
        shutil.copytree(ROOT / name, tmp_path / "other" / name, symlinks=True)
    changed = tmp_path / "other" / "dsprof" / "trace" / "files.py"
    changed.write_text(changed.read_text() + "\n# older\n")
    command = [sys.executable, "-m", "distributed.cli.dask_worker", two.scheduler_address, "--no-nanny",
               "--no-dashboard", "--nthreads", "1"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "other")}
    other = subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.DEVNULL)
    told: list[str] = []
    try:
        deadline = time.monotonic() + 120
        while len(two.scheduler.workers) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
        folder = captured(tmp_path / "run")
        with cluster(two.scheduler_address, folder, told.append) as executor:
            together = reports.examine(folder, executor=executor)
    finally:
        other.kill()
        other.wait()
    assert len(told) == 1
    assert re.fullmatch(r"left out: worker tcp://\S+: its dsprof is not the one .* on all workers", told[0])
    assert together.ranks_captured == (0, 1, 2, 3)


def certificates(folder: Path) -> dict[str, str]:
    """A key and its certificate, which signs itself."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    key, certificate = str(folder / "key.pem"), str(folder / "certificate.pem")
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=dsprof"]
    subprocess.run([*made, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    return {"ca-file": certificate, **{f"{who}.{what}": path for who in ("client", "scheduler", "worker")
                                      for what, path in (("cert", certificate), ("key", key))}}  # fmt: skip


@pytest.mark.slow
def test_a_cluster_behind_tls(tmp_path: Path) -> None:
    dask = pytest.importorskip("dask")
    distributed = pytest.importorskip("distributed", reason="needs the extra `dask`")
    folder = captured(tmp_path / "run", ranks=2)
    tls = {f"distributed.comm.tls.{name}": path for name, path in certificates(tmp_path).items()}
    with dask.config.set(tls):
        security = distributed.Security(require_encryption=True)
        with workers(1, protocol="tls://", security=security) as local:
            assert local.scheduler_address.startswith("tls://")
            with cluster(local.scheduler_address, folder, silent) as executor:
                assert reports.examine(folder, executor=executor).ranks_captured == (0, 1)
            without = dict.fromkeys(tls)
            with (
                dask.config.set(without),
                pytest.raises(ClusterError, match="DASK_DISTRIBUTED__COMM__TLS__CA_FILE"),
                cluster(local.scheduler_address, folder, silent),
            ):
                pass


def test_the_command_line(two: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = captured(tmp_path / "run")
    assert cli.main(["analyze", str(folder.path), "--dask", two.scheduler_address]) == 0
    assert "rank 1 arrives" in capsys.readouterr().out
    assert folder.findings_json.exists()


def test_what_is_no_cluster_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(captured(tmp_path, ranks=1).path)
    assert cli.main(["analyze", folder, "--dask", "tcp://127.0.0.1:1", "--jobs", "2"]) == 2
    assert "give one of them" in capsys.readouterr().err
    with monkeypatch.context() as missing:
        missing.setitem(sys.modules, "distributed", None)
        assert cli.main(["analyze", folder, "--dask", "tcp://127.0.0.1:1"]) == 2
        assert "pip install 'dsprof[dask]'" in capsys.readouterr().err
    pytest.importorskip("distributed", reason="needs the extra `dask`")
    monkeypatch.setattr(dask_cluster, "CONNECT_S", 1)
    assert cli.main(["analyze", folder, "--dask", "tcp://127.0.0.1:1"]) == 2
    assert "tcp://127.0.0.1:1: no scheduler with workers answers there (Timed out" in capsys.readouterr().err
    assert cli.main(["analyze", folder, "--dask", "nonsense://a"]) == 2
    assert "nonsense://a: no scheduler with workers answers there (unknown address scheme" in capsys.readouterr().err
