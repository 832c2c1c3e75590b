"""Posterior: the uncertainty of predictions by constants fitted to rows, as a covariance over plans."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trilane.costmodel.calibration import Calibration, Configuration
from trilane.costmodel.constants import BOUNDS
from trilane.costmodel.fit import NOISE, deviations, left_out, slopes, time_errors

# Error of the model with known constants, as a deviation of ln(seconds), and the rows that this prior counts for. In
# cross-validation by table 90 of 100 rows are within 5.4 % (docs/planner.md), a deviation of 3.3 %; half as much is
# added because that was one cluster in 12 days.
MISFIT, MISFIT_ROWS = 0.065, 6
FOREIGN = 0.09  # the same on a site or stack without rows: leaving out each file misses by 4 to 19 % at the median
T_QUANTILE = 1.943  # of Student's t with MISFIT_ROWS degrees of freedom, at 95 %
Z90 = 1.6449  # standard deviations of a normal distribution's 90 % interval, on each side


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """A calibration, and the `cases` that it was fitted to.

    ln(seconds) of a plan is the model's, with a prior deviation `deviation` (C,) of the constants' logarithms, plus a
    misfit of the plan (deviation `misfit`), plus the `noise` of a run. All are normal, and the model is linearized at
    the calibration (Laplace's approximation).
    """

    calibration: Calibration
    cases: tuple[Configuration, ...]
    deviation: np.ndarray
    misfit: float
    noise: float

    def half_widths(self, cases: Sequence[Configuration]) -> np.ndarray:
        """Half-widths of the 90 % intervals of ln(seconds) around the calibration's predictions, (N,).

        From Student's t, as the misfit is an estimate. A measured case gets the interval of an unmeasured one like it.
        Left out: the uncertainty of regimes' factors, and correlated misfits of similar plans.
        """
        from scipy.stats import t

        effects, known = (sensitivities(c, self.calibration) * self.deviation for c in (cases, self.cases))
        alike = np.array([[_same(x, y) for y in self.cases] for x in self.cases], float).reshape(2 * (len(known),))
        rows = known @ known.T + self.misfit**2 * alike + self.noise**2 * np.eye(len(known))
        across = effects @ known.T
        shared = np.diag(effects @ effects.T - across @ np.linalg.solve(rows, across.T))
        return float(t.ppf(0.95, len(self.cases) + MISFIT_ROWS)) * np.sqrt(shared + self.misfit**2)


def posterior(
    cases: Sequence[Configuration], measured: Sequence[float], calibration: Calibration, prior: Calibration
) -> Posterior:
    """The posterior at `calibration`, to which `prior` was fitted by the cases; the prior uncertainty without any.

    The misfit is estimated from the errors that the rows would have if left out of the fit, and MISFIT_ROWS further
    rows with an error of MISFIT; without rows it is that of another site and stack.
    """
    kinds = {c.cluster.gpu.kind for c in cases} or {"cuda"}
    rows = zip(cases, measured, strict=True)
    errors = np.array([row_error(c, s, calibration.on(c.day, c.topology.gpus)) for c, s in rows])
    deviation = deviations(cases, prior)
    effects = sensitivities(cases, calibration) * deviation
    unseen = left_out(errors, effects, MISFIT) if len(errors) else errors
    squares = float((np.minimum(np.abs(unseen), 0.15) ** 2).sum())  # no single row says that the model is worse
    return Posterior(
        calibration=calibration,
        cases=tuple(cases),
        deviation=deviation,
        misfit=FOREIGN if not cases else math.sqrt((MISFIT_ROWS * MISFIT**2 + squares) / (MISFIT_ROWS + len(errors))),
        noise=_noise(max(NOISE[kind] for kind in kinds), cases, errors),
    )


def _noise(usual: float, cases: Sequence[Configuration], errors: np.ndarray) -> float:
    """Deviation between runs of one case, from the repeats and from `usual`, which counts as two repeats."""
    squares, freedom, left = 0.0, 0, list(range(len(cases)))
    while left:
        alike = [i for i in left if _same(cases[left[0]], cases[i])]
        squares += float(np.var(errors[alike])) * len(alike)
        freedom += len(alike) - 1
        left = [i for i in left if i not in alike]
    return math.sqrt((2 * usual**2 + squares) / (2 + freedom))


def sensitivities(cases: Sequence[Configuration], calibration: Calibration) -> np.ndarray:
    """Derivatives of ln(seconds) by ln(constant), (N, C) in the order of BOUNDS, by central differences."""
    if not cases:
        return np.empty((0, len(BOUNDS)))
    errors, at = time_errors(cases, np.ones(len(cases)), (), calibration), log_constants(calibration)
    return slopes(errors, at)


def row_error(case: Configuration, seconds: float, calibration: Calibration) -> float:
    """ln(predicted / measured) of one run."""
    return float(time_errors([case], np.array([seconds]), (), calibration)(log_constants(calibration))[0])


def log_constants(calibration: Calibration) -> np.ndarray:
    """The logarithms of the constants, (C,) in the order of BOUNDS."""
    return np.log([getattr(calibration, name) for name in BOUNDS])


def _same(a: Configuration, b: Configuration) -> bool:
    return (a.shape, a.topology, a.cluster.name) == (b.shape, b.topology, b.cluster.name)
