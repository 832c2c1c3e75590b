"""The style of all figures: their colours, and what static ones, by matplotlib, have in common."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trilane.utils.tables import middle, one_line
from trilane.utils.validation import shipped_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIME = "application/vnd.vegalite.v5+json"  # the newest that JupyterLab 4.6 draws
# The newest Vega-Lite of vl_convert, for reports and pictures: it draws specifications of version 5
# without a warning.
VERSION = "6.4"
LOOK = shipped_json("report/look")
COLORS = LOOK["colors"]
LIMIT, INK = "#b3261e", "#1b2530"  # of a limit; of a diagonal or a whisker


def figure(width: float = 8.0, height: float = 3.6, columns: int = 1) -> tuple["Figure", Any]:
    """An empty figure of columns of axes, closed in pyplot so that a notebook shows it once."""
    import matplotlib.pyplot as plt

    # loaded within the context below, it would show no figure of the user's own
    plt.switch_backend(plt.get_backend())
    with plt.rc_context(LOOK["settings"]):
        drawn, axes = plt.subplots(1, columns, figsize=(width, height), layout="constrained")
    plt.close(drawn)
    return drawn, axes


def plain(text: object) -> str:
    """A name, which may come from a file, as a figure draws it: short, on one line, no mathematical
    notation.
    """
    name = middle(one_line(str(text)), 64).replace("$", r"\$")
    # matplotlib's legend leaves out a name that begins with an underscore
    return f" {name}" if name.startswith("_") else name


def finished(axes: "Axes", heading: str, **labels: Any) -> None:
    """Give axes a heading, the properties `labels`, and a legend off the data."""
    axes.set(**labels)
    axes.set_title(heading, loc="left", weight="bold", fontsize=11)
    if axes.get_legend_handles_labels()[0]:
        look = {"borderaxespad": 0.0, "frameon": False, "fontsize": 8}
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), **look)


def name_rows(axes: "Axes", names: Sequence[str]) -> None:
    """Name the rows of a figure, the first on top."""
    axes.set_yticks(range(len(names)), [plain(name) for name in names])
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
