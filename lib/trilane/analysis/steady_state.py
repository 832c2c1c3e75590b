"""Steady state: which iterations of a run count, and which are left out for what reason."""

from collections.abc import Iterator

import numpy as np

from trilane.logs.run import RunLog

WARM_UP = 5  # iterations left out at the start: allocation, first use of each kernel
# A batch filled by tokens varies by 0.3 %; repeats of one run differ by 4.9 %.
SMALLER = 0.03


def steady_state(
    log: RunLog, gbs: float = 0, seq_length: float = 0
) -> tuple[np.ndarray, dict[str, int]]:
    """The iterations that show how fast the run is at its full batch size and sequence length, as a
    mark for each row of the log's iterations, (rows,); and how many others there are, by reason.

    `gbs` and `seq_length` are the full ones; 0 unknown: the largest printed. Only they count,
    however few: a ramp-up or a curriculum is a short part of a training, and predictions and TFLOPs
    are those of the full size. Where the run did not reach it, the largest size reached counts.

    Left out, the first reason counts: no time printed; the warm-up (at most half of the lines);
    skipped, where the optimizer did not step; a batch size or sequence length smaller by more than
    3 %; the line after an evaluation or a checkpoint, whose time versions before 2024 include,
    where `eval_interval` and `save_interval` are among the arguments. A reason that would leave
    nothing is ignored.
    """
    counts = np.isfinite(log.column("sec_per_it"))
    if not len(counts):
        return np.zeros(len(log.iterations), bool), {}
    left_out = {"no time printed": int((~counts).sum())}
    for reason, is_unsteady in _reasons(log, gbs, seq_length):
        if (counts & ~is_unsteady).any():
            left_out[reason] = int((counts & is_unsteady).sum())
            counts = counts & ~is_unsteady
    return counts, {reason: number for reason, number in left_out.items() if number}


def _reasons(log: RunLog, gbs: float, seq_length: float) -> Iterator[tuple[str, np.ndarray]]:
    iteration = log.column("iteration")
    is_first_half = np.arange(len(iteration)) < len(iteration) // 2
    yield "warm-up", (iteration - iteration[0] < WARM_UP) & is_first_half
    if "skipped" in log.iterations:
        yield "skipped", log.column("skipped") > 0
    for name, most in {"global_batch_size": gbs, "seq_length": seq_length}.items():
        sizes = log.column(name)
        size = min(most or np.inf, np.nanmax(sizes, initial=0))
        if size:
            yield f"{name} is not {size:.0f}", ~(np.abs(sizes - size) <= SMALLER * size)
    step = interval(iteration)
    for name in ("eval_interval", "save_interval"):
        every = log.arguments.get(name)
        if isinstance(every, int) and every > 0:
            # a line's iterations include one right after a multiple of `every`
            multiple = np.floor((iteration - 1) / every) * every
            yield (
                f"after a multiple of {name}",
                (multiple >= iteration - step) & (multiple >= every),
            )


def interval(iteration: np.ndarray) -> float:
    """Iterations that one line covers."""
    steps = np.diff(iteration)
    steps = steps[steps > 0]
    return float(np.median(steps)) if len(steps) else 1.0
