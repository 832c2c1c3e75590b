"""The learning rate by consumed samples, independent of batch ramp-up and topology."""

import math

from trilane.config.plan import Optimizer


def learning_rate(optimizer: Optimizer, samples: int, total_samples: int) -> float:
    """The rate of the iteration that ends at `samples` consumed, of `total_samples` in the run.

        s <= w      lr s / w                                                    linear warm-up over w samples
        s >  w      min_lr + (lr - min_lr) (1 + cos(pi (s - w) / (d - w))) / 2  cosine down to d samples, then min_lr

    d is decay_samples, or the whole run where that is 0. As Megatron-LM's OptimizerParamScheduler, but one step ahead:
    Megatron counts the samples before the iteration, so its first step under warm-up has rate 0 and learns nothing.
    """
    warmup, decay = optimizer.warmup_samples, optimizer.decay_samples or total_samples
    if samples <= warmup:
        return optimizer.lr * samples / warmup
    progress = min(1.0, (samples - warmup) / max(1, decay - warmup))
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * (1 + math.cos(math.pi * progress)) / 2
