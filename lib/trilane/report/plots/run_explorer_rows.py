"""The data of the figure of a study's trainings: their lines thinned, smoothed and placed on every axis."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from trilane.analysis.loss_curve import Curve
from trilane.analysis.steady_state import interval
from trilane.report.plots.style import plain

COLUMN = {"loss": "lm_loss", "norm": "grad_norm", "rate": "learning_rate"}


def thinned(values: Sequence[np.ndarray], most: int) -> np.ndarray:
    """The numbers of the rows that are drawn, at most about `most`; all where there are no more.

    Of each of equally long ranges: its first row, and the lowest and the highest value of each series, so that no spike
    is lost. A smoothed series is taken at the same rows.
    """
    length = len(values[0])
    if length <= most:
        return np.arange(length)
    kept = {0, length - 1}
    for rows in np.array_split(np.arange(length), max(1, most // (1 + 2 * len(values)))):
        kept.add(int(rows[0]))
        for part in (v[rows] for v in values):
            if np.isfinite(part).any():
                kept |= {int(rows[np.nanargmin(part)]), int(rows[np.nanargmax(part)])}
    return np.array(sorted(kept))


def smoothed(values: np.ndarray, lines: int) -> np.ndarray:
    """The exponential average of the values so far, each weighing 1 - 1/lines of the next; NaN where one is missing.

    Divided by the sum of the weights, so that it does not begin at zero (Kingma and Ba 2015, arXiv:1412.6980, sec. 3).
    """
    if lines == 1:
        return values
    means = pd.Series(values).ewm(alpha=1 / lines, adjust=True, ignore_na=True).mean().to_numpy()
    return np.where(np.isnan(values), np.nan, means)


def widths(curves: Mapping[str, Curve]) -> list[float]:
    """Thick to thin where lines may coincide: one that hides another would look like a missing run."""
    ends = [float(c.table["lm_loss"].dropna().iloc[-1]) for c in curves.values()]
    coincide = len(ends) > 1 and max(ends) - min(ends) < 0.05
    return [max(0.8, 4.5 - 1.2 * i) if coincide else 1.6 for i in range(len(ends))]


def _column(table: pd.DataFrame, name: str) -> np.ndarray:
    return table[name].to_numpy(float) if name in table else np.full(len(table), np.nan)


def varies(table: pd.DataFrame, name: str) -> bool:
    return bool(np.ptp(found) > 0) if len(found := _column(table, name)[np.isfinite(_column(table, name))]) else False


def series_of(name: str, curve: Curve, thick: float, levels: Sequence[int], most: int) -> Iterable[dict[str, Any]]:
    """The training's columns, piece 0, and those of each stretch that was trained again, as it was the first time."""
    again = curve.redone
    at = _column(again, "iteration")
    new: Any = np.flatnonzero((np.diff(at) <= 0) | (np.diff(at) > 1.5 * interval(at))) + 1 if len(at) else []
    parts = [part for part in np.split(np.arange(len(at)), new) if len(part)]
    for piece, table in enumerate([curve.table, *(again.iloc[part] for part in parts)]):
        values = {key: _column(table, column) for key, column in COLUMN.items()}
        rows = thinned([values["loss"], values["norm"]], max(50, most // 4) if piece else most)
        columns = {x: found[rows] for x, found in _positions(table, curve).items()}
        for key, found in values.items():
            columns |= {f"{key}{i}": smoothed(found, n)[rows] for i, n in enumerate(levels) if i == 0 or key != "rate"}
        texts = {"run": name, "piece": piece, "thick": thick, "lines": len(table)}
        yield {**texts, **{key: _rounded(found) for key, found in columns.items()}}


def _positions(table: pd.DataFrame, whole: Curve) -> dict[str, np.ndarray]:
    """The axes of these lines; those that were trained again lie over the hours of the second time."""
    at = whole.axes()
    if table is whole.table:
        return at
    return {x: np.interp(_column(table, "iteration"), at["iterations"], values) for x, values in at.items()}


def _rounded(values: np.ndarray) -> list[float | int | None]:
    """Six digits are more than a screen shows; a whole number stays one, null is no number."""
    return [
        None if not math.isfinite(v) else int(v) if v == int(v) and abs(v) < 2**53 else float(f"{v:.6g}")
        for v in values
    ]


def restarts_of(curves: Mapping[str, Curve]) -> list[dict[str, Any]]:
    """Where each training was resumed, by every axis."""
    found = []
    for name, curve in curves.items():
        axes = curve.axes()
        for restart in curve.restarts:
            row = min(int(np.searchsorted(axes["iterations"], restart.iteration)), len(curve.table) - 1)
            words = f"{restart.redone} lines trained again" if restart.redone else "nothing trained again"
            at = {x: float(axes[x][row]) for x in axes}
            found.append(
                {
                    "run": name,
                    "resumed": f"at iteration {restart.iteration:,}",
                    "again": words,
                    "log": plain(restart.log),
                    **at,
                }
            )
    return found


def validation_of(curves: Mapping[str, Curve]) -> list[dict[str, Any]]:
    """Each evaluation of each training, by every axis."""
    found = []
    for name, curve in curves.items():
        if curve.validation.empty:
            continue
        at = curve.axes()
        rows = {x: _rounded(np.interp(_column(curve.validation, "iteration"), at["iterations"], at[x])) for x in at}
        rows["validation"] = _rounded(_column(curve.validation, "lm_loss"))
        found += [{"run": name, **dict(zip(rows, row, strict=True))} for row in zip(*rows.values(), strict=True)]
    return found
