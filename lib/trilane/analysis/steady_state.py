"""Steady state: which iterations of a run count, which are left out for what reason, and what they cost."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from trilane.logs.run import RunLog
from trilane.utils.files import damaged_lines, json_lines, read_text
from trilane.workspace.run_folder import MOST_ITERATIONS, STEPS

WARM_UP = 5  # iterations left out at the start: allocation, first use of each kernel
MOST_S = 1e9  # an iteration of 30 years is a damaged number
LEAST_RATE = 0.1  # steps per second: a rate rounded to 0.001 is then right to 0.5 %
# Of the full size: batches filled by their tokens (--max-tokens of fairseq: 0.3 %) fall as often as they rise, a ramp
# only rises. So close to it, the seconds differ by less than repeats of one run, by 4.9 % (compare.SINGLE_DEVIATION).
VARIES = 0.03
MOST_RANGES = 4  # of iterations that are left out for one reason are listed


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Iterations that do not count, by the log's numbers (a row of a typed table has none), and why."""

    reason: str
    iterations: tuple[int, ...]

    def __str__(self) -> str:
        return f"{ranges(self.iterations) or 'a line'} ({self.reason})"


@dataclass(frozen=True, kw_only=True)
class SteadyState:
    """`counts` marks the rows of the log's iterations that count, (rows,); `left_out` names the others."""

    counts: np.ndarray
    left_out: tuple[LeftOut, ...]
    note: str = ""

    @property
    def sentence(self) -> str:
        """Which iterations are left out and why, in words."""
        parts = "; ".join(map(str, self.left_out)) or "none"
        return f"left out: {parts}" + (f"; {self.note}" if self.note else "")


def steady_state(log: RunLog, warm_up: int = WARM_UP, gbs: float = 0, seq_length: float = 0) -> SteadyState:
    """The iterations that show how fast the run is at its full batch size and sequence length.

    `gbs` and `seq_length` are the full ones; 0 unknown: the largest printed. Only they count, however few: a ramp-up or
    a curriculum is a short part of a training, and predictions and TFLOPs are those of the full size. Where the run did
    not reach it, the largest size reached counts, and the note says so.

    Left out, the first reason counts: no time printed; the warm-up (at most half of the lines); skipped, where the
    optimizer did not step; a smaller batch size or sequence length (not one that varies by some percent); the line
    after an evaluation or a checkpoint, whose time versions before 2024 include. A reason that would leave
    nothing is ignored, with a note.

    Evaluations and checkpoints are known by `eval_interval` and `save_interval` among the arguments. Those that a log
    does not announce are not left out; they hardly move the median of the rest.
    """
    table = log.iterations
    if not len(table) or "sec_per_it" not in table:
        return SteadyState(counts=np.zeros(len(table), bool), left_out=())
    at, seconds = table["iteration"].to_numpy(float), table["sec_per_it"].to_numpy(float)
    counts, left_out, notes = np.isfinite(seconds), list[LeftOut](), list[str]()
    if not counts.all():
        left_out.append(_left_out("no time printed", at, ~counts))
    for name, full in (("global_batch_size", gbs), ("seq_length", seq_length)):
        if full and name in table and (reached := table[name].max()) < full:
            notes.append(f"{name}={full:.0f} was not reached: {reached:.0f}, the largest, counts")
    for reason, bad in _reasons(log, at, warm_up, {"global_batch_size": gbs, "seq_length": seq_length}):
        if not (bad & counts).any():
            continue
        if not (counts & ~bad).any():
            notes.append(f"all that is left is {reason}, so it counts")
            continue
        left_out.append(_left_out(reason, at, bad & counts))
        counts &= ~bad
    return SteadyState(counts=counts, left_out=tuple(left_out), note="; ".join(notes))


def _reasons(log: RunLog, at: np.ndarray, warm_up: int, full: Mapping[str, float]) -> list[tuple[str, np.ndarray]]:
    table, lines = log.iterations, len(at)
    step = interval(at)
    warm = (at - at[:1] < warm_up) & (np.arange(lines) < max(1, lines // 2)) & (lines > 1) & (warm_up > 0)
    reasons = [("warm-up", warm)]
    if "skipped" in table:
        reasons.append(("skipped", table["skipped"].to_numpy(float) > 0))
    for name, words in (("global_batch_size", "batch size"), ("seq_length", "sequence length")):
        if name in table:
            values = table[name].to_numpy(float)
            if (values == values[0]).all():  # nearly always, and a long log has millions
                continue
            sizes = np.unique(values[np.isfinite(values)])
            wanted = full[name] if full[name] in sizes else sizes.max(initial=0)
            full_size = _full(values, float(wanted))
            others = ", ".join(f"{v:.0f}" for v in np.unique(values[~full_size & np.isfinite(values)]))
            reasons.append((f"{words} {others}, not {wanted:.0f}", ~full_size))
    for name, words in (("eval_interval", "after an evaluation"), ("save_interval", "after a checkpoint")):
        every = log.arguments.get(name)
        if isinstance(every, int) and not isinstance(every, bool) and every > 0:
            reasons.append((words, _follows(at, step, every)))
    return reasons


def _full(values: np.ndarray, wanted: float) -> np.ndarray:
    """Whether each size is the full one; those close to it are, where they do not only rise as a ramp does."""
    near = np.abs(values - wanted) <= VARIES * wanted
    return near if (np.diff(values[near]) < 0).any() else values == wanted


def _follows(at: np.ndarray, step: float, every: int) -> np.ndarray:
    """Whether a line's iterations, at - step + 1 to at, include one right after a multiple of `every`."""
    first, last = at - step, at - 1  # the iterations before those of the line
    return (np.floor(last / every) * every >= np.maximum(first, 1)) & (last >= every)


def interval(at: np.ndarray) -> float:
    """Iterations that one line covers."""
    steps = np.diff(at)
    return float(np.median(steps[steps > 0])) if (steps > 0).any() else 1.0


def _left_out(reason: str, at: np.ndarray, which: np.ndarray) -> LeftOut:
    named = at[which & (at < 2**53)]  # neither NaN nor what a broken line makes of a number
    return LeftOut(reason=reason, iterations=tuple(named.astype(int).tolist()))


def ranges(numbers: tuple[int, ...]) -> str:
    """ "1-5, 100, 200 and 7 more": consecutive numbers as ranges, at most MOST_RANGES of them."""
    runs = [[n for _, n in group] for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    more = sum(map(len, runs[MOST_RANGES:]))
    return ", ".join(words[:MOST_RANGES]) + (f" and {more} more" if more else "")


def exact_seconds(log: RunLog) -> RunLog:
    """The log with the seconds of the steps.jsonl next to it, for each iteration that is in both."""
    path, exact = log.source.with_name(STEPS), dict[int, float]()
    text = read_text(path) if path.is_file() else ""
    for step in json_lines(text):
        match step:
            case {"iteration": int(number), "sec_per_it": int() | float() as seconds}:
                if 0 < number < MOST_ITERATIONS and 0 < seconds < MOST_S:
                    exact[number] = seconds
    if damaged := damaged_lines(text):
        log = replace(log, notes=(*log.notes, f"{damaged} damaged lines of steps.jsonl are left out"))
    if not exact or "sec_per_it" not in log.iterations:
        return log
    seconds = log.iterations["iteration"].map(exact).fillna(log.iterations["sec_per_it"])
    return replace(log, iterations=log.iterations.assign(sec_per_it=seconds))


def mean_seconds(log: RunLog) -> float:
    """Seconds per iteration of a log that prints none: the Trainer's runtime over its steps, or DeepSpeed's batch over
    its rate; NaN where there is neither.
    """
    steps = log.arguments.get("total_optimization_steps")
    if not steps and "train_iters" in log.iterations and (total := log.iterations["train_iters"].iloc[-1]) > 0:
        steps = int(total)  # of a progress bar
    if "train_runtime" in log.summary:
        if isinstance(steps, int) and steps > 0:
            return log.summary["train_runtime"] / steps
        rate = log.summary.get("train_steps_per_second", 0.0)  # rounded to 0.001
        return 1 / rate if rate > LEAST_RATE else math.nan
    batch = log.arguments.get("deepspeed.train_batch_size")
    if "samples_per_second" in log.iterations and isinstance(batch, int):
        return batch / float(log.iterations["samples_per_second"].median())
    return math.nan


def share_beyond(seconds: np.ndarray, median: float) -> float:
    """Share of all seconds that iterations took beyond the median: stalls, evaluations, checkpoints; NaN if none."""
    seconds = seconds[np.isfinite(seconds)] if not np.isfinite(seconds).all() else seconds
    slow = seconds[seconds > median]  # half of a long log, so that it is not copied whole
    whole = float(seconds.sum())
    return float((slow.sum() - median * len(slow)) / whole) if whole > 0 else math.nan
