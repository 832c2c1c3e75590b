"""The step after a load against the same step without the restart: which rate, beta, samples or gradients differ.

After one step Adam's moments are m = b1 m0 + (1 - b1) g and v = b2 v0 + (1 - b2) g^2 (Kingma and Ba 2015). m0, v0 and
both runs' m, v are known by their sketches and sums, linear in the values; so g, the betas and the length of the step
follow without a tensor. Left out: restarts after which no checkpoint was saved after one iteration.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trilane.diagnose.restart.rules import RestartFinding
from trilane.diagnose.restart.snapshot import Snapshot

SAME = 2e-3  # relative misfit of sketches that rounding explains
BETA = 0.02  # relative: values of 1 - beta that differ by less are equal
STEP = 0.01  # relative: lengths of a step that differ by less are equal
HALF_PRECISION = {"bf16": (4e-4, 3e-3), "fp16": (4e-5, 4e-4)}  # |rounding error| / |weights|: 2^-9 / 1.7, 2^-12 / 1.7
UNKNOWN_SHARE = 0.5  # of two gradients on other samples, as a cosine, where the run before does not show it


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of two runs: `start`, where both begin, `usual` and `other` one iteration later; `before`, one earlier
    than `start`, or None.
    """

    start: Snapshot
    usual: Snapshot
    other: Snapshot
    before: Snapshot | None = None

    @property
    def names(self) -> list[str]:
        """The tensors that all of them show whole, with both moments."""
        wholes = [one.wholes for one in (self.start, self.usual, self.other)]
        kinds = {"weight", "exp_avg", "exp_avg_sq"}
        return [name for name in wholes[0] if all(kinds <= {*whole.get(name, ())} for whole in wholes)]

    def sketches(self, which: Snapshot, kind: str) -> np.ndarray:  # (tensors, SKETCHES)
        """The sketches of each tensor."""
        return np.array([which.wholes[name][kind].sketch for name in self.names])

    def totals(self, which: Snapshot) -> np.ndarray:  # (tensors,)
        """The sum of each tensor's second moment."""
        return np.array([which.wholes[name]["exp_avg_sq"].total for name in self.names])

    @property
    def betas(self) -> tuple[float, float]:
        """Adam's betas as both runs have them by their plans."""
        return self.usual.optimizer.get("adam_beta1", math.nan), self.usual.optimizer.get("adam_beta2", math.nan)


def first_step(step: Step) -> list[RestartFinding]:
    """What differs in the step of `other`, as one finding; none where the steps agree, or too little is known."""
    beta1, beta2 = step.betas
    if not step.names or not (0 < beta1 < 1 and 0 < beta2 < 1):
        return []
    start, usual, other = (step.sketches(one, "exp_avg") for one in (step.start, step.usual, step.other))
    gradient = (usual - beta1 * start) / (1 - beta1)
    known = np.stack([start.ravel(), gradient.ravel()], axis=1)
    (kept, added), *_ = np.linalg.lstsq(known, other.ravel(), rcond=None)
    if _misfit(other.ravel(), known @ np.array([kept, added])) > SAME:
        return _other_gradient(step, gradient, (other - beta1 * start) / (1 - beta1))
    if abs(kept - beta1) > BETA * (1 - beta1) + SAME and abs(kept + added - 1) < STEP:
        what = f"the first moment keeps {kept:.4g} of what it was in the step after the load: "
        return [_finding("beta", f"{what}adam_beta1 is {kept:.4g}, it was {beta1:g}", abs(kept - beta1))]
    if abs(kept) < SAME and abs(added - (1 - beta1)) < STEP:
        return [_finding("moments", "the first moment holds the gradient of the step after the load alone", 1.0)]
    if abs(added / (1 - beta1) - 1) > STEP:
        factor = added / (1 - beta1)
        what = (
            f"the gradients of the step after the load are {factor:.4g} times those without the restart: another number"
        )
        what += " of accumulated microbatches or replicas in the mean, or another limit of clipping"
        return [_finding("gradients", what, factor)]
    return _second_moment(step, beta2) or _length(step, beta1, beta2)


def _misfit(values: np.ndarray, fit: np.ndarray) -> float:
    size = float(np.linalg.norm(values))
    return float(np.linalg.norm(values - fit)) / size if size else 0.0


def _finding(kind: str, what: str, size: float) -> RestartFinding:
    return RestartFinding(kind=kind, what=what, size=size)


def _second_moment(step: Step, beta2: float) -> list[RestartFinding]:
    """Another beta2: with equal gradients, v of each tensor gives the share that it kept of what it was."""
    start, usual, other = (step.totals(one) for one in (step.start, step.usual, step.other))
    squares = (usual - beta2 * start) / (1 - beta2)
    clear = np.abs(start - squares) > 0.02 * np.maximum(np.abs(start), np.abs(squares))
    if not clear.any() or np.allclose(usual, other, rtol=SAME * (1 - beta2)):
        return []
    kept = (other - squares)[clear] / (start - squares)[clear]
    found = float(np.median(kept))
    if abs(found - beta2) <= BETA * (1 - beta2) or np.abs(kept - found).max() > 0.1 * max(1 - found, 1e-3) + STEP:
        return []
    what = f"the second moment keeps {found:.5g} of what it was in the step after the load: adam_beta2 is {found:.5g}, "
    return [_finding("beta", f"{what}it was {beta2:g}", abs(found - beta2))]


def _length(step: Step, beta1: float, beta2: float) -> list[RestartFinding]:
    """Another learning rate: with equal moments the weights move equally, times the ratio of the rates."""
    start, usual, other = (step.sketches(one, "weight") for one in (step.start, step.usual, step.other))
    moved, mine = (usual - start).ravel(), (other - start).ravel()
    if not moved @ moved > 0:
        return []
    factor = float(mine @ moved / (moved @ moved))
    if np.linalg.norm(mine - factor * moved) > 0.05 * np.linalg.norm(moved):
        return _rounded(step)
    if abs(factor - 1) <= STEP:
        return []
    what = f"with equal moments the weights move {factor:.4g} times as far as without the restart in the step after "
    what += f"the load: the learning rate is {factor:.4g} times what it was"
    count = step.usual.scalars.get("step", 0.0)
    if count > 1 and abs(factor * _correction(count, beta1, beta2) / _correction(1, beta1, beta2) - 1) < STEP:
        what += ", or Adam counts its steps from zero (bias correction)"
    return [_finding("rate", what, abs(factor - 1))]


def _correction(step: float, beta1: float, beta2: float) -> float:
    """Adam's bias correction of a step: sqrt(1 - b2^t) / (1 - b1^t)."""
    return math.sqrt(1 - beta2**step) / (1 - beta1**step)


def _rounded(step: Step) -> list[RestartFinding]:
    """Master weights that were rounded: with equal moments the weights differ by the rounding of half precision."""
    pairs = [(step.usual.wholes[name]["weight"], step.other.wholes[name]["weight"]) for name in step.names]
    found = rounding([one.apart(two) for one, two in pairs if one.hash != two.hash and len(one.sketch)])
    if not found:
        return []
    what = f"with equal moments the weights differ by the rounding of {found} in the step after the load: the master "
    return [_finding("masters", what + f"weights were rebuilt from {found}", HALF_PRECISION[found][1])]


def rounding(sizes: Sequence[float]) -> str:
    """The half precision whose rounding explains these relative differences of tensors; "" where none does."""
    for name, (low, high) in HALF_PRECISION.items():
        if len(sizes) > 1 and low < float(np.median(sizes)) < high and max(sizes) < 2 * high:
            return name
    return ""


def _other_gradient(step: Step, usual: np.ndarray, other: np.ndarray) -> list[RestartFinding]:
    """Other samples: those of the iteration before again, a part of them, or others; by the gradients' cosines.

    Gradients on n samples have a part in common, c as a cosine between two iterations; on half of the samples of an
    iteration the cosine with the gradient on all of them is 1 / sqrt(2 - c), c with that on other samples.
    """
    last = _gradient_before(step)
    common = _cosine(usual, last) if last is not None else UNKNOWN_SHARE
    between = (common + 1 / math.sqrt(2 - min(max(common, 0.0), 1.0))) / 2
    with_usual = _cosine(usual, other)
    with_last = _cosine(last, other) if last is not None else -1.0
    what = f"the gradients of the step after the load have a cosine of {with_usual:.2f} with those without the restart"
    if last is not None:
        what += f", {with_last:.2f} with those of iteration {step.start.iteration}, and these two of {common:.2f}"
    if with_last > max(between, with_usual):
        what += f": the samples of iteration {step.start.iteration} are replayed"
        return [_finding("replayed", what, 1 - with_last)]
    if with_usual > between:
        what += ": trained on part of the samples, as with fewer accumulated microbatches"
        return [_finding("accumulation", what, 1 - with_usual)]
    return [_finding("replayed", f"{what}: trained on other samples", 1 - with_usual)]


def _gradient_before(step: Step) -> np.ndarray | None:
    """The gradient of the last step before the load; the first step's is its first moment, by 1 - beta1."""
    beta1, start = step.betas[0], step.sketches(step.start, "exp_avg")
    if step.start.scalars.get("step") == 1:
        return start / (1 - beta1)
    if step.before is None or not all("exp_avg" in step.before.wholes.get(name, ()) for name in step.names):
        return None
    return (start - beta1 * step.sketches(step.before, "exp_avg")) / (1 - beta1)


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    """The mean over tensors of the cosines that their sketches estimate."""
    sizes = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    good = sizes > 0
    return float(((one * other).sum(1)[good] / sizes[good]).mean()) if good.any() else 0.0
