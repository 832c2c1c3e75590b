"""Calibration: the few constants that measured runs correct, and how far predictions scatter around them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trilane.checks import from_mapping, require, require_positive, to_mapping
from trilane.hardware import Cluster

FITTED = ("matmul", "overhead", "communication")
PRIOR_SPREAD = 0.5  # of the logarithm of each constant: a factor of 1.65 either way is no surprise
NOISE = 0.05  # of the logarithm of a measured time


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Factors on the parts of an iteration's time; 1 is 'as the catalogue's peaks say'.

    `spread` is the standard deviation of ln(measured / predicted); `rows` the number of measured rows behind it.
    """

    matmul: float = 1.0
    overhead: float = 1.0
    communication: float = 1.0
    spread: float = 0.3
    rows: int = 0

    def __post_init__(self) -> None:
        for name in (*FITTED, "spread"):
            require_positive(f"calibration.{name}", getattr(self, name))

    def interval(self, seconds: float) -> tuple[float, float]:
        """The 90 % interval around a predicted time, normal in the logarithm."""
        factor = math.exp(1.645 * self.spread)
        return seconds / factor, seconds * factor


def default(cluster: Cluster) -> Calibration:
    """What is assumed before the first measured row: half of the peak on a GPU, the measured rate on this machine."""
    return Calibration() if cluster.gpu.kind == "cpu" else Calibration(matmul=2.0, communication=1.5)


def fit(parts: Sequence[dict[str, float]], measured: Sequence[float], prior: Calibration) -> Calibration:
    """The calibration that explains `measured` seconds, given each row's uncorrected `parts` in seconds.

    Minimizes sum (ln(pred/meas) / NOISE)^2, robustly (soft L1), plus sum (ln(factor/prior) / PRIOR_SPREAD)^2, so that a
    part that no row exercises keeps its prior. `parts` holds the keys of FITTED, and 'fixed'.
    """
    import numpy as np
    from scipy.optimize import least_squares  # half a second that planning alone need not pay

    require(len(parts) == len(measured) and len(parts) > 0, "rows", len(parts), "needs one measured time for each row")
    columns = np.array([[row[name] for name in FITTED] for row in parts])
    fixed = np.array([row["fixed"] for row in parts])
    start = np.log([getattr(prior, name) for name in FITTED])

    def errors(logs: np.ndarray) -> np.ndarray:
        return np.log((columns @ np.exp(logs) + fixed) / np.array(measured))

    def residuals(logs: np.ndarray) -> np.ndarray:
        robust = np.sqrt(2 * (np.sqrt(1 + (errors(logs) / NOISE) ** 2) - 1))
        return np.concatenate([robust, (logs - start) / PRIOR_SPREAD])

    best = least_squares(residuals, start).x
    n = len(measured)
    # the prior's spread counts as two rows, so that three good rows do not promise perfection
    variance = (float(np.sum(errors(best) ** 2)) + 2 * NOISE**2) / n
    factors = dict(zip(FITTED, (float(v) for v in np.exp(best)), strict=True))
    return replace(prior, **factors, spread=math.sqrt(variance), rows=n)


def to_json(calibration: Calibration) -> dict[str, float]:
    """The calibration as a JSON object."""
    return to_mapping(calibration)


def from_json(values: object) -> Calibration:
    """The calibration of a JSON object; ValueError names a wrong field."""
    return from_mapping(Calibration, values, "calibration")
