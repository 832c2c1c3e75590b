"""The loss of trainings, with gradient norm and learning rate."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from trilane.analysis.loss_curve import Curve
from trilane.report.plots.style import COLORS, figure, plain
from trilane.utils.tables import Text
from trilane.utils.validation import require_known

# a panel each: the column of a log, and the name of the y axis
PANELS = {
    "lm_loss": "loss (nats per token)",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
}
SMOOTH = 100  # of the lines one is smoothed over
FALL = 3.0  # a quantity that changes by this factor has a logarithmic axis


def curves(trainings: Mapping[str, Curve], over: str = "iterations") -> Figure | Text:
    """Loss, gradient norm and learning rate of the trainings, where their logs have them.

    `over` is iterations, or tokens where the logs have them. Strong lines are
    smoothed over a hundredth of the lines, pale ones as printed; dashed lines are restarts, dots
    validation losses.
    """
    trainings = {name: c for name, c in trainings.items() if c.table["lm_loss"].notna().any()}
    if not trainings:
        return Text("No log prints a loss.")
    tables = [curve.table for curve in trainings.values()]
    panels = [column for column in PANELS if any(_is_drawn(table, column) for table in tables)]
    drawn, axes = figure(9.2, 3.4, columns=len(panels))
    for number, (name, curve) in enumerate(trainings.items()):
        known = curve.axes()
        require_known("over", over, known)
        color = COLORS[number % len(COLORS)]
        for place, column in zip(np.atleast_1d(axes), panels, strict=True):
            if column in curve.table:
                _draw(place, known[over], curve, column, color)
        loss = np.atleast_1d(axes)[0]
        loss.plot([], [], color=color, label=plain(name))
        for held_out in curve.validation.to_dict("records"):
            at = np.interp(held_out["iteration"], known["iterations"], known[over])
            loss.plot(at, held_out["lm_loss"], "o", color=color, mec="black", ms=4)
    for place, column in zip(np.atleast_1d(axes), panels, strict=True):
        values = np.concatenate([table[column].dropna() for table in tables if column in table])
        # a linear axis would show little more than the first drop, or the largest spike
        if column != "learning_rate" and values.max() > FALL * values.min() > 0:
            place.set_yscale("log")
        place.set(xlabel=over, ylabel=PANELS[column])
    drawn.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=8)
    return drawn


def _is_drawn(table: pd.DataFrame, column: str) -> bool:
    return column == "lm_loss" or (column in table and table[column].nunique() > 1)


def _draw(axes: Any, at: np.ndarray, curve: Curve, column: str, color: str) -> None:
    """A column as printed and smoothed, and a line at each restart."""
    values = curve.table[column]
    axes.plot(at, values, color=color, lw=0.8, alpha=0.3)
    # exponential: each value weighs 1 - 1/lines of the next, divided by the sum of the weights
    lines = max(1, len(values) // SMOOTH)
    smooth = values.ewm(alpha=1 / lines, ignore_na=True).mean().where(values.notna())
    axes.plot(at, smooth, color=color, lw=1.2)
    for restart in curve.restarts:
        where = np.interp(restart.iteration, curve.table["iteration"], at)
        axes.axvline(where, color=color, lw=0.8, ls="--")
