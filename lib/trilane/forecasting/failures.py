"""What interrupts a long run, how often and for how long, each figure with its source; the checkpoint interval."""

import dataclasses
import math
from dataclasses import dataclass

from trilane.utils.validation import require, require_not_negative, require_positive

NODE_YEAR_S = 365.25 * 86400.0
NODE_FAILURE = "node failure"
USUAL_SPARE_NODES = 4
MOST_SPREAD = 3.0
MOST_UNDER_REPAIR = 700.0  # nodes, on average: above it e^-mean underflows, and the relative spread is a few per cent
# The other causes that cost time; an interruption may not have one of these names.
QUEUE, CHANGE = "queue between jobs", "change of capacity"
CERTAIN = EVALUATION, SAVING, JOB_ENDS = "evaluation", "saving", "ends of jobs"
OWN_NAMES = (QUEUE, CHANGE, *CERTAIN, "iterations", "slower than a benchmark", "slower than predicted")


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """One kind of interruption.

    per_node_year, per_year   median rate, per year of each node at work and per year of the whole job
    spread                    standard deviation of the logarithm of that rate between runs and clusters
    idle_hours                mean hours until the restart begins; exponentially distributed
    charged                   whether these hours are charged as GPU-hours
    source                    where the figures come from
    """

    name: str
    per_node_year: float = 0.0
    per_year: float = 0.0
    spread: float = 0.0
    idle_hours: float = 0.0
    charged: bool = True
    source: str = ""

    def __post_init__(self) -> None:
        for field in ("per_node_year", "per_year", "spread", "idle_hours"):
            value = getattr(self, field)
            require_not_negative(f"stop.{field}", value)
        rule = f"must be at most {MOST_SPREAD}: one run in six then has {math.exp(MOST_SPREAD):.0f} times as many stops"
        require(self.spread <= MOST_SPREAD, "stop.spread", self.spread, rule)
        require(self.name not in OWN_NAMES, "stop.name", self.name, "names another cause of the forecast")


def usual_stops() -> tuple[Interruption, ...]:
    """The interruptions that published runs report. The figures of the papers are quoted from memory.

    Node failures, per node-year: OPT-175B (Zhang et al. 2022, arXiv:2205.01068, section 2.5) cycled over 100 of 124
    hosts in two months, 4.9; Llama 3 (Grattafiori et al. 2024, arXiv:2407.21783, table 5) 419 unexpected stops on 2,048
    nodes in 54 days, 78 % of them hardware, 1.1; two research clusters (Kokolis et al. 2024, arXiv:2410.21680) 6.5 and
    2.3 per 1,000 node-days, 2.4 and 0.85. Their geometric mean is 1.8, the standard deviation of their logarithms 0.8.
    Hangs and crashes of software: OPT 35 manual restarts, 1.7; Llama 3 54 software faults, 0.18; mean 0.55.
    Rollbacks: PaLM (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1) about 20 loss spikes in its largest run, each
    100 steps back; smaller runs had few. The rate of outages and the time until somebody notices a stop are assumed.
    """
    return (
        Interruption(
            name=NODE_FAILURE,
            per_node_year=1.8,
            spread=0.8,
            idle_hours=0.5,
            source="OPT-175B, Llama 3, Kokolis et al. 2024; half an hour: PyTorch's NCCL timeout until 2.2",
        ),
        Interruption(
            name="hang or software crash",
            per_node_year=0.55,
            spread=1.0,
            idle_hours=3.0,
            source="OPT-175B, Llama 3; three hours until somebody notices, nights included: assumed",
        ),
        Interruption(
            name="rollback after a loss spike",
            per_year=20.0,
            spread=1.0,
            idle_hours=3.0,
            source="PaLM: 20 in its largest run; three hours of repeated iterations and of investigation: assumed",
        ),
        Interruption(
            name="outage of the machine",
            per_year=3.0,
            spread=0.5,
            idle_hours=24.0,
            charged=False,
            source="assumed: a computing centre's maintenance and storage",
        ),
    )


# Where the defaults of FailureModel come from, for the tables of a report.
SOURCES = {
    "startup_s": "20 minutes: assumed; MegaScale (arXiv:2402.15627) resumes within 15",
    "reshape_s": "an hour to convert a checkpoint to another TP or PP: assumed",
    "queue_s": "2 hours, where the capacity is shared: assumed",
    "repair_hours": "a day: assumed, from the prequel's 'Hanging Issue' (nodes came back the next morning)",
    "spare_nodes": "prequel, 'Hardware': 4 of 52 nodes are kept; never more than the jobs leave free",
    "job_hours": "Jean Zay, QoS t3: 20 hours",
    "evaluation_every": "Megatron-LM's --eval-interval",
    "evaluation_iters": "Megatron-LM's --eval-iters",
    "checkpoint_s": "0: Daly's optimum (Daly 2006)",
    "write_bytes_per_s": "1 GB/s a node: assumed",
    "slowdown": "a long run is 2 % slower than its benchmark: assumed",
    "slowdown_spread": "standard deviation 2 %: assumed",
    "common": "the errors of a prediction at two batch sizes of one topology are mostly the same: assumed",
}


@dataclass(frozen=True, kw_only=True)
class FailureModel:
    """The costs of a long run that a benchmark does not show. Assumptions, unless a source is named.

    startup_s           from a job's start to its first iteration: launch, checkpoint loading, data index. MegaScale
                        (Jiang et al. 2024, arXiv:2402.15627) resumes within 15 minutes
    reshape_s           what a change of TP or PP takes in addition to the restart: the checkpoint is converted
    queue_s             mean wait in the queue before each restart, only where the capacity is shared
    repair_hours        mean time until a broken node is back: overnight, as 13 of 52 in the prequel ('Hanging Issue')
    spare_nodes         nodes kept in reserve; None: at most 4, the number that the prequel keeps of 52. A forecast
                        never counts more than its jobs leave free
    job_hours           the queue's limit of a job: 20 on Jean Zay (QoS t3); each job ends with a checkpoint
    evaluation_every    iterations between evaluations, and iterations of one: Megatron-LM's --eval-interval 1000 and
    evaluation_iters    --eval-iters 100
    checkpoint_s        seconds between checkpoints; 0: Daly's optimum for these interruptions
    write_bytes_per_s   what one node writes to storage
    slowdown, spread    ratio of a long run's time to its benchmark (stragglers, data, heat): median, and standard
                        deviation of its logarithm
    common              share of a prediction's error (its variance) that all batch sizes have in common
    """

    stops: tuple[Interruption, ...] = dataclasses.field(default_factory=usual_stops)
    startup_s: float = 1200.0
    reshape_s: float = 3600.0
    queue_s: float = 7200.0
    repair_hours: float = 24.0
    spare_nodes: int | None = None
    job_hours: float = 20.0
    evaluation_every: int = 1000
    evaluation_iters: int = 100
    checkpoint_s: float = 0.0
    write_bytes_per_s: float = 1e9
    slowdown: float = 1.02
    slowdown_spread: float = 0.02
    common: float = 0.8

    def __post_init__(self) -> None:
        seconds = ("startup_s", "reshape_s", "queue_s", "repair_hours", "checkpoint_s")
        for name in (*seconds, "evaluation_iters", "slowdown_spread"):
            require_not_negative(name, getattr(self, name))
        if self.spare_nodes is not None:
            require_not_negative("spare_nodes", self.spare_nodes)
        for name in ("job_hours", "evaluation_every", "write_bytes_per_s", "slowdown"):
            require_positive(name, getattr(self, name))
        names = [stop.name for stop in self.stops]
        twice = next((name for name in names if names.count(name) > 1), "")
        require(not twice, "stop.name", twice, "must be unique")
        require(0 <= self.common <= 1, "common", self.common, "must lie between 0 and 1")

    def with_failures(self, per_node_year: float) -> "FailureModel":
        """The model with a known rate of node failures, whose own uncertainty is then zero."""
        require_not_negative("failures-per-node-year", per_node_year)
        given = {"per_node_year": per_node_year, "spread": 0.0, "source": "given"}
        stops = (dataclasses.replace(s, **given) if s.name == NODE_FAILURE else s for s in self.stops)  # type: ignore[arg-type]
        return dataclasses.replace(self, stops=tuple(stops))

    def spares_of(self, free_nodes: int) -> int:
        """Nodes in reserve where the jobs leave so many free."""
        return min(USUAL_SPARE_NODES if self.spare_nodes is None else self.spare_nodes, free_nodes)

    def stops_per_s(self, nodes: float) -> float:
        """Interruptions of all kinds per second of work on so many nodes, at the median rates."""
        return sum(s.per_node_year * nodes + s.per_year for s in self.stops) / NODE_YEAR_S

    def checkpoint_interval_s(self, save_s: float, nodes: float) -> float:
        """Seconds between checkpoints: the given interval, else Daly's optimum for saves of `save_s` seconds."""
        rate = self.stops_per_s(nodes)
        if self.checkpoint_s or rate == 0:
            return self.checkpoint_s or self.job_hours * 3600
        return daly_interval_s(save_s, 1 / rate)


def young_interval_s(save_s: float, mtbf_s: float) -> float:
    """Young 1974 (Communications of the ACM 17(9)): sqrt(2 d M), for a save d much shorter than the mean time M."""
    return math.sqrt(2 * save_s * mtbf_s)


def daly_interval_s(save_s: float, mtbf_s: float) -> float:
    """Daly 2006 (Future Generation Computer Systems 22), equation 37: Young's interval with two more terms, less d.

    sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d      where d < 2 M, else M
    """
    d, M = save_s, mtbf_s
    if d >= 2 * M:
        return M
    x = d / (2 * M)
    return young_interval_s(d, M) * (1 + math.sqrt(x) / 3 + x / 9) - d


def wait_for_node_s(nodes: float, per_node_year: float, repair_hours: float, spare_nodes: int) -> float:
    """Mean seconds that a failure waits for a node: zero while a spare is free, else until the next one is repaired.

    The nodes under repair are Poisson with mean nodes x rate x repair time (an M/M/inf queue); with `spare_nodes` or
    more of them under repair no spare is left, and the first is back after repair / (spares + 1).
    """
    mean = nodes * per_node_year / NODE_YEAR_S * repair_hours * 3600
    if mean > MOST_UNDER_REPAIR:
        return repair_hours * 3600 / (spare_nodes + 1) if spare_nodes < mean else 0.0
    term, below = math.exp(-mean), 0.0
    for k in range(spare_nodes):
        if k > mean and term < 1e-18:  # the remaining terms are negligible, and there may be a billion spares
            break
        below += term
        term *= mean / (k + 1)
    return max(0.0, 1 - below) * repair_hours * 3600 / (spare_nodes + 1)
