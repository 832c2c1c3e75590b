"""The topology and nodes for each batch size of a ramp, the cost of each restart included."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from trilane.config.batch_rampup import Phase, Ramp
from trilane.config.parallelism import RECOMPUTE

RECOMPUTED = ("", *RECOMPUTE)  # a measured row may leave it open


@dataclass(frozen=True, kw_only=True)
class ScheduledTopology:
    """A topology for one batch size: `seconds` per iteration on `gpus` GPUs, in whole `nodes`."""

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
        """Whether a job can continue with `other` without a restart."""
        return self._job == other._job

    @property
    def _job(self) -> tuple[int, int, int, int, str]:
        return self.tp, self.pp, self.dp, self.mbs, self.recompute


@dataclass(frozen=True, kw_only=True)
class ScheduleStep:
    """A phase of the ramp and its topology; `pause_s` is the restart before it, 0 where the job continues."""

    phase: Phase
    choice: ScheduledTopology
    pause_s: float


Schedule = tuple[ScheduleStep, ...]  # every phase of a run


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
    """The cheapest sequence of topologies, where a day is worth `day_worth` GPU-hours (0: only GPU-hours count).

    A change of job costs `restart_s`, and `reshape_s` more where TP or PP change and the checkpoint must be converted.
    Exact dynamic programming over the phases (Viterbi); of equally cheap ones the faster. Each phase needs a choice.
    """
    assert all(choices), "a phase without a choice"
    best = np.zeros(0)
    back: list[np.ndarray] = []
    for i, (phase, options) in enumerate(zip(phases, choices, strict=True)):
        # GPU-hours per second; the small term for time breaks ties
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
    parts = zip(phases, picked, pauses, strict=True)
    return tuple(ScheduleStep(phase=phase, choice=choice, pause_s=pause) for phase, choice, pause in parts)


def _switch_s(
    before: Sequence[ScheduledTopology], after: Sequence[ScheduledTopology], restart_s: float, reshape_s: float
) -> np.ndarray:
    """Seconds to switch from each choice before (columns) to each one after (rows)."""
    old, new = (
        np.array([(c.tp, c.pp, c.dp, c.mbs, RECOMPUTED.index(c.recompute)) for c in group]) for group in (before, after)
    )
    differs = new[:, None, :] != old[None, :, :]
    return differs.any(axis=-1) * restart_s + differs[..., :2].any(axis=-1) * reshape_s
