"""Ranks of the job that were not captured, and on whose cores they may run.

Launchers give each host as many ranks as the others, of consecutive numbers or in turn: so the numbers of those that
were captured tell where the others are. Where they leave several ways open, each set of cores counts the most that any
of them gives it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import ceil
from operator import floordiv, mod

from dsprof.run import RunInfo


def uncaptured_on(run: RunInfo, sets: Sequence[tuple[int, ...]]) -> list[int]:
    """Of each set of captured ranks that share cores, how many more may share them."""
    host_of = {item.rank: item.host for item in run.ranks}
    missing = [rank for rank in range(run.world_size or 0) if rank not in host_of]
    if not missing or not sets:
        return [0] * len(sets)
    on_host = _by_host(host_of, missing, run.world_size or 0)
    of_host: dict[str, list[int]] = defaultdict(list)
    for place, ranks in enumerate(sets):
        of_host[host_of.get(ranks[0], "")].append(place)
    largest = max(map(len, sets))
    divided = any(len(places) > 1 for places in of_host.values())  # hosts' cores are divided among their ranks
    found = [0] * len(sets)
    for host, places in of_host.items():
        room = {place: largest - len(sets[place]) for place in places}
        for place in places:
            if not divided:
                found[place] = on_host.get(host, 0)
            elif any(room.values()):
                found[place] = min(on_host.get(host, 0), room[place])
            elif largest > 1:  # else each has a core of its own, and so have those that are missing
                found[place] = on_host.get(host, 0)
    return found


def _by_host(host_of: Mapping[int, str], missing: Sequence[int], world: int) -> Mapping[str, int]:
    """How many of the missing ranks may run on each host."""
    hosts = set(host_of.values())
    ways = [(of, count) for count in range(1, world + 1) if world % count == 0 for of in (floordiv, mod)]
    most: Counter[str] | None = None
    for host_number, count in ways:
        host_at = _numbered({rank: host_number(rank, count) for rank in host_of}, host_of)
        if host_at is not None:
            there = [host_number(rank, count) for rank in missing]
            most = (most or Counter()) | Counter(host_at[number] for number in there if number in host_at)
    return dict.fromkeys(hosts, ceil(len(missing) / len(hosts))) if most is None else most


def _numbered(number_of: Mapping[int, int], host_of: Mapping[int, str]) -> dict[int, str] | None:
    """Number -> the host whose ranks have it; None where ranks of one number are on several, or a host has several."""
    found = {number: host_of[rank] for rank, number in number_of.items()}
    alike = all(found[number] == host_of[rank] for rank, number in number_of.items())
    return found if alike and len(set(found.values())) == len(found) else None
