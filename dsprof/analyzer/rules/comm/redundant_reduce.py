"""comm.redundant-reduce: gradients are reduced in each of several backwards before one step of the optimizer, of which
only the last has to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ... import signals
from ...arrays import Float, Int
from ...candidate import Candidate, Price
from ...columns import codes_of, is_one_of
from ...finding import Evidence, Finding, Fix, Where
from ...price.calibration import ModelError
from ...study import Study, once
from ...text import ms, size
from ...whatif.needless import InLastBackward
from ...whatif.select import Communications
from ..base import NotJudged, at, sharded_stage, zero_stage
from ..rule import Found, Look, Rule
from .dimensions import GRADIENT

ALIKE: Final = 0.02
"""Bytes that two backwards of a step reduce are the same gradients if they differ by no more than this share."""
MOSTLY: Final = 0.9
"""Of the steps: so many are like that."""
MORE_THAN_ONCE: Final = 1.5
"""So many times the gradients of all models of a job are reduced in a step: below it each of several models, or parts
of one, may be reduced once."""


@dataclass(frozen=True)
class Repeated:
    """backwards: that reduce, in a step; bytes: that each of them reduces; group: of the process group with most."""

    backwards: int
    bytes: float
    group: str


@dataclass(frozen=True)
class _Reduced:
    """Reductions of one rank in one group: step, when they were issued, and bytes, [N]."""

    group: str
    step: Int
    issue: Int
    bytes: Float


@dataclass(frozen=True)
class _Turns:
    """When each backward of a rank begins, in order; of its optimizers' steps the step and when each begins."""

    backward: Int
    step_of_update: Int
    update: Int


@once
def repeated_reductions(study: Study) -> Repeated | None:
    """None where no gradients are reduced more than once before a step of the optimizer."""
    numbers = study.step_numbers
    turns, held, reductions = _turns(study), _bytes_of_models(study), _reductions(study)
    found: dict[str, Repeated] = {}
    for rank in study.ranks:
        for reduced in reductions[rank]:
            if reduced.group in found:
                continue
            one = _of_group(reduced, turns[rank], len(numbers))
            if one is not None and _more_than_once(study, held.get(rank, 0), one):
                found[reduced.group] = one
    return max(found.values(), key=lambda one: one.bytes, default=None)


def _turns(study: Study) -> dict[int, _Turns]:
    """Of each rank, in the ordinary steps."""
    phases = study.training_phases
    phases = phases.take(np.flatnonzero(np.isin(phases["step"].to_numpy(np.int64), study.step_numbers)))
    rank, step, start = (phases[name].to_numpy(np.int64) for name in ("rank", "step", "start_ns"))
    backward, update = is_one_of(phases["name"], "backward"), is_one_of(phases["name"], "optimizer")
    found = {}
    for one in study.ranks:
        low, high = np.searchsorted(rank, [one, one + 1])
        begins = np.sort(start[low:high][backward[low:high]])
        found[one] = _Turns(begins, step[low:high][update[low:high]], start[low:high][update[low:high]])
    return found


def _reductions(study: Study) -> dict[int, list[_Reduced]]:
    """Of each rank, those of gradients in the ordinary steps whose sizes are known, by group."""
    table = study.issued(GRADIENT)
    rank, step = table["rank"].to_numpy(np.int64), table["step"].to_numpy(np.int64)
    known = np.isin(step, study.step_numbers) & table["bytes"].notna().to_numpy(bool)
    code, names = codes_of(table["group"])
    issue, moved = table["issue_ns"].to_numpy(np.int64), table["bytes"].to_numpy(np.float64, na_value=0.0)
    rank, step, code, issue, moved = (column[known] for column in (rank, step, code, issue, moved))
    order = np.lexsort((code, rank))  # stable: of a rank and a group they stay as they were
    begins = np.flatnonzero(np.append(True, (np.diff(rank[order]) != 0) | (np.diff(code[order]) != 0))[: len(order)])
    found: dict[int, list[_Reduced]] = {one: [] for one in study.ranks}
    for mine in np.split(order, begins[1:]) if len(order) else ():
        group = str(names[code[mine[0]]]) if code[mine[0]] >= 0 else "nan"
        found.setdefault(int(rank[mine[0]]), []).append(_Reduced(group, step[mine], issue[mine], moved[mine]))
    return found


def _of_group(reduced: _Reduced, turns: _Turns, steps: int) -> Repeated | None:
    """Of one rank and group: whether in most steps several backwards, with no step of an optimizer between them, reduce
    the same number of bytes each."""
    backward = turns.backward
    number = np.searchsorted(backward, reduced.issue, side="right") - 1
    after = number >= 0
    if not after.any():
        return None
    of, index = np.unique([reduced.step[after], number[after]], axis=1, return_inverse=True)
    moved_in = np.bincount(index.reshape(-1), reduced.bytes[after])
    _, begins, counts = np.unique(of[0], return_index=True, return_counts=True)
    if (counts > 1).sum() < MOSTLY * steps:
        return None
    like, moved = [], []
    for begin, count in zip(begins[counts > 1], counts[counts > 1], strict=True):
        step, numbers, each = of[0][begin], of[1][begin : begin + count], moved_in[begin : begin + count]
        between = (turns.update >= backward[numbers[0]]) & (turns.update <= backward[numbers[-1]])
        between &= turns.step_of_update == step
        if each.max() - each.min() <= ALIKE * each.max() and not between.any():
            like.append(count)
            moved.append(float(each.mean()))
    if len(like) < MOSTLY * steps:
        return None
    return Repeated(int(np.median(like)), float(np.mean(moved)), reduced.group)


def _bytes_of_models(study: Study) -> dict[int, int]:
    """Rank -> bytes of the gradients of all models that it is known to have."""
    found: dict[int, int] = {}
    for fact in study.facts.get("ddp", []):
        rank = fact.get("rank")
        if isinstance(rank, int):
            found[rank] = found.get(rank, 0) + sum(fact.get("gradient_bytes", []))
    return found


def _more_than_once(study: Study, every: int, found: Repeated) -> bool:
    """Whether what is reduced is more than the gradients of all models that the rank is known to have, of `every`
    bytes: two models of one size, each with a backward of its own, reduce equal bytes as well."""
    if not every:
        own = [fact for fact in study.facts.get("optimizer", []) if not fact.get("of_engine")]
        return len(own) <= len(study.ranks)
    return bool(found.backwards * found.bytes >= MORE_THAN_ONCE * every)


def redundant(study: Study) -> Found:
    """All reductions gone but those of the last backward before each step of the optimizer."""
    found = repeated_reductions(study)
    if found is None:
        return []
    if study.in_stages:
        raise NotJudged(
            f"gradients are reduced in {found.backwards} backwards of a step, but ranks are stages of a pipeline, "
            "whose schedule says when that may be"
        )
    change = InLastBackward(Communications(purposes=(GRADIENT,)))
    needless = (found.backwards - 1) * found.bytes
    evidence = (
        Evidence("backwards that reduce gradients, a step of the optimizer", found.backwards, "count", 1),
        Evidence("reduced for nothing a step", round(needless / 2**20, 3), "MiB", 0.0),
    )
    where = Where(group=found.group, op="all_reduce", steps=study.step_range)

    def say(price: Price) -> Finding:
        title = (
            f"gradients are reduced {found.backwards} times for one step of the optimizer, "
            f"{size(needless)} of it for nothing: {ms(price.gain.ms)} of each step"
        )
        fixes = _fixes(study, found, price)
        return Finding("comm.redundant-reduce", title, "info", where, evidence, price.gain, fixes, share=price.share)

    return [Candidate("comm.redundant-reduce", change, say)]


def _fixes(study: Study, found: Repeated, price: Price) -> tuple[Fix, ...]:
    others = "all micro-batches but the last"
    keys: dict[str, Any] = {"ddp.accumulate": found.backwards}
    ddp = next(iter(study.facts.get("ddp", [])), None)
    if zero_stage(study) is not None or (ddp is None and not study.facts.get("fsdp") and sharded_stage(study) >= 2):
        title = "zero_optimization.stage 1: stages 2 and 3 reduce in each micro-batch; or fewer, larger micro-batches"
        return (Fix("config", title, ({"op": "replace", "path": "/zero_optimization/stage", "value": 1},), price.gain),)
    if ddp is None:
        if study.facts.get("fsdp"):
            title = (
                f"model.set_requires_gradient_sync(False) before {others} of a step, True before that "
                "(FSDP1: `with model.no_sync():`); gradients then take their whole size on each rank"
            )
            return (Fix("code", title, gain=price.gain),)
        return (Fix("code", "reduce gradients in the last micro-batch of a step only", gain=price.gain),)
    framework = ddp.get("framework")
    titles = {
        "accelerate": f"Accelerator(gradient_accumulation_steps={found.backwards}), and around each micro-batch "
        "`with accelerator.accumulate(model):`",
        "lightning": f"Trainer(accumulate_grad_batches={found.backwards}) in the place of accumulating by hand",
        "transformers": f"--gradient_accumulation_steps {found.backwards} in the place of accumulating by hand",
    }
    by_hand = f"`with model.no_sync():` around forward and backward of {others} of a step{at(ddp.get('site'))}"
    title = titles.get(str(framework), by_hand)
    return (Fix("code", title, (), price.gain, tuple(keys.items())),)


RULES = (
    Rule(
        "comm.redundant-reduce",
        "gradients are reduced in each of several micro-batches of one step",
        explains=("comm_exposed",),
        looks=(Look(redundant, needs=(signals.replay,)),),
        needs=(signals.communications,),
        error=ModelError(of_gain=0.105, of_step=0.014, busy=0.014),
        place=101,
    ),
)
