"""Support: the measured rows that a prediction rests on; Posterior: its uncertainty, as a covariance over plans."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trilane.config.cluster import Cluster
from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology
from trilane.costmodel.calibration import Calibration, Configuration
from trilane.costmodel.columns import columns_of
from trilane.costmodel.constants import BOUNDS, GIVEN, Constants
from trilane.costmodel.fit import NOISE, STEP, deviations, left_out, slopes, time_errors
from trilane.costmodel.iteration import iteration_columns
from trilane.costmodel.measured_rows import MeasuredRow, every_row

# Error of the model with known constants, as a deviation of ln(seconds), and the rows that this prior counts for. In
# cross-validation by table 90 of 100 rows are within 5.4 % (docs/planner.md), a deviation of 3.3 %; half as much is
# added because that was one cluster in 12 days.
MISFIT, MISFIT_ROWS = 0.05, 6
FOREIGN = 0.12  # the same on a site or stack without rows: leaving out each file misses by 4 to 19 % at the median
T_QUANTILE = 1.943  # of Student's t with MISFIT_ROWS degrees of freedom, at 95 %
NOISE_ROWS = 2  # repeats that the prior noise counts for
MAX_ERROR = 0.15  # larger errors count as this


class Case(Protocol):
    """What can be predicted: a Plan, or a Configuration."""

    @property
    def shape(self) -> ModelShape: ...
    @property
    def topology(self) -> Topology: ...
    @property
    def cluster(self) -> Cluster: ...
    @property
    def engine(self) -> str: ...


# How far two runs are apart: for each size, the factor that counts as 1 (a quite different run), and what else counts.
SPANS = {"hidden": 4, "layers": 8, "seq": 4, "tokens": 8, "gpus": 16, "tp": 8, "pp": 16, "microbatches": 16}
KINDS = {"card": 1.5, "cluster": 0.7, "attention kernel": 1.0, "precision": 1.0, "recomputation": 0.5, "offload": 1.0}
KINDS |= {"MLP": 0.4, "key-value heads": 0.3, "ZeRO": 0.5, "context parallelism": 1.0, "groups over nodes": 1.0}
SOFTWARE = 2.0  # a row of other software than the constants: on Jean Zay's rows of 2024 those of 2022 miss by 9 to 20 %
NAMES = {"hidden": "hidden size", "layers": "number of layers", "seq": "sequence length", "gpus": "number of GPUs"}
NAMES |= {"tokens": "microbatch", "microbatches": "number of microbatches"}  # where a word is not its own name
NEAR, FAR = 0.5, 1.0  # up to NEAR the fitted interval holds; from FAR on no measured run supports a prediction
WIDENING = 0.10  # of ln(seconds), for each unit of distance beyond NEAR


@dataclass(frozen=True, kw_only=True)
class Support:
    """Which measured runs a prediction rests on: the nearest with their distances, and what sets the first one apart.

    A distance is the root of the squares of what differs: a size by its SPANS factor counts 1, a kind by KINDS.
    `stack` is the software of the nearest one.
    """

    nearest: tuple[tuple[str, float], ...] = ()
    differs: tuple[str, ...] = ()
    stack: str = ""

    @property
    def distance(self) -> float:
        """To the nearest measured run; infinite where there is none."""
        return self.nearest[0][1] if self.nearest else math.inf

    @property
    def words(self) -> str:
        """One sentence for commands, notebooks and reports."""
        if not self.nearest:
            return "no measured run like this: there are no rows"
        (row, distance), by = self.nearest[0], f" ({self.stack})" * bool(self.stack)
        if distance > FAR:
            other = f": another {', '.join(self.differs)}" if self.differs else ""
            return f"no measured run like this; the nearest is {row}{by}, at a distance of {distance:.1f}{other}"
        return f"rests on measured runs such as {row}{by}, at a distance of {distance:.1f}"

    @property
    def widening(self) -> float:
        """What the distance adds to the half-width of the interval of ln(seconds), as the root of the squares."""
        return WIDENING * min(max(self.distance - NEAR, 0.0), 5.0)


def support(case: Case, rows: Sequence[MeasuredRow] | None = None, count: int = 3, stack: str = "") -> Support:
    """The measured rows nearest to a case (a Plan or a Configuration); `rows` are by default all that ship.

    With `stack`, that of the constants, rows of other software are SOFTWARE further.
    """
    known = every_row() if rows is None else tuple(rows)
    if not known:
        return Support()
    sizes, kinds = _features(known) if rows is not None else _shipped_features()
    (own,), (kind,) = _features((case,))
    apart = np.abs(sizes - own)
    foreign = [SOFTWARE * (stack not in ("", row.stack)) for row in known]
    other = np.column_stack([(kinds != kind) * np.array(list(KINDS.values())), foreign])
    distances = np.sqrt((apart**2).sum(1) + (other**2).sum(1))
    order = np.argsort(distances, kind="stable")[:count]
    first = order[0]
    parts = dict(zip([*KINDS, "software", *SPANS], [*other[first], *apart[first]], strict=True))
    return Support(
        nearest=tuple((known[i].row_id, float(distances[i])) for i in order),
        differs=tuple(
            NAMES.get(name, name) for name, part in sorted(parts.items(), key=lambda p: -p[1]) if part >= 0.4
        ),
        stack=known[first].stack,
    )


@functools.cache
def _shipped_features() -> tuple[np.ndarray, np.ndarray]:
    return _features(every_row())


def _features(rows: Sequence[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Sizes (N, SPANS) in their units, and kinds (N, KINDS), of measured rows or of cases."""
    cases = [getattr(row, "case", row) for row in rows]
    columns = [columns_of(c.shape, c.topology, c.engine) for c in cases]
    sizes = np.array([[getattr(x, name) for name in SPANS] for x in columns], float)
    kinds = [
        (
            c.cluster.gpu.name.partition("-")[0],
            c.cluster.name.replace("16g", "32g"),
            "fused" if not x.stores_scores else "aligned" if x.head_dim % 8 == 0 else "unaligned",
            x.fp8,
            c.topology.recompute,
            c.topology.offload,
            x.gated,
            x.kv_heads < x.heads,
            x.zero > 1,
            x.cp > 1,
            x.tp > c.cluster.gpus_per_node,
        )
        for c, x in zip(cases, columns, strict=True)
    ]
    return np.log(sizes) / np.log(list(SPANS.values())), np.array(kinds, object)


@dataclass(frozen=True, kw_only=True)
class Posterior:
    """A calibration, and the rows that it was fitted to: `cases` and the errors ln(predicted / measured) left, (R,).

    ln(seconds) of a plan is the model's, with a prior deviation `deviation` (C,) of the constants' logarithms, plus a
    misfit of the plan (deviation `misfit`), plus the `noise` of a run. All are normal, and the model is linearized at
    the calibration (Laplace's approximation).
    """

    calibration: Calibration
    cases: tuple[Configuration, ...]
    errors: np.ndarray
    deviation: np.ndarray
    misfit: float
    noise: float

    def covariance(self, cases: Sequence[Configuration]) -> np.ndarray:
        """Covariance of ln(seconds) of the cases, (N, N), given the rows; it is small for a case that was measured.

        Left out: the uncertainty of regimes' factors, and correlated misfits of similar plans.
        """
        return self._given_rows(cases, own=True)

    def half_widths(self, cases: Sequence[Configuration]) -> np.ndarray:
        """Half-widths of the 90 % intervals of ln(seconds) around the calibration's predictions, (N,).

        From Student's t, as the misfit is an estimate. A measured case gets the interval of an unmeasured one like it.
        """
        from scipy.stats import t

        if not cases:
            return np.empty(0)
        shared = np.diag(self._given_rows(cases, own=False))
        return float(t.ppf(0.95, len(self.cases) + MISFIT_ROWS)) * np.sqrt(shared + self.misfit**2)

    def expected(self, cases: Sequence[Configuration]) -> np.ndarray:
        """ln(seconds) of the cases, (N,): the calibration's, or mostly the measured ones if a case was measured."""
        predicted = time_errors(cases, np.ones(len(cases)), (), self.calibration)(_logs(self.calibration))
        for i, case in enumerate(cases):
            left = [e for e, other in zip(self.errors, self.cases, strict=True) if _same(case, other)]
            weight = len(left) * self.misfit**2 / (len(left) * self.misfit**2 + self.noise**2)
            predicted[i] -= weight * float(np.mean(left)) if left else 0.0
        return predicted

    def _given_rows(self, cases: Sequence[Configuration], own: bool) -> np.ndarray:
        """The covariance given the rows, with the misfits of the cases (`own`) or that of the constants alone."""
        slopes, known = (sensitivities(c, self.calibration) * self.deviation for c in (cases, self.cases))
        before = slopes @ slopes.T + own * self._misfits(cases, cases)
        if not self.cases:
            return before
        across = slopes @ known.T + own * self._misfits(cases, self.cases)
        rows = known @ known.T + self._misfits(self.cases, self.cases) + self.noise**2 * np.eye(len(self.cases))
        return before - across @ np.linalg.solve(rows, across.T)

    def _misfits(self, a: Sequence[Configuration], b: Sequence[Configuration]) -> np.ndarray:
        return self.misfit**2 * np.array([[_same(x, y) for y in b] for x in a], float).reshape(len(a), len(b))


def posterior(cases: Sequence[Configuration], measured: Sequence[float], calibration: Calibration) -> Posterior:
    """The posterior at `calibration`, which was fitted to the cases; the prior uncertainty if there are none.

    The misfit is estimated from the errors that the rows would have if left out of the fit, and MISFIT_ROWS further
    rows with an error of MISFIT; without rows it is that of another site and stack.
    """
    kinds = {c.cluster.gpu.kind for c in cases} or {"cuda"}
    rows = [(c, s, calibration.on(c.day, c.topology.gpus)) for c, s in zip(cases, measured, strict=True)]
    errors = np.array([float(time_errors([c], np.array([s]), (), on)(_logs(on))[0]) for c, s, on in rows])
    deviation = deviations(cases, calibration)
    effects = sensitivities(cases, calibration) * deviation
    unseen = left_out(errors, effects, MISFIT) if len(errors) else errors
    squares = float((np.minimum(np.abs(unseen), MAX_ERROR) ** 2).sum())
    return Posterior(
        calibration=calibration,
        cases=tuple(cases),
        errors=errors,
        deviation=deviation,
        misfit=FOREIGN if not cases else math.sqrt((MISFIT_ROWS * MISFIT**2 + squares) / (MISFIT_ROWS + len(errors))),
        noise=_noise(max(NOISE[kind] for kind in kinds), cases, errors),
    )


def unmeasured_half_width(case: Configuration, calibration: Calibration) -> float:
    """Half-width of the interval of ln(seconds) of a case that nobody measured.

    That of the calibration's rows; without any, that of the priors, by how much the time of this case depends on each
    constant. Either widens with the distance from measured rows of the same software. A calibration by rows of one's
    own keeps its width: which they are it does not tell.
    """
    own = calibration.half_width
    if calibration.rows and not calibration.stack:
        return own
    if calibration.rows == 0 and case.cluster.gpu.kind == "cuda":
        effects = _slopes_of(case, calibration) * deviations((case,), calibration)
        own = T_QUANTILE * math.sqrt(float(effects @ effects) + FOREIGN**2)
    return math.hypot(own, support(case, stack=calibration.stack).widening)


def _noise(usual: float, cases: Sequence[Configuration], errors: np.ndarray) -> float:
    """Deviation between runs of one case, from the repeats and from `usual`, which counts as NOISE_ROWS repeats."""
    squares, freedom, left = 0.0, 0, list(range(len(cases)))
    while left:
        alike = [i for i in left if _same(cases[left[0]], cases[i])]
        squares += float(np.var(errors[alike])) * len(alike)
        freedom += len(alike) - 1
        left = [i for i in left if i not in alike]
    return math.sqrt((NOISE_ROWS * usual**2 + squares) / (NOISE_ROWS + freedom))


def sensitivities(cases: Sequence[Configuration], calibration: Calibration) -> np.ndarray:
    """Derivatives of ln(seconds) by ln(constant), (N, C) in the order of BOUNDS, by central differences."""
    if not cases:
        return np.empty((0, len(BOUNDS)))
    errors, at = time_errors(cases, np.ones(len(cases)), (), calibration), _logs(calibration)
    return slopes(errors, at)


def _slopes_of(case: Configuration, calibration: Calibration) -> np.ndarray:
    """Derivatives of ln(seconds) of one case by ln(constant), (C,): all constants in one evaluation."""
    steps = np.exp(np.vstack([np.eye(len(BOUNDS)), -np.eye(len(BOUNDS))]) * STEP)  # (2 C, C)
    values: dict[str, Any] = {name: getattr(calibration, name) * steps[:, i] for i, name in enumerate(BOUNDS)}
    values |= {name: getattr(calibration, name) for name in GIVEN}
    columns = columns_of(case.shape, case.topology, case.engine)
    up, down = np.split(np.log(iteration_columns(columns, case.cluster, Constants(**values)).total), 2)
    return (up - down) / (2 * STEP)


def _logs(calibration: Calibration) -> np.ndarray:
    return np.log([getattr(calibration, name) for name in BOUNDS])


def _same(a: Configuration, b: Configuration) -> bool:
    return (a.shape, a.topology, a.cluster.name) == (b.shape, b.topology, b.cluster.name)
