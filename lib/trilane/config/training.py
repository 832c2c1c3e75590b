"""What a plan says of the training itself: data, optimizer, dropout, how long the run is and what
it leaves behind.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from trilane.config.batch_rampup import Ramp
from trilane.config.options import Rules, check, option
from trilane.utils.frozen import frozen
from trilane.utils.validation import require, require_path

Ranges = tuple[tuple[int, int], ...]  # (first, last) of each, both left out
DECAY_STYLES = ("cosine", "linear", "constant", "inverse-square-root", "WSD")
WSD_DECAY_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")


@frozen
class Part:
    """One source of a blend."""

    source: str = option(help="as in data.source")
    weight: float = option(help="its share of the samples, relative to the other weights", above=0)

    def __post_init__(self) -> None:
        require(self.source != "blend", "data.blend", self.source, "a blend cannot hold another")
        require_path("data.blend", self.source)
        check(self, "data.blend.")


@frozen
class Data:
    """Where the tokens come from."""

    source: str = option(
        "stdlib",
        "stdlib (Python's standard library), mock (made on the fly), a text or JSONL file, a "
        "folder of text files, the prefix of a .bin/.idx pair, or blend",
        megatron="data-path",
    )
    tokenizer: str = option(
        "bytes", "bytes (256 and an end of document), or a folder with a tokenizer.json"
    )
    folder: str = option("outputs/data", "where prepared .bin/.idx pairs are kept")
    blend: tuple[Part, ...] = option(
        (), "the sources of blend, mixed so that their shares stay close to their weights"
    )
    split: str = option(
        "", "shares of documents for training, validation, test: 949,50,1; empty: all train"
    )

    def __post_init__(self) -> None:
        for name in ("source", "tokenizer", "folder"):
            require_path(f"data.{name}", getattr(self, name))
        check(self, "data.")

    def rules(self) -> Rules:
        """Of the split and the blend."""
        share = r" *[0-9]{1,9}(\.[0-9]{1,9})? *"
        ok = not self.split or re.fullmatch(f"{share}(,{share}){{1,2}}", self.split) is not None
        rule = 'must be shares of training (above 0), validation and test, such as "949,50,1"'
        yield ok and float(self.split.partition(",")[0] or 1) > 0, "split", rule
        count = len(self.blend)
        ok = count > 1 if self.source == "blend" else count == 0
        yield ok, "blend", 'needs source="blend" and at least two sources'

    @property
    def parts(self) -> list["Data"]:
        """The data of each source: of one, or of those of the blend."""
        return [replace(self, source=part.source, blend=()) for part in self.blend] or [self]

    @property
    def shares(self) -> list[float]:
        """The shares of training, validation and test, which add up to 1."""
        words = [*(self.split or "1").split(","), "0", "0"]
        shares = [float(word) for word in words[:3]]
        return [share / sum(shares) for share in shares]


@frozen
class Optimizer:
    """AdamW and its schedule: linear warm-up, then a decay from `lr` to `min_lr`, both counted in
    samples.
    """

    lr: float = option(1e-3, "peak learning rate", above=0, megatron="lr")
    min_lr: float = option(1e-4, "learning rate at the end of the decay", megatron="min-lr")
    warmup_samples: int = option(0, "samples of the linear warm-up", megatron="lr-warmup-samples")
    decay_samples: int = option(
        0, "samples to the end of the decay; 0: the whole run", megatron="lr-decay-samples"
    )
    decay_style: str = option(
        "cosine", "how the rate falls", choices=DECAY_STYLES, megatron="lr-decay-style"
    )
    wsd_decay_style: str = option(
        "exponential",
        "how it falls by WSD",
        choices=WSD_DECAY_STYLES,
        megatron="lr-wsd-decay-style",
    )
    wsd_decay_samples: int = option(
        0, "samples in which it falls by WSD, the last ones", megatron="lr-wsd-decay-samples"
    )
    weight_decay: float = option(
        0.1, "of matrices; biases and norms do not decay", megatron="weight-decay"
    )
    adam_beta1: float = option(0.9, "of the mean of gradients", below=1, megatron="adam-beta1")
    adam_beta2: float = option(0.95, "of the mean of their squares", below=1, megatron="adam-beta2")
    adam_eps: float = option(1e-8, "added to the root of this mean", megatron="adam-eps")
    clip_grad: float = option(1.0, "limit of the gradient norm; 0: none", megatron="clip-grad")
    # Radford et al. 2019 (GPT-2), section 2.3: over sqrt(2 num_layers) where they write to the
    # residual stream
    init_std: float = option(
        0.02, "of the initial weights", above=0, maximum=1, megatron="init-method-std"
    )

    def __post_init__(self) -> None:
        check(self)

    def rules(self) -> Rules:
        """The rate falls, by WSD after its warm-up."""
        yield self.min_lr <= self.lr, "min_lr", f"must be at most lr={self.lr}"
        longest = (self.decay_samples or math.inf) - self.warmup_samples
        fits = 0 < self.wsd_decay_samples <= longest
        rule = "WSD needs some, and not more than there are between warmup_ and decay_samples"
        yield fits or self.decay_style != "WSD", "wsd_decay_samples", rule

    def learning_rate(self, samples: int, total_samples: int) -> float:
        """The rate of the iteration that ends at `samples` consumed, of `total_samples` in the run.

            s <= w   lr s / w                                      linear warm-up over w samples
            s >  w   min_lr + (lr - min_lr) left((s - b) / (d - b))
                     constant: lr; inverse-square-root: lr sqrt(w / s), at least min_lr
            s >  d   min_lr, unless constant

        d is decay_samples, or the whole run where that is 0; b is w, or d - wsd_decay_samples by
        WSD, which has lr before it. A run that is resumed with more samples decays later. As
        Megatron-LM's OptimizerParamScheduler, but one step ahead: Megatron counts the samples
        before the iteration, so its first step under warm-up has rate 0.
        """
        style = self.decay_style
        warmup = self.warmup_samples
        decay = self.decay_samples or total_samples
        if samples <= warmup:
            return self.lr * samples / warmup
        if style == "constant":
            return self.lr
        if samples > decay:
            return self.min_lr
        if style == "inverse-square-root":
            return max(self.min_lr, self.lr * math.sqrt(max(1, warmup) / samples))
        begin = warmup
        if style == "WSD":
            style = self.wsd_decay_style
            begin = decay - self.wsd_decay_samples
        progress = max(0.0, (samples - begin) / (decay - begin))
        return self.min_lr + (self.lr - self.min_lr) * _left(style, progress)


def _left(style: str, progress: float) -> float:
    """What a decay leaves of lr - min_lr, a share, after a share of its samples."""
    if style == "linear":
        return 1 - progress
    if style == "exponential":
        return 2 * 0.5**progress - 1
    if style == "minus_sqrt":
        return 1 - math.sqrt(progress)
    return (1 + math.cos(math.pi * progress)) / 2


@frozen
class Dropout:
    """Shares of values that training sets to 0; in Megatron-LM both are 0.1 by default."""

    hidden: float = option(
        0.0, "of embedding, attention and MLP", below=1, megatron="hidden-dropout"
    )
    attention: float = option(
        0.0, "of attention's probabilities", below=1, megatron="attention-dropout"
    )

    def __post_init__(self) -> None:
        check(self, "dropout.")


@frozen
class Run:
    """How long the run is and what it leaves behind."""

    train_iters: int = option(50, "iterations of the whole run", minimum=1)
    log_interval: int = option(
        1, "iterations from one log line to the next", minimum=1, megatron="log-interval"
    )
    timers: bool = option(False, "also log the seconds of each phase on the last rank")
    seed: int = option(1234, "of the initial weights and the data order", megatron="seed")
    ramp: Ramp = option(Ramp, "ramp-up of the batch size")
    save_interval: int = option(
        0, "iterations between checkpoints, and one at the end; 0: only on request"
    )
    keep_last: int = option(2, "checkpoints that are kept; 0: all")
    exit_duration_minutes: float = option(
        0.0, "save and end this long after the process began; 0.0: never"
    )
    load: str = option(
        "",
        "a checkpoint or run folder to start from, where the run has no checkpoint of its own yet",
    )
    # longer than the longest iteration, checkpoint included; torch itself gives up after 1800 s
    # without naming a rank
    hang_timeout_s: float = option(
        1500.0, "dump and end a run of which a rank stands still; 0.0: never"
    )
    start_iteration: int = option(0, "iterations done by an earlier plan, whose checkpoint is load")
    exit_iteration: int = option(
        0, "save and end after it, for another plan to continue; 0: the last"
    )
    eval_interval: int = option(
        0, "iterations between validation losses; 0: none", megatron="eval-interval"
    )
    eval_iters: int = option(
        0, "batches of a validation loss, always the same", megatron="eval-iters"
    )
    skip: str = option(
        "", "iterations that count as done and are not trained, such as 101-200,251-300"
    )
    fused: str = option(
        "auto",
        "kernels: auto from compute capability 8.0; layer: whole layers; te: Transformer Engine's",
        choices=("auto", "on", "off", "te", "layer"),
    )

    def __post_init__(self) -> None:
        check(self)
        require_path("load", self.load)

    def rules(self) -> Rules:
        """Of the run's beginning and end, its evaluations and skips."""
        start = self.start_iteration
        rule = f"must lie between start_iteration={start} and train_iters={self.train_iters}"
        yield start < self.goal <= self.train_iters, "exit_iteration", rule
        yield not start or self.load, "start_iteration", "needs load"
        both = (self.eval_interval > 0) == (self.eval_iters > 0)
        yield both, "eval_iters", "needs eval_interval, or neither"
        rule = f"holds the last iteration, {self.goal}, which saves"
        yield not inside(self.skipped, self.goal), "skip", rule

    @property
    def skipped(self) -> Ranges:
        """First and last iteration of each range in `skip`, "101-200,251-300,400"; ValueError where
        it is malformed, and where they overlap or do not rise.
        """
        ranges: list[tuple[int, int]] = []
        before = 0
        for word in self.skip.split(",") if self.skip else ():
            match = re.fullmatch(r" *([0-9]{1,12})( *- *([0-9]{1,12}))? *", word)
            first = int(match[1]) if match else 0
            last = int(match[3] or first) if match else 0
            rule = "must be ranges of iterations from 1 on that rise, such as 101-200,251-300"
            require(before < first <= last, "skip", self.skip, rule)
            before = last
            ranges.append((first, last))
        return tuple(ranges)

    @property
    def saves_at_end(self) -> bool:
        """Whether a checkpoint of the goal belongs to the run: it saves in between, or another plan
        goes on.
        """
        return self.save_interval > 0 or self.exit_iteration > 0

    def evaluates_after(self, iteration: int) -> bool:
        """Whether the validation loss is computed after this iteration."""
        if not self.eval_interval:
            return False
        return iteration % self.eval_interval == 0 or iteration == self.train_iters

    @property
    def goal(self) -> int:
        """The iteration after which this plan has nothing left to do."""
        return self.exit_iteration or self.train_iters


def until(ranges: Iterable[Sequence[int]], iteration: int) -> list[tuple[int, int]]:
    """What the ranges hold of the first `iteration` iterations."""
    return [(first, min(last, iteration)) for first, last in ranges if first <= iteration]


def inside(ranges: Ranges, iteration: int) -> bool:
    """Whether the iteration is left out."""
    return any(first <= iteration <= last for first, last in ranges)
