"""What makes a rank's machine slower than the others': read from made-up /proc and /sys, and named as the cause of a
late rank, never as a certain one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_late_cause import cause, late, on

from dsprof import gauges
from dsprof.collectors.host import machine_pace

# --- read from the kernel's files


def write(root: Path, **files: str) -> Path:
    """Files by their paths, with `__` for each `/`."""
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def stat_on(core: int) -> str:
    return f"7 (python) R {' '.join(['0'] * 35)} {core} 0 0"


@pytest.fixture
def stated(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(machine_pace, "state", found.append)
    return found


def test_the_clock_of_the_core_that_the_rank_runs_on(tmp_path: Path, stated: list[dict[str, Any]]) -> None:
    proc = write(tmp_path / "proc", self__stat=stat_on(3))
    files = {"scaling_cur_freq": "1200000\n", "cpuinfo_max_freq": "3500000\n", "scaling_max_freq": "1200000\n",
             "scaling_governor": "powersave\n"}  # fmt: skip
    sys = write(tmp_path / "sys", **{f"devices__system__cpu__cpu3__cpufreq__{name}": of for name, of in files.items()})
    assert list(machine_pace.read_clock(str(proc), str(sys))) == [(gauges.CORE_CLOCK, 1200.0)]
    machine_pace.state_machine(str(proc), str(sys))
    assert stated == [{"fact": "core_clock", "could_mhz": 3500.0, "may_mhz": 1200.0, "governor": "powersave"}]


@pytest.mark.parametrize(
    ("maps", "memory"),
    [("00400000 default file=/usr/bin/python", [0, 1]), ("00400000 bind:0 file=/usr/bin/python", [0]),
     ("00400000 prefer=static:0 file=/usr/bin/python", [0]), ("", [0, 1])],
)  # fmt: skip
def test_the_nodes_of_cores_and_memory(
    tmp_path: Path, stated: list[dict[str, Any]], maps: str, memory: list[int]
) -> None:
    status = "Name:\tpython\nCpus_allowed_list:\t8-11\nMems_allowed_list:\t0-1\n"
    proc = write(tmp_path / "proc", self__status=status, self__numa_maps=maps)
    nodes = {"devices__system__node__node0__cpulist": "0-7\n", "devices__system__node__node1__cpulist": "8-15\n"}
    machine_pace.state_machine(str(proc), str(write(tmp_path / "sys", **nodes)))
    assert stated == [{"fact": "numa", "nodes": 2, "of_cores": [1], "of_memory": memory}]


def test_one_node_is_no_matter(tmp_path: Path, stated: list[dict[str, Any]]) -> None:
    proc = write(tmp_path / "proc", self__status="Cpus_allowed_list:\t0-3\nMems_allowed_list:\t0\n")
    machine_pace.state_machine(str(proc), str(write(tmp_path / "sys", devices__system__node__node0__cpulist="0-3\n")))
    assert stated == []


def test_the_network(tmp_path: Path, stated: list[dict[str, Any]]) -> None:
    snmp = "Ip: Forwarding\nIp: 1\nTcp: RtoMin OutSegs RetransSegs\nTcp: 200 5000 40\nUdp: InDatagrams\nUdp: 3\n"
    proc = write(tmp_path / "proc", self__net__snmp=snmp)
    assert list(machine_pace.read_network(str(proc))) == [(gauges.SEGMENTS_SENT, 5000), (gauges.SEGMENTS_AGAIN, 40)]
    cards = {"eth0": ("1000", "up", "1"), "eth1": ("10000", "down", "1"), "lo": ("100000", "up", "772"),
             "wifi": ("-1", "up", "1")}  # fmt: skip
    virtual = {f"cali{number}": ("10000", "up", "1") for number in range(10)}
    files = {
        f"class__net__{name}__{what}": value for name, values in (cards | virtual).items()
        for what, value in zip(("speed", "operstate", "type"), values, strict=True)
    }  # fmt: skip
    files |= {f"class__net__{name}__device__vendor": "0x1d0f" for name in cards if name != "lo"}
    machine_pace.state_machine(str(proc), str(write(tmp_path / "sys", **files)))
    assert stated == [{"fact": "network", "mbit_per_s": {"eth0": 1000}}]


def test_what_a_system_does_not_tell_is_left_out(tmp_path: Path, stated: list[dict[str, Any]]) -> None:
    nothing = str(tmp_path)
    assert [list(read) for read in (machine_pace.read_clock(nothing, nothing), machine_pace.read_network(nothing))] == [
        [], [],
    ]  # fmt: skip
    machine_pace.state_machine(nothing, nothing)
    machine_pace.state_machine()
    assert [fact["fact"] for fact in stated if fact["fact"] not in ("numa", "core_clock", "network")] == []


# --- named as the cause


def level(mine: float, others: float) -> Any:
    """A gauge that stays as it is: synthetic ones rise, so it does so in the first step only."""
    return lambda rank, step: (1e3 * (mine if rank == 1 else others)) if step == 0 else 0.0


def numa(rank: int, memory: int) -> dict[str, Any]:
    return {"fact": "numa", "rank": rank, "nodes": 2, "of_cores": [1], "of_memory": [memory]}


NEAR = [numa(0, 1), numa(2, 1)]
SPEEDS = [{"fact": "network", "rank": rank, "mbit_per_s": {"eth0": 1000 if rank == 1 else 10000}} for rank in range(3)]
SENT = {gauges.SEGMENTS_SENT: on(1e6, 1e6), gauges.SEGMENTS_AGAIN: on(2e4, 10.0)}


@pytest.mark.parametrize(
    ("measured", "facts", "cpu_share", "name", "words", "fix"),
    [
        ({gauges.CORE_CLOCK: level(1200, 3400)},
         [{"fact": "core_clock", "rank": 1, "could_mhz": 3500.0, "may_mhz": 1200.0, "governor": "powersave"}], 0.95,
         "core-clock, probably", "its cores run at 1,200 MHz, and those of the others at 3,400",
         "look at the clocks of rank 1: its clock is limited to 1,200 MHz: `cpupower frequency-set -u 3500MHz`"),
        ({}, [numa(1, 0), *NEAR], 0.95, "numa, probably", "its cores are on NUMA node 1 and its memory on node 0",
         "bind rank 1 to the memory of its own cores: numactl --cpunodebind=1 --membind=1"),
        (SENT, [], 0.1, "network, probably", "its host sends 2.0 % of its TCP segments again, and the others <0.1 %",
         "look at the network of rank 1"),
        ({}, SPEEDS, 0.1, "network, probably", "its fastest network interface does 1,000 Mbit/s, and that",
         "look at the network of rank 1"),
    ],
    ids=["clock", "numa", "segments", "interface"],
)  # fmt: skip
def test_a_slower_machine(
    measured: dict[str, Any], facts: list[dict[str, Any]], cpu_share: float, name: str, words: str, fix: str
) -> None:
    found = late(measured, *facts, cpu_share=cpu_share, jitter=0.0)
    assert cause(found) == name
    assert words in found.title
    assert found.fixes[0].title.startswith(fix)


@pytest.mark.parametrize(
    ("measured", "facts", "cpu_share"),
    [
        ({gauges.CORE_CLOCK: level(1200, 1200)}, [], 0.95),  # all are slow
        ({gauges.CORE_CLOCK: level(1200, 3400)}, [], 0.1),  # it sleeps: its clock is low since it does
        ({gauges.CORE_CLOCK: level(3200, 3400)}, [], 0.95),  # too little
        ({}, [numa(1, 0), numa(0, 0), numa(2, 0)], 0.95),  # so is that of the others
        ({}, [numa(1, 1), *NEAR], 0.95),
        ({}, [numa(1, 0), *NEAR], 0.1),  # it does not compute longer
        (SENT, [], 0.95),  # it computes
        ({gauges.SEGMENTS_SENT: on(1e6, 1e6), gauges.SEGMENTS_AGAIN: on(2e4, 2e4)}, [], 0.1),
    ],
)
def test_what_is_no_slower_machine(measured: dict[str, Any], facts: list[dict[str, Any]], cpu_share: float) -> None:
    assert cause(late(measured, *facts, cpu_share=cpu_share, jitter=0.0)).startswith("not known")
