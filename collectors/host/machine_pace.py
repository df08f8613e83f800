"""What makes a machine slower than those of other ranks: clocks of cores that are held down, memory on another node
than the cores, a network that is slower or loses packets.

What does not change is stated once, when looking begins; the rest is read once a second on a side thread
(`machine_load`). What a system does not tell is left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from dsprof import gauges

from ..hooking.statements import state
from ..system import proc

Reading = Iterable[tuple[str, float]]
"""Gauges with their values."""
SYS: Final = "/sys"
KHZ_A_MHZ: Final = 1000
MOST_INTERFACES: Final = 8
LOOPBACK: Final = "772"
"""As /sys/class/net/*/type has it."""
FIRST_MAPPINGS: Final = 512
"""Bytes of numa_maps: its first lines are of the program itself, and small; each has the policy of the process."""


def state_machine(root: str = proc.PROC, sys: str = SYS) -> None:
    """State where the process's memory may be and where its cores are, how fast those can be, and what its network
    interfaces are; nothing of what is not told."""
    for fact in (_numa(root, sys), _clock(root, sys), _network(sys)):
        if fact is not None:
            state(fact)


# --- clocks of cores


def read_clock(root: str, sys: str = SYS) -> Reading:
    """The clock of the core that the first thread ran on last."""
    core = _core(root)
    khz = "" if core is None else _word(Path(sys) / "devices/system/cpu" / f"cpu{core}" / "cpufreq/scaling_cur_freq")
    if khz.isdigit():
        yield gauges.CORE_CLOCK, int(khz) / KHZ_A_MHZ


def _clock(root: str, sys: str) -> dict[str, Any] | None:
    core = _core(root)
    folder = Path(sys) / "devices/system/cpu" / f"cpu{core}" / "cpufreq"
    could, may = _word(folder / "cpuinfo_max_freq"), _word(folder / "scaling_max_freq")
    if core is None or not could.isdigit():
        return None
    fact: dict[str, Any] = {"fact": "core_clock", "could_mhz": int(could) / KHZ_A_MHZ}
    if may.isdigit():
        fact["may_mhz"] = int(may) / KHZ_A_MHZ
    governor = _word(folder / "scaling_governor")
    return {**fact, "governor": governor} if governor else fact


def _core(root: str) -> int | None:
    fields = proc.stat("self", root)
    return int(fields[proc.LAST_CORE]) if len(fields) > proc.LAST_CORE else None


# --- nodes of memory


def _numa(root: str, sys: str) -> dict[str, Any] | None:
    """Only where the machine has several nodes."""
    nodes = {
        int(folder.name[4:]): numbers(_word(folder / "cpulist"))
        for folder in _folders(Path(sys) / "devices/system/node") if re.fullmatch(r"node\d+", folder.name)
    }  # fmt: skip
    if len(nodes) < 2:
        return None
    lines = proc.read(f"{root}/self/status", 8 * proc.ONCE).decode(errors="replace").splitlines()
    status = dict(line.split(":", 1) for line in lines if ":" in line)
    cores, memory = (numbers(status.get(name, "").strip()) for name in ("Cpus_allowed_list", "Mems_allowed_list"))
    policy = proc.read(f"{root}/self/numa_maps", FIRST_MAPPINGS).decode(errors="replace").split(" ")[1:2]
    bound = re.fullmatch(r"(?:bind|prefer)(?:=[a-z|]+)?:([\d,-]+)", policy[0]) if policy else None
    if bound:
        memory = numbers(bound[1])
    of_cores = sorted(node for node, cpus in nodes.items() if cpus & cores)
    if not of_cores or not memory:
        return None
    return {"fact": "numa", "nodes": len(nodes), "of_cores": of_cores, "of_memory": sorted(memory)}


def numbers(text: str) -> set[int]:
    """`0-3,8` as the kernel writes it; empty where it is no such list."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdigit() and (not last or last.isdigit()):
            found.update(range(int(first), int(last or first) + 1))
    return found


# --- network


def read_network(root: str) -> Reading:
    """TCP segments that were sent, and those of them that were sent again since nobody acknowledged them."""
    lines = [line.split() for line in proc.read(f"{root}/self/net/snmp", 8 * proc.ONCE).decode().splitlines()]
    names, values = (*(line for line in lines if line[:1] == ["Tcp:"]), [], [])[:2]
    told = dict(zip(names, values, strict=False))
    if told.get("RetransSegs", "").isdigit() and told.get("OutSegs", "").isdigit():
        yield gauges.SEGMENTS_SENT, int(told["OutSegs"])
        yield gauges.SEGMENTS_AGAIN, int(told["RetransSegs"])


def _network(sys: str) -> dict[str, Any] | None:
    """What the interfaces can do that are up. Virtual ones, of containers and bridges, always say the same and are
    none: without a device behind them."""
    speeds: dict[str, int] = {}
    real = [folder for folder in _folders(Path(sys) / "class/net") if os.path.exists(folder / "device")]
    for folder in real[:MOST_INTERFACES]:
        speed, is_up = _word(folder / "speed"), _word(folder / "operstate") == "up"
        if speed.isdigit() and int(speed) and is_up and _word(folder / "type") != LOOPBACK:
            speeds[folder.name] = int(speed)
    return {"fact": "network", "mbit_per_s": speeds} if speeds else None


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def _word(path: Path) -> str:
    return proc.read(path).decode(errors="replace").strip()


READERS: Final = (read_clock, read_network)
