"""Ranks of the job that were not captured, and on whose cores they may run.

Launchers give each host as many ranks as the others, of consecutive numbers or in turn: so the numbers of those that
were captured tell where the others are. Where they leave several ways open, each set of cores counts the most that any
of them gives it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import ceil

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
                found[place] = on_host[host]
            elif any(room.values()):
                found[place] = min(on_host[host], room[place])
            elif largest > 1:
                found[place] = on_host[host]
    return found


def _by_host(host_of: Mapping[int, str], missing: Sequence[int], world: int) -> Counter[str]:
    """How many of the missing ranks may run on each host."""
    hosts = len(set(host_of.values()))
    ways: list[Callable[[int], int]] = []
    for count in (one for one in range(1, world + 1) if world % one == 0):
        ways += [lambda rank, each=count: rank // each, lambda rank, of=count: rank % of]  # type: ignore[misc]
    found: Counter[str] = Counter()
    for way in ways:
        host_at = _hosts_by(way, host_of)
        if host_at is not None:
            found |= Counter(host_at[way(rank)] for rank in missing if way(rank) in host_at)
    if any(_hosts_by(way, host_of) is not None for way in ways):
        return found
    return Counter(dict.fromkeys(host_of.values(), ceil(len(missing) / hosts)))


def _hosts_by(way: Callable[[int], int], host_of: Mapping[int, str]) -> dict[int, str] | None:
    """Number that a way gives a host -> the host; None where the captured ranks were not dealt out like this."""
    found: dict[int, str] = {}
    for rank, host in host_of.items():
        if found.setdefault(way(rank), host) != host:
            return None
    return found if len(set(found.values())) == len(found) else None
