"""Curve: the loss of one training over iterations, samples, tokens or hours, its logs joined; its
level and noise.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from trilane.analysis.run_config import run_config
from trilane.analysis.steady_state import interval
from trilane.logs.run import RunLog, continued
from trilane.utils.validation import require

WINDOW = 128  # lines before a line that give its level and its noise
LEAST = 10  # lines before the first that has a level
# Of robust noise. False alarms in 10,000 lines: none on Gaussian noise of 0.5 to 10 %, none on
# noise that remembers 0.7 of the line before, one on Student's t with five degrees of freedom.
SIGMAS = 8.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Restart:
    """A restart of a training: the lines before it, with those that it repeated, as they were; the
    first ones after it.

    iteration   the first one after it, `redone` how many lines it repeated
    logs        the log before it and the one after; a resumed run has one
    """

    iteration: int
    redone: int
    before: pd.DataFrame
    after: pd.DataFrame
    logs: tuple[RunLog, RunLog]

    @property
    def log(self) -> str:
        """The name of the log after it."""
        return self.logs[1].source.name


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """One training. `table` has each iteration once, rising, with the columns of the logs and
    `log`, its number.

    `redone` has the iterations that a later log repeated, as the earlier one had them: the loss
    should be the same. `validation` has iteration and lm_loss of each evaluation, empty where there
    was none.
    """

    table: pd.DataFrame
    redone: pd.DataFrame
    restarts: tuple[Restart, ...]
    validation: pd.DataFrame = field(default_factory=pd.DataFrame)

    def axes(self) -> dict[str, np.ndarray]:
        """Where each row of `table` is, by iterations, and by samples, tokens and hours where all
        its rows have them.

        Hours are those that the iterations took: each line's seconds for every iteration since the
        line before. Left out: the time between two jobs, and what was trained again.
        """
        found = {"iterations": self.table["iteration"].to_numpy(float)}
        for name in ("samples", "tokens"):
            column = f"consumed_{name}"
            if column in self.table and self.table[column].notna().all():
                found[name] = self.table[column].to_numpy(float)
        if "sec_per_it" in self.table and (seconds := self.table["sec_per_it"]).notna().any():
            at = found["iterations"]
            steps = np.diff(at, prepend=at[0] - interval(at))
            found["hours"] = (
                np.cumsum(seconds.fillna(seconds.median()).to_numpy(float) * steps) / 3600
            )
        return found


def join(logs: Sequence[RunLog], seq_length: int = 0) -> Curve:
    """One curve of the logs of one training, in the order in which they ran; `seq_length` where the
    logs lack it.

        join([read_log("part1.log"), read_log("part2.log")]).axes()["hours"]

    A log that begins at an iteration of an earlier log went back to a checkpoint: from there on its
    iterations count. Raises ValueError where no log has an iteration with a number.
    """
    numbered = [(number, log) for number, log in enumerate(logs) if log.first_iteration is not None]
    require(
        bool(numbered),
        "logs",
        ", ".join(log.source.name for log in logs) or "none",
        "hold no iteration",
    )
    kept, redone, restarts = pd.DataFrame(), list[pd.DataFrame](), list[Restart]()
    last: RunLog | None = None
    for number, log in numbered:
        table = _rising(log, number, seq_length)
        first = table["iteration"].iloc[0]
        resumes = [
            (at, log, _rising(replace(log, iterations=rows), number, seq_length))
            for at, rows in log.resumes
        ]
        if last:
            resumes.insert(0, (int(first), last, kept[kept["iteration"] >= first]))
        for at, old, again in resumes:
            rows = table if old is log else kept
            before, after = (
                pd.concat([rows[rows["iteration"] < at], again]),
                table[table["iteration"] >= at].head(512),
            )
            restarts.append(
                Restart(
                    iteration=at, redone=len(again), before=before, after=after, logs=(old, log)
                )
            )
            redone.append(again)
        kept, last = pd.concat([kept[kept["iteration"] < first], table]) if last else table, log
    validation = pd.DataFrame()
    for log in logs:
        validation = continued(validation, log)
    repeated = pd.concat(redone or [kept.iloc[:0]])
    whole = kept.reset_index(drop=True)
    return Curve(table=whole, redone=repeated, restarts=tuple(restarts), validation=validation)


def trainings(logs: Sequence[RunLog]) -> list[list[RunLog]]:
    """The logs of each training, in the order given, which should be the order in which they ran.

    A log continues the training whose iterations reach to just before its first one, or beyond, if
    that first one is above 1 and the arguments that both print agree; and one that ended earlier,
    where both print the same number of iterations in all. All others begin a training.
    """
    found: list[list[RunLog]] = []
    for log in (log for log in logs if log.first_iteration is not None):
        at = log.column("iteration")
        fitting = [
            t for t in found if interval(at) < at[0] and _continues(t, log, at[0] - interval(at))
        ]
        if fitting:
            fitting[-1].append(log)
        else:
            found.append([log])
    return found


def _continues(training: Sequence[RunLog], log: RunLog, before: float) -> bool:
    last, same = (
        training[-1],
        ("num_layers", "hidden_size", "num_attention_heads"),
    )  # a training may be extended
    both = [name for name in same if name in last.arguments and name in log.arguments]
    lengths = [
        float(one.column("train_iters")[-1:].sum()) for one in (last, log)
    ]  # 0, or NaN, where not printed
    reached = max(float(one.column("iteration")[-1]) for one in training)
    alike = last.dialect == log.dialect and all(
        last.arguments[name] == log.arguments[name] for name in both
    )
    return alike and (before <= reached or lengths[0] == lengths[1] > 0)


def _rising(log: RunLog, number: int, seq_length: int) -> pd.DataFrame:
    """The log's iterations, each once, with consumed samples and tokens by its arguments where they
    are not printed.
    """
    table = log.iterations.sort_values("iteration", kind="stable").drop_duplicates(
        "iteration", keep="last"
    )
    table, config = table.assign(log=number), run_config(log)
    if "consumed_samples" not in table and config.gbs:  # constant: logs of a ramp-up print samples
        table["consumed_samples"] = table["iteration"] * config.gbs
    curriculum, length = (
        "seq_length" in table and table["seq_length"].nunique() > 1,
        config.seq_length or seq_length,
    )
    if "consumed_tokens" not in table and "consumed_samples" in table and length and not curriculum:
        table["consumed_tokens"] = table["consumed_samples"] * length
    return table


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
    known = np.minimum(np.arange(len(x)), WINDOW).clip(1)
    return level.to_numpy(), _sigma(steps.to_numpy(), known)


def noise(x: np.ndarray) -> float:
    """The noise of a whole series of logarithms, as baseline() has it."""
    return float(_sigma(np.median(np.abs(np.diff(x))) if len(x) > 1 else 0.0, len(x)))


def _sigma(step: Any, lines: Any) -> Any:
    # Few lines give a poor estimate of noise. Losses are printed, and batches differ: never below
    # 0.2 %.
    return np.maximum(1.4826 / math.sqrt(2) * step * (1 + 2 * LEAST / lines), 2e-3)


def change(value: float, expected: float) -> str:
    """A change in words: a factor where it is large, else per cent."""
    if not math.isfinite(value):
        return "no number"
    if not expected or not value:
        return f"{value - expected:+.6g}"
    ratio = value / expected
    return f"x {ratio:.3g}" if not 0.5 < ratio < 2 else f"{ratio - 1:+.2%}"
