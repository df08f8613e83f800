"""Ranks of the job that were not captured, and on whose cores they may run.

A launcher gives each host consecutive ranks: one that is not there runs where those before and after it do. What is not
known counts as the worst: it may be on several hosts, or on each of a host's sets of cores.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby
from math import ceil

from dsprof.run import RunInfo


def uncaptured_on(run: RunInfo, sets: Sequence[tuple[int, ...]]) -> list[int]:
    """Of each set of captured ranks that share cores, how many more may share them."""
    host_of = {item.rank: item.host for item in run.ranks}
    missing = [rank for rank in range(run.world_size or 0) if rank not in host_of]
    if not missing or not sets:
        return [0] * len(sets)
    on_host = _by_host(host_of, missing)
    largest = max(map(len, sets))
    of_host: dict[str, list[int]] = defaultdict(list)
    for place, ranks in enumerate(sets):
        of_host[host_of.get(ranks[0], "")].append(place)
    found = [0] * len(sets)
    for host, places in of_host.items():
        smaller = [place for place in places if len(sets[place]) < largest]
        if len(places) > 1 and largest == 1:  # each rank has cores of its own, and so have those that are missing
            continue
        for place in smaller or places:
            room = largest - len(sets[place]) if smaller and len(places) > 1 else on_host[host]
            found[place] = min(on_host[host], room)
    return found


def _by_host(host_of: Mapping[int, str], missing: Sequence[int]) -> Counter[str]:
    """How many of the missing ranks may run on each host."""
    captured = sorted(host_of)
    blocks = [host for host, _ in groupby(host_of[rank] for rank in captured)]
    hosts = set(blocks)
    if len(blocks) > len(hosts):  # ranks were dealt to the hosts one by one
        return Counter(dict.fromkeys(hosts, ceil(len(missing) / len(hosts))))
    count = Counter(host_of.values())
    most = max(count.values())
    found: Counter[str] = Counter()
    for rank in missing:
        place = bisect(captured, rank)
        beside = {host_of[one] for one in captured[max(place - 1, 0) : place + 1]}
        smaller = {host for host in beside if count[host] < most}
        found.update(smaller or beside)
    return found
