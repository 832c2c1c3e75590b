"""The gate of plausibility: what cannot be right in the numbers of a run, or that nothing shows to be right."""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from trilane.logs import clock
from trilane.logs.digest import LINES, Columns, Finding, median, median_ratio, steps
from trilane.logs.reading.partial_run import MOST_BARE, PartialRun
from trilane.logs.reading.trainer_dicts import UNNUMBERED
from trilane.logs.table import NAN, NumericTable

# An iteration launches thousands of kernels of some microseconds each; toy models on a CPU take a millisecond.
SHORTEST_S = 2e-4
# The longest iteration of all measured rows that are shipped (data/measured.csv) takes 870 s.
LONGEST_S = 3600.0
# Dense fp8 of NVIDIA's B200 (data sheet), the fastest card that trains today; training reaches half of a card's peak.
FASTEST_FLOPS_PER_S = 4.5e15
SLOWEST_FLOPS_PER_S = 1e6  # a rate below was printed in units of 1e12 and read in units of 1
# The largest cards have 288 GB; an allocator's first block is of 2 MiB.
MOST_BYTES, LEAST_BYTES = 288 * 2.0**30, 2.0**20
LARGEST_VOCABULARY = 262_144  # tokens, Gemma's; where the log does not name its own
AGREE = 1.5  # of two rates of one run: one may be a running mean, or leave out what the other counts
COUNTS_AGREE = 1.1  # of two counts, which have no spread, over a ramp-up of the batch
ROUNDED_EPOCHS = 0.2  # of progress in epochs, which the Trainer rounds to 0.01, from which on it can be compared
LEAP, DENSE = 50.0, 3.0  # usual steps between two lines: a leap, and what follows it if the log is as dense as before
# nanoGPT prints an MFU of -100 % for its first iterations, DeepSpeed a norm of -1 after an overflow:
# https://github.com/karpathy/nanoGPT/blob/master/train.py, deepspeed/runtime/zero/stage_1_and_2.py
NOT_MEASURED, MAY_LACK = -1.0, ("mfu", "grad_norm")
EQUAL, DIGITS = 10, 4  # lines whose loss is equal to the last of so many digits: it was not computed anew
BATCH = ("global_batch_size", "deepspeed.train_batch_size", "total_train_batch_size", "train_batch_size")


def check(run: PartialRun, table: NumericTable) -> list[Finding]:
    """What is wrong with the iterations of a run, and with what it printed once."""
    if not table.rows:
        return []
    columns = Columns(table, run.arguments)
    rules = (_unknown, _bounds, _falls, _leaps, _loss, _rates, _counts)
    found = [found for rule in rules for found in rule(columns)]
    return [*found, *_epochs(columns, run.summary), *_once(run), *clock.check(run, table)]


def _unknown(c: Columns) -> Iterator[Finding]:
    """Iterations of which nothing is known."""
    rates = ("samples_per_second", "tokens_per_second", "tokens_per_gpu_per_second", "flops_per_s_per_gpu")
    has = np.zeros(len(c["iteration"]), bool)
    for name in ("sec_per_it", "lm_loss", *rates):
        has |= ~np.isnan(c[name])  # an infinite loss is one that was printed
        if 2 * has.sum() >= len(has):
            return
    skipped = np.nan_to_num(c["skipped"]) > 0
    nan = "lm_loss" in c.table and np.isnan(c["lm_loss"])
    empty = ~(has | skipped | nan)
    # a line without either may be the report of another part of the program; most lines cannot be
    if 2 * empty.sum() > len(empty):
        yield Finding(
            "no-time-no-loss", "iteration", f"of {int(empty.sum())} iterations neither time nor loss is known"
        )


def _bounds(c: Columns) -> Iterator[Finding]:
    """Numbers that are impossible each by itself."""
    for name, low, high, message in (
        ("sec_per_it", 0.0, math.inf, "an iteration takes no negative time"),
        ("grad_norm", 0.0, math.inf, "a norm is not negative"),
        ("learning_rate", 0.0, 1.0, "a learning rate lies between 0 and 1"),
        ("lm_loss", 0.0, math.inf, "a cross entropy is not negative"),
        ("mfu", 0.0, 1.0, "no more than the peak can be used; a percentage read as a share?"),
        ("flops_per_s_per_gpu", 0.0, FASTEST_FLOPS_PER_S, "no card is that fast; another unit?"),
    ):
        digest = c.digest(name)
        low = NOT_MEASURED if digest.low == NOT_MEASURED and name in MAY_LACK else low
        if digest.low < low or digest.high > high:
            value, row = (digest.low, digest.low_at) if digest.low < low else (digest.high, digest.high_at)
            yield Finding("bounds", name, f"{value:.6g}: {message}", row)
    seconds, rate = median(c["sec_per_it"]), median(c["flops_per_s_per_gpu"])
    if seconds < SHORTEST_S or seconds > LONGEST_S:
        yield Finding("bounds", "sec_per_it", f"{seconds:.4g} s an iteration: another unit, or other iterations?")
    if 0 < rate < SLOWEST_FLOPS_PER_S:
        yield Finding("bounds", "flops_per_s_per_gpu", f"{rate:.4g} FLOP/s: another unit?")
    end = c["iteration"] > c["train_iters"]
    if end.any():
        at = int(end.argmax())
        text = f"iteration {c['iteration'][at]:.0f} of {c['train_iters'][at]:.0f}"
        yield Finding("bounds", "train_iters", f"{text}: beyond the last", at * c.digest("iteration").stride)


def _falls(c: Columns) -> Iterator[Finding]:
    """Counts that jump back."""
    for name in ("iteration", "consumed_samples", "consumed_tokens"):
        if (row := c.digest(name).falls_at) >= 0:
            yield Finding(
                "jumps-back", name, "falls from one line to the next: lines of two runs, or of two counts?", row
            )


def _leaps(c: Columns) -> Iterator[Finding]:
    """Iterations whose numbers leap: two counts in one column, or lines that are missing."""
    at = c["iteration"]
    passed = steps(at)
    if len(passed) < LINES or not (passed > 0).all():
        return
    usual = median(passed)
    # a program may log densely first and sparsely then: the lines around a leap are dense
    dense = np.concatenate([[True], passed <= DENSE * usual, [passed[-1] > 2 * LEAP * usual]])
    leaps = np.flatnonzero((passed > LEAP * usual) & dense[:-2] & dense[2:])
    if len(leaps):
        text = f"{at[leaps[0]]:.0f} is followed by {at[leaps[0] + 1]:.0f}: lines are missing, or two counts are mixed"
        yield Finding("leap", "iteration", text, (int(leaps[0]) + 1) * c.digest("iteration").stride)


def _once(run: PartialRun) -> Iterator[Finding]:
    """What is wrong with memory, evaluations, copies and numbers, which have no column of iterations."""
    for name in ("max_allocated", "max_reserved"):
        most = max((row[name] for row in run.memory.values() if name in row), default=0.0)
        if most > MOST_BYTES or 0 < most < LEAST_BYTES:
            yield Finding("bounds", name, f"{most:.4g} bytes are no card's memory in use; another unit?")
    if "lm_loss" in run.validation and (run.validation.column("lm_loss") < 0).any():
        yield Finding("bounds", "validation", "a cross entropy is not negative")
    if run.copies.differing:
        text = "the loss of iteration {:.0f} is {:.6g} in one line, {:.6g} in another".format(*run.copies.differing)
        yield Finding("copies", "lm_loss", f"{text}: of one rank each, not of the batch?")
    if lost := run.copies.lost:
        text = f"{len(lost)} lines or more, of iteration {lost[0]:.0f} first, lie behind others and were left out"
        yield Finding("lost", "iteration", f"{text}: two counts, or another run?")
    if 0 < len(run.bare) < MOST_BARE and run.iterations.rows > 2 * len(run.bare):
        row, number = run.bare[0]
        yield Finding("stray", "iteration", f"{number:.0f} has none of the other lines' numbers: another line's?", row)
    if UNNUMBERED in run.notes:
        yield Finding("unnumbered", "iteration", UNNUMBERED)


def _loss(c: Columns) -> Iterator[Finding]:
    """A loss that no language model in training has: a uniform guess has ln(vocabulary)."""
    digest, loss = c.digest("lm_loss"), c["lm_loss"]
    loss = loss[np.isfinite(loss)]
    vocabulary = c.argument("padded_vocab_size", "vocab_size")
    guess = math.log(vocabulary if vocabulary > 1 else LARGEST_VOCABULARY)
    if len(loss) >= LINES and digest.low > 2 * guess:
        text = f"never below {digest.low:.4g}, twice a uniform guess or more: a sum, or another quantity?"
        yield Finding("loss", "lm_loss", text, digest.low_at)
    exact = len(f"{digest.high:.12g}".replace(".", "").strip("0")) >= DIGITS or digest.high == 0
    if len(loss) >= EQUAL and digest.low == digest.high and exact:
        yield Finding("loss", "lm_loss", f"{digest.high:.9g} in each of {len(loss)} lines or more: not computed anew")


def _rates(c: Columns) -> Iterator[Finding]:
    """Printed rates against those that follow from the seconds."""
    seconds, batch = c["sec_per_it"], c.or_argument("global_batch_size", *BATCH)
    tokens = batch * c.or_argument("seq_length", "seq_length", "encoder_seq_length")
    gpus = c.argument("world_size")
    for name, amount, words in (
        ("samples_per_second", batch, "the batch"),
        ("tokens_per_second", tokens, "the batch's tokens"),
        ("tokens_per_gpu_per_second", tokens / gpus, "a GPU's share of the batch's tokens"),
    ):
        ratio = median_ratio(c[name] * seconds, amount) if name in c else 1.0
        if abs(math.log(ratio)) > math.log(AGREE):
            text = f"printed rate times seconds is {ratio:.3g} times {words}"
            yield Finding("rate", name, f"{text}: the rate, the seconds or the batch is wrong")


def _counts(c: Columns) -> Iterator[Finding]:
    """Samples and tokens consumed against the iterations passed."""
    at, used, batch = c["iteration"], c["consumed_samples"], c.or_argument("global_batch_size", *BATCH)
    length = c.or_argument("seq_length", "seq_length", "encoder_seq_length")
    if len(at) <= LINES:
        return
    passed, each = steps(at), batch[1:] if isinstance(batch, np.ndarray) else batch
    ratio = median_ratio(steps(used), passed * each)
    if abs(math.log(ratio)) > math.log(COUNTS_AGREE):
        text = f"samples consumed between two lines are {ratio:.3g} times the iterations' batches"
        yield Finding("count", "iteration", f"{text}: the iterations are counted otherwise, or the batch is wrong")
    if "consumed_tokens" not in c:
        return
    ratio = median_ratio(
        steps(c["consumed_tokens"]), steps(used) * (length[1:] if isinstance(length, np.ndarray) else length)
    )
    if ratio > COUNTS_AGREE:
        yield Finding("count", "consumed_tokens", f"{ratio:.3g} times the consumed samples' tokens")


def _epochs(c: Columns, summary: Mapping[str, float]) -> Iterator[Finding]:
    """The Trainer's iterations against its epochs: its log has a line for every `logging_steps`."""
    at, epoch, total = c["iteration"], c["epoch"], c.argument("total_optimization_steps")
    whole = summary.get("train_steps_per_second", NAN) * summary.get("train_runtime", NAN)
    of_epoch = c.argument("num_examples") / c.argument("total_train_batch_size")
    of_epoch = of_epoch if of_epoch == of_epoch else (total if total == total else whole) / summary.get("epoch", NAN)
    passed = (epoch[-1] - epoch[0]) if len(epoch) else NAN
    if passed >= ROUNDED_EPOCHS:
        ratio = passed * of_epoch / (at[-1] - at[0])
        if ratio > AGREE or ratio < 1 / AGREE:
            yield Finding(
                "count", "iteration", f"the epochs passed are {ratio:.3g} times the iterations between the lines"
            )
    rounded = AGREE * (passed + ROUNDED_EPOCHS / 10)  # of both ends
    is_share = passed >= 0 and epoch[0] > 1 and epoch[0] % 1 > 0  # whole epochs are their numbers
    if is_share and at[0] > 0 and epoch[0] / at[0] * (at[-1] - at[0]) > rounded:
        text = (
            f"begins at {at[0]:.0f} in epoch {epoch[0]:.2f}: of a resumed run, whose first iterations are not counted?"
        )
        yield Finding("count", "iteration", text)
    if at[-1] > total:
        yield Finding("bounds", "train_iters", f"iteration {at[-1]:.0f} of {total:.0f}: beyond the last")
