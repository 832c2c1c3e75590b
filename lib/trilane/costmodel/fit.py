"""Robust fits of the constants to measured rows, within physical bounds and regularized by a prior;
and the uncertainty of predictions by such constants, as a covariance over plans.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from trilane.config.cluster import Cluster
from trilane.costmodel.calibration import FACTOR, WIDEST, Calibration, Configuration, Regime
from trilane.costmodel.columns import Columns, columns_of
from trilane.costmodel.constants import BOUNDS, GIVEN, Constants
from trilane.costmodel.iteration import iteration_columns
from trilane.utils.frozen import frozen
from trilane.utils.tables import grouped

NOISE = {"cuda": 0.02, "cpu": 0.05}  # of ln(seconds): repeats differ by 0.15-2 % (docs/planner.md)
STEP = 1e-3  # of a constant's logarithm, for slopes
# Error of the model with known constants, as a deviation of ln(seconds). In cross-validation by
# table 90 of 100 rows are within 5.4 % (docs/planner.md), a deviation of 3.3 %; half as much is
# added because that was one cluster in 12 days.
FITTED_MISFIT = 0.033
MISFIT = 0.065
# the same on a site or stack without rows: leaving out each file misses by 3 to 42 % at the median
FOREIGN = 0.09
T_QUANTILE = 1.943  # of Student's t with 6 degrees of freedom, at 95 %
Z90 = 1.6449  # standard deviations of a normal distribution's 90 % interval, on each side
Group = tuple[Cluster, np.ndarray, Columns]
Errors = Callable[[np.ndarray], np.ndarray]


def by_cluster(cases: Sequence[Configuration]) -> list[Group]:
    """The cases of each cluster as Columns, with their indices in `cases`."""
    groups = []
    for index in grouped(range(len(cases)), lambda i: cases[i].cluster.name).values():
        chosen = [cases[i] for i in index]
        rows = [columns_of(c.shape, c.topology, c.engine).numbers for c in chosen]
        columns = Columns(**{n: np.array([row[n] for row in rows], float) for n in rows[0]})
        groups.append((chosen[0].cluster, np.array(index), columns))
    return groups


def robust_minimum(
    errors: Errors,
    start: np.ndarray,
    deviation: np.ndarray,
    bounds: tuple[np.ndarray, np.ndarray],
    noise: float,
) -> np.ndarray:
    """The logs that minimize sum 2 (sqrt(1 + (error/noise)^2) - 1) + sum ((log - start) /
    deviation)^2.

    The first term is soft L1: a row far outside the noise counts by its absolute error, not by its
    square. `errors` takes logs (..., C) to (..., R): a finite difference asks for all its points at
    once.
    """
    from scipy.optimize import least_squares  # half a second, not needed for planning

    def residuals(logs: np.ndarray) -> np.ndarray:
        r = errors(logs) / noise
        robust = np.sign(r) * np.sqrt(2 * (np.sqrt(1 + r * r) - 1))
        return np.concatenate([robust, (logs - start) / deviation], axis=-1)

    def at_once(_: object, points: Iterable[np.ndarray]) -> list[np.ndarray]:
        return list(residuals(np.array(list(points))))

    solution = least_squares(
        residuals,
        np.clip(start, bounds[0] + 1e-9, bounds[1] - 1e-9),
        bounds=bounds,
        x_scale=deviation,
        workers=at_once,
        xtol=1e-5,
        ftol=1e-6,
    )
    return solution.x


def time_errors(
    cases: Sequence[Configuration],
    measured: np.ndarray,
    regimes: Sequence[Regime],
    prior: Constants,
) -> Errors:
    """ln(predicted / measured) (..., R) of the logarithms of the constants, then of the regimes'
    factors, (..., C).
    """
    applies = [np.array([r.applies(c.day, c.topology.gpus) for c in cases]) for r in regimes]
    groups = by_cluster(cases)
    given = {name: getattr(prior, name) for name in GIVEN}

    def errors(logs: np.ndarray) -> np.ndarray:
        predicted = np.empty((*logs.shape[:-1], len(measured)))
        factors = np.moveaxis(np.exp(logs)[..., None], -2, 0)  # (C, ..., 1)
        values = dict(zip(BOUNDS, factors, strict=False))
        for regime, days, factor in zip(regimes, applies, factors[len(BOUNDS) :], strict=True):
            for name in regime.constants:
                values[name] = values[name] * np.where(days, factor, 1.0)
        for cluster, index, columns in groups:
            own = {n: v[..., index] if v.shape[-1] > 1 else v for n, v in values.items()}
            constants = Constants(**own, **given)
            predicted[..., index] = iteration_columns(columns, cluster, constants).total
        return np.log(predicted / measured)

    return errors


def slopes(errors: Errors, at: np.ndarray) -> np.ndarray:
    """Derivatives of the errors (R,) by the logarithms `at` (C,), as (R, C), by central
    differences.
    """
    steps = STEP * np.eye(len(at))
    up, down = np.split(errors(np.vstack([at + steps, at - steps])), 2)
    return (up - down).T / (2 * STEP)


def left_out(errors: np.ndarray, effects: np.ndarray, noise: float) -> np.ndarray:
    """The errors that the rows would have had if each had been left out of the fit, (R,).

    `effects` (R, C) are slopes times the prior deviations. For a linear model with normal errors it
    is exact: an error over one minus the row's own leverage, the diagonal of K (K + noise^2 I)^-1
    with K = effects effects'.
    """
    k = effects @ effects.T
    leverage = np.diag(np.linalg.solve(k + noise**2 * np.eye(len(errors)), k))
    return errors / np.maximum(1 - leverage, 0.1)


@frozen
class Refit:
    """A calibration after rows, and what it is worth.

    before   ln(predicted / measured) of each row by the prior, (N,); after: by a fit without that
             row
    weight   how wide the prior was taken, in its own deviations; 0: the rows do not help, and the
             prior is kept
    """

    calibration: Calibration
    before: np.ndarray
    after: np.ndarray
    weight: float


def refit(cases: Sequence[Configuration], measured: Sequence[float], prior: Calibration) -> Refit:
    """The prior refitted to rows, so far as they help: the weight with the least error of rows that
    were left out.

    Few rows, or rows that contradict each other, pull less; where no weight makes rows that were
    left out 1 % better than the prior does, the prior is kept as it is. Each row is left out alone,
    of more than ten every tenth together.
    """
    problem = _Problem(cases, measured, prior)
    tried = []
    for weight in (0.25, 0.5, 1.0):
        after = problem.unseen(weight)
        fitted = problem.calibration(problem.solve(weight), weight, after)
        tried.append(Refit(calibration=fitted, before=problem.before, after=after, weight=weight))
    best = min(tried, key=lambda result: _loss(result.after))
    if _loss(best.after) <= 0.99 * _loss(problem.before):
        return best
    width = max(prior.half_width, float(np.quantile(np.abs(problem.before), 0.9)))
    kept = replace(prior, half_width=min(width, WIDEST))
    return Refit(calibration=kept, before=problem.before, after=problem.before, weight=0.0)


def fit_time(
    cases: Sequence[Configuration], measured: Sequence[float], prior: Calibration
) -> Calibration:
    """The calibration fitted to `measured` seconds: its constants, and the factors of regimes that
    a case was in.

    A constant that no row depends on keeps its prior. The half-width of the interval is the 90 %
    quantile of the errors that the rows would have if left out, with the prior's half-width as one
    more row, times 1 + 1 / (2 sqrt(rows)) for the scatter of that quantile; at most WIDEST.
    """
    problem = _Problem(cases, measured, prior)
    return problem.calibration(problem.solve())


def _loss(errors: np.ndarray) -> float:
    """Mean error, that of a run's noise at least; one far out counts by its size, not by its
    square.
    """
    return float(np.mean(np.sqrt(NOISE["cuda"] ** 2 + errors**2)))


class _Problem:
    """A fit to rows: what is unknown are the logarithms of the constants, then of the factors of
    regimes, (C,).
    """

    def __init__(
        self, cases: Sequence[Configuration], measured: Sequence[float], prior: Calibration
    ) -> None:
        self.prior = prior
        self.rows = len(cases)
        days = [(c.day, c.topology.gpus) for c in cases]
        self.regimes = [r for r in prior.regimes if any(r.applies(*day) for day in days)]
        self.errors = time_errors(cases, np.asarray(measured, float), self.regimes, prior)
        limits = [*BOUNDS.values(), *[FACTOR] * len(self.regimes)]
        self.bounds = (np.log([b.low for b in limits]), np.log([b.high for b in limits]))
        factors = np.log([regime.factor for regime in self.regimes])
        self.start = np.append(log_constants(prior), factors)
        self.noise = max(NOISE[c.cluster.gpu.kind] for c in cases)
        self.deviation = np.append(prior.deviations, [FACTOR.deviation] * len(self.regimes))
        self.before = self.errors(self.start)

    def solve(self, weight: float = 1.0, keep: Any = slice(None)) -> np.ndarray:
        """The logarithms fitted to the rows that are kept, with priors `weight` times as wide."""

        def errors(logs: np.ndarray) -> np.ndarray:
            return self.errors(logs)[..., keep]

        return robust_minimum(errors, self.start, weight * self.deviation, self.bounds, self.noise)

    def unseen(self, weight: float) -> np.ndarray:
        """The errors of the rows by fits without them, (N,)."""
        if self.rows == 1:
            return self.before
        fold = np.arange(self.rows) % 10
        errors = np.empty(self.rows)
        for number in np.unique(fold):
            is_left_out = fold == number
            fitted = self.solve(weight, ~is_left_out)
            errors[is_left_out] = self.errors(fitted)[is_left_out]
        return errors

    def calibration(
        self, best: np.ndarray, weight: float = 1.0, unseen: np.ndarray | None = None
    ) -> Calibration:
        """The prior with the logarithms found, and how well they are known."""
        misfit = max(self.noise, FITTED_MISFIT)
        deviation = self.deviation * weight
        effects = slopes(self.errors, best) * self.deviation * weight
        if unseen is None:
            unseen = left_out(self.errors(best), effects, misfit)
        width = float(np.quantile(np.append(np.abs(unseen), self.prior.half_width), 0.9))
        width *= 1 + self.rows**-0.5 / 2
        # of the constants given the rows (Laplace's approximation)
        left = np.diag(np.linalg.inv(np.eye(len(best)) + effects.T @ effects / misfit**2))
        factors = np.exp(best).tolist()
        by_regime = dict(zip((r.name for r in self.regimes), factors[len(BOUNDS) :], strict=True))
        regimes = [replace(r, factor=by_regime.get(r.name, r.factor)) for r in self.prior.regimes]
        return replace(
            self.prior,
            **dict(zip(BOUNDS, factors, strict=False)),
            regimes=tuple(regimes),
            half_width=min(max(width, 0.005), WIDEST),
            rows=self.rows,
            deviations=tuple((deviation * np.sqrt(left))[: len(BOUNDS)].tolist()),
        )


def posterior_width(case: Configuration, calibration: Calibration) -> float:
    """Half-width of the 90 % interval of ln(seconds) of a case by constants that no row of its
    cluster and stack was fitted to: by how much its time depends on each and how well that is
    known, and the misfit of another site and stack. All are normal, and the model is linearized
    (Laplace's approximation).
    """
    effects = sensitivities([case], calibration) * calibration.deviations
    return T_QUANTILE * float(np.sqrt((effects**2).sum() + FOREIGN**2))


def sensitivities(cases: Sequence[Configuration], calibration: Calibration) -> np.ndarray:
    """Derivatives of ln(seconds) by ln(constant), (N, C) in the order of BOUNDS, by central
    differences.
    """
    errors = time_errors(cases, np.ones(len(cases)), (), calibration)
    return slopes(errors, log_constants(calibration))


def row_errors(
    cases: Sequence[Configuration], measured: Sequence[float], calibration: Calibration
) -> np.ndarray:
    """ln(predicted / measured) of runs by the constants of their days, (N,)."""
    return _Problem(cases, measured, calibration).before


def log_constants(calibration: Calibration) -> np.ndarray:
    """The logarithms of the constants, (C,) in the order of BOUNDS."""
    return np.log([getattr(calibration, name) for name in BOUNDS])
