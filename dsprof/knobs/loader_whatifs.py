"""What-ifs of the DataLoader's arguments, each of which means something else beside the others: workers that stay save
nothing where there are none, and more workers that do not stay are started anew with each epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from dsprof.analyzer.ask import Without
from dsprof.analyzer.candidate import Excess
from dsprof.analyzer.effect import Effect
from dsprof.analyzer.finding import Gain
from dsprof.analyzer.price.excess import excess_gain
from dsprof.analyzer.rules.base import NotJudged
from dsprof.analyzer.rules.data.data_stall import Supply, started_anew, supply
from dsprof.analyzer.rules.data.loader import begun_again, restarts
from dsprof.analyzer.study import Study
from dsprof.analyzer.text import count, ms

WORKERS, AHEAD, STAY = "loader.num_workers", "loader.prefetch_factor", "loader.persistent_workers"
LIKE: Final = "data.stall"
NO_WORKERS: Final = "the DataLoader has no workers; ask with loader.num_workers, too"


def with_workers(study: Study, key: str, value: Any, beside: Mapping[str, Any]) -> Effect:
    """So many workers, as many as `data.stall` advises."""
    supplied = _need_supply(study)
    if value != supplied.workers or supplied.workers == supplied.now:
        told = "" if supplied.workers == supplied.now else f"; {supplied.workers} can be predicted"
        raise NotJudged(f"what {value} workers would do cannot be told from the run's {supplied.now}{told}")
    effect = Without(LIKE).effect(study)
    again = begun_again(study)
    if again == 0 or beside.get(STAY, (supplied.loader or {}).get("persistent_workers")):
        return effect
    note = (
        f"the DataLoader is begun again in {again} of {count(len(study.irregular.steps), 'step')}, in each of which "
        f"{count(value, 'worker')} would be started anew: what that takes is not counted; with {STAY}=true they stay"
    )
    return replace(effect, notes=(note,))


def with_workers_that_stay(study: Study, key: str, value: Any, beside: Mapping[str, Any]) -> Effect:
    """Workers that are not started anew, which ordinary steps have nothing of."""
    if not value:
        raise NotJudged("how long workers take to start anew is only told by a job in which they do")
    if not restarts(study).empty:
        return _no_longer_started(study, beside)
    _need_workers(study, beside)
    note = "workers that stay need not start anew when an epoch begins, which is outside of ordinary steps"
    return Effect(LIKE, notes=(note,))


def _no_longer_started(study: Study, beside: Mapping[str, Any]) -> Effect:
    """Of a run whose workers start anew."""
    anew = restarts(study)
    cost = ms(float(anew.groupby("step")["excess_ms"].max().mean()))
    if not beside.get(WORKERS):
        raise NotJudged(
            f"workers start anew during training, {cost} each time, which what-ifs of ordinary steps leave out: what "
            "keeping them saves is in the finding data.stall; ask for other settings, such as loader.num_workers, alone"
        )
    gains = [excess_gain(study, one.change) for one in started_anew(study) if isinstance(one.change, Excess)]
    note = (
        f"this is of ordinary steps; between them workers that stay save what starting them anew costs ({cost} each "
        f"time): {', '.join(_in_words(gain) for gain in gains)}, divided over all steps"
    )
    return Effect(LIKE, notes=(note,))


def with_batches_ahead(study: Study, key: str, value: Any, beside: Mapping[str, Any]) -> Effect:
    """So many batches that each worker loads ahead: they are there in time if workers keep up in the mean, and no
    sooner if they do not. What lies between, of batches that take unequally long, a run does not tell."""
    _need_workers(study, beside)
    if not beside.get(WORKERS):
        raise NotJudged(
            "loading further ahead only helps workers that keep up in the mean, by batches that take unequally long: "
            "how long each takes in its worker was not captured; ask with loader.num_workers, too"
        )
    return Effect(
        LIKE, notes=("what loading further ahead evens out, of batches that take unequally long, is not counted",)
    )


def _in_words(gain: Gain) -> str:
    return f"{ms(gain.ms)} [{gain.low:.3g}, {gain.high:.3g}]"


def _need_supply(study: Study) -> Supply:
    supplied = supply(study)
    if supplied is None:
        raise NotJudged("no DataLoader was waited for")
    return supplied


def _need_workers(study: Study, beside: Mapping[str, Any]) -> None:
    """Raises NotJudged where the loader would have none."""
    if not beside.get(WORKERS, _need_supply(study).now):
        raise NotJudged(NO_WORKERS)
