"""Steady state: which iterations of a run count, and which are left out for what reason."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from trilane.logs.run import RunLog
from trilane.utils.numbers import ranges

WARM_UP = 5  # iterations left out at the start: allocation, first use of each kernel


@dataclass(frozen=True, kw_only=True)
class SteadyState:
    """`counts` marks the rows of the log's iterations that count, (rows,); `left_out` has the
    others by the reason.

    They have the log's numbers; a row of a typed table has none.
    """

    counts: np.ndarray
    left_out: Mapping[str, tuple[int, ...]]
    note: str = ""

    @property
    def sentence(self) -> str:
        """Which iterations are left out and why."""
        parts = "; ".join(
            f"{ranges(numbers, 4) or 'a line'} ({reason})"
            for reason, numbers in self.left_out.items()
        )
        return f"left out: {parts or 'none'}" + (f"; {self.note}" if self.note else "")


def steady_state(
    log: RunLog, warm_up: int = WARM_UP, gbs: float = 0, seq_length: float = 0
) -> SteadyState:
    """The iterations that show how fast the run is at its full batch size and sequence length.

    `gbs` and `seq_length` are the full ones; 0 unknown: the largest printed. Only they count,
    however few: a ramp-up or a curriculum is a short part of a training, and predictions and TFLOPs
    are those of the full size. Where the run did not reach it, the largest size reached counts, and
    the note says so.

    Left out, the first reason counts: no time printed; the warm-up (at most half of the lines);
    skipped, where the optimizer did not step; a batch size or sequence length smaller by more than
    3 % (filled by their tokens, batches differ by 0.3 %; repeats of one run differ by 4.9 %); the
    line after an evaluation or a checkpoint, whose time versions before 2024 include, where
    `eval_interval` and `save_interval` are among the arguments. A reason that would leave nothing
    is ignored, with a note.
    """
    full, counts = (
        {"global_batch_size": gbs, "seq_length": seq_length},
        np.isfinite(log.column("sec_per_it")),
    )
    if not len(counts):
        return SteadyState(counts=np.zeros(len(log.iterations), bool), left_out={})
    at, notes = log.column("iteration"), list[str]()
    for name, size in full.items():
        if 0 < (reached := log.column(name).max(initial=0)) < size:
            notes.append(f"{name}={size:.0f} was not reached: {reached:.0f}, the largest, counts")
    left_out = {"no time printed": ~counts} if not counts.all() else {}
    for reason, bad in _reasons(log, at, warm_up, full):
        if (counts & ~bad).any():
            left_out |= {reason: bad & counts} if (bad & counts).any() else {}
            counts = counts & ~bad
        elif (bad & counts).any():
            notes.append(f"all that is left is {reason}, so it counts")
    # neither NaN nor what a broken line makes of a number
    named = {
        reason: tuple(at[bad & (at < 2**53)].astype(int).tolist())
        for reason, bad in left_out.items()
    }
    return SteadyState(counts=counts, left_out=named, note="; ".join(notes))


def _reasons(
    log: RunLog, at: np.ndarray, warm_up: int, full: dict[str, float]
) -> Iterator[tuple[str, np.ndarray]]:
    step, first_half = interval(at), np.arange(len(at)) < max(1, len(at) // 2)
    yield "warm-up", (at - at[:1] < warm_up) & first_half & (len(at) > 1) & (warm_up > 0)
    if "skipped" in log.iterations:
        yield "skipped", log.column("skipped") > 0
    for name, words in (("global_batch_size", "batch size"), ("seq_length", "sequence length")):
        values = log.column(name)
        if wanted := min(full[name] or np.inf, np.nanmax(values, initial=0)):
            small = ~(np.abs(values - wanted) <= 0.03 * wanted) & (len(values) > 0)
            others = ", ".join(f"{v:.0f}" for v in np.unique(values[small & np.isfinite(values)]))
            yield f"{words} {others}, not {wanted:.0f}", small
    for name, words in (
        ("eval_interval", "after an evaluation"),
        ("save_interval", "after a checkpoint"),
    ):
        every = log.arguments.get(name)
        if isinstance(every, int) and every > 0:
            # a line's iterations, at - step + 1 to at, include one right after a multiple of
            # `every`
            yield (
                words,
                (np.floor((at - 1) / every) * every >= np.maximum(at - step, 1))
                & (at - 1 >= every),
            )


def interval(at: np.ndarray) -> float:
    """Iterations that one line covers."""
    steps = np.diff(at)
    return float(np.median(steps[steps > 0])) if (steps > 0).any() else 1.0
