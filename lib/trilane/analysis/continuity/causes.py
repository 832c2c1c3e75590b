"""Break: a quantity that a restart did not continue, with the lines on both sides and the likely cause."""

import math
from dataclasses import asdict, dataclass
from typing import Any

WORDS = {
    "iteration": "iteration number",
    "learning_rate": "learning rate",
    "consumed_samples": "consumed samples",
    "consumed_tokens": "consumed tokens",
    "global_batch_size": "batch size",
    "loss_scale": "loss scale",
    "seq_length": "sequence length",
    "lm_loss": "loss",
    "grad_norm": "gradient norm",
    "sec_per_it": "seconds per iteration",
    "samples_per_second": "samples per second",
    "tokens_per_second": "tokens per second",
}
CAUSES = {
    "scheduler-restarted": "the scheduler was not restored: the schedule begins again (warm-up, or its first rate)",
    "another-schedule": "a schedule of another length or form (train_iters, decay, warm-up or minimum changed)",
    "scaled-rate": "another peak rate, or a factor on it: the schedule has the same form",
    "shifted-schedule": "the scheduler's step is that of another iteration",
    "data-from-start": "the count of consumed samples was not restored: the data is replayed from the beginning",
    "data-replayed": "data is replayed: these samples were consumed before",
    "data-skipped": "data is skipped: these samples are not consumed by any iteration",
    "iterations-jump": "the iteration number was not restored: it jumps while the consumed samples go on",
    "iterations-restarted": "the iteration number was not restored: it begins again while the training goes on",
    "weights-only": "only the weights were loaded: iteration, scheduler and optimizer begin again",
    "ramp-up-restarted": "the ramp-up of the batch size was not restored: it begins again",
    "batch-changed": "other gradient accumulation, micro-batch size or number of replicas",
    "loss-scale-initial": "the loss scale was not restored: it is back at its initial value",
    "loss-scale-lost": "the loss scale was not restored",
    "precision-changed": "another precision: one side has no loss scaling",
    "sequence-length": "the sequence length or the state of its curriculum was not restored",
    "slower": "a slow node, link or file system, or another topology",
    "gradient-scale": "gradients are reduced or scaled otherwise (summed for averaged; ranks), or optimizer state",
    "optimizer-state": "optimizer state (Adam's moments, master weights) was not restored; it recovers",
    "weights-not-loaded": "the weights were not loaded: the loss is that of an untrained model, near ln(vocabulary)",
    "older-checkpoint": "the weights of an older checkpoint were loaded: the loss follows its earlier course",
    "moments-lost": "Adam's moments were not restored: the loss rises and converges again",
    "loss-level": "weights restored in part (norms, tied embedding), other data, or another loss",
}


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a log: its name, the iteration, and the value; `number` in the file and `text` where they are known."""

    log: str
    iteration: int
    value: float
    number: int | None = None
    text: str = ""

    def __str__(self) -> str:
        return f"{self.value:.6g} in iteration {self.iteration} of {self.log}"


@dataclass(frozen=True, kw_only=True)
class Break:
    """What a restart did not continue: the last line before it, the first one after it that differs, the cause.

    quantity   of WORDS; `expected` is what the course before the restart leads to at the line `after`
    cause      of CAUSES; `detail` adds what supports it
    """

    quantity: str
    cause: str
    restart: int
    before: Line
    after: Line
    expected: float
    detail: str = ""

    def __post_init__(self) -> None:
        assert self.quantity in WORDS and self.cause in CAUSES, (self.quantity, self.cause)

    @property
    def likely(self) -> str:
        """The likely cause in words."""
        return CAUSES[self.cause] + (f"; {self.detail}" if self.detail else "")

    @property
    def sentence(self) -> str:
        """The break in words: both lines, the size of the jump and the likely cause."""
        size = f"{self.expected:.6g} expected, {change(self.after.value, self.expected)}"
        return f"{WORDS[self.quantity]}: {self.before}, {self.after} ({size}); likely: {self.likely}"

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; `size` is the value over the expected one, null where that is 0."""
        size = self.after.value / self.expected if abs(self.expected) > 1e-30 else None
        return {**asdict(self), "size": size, "likely": self.likely, "sentence": self.sentence}


def change(value: float, expected: float) -> str:
    """A change in words: a factor where it is large, else per cent."""
    if not math.isfinite(value):
        return "no number"
    if not expected or not value:
        return f"{value - expected:+.6g}"
    ratio = value / expected
    return f"x {ratio:.3g}" if not 0.5 < ratio < 2 else f"{ratio - 1:+.2%}"
