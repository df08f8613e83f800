"""compute.recompile: torch.compile compiles the same code again and again, in training steps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from dsprof.schema import RECOMPILED_FACT

from ... import signals
from ...arrays import Float
from ...candidate import Candidate, Excess, Price
from ...finding import Evidence, Finding, Fix, Where
from ...price.calibration import ModelError
from ...study import Study, once
from ...text import count, ms
from ...text import ranks as ranks_in_words
from ...whatif.work import Change, LessWork
from ..base import LEAST_SHARE, at
from ..rule import Found, Look, Rule

COMPILING: Final = "compilation_ms"
"""Column of a step: how long it compiled."""
PART: Final = "other"
"""Part of the budget that it is."""
SMALL_PART: Final = 0.1
"""Of what the worst rank lost: one that lost less is not named."""
FEWEST: Final = 3
"""Steps after warm-up that compile: fewer may be the last ones that do."""
SIZES: Final = re.compile(r"size mismatch|\.size\(|\.shape|stride", re.IGNORECASE)
"""In the words of a guard: it was about the size of a tensor."""


@once
def compiling(study: Study) -> Float:
    """How long each rank compiles in each ordinary step, ms, [R, S]."""
    found: Float = np.nan_to_num(study.work(COMPILING)) if COMPILING in study.steps else np.zeros(
        (len(study.ranks), len(study.step_numbers))
    )  # fmt: skip
    return found


def again_and_again(study: Study) -> Found:
    """Compilation in ordinary steps, which most have."""
    return [_in_most_steps(study, compiling(study))] if _takes_time(study) else []


def _takes_time(study: Study) -> bool:
    """Whether compilation in ordinary steps takes enough of them."""
    return bool(compiling(study).mean(axis=1).max(initial=0.0) >= LEAST_SHARE * study.step_ms)


def now_and_then(study: Study) -> Found:
    """Steps that are irregular since some rank compiled, if that comes again; where ordinary ones do not."""
    irregular = study.irregular
    own = irregular.own_ms.get("compilation")
    if own is None or _takes_time(study):
        return []
    struck = own.max(axis=0) > 0
    if int(struck.sum()) < FEWEST or not _reasons(study):
        return []
    ranks = _worst(study, own.sum(axis=1))
    each = float(own.max(axis=0)[struck].mean())
    where = Where(ranks=ranks, steps=(int(irregular.steps[struck][0]), int(irregular.steps[struck][-1])))
    verb = "compiles" if len(ranks) == 1 else "compile"
    steps = count(int(struck.sum()), "step")
    title = f"{ranks_in_words(ranks)} {verb} again in {steps} after warm-up, {ms(each)} each"
    evidence = (Evidence("steps that compile", int(struck.sum()), "count", 0), *_evidence(study, ranks))

    def say(price: Price) -> Finding:
        return Finding("compute.recompile", title, "info", where, evidence, price.gain, _fixes(study, ranks, price))

    return [Candidate("compute.recompile", Excess(irregular.excess_ms["compilation"][struck], "rare occasion"), say)]


def _in_most_steps(study: Study, spent: Float) -> Candidate:
    ranks = _worst(study, spent.mean(axis=1))
    change = LessWork("compute.recompile", Change({PART: spent}), study.peer_groups)
    mine = spent[np.isin(study.ranks, ranks)]
    steps = np.asarray((mine > 0).any(axis=0))
    each = float(mine.mean())
    evidence = (
        Evidence("compilation a step", round(each, 3), "ms", 0.0),
        Evidence("ordinary steps that compile", round(100 * float(steps.mean()), 1), "%", 0.0),
        *_evidence(study, ranks),
    )
    who = ranks_in_words(ranks) if len(ranks) < len(study.ranks) else "every rank"
    verb = "compile" if 1 < len(ranks) < len(study.ranks) else "compiles"
    title = f"{who} {verb} the same code again in {int(steps.sum())} of {count(len(steps), 'step')}: {ms(each)} a step"
    title += _which(study, ranks)
    where = Where(ranks=ranks, steps=study.step_range)

    def say(price: Price) -> Finding:
        fixes = _fixes(study, ranks, price)
        return Finding("compute.recompile", title, "info", where, evidence, price.gain, fixes, share=price.share)

    return Candidate("compute.recompile", change, say)


def _worst(study: Study, spent: Float) -> tuple[int, ...]:
    return study.ranks_where(spent > SMALL_PART * spent.max())


@once
def _reasons(study: Study) -> dict[tuple[int, str], Mapping[str, Any]]:
    """(rank, line of a function) -> the last that was told of it."""
    found: dict[tuple[int, str], Mapping[str, Any]] = {}
    for fact in study.facts.get(RECOMPILED_FACT, []):
        key = int(fact["rank"]), str(fact.get("site"))
        if int(fact.get("times") or 0) >= int(found.get(key, {}).get("times") or 0):
            found[key] = fact
    return found


def _most(study: Study, ranks: tuple[int, ...]) -> Mapping[str, Any] | None:
    """What was compiled again for longest on these ranks."""
    mine = [fact for (rank, _), fact in _reasons(study).items() if rank in ranks]
    return max(mine, key=lambda fact: float(fact.get("spent_ms") or 0.0), default=None)


def _which(study: Study, ranks: tuple[int, ...]) -> str:
    most = _most(study, ranks)
    return "" if most is None else f" ({most.get('function')}{at(most.get('site'))})"


def _evidence(study: Study, ranks: tuple[int, ...]) -> tuple[Evidence, ...]:
    most = _most(study, ranks)
    if most is None:
        return ()
    return (
        Evidence("compiled again in the whole run", int(most["times"]), "count", 0),
        Evidence("function", f"{most.get('function')}{at(most.get('site'))}", ""),
        Evidence("the guard that failed last", str(most.get("reason") or "not told"), ""),
    )


def _fixes(study: Study, ranks: tuple[int, ...], price: Price) -> tuple[Fix, ...]:
    """By what the guard was about; a value of Python's is not mended by dynamic shapes."""
    most = _most(study, ranks)
    reason = str(most.get("reason") or "") if most is not None else ""
    shapes = (
        Fix(
            "code",
            "torch.compile(dynamic=True), or torch._dynamo.mark_dynamic(input, dim) for the dimension that changes, on "
            "all ranks alike",
            ({"file": None, "line": None, "argument": "dynamic", "value": True},),
            price.gain,
            (("compile.dynamic", True),),
        ),
        Fix("code", "pad inputs to a few fixed lengths, on all ranks the same ones"),
    )
    if not reason:
        tell = Fix(
            "env", "TORCH_LOGS=recompiles tells which guard fails", ({"name": "TORCH_LOGS", "value": "recompiles"},)
        )
        return (*shapes, tell)
    if SIZES.search(reason):
        return shapes
    value = (
        f"keep what the guard is about ({reason}) the same in every step: give it as a tensor, or take it out "
        "of what is compiled (torch.compiler.disable)"
    )
    return (Fix("code", value, gain=price.gain), replace(shapes[0], gain=None, knobs=()))


RULES = (
    Rule(
        "compute.recompile",
        "the same code is compiled again and again",
        explains=("peer_wait", "other"),
        looks=(Look(again_and_again, needs=(signals.replay,)), Look(now_and_then, needs=(signals.steps,))),
        error=ModelError(of_gain=0.1, of_step=0.02, busy=0.02),
        place=230,
    ),
)
