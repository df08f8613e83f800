"""How well the devices are used (level full): floating-point operations of a step, as a share of what the devices could
do in that time (MFU), and samples and tokens a second. What cannot be told is left out, with the reason.

MFU: model FLOPs utilization, of forward and backward as the model needs them; HFU: hardware FLOPs utilization, with
what is computed again (Chowdhery et al., PaLM, 2022, appendix B). Attention is counted whole: a causal mask saves
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import pandas as pd

from dsprof.data_sheets import find_device
from dsprof.run import RunInfo, last_processes
from dsprof.schema import CAPTURE_GAP, COUNTED, FLOPS, FLOPS_FOR, SAMPLES, TOKENS, UNCOUNTED

from ..align.groups import CP, Mesh
from ..align.topology import Topology
from ..columns import may_hold
from ..text import clean, count, ranks
from .module_times import NOT_COUNTED, counted_step

ALIKE: Final = 0.02
"""By which the input of the counted step may differ in size from that of the others, as a share."""
MOST_NAMED: Final = 4
"""Operators without a formula that are named."""


@dataclass(frozen=True)
class RankWork:
    """What a rank did in a step.

    flops: (what for, dtype) -> operations of a step; None where no whole step was counted, and `why` says why
    uncounted: operator -> calls in that step whose operations are not known
    sizes: elements of input of the forwards in the counted step, and in the mean of all
    cut: records of that step are missing, so that its size is not known
    module: whose input the batch is taken from; samples, tokens: a step, None where that does not tell
    """

    flops: Mapping[tuple[str, str], float] | None = None
    why: str = ""
    uncounted: Mapping[str, int] | None = None
    sizes: tuple[float, float] | None = None
    cut: bool = False
    module: str = ""
    samples: float | None = None
    tokens: float | None = None


@dataclass(frozen=True)
class Throughput:
    """Of samples, or tokens: `a_second` of the job, where it is known which ranks have batches of their own (`over`);
    else None, and `each` is what every rank has, mean. `how`: what they were taken from, in words."""

    what: str
    a_second: float | None
    each: float
    over: tuple[int, ...]
    how: str


@dataclass(frozen=True)
class Efficiency:
    """flops: what for -> operations of a step, mean over the ranks that counted; empty: none did. counted: these.
    mfu, hfu: shares, 0 to 1, over these ranks; None where no peak is known, and `why_no_mfu` says why.
    peak: what it was compared with, in words. throughput: samples, then tokens. notes: what was not counted, and why.
    """

    flops: dict[str, float]
    counted: tuple[int, ...]
    flops_a_second: float | None
    mfu: float | None
    hfu: float | None
    peak: str
    why_no_mfu: str
    throughput: tuple[Throughput, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """As in findings.json."""
        return asdict(self)


# --- a rank by itself ---------------------------------------------------------------------------


def sum_work(rows: pd.DataFrame, native: bool) -> RankWork | None:
    """What the rows of a rank tell, which the native helper wrote, or not; None below level full."""
    told = (COUNTED, SAMPLES, TOKENS)
    if not may_hold(rows["name"], lambda name: name in told or name.startswith(FLOPS)):
        return None
    gauges = rows[["name", "module", "purpose", "start_ns", "dur_ns", "step", "value"]][rows["kind"] == "gauge"]
    gauges = gauges.assign(name=gauges["name"].astype(str))
    counted = gauges[gauges["name"].str.startswith(FLOPS)]
    any_counted = len(counted) or (gauges["name"] == COUNTED).any()
    if not any_counted and not gauges["name"].isin([SAMPLES, TOKENS]).any():
        return None
    module, samples, tokens = _batch(gauges, rows)
    if not any_counted:
        why = NOT_COUNTED if native else "the native helper counts them, and it was not there"
        return RankWork(why=why, module=module, samples=samples, tokens=tokens)
    found = counted_step(rows)
    if isinstance(found, str):
        return RankWork(why=found, module=module, samples=samples, tokens=tokens)
    began, ended = found
    counted = counted[counted["start_ns"].between(began, ended)]
    flops = {
        (str(what), name.removeprefix(FLOPS)): float(value)
        for (what, name), value in counted.groupby(["purpose", "name"], observed=True)["value"].sum().items()
        if value
    }
    missed = gauges[gauges["name"].str.startswith(UNCOUNTED) & gauges["start_ns"].between(began, ended)]
    cut = _is_cut(rows, began, ended)
    return RankWork(
        flops=flops,
        uncounted={
            name.removeprefix(UNCOUNTED): int(calls) for name, calls in missed.groupby("name")["value"].sum().items()
        },
        sizes=None if cut else _sizes(rows, began, ended),
        cut=cut,
        module=module,
        samples=samples,
        tokens=tokens,
    )


def _is_cut(rows: pd.DataFrame, began: int, ended: int) -> bool:
    """Whether records of that time are missing."""
    gaps = rows[["start_ns", "dur_ns"]][(rows["kind"] == "mark") & (rows["name"] == CAPTURE_GAP)]
    return bool(((gaps["start_ns"] < ended) & (gaps["start_ns"] + gaps["dur_ns"] > began)).any())


def _forwards(rows: pd.DataFrame) -> pd.DataFrame:
    chosen = (rows["kind"] == "phase") & (rows["name"] == "forward") & (rows["source"] == "measured")
    return rows[["step", "start_ns", "value"]][chosen & rows["grad"].fillna(True) & (rows["step"] >= 0)]


def _sizes(rows: pd.DataFrame, began: int, ended: int) -> tuple[float, float] | None:
    forwards = _forwards(rows)
    numbers = rows.loc[(rows["kind"] == "step") & (rows["step"] > 0), "step"]
    every = forwards[forwards["step"].isin(numbers)]
    mean = float(every["value"].sum()) / max(numbers.nunique(), 1)
    here = float(forwards.loc[forwards["start_ns"].between(began, ended), "value"].sum())
    return (here, mean) if mean > 0 else None


def _batch(gauges: pd.DataFrame, rows: pd.DataFrame) -> tuple[str, float | None, float | None]:
    """The module that takes most time in forward, and what it is given a step, mean over the steps after the first."""
    numbers = rows.loc[(rows["kind"] == "step") & (rows["step"] > 0), "step"]
    given = gauges[gauges["name"].isin([SAMPLES, TOKENS]) & gauges["step"].isin(numbers) & gauges["module"].notna()]
    if given.empty:
        return "", None, None
    roots = given["module"].astype(str)
    calls = rows[(rows["kind"] == "module") & rows["name"].isin(roots.unique()) & rows["dur_ns"].notna()]
    calls = calls[calls["purpose"].isna()]
    if calls.empty:
        return "", None, None
    main = str(calls.groupby(calls["name"].astype(str))["dur_ns"].sum().astype(float).idxmax())
    mine = given[roots == main]
    sums = mine.groupby("name")["value"].sum() / numbers.nunique()
    return main, _at(sums, SAMPLES), _at(sums, TOKENS)


def _at(sums: pd.Series[float], name: str) -> float | None:
    return float(sums[name]) if name in sums.index else None


# --- all ranks together -------------------------------------------------------------------------


def judge_efficiency(
    run: RunInfo, work: Mapping[int, RankWork], step_ms: float, mesh: Mesh, topology: Topology
) -> Efficiency | None:
    """What the ranks' work comes to; None where no rank says anything."""
    if not work or step_ms <= 0:
        return None
    flops = {rank: item.flops for rank, item in work.items() if item.flops is not None}
    notes = [*_not_counted(work), *_differs(work)]
    used, peak, why = _utilization(run, work, step_ms)
    means = {
        what: float(np.mean([sum(n for (mine, _), n in item.items() if mine == what) for item in flops.values()]))
        for what in (FLOPS_FOR if flops else ())
    }
    model = means["forward"] + means["backward"] if means else 0.0
    return Efficiency(
        flops=means,
        counted=tuple(sorted(flops)),
        flops_a_second=len(flops) * model / (step_ms / 1e3) if flops and not _differs(work) else None,
        mfu=used[0] if used else None,
        hfu=used[1] if used else None,
        peak=peak,
        why_no_mfu=why,
        throughput=tuple(_throughput(run, work, step_ms, mesh, topology)),
        notes=tuple(notes),
    )


def _not_counted(work: Mapping[int, RankWork]) -> list[str]:
    notes = []
    reasons: dict[str, list[int]] = {}
    for rank, item in sorted(work.items()):
        if item.flops is None:
            reasons.setdefault(item.why, []).append(rank)
    notes += [f"the operations of {ranks(tuple(named))}: {why}" for why, named in reasons.items()]
    unsized = tuple(rank for rank, item in sorted(work.items()) if item.cut)
    if unsized:
        notes.append(
            f"records of the step that was counted are missing on {ranks(unsized)}: whether its input "
            "was as large as that of the others is not known"
        )
    missed: dict[str, int] = {}
    for item in work.values():
        for name, calls in (item.uncounted or {}).items():
            missed[name] = missed.get(name, 0) + calls
    if missed:
        most = sorted(missed, key=lambda name: (-missed[name], name))
        words = [f"{clean(name)} ({count(missed[name], 'call')})" for name in most[:MOST_NAMED]]
        more = f" and {len(most) - MOST_NAMED} more" if len(most) > MOST_NAMED else ""
        notes.append(f"what {', '.join(words)}{more} computes is not known")
    return notes


def _differs(work: Mapping[int, RankWork]) -> list[str]:
    """Where the counted step is not like the others."""
    for rank, item in sorted(work.items()):
        if item.flops is not None and item.sizes is not None and abs(item.sizes[0] / item.sizes[1] - 1) > ALIKE:
            here, mean = item.sizes
            return [
                f"on rank {rank} the step that was counted has an input of {here:,.0f} elements, the mean step "
                f"{mean:,.0f}"
            ]
    return []


def _utilization(
    run: RunInfo, work: Mapping[int, RankWork], step_ms: float
) -> tuple[tuple[float, float] | None, str, str]:
    """MFU and HFU; what they are compared with; why there are none."""
    if all(item.flops is None for item in work.values()):
        return None, "", "the operations were not counted"
    if _differs(work):
        return None, "", "steps differ in the size of their input, and one was counted"
    model = hardware = 0.0
    seen: dict[tuple[str, float, str], list[float]] = {}
    counted = {rank: item.flops for rank, item in work.items() if item.flops}
    devices: dict[Any, Mapping[str, Any]] = {}
    for fact in run.facts_by_kind().get("device", []):
        devices.setdefault(fact.get("rank"), fact)
    hosts = {item.rank: item.host for item in last_processes(run.ranks)}
    for rank, flops in counted.items():
        for (what, dtype), operations in flops.items():
            if what == "other" or not operations:
                continue
            device = devices.get(rank)
            peak = _peak_of_cpu(run, rank, hosts.get(rank), dtype) if device is None else _peak_of_device(device, dtype)
            if isinstance(peak, str):
                return None, "", peak
            seen.setdefault((peak.of, peak.unit, peak.how), []).append(peak.flops)
            seconds = operations / peak.flops
            hardware += seconds
            model += seconds if what != "recompute" else 0.0
    if not counted or hardware == 0:
        return None, "", "no matrix product, convolution or attention was seen"
    whole = len(counted) * step_ms / 1e3
    words = [f"{of}, {_range(values, unit)} ({how})" for (of, unit, how), values in seen.items()]
    return (model / whole, hardware / whole), "; ".join(words), ""


@dataclass(frozen=True)
class Peak:
    """What a rank's device can do in a second; `of` what, in which `unit` that is said, and `how` it is known."""

    flops: float
    of: str
    unit: float
    how: str


def _range(values: list[float], unit: float) -> str:
    least, most = f"{min(values) / unit:,.4g}", f"{max(values) / unit:,.4g}"
    return f"{least if least == most else f'{least} to {most}'} {'TFLOP/s' if unit == 1e12 else 'GFLOP/s'}"


def _peak_of_device(device: Mapping[str, Any], dtype: str) -> Peak | str:
    """The peak of a device, by the fact that tells of it; or why there is none."""
    name = str(device.get("name", ""))
    known = find_device(name)
    if known is None:
        return f"no data sheet is known of {clean(name) or 'the device'}"
    peak = known.flops(dtype, bool(device.get("tf32")))
    if peak is None:
        return f"the data sheet of {known.name} has no peak for {dtype}"
    form = "tf32" if dtype == "float32" and device.get("tf32") and "tf32" in known.tflops else dtype
    return Peak(peak, f"{known.name} in {form}", 1e12, known.source)


def _peak_of_cpu(run: RunInfo, rank: int, host: str | None, dtype: str) -> Peak | str:
    """The peak of a rank's CPU, on its host; or why there is none."""
    # A rank that moved was measured where it was before as well.
    peaks = [item for item in run.cpu_peaks if rank in item["ranks"] and host in (None, item["host"])]
    if not peaks or dtype not in peaks[0]["flops"]:
        why = "`dsprof run --level full` does that on its host, when a job has ended well"
        return f"what the CPU of rank {rank} can compute was not measured; {why}"
    threads = count(int(peaks[0]["threads"]), "thread")
    how = f"measured after the job, {threads}, nothing beside it"
    return Peak(float(peaks[0]["flops"][dtype]), f"the CPU in {dtype}", 1e9, how)


def _throughput(
    run: RunInfo, work: Mapping[int, RankWork], step_ms: float, mesh: Mesh, topology: Topology
) -> list[Throughput]:
    found = []
    for what in (SAMPLES, TOKENS):
        replicas, how = _counted_over(what, run.world_size or len(work), mesh, topology)
        each = {rank: getattr(item, what) for rank, item in work.items() if getattr(item, what) is not None}
        if not each:
            continue
        known = bool(replicas) and set(replicas) <= each.keys()
        rank = min(each)
        taken = _taken_from(run, rank, work[rank].module, what)
        found.append(
            Throughput(
                what=what,
                a_second=sum(each[rank] for rank in replicas) / (step_ms / 1e3) if known else None,
                each=float(np.mean(list(each.values()))) / (step_ms / 1e3),
                over=replicas if known else (),
                how=f"{taken}; {how if known or not replicas else 'some rank lacks it, so of each rank'}",
            )
        )
    return found


def _taken_from(run: RunInfo, rank: int, module: str, what: str) -> str:
    """In words, with the shape that it had first."""
    facts = (fact for fact in run.facts if fact.get("fact") == "batch" and fact.get("rank") == rank)
    fact = next((fact for fact in facts if fact.get("module") == module.split("#")[0].rstrip(".")), {})
    which = clean(str(fact.get("input", "the first input")))
    shape = f", which is {fact['shape']} in its first call" if "shape" in fact else ""
    measure = "the size (padding included)" if what == TOKENS else "the first dimension"
    return f"{measure} of {which} of {clean(module)}{shape}"


def _counted_over(what: str, world_size: int, mesh: Mesh, topology: Topology) -> tuple[tuple[int, ...], str]:
    """Ranks whose samples, or tokens, are together the job's, none of them twice; and how that is known. None where it
    is not known.

    The ranks of a tensor-parallel group have the same batch, and so have the stages of a pipeline, of which the first
    one is asked. Those of a context-parallel group have the same samples, and of each other tokens.
    """
    if world_size == 1:
        return (0,), "one rank"
    for rank in range(world_size):
        if 0 not in topology.stage_of.get(rank, (0,)):
            continue
        replicas = mesh.replicas_of(rank)
        if len(replicas) > 1 or mesh.data_parallel_size(rank, world_size) == 1:
            break
    else:
        return (), "which ranks have batches of their own is not known, so of each rank"
    sequences = next((one for one in mesh.dimensions if one.role == CP), None)
    if sequences is None:
        return replicas, _said_of(replicas, "")
    teams = {sequences.team_of(replica) or (replica,) for replica in replicas}
    if what == TOKENS:
        counted = tuple(sorted(rank for team in teams for rank in team))
        return counted, _said_of(counted, f"; each rank of a group of {sequences.name} has tokens of its own")
    counted = tuple(sorted(min(team) for team in teams))
    return counted, _said_of(counted, f"; the ranks of a group of {sequences.name} have the same samples")


def _said_of(counted: tuple[int, ...], more: str) -> str:
    if len(counted) == 1:
        return f"of rank {counted[0]}, whose batch the others share" + more
    return f"over {ranks(counted)}, which average their gradients" + more
