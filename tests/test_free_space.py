"""How much a capture may take: of a disk what is free, of memory a part of what the job can still get."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dsprof.collectors.capture import free_space

MiB = 1 << 20
MEMINFO = "MemTotal:       65536000 kB\nMemAvailable:   {} kB\n"


def host(tmp_path: Path, available_mib: int, cgroup: str, files: dict[str, str]) -> Path:
    files = {
        "proc/meminfo": MEMINFO.format(available_mib << 10),
        "proc/self/cgroup": cgroup,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_hosts_memory_where_no_cgroup_limits_it(tmp_path: Path) -> None:
    files = {"jobs/memory.max": "max\n", "jobs/memory.current": "5\n"}
    assert free_space.memory_left(host(tmp_path, 800, "0::/jobs\n", files)) == 800 * MiB
    assert free_space.memory_left(tmp_path / "nothing is told") is None


def test_the_cgroup_above_that_has_least_left(tmp_path: Path) -> None:
    files = {
        "jobs/mine/memory.max": f"{900 * MiB}\n", "jobs/mine/memory.current": f"{100 * MiB}\n",
        "jobs/memory.max": f"{500 * MiB}\n", "jobs/memory.current": f"{450 * MiB}\n",
        "jobs/memory.stat": f"anon 7\ninactive_file {30 * MiB}\nactive_file 9\n",
    }  # fmt: skip
    assert free_space.memory_left(host(tmp_path, 800, "0::/jobs/mine\n", files)) == 80 * MiB


def test_a_cgroup_of_version_1_in_a_container(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": f"{300 * MiB}\n", "memory/memory.usage_in_bytes": f"{100 * MiB}\n",
        "memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {20 * MiB}\n",
    }  # fmt: skip
    text = "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n"
    assert free_space.memory_left(host(tmp_path, 800, text, files)) == 200 * MiB + 1
    files = {"memory/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n", "memory/memory.usage_in_bytes": "5\n"}
    assert free_space.memory_left(host(tmp_path, 800, text, files)) == 800 * MiB


def test_a_cgroup_beyond_its_limit_has_nothing_left(tmp_path: Path) -> None:
    files = {"memory.max": "4096\n", "memory.current": "8192\n"}
    assert free_space.memory_left(host(tmp_path, 800, "0::/\n", files)) == 0


def test_of_memory_a_quarter_is_for_captures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(free_space.shutil, "disk_usage", lambda folder: usage(10, 5, 900 * MiB))
    monkeypatch.setattr(free_space, "memory_left", lambda: 800 * MiB)
    assert free_space.free_bytes(tmp_path, "ext4") == 900 * MiB
    assert free_space.free_bytes(tmp_path, "tmpfs") == 200 * MiB
    monkeypatch.setattr(free_space.shutil, "disk_usage", lambda folder: usage(10, 5, 100 * MiB))
    assert free_space.free_bytes(tmp_path, "tmpfs") == 100 * MiB
    monkeypatch.setattr(free_space.shutil, "disk_usage", lambda folder: usage(0, 0, 0))
    assert free_space.free_bytes(tmp_path, "ramfs") == 200 * MiB


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({"LOCAL_WORLD_SIZE": "8"}, 8),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, 4),
        ({"SLURM_NTASKS_PER_NODE": "6", "SLURM_TASKS_PER_NODE": "2"}, 6),
        ({"SLURM_TASKS_PER_NODE": "8(x2),4", "SLURM_NODEID": "1"}, 8),
        ({"SLURM_TASKS_PER_NODE": "8(x2),4", "SLURM_NODEID": "2"}, 4),
        ({"SLURM_TASKS_PER_NODE": "8(x2)", "SLURM_NODEID": "7"}, 16),
        ({"LOCAL_WORLD_SIZE": "many"}, 16),
        ({}, 16),
    ],
)
def test_ranks_of_this_host(environ: dict[str, str], ranks: int) -> None:
    assert free_space.ranks_here(environ, 16) == ranks


@pytest.mark.parametrize(
    ("files", "removed"),
    [
        ({}, True),
        ({"etc/systemd/logind.conf": "[Login]\n#RemoveIPC=no\n"}, True),
        ({"etc/systemd/logind.conf": "[Login]\nRemoveIPC=no\n"}, False),
        (
            {
                "etc/systemd/logind.conf": "RemoveIPC=no\n",
                "etc/systemd/logind.conf.d/a.conf": "[Login]\nRemoveIPC=yes\n",
            },
            True,
        ),
        ({"run/systemd/logind.conf.d/a.conf": "[Login]\nRemoveIPC=no\n"}, False),
        (
            {
                "usr/lib/systemd/logind.conf.d/b.conf": "[Login]\nRemoveIPC=yes\n",
                "etc/systemd/logind.conf.d/a.conf": "[Login]\nRemoveIPC=no\n",
            },
            True,
        ),
        (
            {
                "usr/lib/systemd/logind.conf.d/a.conf": "[Login]\nRemoveIPC=no\n",
                "etc/systemd/logind.conf.d/a.conf": "[Login]\nRemoveIPC=yes\n",
            },
            True,
        ),
    ],
)
def test_what_systemd_removes_at_logout(tmp_path: Path, files: dict[str, str], removed: bool) -> None:
    (tmp_path / "run/systemd/users").mkdir(parents=True)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert free_space.is_removed_at_logout(1000, tmp_path) == removed
    assert not free_space.is_removed_at_logout(0, tmp_path)
    assert not free_space.is_removed_at_logout(1000, tmp_path / "no systemd")


@pytest.mark.parametrize(
    ("environ", "processes", "mounts", "ends"),
    [
        ({}, 4026531836, 4026531840, False),
        ({}, 4026531836, 4026531832, False),
        ({"SLURM_JOB_ID": ""}, 4026531836, 4026531841, False),
        ({}, 4026532301, 4026531840, True),
        ({}, 4026531836, 4026532299, True),  # a /dev/shm of its own, as Slurm's job_container/tmpfs makes it
        ({"SLURM_JOB_ID": "7"}, 4026531836, 4026531840, True),
        ({"PBS_JOBID": "7.server"}, 4026531836, 4026531840, True),
    ],
)
def test_where_memory_may_be_gone_with_the_job(
    tmp_path: Path, environ: dict[str, str], processes: int, mounts: int, ends: bool
) -> None:
    (tmp_path / "pid").symlink_to(f"pid:[{processes}]")
    (tmp_path / "mnt").symlink_to(f"mnt:[{mounts}]")
    assert free_space.ends_with_job(environ, tmp_path) == ends
