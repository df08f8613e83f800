"""The job stands still: garbage collection, and stops that are none of the known kinds."""

from __future__ import annotations

from typing import Final

import numpy as np
import pandas as pd

from ... import signals
from ...budget.host_load import Gauges
from ...budget.parts import WAITING
from ...candidate import Candidate, Excess, Price
from ...finding import NOT_PRICED, Evidence, Finding, Fix, Gain, Where
from ...hang.transient_hang import TransientHang, transient_hangs
from ...price.calibration import ModelError
from ...signals import Absent
from ...study import Study
from ...text import count, ms
from ...text import ranks as ranks_in_words
from ...whatif.work import Change
from ..base import at, code_fix, often, script_of
from ..rule import Found, Look, Rule, fault

MOSTLY: Final = 0.5
"""Of a stop: a rank that was ready to run for so much of it, and had no core, did nothing else."""
SMALL_PART: Final = 0.1
"""Of what the worst rank lost: one that lost less is not named, as a busy machine stops each of them now and then."""
MOST_NAMED: Final = 4
"""Ranks of which it is said where they were."""


def collections(study: Study) -> Change | None:
    """No garbage collection of 0.1 ms or more."""
    pause = study.work("pause")
    return Change({"pause": pause}) if pause.any() else None


def garbage_collection(study: Study, change: Change, gain: Gain, share: Gain) -> Finding:
    """Python's garbage collector stops a rank, and so everyone who waits for it."""
    mean = change.removed["pause"].mean(axis=1)
    ranks = study.ranks_where(mean > SMALL_PART * mean.max())
    numbers = study.step_numbers
    chosen = study.of_kind("pause")[["rank", "step", "dur_ns", "value"]]
    chosen = chosen[chosen["step"].isin(numbers) & chosen["rank"].isin(ranks)]
    lengths = chosen["dur_ns"].dropna().astype("int64") / 1e6
    full = int((chosen["value"] == 2).sum())
    evidence = (
        Evidence("garbage collection a step", round(float(mean.max()), 3), "ms", 0.0),
        Evidence("longest collection", round(float(lengths.max()), 3), "ms"),
        Evidence("collections of 0.1 ms and more a step", round(len(lengths) / len(numbers) / len(ranks), 2), "count"),
        Evidence("of those, full (generation 2)", full, "count"),
    )
    script = script_of(study)
    once = "gc.collect(); gc.freeze() once, after set-up and before the loop"
    seldom = "or gc.disable(), and gc.collect() every few hundred steps on all ranks at once"
    fixes = (
        code_fix(once, "gc.freeze()", True, script, gain, {"gc.freeze": True}),
        code_fix(seldom, "gc.disable()", True, script, knobs={"gc.every": 200}),
    )
    title = f"garbage collection stops {ranks_in_words(ranks)} for {ms(mean.max())} a step"
    where = Where(ranks=ranks, steps=study.step_range)
    return Finding("pause.gc", title, "info", where, evidence, gain, fixes, share=share)


def stops(study: Study) -> Found:
    """The job stood still: hangs that resolved themselves, and stops for none of the known reasons."""
    hangs = transient_hangs(study)
    found: list[Candidate | Finding] = [_passed(study, hangs)] if hangs else []
    if found and isinstance(signals.steps.look(study), Absent):
        return found
    signals.steps(study)
    return [*found, *_stops(study, [hang.step for hang in hangs if hang.step is not None])]


def _passed(study: Study, hangs: tuple[TransientHang, ...]) -> Candidate | Finding:
    """What is said of hangs that resolved themselves. Their cost is that of the steps after warm-up."""
    longest = max(hangs, key=lambda hang: hang.seconds)
    irregular = study.irregular
    lost = [1e3 * hang.seconds for hang in hangs if hang.step is not None and hang.step in irregular.steps]
    title = longest.words
    if len(hangs) > 1:
        whole = sum(hang.seconds for hang in hangs)
        title = f"the job stood still {count(len(hangs), 'time')}, {ms(1e3 * whole)} in all; {longest.words}"
    evidence = [Evidence("stood still for", round(longest.seconds, 1), "s", 0.0)]
    evidence += [Evidence(f"rank {rank} stood in", frames, "") for rank, (_, frames) in longest.stood.items()]
    evidence += [Evidence("also", hang.words, "") for hang in hangs[:MOST_NAMED] if hang is not longest]
    site = next((site for site, _ in longest.stood.values()), None)
    whose = ranks_in_words(longest.ranks) if longest.ranks else "the ranks"
    fix = f"look for what held {whose} up{at(site)}; where that may take so long, give a longer --hang-timeout"
    file, _, line = (site or "").rpartition(":")
    patch = ({"file": file, "line": int(line), "argument": None, "value": None},) if file and line.isdigit() else ()
    steps = [hang.step for hang in hangs if hang.step is not None]
    where = Where(
        ranks=tuple(sorted({rank for hang in hangs for rank in hang.ranks})) or None, group=longest.group,
        op=longest.op, steps=(min(steps), max(steps)) if steps else None,
    )  # fmt: skip

    def say(price: Price) -> Finding:
        return Finding("pause.stop", title, "info", where, tuple(evidence), price.gain, (Fix("code", fix, patch),))

    if not lost:
        return say(Price(NOT_PRICED))
    return Candidate("pause.stop", Excess(np.array(lost), "rare occasion"), say)


def _stops(study: Study, told: list[int]) -> list[Candidate]:
    """The job stands still now and then, for none of the known reasons: where each rank stood in the longest stop. Of
    the steps that are `told` more is known."""
    irregular = study.irregular
    own = irregular.own_ms.get("stop")
    if own is None:
        return []
    own = np.where(np.isin(irregular.steps, told), 0.0, own)
    if not own.any():
        return []
    stopped = own.max(axis=0) > 0
    longest = int(own.max(axis=0).argmax())
    step = int(irregular.steps[longest])
    stood = own.sum(axis=1)
    who = study.ranks_where(stood > SMALL_PART * stood.max())
    culprit = irregular.ranks[int(own[:, longest].argmax())]
    length = float(own[:, longest].max())
    evidence = [
        Evidence("stops", int(stopped.sum()), "count", 0.0),
        Evidence("longest", round(length, 1), "ms"),
        Evidence("in step", step, ""),
        *(
            Evidence(f"where rank {rank} was", _place_of(study, rank, step), "")
            for rank in irregular.ranks[:MOST_NAMED]
        ),
    ]
    place = _place_of(study, culprit, step)
    fix = (
        f"look for what rank {culprit} does in step {step} beside training ({place}): files on a slow disk, "
        "logging, a lock, another process on the host; mark it with dsprof.span to see it named"
    )
    crowded_ms = _without_core(study, culprit, step)
    if crowded_ms > MOSTLY * length:
        evidence.append(Evidence("ready to run without a core in it", round(crowded_ms, 1), "ms", 0.0))
        fix = (
            f"something else ran on the cores of rank {culprit} then (workers, the job's own threads, another "
            "process): give each rank cores of its own"
        )
    fixes = (Fix("code", fix),)
    title = f"the job stands still {often(stopped)}, for up to {ms(length)} (rank {culprit}, {place})"
    numbers = irregular.steps[stopped]
    where = Where(ranks=who, steps=(int(numbers[0]), int(numbers[-1])))
    excess = Excess(irregular.excess_ms["stop"][stopped], "rare occasion")

    def say(price: Price) -> Finding:
        return Finding("pause.stop", title, "info", where, tuple(evidence), price.gain, fixes)

    return [Candidate("pause.stop", excess, say)]


def _without_core(study: Study, rank: int, step: int) -> float:
    """How long the rank was ready to run in that step and had no core, ms; NaN if not known."""
    steps = study.steps[study.steps["step"] == step].assign(ordinary=True)
    gauges = Gauges(study.of_kind("gauge"), steps)
    return float(gauges.spent("core_wait_seconds")[gauges.ranks.index(rank), 0])


def _place_of(study: Study, rank: int, step: int) -> str:
    """Where a rank spent most of a step beyond what is usual for it: in a phase, a wait, or outside of all."""
    steps = study.steps[study.steps["rank"] == rank]
    mine = steps[steps["step"] == step]
    usual = steps[steps["ordinary"]]
    if mine.empty or usual.empty:
        return "unknown"
    if float(mine[list(WAITING)].sum(axis=1).iloc[0]) > 0.5 * float(mine["dur_ns"].iloc[0]) / 1e6:
        return "waiting for the others"
    phases = study.training_phases
    phases = phases[(phases["rank"] == rank) & phases["step"].isin([step, *usual["step"]])]
    spent = phases["dur_ns"].groupby([phases["name"].astype(str), phases["step"]]).sum().unstack(fill_value=0)
    found: dict[str, float] = {}
    if step in spent:
        others = spent[[number for number in spent.columns if number != step]]
        beyond: pd.Series[float] = (spent[step] - others.median(axis=1).fillna(0)) / 1e6
        found = {f"in {name}": float(ms) for name, ms in beyond.items() if name != "between"}
    other = float(mine["other"].iloc[0] - np.median(usual["other"]))
    found["outside the phases of the loop"] = other
    return max(found, key=lambda name: found[name])


RULES = (
    Rule(
        "pause.gc",
        "Python's garbage collector stops a rank, and so all",
        explains=("pause",),
        looks=(fault("pause.gc", collections, garbage_collection),),
        told_by_replay=True,
        error=ModelError(of_gain=0.05, of_step=0.014, busy=0.014),
        came_true=(25, 25),
        place=40,
    ),
    Rule(
        "pause.stop",
        "the job stands still now and then, for none of the known reasons",
        looks=(Look(stops),),
        place=140,
    ),
)
