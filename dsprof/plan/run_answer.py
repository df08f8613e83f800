"""What `dsprof plan RUN` answers: the run with more replicas, and which layouts would be fastest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsprof.analyzer.study import Study
from dsprof.data_sheets import Device

from .changes import CannotPlan
from .from_run import RunPlan, plan_from_run, samples_of_step
from .layouts import Wanted
from .network import Network
from .ranked import RankedLayouts, ranked_layouts


@dataclass(frozen=True)
class RunAnswer:
    """scaled: the run with more replicas of what it does; layouts: the fastest ones. None: not told, for a reason."""

    scaled: RunPlan | None
    not_scaled: str
    layouts: RankedLayouts | None
    no_layouts: str

    def to_dict(self) -> dict[str, Any]:
        found = self.scaled.to_dict() if self.scaled is not None else {"schema": 1, "interval": 0.95}
        layouts = None if self.layouts is None else self.layouts.to_dict()
        return {**found, "not_scaled": self.not_scaled, "layouts": layouts, "no_layouts": self.no_layouts}


def answer_run(
    study: Study, ranks: int, network: Network, wanted: Wanted, gpu: Device | None = None,
    global_batch: int | None = None, same_batch: bool = False, steps: float | None = None,
    tokens: float | None = None, price: float | None = None,
) -> RunAnswer:  # fmt: skip
    """As of `plan_from_run`; wanted: what is fixed of a layout. Raises CannotPlan where nothing can be told."""
    scaled, layouts, not_scaled, no_layouts = None, None, "", ""
    try:
        scaled = plan_from_run(study, ranks, network, gpu, global_batch, same_batch, steps, tokens, price)
    except CannotPlan as why:
        not_scaled = str(why)
    if gpu is not None:
        no_layouts = "layouts are ranked on the devices that the run was measured on; leave out --gpu"
    else:
        try:
            batch = _batch(study, ranks, global_batch, same_batch)
            layouts = ranked_layouts(study, ranks, batch, network, wanted)
        except CannotPlan as why:
            no_layouts = str(why)
    if scaled is None and layouts is None:
        raise CannotPlan(not_scaled if gpu is not None or not_scaled == no_layouts else f"{not_scaled}; {no_layouts}")
    return RunAnswer(scaled, not_scaled, layouts, no_layouts)


def _batch(study: Study, ranks: int, wanted: int | None, same: bool) -> float:
    """Of a step, times the run's: with each rank its own where nothing is said."""
    if same:
        return 1.0
    if wanted is None:
        return ranks / (study.run.world_size or len(study.ranks))
    of_run = samples_of_step(study)
    if of_run is None:
        raise CannotPlan(
            "how many samples its step has is not recorded, so --global-batch cannot be compared with it; write "
            "--global-batch same to keep the run's, or capture it with --level full"
        )
    return wanted / of_run
