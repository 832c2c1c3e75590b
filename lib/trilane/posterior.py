"""Posterior: how well measured rows pin the constants down, and so how far off the prediction of one plan may be."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trilane.calibration import Calibration, Case
from trilane.constants import BOUNDS
from trilane.fitting import CPU_DEVIATION, time_errors

STEP = 1e-3  # of a constant's logarithm, for slopes
# What the model is off by when its constants are known, as a deviation of ln(seconds), and how many rows that belief
# weighs: tables that no constant has seen are off by 5.4 % (90 of 100 rows, docs/planner.md), which is 3.3 % of
# deviation; half as much again, because that was one cluster in 12 days.
MISFIT, MISFIT_ROWS = 0.05, 6
WILD = 0.15  # a row that is further off counts as this much


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """A calibration with the covariance of its constants' logarithms, (C, C) in the order of BOUNDS.

    `misfit` is the deviation of ln(seconds) that stays when all constants are known, learnt from `rows` rows.
    """

    calibration: Calibration
    covariance: np.ndarray
    misfit: float
    rows: int

    def shared_covariance(self, cases: Sequence[Case]) -> np.ndarray:
        """Covariance of the cases' ln(seconds) by what they share, the constants: (N, N), without the misfit."""
        slopes = sensitivities(cases, self.calibration)  # (N, C)
        return slopes @ self.covariance @ slopes.T

    def half_widths(self, cases: Sequence[Case]) -> np.ndarray:
        """Half-widths of the 90 % intervals of ln(seconds), (N,): Student's t, as the misfit is an estimate."""
        from scipy.stats import t

        deviations = np.sqrt(np.diag(self.shared_covariance(cases)) + self.misfit**2)
        return float(t.ppf(0.95, self.rows + MISFIT_ROWS)) * deviations


def sensitivities(cases: Sequence[Case], calibration: Calibration) -> np.ndarray:
    """Slopes of ln(seconds) over the logarithm of each constant, (N, C), by central differences."""
    errors = time_errors(cases, np.ones(len(cases)), (), calibration.overlap)
    at = np.log([getattr(calibration, name) for name in BOUNDS])
    steps = STEP * np.eye(len(at))
    return np.array([(errors(at + step) - errors(at - step)) / (2 * STEP) for step in steps]).T


def posterior(cases: Sequence[Case], measured: Sequence[float], calibration: Calibration) -> Posterior:
    """What is believed at `calibration`, which was fitted to the cases; the prior of constants.py where there are none.

    Laplace's approximation: precision = 1 / deviation^2 of the priors + slopes' slopes / misfit^2. The misfit counts
    MISFIT_ROWS rows of MISFIT among the errors. Left out: the doubt about regimes' factors, and that rows of one
    table may err alike.
    """
    deviation = np.array([bound.deviation for bound in BOUNDS.values()])
    if any(c.cluster.gpu.kind == "cpu" for c in cases):
        deviation = np.maximum(deviation, CPU_DEVIATION)
    precision, misfit = np.diag(deviation**-2.0), MISFIT
    if cases:
        on_days = [calibration.on(c.day, c.topology.gpus) for c in cases]
        errors = [
            float(time_errors([c], np.array([s]), (), on.overlap)(np.log([getattr(on, n) for n in BOUNDS]))[0])
            for c, s, on in zip(cases, measured, on_days, strict=True)
        ]
        squares = sum(min(abs(e), WILD) ** 2 for e in errors)
        misfit = math.sqrt((MISFIT_ROWS * MISFIT**2 + squares) / (MISFIT_ROWS + len(errors)))
        slopes = sensitivities(cases, calibration)
        precision = precision + slopes.T @ slopes / misfit**2
    return Posterior(calibration=calibration, covariance=np.linalg.inv(precision), misfit=misfit, rows=len(cases))
