"""Saving checkpoints while training stands still."""

from __future__ import annotations

from typing import Final

from ... import signals
from ...candidate import Candidate, Excess, Price
from ...finding import Evidence, Finding, Fix, Gain, Where
from ...study import Study
from ...text import ms
from ..base import LEAST_SHARE, at, code_fix, often
from ..compute.host_work import LOADS_OR_SAVES
from ..rule import Found, Look, Rule

CODE: Final = "checkpoint.stall"
KIND = "checkpointing"
TRAINER = "transformers.Trainer"
"""Who saves by its own settings, as a fact has it."""


def stall(study: Study) -> Found:
    """Saving blocks the training loop."""
    signals.steps(study)
    irregular = study.irregular
    own = irregular.own_ms.get(KIND)
    if own is None:
        return []
    saved = own.max(axis=0) > 0
    every = f"{KIND}_ms"
    usual = study.ordinary[every].mean() if every in study.ordinary else 0.0
    if saved.any():
        lost = irregular.excess_ms[KIND][saved]
        excess = Excess(lost, "occasion")
        longest = own[:, saved].max(axis=0)
        ranks = study.ranks_where(own.sum(axis=1) > 0)
        numbers = irregular.steps[saved]
        steps = (int(numbers[0]), int(numbers[-1]))
        times = often(saved)
    elif usual > LEAST_SHARE * study.step_ms and study.device is not None:
        return []  # what of it the device stands idle for, `host_work` tells
    elif usual > LEAST_SHARE * study.step_ms:  # in every step
        series = study.work(every)
        excess, longest = Excess(series.max(axis=0), "step"), series.max(axis=0)
        ranks = study.ranks_where(series.sum(axis=1) > 0)
        steps = study.step_range or (0, 0)
        times = "in every step"
    else:
        return []
    fact = next(iter(study.facts.get("checkpoint", [])), {})
    site, function = fact.get("site"), fact.get("function") or "saving"
    evidence = (
        Evidence("one checkpoint", round(float(longest.mean()), 3), "ms"),
        Evidence("saved", times, ""),
        Evidence("ordinary step", round(study.step_ms, 3), "ms"),
    )
    title = f"saving a checkpoint ({function}) stops training for {ms(longest.mean())}, {times}"
    where = Where(ranks=ranks, op="checkpoint", steps=steps)

    def say(price: Price) -> Finding:
        return Finding(CODE, title, "info", where, evidence, price.gain, _fixes(function, site, price.gain))

    return [Candidate(CODE, excess, say)]


def _fixes(function: str, site: str | None, gain: Gain) -> tuple[Fix, ...]:
    half = "save half as often, which halves the cost"
    if function == TRAINER:
        less = "or --save_only_model true, where nothing need be resumed from: it leaves the optimizer's state out"
        return Fix("code", f"{half}: twice the --save_steps, or the same of TrainingArguments"), Fix("code", less)
    asynchronous = (
        f"save while training goes on: torch.distributed.checkpoint.async_save{at(site)}; it waits for a copy only"
    )
    return (
        code_fix(asynchronous, "torch.distributed.checkpoint.async_save(...)", "", site, gain),
        Fix("code", f"or {half}"),
    )


RULES = (
    Rule(
        "checkpoint.stall",
        "saving a checkpoint stops training",
        explains=("checkpointing",),
        looks=(Look(stall), LOADS_OR_SAVES),
        came_true=(24, 25),
        place=130,
    ),
)
