"""Steady state: which iterations of a run count, which are left out for what reason, and what they cost."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from trilane.logs.run import RunLog
from trilane.utils.files import damaged_lines, json_lines, read_text

WARM_UP = 5  # iterations left out at the start: allocation, first use of each kernel


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
        """Which iterations are left out and why."""
        parts = "; ".join(map(str, self.left_out)) or "none"
        return f"left out: {parts}" + (f"; {self.note}" if self.note else "")


def steady_state(log: RunLog, warm_up: int = WARM_UP, gbs: float = 0, seq_length: float = 0) -> SteadyState:
    """The iterations that show how fast the run is at its full batch size and sequence length.

    `gbs` and `seq_length` are the full ones; 0 unknown: the largest printed. Only they count, however few: a ramp-up or
    a curriculum is a short part of a training, and predictions and TFLOPs are those of the full size. Where the run did
    not reach it, the largest size reached counts, and the note says so.

    Left out, the first reason counts: no time printed; the warm-up (at most half of the lines); skipped, where the
    optimizer did not step; a smaller batch size or sequence length (not one that varies by some percent); the line
    after an evaluation or a checkpoint, whose time versions before 2024 include, where `eval_interval` and
    `save_interval` are among the arguments. A reason that would leave nothing is ignored, with a note.
    """
    if "sec_per_it" not in log.iterations:
        return SteadyState(counts=np.zeros(len(log.iterations), bool), left_out=())
    at, full = log.column("iteration"), {"global_batch_size": gbs, "seq_length": seq_length}
    counts, left_out, notes = np.ones(len(at), bool), list[LeftOut](), list[str]()
    for name, size in full.items():
        if size and name in log.iterations and (reached := log.iterations[name].max()) < size:
            notes.append(f"{name}={size:.0f} was not reached: {reached:.0f}, the largest, counts")
    for reason, bad in _reasons(log, at, warm_up, full):
        if (counts & ~bad).any() or reason == "no time printed":
            named = at[bad & counts & (at < 2**53)]  # neither NaN nor what a broken line makes of a number
            found = LeftOut(reason=reason, iterations=tuple(named.astype(int).tolist()))
            left_out += [found] if (bad & counts).any() else []
            counts = counts & ~bad
        elif (bad & counts).any():
            notes.append(f"all that is left is {reason}, so it counts")
    return SteadyState(counts=counts, left_out=tuple(left_out), note="; ".join(notes))


def _reasons(log: RunLog, at: np.ndarray, warm_up: int, full: dict[str, float]) -> Iterator[tuple[str, np.ndarray]]:
    lines = len(at)
    yield "no time printed", ~np.isfinite(log.column("sec_per_it"))
    yield "warm-up", (at - at[:1] < warm_up) & (np.arange(lines) < max(1, lines // 2)) & (lines > 1) & (warm_up > 0)
    if "skipped" in log.iterations:
        yield "skipped", log.column("skipped") > 0
    for name, words in (("global_batch_size", "batch size"), ("seq_length", "sequence length")):
        values = log.column(name)
        if len(values) and not (values == values[0]).all():
            sizes = np.unique(values[np.isfinite(values)])
            wanted = full[name] if full[name] in sizes else sizes.max(initial=0)
            # Batches filled by their tokens (fairseq's --max-tokens: 0.3 %) fall as often as they rise, a ramp only
            # rises; within 3 % seconds differ by less than repeats of one run, by 4.9 %.
            near = np.abs(values - wanted) <= 0.03 * wanted
            small = ~near if (np.diff(values[near]) < 0).any() else values != wanted
            others = ", ".join(f"{v:.0f}" for v in np.unique(values[small & np.isfinite(values)]))
            yield f"{words} {others}, not {wanted:.0f}", small
    step = interval(at)
    for name, words in (("eval_interval", "after an evaluation"), ("save_interval", "after a checkpoint")):
        every = log.arguments.get(name)
        if isinstance(every, int) and not isinstance(every, bool) and every > 0:
            # a line's iterations, at - step + 1 to at, include one right after a multiple of `every`
            yield words, (np.floor((at - 1) / every) * every >= np.maximum(at - step, 1)) & (at - 1 >= every)


def interval(at: np.ndarray) -> float:
    """Iterations that one line covers."""
    steps = np.diff(at)
    return float(np.median(steps[steps > 0])) if (steps > 0).any() else 1.0


def ranges(numbers: tuple[int, ...], most: int = 4) -> str:
    """ "1-5, 100, 200 and 7 more": consecutive numbers as ranges, at most four of them."""
    runs = [[n for _, n in group] for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    more = sum(map(len, runs[most:]))
    return ", ".join(words[:most]) + (f" and {more} more" if more else "")


def exact_seconds(log: RunLog) -> RunLog:
    """The log with the seconds of the steps.jsonl next to it, for each iteration that is in both."""
    path, exact = log.source.with_name("steps.jsonl"), dict[int, float]()
    text = read_text(path) if path.is_file() else ""
    for step in json_lines(text):
        match step:
            case {"iteration": int(number), "sec_per_it": int() | float() as seconds}:
                if 0 < number < 1 << 40 and 0 < seconds < 1e9:  # one of 30 years is a damaged number
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
    bar = int(np.nan_to_num(log.column("train_iters")[-1:].sum()))  # the total of a progress bar
    steps, batch = log.arguments.get("total_optimization_steps") or bar, log.arguments.get("deepspeed.train_batch_size")
    if "train_runtime" in log.summary:
        rate = log.summary.get("train_steps_per_second", 0.0)
        if isinstance(steps, int) and steps > 0:
            return log.summary["train_runtime"] / steps
        return 1 / rate if rate > 0.1 else math.nan  # it is rounded to 0.001, then 0.5 %
    rates = log.column("samples_per_second")
    return batch / float(np.nanmedian(rates)) if len(rates) and isinstance(batch, int) else math.nan


def share_beyond(seconds: np.ndarray, median: float) -> float:
    """Share of all seconds that iterations took beyond the median: stalls, evaluations, checkpoints; NaN if none."""
    seconds = seconds[np.isfinite(seconds)]
    beyond, whole = float(np.maximum(seconds - median, 0).sum()), float(seconds.sum())
    return beyond / whole if whole > 0 else math.nan
