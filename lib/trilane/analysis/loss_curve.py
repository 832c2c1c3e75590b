"""Curve: the loss of one training over samples or tokens, its logs joined where it was stopped and restarted."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from trilane.analysis.run_config import run_config
from trilane.analysis.steady_state import interval
from trilane.logs.run import RunLog
from trilane.utils.validation import require

COLUMNS = ("consumed_samples", "consumed_tokens", "lm_loss", "grad_norm", "sec_per_it")
SAME = ("num_layers", "hidden_size", "num_attention_heads", "train_iters", "train_samples")  # in all logs of a training


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
    """

    table: pd.DataFrame
    redone: pd.DataFrame
    restarts: tuple[Restart, ...]
    names: tuple[str, ...]

    def axis(self) -> tuple[str, np.ndarray]:
        """The x axis of a loss curve, label and values: samples, tokens, or iterations where neither is known."""
        for name, words in (("consumed_samples", "samples (sequences)"), ("consumed_tokens", "tokens")):
            if name in self.table and self.table[name].notna().all():
                return f"consumed {words}", self.table[name].to_numpy(float)
        return "iteration", self.table["iteration"].to_numpy(float)


def join(logs: Sequence[RunLog]) -> Curve:
    """One curve of the logs of one training, in the order in which they ran.

    A log that begins at an iteration of an earlier log went back to a checkpoint: from there on its iterations count.
    Raises ValueError where no log has an iteration.
    """
    tables = [_columns(log, number) for number, log in enumerate(logs) if len(log.iterations)]
    require(bool(tables), "logs", ", ".join(log.source.name for log in logs) or "none", "hold no iteration")
    kept, redone, restarts = tables[0], list[pd.DataFrame](), list[Restart]()
    for table in tables[1:]:
        first = int(table["iteration"].iloc[0])
        again = kept[kept["iteration"] >= first]
        restarts.append(Restart(iteration=first, redone=len(again), log=logs[int(table["log"].iloc[0])].source.name))
        redone.append(again)
        kept = pd.concat([kept[kept["iteration"] < first], table], ignore_index=True)
    names = tuple(log.source.name for log in logs)
    return Curve(table=kept, redone=pd.concat(redone or [kept.iloc[:0]]), restarts=tuple(restarts), names=names)


def trainings(logs: Sequence[RunLog]) -> list[list[RunLog]]:
    """The logs of each training, in the order given, which should be the order in which they ran.

    A log continues the training whose iterations reach to just before its first one, or beyond, if that first one is
    above 1 and the arguments that both print agree. All others begin a training.
    """
    found: list[list[RunLog]] = []
    for log in (log for log in logs if len(log.iterations)):
        first, every = log.iterations["iteration"].iloc[0], interval(log.iterations["iteration"].to_numpy(float))
        fitting = [t for t in found if every < first <= _last(t) + every and _agree(t[-1], log)]
        if fitting:
            max(fitting, key=lambda t: found.index(t)).append(log)
        else:
            found.append([log])
    return found


def _columns(log: RunLog, number: int) -> pd.DataFrame:
    table = log.iterations
    chosen = table[["iteration", *(name for name in COLUMNS if name in table)]].assign(log=number)
    if "consumed_samples" not in table:
        batch = run_config(log).gbs
        if batch:  # constant: logs of a ramp-up print samples
            chosen["consumed_samples"] = table["iteration"] * batch
    return chosen


def _last(training: Sequence[RunLog]) -> float:
    return max(float(log.iterations["iteration"].iloc[-1]) for log in training)


def _agree(one: RunLog, other: RunLog) -> bool:
    both = [name for name in SAME if name in one.arguments and name in other.arguments]
    return one.dialect == other.dialect and all(one.arguments[name] == other.arguments[name] for name in both)
