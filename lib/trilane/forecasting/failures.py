"""Stops: what interrupts a long run, how often and for how long, each figure with its source; how often to save."""

import dataclasses
import math
from dataclasses import dataclass

from trilane.utils.validation import require, require_not_negative, require_positive

NODE_YEAR_S = 365.25 * 86400.0


NODE_FAILURE = "node failure"


MOST_SPREAD = 3.0


MOST_AWAY = 700.0  # nodes under repair on average: above it e^-mean is no number, and the spread a few per cent


# What else costs time; no stop may be called so.
QUEUE, CHANGE = "queue between jobs", "change of capacity"


CERTAIN = EVALUATION, SAVING, JOB_ENDS = "evaluation", "saving", "ends of jobs"


OWN_NAMES = (QUEUE, CHANGE, *CERTAIN, "iterations", "slower than a benchmark", "slower than predicted")


@dataclass(frozen=True, kw_only=True)
class Interruption:
    """One kind of stop.

    per_node_year, per_year   how often, by nodes at work and by time at work: the median of what is believed
    spread                    standard deviation of the logarithm of that rate, between runs and machines
    idle_hours                mean hours until the restart begins; exponential
    charged                   whether the GPUs are ours meanwhile
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
        require(self.name not in OWN_NAMES, "stop.name", self.name, "is the calendar's own name for something else")


def usual_stops() -> tuple[Interruption, ...]:
    """What published runs report. The figures of the papers are quoted from memory.

    Node failures, per node-year: OPT-175B (Zhang et al. 2022, arXiv:2205.01068, section 2.5) cycled over 100 of 124
    hosts in two months, 4.9; Llama 3 (Grattafiori et al. 2024, arXiv:2407.21783, table 5) 419 unexpected stops on 2,048
    nodes in 54 days, 78 % of them hardware, 1.1; two research clusters (Kokolis et al. 2024, arXiv:2410.21680) 6.5 and
    2.3 per 1,000 node-days, 2.4 and 0.85. Their geometric mean is 1.8, the standard deviation of their logarithms 0.8.
    Hangs and crashes of software: OPT 35 manual restarts, 1.7; Llama 3 54 software faults, 0.18; mean 0.55.
    Rollbacks: PaLM (Chowdhery et al. 2022, arXiv:2204.02311, section 5.1) about 20 loss spikes in its largest run, each
    100 steps back; smaller ones had few. Outages of a machine, and how soon people notice, are assumptions.
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
            source="OPT-175B, Llama 3; three hours until somebody sees it, nights included: assumed",
        ),
        Interruption(
            name="rollback after a loss spike",
            per_year=20.0,
            spread=1.0,
            idle_hours=3.0,
            source="PaLM: 20 in its largest run; three hours of iterations done again and of looking: assumed",
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


# Where the defaults of Risks come from, for the tables of a report.
SOURCES = {
    "startup_s": "20 minutes: assumed; MegaScale (arXiv:2402.15627) is back at work within 15",
    "reshape_s": "an hour to cut a checkpoint of other TP or PP anew: assumed",
    "queue_s": "2 hours, where the capacity is shared: assumed",
    "repair_hours": "a day: assumed, from the prequel's 'Hanging Issue' (nodes came back the next morning)",
    "spare_nodes": "prequel, 'Hardware': 4 of 52 nodes are kept",
    "job_hours": "Jean Zay, QoS t3: 20 hours",
    "evaluation_every": "Megatron-LM's --eval-interval",
    "evaluation_iters": "Megatron-LM's --eval-iters",
    "checkpoint_s": "0: Daly's optimum (Daly 2006)",
    "write_bytes_per_s": "1 GB/s a node: assumed",
    "slowdown": "2 % slower than a benchmark in the long run: assumed",
    "slowdown_spread": "give or take 2 %: assumed",
    "common": "a prediction's errors at two batch sizes of one topology are mostly the same: assumed",
}


@dataclass(frozen=True, kw_only=True)
class FailureModel:
    """Everything that a benchmark does not show. All assumptions but where a source is named.

    startup_s           from a job's start to its first iteration: launch, loading the checkpoint, building the data
                        index. MegaScale (Jiang et al. 2024, arXiv:2402.15627) is back at work within 15 minutes
    reshape_s           what a change of TP or PP takes beside the restart: checkpoints are cut anew
    queue_s             mean wait in the queue before each restart, only while the capacity is shared
    repair_hours        mean until a broken node is back: over night, as the prequel tells of 13 of 52 ('Hanging Issue')
    spare_nodes         nodes that stand by; the prequel keeps 4 of 52
    job_hours           the longest job the queue takes: 20 on Jean Zay (QoS t3); each ends with a checkpoint
    evaluation_every    iterations between evaluations, and iterations of one: Megatron-LM's --eval-interval 1000 and
    evaluation_iters    --eval-iters 100
    checkpoint_s        seconds between checkpoints; 0: Daly's optimum for these stops
    write_bytes_per_s   what one node writes to storage
    slowdown, spread    what a long run is slower than its benchmark (stragglers, data, heat), median and deviation of
                        its logarithm
    common              share of a prediction's error (its variance) that all batch sizes have in common
    """

    stops: tuple[Interruption, ...] = dataclasses.field(default_factory=usual_stops)
    startup_s: float = 1200.0
    reshape_s: float = 3600.0
    queue_s: float = 7200.0
    repair_hours: float = 24.0
    spare_nodes: int = 4
    job_hours: float = 20.0
    evaluation_every: int = 1000
    evaluation_iters: int = 100
    checkpoint_s: float = 0.0
    write_bytes_per_s: float = 1e9
    slowdown: float = 1.02
    slowdown_spread: float = 0.02
    common: float = 0.8

    def __post_init__(self) -> None:
        for name in (
            "startup_s",
            "reshape_s",
            "queue_s",
            "repair_hours",
            "spare_nodes",
            "checkpoint_s",
            "evaluation_iters",
            "slowdown_spread",
        ):
            value = getattr(self, name)
            require_not_negative(name, value)
        for name in ("job_hours", "evaluation_every", "write_bytes_per_s", "slowdown"):
            require_positive(name, getattr(self, name))
        names = [stop.name for stop in self.stops]
        twice = next((name for name in names if names.count(name) > 1), "")
        require(not twice, "stop.name", twice, "stands there twice")
        require(0 <= self.common <= 1, "common", self.common, "must lie between 0 and 1")

    def with_failures(self, per_node_year: float) -> "FailureModel":
        """The same with a known rate of node failures: no doubt about the rate itself is left."""
        require_not_negative("failures-per-node-year", per_node_year)
        known = tuple(
            dataclasses.replace(s, per_node_year=per_node_year, spread=0.0, source="given")
            if s.name == NODE_FAILURE
            else s
            for s in self.stops
        )
        return dataclasses.replace(self, stops=known)

    def stops_per_s(self, nodes: float) -> float:
        """Stops of all kinds per second of work on so many nodes, at the median rates."""
        return sum(s.per_node_year * nodes + s.per_year for s in self.stops) / NODE_YEAR_S

    def checkpoint_interval_s(self, save_s: float, nodes: float) -> float:
        """Seconds between checkpoints: as given, else Daly's optimum."""
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


def daly_wall_s(work_s: float, interval_s: float, save_s: float, mtbf_s: float, restart_s: float) -> float:
    """Expected seconds of `work_s` with a checkpoint after every `interval_s` of work and stops at random.

        M e^(R/M) (e^((t + d)/M) - 1) W / t            Daly 2006, equation 20

    Exact where stops come at a constant rate, also during restart and save.
    """
    M = mtbf_s
    return M * math.exp(restart_s / M) * (math.exp((interval_s + save_s) / M) - 1) * work_s / interval_s


def wait_for_node_s(nodes: float, per_node_year: float, repair_hours: float, spare_nodes: int) -> float:
    """Mean seconds that a failure waits for a node: nothing while a spare stands by, else until the next is repaired.

    The nodes under repair are Poisson with mean nodes x rate x repair time (a queue with as many repairers as needed);
    with `spare_nodes` or more of them away there is none left, and the first is back after repair / (spares + 1).
    """
    mean = nodes * per_node_year / NODE_YEAR_S * repair_hours * 3600
    if mean > MOST_AWAY:
        return repair_hours * 3600 / (spare_nodes + 1) if spare_nodes < mean else 0.0
    term, below = math.exp(-mean), 0.0
    for k in range(spare_nodes):
        if k > mean and term < 1e-18:  # what is left does not matter, and there may be a billion spares
            break
        below += term
        term *= mean / (k + 1)
    return max(0.0, 1 - below) * repair_hours * 3600 / (spare_nodes + 1)
