"""Numerics: skipped steps, NaN, loss scale and gradient norms, over the whole log of a run."""

import math
from dataclasses import dataclass

import numpy as np

from trilane.logs.dialects import megatron
from trilane.logs.run import RunLog


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """Counts over the whole log; NaN for a number that the log does not print.

    skipped          iterations whose optimizer step was not taken (fp16 overflow)
    nan_iterations   those that the framework counts as NaN, or whose loss it prints as NaN; Megatron leaves it out then
    grad_norm        median over the log; `grad_norm_max` its largest
    loss_scale       the last; `loss_scale_min` the lowest, `loss_scale_drops` how often it fell
    """

    skipped: int
    nan_iterations: int
    grad_norm: float
    grad_norm_max: float
    loss_scale: float
    loss_scale_min: float
    loss_scale_drops: int


def numerics(log: RunLog) -> Numerics:
    """The numerics of one run. A loss scale of -1, which Megatron prints where there is none, and a norm that is 0 in
    every line, as DeepSpeed's engines left it in 2021, count as not printed.
    """
    skipped, lost, loss = (log.column(name) for name in ("skipped", "nan", "lm_loss"))
    broken = np.isnan(loss) & ~(np.nan_to_num(skipped) > 0) if len(skipped) == len(loss) else np.isnan(loss)
    broken = broken if megatron.FAMILY & set(log.dialect.split(" + ")) else broken[:0]
    if not np.isfinite(skipped).any():  # DeepSpeed's engine counts those since the start
        total = log.column("skipped_total")
        skipped = total[np.isfinite(total)][-1:]
    norm, scale = log.column("grad_norm"), log.column("loss_scale")
    norm, scale = norm[np.isfinite(norm)], scale[(scale > 0) & np.isfinite(scale)]
    if not norm.any():
        norm = norm[:0]
    return Numerics(
        skipped=_total(skipped),
        nan_iterations=max(_total(lost), int(broken.sum())),
        grad_norm=float(np.median(norm)) if len(norm) else math.nan,
        grad_norm_max=float(norm.max()) if len(norm) else math.nan,
        loss_scale=float(scale[-1]) if len(scale) else math.nan,
        loss_scale_min=float(scale.min()) if len(scale) else math.nan,
        loss_scale_drops=int((np.diff(scale) < 0).sum()),
    )


def _total(counts: np.ndarray) -> int:
    return int(counts[np.isfinite(counts)].sum())
