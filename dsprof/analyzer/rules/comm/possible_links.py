"""The link of a process group, and other links that it may as well be by what was seen: where all that was seen is of
one size, or of far fewer bytes than what is asked about."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from ...graph.link import Link, fit_link
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
    now, then = (float(one.transfer_ms(np.array(median))) for one in (link, wider))
    return wider if wider.fitted and abs(then - now) <= MOST_APART * now else link


def links_of(whole: Domain, part: Domain) -> dict[str, Link]:
    """Of each group of a part of a dimension; where that is gradients, as `link_of_gradients` has it."""
    if set(part.table["purpose"]) != {GRADIENT}:
        return part.links()
    return {group: link_of_gradients(whole, part, group) for group in part.groups}


def links_around(link: Link, size: float, most: float = 0.0) -> list[Link]:
    """The link, and others that it may as well be, by what was seen of transfers of `size` bytes. most: bytes of the
    largest transfer that it is to tell of."""
    links = [link] + [
        replace(link, latency_ms=link.latency_ms * slower, ms_per_byte=link.ms_per_byte * slower)
        for slower in (1 - link.spread, 1 + link.spread)
    ]
    if not link.fitted:  # all of one size: of small ones it may be the bytes that take long, of large ones latency
        links.append(by_bytes(link, size) if link.latency_ms > 0 else by_latency(link, size))
    elif most > FAR * link.largest:
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
