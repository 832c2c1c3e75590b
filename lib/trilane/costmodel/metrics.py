"""Predictions of measured rows, by shipped constants or by fits without them, and the figures of their errors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trilane.costmodel.calibration import Calibration
from trilane.costmodel.columns import columns_of
from trilane.costmodel.fit import fit_memory, fit_time
from trilane.costmodel.iteration import iteration_time
from trilane.costmodel.measured_rows import MeasuredRow, every_row
from trilane.costmodel.memory import (
    DEFAULT,
    MemoryConstants,
    first_stage_bytes,
    memory_bytes,
    memory_of,
    oom_probability,
)
from trilane.costmodel.predict import unmeasured_half_width
from trilane.costmodel.shipped import Fit, combined, default, prior_of
from trilane.costmodel.uncertainty import posterior
from trilane.utils.progress import progress
from trilane.utils.validation import require_known

LEAVE_OUT: dict[str, Callable[[MeasuredRow], Any]] = {
    "table": lambda row: row.table,
    "hidden": lambda row: row.case.shape.hidden_size,
    "date": lambda row: row.case.day,
}
FOREIGN = {"file": 0, "file-ten": 10}  # leave out a whole file, and how many rows of its own are known then
FOLD = 10  # rows that are predicted together, after ten others
MIN_MEMORY_ROWS = 20  # with fewer, the shipped constants are better

# Unexplained outliers of 9-28 % among the rows of the BigScience prequel, listed when the rows were cleaned, before any
# model was fitted.
ANOMALIES = tuple(f"s003-L{line:04d}" for line in (658, 727, 760, 775, 830, 847, 930))


@dataclass(frozen=True, kw_only=True)
class RowPrediction:
    """The prediction for a measured row: seconds with their 90 % interval, GiB of a first-stage GPU, P(OOM)."""

    row_id: str
    sec_pred: float
    sec_lo: float
    sec_hi: float
    mem_gib_pred: float
    oom_probability: float


Pair = tuple[MeasuredRow, RowPrediction]


def group_name(row: MeasuredRow) -> str:
    """GPU family and software stack of a row, such as `A100 megatron-deepspeed`."""
    return f"{row.case.cluster.gpu.name.partition('-')[0]} {row.stack}".strip()


def ranks(values: Sequence[float]) -> np.ndarray:
    """Ranks from 1; ties get their mean rank."""
    array = np.asarray(values, float)
    return np.array([(array < v).sum() + (array == v).sum() / 2 + 0.5 for v in array])


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation; 0 if one side is constant."""
    x, y = ranks(a), ranks(b)
    return float(np.corrcoef(x, y)[0, 1]) if x.std() > 0 and y.std() > 0 else 0.0


def time_figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Relative errors of seconds over distinct timed rows, and the share of rows within the interval (`coverage`)."""
    timed = [(r, p) for r, p in pairs if np.isfinite(r.seconds) and not r.excluded and not r.duplicate_of]
    if not timed:
        return {}
    error = np.array([p.sec_pred / r.seconds - 1 for r, p in timed])
    inside = [p.sec_lo <= r.seconds <= p.sec_hi for r, p in timed]
    return {
        "n": len(timed),
        "median": float(np.median(np.abs(error))),
        "p90": float(np.quantile(np.abs(error), 0.9)),
        "bias": float(np.median(error)),
        "coverage": float(np.mean(inside)),
    }


def ranking_figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Within tables: mean rank correlation (>= 3 rows), regret of the row predicted best, tables where it is best."""
    tables: dict[str, list[Pair]] = {}
    for row, prediction in pairs:
        if np.isfinite(row.seconds) and not row.excluded and row.table:
            tables.setdefault(row.table, []).append((row, prediction))
    rho, regret = [], []
    for members in tables.values():
        seconds = np.array([r.seconds for r, _ in members])
        predicted = np.round([p.sec_pred for _, p in members], 9)
        if len(members) < 2 or len(set(seconds)) < 2:
            continue
        if len(members) >= 3:
            constant = predicted.max() / predicted.min() < 1 + 1e-6
            rho.append(0.0 if constant else spearman(predicted.tolist(), seconds.tolist()))
        best = np.isclose(predicted, predicted.min(), rtol=1e-6)
        regret.append(float(seconds[best].mean() / seconds.min() - 1))
    if not regret:
        return {}
    found = sum(r < 5e-4 for r in regret)
    figures = {"tables": len(regret), "regret_mean": float(np.mean(regret)), "regret_max": max(regret), "best": found}
    return {**figures, "rho": float(np.mean(rho))} if rho else figures


def memory_figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Relative errors of memory over distinct rows, and OOM predicted (P > 1/2) for rows that ran out or did not."""
    distinct = [(r, p) for r, p in pairs if not r.duplicate_of]
    error = [abs(p.mem_gib_pred * 2**30 / r.memory_bytes - 1) for r, p in distinct if np.isfinite(r.memory_bytes)]
    able = [(r, p) for r, p in distinct if not r.ran_out and np.isfinite([r.seconds, r.memory_bytes]).any()]
    ran = [p.oom_probability > 0.5 for _, p in able]
    out = [p.oom_probability > 0.5 for r, p in distinct if r.ran_out]
    figures: dict[str, Any] = {"oom": f"{sum(out)}/{len(out)}", "false": f"{sum(ran)}/{len(ran)}"}
    if error:
        median, p90 = float(np.median(error)), float(np.quantile(error, 0.9))
        figures |= {"mem_n": len(error), "mem_median": median, "mem_p90": p90}
    return figures


def figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    """All figures of a backtest."""
    return {"predicted": len(pairs), **time_figures(pairs), **ranking_figures(pairs), **memory_figures(pairs)}


def predict_row(
    row: MeasuredRow, calibration: Calibration, memory: MemoryConstants = DEFAULT, half_width: float | None = None
) -> RowPrediction:
    """Predict one row on its day; `half_width` of the interval of ln(seconds), by default the calibration's."""
    case = row.case
    on_day = calibration.on(case.day, case.topology.gpus)
    seconds = iteration_time(case.shape, case.topology, case.cluster, on_day, case.engine).total
    low, high = (replace(calibration, half_width=half_width) if half_width else calibration).interval(seconds)
    columns = columns_of(case.shape, case.topology, case.engine)
    need = float(memory_bytes(columns, case.cluster, memory))
    return RowPrediction(
        row_id=row.row_id,
        sec_pred=seconds,
        sec_lo=low,
        sec_hi=high,
        mem_gib_pred=float(first_stage_bytes(columns, case.cluster, memory)) / 2**30,
        oom_probability=float(oom_probability(need, case.cluster, memory.spread)),
    )


def predict_default(rows: Sequence[MeasuredRow]) -> list[RowPrediction]:
    """Predict every row by the default calibration of its cluster and stack, without a fit."""
    machines = {(row.case.cluster.name, row.stack): row.case.cluster for row in rows}
    known = {key: default(cluster, key[1]) for key, cluster in machines.items()}
    pairs = [(row, known[row.case.cluster.name, row.stack]) for row in rows]
    return [predict_row(row, k, memory_of(row.stack), unmeasured_half_width(row.case, k)) for row, k in pairs]


def predict_calibrated(rows: Sequence[MeasuredRow], on: Sequence[MeasuredRow]) -> list[RowPrediction]:
    """Predict every row by the default calibration of the first of the rows `on`, refitted to these.

    The intervals are those of the posterior: the further a row is from the fitted rows, the wider.
    """
    first = on[0]
    calibration = calibrate_time(on, default(first.case.cluster, first.stack))
    memory, timed = calibrate_memory(on), _usable(on)
    fitted = posterior([r.case for r in timed], [r.seconds for r in timed], calibration)
    widths = fitted.half_widths([row.case for row in rows]).tolist()
    return [predict_row(row, calibration, memory, width) for row, width in zip(rows, widths, strict=True)]


def calibrate_time(rows: Sequence[MeasuredRow], prior: Calibration) -> Calibration:
    """The prior refitted to the times of the rows, without duplicates and excluded rows."""
    timed = _usable(rows)
    return fit_time([r.case for r in timed], [r.seconds for r in timed], prior) if timed else prior


def _usable(rows: Sequence[MeasuredRow]) -> list[MeasuredRow]:
    return [r for r in rows if np.isfinite(r.seconds) and not r.excluded and not r.duplicate_of]


def calibrate_memory(rows: Sequence[MeasuredRow]) -> MemoryConstants:
    """Memory constants fitted to the rows, or the shipped ones if fewer than MIN_MEMORY_ROWS have memory."""
    measured = [r for r in rows if np.isfinite(r.memory_bytes) and not r.duplicate_of]
    if len(measured) < MIN_MEMORY_ROWS:
        return DEFAULT
    return fit_memory([r.case for r in measured], [r.memory_bytes for r in measured])


def leave_one_out(rows: Sequence[MeasuredRow], by: str) -> list[RowPrediction]:
    """Cross-validation: predict every row by constants fitted without its table, hidden size, date or file (`by`).

    The fits start from the priors of constants.py. Rows of one GPU and software stack share the constants of time, rows
    of one stack those of memory. A row and its repeats are left out together. By `file`, nothing of that site and stack
    is left, and its constants are those that fits of the other files share with it (shipped.combined); by
    `file-ten` ten rows of the same cluster and stack are known. Raises ValueError for another `by`.
    """
    require_known("cv", by, (*LEAVE_OUT, *FOREIGN))
    if by in FOREIGN:
        return predict_foreign(rows, FOREIGN[by])
    key = LEAVE_OUT[by]
    found: dict[str, RowPrediction] = {}
    folds = list(dict.fromkeys((group_name(r), key(r)) for r in rows))
    for group, left_out in progress(folds, "fits without each row's " + by, "fit"):
        test = [r for r in rows if (group_name(r), key(r)) == (group, left_out)]
        rest = [r for r in rows if key(r) != left_out]
        found |= {p.row_id: p for p in predict_unseen(test, rest)}
    return [found[r.row_id] for r in rows]


def predict_unseen(test: Sequence[MeasuredRow], rest: Sequence[MeasuredRow]) -> list[RowPrediction]:
    """Predict rows of one GPU and stack by constants fitted to `rest`, without repeats of the test rows.

    The fit starts from the priors of constants.py, not from the shipped constants, which were fitted to every row.
    """
    first = test[0]
    gone = {r.row_id for r in test} | {r.duplicate_of for r in test}
    kept = [r for r in rest if r.row_id not in gone]
    prior = prior_of(first.case.cluster.name, first.stack)
    calibration = calibrate_time([r for r in kept if group_name(r) == group_name(first)], prior)
    memory = calibrate_memory([r for r in kept if r.stack == first.stack])
    return [predict_row(row, calibration, memory) for row in test]


def predict_foreign(rows: Sequence[MeasuredRow], known: int) -> list[RowPrediction]:
    """Predict the rows of each cluster and stack by fits of other files, and of `known` of their own rows.

    The known rows are drawn at random (seeded) for each fold of a group, never from the fold itself.
    """
    distinct = {(row.file, row.row_id): row for row in (*every_row(), *rows)}
    groups: dict[tuple[str, str, str], list[MeasuredRow]] = {}
    for row in distinct.values():
        groups.setdefault((row.file, row.case.cluster.name.replace("16g", "32g"), row.stack), []).append(row)
    wanted, found = {r.row_id for r in rows}, dict[str, RowPrediction]()
    fits = {key: calibrate_time(members, prior_of(*key[1:])) for key, members in groups.items()}
    for key, members in progress(list(groups.items()), "fits of other files", "group"):
        if not wanted & {r.row_id for r in members}:
            continue
        first = members[0]
        others = [
            Fit(cluster=groups[k][0].case.cluster, stack=k[2], calibration=fit)
            for k, fit in fits.items()
            if k[0] != key[0]
        ]
        prior = combined(first.case.cluster, first.stack, others)
        rng = np.random.default_rng(0)
        order = rng.permutation(len(members))
        for fold in np.array_split(order, max(len(members) // FOLD, 2) if known else 1):
            test = [members[i] for i in fold]
            own = _usable([members[i] for i in order if i not in fold])
            on = [own[i] for i in rng.permutation(len(own))[:known]] if known else []
            found |= {p.row_id: p for p in _predict_after(test, on, prior)}
    return [found[r.row_id] for r in rows]


def _predict_after(test: Sequence[MeasuredRow], on: Sequence[MeasuredRow], prior: Calibration) -> list[RowPrediction]:
    """Predict rows by the prior refitted to the rows `on`, none or some, with the posterior's intervals."""
    calibration = calibrate_time(on, prior)
    fitted = posterior([r.case for r in on], [r.seconds for r in on], calibration)
    widths = fitted.half_widths([row.case for row in test]).tolist()
    return [predict_row(row, calibration, DEFAULT, width) for row, width in zip(test, widths, strict=True)]
