"""The decision: each figure has a provenance, the measured run stands beside its prediction, the notebooks run."""

import dataclasses
import json
from datetime import date

import pytest
from support import REPOSITORY

from trilane.config.batch_rampup import parse_ramp
from trilane.config.cluster import cluster
from trilane.config.plan import read_plan
from trilane.costmodel.calibration import default
from trilane.forecasting.alternatives import other_schedules, other_topologies
from trilane.forecasting.capacity import Capacity, CapacityStep, constant
from trilane.forecasting.decision import (
    KINDS,
    REMEDIES,
    close_ones,
    facts,
    facts_table,
    headline,
    measured_like,
    plain,
    record,
)
from trilane.forecasting.failures import SOURCES, FailureModel
from trilane.forecasting.forecast import forecast
from trilane.forecasting.record import to_json
from trilane.forecasting.request import ForecastRequest
from trilane.planning.sizing import SizeRequest, propose
from trilane.report import notebook
from trilane.report.plots import forecast as calendar_plots
from trilane.report.plots import sizing
from trilane.workspace.study import Study

PLAN = read_plan(REPOSITORY / "docs/plan-176b.json")
START = date(2027, 1, 1)


@pytest.fixture(scope="module")
def found():
    request = ForecastRequest(
        plan=PLAN,
        calibration=default(PLAN.cluster),
        tokens=341e9,
        ramp=parse_ramp("192,16,9765625"),
        capacity=constant(384, START),
        start=START,
        deadline=date(2027, 5, 1),
        allocation=1.2e6,
        runs=500,
    )
    return forecast(request)


@pytest.fixture(scope="module")
def made(found):
    return json.loads(json.dumps(record(found, to_json(found))))


def test_every_figure_says_what_kind_of_knowledge_it_is_and_where_it_comes_from(made):
    said = facts(made, 0.012)
    assert all(fact.kind in KINDS and fact.source and fact.value for fact in said)
    assert {"given", "fitted", "measured", "assumed", "simulated"} <= {fact.kind for fact in said}
    rough = {**made, "sec_per_it": 0.2159, "sec_interval": [0.1447, 0.3221], "energy_kwh": 4.58}
    told = {fact.what: fact for fact in facts(rough)}
    assert told["seconds an iteration"].source.endswith("90 % interval -33.0% to +49.2%")
    assert told["energy"].value == "4.58 kWh"
    table = facts_table(said, {"07_calendar"})
    assert '<a href="07_calendar.html">07_calendar</a>' in table["made by"]
    assert "02_topology" in table["made by"], "no link to what is not there"


def test_the_measured_run_stands_beside_its_prediction(made):
    """Prequel, 02-28: 70 x 14336, 112 heads, TP 4, PP 12, DP 8, MBS 2, GBS 2048: 104.50 s."""
    assert [row.seconds for row in measured_like(PLAN)] == [104.5]
    assert made["sec_per_it"] / made["measured"][0]["seconds"] == pytest.approx(1, abs=0.03)


def test_the_headline_names_shape_topology_date_hours_and_both_probabilities(made):
    text = headline(made)
    for part in ("70 layers × 14336", "TP 4 × PP 12 × DP 8", "GPU-hours", "overrun with", "is missed with", "2027-"):
        assert part in text
    assert "is missed with probability **under 0.1 %**" in headline({**made, "p_deadline": 0.0})
    assert "<script" not in headline({**made, "plan": "<script>"})
    assert plain("a_b [x](y) <b>\n# c") == r"a\_b \[x\](y) &lt;b&gt; \# c"


def test_the_close_ones_are_shapes_topologies_and_schedules(made, found):
    proposal = {"layers": 82, "hidden": 14336, "params": 2.06e11, "label": "x", "cost_beside_best": 1.027}
    own = {**proposal, "layers": 70, "cost_beside_best": 1.08}
    assert "shape" not in close_ones(made, {"proposals": [proposal]})["what"], "those were for another model"
    close = close_ones(made, {"proposals": [own, proposal]})
    assert set(close["what"]) == {"shape", "topology", "schedule"} and close["cost beside"][0] == "-4.9%"
    fixed, fastest, reshaped, cheapest = other_schedules(found.request)
    assert reshaped.days <= fastest.days <= fixed.days <= cheapest.days and cheapest.gpu_hours < fixed.gpu_hours


def test_on_a_capacity_that_grows_the_rivals_wait_for_it_too(found):
    grows = Capacity(
        steps=(CapacityStep(first_day=START, gpus=144), CapacityStep(first_day=date(2027, 2, 1), gpus=384))
    )
    late = forecast(dataclasses.replace(found.request, ramp=parse_ramp("1024,512,1000000"), capacity=grows, runs=100))
    plain, fastest, *_ = other_schedules(late.request)
    assert plain.days == pytest.approx(late.ideal.wall_s[0] / 86400) and fastest.days <= plain.days
    assert plain.gpu_hours == pytest.approx(late.ideal.gpu_s[0] / 3600)
    assert plain.restarts == len(late.bars()) - 1 > 0
    assert all(rival.days > 31 for rival in other_topologies(late.request, count=1))


def test_every_danger_has_a_remedy_and_every_assumption_a_source(made):
    assert all(danger["what"] in REMEDIES for danger in made["dangers"])
    assert set(SOURCES) == set(vars(FailureModel())) - {"stops"}
    assert all(taken["source"] for taken in made["assumptions"])


def test_gpu_hours_by_cause_add_up_to_the_mean(found):
    parts = found.gpu_hours_by_cause
    assert sum(parts.values()) == pytest.approx(found.outcomes.gpu_s.mean() / 3600)
    assert parts["slower than a benchmark"] == pytest.approx(0.02 * parts["iterations"])


def test_figures_have_units_and_draw_their_limits(found):
    jobs, fan, budget = calendar_plots.gantt(found), calendar_plots.fan(found), calendar_plots.budget(found)
    assert [axes.get_ylabel() for axes in jobs.axes] == ["batch size\n(sequences)", "nodes"]
    assert fan.axes[0].get_ylabel() == "tokens trained (billions)"
    for figure, limit in ((fan, "deadline"), (budget, "allocation"), (jobs, "capacity")):
        assert limit in [text.get_text() for text in figure.axes[-1].get_legend().get_texts()]


def test_no_job_stands_above_the_capacity_that_it_runs_on(found):
    """12 GPUs of 8 a node take two nodes, and where there are 12 there are two."""
    plan = dataclasses.replace(PLAN, topology=dataclasses.replace(PLAN.topology, tp=2, pp=6, dp=1))
    made = forecast(dataclasses.replace(found.request, plan=plan, capacity=constant(12, START), runs=100))
    below = calendar_plots.gantt(made).axes[1]
    drawn = next(patch for patch in below.patches if patch.get_label() == "capacity").get_data().values
    assert [bar.choice.nodes for bar in made.bars()] == list(drawn) == [2]


def test_shapes_are_drawn_over_width_and_depth():
    machine = cluster("jz-a100-80g")
    request = SizeRequest(
        parameters=20e9, vocabulary=50_257, gpus=32, cluster=machine, calibration=default(machine), gbs=512
    )
    figure = sizing.shapes_and_efficiency(propose(request))
    assert figure.axes[0].get_xlabel() == "hidden size" and figure.axes[0].get_ylabel() == "layers"


@pytest.mark.slow
def test_from_a_target_size_to_the_page_for_who_decides(outputs):
    """01, 02, 07 and 08 in one study: the large question, from a size to a yes or no."""
    study = Study.create("big")
    notebook.run(
        "01_sizing", study, cluster="jz-a100-80g", choose="target", target=20e9, target_gpus=32, target_gbs=512
    )
    notebook.run("02_topology", study, gpus="32", precision="bf16", zero=1, partition="type:transformer|embedding")
    notebook.run("07_calendar", study, tokens=20e9, ramp="32,32,1000000", start="2027-01-04", deadline="2027-01-05")
    page = notebook.run("08_decision", study).read_text()
    assert "is missed with probability" in page and 'href="07_calendar.html"' in page and "data:image/png" in page
    assert json.loads((study.folder / "sizing.json").read_text())["proposals"][0]["cost_beside_best"] == 1
    assert json.loads((study.folder / "calendar.json").read_text())["p_deadline"] == 1
    assert (study.folder / "figures/01_target.png").exists() and (study.folder / "decision.json").exists()
