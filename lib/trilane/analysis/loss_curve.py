"""Curve: the loss of one training over iterations, samples, tokens or hours, its logs joined; its level and noise."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from trilane.analysis.run_config import run_config
from trilane.analysis.steady_state import interval
from trilane.logs.run import RunLog
from trilane.logs.run_folder import continued
from trilane.utils.validation import require

COLUMNS = ("consumed_samples", "consumed_tokens", "lm_loss", "grad_norm", "learning_rate", "sec_per_it")
WINDOW = 128  # lines before a line that give its level and its noise
LEAST = 10  # lines before the first that has a level
# Of robust noise. False alarms in 10,000 lines: none on Gaussian noise of 0.5 to 10 %, none on noise that remembers 0.7
# of the line before, one on Student's t with five degrees of freedom.
SIGMAS = 8.0
LEAST_NOISE = 2e-3  # of ln(value): losses are printed, and batches differ
SAME = ("num_layers", "hidden_size", "num_attention_heads")  # in all logs of a training, which may be extended


@dataclass(frozen=True, kw_only=True)
class Restart:
    """A log that continues another: its first iteration, and how many iterations of the other it repeated."""

    iteration: int
    redone: int
    log: str


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One training. `table` has each iteration once, rising: iteration, log (its number), COLUMNS where they are known.

    `redone` has the iterations that a later log repeated, as the earlier one had them: the loss should be the same.
    `validation` has iteration and lm_loss of each evaluation, empty where there was none.
    """

    table: pd.DataFrame
    redone: pd.DataFrame
    restarts: tuple[Restart, ...]
    names: tuple[str, ...]
    validation: pd.DataFrame = field(default_factory=pd.DataFrame)

    def axes(self) -> dict[str, np.ndarray]:
        """Where each row of `table` is, by iterations, and by samples, tokens and hours where all its rows have them.

        Hours are those that the iterations took: each line's seconds for every iteration since the line before. Left
        out: the time between two jobs, and what was trained again.
        """
        found = {"iterations": self.table["iteration"].to_numpy(float)}
        for name in ("samples", "tokens"):
            column = f"consumed_{name}"
            if column in self.table and self.table[column].notna().all():
                found[name] = self.table[column].to_numpy(float)
        if "sec_per_it" in self.table and (seconds := self.table["sec_per_it"]).notna().any():
            at = found["iterations"]
            steps = np.diff(at, prepend=at[0] - interval(at))
            found["hours"] = np.cumsum(seconds.fillna(seconds.median()).to_numpy(float) * steps) / 3600
        return found

    def axis(self) -> tuple[str, np.ndarray]:
        """The x axis of a loss curve, label and values: samples, tokens, or iterations where neither is known."""
        axes = self.axes()
        name = next(name for name in ("samples", "tokens", "iterations") if name in axes)
        words = {"samples": "consumed samples (sequences)", "tokens": "consumed tokens", "iterations": "iteration"}
        return words[name], axes[name]


def join(logs: Sequence[RunLog], seq_length: int = 0) -> Curve:
    """One curve of the logs of one training, in the order in which they ran; `seq_length` where the logs lack it.

    A log that begins at an iteration of an earlier log went back to a checkpoint: from there on its iterations count.
    Raises ValueError where no log has an iteration with a number.
    """
    tables = [_columns(log, number, seq_length) for number, log in enumerate(logs) if log.first_iteration is not None]
    require(bool(tables), "logs", ", ".join(log.source.name for log in logs) or "none", "hold no iteration")
    kept, redone, restarts = tables[0].iloc[:0], list[pd.DataFrame](), list[Restart]()
    for table in tables:
        number, first = int(table["log"].iloc[0]), int(table["iteration"].iloc[0])
        log = logs[number]
        if again := [(first, kept[kept["iteration"] >= first])] * (table is not tables[0]):
            kept = kept[kept["iteration"] < first]
        again += [(at, _columns(replace(log, iterations=rows), number, seq_length)) for at, rows in log.resumes]
        restarts += [Restart(iteration=at, redone=len(rows), log=log.source.name) for at, rows in again]
        redone += [rows for _, rows in again]
        kept = pd.concat([kept, table], ignore_index=True) if len(kept) else table
    names, validation = tuple(log.source.name for log in logs), pd.DataFrame()
    for log in logs:
        validation = continued(validation, log)
    repeated = pd.concat(redone or [kept.iloc[:0]])
    return Curve(table=kept, redone=repeated, restarts=tuple(restarts), names=names, validation=validation)


def trainings(logs: Sequence[RunLog]) -> list[list[RunLog]]:
    """The logs of each training, in the order given, which should be the order in which they ran.

    A log continues the training whose iterations reach to just before its first one, or beyond, if that first one is
    above 1 and the arguments that both print agree; and one that ended earlier, where both print the same number of
    iterations in all. All others begin a training.
    """
    found: list[list[RunLog]] = []
    for log in (log for log in logs if log.first_iteration is not None):
        first, every = log.iterations["iteration"].iloc[0], interval(log.iterations["iteration"].to_numpy(float))
        fitting = [
            t
            for t in found
            if every < first and agree(t[-1], log) and (first <= _last(t) + every or _length(t[-1]) == _length(log))
        ]
        if fitting:
            max(fitting, key=lambda t: found.index(t)).append(log)
        else:
            found.append([log])
    return found


def _columns(log: RunLog, number: int, seq_length: int) -> pd.DataFrame:
    table = log.iterations
    chosen = table[["iteration", *(name for name in COLUMNS if name in table)]].assign(log=number)
    if "consumed_samples" not in table:
        batch = run_config(log).gbs
        if batch:  # constant: logs of a ramp-up print samples
            chosen["consumed_samples"] = table["iteration"] * batch
    curriculum = "seq_length" in table and table["seq_length"].nunique() > 1
    length = run_config(log).seq_length or seq_length
    if "consumed_tokens" not in chosen and "consumed_samples" in chosen and length and not curriculum:
        chosen["consumed_tokens"] = chosen["consumed_samples"] * length
    return chosen


def _last(training: Sequence[RunLog]) -> float:
    return max(float(log.iterations["iteration"].iloc[-1]) for log in training)


def _length(log: RunLog) -> float:
    """The number of iterations in all that the log's lines print; NaN, which equals nothing, where they do not."""
    return float(log.iterations["train_iters"].iloc[-1]) if "train_iters" in log.iterations else math.nan


def agree(one: RunLog, other: RunLog) -> bool:
    """Whether two logs may be of one training: the same program, and the same model where both print it."""
    both = [name for name in SAME if name in one.arguments and name in other.arguments]
    return one.dialect == other.dialect and all(one.arguments[name] == other.arguments[name] for name in both)


def baseline(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Level and noise of each of a series of logarithms by the WINDOW before it, each (N,); NaN for the first LEAST.

    The level is their median, or that of the last three where that is lower, as in the fall of a young training. The
    noise is 1.4826 times the median absolute difference of neighbours, which a slow course hardly changes.
    """
    before = pd.Series(x).shift(1)
    level = np.fmin(before.rolling(WINDOW, min_periods=LEAST).median(), before.rolling(3).median())
    steps = before.diff().abs().rolling(WINDOW, min_periods=LEAST - 1).median()
    known = np.minimum(np.arange(len(x)), WINDOW).clip(1)
    return level.to_numpy(), np.maximum(_sigma(steps.to_numpy(), known), LEAST_NOISE)


def noise(x: np.ndarray) -> float:
    """The noise of a whole series of logarithms, as baseline() has it."""
    steps = np.abs(np.diff(x)) if len(x) > 1 else np.zeros(1)
    return max(float(_sigma(np.median(steps), len(x))), LEAST_NOISE)


def _sigma(step: Any, lines: Any) -> Any:
    # few lines give a poor estimate of noise: of ten a third of it was seen
    return 1.4826 / math.sqrt(2) * step * (1 + 2 * LEAST / lines)
