"""The loop waits for input: what DataLoader workers would gain on the cores there are, and what starting them costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd

from dsprof import gauges

from ... import signals
from ...arrays import Float
from ...budget.host_load import SharedCores
from ...budget.parts import WAITING
from ...candidate import Between, Candidate, Excess, Price
from ...columns import RankRows, is_one_of
from ...finding import LOW_PERCENT, Evidence, Finding, Gain, Where
from ...price.calibration import ModelError
from ...price.effects import replayed
from ...price.gains import nothing_between
from ...study import Study, once
from ...text import count, ms
from ...whatif.work import Change, LessWork
from ...work.stacks import in_loader
from ..base import LEAST_SHARE, NotConcerned, at
from ..compute.host_work import LOADS_OR_SAVES
from ..rule import Found, Look, Rule, fault
from .loader import Fact, loader_fact, loader_fix, loading_rows, restarts, training_loader

MOST_WORKERS: Final = 32
HAND_OVER_MS: Final = (0.5, 5.0)
HAND_OVER_MS_PER_BYTE: Final = (4e-7, 4e-6)
"""What taking a batch from a worker costs by itself, at best and at worst: a queue, a file descriptor for each tensor,
and the bytes at memory speed. Measured on a slow machine of two cores with nothing else to do: 2 ms for a batch of one
small tensor (1.5 to 2.5), 2.7 for one of two (1.9 to 5.8), 4.5 for one tensor of 6 MB."""
SLACK: Final = 1.5
"""Batches do not all take the same time: that much more capacity than the mean needs."""
MOSTLY: Final = 0.75
"""Loading that sleeps for this share of its time may have more workers than cores."""
UNEXPLAINED: Final = 0.02
"""Of the time outside of communication, this share of sleep may as well be page faults and late wake-ups."""
UNHINDERED: Final = 0.02
HINDERED: Final = 0.2
"""Where there are fewer cores than threads, one that waits for a core for less than the first share of the time it runs
shows that the others sleep, and for more than the second, that they compute."""


@dataclass(frozen=True)
class Supply:
    """What DataLoader workers could save of the wait for input.

    waited:  [R, S] ms in the loaders of training, without what starting workers anew costs
    now:     workers of the loader
    workers: how many it should have: no more than `now` where there is no core for another
    wanted:  how many would do if there were cores for all
    cores:   that a rank and its workers have among them, on average; None: not known
    sleep:   [R, S] ms that loading slept (or waited for a disk, or the net), at most
    asleep:  it did so for most of its time
    saved:   [R, S] ms that as many workers would save
    low, high: [R, S] the same if all that may be computing computes, and if all that may be sleeping sleeps
    """

    loader: Fact | None
    waited: Float
    now: int
    workers: int
    wanted: int
    cores: float | None
    sleep: Float
    asleep: bool
    saved: Float
    low: Float
    high: Float

    @property
    def worst_ms(self) -> float:
        """Mean wait of the rank that waits most."""
        return float(self.waited.mean(axis=1).max())


@once
def supply(study: Study) -> Supply | None:
    """None where no DataLoader was waited for."""
    loading = loading_rows(study)
    if loading.empty:
        return None
    anew = RankRows(restarts(study))
    starting = np.nan_to_num(study.by_step(anew, anew.real("excess_ms"), np.arange(len(anew))))
    waited = np.clip(study.work("data") - starting, 0, None)
    worst = int(waited.mean(axis=1).argmax())
    wait_ms = float(waited[worst].mean())
    if wait_ms <= 0:
        return None
    loader = training_loader(study)
    now = int(loader.get("num_workers") or 0) if loader else 0
    step_ms = float(study.work("dur_ns")[worst].mean()) / 1e6
    rest = max(_rest_ms(study, waited, step_ms - wait_ms), 0.05 * step_ms)
    # Starved workers finish a batch a step between them, so one takes `now` steps; a loop that loads its own batches
    # takes what it waited.
    one_batch = now * step_ms if now else wait_ms
    wanted = min(max(math.ceil(SLACK * one_batch / rest), now + 1, 2), MOST_WORKERS)
    fetched = is_one_of(loading["name"], "data") & np.isin(loading["step"].to_numpy(np.int64), study.step_numbers)
    batches = max(float(fetched.sum()) / len(study.ranks) / len(study.step_numbers), 1.0)
    hand_over, at_worst = (
        of_batch * batches + of_byte * _input_bytes(study)
        for of_batch, of_byte in zip(HAND_OVER_MS, HAND_OVER_MS_PER_BYTE, strict=True)
    )

    def with_workers(count: int, hand_over: float = hand_over) -> Float:
        left = (max(one_batch / count - rest, 0) + hand_over) / wait_ms
        saved: Float = waited * max(1 - left, 0.0)
        return saved

    def answer(count: int, saved: Float, low: Float, high: Float, sleep: Float, asleep: bool) -> Supply:
        low, high = np.minimum(low, saved), np.maximum(high, saved)
        return Supply(loader, waited, now, count, wanted, a_rank, sleep, asleep, saved, low, high)

    cores = study.load.of(study.ranks[worst]) if study.load is not None else None
    a_rank = cores.cores_a_rank if cores is not None else None
    if cores is None:
        low, high = with_workers(wanted, at_worst), with_workers(wanted)
        return answer(wanted, (low + high) / 2, low, high, waited, False)
    free = max(math.floor(cores.cores_a_rank) - 1, 1)
    if now == 0:
        idle = np.clip(cores.idle_ms, 0, None)  # threads of its own may run while the training thread sleeps
        sleep, surely = (np.minimum(np.minimum(ms, idle), waited) for ms in _asleep_ms(study))
        share = float((sleep + surely)[worst].mean()) / 2 / wait_ms
        asleep = share >= MOSTLY
        workers = min(wanted, math.floor(free / max(1 - share, 1 / MOST_WORKERS)) if asleep else free)
        # In its place a worker computes, and hands the batch over: in the time for which the training thread would have
        # slept, and on cores that no rank needs. Those that are idle while ranks wait for one another are of little
        # use: a worker that gets one does not give it back at once.
        low = np.minimum(with_workers(workers, at_worst), surely + cores.spare_ms - at_worst)
        usual = np.minimum(with_workers(workers), sleep + cores.spare_ms - hand_over)
        high = np.minimum(with_workers(workers), np.maximum(sleep, cores.idle_ms) - hand_over)
        return answer(workers, np.clip((low + usual) / 2, 0, None), low, high, sleep, asleep)
    hindered = _hindered(study, cores, now)
    asleep = hindered < UNHINDERED
    working = _per_rank(study, "worker_cpu_seconds")
    if working is not None:  # then their CPU time is known
        asleep = float(working[worst].mean()) < (1 - MOSTLY) * now * step_ms
        hindered = math.nan if asleep else math.inf
    # While the loop waits, the training thread's core is a worker's.
    free = max(math.floor(cores.cores_a_rank), 1)
    if not asleep and now >= min(wanted, free):
        # Every core has its worker. Should these sleep all the same, more of them would do.
        high, low = with_workers(wanted), np.zeros_like(waited)
        return answer(now, low if hindered > HINDERED else high / 2, low, high, waited, False)
    workers = wanted if asleep else min(wanted, free)
    low, high = with_workers(workers, at_worst), with_workers(workers)
    if not asleep:  # then loading may compute all the time, on the cores that the rest of the step computes on
        left = max((rest + one_batch) / cores.cores_a_rank, one_batch / workers) + at_worst
        low = np.minimum(low, waited * min(max(step_ms - left, 0.0) / wait_ms, 1.0))
    return answer(workers, (low + high) / 2, low, high, waited, asleep)


def _rest_ms(study: Study, waited: Float, host_ms: float) -> float:
    """What a step without a wait for input takes: the host does all else in `host_ms`, its device may take longer."""
    graph = signals.replay.look(study)
    if isinstance(graph, signals.Absent) or not study.led_by_devices:
        return host_ms
    at_once = LessWork("waiting for input", Change({"data": waited}), study.peer_groups)
    return max(float(replayed(study, at_once).mean()), host_ms)


def _input_bytes(study: Study) -> float:
    """Bytes given to forward, mean of a rank's step."""
    rows = study.phase_rows
    forward = rows.are("name", "forward") & rows.table["step"].isin(study.step_numbers).to_numpy(bool)
    return float(rows.table["bytes"][forward].sum()) / max(len(study.ranks) * len(study.step_numbers), 1)


def _per_rank(study: Study, gauge: str) -> Float | None:
    """Increase of a gauge in ms, [R, S]; None unless every rank has it."""
    found = study.gauges.spent(gauge)
    return None if np.isnan(found).any() else found


def _asleep_ms(study: Study) -> tuple[Float, Float]:
    """How long the training thread slept in each step, but for communication: neither ran nor wanted a core. [R, S] at
    most, and for sure.

    Whether it slept in the loader or in its own work is not known, but in either case a worker has that time to
    itself. Nothing where the kernel does not tell how long a thread wanted a core.
    """
    ran, wanted = (_per_rank(study, gauge) for gauge in ("training_thread_cpu_seconds", "core_wait_seconds"))
    own = study.work("dur_ns") / 1e6
    for part in WAITING:
        own = own - study.work(part)
    if ran is None or wanted is None:
        return np.zeros_like(own), np.zeros_like(own)
    asleep = own - ran - wanted
    return np.clip(asleep, 0, None), np.clip(asleep - UNEXPLAINED * own, 0, None)


def _hindered(study: Study, cores: SharedCores, now: int) -> float:
    """How long training threads waited for a core, of the time they ran, beside `now` workers a rank. NaN where that
    says nothing of the workers: it was not measured, or there is a core for each of them."""
    ran, wanted = (_per_rank(study, gauge) for gauge in ("training_thread_cpu_seconds", "core_wait_seconds"))
    if ran is None or wanted is None or len(cores.ranks) * (1 + now) <= cores.cores:
        return math.nan
    here = np.isin(study.ranks, cores.ranks)
    return float(wanted[here].mean()) / max(float(ran[here].mean()), 1e-9)


# --- the wait of ordinary steps -----------------------------------------------------------------


def waiting(study: Study) -> Change | None:
    """Enough DataLoader workers to have the next batch ready in time, as far as there are cores for them."""
    if loading_rows(study).empty:
        raise NotConcerned
    found = supply(study)
    return Change({"data": found.saved}) if found is not None and _worth(study, found) else None


def _worth(study: Study, found: Supply) -> bool:
    return float(found.saved.mean(axis=1).max()) >= LEAST_SHARE * study.step_ms


def stall(study: Study, change: Change, gain: Gain, share: Gain) -> Finding:
    """The training loop stands still until its next batch is there."""
    found = supply(study)
    assert found is not None
    return _stall(study, found, gain, share)


def known_up_to(study: Study) -> Between | None:
    """What `low` and `high` would save, as parts of `saved`."""
    found = supply(study)
    if found is None:
        return None
    saved = max(float(found.saved.sum()), 1e-9)
    return Between(float(found.low.sum()) / saved, float(found.high.sum()) / saved, found.worst_ms)


def _stall(study: Study, found: Supply, gain: Gain, share: Gain | None = None) -> Finding:
    worst_ms = found.worst_ms
    mean = found.waited.mean(axis=1)
    fixes = []
    sure = float(found.low.mean(axis=1).max()) >= LOW_PERCENT / 100 * study.step_ms
    worth = sure and found.workers > found.now and gain.percent >= LOW_PERCENT
    crowded = found.cores is not None and 1 + found.wanted > found.cores
    title = f"the loop waits {ms(worst_ms)} of each step for input"
    evidence = [
        Evidence("waiting for input a step", round(worst_ms, 3), "ms", 0.0),
        Evidence("share of the step", round(100 * worst_ms / study.step_ms, 1), "%"),
        Evidence("DataLoader workers", found.now if found.loader else "unknown", "", found.workers if worth else None),
    ]
    if found.now:
        evidence += _workers_were(study)
    elif found.loader is not None:  # what it loads with is on the training thread
        line = in_loader(study, study.ranks[int(mean.argmax())])
        if line is not None:
            title += f", mostly in {line.words}"
            evidence.append(Evidence(f"in {line.words}, by samples of the stack", round(line.ms, 3), "ms"))
    site = (found.loader or {}).get("site")
    if site:
        evidence.append(Evidence("the DataLoader was made in", at(site).strip(" ()"), ""))
    if found.cores is not None and crowded:
        evidence.append(Evidence("cores for a rank and its workers", round(found.cores, 2), "count", found.wanted + 1))
        if found.now == 0:
            asleep = float(found.sleep.mean(axis=1).max())
            evidence.append(Evidence("of the wait, asleep rather than computing, at most", round(asleep, 3), "ms"))
    if worth:
        note = (
            "; its IterableDataset must be split by get_worker_info()" if (found.loader or {}).get("iterable") else ""
        )
        if found.asleep and found.cores is not None and found.workers + 1 > found.cores:
            note += "; more than there are cores, as loading mostly sleeps"
        settings = {"num_workers": found.workers, "persistent_workers": True}
        fixes.append(loader_fix(study, found.loader, settings, gain, note))
    else:
        more = "more workers" if found.now else "workers"
        title += f"; no core is free for {more}" if crowded else f"; {more} would hardly shorten it"
    where = Where(ranks=study.ranks_where(mean > 0.5 * worst_ms), op="DataLoader", steps=study.step_range)
    return Finding("data.stall", title, "info", where, tuple(evidence), gain, tuple(fixes), share=share)


FEWEST_LOOKS: Final = 5
"""At workers, before it is said what they do."""


def _workers_were(study: Study) -> list[Evidence]:
    """What DataLoader workers did when they were looked at while the judged steps went on: computed, or waited for a
    disk, and in which function of the kernel."""
    ordinary = study.ordinary
    begin, end = ordinary["start_ns"].min(), (ordinary["start_ns"] + ordinary["dur_ns"]).max()
    looks = study.of_kind("gauge")[["name", "start_ns", "value"]]
    looks = looks[looks["start_ns"].between(begin, end)]
    counted = looks.groupby(looks["name"].astype(str))["value"].agg(["sum", "size"])
    if gauges.WORKERS not in counted.index or counted["size"][gauges.WORKERS] < FEWEST_LOOKS:
        return []

    def share(gauge: str) -> float:
        seen = float(counted["sum"].get(gauge, 0.0))
        return round(100 * seen / max(float(counted["sum"][gauges.WORKERS]), 1.0), 1)

    found = [Evidence("of the workers, computing when looked at", share(gauges.WORKERS_BUSY), "%")]
    if share(gauges.WORKERS_ON_DISK):
        places = counted["sum"][counted.index.str.startswith(gauges.WORKERS_IN)]
        most = f", most in {str(places.idxmax()).removeprefix(gauges.WORKERS_IN)}" if len(places) else ""
        found.append(Evidence(f"of the workers, waiting for a disk{most}", share(gauges.WORKERS_ON_DISK), "%"))
    return found


# --- what no fault of ordinary steps tells -------------------------------------------------------


def loaders(study: Study) -> Found:
    """Workers that are started anew again and again; and a wait for input that workers would not shorten."""
    signals.steps(study)
    signals.replay(study)
    found: list[Candidate | Finding] = [*started_anew(study)]
    # Where kernels were traced, `host_work.loads_or_saves` tells what of the wait their device stands idle for.
    wait = supply(study) if study.device is None else None
    if wait is not None and not _worth(study, wait) and wait.worst_ms >= LOW_PERCENT / 100 * study.step_ms:
        found.append(_stall(study, wait, nothing_between(wait.low.mean(axis=0), wait.high.mean(axis=0))))
    return found


def started_anew(study: Study) -> list[Candidate]:
    """Workers of the training's loader that end with each epoch and are started anew, where epochs are short."""
    anew = restarts(study)
    if anew.empty:
        return []
    rank, number = (int(key) for key in anew.groupby(["rank", "number"])["excess_ms"].sum().idxmax())
    anew = anew[anew["number"] == number]
    fact = loader_fact(study, rank, number) or {}
    by_step = anew.groupby("step")["excess_ms"]
    # Ranks that communicate wait for the last of them.
    together = len(study.judged_collectives) > 0
    costs = by_step.max() if together else by_step.sum() / len(study.ranks)
    steps = len(study.irregular.steps)
    between = int(np.median(np.diff(costs.index.to_numpy()))) if len(costs) > 1 else steps
    often = (
        "for each step"
        if between == 1
        else f"every {between} steps"
        if len(costs) > 1
        else f"once in {count(steps, 'step')}"
    )
    workers = int(fact.get("num_workers") or 0)
    title = f"the DataLoader's {count(workers, 'worker')} {'is' if workers == 1 else 'are'} started anew {often}, "
    title += f"{ms(costs.mean())} each time"
    evidence = (
        Evidence("loading where workers are started, beyond the usual", round(float(costs.mean()), 3), "ms", 0.0),
        Evidence("of that, in DataLoader.__iter__", round(float(anew["start_ms"].mean()), 3), "ms"),
        Evidence("starts in the judged steps", len(costs), "count", 0),
        Evidence("persistent_workers", "False", "", "True"),
    )
    who = tuple(int(each) for each in np.sort(anew["rank"].unique()))
    where = Where(ranks=who, op="DataLoader", steps=(int(costs.index.min()), int(costs.index.max())))
    excess = Excess(costs.to_numpy(np.float64), "occasion", less_ms=_first_batches(study, fact, anew))

    def say(price: Price) -> Finding:
        fix = loader_fix(study, fact, {"persistent_workers": True}, price.gain)
        return Finding("data.stall", title, "info", where, evidence, price.gain, (fix,))

    return [Candidate("data.stall", excess, say)]


def _first_batches(study: Study, fact: Fact, anew: pd.DataFrame) -> float:
    """What of starting the workers is not saved by keeping them, at most: ms, divided over the steps.

    The loop would still wait for the first batch of an epoch. What it takes to load is not known: no longer than the
    wait outside of `__iter__`, and than `num_workers` steps, or the workers would not keep up.
    """
    outside = float((anew["excess_ms"] - anew["start_ms"]).clip(lower=0).mean())
    first_batch = min(outside, study.step_ms * int(fact.get("num_workers") or 0))
    occasions = anew["step"].nunique() / max(len(study.irregular.steps), 1)
    return float(occasions * first_batch)


RULES = (
    Rule(
        "data.stall",
        "the loop waits for its DataLoader",
        explains=("data",),
        looks=(
            fault("data.stall", waiting, stall, counts_cores=True, between=known_up_to),
            Look(loaders),
            LOADS_OR_SAVES,
        ),
        error=ModelError(of_gain=0.056, of_step=0.014, busy=0.021),
        came_true=(99, 100),
        place=20,
    ),
)
