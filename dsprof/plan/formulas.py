"""A plan without a run: from the sizes of the model, the data sheet of the device, and published or given steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from .calibrate import LEVEL, Calibrated, calibrate
from .cost import COEFFICIENTS
from .hardware import NETWORK_GB_S, Cluster
from .layouts import BEST, NoLayout, Ranked, TransformerModel, Wanted, as_dict, layouts, rank_layouts
from .spending import Spending, spending
from .steps import StepShapes
from .table import Measurements

ASPECT: Final = 128
"""Width for each layer, where only the number of parameters is told: 4096 of 32 layers, as in models of 7 billion."""
HEAD: Final = 128
"""Width of a head, likewise."""
CURVE: Final = (0.25, 0.5, 1, 2, 4)
"""Rank counts of the curve, by that which was asked for."""


@dataclass(frozen=True)
class FormulaPlan:
    """model, ranks, cluster: as asked. calibrated: the figures. best: layouts that fit, the fastest first. curve: the
    best layout of other rank counts, where one fits. spending: of the best one. tells_most: what to measure next."""

    model: TransformerModel
    ranks: int
    cluster: Cluster
    gpus_per_node: int
    calibrated: Calibrated
    best: Ranked
    curve: Sequence[tuple[int, Ranked]]
    spending: Spending | None
    assumptions: Sequence[str]
    tells_most: str

    def to_dict(self) -> dict[str, Any]:
        found = {
            "schema": 1,
            "model": {**asdict(self.model), "parameters": self.model.parameters},
            "ranks": self.ranks,
            "gpu": self.cluster.gpu.name,
            "gpus_per_node": self.gpus_per_node,
            "learnt_from": self.calibrated.rows,
            "interval": LEVEL,
            "layouts_tried": self.best.tried,
            "layouts_that_fit": len(self.best.shapes),
            "layouts": [as_dict(self.best, row, self.model) for row in range(min(BEST, len(self.best.shapes)))],
            "curve": [
                {**as_dict(ranked, 0, self.model), "efficiency": efficiency(self, ranked)} for _, ranked in self.curve
            ],
            "assumptions": list(self.assumptions),
            "measure_next": self.tells_most,
        }
        if self.spending is not None:
            found["cost"] = asdict(self.spending)
        return found


def efficiency(plan: FormulaPlan, ranked: Ranked) -> float:
    """Throughput a rank, by that of the fewest ranks of the curve."""
    first = plan.curve[0][1]
    return float(first.predicted.ms[0] * first.shapes.gpus[0] / (ranked.predicted.ms[0] * ranked.shapes.gpus[0]))


def model_of(
    parameters: float | None, hidden: int | None, layers: int | None, heads: int | None, sequence: int,
    vocabulary: int, global_batch: int,
) -> tuple[TransformerModel, list[str]]:  # fmt: skip
    """The model, and what was assumed of it. Raises NoLayout where its layers are not known."""
    assumed = []
    if hidden is None and layers is None and parameters is None:
        raise NoLayout("the layers of the model are not known: give --hidden and --layers, or --params 7e9")
    if layers is None and hidden is None:
        assert parameters is not None
        layers = max(1, round((parameters / (12 * ASPECT**2)) ** (1 / 3) / 4) * 4)
    if hidden is None:
        if parameters is None or layers is None:
            raise NoLayout("the width of the model is not known: give --hidden beside --layers, or --params")
        exact = math.sqrt(parameters / (12 * layers))
        unit = 4 * HEAD if exact >= 16 * HEAD else HEAD
        hidden = max(HEAD, round(exact / unit) * unit)
        assumed.append(
            f"the model has {layers} layers of width {hidden}, the usual shape of {parameters:.3g} parameters"
        )
    elif layers is None:
        if parameters is None:
            raise NoLayout("how many layers the model has is not known: give --layers beside --hidden, or --params")
        layers = max(1, round((parameters - vocabulary * hidden) / (12 * hidden**2)))
        assumed.append(f"the model has {layers} layers, by its parameters and its width")
    if heads is not None and hidden % heads:
        raise NoLayout(f"--heads {heads} does not divide the width {hidden}")
    if heads is None:
        heads = next(count for count in range(max(1, hidden // HEAD), 0, -1) if hidden % count == 0)
        assumed.append(f"it has {heads} heads, of {hidden // heads}")
    model = TransformerModel(hidden, heads, layers, sequence, vocabulary, global_batch)
    if parameters is not None and not 0.75 < model.parameters / parameters < 1.33:
        assumed.append(
            f"these sizes make {model.parameters:.3g} parameters, and not the {parameters:.3g} of --params: the sizes "
            "are used"
        )
    return model, assumed


def plan_from_formulas(
    model: TransformerModel, ranks: int, cluster: Cluster, gpus_per_node: int, wanted: Wanted,
    learnt: Measurements | None = None, steps: float | None = None, price: float | None = None,
    assumed: Sequence[str] = (), memory_gib: float | None = None,
) -> FormulaPlan:  # fmt: skip
    """The best layouts, the curve, and what the training costs. steps: of the whole training; price: of a rank an hour.
    learnt: measured steps, from which the figures are learnt; memory_gib: of a device, where it is not the sheet's.
    Raises NoLayout."""
    rows = learnt.steps if learnt is not None else StepShapes.of([])
    calibrated = calibrate(rows, learnt.ms if learnt is not None else np.array([]), cluster.expected())
    limit = memory_gib if memory_gib is not None else cluster.gpu.memory_gib
    assert limit is not None

    def best_of(count: int, free: Wanted) -> Ranked:
        return rank_layouts(calibrated, layouts(model, count, gpus_per_node, free), limit, cluster.dtype)

    best = best_of(ranks, wanted)
    curve = []
    for count in sorted({round(ranks * share) for share in CURVE if ranks * share >= 1}):
        try:
            free = wanted if count == ranks else replace(wanted, dp=None)
            curve.append((count, best if count == ranks else best_of(count, free)))
        except NoLayout:
            continue
    first = best.predicted
    spent = spending((float(first.ms[0]), float(first.low[0]), float(first.high[0])), ranks, steps, price)
    nodes = ranks > gpus_per_node
    said = [*assumed, *_assumptions(cluster, calibrated, nodes, gpus_per_node)]
    said.append(f"strong scaling: the global batch stays {model.global_batch} sequences on any number of ranks")
    return FormulaPlan(
        model, ranks, cluster, gpus_per_node, calibrated, best, curve, spent, said,
        _tells_most(calibrated, best.shapes.take(np.array([0]))),
    )  # fmt: skip


def _assumptions(cluster: Cluster, calibrated: Calibrated, nodes: bool, per_node: int) -> list[str]:
    said = [
        f"{per_node} ranks a node, tensor-parallel groups packed first; 1F1B; communication of gradients not hidden"
    ]
    if calibrated.rows == 0:
        said.append(
            "no step was measured: the figures are those of published steps on A100, scaled to "
            f"{cluster.gpu.name} by its data sheet"
        )
    words = {"link_gb_s": "its link inside a node", "tb_a_second": "the rate of its memory"}
    for name in cluster.gpu.unchecked:
        said.append(f"{words[name]} could not be compared with a data sheet of {cluster.gpu.name}: known less")
    said.append("memory: Adam in mixed precision, attention scores not kept (flash attention), no offload")
    if nodes:
        measured = calibrated.network_measured
        if cluster.network_gb_s is None and not measured:
            said.append(f"the network between nodes is a guess of {NETWORK_GB_S:.0f} GB/s a node: give --bandwidth")
        elif not measured:
            said.append("the network between nodes was never measured: the rate is the one given, and so a guess")
    return said


def _tells_most(calibrated: Calibrated, best: StepShapes) -> str:
    """Which figure the interval of the best layout owes most to, and what would measure it."""
    fitted = calibrated.fitted
    slopes = fitted.slopes(best)[0]
    share = slopes * (fitted.covariance @ slopes)
    figure = COEFFICIENTS[int(np.argmax(share))]
    how = {
        "network_gb_s": "run a few steps on two nodes",
        "node_link_gb_s": "run a few steps on one node with this tensor parallelism",
        "all_reduce_us": "run a few steps on one node with this tensor parallelism",
        "hand_over_us": "run a few steps with two stages",
        "hand_over_exposed": "run a few steps with two stages",
        "gradient_bytes": "run a few steps on two nodes with data parallelism alone",
    }.get(
        figure.name,
        f"run a few steps of this layer on {max(1, int(best.tp[0]))} GPU(s), micro-batch {best.micro_batch[0]:.0f}",
    )
    return f"{how}, and give them with --calibrate: most of the interval comes from not knowing {figure.says}"
