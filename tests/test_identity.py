"""Which rank a process is, where its capture goes, and how ranks are named and told to have ended."""

from __future__ import annotations

import datetime
import socket
from pathlib import Path

import pytest

from dsprof.collectors.capture import identity
from dsprof.collectors.capture.identity import Identity, run_folder, selected
from dsprof.names import host_name, new_run_id
from dsprof.ranges import parse_ranks
from dsprof.run import RankExit, failures, last_processes
from dsprof.settings import SettingsError, load


@pytest.mark.parametrize(
    ("text", "chosen"),
    [("", []), (" ", []), ("0", [0]), ("0,2-3", [0, 2, 3]), (" 1 , 4-4", [1, 4])],
)
def test_ranks_are_chosen(text: str, chosen: list[int]) -> None:
    assert [rank for part in parse_ranks(text) for rank in part] == chosen
    assert [rank for rank in range(6) if selected(rank, text)] == (chosen or list(range(6)))


@pytest.mark.parametrize("text", ["x", "0,", ",", "1-", "-1", "3-1", "0 1", "²"])
def test_what_names_no_ranks_is_refused_by_rank_and_launcher_alike(text: str) -> None:
    message = "is not a list of ranks; write ranks and ranges, such as 0,2-3"
    with pytest.raises(ValueError, match=message):
        selected(0, text)
    with pytest.raises(SettingsError, match=f"^--ranks: .*{message}$"):
        load({"ranks": text})


@pytest.mark.parametrize(
    ("host", "name"), [("node.a", "node.a"), ("node.b", "node.b"), ("a/b", "a_b"), ("", "localhost")]
)
def test_host_names_stay_apart(host: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert host_name() == name


@pytest.mark.parametrize(
    ("name", "start"),
    [("train", "train-"), ("my job/x", "my-job-x-"), ("-c", "c-"), ("--", "run-"), ("ümlaut", "mlaut-")],
)
def test_a_run_id_is_safe_as_a_file_name(name: str, start: str) -> None:
    now = datetime.datetime(2026, 11, 20, 9, 8, 7, tzinfo=datetime.UTC)
    head, _, tail = new_run_id(name, now).rpartition("-")
    assert head == f"{start}20261120T090807Z"
    assert len(tail) == 6


class Store(dict[str, bytes]):
    """The job's store, as far as it is used."""

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self.setdefault(key, value.encode())


def who(rank: int) -> Identity:
    return Identity(rank=rank, world_size=2, local_rank=rank, restart=0, host="host", pid=100 + rank)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    monkeypatch.setattr(identity, "_job_store", lambda: store)
    monkeypatch.setenv("DSPROF_DIR", str(tmp_path / "out"))
    monkeypatch.delenv("DSPROF_RUN", raising=False)
    return store


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_first_rank_names_the_folder_once_and_makes_nothing(
    store: Store, tmp_path: Path, order: tuple[int, int]
) -> None:
    first, second = order
    folder = run_folder(who(first))
    assert folder.parent == tmp_path / "out"
    assert run_folder(who(second)) == run_folder(who(first)) == folder
    assert not folder.parent.exists()


def test_in_a_store_of_torchs_the_first_name_stays(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    real = dist.PrefixStore("default_pg", dist.HashStore())
    monkeypatch.setattr(identity, "_job_store", lambda: real)
    assert run_folder(who(1)) == run_folder(who(0))


def gone(rank: int, code: int, *, host: str = "a", restart: int = 0, stopped: bool = False, at: int = 0) -> RankExit:
    return RankExit(rank, host, 0, code, None, at, restart, stopped)


def test_restarts_are_counted_by_each_host() -> None:
    # Rank 1 failed on a, which restarted; b's launcher only saw the membership change, and counts no restart.
    exits = [
        gone(0, 1, stopped=True), gone(1, 7, at=1), gone(0, 0, restart=1), gone(1, 0, restart=1),
        gone(2, 1, host="b", stopped=True), gone(3, 1, host="b", stopped=True), gone(2, 0, host="b"),
        gone(3, 9, host="b", at=5),
    ]  # fmt: skip
    assert [(item.rank, item.code) for item in last_processes(exits)] == [(0, 0), (1, 0), (2, 0), (3, 9)]
    assert [item.rank for item in failures(exits)] == [3]


def test_a_rank_that_moved_to_another_host_ended_there() -> None:
    exits = [
        gone(0, 1, stopped=True), gone(1, 7), gone(2, 0, restart=1), gone(3, 0, restart=1),
        gone(2, 1, host="b", stopped=True), gone(3, 1, host="b", stopped=True), gone(0, 0, host="b"),
        gone(1, 0, host="b"),
    ]  # fmt: skip
    assert [(item.rank, item.host, item.code) for item in last_processes(exits)] == [
        (0, "b", 0), (1, "b", 0), (2, "a", 0), (3, "a", 0),
    ]  # fmt: skip
    assert failures(exits) == []


@pytest.mark.parametrize(
    ("code", "signal", "how"),
    [(7, None, "exit status 7"), (None, 9, "SIGKILL"), (None, 99, "signal 99"), (None, None, "running or unknown")],
)
def test_how_a_rank_ended(code: int | None, signal: int | None, how: str) -> None:
    assert RankExit(0, "a", 1, code, signal, None).how == how
