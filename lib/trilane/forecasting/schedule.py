"""Schedule: for each batch size of a ramp the DP, microbatch and nodes to run it on, with the restarts counted."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from trilane.config.batch_rampup import Phase, Ramp
from trilane.config.parallelism import RECOMPUTE
from trilane.planning.space import divisors
from trilane.utils.validation import require_integer, require_positive

KEPT = ("", *RECOMPUTE)  # a measured row may not say what it recomputed


@dataclass(frozen=True, kw_only=True)
class ScheduledTopology:
    """One way to run a batch size: `seconds` an iteration on `gpus` GPUs, in whole `nodes`."""

    tp: int
    pp: int
    dp: int
    mbs: int
    nodes: int
    seconds: float
    recompute: str = ""

    @property
    def gpus(self) -> int:
        """GPUs that compute."""
        return self.tp * self.pp * self.dp

    def same_job(self, other: "ScheduledTopology") -> bool:
        """Whether a job can go on from the one to the other without a restart."""
        return self._job == other._job

    @property
    def _job(self) -> tuple[int, int, int, int, str]:
        return self.tp, self.pp, self.dp, self.mbs, self.recompute


@dataclass(frozen=True, kw_only=True)
class ScheduleStep:
    """A phase of the ramp on its choice; `restart` where the job before it was another, after `pause_s`."""

    phase: Phase
    choice: ScheduledTopology
    restart: bool
    pause_s: float

    @property
    def seconds(self) -> float:
        """Seconds of its iterations."""
        return self.phase.iterations * self.choice.seconds


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Every phase on its choice."""

    steps: tuple[ScheduleStep, ...]

    @property
    def restarts(self) -> int:
        """Restarts that changes of nodes, DP or microbatch need."""
        return sum(step.restart for step in self.steps)

    @property
    def days(self) -> float:
        """Days of all phases and restarts."""
        return sum(step.seconds + step.pause_s for step in self.steps) / 86400

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of the same."""
        return sum((s.seconds + s.pause_s) * s.choice.gpus for s in self.steps) / 3600


def phases_of(ramp: Ramp, gbs: int, samples: int) -> list[Phase]:
    """The phases of a ramp and the constant one after it, cut where `samples` are consumed."""
    found, consumed = [], 0
    for phase in ramp.phases(gbs):
        if consumed < samples:
            needed = min(phase.iterations, -(-(samples - consumed) // phase.gbs))
            found.append(Phase(gbs=phase.gbs, iterations=needed, first=consumed))
            consumed += needed * phase.gbs
    rest = -(-(samples - consumed) // gbs)
    return [*found, Phase(gbs=gbs, iterations=rest, first=consumed)] if rest > 0 else found


def optimize(
    phases: Sequence[Phase],
    choices: Sequence[Sequence[ScheduledTopology]],
    restart_s: float,
    day_worth: float,
    reshape_s: float = 0.0,
) -> Schedule:
    """The cheapest way through all phases, where a day is worth `day_worth` GPU-hours (0: only GPU-hours count).

    A change of job costs `restart_s`, and `reshape_s` more where TP or PP change and checkpoints must be cut anew.
    Exact: the best cost of every choice of a phase follows from those of the phase before (Viterbi). Among equals the
    faster. Each phase needs at least one choice.
    """
    assert all(choices), "a phase without a choice"
    best = np.zeros(0)
    back: list[np.ndarray] = []
    for i, (phase, options) in enumerate(zip(phases, choices, strict=True)):
        # GPU-hours of a second; a hair of time breaks ties
        price = np.array([c.gpus / 3600 + (day_worth + 1e-6) / 86400 for c in options])
        own = phase.iterations * np.array([c.seconds for c in options]) * price
        if i:
            total = best + price[:, None] * _switch_s(choices[i - 1], options, restart_s, reshape_s)
            back.append(total.argmin(axis=1))
            own = own + total.min(axis=1)
        best = own
    chosen = [int(best.argmin())]
    for step in reversed(back):
        chosen.append(int(step[chosen[-1]]))
    picked = [options[i] for options, i in zip(choices, reversed(chosen), strict=True)]
    pauses = [0.0, *(float(_switch_s([a], [b], restart_s, reshape_s)[0, 0]) for a, b in pairwise(picked))]
    steps = [
        ScheduleStep(phase=phase, choice=c, pause_s=pause, restart=i > 0 and not c.same_job(picked[i - 1]))
        for i, (phase, c, pause) in enumerate(zip(phases, picked, pauses, strict=True))
    ]
    return Schedule(steps=tuple(steps))


def _switch_s(
    before: Sequence[ScheduledTopology], after: Sequence[ScheduledTopology], restart_s: float, reshape_s: float
) -> np.ndarray:
    """Seconds of going on from each choice (columns) to each other (rows)."""
    old, new = (
        np.array([(c.tp, c.pp, c.dp, c.mbs, KEPT.index(c.recompute)) for c in group]) for group in (before, after)
    )
    differs = new[:, None, :] != old[None, :, :]
    return differs.any(axis=-1) * restart_s + differs[..., :2].any(axis=-1) * reshape_s


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A measured row: seconds an iteration of `gbs` sequences on tp x pp x dp GPUs at one microbatch size."""

    tp: int
    pp: int
    dp: int
    mbs: int
    gbs: int
    seconds: float

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "mbs", "gbs"):
            require_integer(name, getattr(self, name), 1)
        require_positive("seconds", self.seconds)

    @property
    def gpu_seconds(self) -> float:
        """GPU-seconds a sequence."""
        return self.seconds * self.tp * self.pp * self.dp / self.gbs

    def at(self, gbs: int, dp: int, fill: bool) -> float:
        """Seconds an iteration at another batch size and DP, the work divided evenly.

        With `fill` the pipeline's filling and draining is counted: (m + p - 1) / m, Narayanan et al. 2021, section 2.2.
        Left out: gradient reduction, which does not shrink with the batch.
        """
        idle = [(m + self.pp - 1) / m for m in (gbs / dp / self.mbs, self.gbs / self.dp / self.mbs)]
        return self.gpu_seconds * gbs / (self.tp * self.pp * dp) * (idle[0] / idle[1] if fill else 1.0)


def fastest(rows: Sequence[Benchmark]) -> list[Benchmark]:
    """The rows of the tp x pp that has the fastest row; of equals that with the smallest replica.

    A run that keeps its tp x pp keeps its checkpoints' shards; DP and microbatch may change.
    """
    first = min(rows, key=lambda r: (r.gpu_seconds, r.tp * r.pp))
    return [r for r in rows if (r.tp, r.pp) == (first.tp, first.pp)]


def benchmark_choices(
    rows: Sequence[Benchmark], gbs: int, gpus_per_node: int, max_nodes: int, fill: bool = True
) -> list[ScheduledTopology]:
    """Every way to run `gbs` in whole nodes at the pace of measured rows, faster by as many replicas as it allows."""
    found = []
    for row in rows:
        for dp in divisors(gbs // row.mbs) if gbs % row.mbs == 0 else []:
            nodes, beside = divmod(row.tp * row.pp * dp, gpus_per_node)
            if beside == 0 and 1 <= nodes <= max_nodes:
                seconds = row.at(gbs, dp, fill)
                found.append(ScheduledTopology(tp=row.tp, pp=row.pp, dp=dp, mbs=row.mbs, nodes=nodes, seconds=seconds))
    return found
