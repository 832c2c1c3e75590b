"""Monte Carlo simulation of a training run: thousands of runs at once, in arrays over runs (N) and
pieces (J).
"""

import math

import numpy as np

from trilane.forecasting.failures import NODE_YEAR_S, Cause, FailureModel
from trilane.utils.frozen import frozen
from trilane.utils.validation import require

MOST_UNDONE = 0.9  # of the work that interruptions undo: a run that loses more never ends
MOST_LOST = 10  # times its work that a run may lose: no plan is meant to


@frozen
class Work:
    """The pieces of a run in their order; those of one batch size, `same`, share the error of their
    prediction.
    """

    same: np.ndarray  # (J,) index of the batch size
    seconds: np.ndarray  # (J,) of work
    gpus: float
    nodes: float
    spare_nodes: int = 0  # in reserve


@frozen
class Uncertainty:
    """Lognormal error of the predicted seconds, as standard deviations of the logarithm.

    `common` is one factor for a whole run, `independent` one for each batch size; `slowdown` is the
    median factor.
    """

    common: float
    independent: float
    slowdown: float = 1.0

    @property
    def mean(self) -> float:
        """The mean factor, above the median as of any lognormal number."""
        # any larger exponent has no float
        return self.slowdown * math.exp(min((self.common**2 + self.independent**2) / 2, 99.0))


@frozen
class Outcomes:
    """N simulated runs: total and charged seconds, seconds until the end of each piece, lost
    seconds by cause.
    """

    wall_s: np.ndarray  # (N,)
    gpu_s: np.ndarray  # (N,)
    reached_s: np.ndarray  # (N, J)
    lost_s: dict[str, np.ndarray]  # (N,) each


def _lognormal(rng: np.random.Generator, deviation: float, *shape: int) -> np.ndarray:
    """Factors with median 1."""
    if deviation == 0:
        return np.ones(shape)
    return np.exp(deviation * rng.standard_normal(shape))


def _total(rng: np.random.Generator, count: np.ndarray, mean: float, variance: float) -> np.ndarray:
    """Sum of `count` independent times: a gamma of the same mean and variance (exact for
    exponential ones).
    """
    if variance == 0:
        return count * mean
    shape = np.maximum(count * mean * mean / variance, 1e-12)
    return np.where(count > 0, rng.gamma(shape, variance / mean), 0.0)


def simulate(
    work: Work,
    uncertainty: Uncertainty,
    risks: FailureModel,
    shares: dict[str, float],
    interval_s: float,
    runs: int,
    rng: np.random.Generator,
) -> Outcomes:
    """`runs` simulated runs.

    shares      certain extra time per second of work: evaluation, saving, ends of jobs
    interval_s  seconds between checkpoints

    The time that the work takes, the interruptions that fall on it (Poisson, by node-years), the
    cost of each (lost work, uniform in the interval; idle time; waiting for a node; queue;
    start-up). Repeated work can be interrupted too: T = W + rate T interval / 2, so
    T = W / (1 - rate interval / 2). Left out: interruptions during a start-up, correlated failures,
    speeds that drift during a run. ValueError where interruptions undo most of the work, or take
    ten times as long.
    """
    common = _lognormal(rng, uncertainty.common, runs) * uncertainty.slowdown
    own = _lognormal(rng, uncertainty.independent, runs, int(work.same.max()) + 1)
    pieces = work.seconds * common[:, None] * own[:, work.same]  # (N, J)
    rates = [_lognormal(rng, stop.spread, runs) for stop in risks.stops]
    worked = pieces.sum(axis=1)

    means = [
        rate * (stop.per_node_year * work.nodes + stop.per_year) * worked / NODE_YEAR_S
        for stop, rate in zip(risks.stops, rates, strict=True)
    ]
    undone = sum(means, np.zeros(runs)) * interval_s / 2 / worked
    costs = [risks.stop_cost(s, work.nodes, interval_s, work.spare_nodes) for s in risks.stops]
    counts = [mean / (1 - np.minimum(undone, MOST_UNDONE)) for mean in means]
    parts = [float(np.median(n * c[0] / worked)) for n, c in zip(counts, costs, strict=True)]
    again = float(np.median(undone))
    is_progress = again < MOST_UNDONE and sum(parts) < MOST_LOST
    rule = "such a run would undo most of its work, or lose ten times it, in interruptions"
    require(is_progress, "interruptions", f"{again:.0%} undone", rule)

    certain = {name: worked * share for name, share in shares.items()}
    lost = {**certain, Cause.QUEUE: worked * risks.queue_s / (risks.job_hours * 3600)}
    charged = worked + sum(certain.values())
    for stop, count, (mean, variance, share) in zip(risks.stops, counts, costs, strict=True):
        lost[stop.name] = _total(rng, rng.poisson(count).astype(float), mean, variance)
        charged = charged + lost[stop.name] * share
    wall = worked + sum(lost.values())
    return Outcomes(
        wall_s=wall,
        gpu_s=work.gpus * charged,
        reached_s=pieces.cumsum(axis=1) * (wall / worked)[:, None],
        lost_s=lost,
    )
