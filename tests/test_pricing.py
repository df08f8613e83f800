"""What a change gains is told in one room, `dsprof.analyzer.price`: rules say what they found and what would change."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from synthetic import Job

from dsprof.analyzer import rules
from dsprof.analyzer.budget.intervals import Intervals
from dsprof.analyzer.candidate import DeviceCost
from dsprof.analyzer.device import Devices, DeviceTime
from dsprof.analyzer.effect import Effect
from dsprof.analyzer.finding import MEASURED_ON_DEVICE
from dsprof.analyzer.price.device import measured_gain, price_of_device
from dsprof.analyzer.price.effects import effect_gains
from dsprof.analyzer.study import Study, study
from dsprof.analyzer.whatif.faster_hosts import FasterHosts
from dsprof.analyzer.whatif.work import ScaleWork

RULES = Path(rules.__file__).parent
REPLAYS = {"graph.replay", "graph.longest_path"}
PRICES = {"price.attribution", "price.certainty", "price.contention", "price.excess", "price.together"}
COMPUTES = {"mean_gain", "cost_outside_steps", "beside_other_work", "price_together", "price_by_itself", "interval"}
ENDS = {"ms", "percent", "low", "high"}
EMPTY = np.empty(0, np.int64)


def prices(path: Path) -> list[str]:
    """Where a module replays steps, makes a gain, or moves an end of one by itself."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            room = node.module or ""
            names = {alias.name for alias in node.names}
            if room in REPLAYS | PRICES or (room.startswith("price.") and names & COMPUTES):
                found.append(f"{path.name}:{node.lineno} imports {', '.join(sorted(names))} of {room}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "Gain":
                found.append(f"{path.name}:{node.lineno} makes a Gain")
            if node.func.id == "replace" and any(one.arg in ENDS for one in node.keywords):
                found.append(f"{path.name}:{node.lineno} changes a gain")
    return found


def test_no_rule_prices() -> None:
    modules = sorted(RULES.rglob("*.py"))
    assert len(modules) > 50
    assert [place for path in modules for place in prices(path)] == []


def test_what_would_be_pricing_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "rule.py"
    path.write_text(
        "from ...graph.replay import replay\nfrom ...price.gains import mean_gain\n"
        "a = Gain(1.0, 1.0, 0.0, 2.0)\nb = replace(a, low=0.0)\n"
    )
    assert len(prices(path)) == 4


DEVICE = DeviceTime(0, 1, {}, (), 1.0, pd.DataFrame({"step": [99]}), Intervals.union(EMPTY, EMPTY), pd.DataFrame())
"""Of which one step was traced that is not judged."""


@pytest.fixture(scope="module")
def steps() -> Study:
    return study(Job(steps=30, jitter=0.0).trace())


def test_what_an_effect_gains_is_what_the_steps_are_shorter_by(steps: Study) -> None:
    """Half of the computation, at most a part of that, at a cost that may be twice as much, over two steps."""
    half = (ScaleWork({"compute": 0.5}),)
    spared = 0.5 * float(steps.work("compute").mean())
    plain, capped, costly, shared = effect_gains(
        steps,
        [
            Effect("rank.straggler", half, counts_cores=True),
            Effect("rank.straggler", half, at_most_ms=spared / 4, counts_cores=True),
            Effect("rank.straggler", half, costs_ms=1.0, costs_between=(0.5, 2.0), counts_cores=True),
            Effect("rank.straggler", half, part=0.5, counts_cores=True),
        ],
    )
    assert plain.ms > 0.5 * spared
    assert capped.ms == pytest.approx(spared / 4)
    assert costly.ms == pytest.approx(plain.ms - 1.0)
    assert (costly.low, costly.high) == (pytest.approx(plain.low - 2.0), pytest.approx(plain.high - 0.5))
    assert shared.ms == pytest.approx(plain.ms / 2)


def test_what_it_may_be_as_well_widens_the_interval(steps: Study) -> None:
    less, more = ((ScaleWork({"compute": factor}),) for factor in (0.8, 0.2))
    alone, either = effect_gains(
        steps,
        [
            Effect("rank.straggler", less, counts_cores=True),
            Effect("rank.straggler", less, others=(((), more),), counts_cores=True),
        ],
    )
    assert (either.ms, either.low) == (alone.ms, alone.low)
    assert either.high > 3 * alone.ms


def test_a_change_to_nothing_gains_nothing(steps: Study) -> None:
    now = (ScaleWork({"compute": 0.5}),)
    (gain,) = effect_gains(steps, [Effect("rank.straggler", now, now, counts_cores=True)])
    assert (gain.ms, gain.percent) == (0.0, 0.0)


def test_what_devices_stood_idle_for_is_of_ordinary_steps(steps: Study) -> None:
    """Tracing made the steps twice as long: of an ordinary one it is half as much. Few steps: from the least of them
    to the most."""
    idle = np.array([[4.0, 8.0], [2.0, 2.0]])
    gain = measured_gain(steps, DeviceCost(idle, 2 * steps.step_ms))
    assert (gain.ms, gain.method) == (pytest.approx(2.0), MEASURED_ON_DEVICE)
    assert (gain.low, gain.high) == (pytest.approx(1.0), pytest.approx(3.0))


def test_kernels_take_as_long_in_ordinary_steps_as_in_traced_ones(steps: Study) -> None:
    """Traced steps took twice as long as ordinary ones, and the device was busy for a quarter of that: for half of an
    ordinary step. It stood idle for three quarters of a traced one, so that a third of it is left."""
    took = 2 * steps.step_ms
    cost = DeviceCost(np.full((1, 3), took / 2), took, idle_ms=0.75 * took, busy_ms=0.25 * took)
    assert measured_gain(steps, cost).ms == pytest.approx(took / 6)


def test_of_steps_known_by_phases_only_no_replay_tells_what_launches_cost(steps: Study) -> None:
    """Kernels were traced in other steps than the judged ones: between half of what was measured there and all of it,
    whatever a replay of phases, which last as long as their launches did, would say."""
    idle = np.array([[4.0, 6.0]])
    few = replace(steps, device=Devices({0: DEVICE}, pd.DataFrame(), ()))
    price = price_of_device(few, DeviceCost(idle, steps.step_ms, less=(FasterHosts(0.5), FasterHosts(0.0))))
    assert (price.gain.ms, price.gain.method) == (pytest.approx(3.75), MEASURED_ON_DEVICE)
    assert (price.gain.low, price.gain.high) == (pytest.approx(2.0), pytest.approx(6.0))
    assert price.tried == ()
