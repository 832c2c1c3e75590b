"""What interrupts a long run, how often and for how long, each figure with its source; the
checkpoint interval.
"""

import math
from dataclasses import replace
from enum import StrEnum

from trilane.config.cluster import Cluster
from trilane.config.options import check, option
from trilane.config.parallelism import Topology
from trilane.utils.frozen import frozen
from trilane.utils.validation import require, shipped_json

NODE_YEAR_S = 365.25 * 86400.0
NODE_FAILURE = "node failure"


class Cause(StrEnum):
    """What costs time beside interruptions; none of these may have such a name."""

    PREDICTION = "slower than predicted"
    QUEUE = "queue between jobs"
    EVALUATION = "evaluation"
    SAVING = "saving"
    JOB_ENDS = "ends of jobs"


@frozen
class Interruption:
    """One kind of interruption: its median rates, per year of each node at work and per year of the
    whole job.

    `spread` is the standard deviation of the logarithm of that rate between runs and clusters;
    `idle_hours` the mean, exponentially distributed, until the restart begins, charged as GPU-hours
    or not.
    """

    name: str
    per_node_year: float = option(0.0)
    per_year: float = option(0.0)
    # one run in six has exp(3) = 20 times as many stops as the median; no published rates are
    # further apart
    spread: float = option(0.0, maximum=3)
    idle_hours: float = option(0.0)
    charged: bool = True
    source: str = ""

    def __post_init__(self) -> None:
        check(self, "stop.")
        rule = "names another cause of the forecast"
        require(self.name not in set(Cause), "stop.name", self.name, rule)


def published_stops() -> tuple[Interruption, ...]:
    """The interruptions that published runs report."""
    return tuple(Interruption(**stop) for stop in shipped_json("risks")["stops"])


@frozen
class FailureModel:
    """The costs of a long run that a benchmark does not show: "sources" of data/risks.json has
    where each is from.

    `spare_nodes` None: at most 4; `checkpoint_s` 0: Daly's optimum for these interruptions;
    `queue_s` is waited before every restart; `write_nodes` wrote together when that rate was
    measured (0: assumed, for any number); `common` is the share of a prediction's error (its
    variance) that all batch sizes have.
    """

    # those that published runs report: "rates" of data/risks.json derives them
    stops: tuple[Interruption, ...] = option(published_stops)
    startup_s: float = option(1200.0)
    queue_s: float = option(0.0)
    repair_hours: float = option(24.0)
    spare_nodes: int | None = option(None)
    job_hours: float = option(20.0, above=0)
    evaluation_every: int = option(1000, minimum=1)
    evaluation_iters: int = option(100)
    checkpoint_s: float = option(0.0)
    write_bytes_per_s: float = option(1e9, above=0)
    write_nodes: int = option(0)
    slowdown: float = option(1.02, above=0, maximum=1e6)
    slowdown_spread: float = option(0.02)
    common: float = option(0.8, maximum=1)

    def __post_init__(self) -> None:
        check(self)
        names = [stop.name for stop in self.stops]
        for name in names:
            require(names.count(name) == 1, "stop.name", name, "must be unique")

    def spares_of(self, free_nodes: int) -> int:
        """Nodes in reserve where the jobs leave so many free: by default 4, as of Jean Zay's 52 in
        the prequel.
        """
        return min(4 if self.spare_nodes is None else self.spare_nodes, free_nodes)

    def spares_text(self, free_nodes: int) -> str:
        """The nodes in reserve, and whether somebody asked for them."""
        text = f"{self.spares_of(free_nodes)} spare nodes"
        if self.spare_nodes is None:
            text += ", the default (--spare-nodes)"
        return text

    def stops_per_s(self, nodes: float) -> float:
        """Interruptions of all kinds per second of work on so many nodes, at the median rates."""
        return sum(s.per_node_year * nodes + s.per_year for s in self.stops) / NODE_YEAR_S

    def measured(self, cluster: Cluster) -> "FailureModel":
        """The model with the cluster's storage, where that was measured and no other
        rate is given.
        """
        rate = cluster.write_bytes_per_s
        if rate is None or self.write_bytes_per_s != FailureModel.write_bytes_per_s:
            return self
        return replace(self, write_bytes_per_s=rate, write_nodes=max(1, cluster.storage_nodes))

    @property
    def storage(self) -> str:
        """What a node writes, as it was measured."""
        rate = f"{self.write_bytes_per_s / 1e9:.3g} GB/s a node"
        return f"{rate}, measured on nodes: {self.write_nodes}; more are held to their total"

    def save_s(self, checkpoint_bytes: float, nodes: float) -> float:
        """Seconds in which so many nodes write a checkpoint. More than were measured are held to
        the total of those: nobody has seen the storage take more, and a deadline must not rest on
        it; measure on as many to know.
        """
        writers = min(max(nodes, 1.0), self.write_nodes or math.inf)
        return checkpoint_bytes / (writers * self.write_bytes_per_s)

    def checkpoint_interval_s(self, save_s: float, nodes: float) -> float:
        """Seconds between checkpoints: the given interval, else Daly's optimum for saves of
        `save_s` seconds.
        """
        rate = self.stops_per_s(nodes)
        if self.checkpoint_s or rate == 0:
            return self.checkpoint_s or self.job_hours * 3600
        return daly_interval_s(save_s, 1 / rate)

    def stop_cost(
        self, stop: Interruption, nodes: float, interval_s: float, spare_nodes: int
    ) -> tuple[float, float, float]:
        """Mean seconds of one interruption, their variance, and the share of them that is charged.

        Lost work is uniform in the interval (variance t^2 / 12); idle time, start-up, queue and
        waits are exponential.
        """
        wait = self.queue_s
        if stop.name == NODE_FAILURE:
            wait += wait_for_node_s(nodes, stop.per_node_year, self.repair_hours, spare_nodes)
        lost = interval_s / 2
        idle = stop.idle_hours * 3600
        mean = lost + idle + self.startup_s + wait
        variance = interval_s**2 / 12 + idle**2 + self.startup_s**2 + wait**2
        charged = lost + self.startup_s + idle * stop.charged
        return mean, variance, charged / max(mean, 1e-9)


def evaluation_s(topology: Topology, batches: float, sec_per_it: float) -> float:
    """Seconds of an evaluation: forward passes of a quarter of an iteration with full
    recomputation, else a third.
    """
    share = 1 / 4 if topology.recompute == "full" else 1 / 3
    return share * batches * sec_per_it


def daly_interval_s(save_s: float, mtbf_s: float) -> float:
    """Daly 2006 (Future Generation Computer Systems 22), equation 37, for saves of d seconds and a
    mean time M:

    sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d      where d < 2 M, else M

    The first factor is Young's interval (1974, Communications of the ACM 17(9)), for d much shorter
    than M.
    """
    d = save_s
    M = mtbf_s
    x = d / (2 * M)
    if x >= 1:
        return M
    return math.sqrt(2 * d * M) * (1 + math.sqrt(x) / 3 + x / 9) - d


def wait_for_node_s(
    nodes: float, per_node_year: float, repair_hours: float, spare_nodes: int
) -> float:
    """Mean seconds that a failure waits for a node: zero while a spare is free, else until the next
    one is repaired.

    The nodes under repair are Poisson with mean nodes x rate x repair time (an M/M/inf queue); with
    `spare_nodes` or more of them under repair no spare is left, and the first is back after repair
    / (spares + 1).
    """
    from scipy.special import gammainc  # a fifth of a second, which only forecasts need

    mean = nodes * per_node_year / NODE_YEAR_S * repair_hours * 3600
    # P(n >= k) of a Poisson number n is the regularized incomplete gamma function of k and its mean
    if spare_nodes:
        none_left = float(gammainc(spare_nodes, mean))
    else:
        none_left = 1.0
    return none_left * repair_hours * 3600 / (spare_nodes + 1)
