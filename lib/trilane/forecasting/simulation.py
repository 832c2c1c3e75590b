"""Monte Carlo simulation of a training run: thousands of runs at once, in arrays over runs (N) and pieces (J)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trilane.forecasting.failures import NODE_FAILURE, NODE_YEAR_S, Cause, FailureModel
from trilane.utils.progress import progress
from trilane.utils.validation import require

MOST_UNDONE = 0.9  # of the work that interruptions undo: a run that loses more never ends


@dataclass(frozen=True, kw_only=True)
class CapacityWindow:
    """A time span of constant capacity, in seconds after the start of the run; `shared` with others, so that each
    restart waits in the queue.
    """

    start_s: float
    end_s: float
    gpus: int
    shared: bool


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A window of capacity and what every piece would take in it; empty arrays where nothing can run.

    `queue_share` is the wait in the queue per second of work, where the capacity is shared and jobs must end;
    `spare_nodes` the nodes in reserve.
    """

    window: CapacityWindow
    seconds: np.ndarray = field(default_factory=lambda: np.zeros(0))  # (J,) of work and of the schedule's restarts
    gpus: np.ndarray = field(default_factory=lambda: np.zeros(0))  # (J,)
    nodes: np.ndarray = field(default_factory=lambda: np.zeros(0))  # (J,)
    queue_share: float = 0.0
    spare_nodes: int = 0


@dataclass(frozen=True, kw_only=True)
class Uncertainty:
    """Lognormal error of the predicted seconds, as standard deviations of the logarithm.

    `common` is one factor for a whole run, `independent` one for each batch size; `slowdown` is the median factor.
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
    """N simulated runs: total and charged seconds, seconds until the end of each piece, lost seconds by cause."""

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
        """Sum of `count` independent times: a gamma of the same mean and variance (exact for exponential ones)."""
        if self.rng is None or variance == 0:
            return count * mean
        shape = np.maximum(count * mean * mean / variance, 1e-12)
        return np.where(count > 0, self.rng.gamma(shape, variance / mean), 0.0)


class Simulation:
    """`runs` simulated runs; with rng None one run, every random number replaced by its mean.

    same        (J,) the batch size's index of each piece; pieces of one index share the error of their prediction
    shares      certain extra time per second of work: evaluation, saving, ends of jobs
    interval_s  seconds between checkpoints

    Within a stretch: the time that the rest of the work would take there, the interruptions that fall on it (Poisson,
    by node-years), the cost of each (lost work, uniform in the interval; idle time; waiting for a node; queue;
    start-up). If that ends within the stretch the run is finished; else the same share of work and interruptions falls
    into it. Left out: interruptions during a start-up, correlated failures, speeds that drift during a run.
    """

    def __init__(
        self,
        same: np.ndarray,
        uncertainty: Uncertainty,
        risks: FailureModel,
        shares: dict[str, float],
        interval_s: float,
        runs: int,
        rng: np.random.Generator | None,
    ):
        draws = _Draws(runs, rng)
        self.risks, self.shares, self.interval_s, self.draws = risks, shares, interval_s, draws
        noise = draws.lognormal(uncertainty.common) * uncertainty.slowdown
        self.factor = noise[:, None] * draws.lognormal(uncertainty.independent, int(same.max()) + 1)[:, same]  # (N, J)
        self.rates = [draws.lognormal(stop.spread) for stop in risks.stops]
        self.done = np.zeros((runs, len(same)))  # share of each piece
        self.now, self.gpu_s, self.started = np.zeros(runs), np.zeros(runs), np.zeros(runs, bool)
        self.reached = np.full((runs, len(same)), np.nan)
        causes = (*shares, Cause.QUEUE, Cause.CHANGE, *(stop.name for stop in risks.stops))
        self.lost = {name: np.zeros(runs) for name in causes}
        self.held = np.zeros(len(same))  # GPUs of each piece in the previous stretch

    def run(self, stretches: Sequence[Stretch]) -> Outcomes:
        """Simulate the runs through the stretches."""
        for stretch in progress(stretches, "simulation", "stretch"):
            self.simulate(stretch)
        return Outcomes(wall_s=self.now, gpu_s=self.gpu_s, reached_s=self.reached, lost_s=self.lost)

    def simulate(self, stretch: Stretch) -> None:
        """Advance every unfinished run to the end of the stretch or of its work."""
        window, idle = stretch.window, stretch.seconds.size == 0
        active = (self.now < window.end_s) & (self.done[:, -1] < 1)
        self.now = np.where(active, np.maximum(self.now, window.start_s), self.now)
        held, self.held = self.held, np.zeros(self.done.shape[1]) if idle else stretch.gpus
        if idle or not active.any():
            return
        whole = stretch.seconds * self.factor
        rest = whole * (1 - self.done) * active[:, None]
        work = rest.sum(axis=1)
        stops, charged = self.stops(work, rest @ stretch.nodes, stretch)
        certain = {name: work * share for name, share in self.shares.items()}
        # a job restarts where its number of GPUs changes, or after a window without any
        piece = (self.done < 1).argmax(axis=1)
        restarted = self.started & active & (stretch.gpus[piece] != held[piece])
        left = np.maximum(window.end_s - self.now, 0.0)
        queued = np.minimum(left, np.where(restarted, window.shared * self.risks.queue_s, 0.0))
        starting = np.minimum(left - queued, np.where(restarted, self.risks.startup_s, 0.0))
        entering = queued + starting
        stops[Cause.QUEUE] = work * stretch.queue_share
        needed = work + sum(certain.values()) + sum(stops.values())
        share = np.where(active, np.minimum(1.0, (left - entering) / np.maximum(needed, 1e-9)), 0.0)
        part = self.advance(whole, rest, share * work, self.now + entering, needed / np.maximum(work, 1e-9))
        gpus = (part @ stretch.gpus) / np.maximum(part.sum(axis=1), 1e-9)
        self.gpu_s += gpus * (share * (work + sum(certain.values()) + charged) + np.where(share > 0, starting, 0.0))
        self.lost[Cause.QUEUE] += queued
        self.lost[Cause.CHANGE] += starting
        for name, seconds in (*certain.items(), *stops.items()):
            self.lost[name] += share * seconds
        ends = np.where(share >= 1, self.now + entering + needed, window.end_s)
        self.now = np.where(active, ends, self.now)
        self.started |= active & (share > 0)

    def advance(
        self, whole: np.ndarray, rest: np.ndarray, worked: np.ndarray, begin: np.ndarray, stretched: np.ndarray
    ) -> np.ndarray:
        """Do `worked` seconds of work, piece after piece; returns the seconds of each piece (N, J).

        `stretched` is the elapsed time per second of work, for the dates at which pieces end.
        """
        ends = rest.cumsum(axis=1)
        part = np.clip(worked[:, None] - (ends - rest), 0, rest)
        fresh = (rest > 0) & (ends <= worked[:, None] * (1 + 1e-12))
        self.reached = np.where(fresh, begin[:, None] + ends * stretched[:, None], self.reached)
        self.done = np.where(fresh, 1.0, self.done + part / np.maximum(whole, 1e-9))
        return part

    def stops(self, work: np.ndarray, node_s: np.ndarray, stretch: Stretch) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Seconds lost to each kind of interruption, and those of all kinds that are charged.

        Repeated work can be interrupted too: T = W + rate T interval / 2, so T = W / (1 - rate interval / 2).
        """
        kinds, seconds, busy = self.risks.stops, np.maximum(work, 1e-9), work > 0
        rates = zip(kinds, self.rates, strict=True)
        means = [rate * (s.per_node_year * node_s + s.per_year * work) / NODE_YEAR_S for s, rate in rates]
        undone = sum(means) * self.interval_s / 2 / seconds
        nodes = float(np.median((node_s / seconds)[busy]))
        counts = [mean / (1 - np.minimum(undone, MOST_UNDONE)) for mean in means]
        where = (nodes, self.interval_s, stretch.window.shared, stretch.spare_nodes)
        costs = [self.risks.stop_cost(stop, *where) for stop in kinds]
        shares = [float(np.median((n * cost[0] / seconds)[busy])) for n, cost in zip(counts, costs, strict=True)]
        if kinds:
            self.require_progress(float(np.median(undone[busy])), shares)
        lost: dict[str, np.ndarray] = {}
        charged = np.zeros(self.draws.runs)
        for stop, count, (each, variance, charged_share) in zip(kinds, counts, costs, strict=True):
            lost[stop.name] = self.draws.total(self.draws.count(count), each, variance)
            charged += lost[stop.name] * charged_share
        return lost, charged

    def require_progress(self, undone: float, shares: Sequence[float]) -> None:
        """ValueError where interruptions undo most of the work, or take ten times as long (`shares`, by kind)."""
        if undone < MOST_UNDONE and sum(shares) < 10:
            return
        if undone >= MOST_UNDONE and self.risks.checkpoint_s:
            rule = "such a run would undo most of its work, as interruptions come sooner than checkpoints"
            require(False, "checkpoint-minutes", f"{self.interval_s / 60:g}", rule)
        worst = self.risks.stops[int(np.argmax(shares))]
        field = "failures-per-node-year" if worst.name == NODE_FAILURE else f"stop {worst.name}"
        rule = "such a run would lose ten times its work, or undo most of it; needs fewer interruptions"
        require(False, field, f"{worst.per_node_year or worst.per_year:g}", rule)
