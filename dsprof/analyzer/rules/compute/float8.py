"""precision.fp8: linear layers whose products would be faster in float8 than they are, by more than the casts cost.

Of each layer the capture tells the sizes of its weight (K inputs, N outputs) and its operations, which are 6 M K N for
M rows; so M follows. What the layer takes as it is and in float8 is then a function of M, K, N and of the device's data
sheet (`engine.precision.gain`), which dsprof's engine asks, too, when it chooses its layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from dsprof.data_sheets import find_device
from dsprof.engine.precision.gain import LayerTime, Rates, Recipe, divides, layer_time, listed_rates
from dsprof.schema import LINEAR_FACT
from dsprof.words import fits

from ... import signals
from ...arrays import Float
from ...effect import Effect
from ...finding import Evidence, Finding, Fix, Gain, Where
from ...price.gains import by_shapes
from ...study import Study
from ...text import clean, count, ms, percent
from ...whatif.work import Change, LessWork
from ...work.device_idle import unseen_idle_ms
from ..base import OWN_ENGINE, NotConcerned, NotJudged, code_fix, engine_config, script_of
from ..rule import Look, Rule

CODE: Final = "precision.fp8"
FULL: Final = "run with `dsprof run --level full`"
HALF: Final = ("bfloat16", "float16")
OPERATIONS: Final = 6.0
"""Of a multiplication of a weight's element by a row's: two in forward, and four in backward."""
MOST_NAMED: Final = 8


@dataclass(frozen=True)
class LinearLayer:
    """A layer of one rank. m: rows of a call, mean; calls: a step; recipe: by which it would be scaled."""

    name: str
    m: int
    k: int
    n: int
    calls: float
    recipe: Recipe = "tensorwise"

    def times(self, rates: Rates) -> LayerTime:
        return layer_time(self.m, self.k, self.n, rates, self.recipe)

    def saved_ms(self, rates: Rates) -> float:
        """A step; negative: float8 is slower."""
        return 1e3 * self.calls * self.times(rates).saved

    def as_is_ms(self, rates: Rates) -> float:
        """What its products take a step."""
        return 1e3 * self.calls * self.times(rates).as_is


def layers_in_float8(study: Study) -> list[Finding]:
    """The layers that gain, those that do not, and what all of them gain."""
    if _section(engine_config(study) or {}).get("enabled"):
        raise NotConcerned("the engine computes in float8 already")
    every = _rates(study)
    expected = every[1]
    by_rank = _layers(study)
    gaining = {rank: [one for one in layers if one.saved_ms(expected) > 0] for rank, layers in by_rank.items()}
    if not any(gaining.values()):
        return []
    share = _shares(study, by_rank, expected)
    sums = [[sum(one.saved_ms(rates) for one in layers) for layers in gaining.values()] for rates in every]
    # A device that its host keeps waiting does not end the step sooner by what it computes sooner.
    idle = min(unseen_idle_ms(study), study.step_ms) / study.step_ms if study.led_by_devices else 1.0
    mean = sum(sums[1]) / len(sums[1])
    low = max(min(sums[0]), 0.0) * (1 - idle)
    gain = by_shapes(study, low, mean, max(sums[2]))
    rank = max(gaining, key=lambda one: sum(layer.saved_ms(expected) for layer in gaining[one]))
    return [_finding(study, by_rank[rank], gaining[rank], expected, gain, share[rank])]


def with_float8(study: Study, value: Any) -> Effect:
    """What `fp8` of the engine's configuration does. value: the section, or its `enabled`; what it leaves out is as the
    job has it. Raises NotJudged where that is not known."""
    content = engine_config(study)
    if content is None:
        raise NotJudged("the job has no configuration of dsprof's engine, whose section fp8 is")
    now = _section(content)
    if now.get("enabled"):
        raise NotJudged("layers compute in float8 in this run, which does not tell what they take without")
    then = {**now, **value} if isinstance(value, Mapping) else {**now, "enabled": value}
    if not then.get("enabled"):
        raise NotJudged("that is what the run had: float8 off")
    try:
        every = _rates(study)
    except NotConcerned as without:
        raise NotJudged(f"what it takes is not predicted: {without}") from None
    by_rank = _layers(study, then.get("recipe", "tensorwise"))
    _shares(study, by_rank, every[1])
    taken = {rank: _taken(layers, then, every[1]) for rank, layers in by_rank.items()}
    of_rates = [
        (LessWork("what float8 saves", Change({"compute": _saved(study, taken, rates)}), study.peer_groups),)
        for rates in (every[1], every[0], every[2])
    ]
    note = "by the sizes of the layers and the device's data sheet"
    return Effect(CODE, of_rates[0], others=(((), of_rates[1]), ((), of_rates[2])), notes=(note,))


def _section(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """`fp8` of a configuration; empty where there is none."""
    return content["fp8"] if isinstance(content.get("fp8"), Mapping) else {}


def _taken(layers: Sequence[LinearLayer], section: Mapping[str, Any], rates: Rates) -> list[LinearLayer]:
    """Those that the engine would choose, by the section's `filter` and `skip`."""
    chosen, skipped = section.get("filter", "auto"), section.get("skip", ())
    left = [one for one in layers if not any(fits(one.name, pattern) for pattern in skipped)]
    if isinstance(chosen, str):
        return [one for one in left if chosen == "all" or one.saved_ms(rates) > 0]
    return [one for one in left if any(fits(one.name, pattern) for pattern in chosen)]


def _saved(study: Study, taken: Mapping[int, Sequence[LinearLayer]], rates: Rates) -> Float:
    """[R, S] ms of each rank's compute in each judged step."""
    of_rank = [sum(one.saved_ms(rates) for one in taken.get(rank, ())) for rank in study.ranks]
    return np.repeat(np.array(of_rank)[:, None], study.work("compute").shape[1], axis=1)


def _shares(study: Study, by_rank: Mapping[int, Sequence[LinearLayer]], rates: Rates) -> dict[int, float]:
    """Rank -> what the products of all its linear layers take, ms a step. Raises NotJudged if that cannot be."""
    share = {rank: sum(one.as_is_ms(rates) for one in layers) for rank, layers in by_rank.items()}
    if max(share.values(), default=0.0) > study.step_ms:
        raise NotJudged(
            f"linear layers would take {ms(max(share.values()))} by their shapes, and the step takes "
            f"{ms(study.step_ms)}: the step that was counted is not like the others"
        )
    return share


def _finding(
    study: Study, layers: Sequence[LinearLayer], gaining: Sequence[LinearLayer], rates: Rates, gain: Gain, share: float
) -> Finding:
    best = max(gaining, key=lambda one: one.saved_ms(rates))
    time = best.times(rates)
    patterns = covering([one.name for one in gaining], [one.name for one in layers])
    kept = [one for one in layers if one not in gaining]
    evidence = [
        Evidence("products of all linear layers, a step", round(share, 3), "ms"),
        Evidence("share of the step", round(100 * share / study.step_ms, 1), "%"),
        Evidence("layers that gain", len(gaining), "count", len(layers)),
        Evidence(f"{best.name}: rows, inputs, outputs", f"{best.m} x {best.k} x {best.n}", "M x K x N"),
        Evidence(
            f"{best.name}: a call as it is", round(1e3 * time.as_is, 3), "ms", round(1e3 * time.float8, 3)
        ),
        Evidence(f"{best.name}: of that in float8, casts", round(1e3 * time.casts, 3), "ms"),
    ]  # fmt: skip
    if kept:
        worst = min(kept, key=lambda one: one.saved_ms(rates))
        evidence.append(Evidence(f"{worst.name} would lose, a step", round(-worst.saved_ms(rates), 3), "ms"))
    title = (
        f"{count(len(gaining), 'linear layer')} of {len(layers)} would be faster in float8: "
        f"{percent(gain.percent)} of the step, by their shapes"
    )
    where = Where(op="linear", module=best.name, steps=study.step_range)
    return Finding(CODE, title, "info", where, tuple(evidence), gain, _fixes(study, patterns, gain))


def _fixes(study: Study, patterns: Sequence[str], gain: Gain) -> tuple[Fix, ...]:
    further = len(patterns) - MOST_NAMED
    shown = ", ".join(map(clean, patterns[:MOST_NAMED])) + (f" and {further} more" if further > 0 else "")
    content = engine_config(study)
    if content is not None or any(fact.get("dialect") == OWN_ENGINE for fact in study.facts.get("config", [])):
        title = f'"fp8": {{"enabled": true, "filter": [...]}} in the engine\'s configuration, of {shown}'
        if content is None:  # too long to be kept: a section that it may have would be replaced
            return (Fix("config", title, gain=gain),)
        section = {**_section(content), "enabled": True, "filter": list(patterns)}
        patch = {"op": "add", "path": "/fp8", "value": section}
        return (Fix("config", title, (patch,), gain, (("fp8", section),)),)
    title = (
        "torchao.float8.convert_to_float8_training(model, module_filter_fn=...), which takes these layers alone, and "
        f"torch.compile, which fuses the casts: {shown}"
    )
    return (code_fix(title, "module_filter_fn", list(patterns), script_of(study), gain),)


# --- what is known


def _rates(study: Study) -> tuple[Rates, Rates, Rates]:
    """Of the ranks' devices: at which float8 gains least, as expected, and most."""
    devices = [fact for fact in study.facts.get("device", []) if fact.get("type") == "cuda"]
    if not devices:
        raise NotConcerned("float8 is for devices")
    names = {str(fact["name"]) for fact in devices if fact.get("name")}
    if not names:
        raise NotJudged(f"which devices the ranks have is not known: {FULL}")
    found = {name: listed_rates(name, HALF[0]) for name in sorted(names)}
    for name, rates in found.items():
        if rates is None and find_device(name) is not None:
            raise NotConcerned(f"{name} has no float8")
        if rates is None:
            raise NotJudged(f"no data sheet is known of {clean(name)}, so what float8 gains there is not predicted")
    return min((rates for rates in found.values() if rates is not None), key=lambda rates: rates[1].float8)


def _layers(study: Study, recipe: Recipe = "tensorwise") -> dict[int, list[LinearLayer]]:
    """Rank -> its linear layers that float8 could compute, and that compute in half precision now."""
    if not study.facts.get(LINEAR_FACT):
        raise NotJudged(f"the sizes of linear layers are not known: {FULL}")
    sizes = _sizes(study)
    found: dict[int, list[LinearLayer]] = {}
    counted = study.tables.modules[["rank", "module", "calls", "flops"]].dropna()
    by_rank = {rank: of_rank.set_index("module")[["calls", "flops"]] for rank, of_rank in counted.groupby("rank")}
    for rank, of_rank in sizes.items():
        mine = by_rank.get(rank)
        if mine is None:
            continue
        layers = []
        for name, (k, n) in of_rank.items():
            if name not in mine.index:
                continue
            calls, flops = mine.loc[name].astype(np.float64)
            rows = round(flops / (OPERATIONS * k * n * calls)) if calls > 0 else 0
            if rows > 0:
                layers.append(LinearLayer(name, rows, k, n, float(calls), recipe))
        if layers:
            found[rank] = layers
    if not found and any(sizes.values()):
        raise NotJudged(f"the operations of linear layers were not counted: {FULL}, for seven steps at least")
    return found


def _sizes(study: Study) -> dict[int, dict[str, tuple[int, int]]]:
    """Rank -> layer -> inputs and outputs; of those in half precision whose sizes divide."""
    found: dict[int, dict[str, tuple[int, int]]] = {}
    for fact in study.facts.get(LINEAR_FACT, []):
        of_rank = found.setdefault(int(fact["rank"]), {})
        of_rank |= {name: (k, n) for name, k, n, dtype in _rows(fact) if dtype in HALF and divides(k, n)}
    return found


def _rows(fact: Mapping[str, Any]) -> list[tuple[str, int, int, str]]:
    rows = fact.get("layers")
    return [
        (str(row[0]), int(row[1]), int(row[2]), str(row[3]))
        for row in (rows if isinstance(rows, list) else [])
        if isinstance(row, list) and len(row) == 4 and all(isinstance(size, int) for size in row[1:3])
    ]


def covering(chosen: Sequence[str], every: Sequence[str]) -> list[str]:
    """Patterns, with `*` in the place of numbers where all such layers are meant, that fit `chosen` and no other of
    `every`."""
    patterns: dict[str, None] = {}
    left = {_pattern(name) for name in every if name not in set(chosen)}
    for name in chosen:
        pattern = _pattern(name)
        patterns[name if pattern in left else pattern] = None
    return list(patterns)


def _pattern(name: str) -> str:
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


RULES = (
    Rule(
        CODE,
        "linear layers would be faster in float8",
        looks=(Look(layers_in_float8),),
        needs=(signals.steps, signals.device_used),
        place=225,
    ),
)
