"""Curve: the loss of one training over its iterations, its logs joined; its level and noise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from trilane.analysis.steady_state import interval
from trilane.logs.run import RunLog, continued

WINDOW = 128  # lines before a line that give its level and its noise
LEAST = 10  # lines before the first that has a level
# Of robust noise. False alarms in 10,000 lines: none on Gaussian noise of 0.5 to 10 %, none on
# noise that remembers 0.7 of the line before, one on Student's t with five degrees of freedom.
SIGMAS = 8.0
# Of a logarithm: losses are printed with few digits, and batches differ.
LEAST_NOISE = 2e-3
AFTER = 512  # lines after a restart that are compared with those before it
# what two logs of one training have in common
SAME = ("num_layers", "hidden_size", "num_attention_heads")


@dataclass(frozen=True, kw_only=True, eq=False)
class Restart:
    """A restart of a training: the lines before it, with those that it repeated, as they were; the
    first ones after it.

    iteration   the first one after it
    logs        the log before it and the one after; a resumed run has one
    """

    iteration: int
    before: pd.DataFrame
    after: pd.DataFrame
    logs: tuple[RunLog, RunLog]

    @property
    def redone(self) -> int:
        """How many lines it repeated."""
        return int((self.before["iteration"] >= self.iteration).sum())

    @property
    def log(self) -> str:
        """The name of the log after it."""
        return self.logs[1].source.name


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """One training. `table` has each iteration once, rising, with the columns of the logs.

    `validation` has iteration and lm_loss of each evaluation, empty where there was none.
    """

    table: pd.DataFrame
    restarts: tuple[Restart, ...]
    validation: pd.DataFrame = field(default_factory=pd.DataFrame)


def join(logs: Sequence[RunLog]) -> Curve:
    """One curve of the logs of one training, in the order in which they ran.

        join([read_log("part1.log"), read_log("part2.log")]).table["lm_loss"]

    A log that begins at an iteration of an earlier log went back to a checkpoint: from there on its
    iterations count. Logs without an iteration that has a number are left out.
    """
    numbered = [log for log in logs if log.first_iteration is not None]
    whole = pd.DataFrame()
    restarts = []
    last = None
    for log in numbered:
        table = _rising(log.iterations)
        if last:
            first = int(table["iteration"].iloc[0])
            after = table.head(AFTER)
            restarts.append(Restart(iteration=first, before=whole, after=after, logs=(last, log)))
            whole = whole[whole["iteration"] < first]
        for first, rows in log.resumes:
            before = pd.concat([table[table["iteration"] < first], _rising(rows)])
            after = table[table["iteration"] >= first].head(AFTER)
            restarts.append(Restart(iteration=first, before=before, after=after, logs=(log, log)))
        whole = pd.concat([whole, table])
        last = log
    table = whole.reset_index(drop=True)
    validation = pd.DataFrame()
    for log in logs:
        validation = continued(validation, log, "validation")
    return Curve(table=table, restarts=tuple(restarts), validation=validation)


def _rising(iterations: pd.DataFrame) -> pd.DataFrame:
    """Each iteration once, in their order."""
    table = iterations.sort_values("iteration", kind="stable")
    return table.drop_duplicates("iteration", keep="last")


def trainings(logs: Sequence[RunLog]) -> list[list[RunLog]]:
    """The logs of each training, in the order given, which should be the order in which they ran.

    A log continues the training whose iterations reach to just before its first one, or beyond, if
    that first one is above 1 and the arguments that both print agree. All others begin a training.
    """
    groups: list[list[RunLog]] = []
    for log in logs:
        if log.first_iteration is None:
            continue
        fitting = [group for group in groups if _continues(group, log)]
        if fitting:
            fitting[-1].append(log)
        else:
            groups.append([log])
    return groups


def _continues(training: Sequence[RunLog], log: RunLog) -> bool:
    iteration = log.column("iteration")
    before = iteration[0] - interval(iteration)
    last = training[-1]
    if before <= 0 or last.dialect != log.dialect:
        return False
    for name in SAME:
        given = last.arguments.get(name)
        if given is not None and log.arguments.get(name, given) != given:
            return False
    return before <= max(float(one.column("iteration")[-1]) for one in training)


def baseline(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Level and noise of each of a series of logarithms by the WINDOW before it, each (N,); NaN for
    the first LEAST.

    The level is their median, or that of the last three where that is lower, as in the fall of a
    young training. The noise is 1.4826 times the median absolute difference of neighbours, which a
    slow course hardly changes.
    """
    before = pd.Series(x).shift(1)
    level = np.fmin(before.rolling(WINDOW, min_periods=LEAST).median(), before.rolling(3).median())
    steps = before.diff().abs().rolling(WINDOW, min_periods=LEAST - 1).median()
    lines = np.minimum(np.arange(len(x)), WINDOW).clip(1)
    return level.to_numpy(), _sigma(steps.to_numpy(), lines)


def noise(x: np.ndarray) -> float:
    """The noise of a whole series of logarithms, as baseline() has it."""
    return float(_sigma(np.median(np.abs(np.diff(x))) if len(x) > 1 else 0.0, len(x)))


def _sigma(step: Any, lines: Any) -> Any:
    # few lines give a poor estimate of noise
    return np.maximum(1.4826 / math.sqrt(2) * step * (1 + 2 * LEAST / lines), LEAST_NOISE)


def change(value: float, expected: float) -> str:
    """A change in words: a factor where it is large, else per cent."""
    if not math.isfinite(value):
        return "no number"
    if not expected or not value:
        return f"{value - expected:+.6g}"
    ratio = value / expected
    if 0.5 < ratio < 2:
        return f"{ratio - 1:+.2%}"
    return f"x {ratio:.3g}"
