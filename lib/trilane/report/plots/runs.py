"""Figures of measured runs: their time, rates, memory and predictions; of the ranks of a hang."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from trilane.analysis.measure import TIMERS, Measurement, phases
from trilane.analysis.measure import memory_by_rank as bytes_by_rank
from trilane.analysis.recalibrate import NOTHING, Recalibration
from trilane.diagnose.hang import Verdict
from trilane.report.plots.interactive import Interactive, axis_name, chart, names_above, rounded, tooltips
from trilane.report.plots.style import COLORS, INK, LIMIT, figure, finished, name_rows, plain
from trilane.utils.numbers import with_bounds
from trilane.utils.tables import Text


def seconds_per_iteration(measurements: Sequence[Measurement]) -> Figure | Text:
    """Seconds of each iteration, one line a run; hollow dots are left out of the medians, the dotted lines."""
    if not measurements:
        return Text("No log prints times.")
    made, axes = figure()
    for i, m in enumerate(measurements):
        table, color = m.log.iterations, COLORS[i % len(COLORS)]
        at, seconds = table["iteration"].to_numpy(float), table["sec_per_it"].to_numpy(float)
        axes.plot(at, seconds, color=color, lw=1.2, label=plain(m.name))
        hollow: Any = {"ms": 4, "mfc": "white", "mec": color, "ls": "", "label": "left out" if i == 0 else None}
        axes.plot(at[~m.window.counts], seconds[~m.window.counts], "o", **hollow)
        axes.axhline(m.sec_per_it, color=color, lw=0.8, ls=":")
    medians = [m.sec_per_it for m in measurements]
    if max(medians) > 20 * min(medians):
        axes.set_yscale("log")
    else:
        # one slow iteration, such as one that saves, would flatten all others
        highest = max(float(m.log.iterations["sec_per_it"].quantile(0.95)) for m in measurements)
        axes.set_ylim(bottom=0, top=1.5 * highest)
    finished(axes, "Time (dotted: the median)", xlabel="iteration", ylabel="seconds per iteration")
    return made


def rates_by_definition(measurements: Sequence[Measurement]) -> Figure | Text:
    """FLOP/s per GPU of each run by every definition that could be computed; the card's peak where in range."""
    rated = [m for m in measurements if m.flops_per_s]
    names = list(dict.fromkeys(name for m in rated for name in m.flops_per_s))
    if not rated:
        return Text("No rate can be computed: the logs give neither a shape nor a number of parameters.")
    highest = max(rate for m in rated for rate in m.flops_per_s.values())
    scale, unit = (1e12, "TFLOP/s") if highest >= 1e12 else (1e9, "GFLOP/s")
    made, axes = figure(8.0, 1.1 + 0.14 * len(names) * len(rated))
    for i, name in enumerate(names):
        # Megatron prints TFLOPs with one decimal, which is too few below one
        rates = [r if name != "printed" or r >= 1e12 else 0.0 for m in rated for r in [m.flops_per_s.get(name, 0.0)]]
        places = [row + 0.8 * ((i + 0.5) / len(names) - 0.5) for row in range(len(rated))]
        axes.barh(places, np.array(rates) / scale, 0.8 / len(names), color=COLORS[i % 8], label=name.replace("_", " "))
    peaks = {m.config.peak_flops_per_s for m in rated}
    if len(peaks) == 1 and (peak := peaks.pop()) and peak < 3 * highest:
        axes.axvline(peak / scale, color=LIMIT, label="the card's peak")
    name_rows(axes, [m.name for m in rated])
    finished(axes, "One run, several definitions", xlabel=f"{unit} per GPU (process)")
    return made


def memory_by_rank(measurements: Sequence[Measurement]) -> Figure | Text:
    """Peak memory of each rank, GiB, a row a run and a dot a rank; the line is the card's memory, if all have one."""
    known = [m for m in measurements if m.memory_bytes > 0]
    if not known:
        return Text("No log prints memory.")
    made, axes = figure(8.0, 1.1 + 0.42 * len(known))
    for row, m in enumerate(known):
        held = np.array([*bytes_by_rank(m.log).values()]) / 2**30
        axes.plot(held, np.full(len(held), row), "o", mfc="none", mec=COLORS[0])
        axes.annotate(f"{held.max():.3g}", (held.max(), row), (7, -3), textcoords="offset points", fontsize=8)
    cards = {m.config.card_bytes for m in known}
    if len(cards) == 1 and (card := cards.pop()):
        axes.axvline(card / 2**30, color=LIMIT, label="the card")
    axes.set_xlim(left=0)
    name_rows(axes, [m.name for m in known])
    finished(axes, "Measured memory", xlabel="GiB, peak of a rank (a dot)")
    return made


def hang_grid(verdict: Verdict) -> Figure:
    """Every rank as a square: replica and tensor rank to the right, stage downwards; suspects framed."""
    (tp, pp, dp), groups = verdict.grid.sizes, verdict.groups[: len(COLORS)]
    made, axes = figure(min(13.0, 4.5 + 0.16 * tp * dp), 1.9 + 0.32 * pp + 0.22 * len(groups))
    colour = dict.fromkeys(verdict.grid.ranks, "#c4ccd3") | {
        r: c for g, c in zip(groups, COLORS, strict=False) for r in g.ranks
    }
    waiting = {rank for group in verdict.groups for rank in group.ranks}
    for place in verdict.grid.places:
        corner = place.dp * (tp + 0.6) + place.tp + 0.05, place.pp + 0.05
        is_suspect, fill = place.rank in verdict.suspects, colour[place.rank] if place.rank in waiting else "white"
        framed: Any = {"ec": "black", "lw": 2.2, "zorder": 2} if is_suspect else {"ec": "#8b98a3", "lw": 0.4}
        axes.add_patch(Rectangle(corner, 0.9, 0.9, fc=fill, **framed))
    axes.set_xticks([k * (tp + 0.6) + tp / 2 for k in range(dp)], [f"dp {k}" for k in range(dp)])
    axes.set_yticks([k + 0.5 for k in range(pp)], [str(k) for k in range(pp)])
    axes.grid(False)
    heading = f"{'Example: t' if verdict.example else 'T'}he stacks of {len(verdict.grid.ranks)} ranks"
    limits: Any = {"xlim": (-0.2, dp * (tp + 0.6) - 0.4), "ylim": (pp + 0.2, -0.2), "ylabel": "pipeline stage"}
    finished(axes, heading, **limits, xlabel=f"replica, and in each its {tp} tensor ranks")
    names = [(c, f"{len(g.ranks)} ranks: {g.site or g.where}") for g, c in zip(groups, COLORS, strict=False)]
    rest = sum(len(g.ranks) for g in verdict.groups[len(COLORS) :])
    names += [("#c4ccd3", f"{rest} ranks elsewhere")] * (rest > 0)
    handles = [Patch(fc=c, label=plain(name)) for c, name in names]
    handles += [Patch(fill=False, ec="black", lw=2.2, label="suspects")] * bool(verdict.suspects)
    # off the axes, where long names take no width of the grid
    made.legend(handles=handles, loc="outside lower left", frameon=False)
    return made


def phases_measured(measurements: Sequence[Measurement]) -> Interactive | Text:
    """An iteration of each run along its time by the log's own timers; what is left is covered by no timer.

    Each phase is the sum over the microbatches, which in truth alternate; they stand in the order of their beginnings.
    """
    timed = [(m.name, found, m.sec_per_it) for m in measurements if (found := phases(m.log, m.window))]
    if not timed:
        return Text("No log has timers of an iteration, so only the prediction splits it (below).")
    order = dict.fromkeys(["data", *TIMERS["phases"]], 0.0)
    rest = "covered by no timer"
    rows = {name: {**order, **found, rest: max(s - sum(found.values()), 0.0)} for name, found, s in timed}
    return _timeline(rows, "Measured time of an iteration, by the timers of the printing rank")


def phases_predicted(recalibration: Recalibration) -> Interactive | Text:
    """An iteration of each run by the parts of its prediction after calibration."""
    if not recalibration:
        return NOTHING
    pairs = zip(recalibration.runs, recalibration.after, strict=True)
    return _timeline({m.name: vars(p.time) for m, p in pairs}, "Predicted time of an iteration, after calibration")


def _timeline(rows: Mapping[str, Mapping[str, float]], words: str) -> Interactive:
    """A bar a run of its parts in their order, as percent of an iteration or in seconds."""
    values = list[dict[str, Any]]()
    names = [part for part in next(iter(rows.values())) if any(r[part] for r in rows.values())]
    for number, (run, parts) in enumerate(rows.items()):
        whole, end = sum(parts.values()), 0.0
        for part in (part for part in names if parts[part]):
            row = {"row": number, "run": f"{plain(run)}, {whole:.3g} s", "part": part.replace("_", " ")}
            row |= {"begin": rounded(end), "end": rounded(end := end + parts[part]), "seconds": f"{parts[part]:.3g}"}
            values.append({**row, "share": f"{parts[part] / whole:.1%}", "whole": rounded(whole)})
    percent = alt.param("percent", value=True, bind=alt.binding_checkbox(name="percent of an iteration "))
    picked = alt.selection_point("picked", fields=["part"], bind="legend")
    scale = alt.Scale(domain=[name.replace("_", " ") for name in names], range=[*COLORS, "#b9c3cb"])
    base = chart(values, width=640, height=alt.Step(46), title=axis_name("percent ? '% of an iteration' : 'seconds'"))
    for name in ("begin", "end"):
        base = base.transform_calculate(name, f"percent ? 100 * datum.{name} / datum.whole : datum.{name}")
    bars = base.mark_bar(height=18).encode(
        x=alt.X("begin:Q", title=None, scale=alt.Scale(nice=False)),
        x2="end:Q",
        y=alt.Y("run:N", title=None, sort=alt.EncodingSortField("row", op="min"), axis=names_above(17)),
        color=alt.Color("part:N", scale=scale, title="a click picks a part"),
        opacity=alt.condition(picked, alt.value(1), alt.value(0.15)),
        tooltip=tooltips({"run": "run", "part": "part", "seconds": "seconds", "share": "share of the iteration"}),
    )
    largest = "; ".join(f"{plain(run)}: {max(parts, key=parts.__getitem__)}" for run, parts in [*rows.items()][:6])
    return Interactive(bars.add_params(percent, picked), f"{words}, of {len(rows)} runs. The largest: {largest}.")


def predicted_over_measured(recalibration: Recalibration) -> Interactive | Text:
    """Predicted / measured seconds per iteration with its 90 % interval, a row a run, before and after calibration.

    On the dashed line a prediction is exact; what was measured lies outside the interval with a diamond.
    """
    if not recalibration:
        return NOTHING
    when, rows = {"before these runs": recalibration.before, "after them": recalibration.after}, list[dict[str, Any]]()
    for name, predictions in when.items():
        for number, (m, p) in enumerate(zip(recalibration.runs, predictions, strict=True)):
            seconds, inside = m.sec_per_it, p.sec_lo <= m.sec_per_it <= p.sec_hi
            row = {"row": number, "run": f"{plain(m.name)}, {seconds:.3g} s", "when": name}
            row |= {
                "inside": "yes" if inside else "no",
                "predicted": with_bounds(p.sec_per_it, p.sec_lo, p.sec_hi),
                "measured": f"{seconds:.3g}",
            }
            ratios = {"ratio": p.sec_per_it, "low": p.sec_lo, "high": p.sec_hi}
            rows.append({**row, **{key: rounded(value / seconds) for key, value in ratios.items()}})
    picked = alt.selection_point("picked", fields=["when"], bind="legend")
    scale = alt.Scale(domain=[*when], range=[COLORS[4], COLORS[0]])
    base = chart(rows, width=640, height=alt.Step(46, **{"for": "position"})).encode(
        y=alt.Y("run:N", title=None, sort=alt.EncodingSortField("row", op="min"), axis=names_above(17)),
        yOffset=alt.YOffset("when:N", sort=[*when]),
        color=alt.Color("when:N", scale=scale, title="prediction; a click picks it"),
        opacity=alt.condition(picked, alt.value(1), alt.value(0.12)),
        tooltip=tooltips(
            {"run": "run", "when": "when", "predicted": "predicted (s)", "measured": "measured (s)"}
            | {"ratio": "predicted / measured", "inside": "measured is inside the 90 % interval"}
        ),
    )
    x = alt.X("low:Q", title="predicted / measured (bars: 90 % interval)", scale=alt.Scale(zero=True))
    bars = base.mark_rule(strokeWidth=2).encode(x=x, x2="high:Q").add_params(picked)
    shapes = alt.Scale(domain=["yes", "no"], range=["circle", "diamond"])
    shape = alt.Shape("inside:N", scale=shapes, title="inside it")
    dots = base.mark_point(size=70, filled=True).encode(x="ratio:Q", shape=shape)
    exact = chart([{"one": 1}]).mark_rule(strokeDash=[4, 3], color=INK, tooltip=None).encode(x="one:Q")
    text = "Predicted over measured seconds of {0} runs. Before them {1} of {0} lay inside the 90 % interval."
    return Interactive(alt.layer(exact, bars, dots), text.format(len(recalibration.runs), recalibration.inside))
