"""Figures of several studies: the losses of their runs, and the time of their plans."""

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np

from trilane.analysis.loss_curve import Curve
from trilane.analysis.study_parts import StudyParts, plan_point
from trilane.report.plots.interactive import Interactive
from trilane.utils.tables import Text, one_line

POINTS = 400  # of a curve that are drawn
PLANS = 200  # of a study that are drawn, the best
DIGITS = 5


def losses(studies: Mapping[str, Mapping[str, Curve]]) -> Interactive | Text:
    """Loss (nats per token) over samples, a line a run, a colour a study; one that is picked in the legend stands out.

    A curve of more than POINTS lines is thinned evenly, without smoothing.
    """
    if not studies:
        return Text("No run of these studies prints a loss.")
    values, axes, thinned = list[dict[str, Any]](), set[str](), False
    for study, curves in studies.items():
        for run, curve in curves.items():
            label, x = curve.axis()
            loss = curve.table["lm_loss"].to_numpy(float)
            kept = np.flatnonzero(np.isfinite(loss))
            thinned, axes = thinned or len(kept) > POINTS, axes | {label}
            for i in kept[np.unique(np.linspace(0, max(0, len(kept) - 1), POINTS).astype(int))] if len(kept) else ():
                place = {"x": float(x[i]), "loss": float(f"{loss[i]:.{DIGITS}g}")}
                values.append({"study": one_line(study), "run": one_line(run), **place})
    picked = alt.selection_point(fields=["study"], bind="legend")
    chart = (
        alt.Chart(alt.Data(values=values))
        .mark_line(point=alt.OverlayMarkDef(size=14), strokeWidth=1.5)
        .encode(
            x=alt.X("x:Q", title=" / ".join(sorted(axes))),
            y=alt.Y("loss:Q", title="loss (nats per token)", scale=alt.Scale(zero=False)),
            color=alt.Color("study:N", title="study (click to pick)", sort=None),
            detail="run:N",
            opacity=alt.condition(picked, alt.value(0.9), alt.value(0.1)),
            tooltip=[alt.Tooltip("study:N"), alt.Tooltip("run:N"), alt.Tooltip("x:Q"), alt.Tooltip("loss:Q")],
        )
        .add_params(picked, alt.selection_interval(bind="scales"))
        .properties(width=420, height=260)
    )
    thin = f" Each curve shows at most {POINTS} of its values." if thinned else ""
    lasts = "; ".join(f"{study}: {_lasts(curves)}" for study, curves in studies.items())
    return Interactive(chart, f"Loss of the runs of each study. Last values: {lasts}.{thin}")


def _lasts(curves: Mapping[str, Curve]) -> str:
    """The last losses of a study, from the lowest to the highest: "3.30", "3.05 to 3.30"."""
    ends = [loss.iloc[-1] for c in curves.values() if len(loss := c.table["lm_loss"].dropna())]
    return " to ".join(dict.fromkeys((f"{min(ends):.2f}", f"{max(ends):.2f}"))) if ends else "none"


def plans(studies: Sequence[StudyParts]) -> Interactive | Text:
    """Tokens a second of each study's plans over their GPUs, with the 90 % interval; the best PLANS of each."""
    points = {s.name: [plan_point(plan) for plan in s.plans[:PLANS]] for s in studies if s.plans}
    if not points:
        return Text("No study has plans.")
    picked = alt.selection_point(fields=["study"], bind="legend")
    values = [{"study": name, **point} for name, found in points.items() for point in found]
    base = alt.Chart(alt.Data(values=values)).encode(
        x=alt.X("gpus:Q", title="GPUs", scale=alt.Scale(type="log", base=2, nice=False, padding=20)),
        color=alt.Color("study:N", title="study (click to pick)", sort=None),
        opacity=alt.condition(picked, alt.value(0.9), alt.value(0.1)),
    )
    scale = alt.Scale(type="log")
    low, speed = (
        alt.Y(f"{name}:Q", title="predicted tokens per second", scale=scale) for name in ("low", "tokens_per_s")
    )
    words = {"study": "study", "plan": "plan", "seconds": "seconds an iteration", "interval": "90 % interval"}
    words |= {"oom": "P(out of memory)"}
    tooltip = [alt.Tooltip(f"{name}:N", title=word) for name, word in words.items()]
    tooltip += [alt.Tooltip("gpus:Q", title="GPUs"), alt.Tooltip("tokens_per_s:Q", title="tokens/s")]
    bars = base.mark_rule(strokeWidth=1.5).encode(y=low, y2="high:Q")
    dots = base.mark_point(filled=True, size=60).encode(y=speed, tooltip=tooltip).add_params(picked)
    firsts = "; ".join(f"{name}: {p[0]['tokens_per_s']:,.0f} on {p[0]['gpus']} GPUs" for name, p in points.items())
    text = f"Predicted tokens per second of the plans of each study over GPUs. The best plan of each: {firsts}."
    return Interactive(alt.layer(bars, dots).properties(width=420, height=260), text)
