"""Monte Carlo simulation of a training run: thousands of runs at once, in arrays over runs (N) and
pieces (J).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trilane.forecasting.failures import NODE_FAILURE, NODE_YEAR_S, Cause, FailureModel
from trilane.utils.validation import require

MOST_UNDONE = 0.9  # of the work that interruptions undo: a run that loses more never ends


@dataclass(frozen=True, kw_only=True)
class Work:
    """The pieces of a run in their order; those of one batch size, `same`, share the error of their
    prediction.
    """

    same: np.ndarray  # (J,) index of the batch size
    seconds: np.ndarray  # (J,) of work and of the schedule's restarts
    gpus: np.ndarray  # (J,)
    nodes: np.ndarray  # (J,)
    spare_nodes: int = 0  # in reserve


@dataclass(frozen=True, kw_only=True)
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
        return self.slowdown * math.exp(min((self.common**2 + self.independent**2) / 2, 99.0))


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """N simulated runs: total and charged seconds, seconds until the end of each piece, lost
    seconds by cause.
    """

    wall_s: np.ndarray  # (N,)
    gpu_s: np.ndarray  # (N,)
    reached_s: np.ndarray  # (N, J)
    lost_s: dict[str, np.ndarray]  # (N,) each


class _Draws:
    """Random numbers of N runs, or their means where there is no generator."""

    def __init__(self, runs: int, rng: np.random.Generator | None):
        self.runs, self.rng = runs, rng

    def lognormal(self, deviation: float, *shape: int) -> np.ndarray:
        """Factors with median 1."""
        if self.rng is None or deviation == 0:
            return np.ones((self.runs, *shape))
        return np.exp(deviation * self.rng.standard_normal((self.runs, *shape)))

    def count(self, mean: np.ndarray) -> np.ndarray:
        """Poisson."""
        return mean if self.rng is None else self.rng.poisson(mean).astype(float)

    def total(self, count: np.ndarray, mean: float, variance: float) -> np.ndarray:
        """Sum of `count` independent times: a gamma of the same mean and variance (exact for
        exponential ones).
        """
        if self.rng is None or variance == 0:
            return count * mean
        shape = np.maximum(count * mean * mean / variance, 1e-12)
        return np.where(count > 0, self.rng.gamma(shape, variance / mean), 0.0)


def simulate(
    work: Work,
    uncertainty: Uncertainty,
    risks: FailureModel,
    shares: dict[str, float],
    interval_s: float,
    runs: int,
    rng: np.random.Generator | None,
) -> Outcomes:
    """`runs` simulated runs; with rng None one run, every random number replaced by its mean.

    shares      certain extra time per second of work: evaluation, saving, ends of jobs
    interval_s  seconds between checkpoints

    The time that the work takes, the interruptions that fall on it (Poisson, by node-years), the
    cost of each (lost work, uniform in the interval; idle time; waiting for a node; queue;
    start-up). Left out: interruptions during a start-up, correlated failures, speeds that drift
    during a run.
    """
    draws, kinds = _Draws(runs, rng), int(work.same.max()) + 1
    noise = draws.lognormal(uncertainty.common) * uncertainty.slowdown
    pieces = (
        work.seconds
        * noise[:, None]
        * draws.lognormal(uncertainty.independent, kinds)[:, work.same]
    )  # (N, J)
    rates = [draws.lognormal(stop.spread) for stop in risks.stops]
    worked = pieces.sum(axis=1)
    stops, charged = _stops(
        worked, pieces @ work.nodes, work.spare_nodes, rates, risks, interval_s, draws
    )
    certain = {name: worked * share for name, share in shares.items()}
    lost = {**certain, Cause.QUEUE: worked * risks.queue_s / (risks.job_hours * 3600), **stops}
    wall = worked + sum(lost.values())
    gpu_s = (pieces @ work.gpus) / worked * (worked + sum(certain.values()) + charged)
    return Outcomes(
        wall_s=wall,
        gpu_s=gpu_s,
        reached_s=pieces.cumsum(axis=1) * (wall / worked)[:, None],
        lost_s=lost,
    )


def _stops(
    work: np.ndarray,
    node_s: np.ndarray,
    spare_nodes: int,
    rates: Sequence[np.ndarray],
    risks: FailureModel,
    interval_s: float,
    draws: _Draws,
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Seconds lost to each kind of interruption, and those of all kinds that are charged, (N,)
    each.

    Repeated work can be interrupted too: T = W + rate T interval / 2, so T = W / (1 - rate interval
    / 2).
    """
    kinds, charged = list(zip(risks.stops, rates, strict=True)), np.zeros(draws.runs)
    means = [
        rate * (s.per_node_year * node_s + s.per_year * work) / NODE_YEAR_S for s, rate in kinds
    ]
    undone = sum(means, charged) * interval_s / 2 / work
    counts = [mean / (1 - np.minimum(undone, MOST_UNDONE)) for mean in means]
    costs = [
        risks.stop_cost(s, float(np.median(node_s / work)), interval_s, spare_nodes)
        for s in risks.stops
    ]
    taken = [float(np.median(n * cost[0] / work)) for n, cost in zip(counts, costs, strict=True)]
    _require_progress(risks, interval_s, float(np.median(undone)), taken)
    lost: dict[str, np.ndarray] = {}
    for stop, count, (each, variance, share) in zip(risks.stops, counts, costs, strict=True):
        lost[stop.name] = draws.total(draws.count(count), each, variance)
        charged = charged + lost[stop.name] * share
    return lost, charged


def _require_progress(
    risks: FailureModel, interval_s: float, undone: float, shares: Sequence[float]
) -> None:
    """ValueError where interruptions undo most of the work, or take ten times as long (`shares`, by
    kind).
    """
    if undone < MOST_UNDONE and sum(shares) < 10:
        return
    if undone >= MOST_UNDONE and risks.checkpoint_s:
        rule = (
            "such a run would undo most of its work, as interruptions come sooner than checkpoints"
        )
        require(False, "checkpoint-minutes", f"{interval_s / 60:g}", rule)
    worst = risks.stops[int(np.argmax(shares))]
    field = "failures-per-node-year" if worst.name == NODE_FAILURE else f"stop {worst.name}"
    rule = "such a run would lose ten times its work, or undo most of it; needs fewer interruptions"
    require(False, field, f"{worst.per_node_year or worst.per_year:g}", rule)
