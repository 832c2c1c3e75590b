"""What a plan says of the training itself: data, optimizer, dropout, how long the run is and what it leaves behind."""

import math
import re
from dataclasses import dataclass, field, replace

from trilane.config.batch_rampup import Ramp
from trilane.config.interventions import LrChange, Ranges, factor_of, inside, parse_ranges, require_trained
from trilane.utils.validation import require, require_integer, require_known, require_path, require_positive

BLEND = "blend"
SHARE = re.compile(r" *[0-9]{1,9}(\.[0-9]{1,9})? *")
FUSED = ("auto", "on", "off")
PROFILE = re.compile(r"([0-9]{1,9})-([0-9]{1,9})(?::([0-9]{1,7}(?:,[0-9]{1,7})*))?")
MOST_PROFILED = 100  # iterations: a trace of one is 0.3 MB and more


@dataclass(frozen=True, kw_only=True)
class Part:
    """One source of a blend and its share of the samples, relative to the other weights."""

    source: str
    weight: float

    def __post_init__(self) -> None:
        require(self.source != BLEND, "data.blend", self.source, "a blend cannot hold another")
        require_path("data.blend", self.source)
        require_positive(f"data.blend weight of {self.source}", self.weight)


@dataclass(frozen=True, kw_only=True)
class Data:
    """Where the tokens come from.

    source      "stdlib" (text of Python's standard library), "mock" (made on the fly), a text or JSONL file, a folder
                of text files, the prefix of an existing Megatron .bin/.idx pair, or "blend"
    blend       the sources of "blend", mixed sample by sample so that their shares stay close to their weights
    tokenizer   "bytes" (256 bytes and an end-of-document token), or a local folder with a Hugging Face tokenizer.json
    folder      where prepared .bin/.idx pairs are kept
    split       shares of the documents of each source, in their order, for training, validation and test, as
                Megatron-LM's --split: "949,50,1"; "" trains on all documents. Nothing is computed on the test share
    """

    source: str = "stdlib"
    tokenizer: str = "bytes"
    folder: str = "outputs/data"
    blend: tuple[Part, ...] = ()
    split: str = ""

    def __post_init__(self) -> None:
        words = self.split.split(",") if self.split else ["1", "0"]
        ok = len(words) in (2, 3) and all(map(SHARE.fullmatch, words))
        require(ok, "data.split", self.split, 'must be shares of training, validation and test, such as "949,50,1"')
        require(float(words[0]) > 0, "data.split", self.split, "leaves nothing to train on")
        for name in ("source", "tokenizer", "folder"):
            require_path(f"data.{name}", getattr(self, name))
        parts, blended = ", ".join(part.source for part in self.blend) or "empty", self.source == BLEND
        require(blended or not self.blend, "data.blend", parts, f'needs source="{BLEND}"')
        require(not blended or len(self.blend) > 1, "data.blend", parts, "needs at least two sources")

    @property
    def parts(self) -> list["Data"]:
        """The data of each source: of one, or of those of the blend."""
        return [replace(self, source=part.source, blend=()) for part in self.blend] or [self]

    @property
    def shares(self) -> tuple[float, float, float]:
        """The shares of training, validation and test, which add up to 1."""
        training, validation, test, *_ = (*map(float, (self.split or "1").split(",")), 0.0, 0.0)
        total = training + validation + test
        return training / total, validation / total, test / total


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW and its schedule: linear warm-up, then cosine from `lr` to `min_lr`, both counted in samples.

    lr_changes   from these samples on the rate is the schedule's times a factor, until the next change
    init_std   standard deviation of the initial weights, over sqrt(2 L) where they write to the residual stream
    z_loss     adds z_loss x the mean of log(Z)^2 to what is minimized, Z the softmax's denominator (0.0: off); losses
               that are logged are without it. Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, section 5: 1e-4
    """

    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup_samples: int = 0
    decay_samples: int = 0
    weight_decay: float = 0.1
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    lr_changes: tuple[LrChange, ...] = ()
    init_std: float = 0.02  # Radford et al. 2019 (GPT-2), section 2.3
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        require_positive("lr", self.lr)
        require(0 <= self.min_lr <= self.lr, "min_lr", self.min_lr, f"must lie between 0 and lr={self.lr}")
        require_integer("warmup_samples", self.warmup_samples, 0)
        require_integer("decay_samples", self.decay_samples, 0)
        require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "must not be negative")
        require(self.clip_grad >= 0, "clip_grad", self.clip_grad, "must not be negative (0: off)")
        begins = [change.samples for change in self.lr_changes]
        require(begins == sorted(set(begins)), "lr_changes", begins, "their samples must rise")
        require(0 < self.init_std <= 1, "init_std", self.init_std, "must be above 0, and 1 at most")
        require(0 <= self.z_loss <= 1, "z_loss", self.z_loss, "must lie between 0 (off) and 1")

    def learning_rate(self, samples: int, total_samples: int) -> float:
        """The rate of the iteration that ends at `samples` consumed, of `total_samples` in the run.

            s <= w      lr s / w                                                    linear warm-up over w samples
            s >  w      min_lr + (lr - min_lr) (1 + cos(pi (s - w) / (d - w))) / 2  cosine to d samples, then min_lr

        d is decay_samples, or the whole run where that is 0; all of it times the factor of lr_changes. As Megatron-LM's
        OptimizerParamScheduler (which has no such factor), but one step ahead: Megatron counts the samples before the
        iteration, so its first step under warm-up has rate 0.
        """
        warmup, decay = self.warmup_samples, self.decay_samples or total_samples
        factor = factor_of(self.lr_changes, samples)
        if samples <= warmup:
            return self.lr * samples / warmup * factor
        progress = min(1.0, (samples - warmup) / max(1, decay - warmup))
        return (self.min_lr + (self.lr - self.min_lr) * (1 + math.cos(math.pi * progress)) / 2) * factor


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """Shares of values that training sets to 0: `hidden` after the embedding, the attention and the MLP, `attention` in
    the attention's probabilities. Megatron-LM's --hidden-dropout and --attention-dropout, which are 0.1 there.
    """

    hidden: float = 0.0
    attention: float = 0.0

    def __post_init__(self) -> None:
        for name in ("hidden", "attention"):
            share = getattr(self, name)
            require(0 <= share < 1, f"dropout.{name}", share, "must be at least 0 and below 1")


@dataclass(frozen=True, kw_only=True)
class ProfileWindow:
    """Iterations `first` to `last`, and the ranks that record them; (): the first and the last."""

    first: int
    last: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Run:
    """How long the run is and what it leaves behind.

    save_interval           iterations from one checkpoint to the next (0: none, but when asked by signal or file); a
                            run that saves at all saves its last iteration too
    keep_last               so many checkpoints are kept (0: all)
    exit_duration_minutes   save and end after so long, counted from the start of the process (0.0: never)
    load                    a checkpoint, or a folder of them, to start from where this run has none of its own yet
    start_iteration         so many iterations are done by the plan before, whose checkpoint is `load`
    exit_iteration          save and end after this iteration, for another plan to go on (0: the last)
    eval_interval           iterations from one evaluation to the next, on the validation share of data.split (0: none);
                            a run that evaluates does so after its last iteration too
    eval_iters              batches of topology.gbs samples in an evaluation, the same ones each time
    skip                    "101-200,251-300": iterations that are not trained; they count as done, and all others keep
                            their numbers, samples and learning rates
    order_samples           the samples come in the order made for a run of so many, then in further epochs (0: made for
                            this run's own number, or as in the checkpoint that it starts from)
    timers                  also the seconds of each phase, (min, max) over ranks, every log_interval iterations
    tensorboard             also an event file for TensorBoard
    hang_timeout_s          a run of which a rank gives no sign of life for so long is dumped and ended as a hang (0.0:
                            off); longer than the longest iteration, checkpoint included
    fused                   "auto": fused kernels on cards of compute capability 8.0 and above; "on": wherever
                            torch.compile works; "off"
    profile                 "10-12": a trace of these iterations by torch's profiler, of the first and the last rank;
                            "10-12:0,3" of these ranks
    """

    train_iters: int = 50
    log_interval: int = 1
    timers: bool = False
    tensorboard: bool = False
    seed: int = 1234
    ramp: Ramp = field(default_factory=Ramp)
    save_interval: int = 0
    keep_last: int = 2
    exit_duration_minutes: float = 0.0
    load: str = ""
    hang_timeout_s: float = 1500.0  # torch itself gives up after 1800 s, without a word about who is to blame
    start_iteration: int = 0
    exit_iteration: int = 0
    eval_interval: int = 0
    eval_iters: int = 0
    skip: str = ""
    order_samples: int = 0
    fused: str = "auto"
    profile: str = ""

    def __post_init__(self) -> None:
        require_path("load", self.load)
        require_known("fused", self.fused, FUSED)
        for name in ("train_iters", "log_interval"):
            require_integer(name, getattr(self, name), 1)
        counts = ("save_interval", "keep_last", "start_iteration", "exit_iteration", "eval_interval", "eval_iters")
        for name in (*counts, "order_samples"):
            require_integer(name, getattr(self, name), 0)
        rule = f"must lie between start_iteration={self.start_iteration} and train_iters={self.train_iters}"
        require(self.start_iteration < self.goal <= self.train_iters, "exit_iteration", self.exit_iteration, rule)
        require(not self.start_iteration or bool(self.load), "start_iteration", self.start_iteration, "needs load")
        require_trained(self.skip, self.train_iters, self.goal)
        both = (self.eval_interval > 0) == (self.eval_iters > 0)
        require(both, "eval_iters", self.eval_iters, f"needs eval_interval, which is {self.eval_interval}, or neither")
        minutes, seconds = self.exit_duration_minutes, self.hang_timeout_s
        require(0 <= minutes < float("inf"), "exit_duration_minutes", minutes, "must not be negative (0.0: never)")
        require(0 <= seconds < float("inf"), "hang_timeout_s", seconds, "must be >= 0 (0.0: off)")
        if window := self.profile_window:
            first, last = window.first, window.last
            rule = f"must lie between iterations {self.start_iteration + 1} and {self.goal}, which this plan trains"
            require(self.start_iteration < first <= last <= self.goal, "profile", self.profile, rule)
            trained = not (inside(self.skipped, first) or inside(self.skipped, last))
            require(trained, "profile", self.profile, f"must begin and end outside of skip={self.skip}")

    @property
    def skipped(self) -> Ranges:
        """The first and last iteration of each range in `skip`; ValueError where it is malformed."""
        return parse_ranges("skip", self.skip)

    @property
    def saves_at_end(self) -> bool:
        """Whether a checkpoint of the goal belongs to the run: it saves in between, or another plan goes on."""
        return self.save_interval > 0 or self.exit_iteration > 0

    def evaluates_after(self, iteration: int) -> bool:
        """Whether the validation loss is computed after this iteration."""
        return self.eval_interval > 0 and (iteration % self.eval_interval == 0 or iteration == self.train_iters)

    @property
    def profile_window(self) -> ProfileWindow | None:
        """The iterations and ranks of `profile`; None without one. ValueError where it is malformed."""
        if not self.profile:
            return None
        found = PROFILE.fullmatch(self.profile)
        rule = f"must be FIRST-LAST, such as 10-12, at most {MOST_PROFILED} iterations; ranks as in 10-12:0,3"
        first, last = (int(found[1]), int(found[2])) if found else (1, 0)
        require(0 < first <= last < first + MOST_PROFILED, "profile", self.profile, rule)
        ranks = tuple(int(rank) for rank in found[3].split(",")) if found and found[3] else ()
        return ProfileWindow(first=first, last=last, ranks=ranks)

    @property
    def goal(self) -> int:
        """The iteration after which this plan has nothing left to do."""
        return self.exit_iteration or self.train_iters
