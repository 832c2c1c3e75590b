"""The style that all figures share."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trilane.utils.tables import middle, one_line

STYLE: Any = {"figure.dpi": 110, "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}
STYLE |= {"axes.grid": True, "grid.color": "#e3e8ec", "axes.axisbelow": True}
COLORS = ("#14618a", "#e07a1f", "#2a9d67", "#a23b72", "#7b8a97", "#c9a227", "#5d4a99", "#b3261e")
LIMIT = "#b3261e"  # the colour of a limit
INK = "#1b2530"  # of a diagonal or a whisker
GIB = 2**30
NAME_CHARS = 64  # of a name that is drawn


def figure(width: float = 8.0, height: float = 3.6) -> tuple[Figure, Axes]:
    """An empty figure in the common style, closed in pyplot so that a notebook shows it once."""
    with plt.rc_context(STYLE):
        made, axes = plt.subplots(figsize=(width, height), layout="constrained")
    plt.close(made)
    return made, axes


def plain(text: object) -> str:
    """A name, which may come from a file, as a figure draws it: short, on one line, no mathematical notation.

    A legend would leave out a name that begins with an underscore.
    """
    name = middle(one_line(str(text)), NAME_CHARS).replace("$", r"\$")
    return f" {name}" if name.startswith("_") else name


def title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", weight="bold", fontsize=11)


def legend(axes: Axes, **font: Any) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, frameon=False, **font)


def finished(made: Figure, heading: str, **labels: Any) -> Figure:
    """The figure with its heading, a legend off the data, and the properties `labels` of its first axes."""
    axes = made.axes[0]
    axes.set(**labels)
    title(axes, heading)
    legend(axes)
    return made


def stacked_bars(labels: Sequence[str], parts: Sequence[dict[str, float]], xlabel: str, heading: str) -> Figure:
    """A horizontal bar per label, of stacked parts."""
    made, axes = figure(8.0, 1.1 + 0.42 * len(labels))
    bars(axes, labels, parts)
    return finished(made, heading, xlabel=xlabel)


def bars(axes: Axes, labels: Sequence[str], parts: Sequence[dict[str, float]]) -> None:
    """A horizontal bar per label, the first on top, of stacked parts."""
    for i, name in enumerate(parts[0]):  # a part keeps its colour where others are zero
        if any(p[name] > 0 for p in parts):
            left = [sum(list(p.values())[:i]) for p in parts]
            color, label = COLORS[i % len(COLORS)], name.replace("_", " ")
            axes.barh(range(len(labels)), [p[name] for p in parts], left=left, color=color, label=label, height=0.62)
    axes.set_yticks(range(len(labels)), [plain(label) for label in labels])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
