"""The hardware's figures, learnt from measured steps.

The logarithms of the figures begin at what is typical of the hardware and are moved by the measured steps: the sum of
absolute relative errors of the step (least absolute deviations, so that a single odd row does not bend the rest), of
the layer effects below, and the squared distance from what is typical, is made least. So a figure is never negative, a
relative error counts the same for a short step and a long one, and one that no row tells about stays typical. Where the
data sheet is known no rate is above it.

A layer effect is how much slower the kernels of one shape (width, heads, sequence, micro-batch, tensor-parallel size)
are than the figures say. It is kept for the shapes that were measured: on other ranks the same kernels run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from .cost import UNKNOWN, Expected, cost
from .steps import Column, StepShapes

ROW_SCALE: Final = 0.01
"""Relative error of a row that is expected beside its layer's effect."""
EFFECT_SCALE: Final = 0.03
"""Of a layer effect."""
SMOOTH: Final = 0.3
"""The absolute value is rounded below this many scales, so that it has a derivative."""
EVALUATIONS: Final = 80
DIFFERENCE: Final = 1e-6
"""Of a logarithm, for slopes."""
WITHIN: Final = 1e-3
"""By how much a fit begins below what the hardware does at most, as logarithms."""

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Fitted:
    """logs: natural logarithms of COEFFICIENTS. effects: layer shape -> layer effect. covariance: of `logs`."""

    logs: Column
    effects: Mapping[tuple[float, ...], float]
    covariance: Matrix

    @property
    def values(self) -> Column:
        return np.exp(self.logs)

    def known(self, steps: StepShapes) -> npt.NDArray[np.bool_]:
        """Whether each row has a layer that was measured."""
        return np.array([shape in self.effects for shape in steps.layer_shapes()], dtype=np.bool_)

    def step_ms(self, steps: StepShapes) -> Column:
        effects = np.array([self.effects.get(shape, 0.0) for shape in steps.layer_shapes()])
        return cost(self.values, steps, effects).step

    def spread(self, steps: StepShapes) -> Column:
        """Standard deviation of the logarithm of each row's time that comes from not knowing the figures: the farther
        from what was measured, the more."""
        slopes = self.slopes(steps)
        variance: Column = np.einsum("ri,ij,rj->r", slopes, self.covariance, slopes)
        found: Column = np.sqrt(variance)
        return found

    def slopes(self, steps: StepShapes) -> Matrix:
        """By how much the logarithm of each row's time grows with that of each figure, [rows, figures]."""
        return np.stack([self._slope(steps, i) for i in range(len(self.logs))], axis=1)

    def _slope(self, steps: StepShapes, which: int) -> Column:
        step = np.zeros(len(self.logs))
        step[which] = 1e-4
        up, down = (cost(np.exp(self.logs + sign * step), steps).step for sign in (1, -1))
        return (np.log(up) - np.log(down)) / 2e-4


def fit(steps: StepShapes, ms: Column, hardware: Expected = UNKNOWN, begin: Fitted | None = None) -> Fitted:
    """What the rows say of the hardware. ms: their measured times. hardware: what is known of it. begin: a fit of
    nearly the same rows, to be quicker. No row at all gives what is typical."""
    from scipy.optimize import least_squares

    expected, spread, measured = np.log(hardware.typical), hardware.spread, np.log(ms)
    shapes = steps.layer_shapes()
    place = {shape: i for i, shape in enumerate(sorted(set(shapes)))}
    which = np.array([place[shape] for shape in shapes], dtype=np.int64)
    rows, count, effects = len(shapes), len(expected), len(place)

    def logs_of(state: Column, moved: float = 0.0) -> Column:
        """Logarithms of the predicted times. moved: added to all layer effects."""
        with np.errstate(over="ignore"):
            found: Column = np.log(cost(np.exp(state[:count]), steps, state[count:][which] + moved).step)
        return found

    def residuals(state: Column) -> Column:
        error = (logs_of(state) - measured) / ROW_SCALE
        return np.concatenate(
            [absolute(error), (state[:count] - expected) / spread, absolute(state[count:] / EFFECT_SCALE)]
        )

    def jacobian(state: Column) -> Matrix:
        """A row's time depends on one layer effect, so one evaluation tells the slopes by all of them."""
        here = logs_of(state)
        found = np.zeros((rows + count + effects, count + effects))
        for i in range(count):
            beside = state.copy()
            beside[i] += DIFFERENCE
            found[:rows, i] = (logs_of(beside) - here) / DIFFERENCE
        found[np.arange(rows), count + which] = (logs_of(state, DIFFERENCE) - here) / DIFFERENCE
        found[:rows] *= (slope((here - measured) / ROW_SCALE) / ROW_SCALE)[:, None]
        found[rows + np.arange(count), np.arange(count)] = 1 / spread
        effect = np.arange(count, count + effects)
        found[rows + effect, effect] = slope(state[count:] / EFFECT_SCALE) / EFFECT_SCALE
        return found

    if begin is None:
        start = np.concatenate([expected, np.zeros(effects)])
    else:
        start = np.concatenate([begin.logs, [begin.effects.get(shape, 0.0) for shape in place]])
    most = np.concatenate([np.log(hardware.most), np.full(effects, np.inf)])
    found = least_squares(
        residuals, np.minimum(start, most - WITHIN), jac=jacobian, x_scale="jac", max_nfev=EVALUATIONS,
        bounds=(-np.inf, most),
    )  # fmt: skip
    covariance = np.linalg.pinv(found.jac.T @ found.jac, hermitian=True)[:count, :count]
    return Fitted(found.x[:count], dict(zip(place, map(float, found.x[count:]), strict=True)), covariance)


def absolute(error: Column) -> Column:
    """What, squared and halved, is the absolute value, rounded near zero."""
    rounded: Column = np.sign(error) * np.sqrt(2 * (np.sqrt(SMOOTH**2 + error**2) - SMOOTH))
    return rounded


def slope(error: Column) -> Column:
    """The derivative of `absolute`."""
    root = np.sqrt(SMOOTH**2 + error**2)
    size = np.sqrt(2 * np.maximum(root - SMOOTH, 0))
    # Near zero `absolute` is error / sqrt(SMOOTH).
    near = np.abs(error) < 1e-6
    found: Column = np.where(near, 1 / np.sqrt(SMOOTH), np.abs(error) / np.where(near, 1, root * size))
    return found
