"""The loss of trainings, with gradient norm and learning rate."""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from trilane.analysis.loss_curve import Curve
from trilane.report.plots.style import COLORS, figure, plain
from trilane.utils.tables import Text

# a panel each: the column of a log, and the name of the y axis
PANELS = {
    "lm_loss": "loss (nats per token)",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
}
SMOOTH = 100  # of the lines one is smoothed over
FALL = 3.0  # a quantity that changes by this factor has a logarithmic axis


def curves(trainings: Mapping[str, Curve]) -> Figure | Text:
    """Loss, gradient norm and learning rate of the trainings over their iterations, where their
    logs have them.

    Strong lines are smoothed over a hundredth of the lines, pale ones as printed; dashed lines are
    restarts, dots validation losses.
    """
    trainings = {name: c for name, c in trainings.items() if c.table["lm_loss"].notna().any()}
    if not trainings:
        return Text("No log prints a loss.")
    tables = [curve.table for curve in trainings.values()]
    panels = [column for column in PANELS if any(_is_drawn(table, column) for table in tables)]
    drawn, _ = figure(9.2, 3.4, columns=len(panels))
    places = dict(zip(panels, drawn.axes, strict=True))
    loss = places["lm_loss"]
    for color, (name, curve) in zip(itertools.cycle(COLORS), trainings.items(), strict=False):
        for column, place in places.items():
            if column in curve.table:
                _draw(place, curve, column, color)
        loss.plot([], [], color=color, label=plain(name))
        held_out = curve.validation
        if len(held_out):
            loss.plot("iteration", "lm_loss", "o", data=held_out, color=color, mec="black", ms=4)
    for column, place in places.items():
        values = np.concatenate([table[column].dropna() for table in tables if column in table])
        # a linear axis would show little more than the first drop, or the largest spike
        if column != "learning_rate" and values.max() > FALL * values.min() > 0:
            place.set_yscale("log")
        place.set(xlabel="iterations", ylabel=PANELS[column])
    drawn.legend(loc="outside lower left", ncols=3, frameon=False, fontsize=8)
    return drawn


def _is_drawn(table: pd.DataFrame, column: str) -> bool:
    return column == "lm_loss" or (column in table and table[column].nunique() > 1)


def _draw(axes: Any, curve: Curve, column: str, color: str) -> None:
    """A column as printed and smoothed, and a line at each restart."""
    at = curve.table["iteration"]
    values = curve.table[column]
    axes.plot(at, values, color=color, lw=0.8, alpha=0.3)
    smooth = values.rolling(max(1, len(values) // SMOOTH), min_periods=1).mean()
    axes.plot(at, smooth, color=color, lw=1.2)
    for restart in curve.restarts:
        axes.axvline(restart.iteration, color=color, lw=0.8, ls="--")
