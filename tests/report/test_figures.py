"""The figures show what was predicted or measured, stay small whatever there is, and hold names as
data alone.
"""

import base64
import json
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import altair as alt
import numpy as np
import pandas as pd
import pytest
from markup import HOSTILE
from matplotlib.dates import date2num
from support import REPOSITORY

from trilane.analysis.loss_curve import join
from trilane.analysis.recalibrate import recalibrate
from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.plan import read_plan
from trilane.costmodel.pipeline import pipeline_schedule
from trilane.forecasting.forecast import forecast
from trilane.logs.run import RunLog
from trilane.planning.search import search
from trilane.planning.search_result import SearchResult
from trilane.planning.sizing import training_days
from trilane.planning.space import read_choices
from trilane.report.html import embedded
from trilane.report.plots import explorer, losses, runs
from trilane.report.plots import forecast as of_forecast
from trilane.report.plots.interactive import MIME, Interactive
from trilane.utils.tables import Text

MACHINE, SHAPE = cluster("jz-a100-80g"), parse_shape("24,2048,16,2048,50304")


def test_a_notebook_gets_the_specification_its_picture_and_its_text(tmp_path):
    rows = [
        {"x": 1, "y": 2.5, "name": HOSTILE[0]},
        {"x": 2, "y": float("nan"), "name": "</script><b>"},
    ]
    dots = alt.Chart(alt.Data(values=rows)).mark_point().encode(x="x:Q", y="y:Q", tooltip="name:N")
    figure = Interactive(dots, "Two dots, of which one has no height.")
    shown = figure._repr_mimebundle_()
    assert json.loads(json.dumps(shown[MIME], allow_nan=False)) == shown[MIME], (
        "JSON that a browser reads"
    )
    assert shown[MIME]["description"] == shown["text/plain"] == figure.text
    figure.savefig(tmp_path / "x.png", dpi=150)
    assert (tmp_path / "x.png").read_bytes() == base64.b64decode(shown["image/png"])


@pytest.mark.parametrize("value", HOSTILE)
def test_no_text_in_a_specification_ends_its_element(value):
    text = embedded({"name": value})
    assert json.loads(text) == {"name": value} and not set(text) & set("<>&\u2028")


@pytest.fixture(scope="module")
def found() -> SearchResult:
    return search(SHAPE, MACHINE, gpus=(16, 32), gbs=128, mbs=(1, 2, 4), recompute="none")


def plans(found: SearchResult) -> list[dict]:
    return explorer.explorer(found).spec["datasets"]["plans"]


@pytest.fixture(scope="module")
def rows(found: SearchResult) -> list[dict]:
    return plans(found)


def test_the_explorers_first_plan_is_the_best_of_the_table_and_every_plan_is_shown_once(
    found, rows
):
    shown = explorer.shown_plans(found)
    assert shown[0] == found.best(1).rows[0]
    assert [row["id"] for row in rows] == [c.plan.id for c in shown]
    assert len({row["id"] for row in rows}) == len(rows) <= 40
    assert {found.pareto[0].plan.id, found.pareto[-1].plan.id} <= {row["id"] for row in rows}


def test_numbers_and_ties_are_those_of_the_table(found, rows):
    table, rows = found.best(12).view(), {row["id"]: row for row in rows}
    for id, rank, seconds in zip(table["id"], table["rank"], table["s/it"], strict=True):
        assert rows[id]["rank"].rstrip("=") == rank.rstrip("=") and rows[id]["s"] == pytest.approx(
            seconds, abs=2e-3
        )
        assert rows[id]["lo"] < rows[id]["s"] < rows[id]["hi"]


def test_the_runs_of_a_schedule_are_all_its_passes_and_nothing_else():
    """Of one and of several model chunks, whichever stage is the slowest; what the page multiplies
    out.
    """
    for partition, interleaving, pp in (
        ("uniform", "1", 8),
        ("uniform", "3", 8),
        ("type:transformer|embedding", "1", 2),
    ):
        choices = read_choices(partition=partition, interleaving=interleaving)
        c = search(
            SHAPE, MACHINE, gpus=16, gbs=128, pp=pp, mbs=1, recompute="none", **choices
        ).candidates[0]
        made, row = pipeline_schedule(c.topology, c.prediction), explorer.plan_row(c)
        runs = [
            dict(zip(explorer.RUN, values, strict=True))
            for values in zip(*map(row.get, explorer.RUN), strict=True)
        ]
        drawn = {
            (r["on"], r["kind"], r["chunk"], r["first"] + k): r["start"] + k * r["step"]
            for r in runs
            for k in range(r["count"])
        }
        kinds = {True: "forward", False: "backward"}
        whole = {
            (p.stage, kinds[p.is_forward], p.chunk, p.microbatch + 1): p.start for p in made.passes
        }
        assert {k: v for k, v in drawn.items() if k[1] in kinds.values()} == pytest.approx(
            whole, abs=1e-4 * made.end
        )
        assert len(runs) < len(whole) / 2 and max(
            r["start"] + r["length"] for r in runs
        ) == pytest.approx(made.end, rel=1e-3)


def test_the_numbers_of_a_plan_are_those_of_every_command(found):
    c = found.candidates[0]
    row = explorer.plan_row(c, tokens=3e11)
    texts = dict(zip(row["number"], row["text"], strict=True))
    days = training_days(SHAPE, c.topology, c.prediction.sec_per_it, 3e11)
    assert float(texts["days, 300B tokens"].split()[0]) == pytest.approx(days, rel=0.01)
    assert sum(row["times"]) == pytest.approx(c.prediction.sec_per_it, rel=1e-3)
    assert sum(row["memory"]) == pytest.approx(c.prediction.memory_bytes / 2**30, rel=1e-3)
    assert c.plan.id in texts["TP x PP x DP; id"] and row["evidence"] == c.prediction.support.words


def test_ten_thousand_plans_make_no_larger_figure_one_is_enough_and_none_is_one_line(found):
    many = replace(
        found, candidates=found.candidates * 20, front=lambda: list(found.candidates) * 20
    )
    assert (
        len(many.candidates) >= 10_000 and len(json.dumps(explorer.explorer(many).spec)) < 400_000
    )
    alone = found.candidates[:1]
    assert len(plans(replace(found, candidates=alone, risky=(), front=lambda: list(alone)))) == 1
    with pytest.raises(ValueError, match="gpus=16,32: no topology can run"):
        explorer.explorer(replace(found, candidates=(), risky=(), front=list))


def log(rows=30, first=1, **columns):
    """A log of `rows` iterations of 4 sequences and 3,600 seconds each."""
    at = np.arange(first, first + rows)
    given = {
        "lm_loss": 3 - at / 100,
        "grad_norm": 1 + at % 3,
        "sec_per_it": 3600.0,
        "consumed_samples": 4 * at,
    }
    table = pd.DataFrame(
        {"iteration": at, **{k: np.broadcast_to(v, rows) for k, v in {**given, **columns}.items()}}
    )
    return RunLog(source=Path("a.log"), iterations=table, status="completed", evidence="")


def drawn(curves):
    """The series, and the whole specification."""
    spec = losses.explorer(curves).spec
    return spec["data"]["values"], spec


def of_layers(panel, field):
    """The rows of a panel's layers that have their own data with that field."""
    found = [
        row
        for layer in panel["layer"]
        for row in layer.get("data", {}).get("values", [])
        if field in row
    ]
    return list({json.dumps(row): row for row in found}.values())


def test_a_spike_of_one_line_in_a_long_log_is_drawn():
    loss = np.full(100_000, 2.0)
    loss[71_234] = 9.0
    curves = {"a": join([log(100_000, lm_loss=loss)])}
    (series,), _ = drawn(curves)
    assert len(series["iterations"]) <= 2500 and series["iterations"][-1] == 100_000
    assert series["loss0"][series["iterations"].index(71_235)] == 9.0
    assert (
        f"Of 100,000 lines {len(series['iterations']):,} are drawn" in losses.explorer(curves).text
    )


def test_a_restart_is_marked_and_what_was_trained_again_is_drawn_as_it_was_the_first_time():
    series, spec = drawn({"a": join([log(20), log(20, first=11, lm_loss=5.0)])})
    assert [(s["piece"], s["iterations"][0], s["iterations"][-1]) for s in series] == [
        (0, 1, 30),
        (1, 11, 20),
    ]
    assert series[1]["hours"] == [*range(11, 21)], "over the hours of the second time"
    (mark,) = of_layers(spec["concat"][0], "again")
    assert (mark["first"], mark["again"], mark["hours"]) == (11, 10, 11)


def test_a_loss_that_falls_far_is_logarithmic_and_a_quantity_that_no_log_has_gets_no_panel():
    for curve, kind in ((log(lm_loss=np.linspace(11, 2, 30)), "log"), (log(), "linear")):
        layers = drawn({"a": join([curve])})[1]["concat"][0]["layer"]
        assert {
            y["scale"]["type"]
            for layer in layers
            if "scale" in (y := layer["encoding"].get("y", {}))
        } == {kind}
    assert len(drawn({"a": join([log(grad_norm=0.0)])})[1]["concat"]) == 1
    assert (
        losses.explorer({})
        == losses.explorer({"a": join([log(lm_loss=np.nan)])})
        == Text("No log prints a loss.")
    )


def test_of_equal_curves_each_has_its_own_dashes():
    """One drawn over another would look like a missing run."""
    layers = drawn({name: join([log()]) for name in "abc"})[1]["concat"][0]["layer"]
    marks = [layer["mark"] for layer in layers if "strokeDashOffset" in layer["mark"]]
    assert {mark["strokeDashOffset"] for mark in marks} == {0, -9, -18}
    assert all(dash == 9 and gap == 9 * 2 for dash, gap in (mark["strokeDash"] for mark in marks))
    apart = drawn({"a": join([log()]), "b": join([log(lm_loss=7.0)])})[1]
    assert "strokeDashOffset" not in json.dumps(apart)


def run(name, seconds, **timers):
    """A measurement with the medians of some timers, in seconds."""
    table = pd.DataFrame(
        {"iteration": [1, 2], **{k.replace("_", "-"): [v, v] for k, v in timers.items()}}
    )
    iterations = pd.DataFrame({"iteration": [1, 2], "sec_per_it": [9 * seconds, seconds]})
    own = SimpleNamespace(timers=table if timers else pd.DataFrame(), iterations=iterations)
    counts = np.array([False, True])
    return SimpleNamespace(
        name=name, log=own, window=SimpleNamespace(counts=counts), sec_per_it=seconds
    )


def test_iterations_that_do_not_count_are_hollow_in_every_run_and_named_once():
    (axes,) = runs.seconds_per_iteration([run("a", 4.0), run("b", 3.0)]).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "not counted", "b"]
    hollow = [line for line in axes.lines if line.get_marker() == "o"]
    assert [(*line.get_xdata(), *line.get_ydata()) for line in hollow] == [(1, 36), (1, 27)]
    assert (
        axes.get_ylim() == (0, pytest.approx(1.5 * (4 + 0.95 * 32)))
        and axes.get_yscale() == "linear"
    )
    (axes,) = runs.seconds_per_iteration([run("a", 4.0), run("b", 81.0)]).axes
    assert axes.get_yscale() == "log"


def test_phases_follow_each_other_and_what_no_timer_covers_ends_the_iteration():
    timers = {"forward_compute": 1.0, "backward_compute": 2.0, "optimizer": 0.5}
    (axes,) = runs.phases([run("a", 4.0, **timers), run("b", 3.0)], recalibrate([])).axes
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [
        (0, 25),
        (25, 50),
        (75, 12.5),
        (87.5, 12.5),
    ]
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["forward", "backward", "optimizer", "covered by no timer"]
    assert isinstance(runs.phases([run("b", 3.0)], recalibrate([])), Text), (
        "one line, no empty figure"
    )


PLAN = read_plan(REPOSITORY / "docs/plan-176b.json")
ASKED = {"tokens": 341e9, "start": "2027-01-01", "runs": 500}
FIRST = date2num(date(2027, 1, 1))


def test_a_forecast_and_its_record_have_one_fan_that_ends_with_the_simulated_runs_and_one_bar_for_each_cost():
    found = forecast(PLAN, **ASKED, ramp="192,16,9765625", deadline="2027-05-01", allocation=1.2e6)
    for fan in (of_forecast.page(found), of_forecast.page(found, 3.0)):
        median, _, deadline = fan.axes[0].lines
        assert median.get_xdata()[-1] == pytest.approx(FIRST + found.days(0.5))
        assert deadline.get_xdata()[0] == date2num(date(2027, 5, 2)), "the whole last day counts"
        ends = [bands.get_datalim(fan.axes[0].transData).x1 for bands in fan.axes[0].collections]
        assert ends == pytest.approx([FIRST + found.days(q) for q in (0.95, 0.75)])
    spent = sum(bar.get_width() for bar in fan.axes[1].patches)
    assert spent == pytest.approx(
        found.outcomes.gpu_s.mean() / 3600 - found.gpu_hours_by_cause["iterations"]
    )


def test_the_calendar_draws_every_job():
    made = forecast(PLAN, **{**ASKED, "ramp": "512,512,0", "runs": 100})
    below = of_forecast.gantt(made).axes[1]
    spans = sorted(
        (bar.get_x() - FIRST, bar.get_x() + bar.get_width() - FIRST) for bar in below.patches
    )
    assert len(spans) == sum(chain["jobs"] for chain in made.record["schedule"]) > 100
    assert max(end - begin for begin, end in spans) == pytest.approx(20 / 24), (
        "no job is longer than the queue takes"
    )
    assert spans[0][0] == 0 and {bar.get_height() for bar in below.patches} == {48}, "nodes"
