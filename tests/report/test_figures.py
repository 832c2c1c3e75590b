"""The figures show what was predicted or measured, stay small whatever there is, and hold names as
data alone.
"""

import base64
import json
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
from trilane.report.plots import explorer, losses
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


def test_a_restart_is_marked_over_the_hours_of_the_second_time():
    _, spec = drawn({"a": join([log(20), log(20, first=11, lm_loss=5.0)])})
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


PLAN = read_plan(REPOSITORY / "docs/plan-176b.json")
ASKED = {"tokens": 341e9, "start": "2027-01-01", "runs": 500}
FIRST = date2num(date(2027, 1, 1))


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
