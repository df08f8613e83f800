"""The link of a process group, and other links that it may as well be by what was seen: where all that was seen is of
one size, or of far fewer bytes than what is asked about."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, TypeAlias

import numpy as np

from ...graph.link import LARGE_BYTES, Link, fit_link
from ...whatif.select import Communications
from .dimensions import GRADIENT, Domain

SLOWEST_MS_PER_BYTE: Final = 1e-5
"""100 MB/s."""
SLOWEST_WIRE_MS_PER_BYTE: Final = 1e-4
"""10 MB/s."""
FAR: Final = 2.0
"""A link that was fitted to transfers of so many times fewer bytes does not tell how much of them the bytes took."""
IN_MOST: Final = 0.5
"""Of the steps that reduce gradients: what comes in fewer of them does not tell of their link."""
MOST_APART: Final = 0.25
"""Where other communications tell that gradients take so much more or less than they do, they go another way."""
UNTOLD_LATENCY_MS: Final = 2.0
"""Of a large transfer so much may be latency, where all that were seen are of one size; but at most half of it."""

Links: TypeAlias = dict[Communications, Link]
"""What is communicated, and the link that it moves over."""


def link_of_gradients(whole: Domain, gradients: Domain, group: str) -> Link:
    """The link of a process group, fitted to its gradients; where these are all of one size, to all that goes the same
    way over it (the loss, a norm), if that tells latency from bandwidth. whole: the dimension that the gradients are
    of."""
    mine = gradients.of_group(group)
    link = fit_link(mine, on_device=gradients.on_device)
    every = whole.of_group(group)
    every = every[every["name"].isin(mine["name"].unique())]
    others = every[~every["purpose"].isin(mine["purpose"].unique())]
    if link.fitted or others["step"].nunique() < IN_MOST * mine["step"].nunique():
        return link
    wider = fit_link(every, on_device=gradients.on_device)
    median = float(mine["bytes"].median())
    return wider if wider.fitted and agree(link, wider, median) else link


def links_of(whole: Domain, part: Domain) -> dict[str, Link]:
    """Of each group of a part of a dimension; where that is gradients, as `link_of_gradients` has it."""
    if set(part.table["purpose"]) != {GRADIENT}:
        return part.links()
    return {group: link_of_gradients(whole, part, group) for group in part.groups}


def links_of_kinds(domain: Domain) -> Links:
    """Of each process group and kind of collective. For as large a tensor each kind may put other bytes on the wire: a
    reduce-scatter of gloo moves twice what a gather does. What is all of one size does not tell its latency from its
    bandwidth: one line for all kinds of the group does, where it fits, or else the latency is that of the kind with
    most collectives whose sizes tell it."""
    found: Links = {}
    for group in domain.groups:
        kinds = {of: places for of, places in domain.kinds.items() if of.groups == (group,)}
        tables = {of: domain.table.take(places) for of, places in kinds.items()}
        own = {of: fit_link(table, on_device=domain.on_device) for of, table in tables.items()}
        fitted = [of for of, link in own.items() if link.fitted]
        most = max(fitted, key=lambda of: len(tables[of]), default=None)
        together = fit_link(domain.of_group(group), on_device=domain.on_device) if len(own) > len(fitted) else None
        for of, link in own.items():
            size = float(tables[of]["bytes"].median())
            if not link.fitted and together is not None and together.fitted and agree(link, together, size):
                link = together
            elif not link.fitted and most is not None:
                link = with_latency(link, own[most].latency_ms, size)
            found[of] = link
    return found


def agree(link: Link, other: Link, size: float) -> bool:
    """Whether two links tell about the same of what has so many bytes."""
    now, then = (float(one.transfer_ms(np.array(size))) for one in (link, other))
    return abs(then - now) <= MOST_APART * now


def with_latency(link: Link, latency_ms: float, size: float) -> Link:
    """The same time for `size` bytes, of which so much is latency; as it was where that is most of it, or none."""
    whole = float(link.transfer_ms(np.array(size)))
    if not 0 < latency_ms <= whole / 2:
        return link
    return replace(link, latency_ms=latency_ms, ms_per_byte=(whole - latency_ms) / max(size, 1.0), fitted=True)


def links_around(link: Link, size: float, most: float = 0.0) -> list[Link]:
    """The link, and others that it may as well be, by what was seen of transfers of `size` bytes. most: bytes of the
    largest transfer that it is to tell of."""
    links = [link] + [
        replace(link, latency_ms=link.latency_ms * slower, ms_per_byte=link.ms_per_byte * slower)
        for slower in (1 - link.spread, 1 + link.spread)
    ]
    whole = float(link.transfer_ms(np.array(size)))
    if not link.fitted:  # all of one size: of small ones it may be the bytes that take long, of large ones latency
        links.append(by_bytes(link, size) if link.latency_ms > 0 else by_latency(link, size))
        if link.latency_ms == 0 and link.largest < LARGE_BYTES:  # it takes so long that it counted as bandwidth
            links.append(replace(link, latency_ms=whole, ms_per_byte=0.0))
        return links
    if 0 < link.latency_ms <= link.spread * whole:  # less than the fit misses: it may as well be their bytes
        links.append(replace(link, latency_ms=0.0, ms_per_byte=whole / max(size, 1.0)))
    if most > FAR * link.largest:  # the last, so that those of fewer bytes are the first of those of more
        links.append(beyond(link))
    return links


def beyond(link: Link) -> Link:
    """A fitted link whose bytes take as much longer as the largest transfers that were seen allow: what the fit misses
    of these may be their bytes, and grows with them."""
    whole = float(link.transfer_ms(np.array(link.largest)))
    return replace(link, ms_per_byte=link.ms_per_byte + link.spread * whole / link.largest)


def by_bytes(link: Link, size: float, slowest: float = SLOWEST_MS_PER_BYTE) -> Link:
    """The same transfer of `size` bytes, with as much of it owed to the bytes as a slow link may need (`slowest`, ms a
    byte)."""
    whole = float(link.transfer_ms(np.array(size)))
    a_byte = min(whole / max(size, 1.0), slowest)
    return Link(whole - size * a_byte, a_byte, False, link.spread)


def untold_latency_ms(whole_ms: float) -> float:
    """What may be latency of a transfer that took so long, where no other size was seen."""
    return min(UNTOLD_LATENCY_MS, whole_ms / 2)


def by_latency(link: Link, size: float) -> Link:
    """The same transfer of `size` bytes, with as much of it owed to latency as may be. Of small ones all is already."""
    if link.latency_ms > 0:
        return link
    whole = float(link.transfer_ms(np.array(size)))
    latency = untold_latency_ms(whole)
    return Link(latency, (whole - latency) / max(size, 1.0), False, link.spread)
