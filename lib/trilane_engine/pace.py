"""PaceMeter: the pace of one rank, and what its run has lost to slowness."""

import time
from collections import deque
from collections.abc import Mapping

import numpy as np

from trilane.workspace.pace import LATE, OWN, Pace

CALM = 0.25  # of the time that a run is in time makes up for what it has lost
LEAST_RESTART_S = 30.0  # to find the nodes, start their processes and load a checkpoint


class PaceMeter:
    """The pace of one rank. Seconds count by the sample, so that a ramp of the batch size is no
    slowness.
    """

    def __init__(self) -> None:
        # seconds a sample of an iteration and of each phase of OWN; late ones do not become usual
        self._usual = deque[np.ndarray](maxlen=100)
        self._late = deque[np.ndarray](maxlen=LATE)
        self._late_count = 0
        self._lost_s = 0.0
        self._begin = time.monotonic()
        self._restart_s = 0.0

    def add(self, samples: int, seconds: float, phases: Mapping[str, float]) -> Pace:
        """Add an iteration with this rank's seconds by phase; the pace with it.

        It is late above five robust standard deviations more than the median, at least a tenth of
        it, and always at twice the median. What late iterations lose is summed up, and what is in
        time pays CALM of itself back, as in Page's cumulative sum (Biometrika 41, 1954): a run is
        slow once a restart would have cost less, so that it loses at most twice what it must.
        """
        if not self._restart_s:
            self._restart_s = max(LEAST_RESTART_S, time.monotonic() - self._begin)
        row = np.array([seconds, *(phases.get(name, 0.0) for name in OWN)]) / samples
        if len(self._usual) < LATE:
            self._usual.append(row)
            return Pace()
        rows = np.array(self._usual)
        usual = np.median(rows, axis=0)
        deviation = 1.4826 * np.median(abs(rows[:, 0] - usual[0]))
        if row[0] > usual[0] + np.clip(5.0 * deviation, 0.1 * usual[0], usual[0]):
            self._late.append(row)
            lost_s = self._lost_s + samples * float(row[0] - usual[0])
        else:
            self._usual.append(row)
            lost_s = self._lost_s - CALM * seconds
        # no more than that: after days of it, as many would have to pass until it is over
        self._lost_s = min(max(lost_s, 0.0), 2 * self._restart_s)
        self._late_count += 1
        if not self._lost_s:
            self._late.clear()
            self._late_count = 0
        now = np.mean(self._late, axis=0) if self._late else usual
        usual_s, *usual_phases = (samples * usual).tolist()
        now_s, *now_phases = (samples * now).tolist()
        excess = [after - before for before, after in zip(usual_phases, now_phases, strict=True)]
        return Pace(
            late=self._late_count,
            lost=round(self._lost_s / self._restart_s, 3),
            usual_s=usual_s,
            now_s=now_s,
            excess_s=tuple(excess),
        )
