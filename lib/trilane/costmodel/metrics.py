"""Figures of a backtest: errors, ranking, regret, coverage, and predictions of out-of-memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trilane.costmodel.measured_rows import MeasuredRow

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
