"""Montecarlo: thousands of possible runs of one plan at once, each with its own luck; arrays over runs and phases."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trilane.forecasting.capacity import CapacityWindow
from trilane.forecasting.failures import (
    CHANGE,
    NODE_FAILURE,
    NODE_YEAR_S,
    QUEUE,
    FailureModel,
    Interruption,
    wait_for_node_s,
)
from trilane.utils.validation import require

MOST_UNDONE, MOST_LOST = 0.9, 10.0  # work undone and time lost, per work, from which on a run counts as endless


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A window of capacity and what every phase takes in it: seconds, GPUs and nodes; no phases where none can run.

    `queue_share` is the wait in the queue per second of work, where the capacity is shared and jobs must end.
    """

    window: CapacityWindow
    seconds: np.ndarray  # (J,) of work and of restarts that the schedule needs
    gpus: np.ndarray  # (J,)
    nodes: np.ndarray  # (J,)
    queue_share: float = 0.0

    @property
    def idle(self) -> bool:
        """Whether nothing can run here."""
        return self.seconds.size == 0


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """How wrong the pace may be: deviations of logarithms, common to a run and of each batch size alone."""

    common: float
    alone: float
    slowdown: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Outcomes:
    """N runs: seconds until done, GPU-seconds charged, seconds until the end of each phase (N, J), seconds by cause."""

    wall_s: np.ndarray  # (N,)
    gpu_s: np.ndarray  # (N,)
    reached_s: np.ndarray  # (N, J)
    lost_s: dict[str, np.ndarray]  # (N,) each


class _Luck:
    """The draws of N runs, or their means where there is no generator."""

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


def simulate(
    stretches: Sequence[Stretch],
    same: np.ndarray,
    doubt: Doubt,
    risks: FailureModel,
    shares: dict[str, float],
    interval_s: float,
    runs: int,
    rng: np.random.Generator | None,
) -> Outcomes:
    """`runs` possible courses of a run through its stretches, or with rng None the one of average luck.

    same        (J,) a number for each phase; phases of one number share the error of their prediction
    shares      extra time per second of work that is certain: evaluation, saving, ends of jobs
    interval_s  seconds between checkpoints

    Within a stretch: how long the rest of the work would take there, the stops that fall on it (Poisson, by
    node-years), what each costs (lost work uniform in the interval, idle time, a node to wait for, queue, start-up). If
    that ends within the stretch the run is done; else the same share of work and stops falls into it. Left out: stops
    during a start-up; that a failure is likelier after another; speeds that drift during a run.
    """
    course = _Course(same, doubt, risks, shares, interval_s, _Luck(runs, rng))
    for stretch in stretches:
        course.through(stretch)
    return Outcomes(wall_s=course.now, gpu_s=course.gpu_s, reached_s=course.reached, lost_s=course.lost)


class _Course:
    """N runs on their way: `now` and `gpu_s` (N,), `done` and `reached` (N, J)."""

    def __init__(
        self,
        same: np.ndarray,
        doubt: Doubt,
        risks: FailureModel,
        shares: dict[str, float],
        interval_s: float,
        luck: _Luck,
    ):
        self.risks, self.shares, self.interval_s, self.luck = risks, shares, interval_s, luck
        noise = luck.lognormal(doubt.common) * doubt.slowdown
        self.factor = noise[:, None] * luck.lognormal(doubt.alone, int(same.max()) + 1)[:, same]  # (N, J)
        self.rates = [luck.lognormal(stop.spread) for stop in risks.stops]
        self.done, self.now, self.gpu_s = np.zeros((luck.runs, len(same))), np.zeros(luck.runs), np.zeros(luck.runs)
        self.reached = np.full((luck.runs, len(same)), np.nan)
        self.lost = {name: np.zeros(luck.runs) for name in (*shares, QUEUE, CHANGE, *(s.name for s in risks.stops))}
        self.started = np.zeros(luck.runs, bool)
        self.held = np.zeros(len(same))  # GPUs of each phase in the stretch before

    def through(self, stretch: Stretch) -> None:
        """Take every run that is not done to the end of the stretch, or of its work."""
        window = stretch.window
        active = (self.now < window.end_s) & (self.done[:, -1] < 1)
        self.now = np.where(active, np.maximum(self.now, window.start_s), self.now)
        held, self.held = self.held, np.zeros(self.done.shape[1]) if stretch.idle else stretch.gpus
        if stretch.idle or not active.any():
            return  # the next stretch begins where it begins
        whole = stretch.seconds * self.factor
        rest = whole * (1 - self.done) * active[:, None]
        work = rest.sum(axis=1)
        stops, charged = self.stops(work, rest @ stretch.nodes, window.shared)
        certain = {name: work * share for name, share in self.shares.items()}
        # a job that goes on with another number of GPUs, or after none, begins anew
        phase = (self.done < 1).argmax(axis=1)
        anew = self.started & active & (stretch.gpus[phase] != held[phase])
        left = np.maximum(window.end_s - self.now, 0.0)
        queued = np.minimum(left, np.where(anew, window.shared * self.risks.queue_s, 0.0))
        starting = np.minimum(left - queued, np.where(anew, self.risks.startup_s, 0.0))
        entering = queued + starting
        stops[QUEUE] = work * stretch.queue_share
        needed = work + sum(certain.values()) + sum(stops.values())
        share = np.where(active, np.minimum(1.0, (left - entering) / np.maximum(needed, 1e-9)), 0.0)
        part = self.advance(whole, rest, share * work, self.now + entering, needed / np.maximum(work, 1e-9))
        gpus = (part @ stretch.gpus) / np.maximum(part.sum(axis=1), 1e-9)
        self.gpu_s += gpus * (share * (work + sum(certain.values()) + charged) + np.where(share > 0, starting, 0.0))
        self.lost[QUEUE] += queued
        self.lost[CHANGE] += starting
        for name, seconds in (*certain.items(), *stops.items()):
            self.lost[name] += share * seconds
        ends = np.where(share >= 1, self.now + entering + needed, window.end_s)
        self.now = np.where(active, ends, self.now)
        self.started |= active & (share > 0)

    def advance(
        self, whole: np.ndarray, rest: np.ndarray, worked: np.ndarray, begin: np.ndarray, stretched: np.ndarray
    ) -> np.ndarray:
        """Count `worked` seconds of work as done, phase after phase; the seconds of each phase (N, J).

        `stretched` is the time that passes per second of work: it dates the ends of the phases.
        """
        ends = rest.cumsum(axis=1)
        part = np.clip(worked[:, None] - (ends - rest), 0, rest)
        fresh = (rest > 0) & (ends <= worked[:, None] * (1 + 1e-12))
        self.reached = np.where(fresh, begin[:, None] + ends * stretched[:, None], self.reached)
        self.done = np.where(fresh, 1.0, self.done + part / np.maximum(whole, 1e-9))
        return part

    def stops(self, work: np.ndarray, node_s: np.ndarray, shared: bool) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Seconds lost to each kind of stop, and how many of them all the GPUs are charged.

        Work done again can be stopped again: T = W + rate T interval / 2, so stops fall on W / (1 - rate interval / 2).
        """
        kinds = self.risks.stops
        means = [
            rate * (s.per_node_year * node_s + s.per_year * work) / NODE_YEAR_S
            for s, rate in zip(kinds, self.rates, strict=True)
        ]
        seconds, busy = np.maximum(work, 1e-9), work > 0
        undone = sum(means) * self.interval_s / 2 / seconds
        nodes = float(np.median((node_s / seconds)[busy]))
        counts = [mean / (1 - np.minimum(undone, MOST_UNDONE)) for mean in means]
        costs = [stop_cost(stop, self.risks, nodes, self.interval_s, shared) for stop in kinds]
        shares = [float(np.median((n * cost[0] / seconds)[busy])) for n, cost in zip(counts, costs, strict=True)]
        require_an_end(self.risks, self.interval_s, float(np.median(undone[busy])), shares)
        lost: dict[str, np.ndarray] = {}
        charged = np.zeros(self.luck.runs)
        for stop, count, (each, variance, ours) in zip(kinds, counts, costs, strict=True):
            lost[stop.name] = self.luck.total(self.luck.count(count), each, variance)
            charged += lost[stop.name] * ours
        return lost, charged


def require_an_end(risks: FailureModel, interval_s: float, undone: float, shares: Sequence[float]) -> None:
    """ValueError where stops undo most of the work, or take ten times as long as it (`shares` of it, by kind)."""
    if not shares or (undone < MOST_UNDONE and sum(shares) < MOST_LOST):
        return
    if undone >= MOST_UNDONE and risks.checkpoint_s:
        rule = "such a run would undo most of its work, as stops come sooner than checkpoints"
        require(False, "checkpoint-minutes", f"{interval_s / 60:g}", rule)
    worst = risks.stops[int(np.argmax(shares))]
    field = "failures-per-node-year" if worst.name == NODE_FAILURE else f"stop {worst.name}"
    rule = "such a run would lose ten times what it works, or undo most of it; fewer stops, nearer checkpoints"
    require(False, field, f"{worst.per_node_year or worst.per_year:g}", rule)


def stop_cost(
    stop: Interruption, risks: FailureModel, nodes: float, interval_s: float, shared: bool
) -> tuple[float, float, float]:
    """Mean seconds of one stop, their variance, and the share of them that is charged.

    Lost work is uniform in the interval (variance t^2 / 12); idle time, start-up, queue and waits are exponential.
    """
    wait = risks.queue_s if shared else 0.0
    if stop.name == NODE_FAILURE:
        wait += wait_for_node_s(nodes, stop.per_node_year, risks.repair_hours, risks.spare_nodes)
    idle = stop.idle_hours * 3600
    lost, startup = interval_s / 2, risks.startup_s
    mean = lost + idle + startup + wait
    variance = interval_s**2 / 12 + idle**2 + startup**2 + wait**2
    return mean, variance, (lost + startup + idle * stop.charged) / max(mean, 1e-9)
