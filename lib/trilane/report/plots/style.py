"""The style of all figures, and the figures of predicted plans: one function per matplotlib Figure."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trilane.costmodel.iteration import IterationTime
from trilane.costmodel.memory import StageMemory
from trilane.planning.search import Candidate

STYLE: Any = {
    "figure.dpi": 110,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e8ec",
    "axes.axisbelow": True,
}

COLORS = ("#14618a", "#e07a1f", "#2a9d67", "#a23b72", "#7b8a97", "#c9a227", "#5d4a99", "#b3261e")
GIB = 2**30


def figure(width: float = 8.0, height: float = 3.6) -> tuple[Figure, Axes]:
    """An empty figure in the common style, closed in pyplot so that a notebook shows it once."""
    with plt.rc_context(STYLE):
        made, axes = plt.subplots(figsize=(width, height), layout="constrained")
    plt.close(made)
    return made, axes


def title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", weight="bold", fontsize=11)


def legend(axes: Axes) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, frameon=False)


def stacked_bars(
    labels: Sequence[str], parts: Sequence[dict[str, float]], xlabel: str, heading: str, limit: float | None = None
) -> Figure:
    """A horizontal bar per label, of stacked parts; `limit` is drawn where it is below three times the longest bar."""
    made, axes = figure(8.0, 1.1 + 0.42 * len(labels))
    for i, name in enumerate(parts[0]):  # a part keeps its colour where others are zero
        if any(p[name] > 0 for p in parts):
            left = [sum(list(p.values())[:i]) for p in parts]
            color, label = COLORS[i % len(COLORS)], name.replace("_", " ")
            axes.barh(labels, [p[name] for p in parts], left=left, color=color, label=label, height=0.62)
    longest = max(sum(p.values()) for p in parts)
    if limit is not None and limit < 3 * longest:
        axes.axvline(limit, color="#b3261e", lw=1.5)
        axes.annotate("limit", (limit, -0.5), color="#b3261e", fontsize=8, ha="right")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel=xlabel)
    title(axes, heading)
    legend(axes)
    return made


def time_by_part(candidates: Sequence[Candidate]) -> Figure:
    """The predicted seconds of an iteration by part, a bar per topology."""
    names = IterationTime.__dataclass_fields__
    parts = [{name: getattr(c.prediction.time, name) for name in names} for c in candidates]
    return stacked_bars(
        [c.topology.label for c in candidates], parts, "seconds per iteration", "Predicted time by part"
    )


def memory_by_part(candidates: Sequence[Candidate], limit_bytes: float) -> Figure:
    """The predicted memory of the fullest stage by part, a bar per topology, with the GPU's memory as the limit."""
    names = StageMemory.__dataclass_fields__
    fullest = [max(c.prediction.stages, key=lambda stage: stage.total) for c in candidates]
    parts = [{name: getattr(stage, name) / GIB for name in names} for stage in fullest]
    labels = [c.topology.label for c in candidates]
    return stacked_bars(labels, parts, "GiB per process", "Predicted memory of the fullest stage", limit_bytes / GIB)


def shapes_on_the_plane(hidden: Sequence[int], layers: Sequence[int], size_m: Sequence[float], chosen: int) -> Figure:
    """Candidate shapes: layers against hidden size, area by parameters, the chosen one filled."""
    made, axes = figure(6.5, 3.6)
    area = [40 + 260 * size / max(size_m) for size in size_m]
    faces = [COLORS[1] if i == chosen else "none" for i in range(len(hidden))]
    axes.scatter(hidden, layers, s=area, facecolors=faces, edgecolors=COLORS[0], linewidths=1.3)
    for x, y, size in zip(hidden, layers, size_m, strict=True):
        axes.annotate(f"{size:.1f}M", (x, y), textcoords="offset points", xytext=(0, 13), ha="center", fontsize=8)
    axes.set(xlabel="hidden size", ylabel="layers")
    title(axes, "Candidate shapes (filled: the chosen one)")
    axes.margins(0.15, 0.3)
    return made


def _stages(count: int, ylabel: str, title: str) -> tuple[Figure, Sequence[Axes]]:
    """Panels side by side with a common scale, one per plan."""
    with plt.rc_context(STYLE):
        made, panels = plt.subplots(1, count, figsize=(2.2 + 2.4 * count, 3.2), sharey=True, squeeze=False)
        made.set_layout_engine("constrained")
    plt.close(made)
    panels[0][0].set_ylabel(ylabel)
    made.suptitle(title, x=0.01, ha="left", weight="bold", fontsize=11)
    return made, panels[0]


def memory_by_stage(candidates: Sequence[Candidate], limit_bytes: float) -> Figure:
    """The predicted memory of each pipeline stage by part, a panel per topology; the GPU's memory is a line if near."""
    made, panels = _stages(len(candidates), "GiB per process", "Predicted memory by stage")
    names = list(StageMemory.__dataclass_fields__)
    highest = max(stage.total for c in candidates for stage in c.prediction.stages)
    for axes, candidate in zip(panels, candidates, strict=True):
        stages, below = candidate.prediction.stages, [0.0] * len(candidate.prediction.stages)
        for i, name in enumerate(names):
            heights = [getattr(stage, name) / GIB for stage in stages]
            if any(heights):
                axes.bar(range(len(stages)), heights, bottom=below, color=COLORS[i % len(COLORS)], label=name)
            below = [b + h for b, h in zip(below, heights, strict=True)]
        if limit_bytes < 2 * highest:
            axes.axhline(limit_bytes / GIB, color="#b3261e", lw=1.2)
        axes.set_title(candidate.topology.label, fontsize=8, loc="left")
        axes.set_xlabel("pipeline stage")
        axes.set_xticks(range(0, len(stages), -(-len(stages) // 8)))
    legend(panels[-1])
    return made


def time_by_stage(labels: Sequence[str], seconds: Sequence[Sequence[float]]) -> Figure:
    """Milliseconds per microbatch on each stage, a panel per topology; the slowest stage limits the throughput."""
    made, panels = _stages(len(labels), "ms per microbatch", "Predicted time by stage (orange: the slowest)")
    for axes, label, times in zip(panels, labels, seconds, strict=True):
        slowest = max(times)
        faces = [COLORS[1] if t > 0.999 * slowest else COLORS[0] for t in times]
        axes.bar(range(len(times)), [1e3 * t for t in times], color=faces)
        axes.set_title(label, fontsize=8, loc="left")
        axes.set_xlabel("pipeline stage")
        axes.set_xticks(range(0, len(times), -(-len(times) // 8)))
    return made
