"""Predictions of measured rows, by shipped constants or refitted ones, and the figures of their errors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trilane.costmodel.calibration import Calibration, interval
from trilane.costmodel.columns import columns_of
from trilane.costmodel.iteration import iteration_time
from trilane.costmodel.measured_rows import MeasuredRow
from trilane.costmodel.memory import DEFAULT, MemoryConstants, memory_bytes, memory_for, oom_probability, stage_memory
from trilane.costmodel.predict import support_of, unmeasured_half_width
from trilane.costmodel.shipped import calibration_for, default


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


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation; ties share their mean rank; 0 if one side is constant."""
    from scipy.stats import spearmanr

    return float(spearmanr(a, b).statistic) if len({*a}) > 1 and len({*b}) > 1 else 0.0


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
    low, high = interval(seconds, half_width or calibration.half_width)
    columns = columns_of(case.shape, case.topology, case.engine)
    need = float(memory_bytes(columns, case.cluster, memory))
    return RowPrediction(
        row_id=row.row_id,
        sec_pred=seconds,
        sec_lo=low,
        sec_hi=high,
        mem_gib_pred=float(stage_memory(columns, 0, case.cluster, memory).total) / 2**30,  # where nvidia-smi was read
        oom_probability=float(oom_probability(need, case.cluster, memory.spread)),
    )


def predict_default(rows: Sequence[MeasuredRow], calibration: str = "") -> list[RowPrediction]:
    """Predict every row by `calibration` (see calibration_for), else by what ships for its cluster and stack."""
    machines = {(row.case.cluster.name, row.stack): row.case.cluster for row in rows}
    known = {
        (name, stack): calibration_for(cluster, calibration) if calibration else default(cluster, stack)
        for (name, stack), cluster in machines.items()
    }
    found = []
    for row in rows:
        k = known[row.case.cluster.name, row.stack]
        seconds = predict_row(row, k).sec_pred
        width = unmeasured_half_width(row.case, k, support_of(row.case, k, seconds))
        found.append(
            predict_row(row, k, memory_for(replace(k, stack=row.stack), row.case.engine, row.case.cluster), width)
        )
    return found
