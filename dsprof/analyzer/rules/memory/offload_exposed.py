"""offload.exposed: ranks stand still for what was offloaded, to host memory or to a disk.

Either memory would hold it after all: then nothing need be brought. Or it could be brought while something else is
computed, as far as what brings it has time: a lane that is busy for most of a step can hide no more than its rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ... import signals
from ...budget.lanes import MAIN, on_stream
from ...candidate import Between, Candidate, Price
from ...columns import RankRows
from ...finding import Evidence, Finding, Fix, Gain, Where
from ...memory.free import least_free
from ...price.calibration import ModelError
from ...study import Study, once
from ...text import percent, size
from ...whatif.work import Change, LessWork
from ..base import LEAST_SHARE, NotConcerned, NotJudged, config_sections
from ..rule import Found, Look, Rule

READS: Final = ("read", "to_device")
"""Names of copies that bring what was offloaded."""
SECTIONS: Final = ("offload_optimizer", "offload_param")
"""Of zero_optimization, that offload something."""
HIDDEN_AT_LEAST: Final = 0.5
"""Of what could be hidden at best, where nothing hides it yet: when a piece is wanted is not known beforehand."""
USUAL_BUFFERS: Final = {"offload_optimizer": 4, "offload_param": 5}


@dataclass(frozen=True)
class Offloaded:
    """What one rank, the one that waits most, offloads.

    rank:     which it is
    exposed:  ms of a step that it stands still for it, mean
    purposes: what it is (`optimizer`, `parameter`, `activation`), that with most bytes first
    brought:  bytes that are brought in a step, mean
    busy:     ms of a step that the busiest lane of its own copies, mean; 0: its training thread copies itself
    lane:     that lane
    """

    rank: int
    exposed: float
    purposes: tuple[str, ...]
    brought: float
    busy: float
    lane: str


@once
def offloaded(study: Study) -> Offloaded | None:
    """None where no rank copies anything that it offloaded."""
    if not len(study.step_numbers):
        return None
    waits = study.work("offload").mean(axis=1)
    place = int(waits.argmax())
    rank = study.ranks[place]
    rows = RankRows(study.trace.read(rank, ("kind", "name", "lane", "purpose", "step", "dur_ns", "bytes")))
    copied = rows.are("kind", "copy") & np.isin(rows.whole("step"), study.step_numbers) & rows.known("dur_ns")
    if not copied.any():
        return None
    copies = rows.table.take(np.flatnonzero(copied))
    copies = copies[~copies["name"].astype(str).str.startswith("checkpoint")]
    copies = copies[~on_stream(copies["lane"])]  # of a device's stream, by whatever launched it
    if copies.empty:
        return None
    steps = len(study.step_numbers)
    purposes = copies.groupby(copies["purpose"].astype(str))["bytes"].sum().sort_values(ascending=False)
    lanes = copies["lane"].astype(str)
    spent = (copies["dur_ns"].astype("float64") / 1e6 / steps).groupby(lanes).sum().drop(MAIN, errors="ignore")
    brought = float(copies["bytes"][copies["name"].isin(READS)].sum()) / steps
    lane = str(spent.idxmax()) if len(spent) else ""
    named = tuple(name for name in purposes.index if name and name != "nan")
    return Offloaded(rank, float(waits[place]), named, brought, float(spent.max()) if len(spent) else 0.0, lane)


def exposed(study: Study) -> Found:
    """What standing still for it costs: all of it where memory would hold it, else what could be hidden."""
    signals.steps(study)
    found = offloaded(study)
    if found is None:
        if not offloading_sections(study):
            raise NotConcerned
        raise NotJudged("states or parameters are offloaded, and what is copied for that was not recorded")
    waited = study.work("offload")
    if waited.mean() < LEAST_SHARE * study.step_ms:
        return []
    room = least_free(study.memory, study.memory_uses, study.ranks)
    fits = room is not None and 0 < found.brought <= room and not _stays_away(study)
    hidden = 1.0 if fits else _could_be_hidden(study, found)
    if hidden <= 0:
        rate = found.brought / max(found.busy, 1e-9) * 1000
        raise NotJudged(
            f"{found.lane} copies for {percent(100 * found.busy / study.step_ms)} of the step, so no order of copies "
            f"hides more of it ({size(found.brought)} a step, {size(rate)} a second): offload less, or to something "
            "faster"
        )
    change = Change({"offload": waited * hidden})
    between = None if fits else Between(HIDDEN_AT_LEAST, 1.0, float(waited.mean()) * hidden)
    less = LessWork("offload.exposed", change, study.peer_groups)

    def say(price: Price) -> Finding:
        return _finding(study, found, price, room if fits else None, hidden)

    return [Candidate("offload.exposed", less, say, between=between)]


def _could_be_hidden(study: Study, found: Offloaded) -> float:
    """The part of the time a rank stands still that would go if its lanes copied all through the step, 0 to 1. What its
    training thread copies itself hides nothing."""
    if not found.lane or found.exposed <= 0:
        return 0.0
    least = max(study.step_ms - found.exposed, found.busy)
    part = (study.step_ms - least) / found.exposed
    return part if part * found.exposed >= LEAST_SHARE * study.step_ms else 0.0


def _stays_away(study: Study) -> bool:
    """Whether more is offloaded than is brought: states that a host's optimizer updates where they are. What memory
    must hold without that is then several times what is copied."""
    optimizer = offloading_sections(study).get("offload_optimizer")
    return optimizer is not None and optimizer.get("device") == "cpu"


def offloading_sections(study: Study) -> dict[str, Mapping[str, Any]]:
    """Name -> section of the job's configuration that offloads something."""
    found: dict[str, Mapping[str, Any]] = {}
    for zero in config_sections(study, "zero_optimization"):
        for name in SECTIONS:
            section = zero.get(name)
            if isinstance(section, Mapping) and section.get("device") in ("cpu", "nvme"):
                found[name] = section
    return found


def _finding(study: Study, found: Offloaded, price: Price, room: int | None, hidden: float) -> Finding:
    what = " and ".join(found.purposes) or "what was offloaded"
    waited = float(study.work("offload").mean())
    evidence = (
        Evidence("waiting for what was offloaded a step", round(waited, 3), "ms", round(waited * (1 - hidden), 3)),
        Evidence("brought in a step", round(found.brought), "bytes"),
        *([Evidence(f"{found.lane} copies in a step", round(found.busy, 3), "ms")] if found.lane else []),
        *([Evidence("memory that is surely free", room, "bytes")] if room is not None else []),
    )
    share = percent(100 * waited / study.step_ms)
    title = f"ranks stand still for {share} of the step until what was offloaded ({what}) is there"
    if room is not None:
        title += f", though memory would hold it: {size(found.brought)} of {size(room)} that are surely free"
    fixes = tuple(_fixes(study, price.gain, room, hidden))
    ranks = tuple(study.ranks_where(study.work("offload").mean(axis=1) >= LEAST_SHARE * study.step_ms))
    where = Where(ranks=ranks, op="offload", steps=study.step_range)
    return Finding("offload.exposed", title, "info", where, evidence, price.gain, fixes, share=price.share)


def _fixes(study: Study, gain: Gain, room: int | None, hidden: float) -> Iterator[Fix]:
    sections = offloading_sections(study)
    if room is not None:
        for name in sections:
            yield _set(name, "device", "none", "keep it where it is used", gain)
        if not sections:
            yield Fix("code", "keep what is offloaded where it is used: memory would hold it", gain=gain)
        return
    typed = [fix for name, section in sections.items() for fix in _overlapping(name, section, gain)]
    yield from typed
    if not typed:
        yield Fix("code", "bring what was offloaded while something else is computed: ask for it earlier", gain=gain)


def _overlapping(name: str, section: Mapping[str, Any], gain: Gain) -> Iterator[Fix]:
    """What lets copies go on beside computation, as far as it is not set yet."""
    if section.get("pin_memory") is False:
        yield _set(name, "pin_memory", True, "copies of memory that is not pinned run beside nothing", gain)
    if section.get("device") != "nvme":
        return
    if name == "offload_optimizer":
        for key, does in (("pipeline_read", "read the next tile"), ("pipeline_write", "write the last tile")):
            if section.get(key) is not True:
                yield _set(name, key, True, f"{does} while one is updated", gain)
    buffers = int(section.get("buffer_count", USUAL_BUFFERS[name]))
    yield _set(name, "buffer_count", 2 * buffers, f"more of it under way at once than {buffers}", gain)


def _set(name: str, key: str, value: Any, why: str, gain: Gain) -> Fix:
    path = f"/zero_optimization/{name}/{key}"
    knobs = ((f"zero_optimization.{name}.{key}", value),)
    shown = str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)
    title = f"zero_optimization.{name}.{key}: {shown} ({why})"
    return Fix("config", title, ({"op": "add", "path": path, "value": value},), gain, knobs)


RULES = (
    Rule(
        "offload.exposed",
        "ranks stand still until what was offloaded is there",
        explains=("offload",),
        looks=(Look(exposed, needs=(signals.replay,)),),
        needs=(signals.steps,),
        error=ModelError(of_gain=0.15, of_step=0.014, busy=0.014),
        place=178,
    ),
)
