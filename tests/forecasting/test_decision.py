"""The decision: each figure has a provenance, the measured run stands beside its prediction, the notebooks run."""

import dataclasses
import json
from datetime import date, timedelta

import pytest
from support import REPOSITORY

from trilane.config.batch_rampup import parse_ramp
from trilane.config.cluster import cluster
from trilane.config.plan import read_plan
from trilane.costmodel.predict import predict
from trilane.costmodel.shipped import default
from trilane.forecasting.alternatives import other_schedules, other_topologies, recommend
from trilane.forecasting.capacity import Capacity, CapacityStep, constant
from trilane.forecasting.decision import Decision, decide
from trilane.forecasting.failures import FailureModel
from trilane.forecasting.forecast import forecast
from trilane.forecasting.plan_source import PlanSource, calendar_record, measured_like, study_plan
from trilane.forecasting.request import ForecastRequest, Price, forecast_request
from trilane.planning.size_request import SizeRequest
from trilane.planning.sizing import propose
from trilane.report import notebook
from trilane.report.plots import planning
from trilane.report.plots.forecast import causes, fan, gantt, page
from trilane.utils.validation import shipped_json
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
def calendar(found):
    p, made_by = found.prediction.to_json(), {"notebook": "02_topology", "time": "2027-01-01T00:00:00"}
    source = PlanSource(file="plans.json", made_by=made_by, prediction=p)
    return json.loads(json.dumps(calendar_record(found, source)))


def decision(calendar, **changes):
    plans = {"plans": [{"id": calendar["plan_id"], "prediction": calendar["prediction"]}]}
    return Decision(**{"record": calendar, "plans": plans, "sizing": {}, **changes})


def test_every_figure_has_its_kind_of_knowledge_and_its_source(calendar):
    kinds = {"given", "computed", "measured", "fitted", "published", "assumed", "simulated"}
    table = decision(calendar, backtest_error=0.012, reports=frozenset({"07_calendar"})).facts
    assert all(fact.kind in kinds and fact.source and fact.value for fact in table.facts)
    assert {"given", "fitted", "measured", "assumed", "simulated"} <= {fact.kind for fact in table.facts}
    rough = {**calendar, "sec_per_it": 0.2159, "sec_interval": [0.1447, 0.3221], "energy_kwh": 4.58}
    values = {fact.what: fact for fact in decision(rough).facts.facts}
    assert values["seconds per iteration"].source.endswith("90 % interval -33.0% to +49.2%")
    assert values["energy"].value == "4.58 kWh"
    assert '<a href="07_calendar.html">07_calendar</a>' in table._repr_html_()
    assert "02_topology</td>" in table._repr_html_(), "no link to what is not there"


def test_the_measured_run_is_next_to_its_prediction(calendar):
    """Prequel, 02-28: 70 x 14336, 112 heads, TP 4, PP 12, DP 8, MBS 2, GBS 2048: 104.50 s."""
    assert [row.seconds for row in measured_like(PLAN)] == [104.5]
    faster = dataclasses.replace(PLAN.topology, sequence_parallel=True, recompute="none")
    assert measured_like(dataclasses.replace(PLAN, topology=faster)) == [], "that is another run"
    assert calendar["sec_per_it"] / calendar["measured"][0]["seconds"] == pytest.approx(1, abs=0.03)


def test_the_headline_names_shape_topology_date_hours_and_both_probabilities(calendar, found):
    text = decision(calendar, title="a_b <b>").headline()
    for part in ("70 layers × 14336", "TP 4 × PP 12 × DP 8", "GPU-hours", "overrun with", "is missed with", "2027-"):
        assert part in text
    assert text.startswith(r"a\_b &lt;b&gt; ") and text.endswith(found.summary())
    sure = decision({**calendar, "p_miss_deadline": 0.0, "plan": "<script>"}).summary()
    assert "is missed with probability **under 0.1 %**" in sure and "<script" not in sure


def test_the_page_reports_that_no_measured_run_is_like_the_plan(calendar):
    facts = {fact.what: fact.value for fact in decision(calendar).facts.facts}
    assert (
        facts["measured runs like it"].startswith("rests on") and "no measured run" not in decision(calendar).summary()
    )
    (hopeless,) = decided(calendar, deadline=by(5), p_miss_deadline=1.0).turns
    assert "more GPUs or fewer tokens" in hopeless, "nothing is faster by more than 100 %"
    (easy,) = decided(calendar, deadline=by(1111), p_miss_deadline=0.0).turns
    assert "11 times as long as predicted" in easy
    far = {**calendar["prediction"], "support": {"words": "no measured run like this; the nearest is <b>"}}
    page = decision({**calendar, "prediction": far})
    assert "no measured run like this; the nearest is &lt;b&gt;." in page.summary()
    assert decision({**calendar, "prediction": {}}).summary() == decision(calendar).summary(), "as an older file has it"


def test_a_decision_cites_the_plan_and_the_numbers_that_the_forecast_used(calendar, found):
    assert calendar["plan_json"] == PLAN.to_json() and calendar["prediction"] == found.prediction.to_json()
    assert calendar["sec_per_it"] == calendar["prediction"]["sec_per_it"] == found.prediction.sec_per_it
    same = decision(calendar)
    assert not same.inconsistencies and calendar["plan_id"] in same.notes() and r"02\_topology" in same.notes()
    assert {fact.what: fact.notebook for fact in same.facts.facts}["seconds per iteration"] == "02_topology"


@pytest.mark.parametrize(
    ("plans", "prediction", "message"),
    [
        ([], {}, "no longer holds plan"),
        (["another"], {}, "no longer holds plan"),
        (["same"], {"sec_per_it": 92.6}, "was written again and predicts plan"),
    ],
)
def test_plans_that_were_remade_after_the_forecast_are_named(calendar, plans, prediction, message):
    ids = {"another": "0123456789", "same": calendar["plan_id"]}
    entries = [{"id": ids[name], "label": "p", "prediction": calendar["prediction"] | prediction} for name in plans]
    remade = decision(calendar, plans={"plans": entries})
    assert len(remade.inconsistencies) == 1 and message in remade.inconsistencies[0]
    assert "Attention" in remade.notes()


def test_a_prediction_of_another_calibration_is_not_attributed_to_its_notebook(calendar):
    source = {**calendar["source"], "prediction": calendar["prediction"] | {"sec_per_it": 92.6}}
    other = decision({**calendar, "source": source}, plans={"plans": [{"id": calendar["plan_id"], **source}]})
    assert "sec_per_it=92.6" in other.inconsistencies[0]
    assert {fact.what: fact.notebook for fact in other.facts.facts}["seconds per iteration"] == "07_calendar"


def test_a_study_hands_on_a_whole_plan_by_id_or_label_with_its_calibration(outputs):
    """02 to 07: the seconds of the forecast's constant phase are those of plans.json to the last digit."""
    known, study = dataclasses.replace(default(PLAN.cluster), matmul=0.5), Study.create("handed")
    other = dataclasses.replace(PLAN, label="second", topology=dataclasses.replace(PLAN.topology, mbs=1))
    entries = [p.to_json() | {"id": p.id} | predict(p, known).beside() for p in (PLAN, other)]
    study.save("plans.json", {"plans": entries}, "02_topology")
    for name, plan in (("", PLAN), (PLAN.id, PLAN), (other.id, other), ("second", other)):
        chosen, source = study_plan(study, name)
        assert chosen == plan and source.calibration == known and source.made_by["notebook"] == "02_topology"
        made = calendar_record(forecast(forecast_request(chosen, calibration=source.calibration, runs=100)), source)
        assert made["sec_per_it"] == source.prediction["sec_per_it"] and made["plan_id"] == plan.id
        study.save("calendar.json", made, "07_calendar")
        assert not decide(study).inconsistencies
    study.save("plans.json", {"plans": entries[:1]}, "02_topology")
    assert "no longer holds plan" in decide(study).inconsistencies[0]
    with pytest.raises(ValueError, match=r"^plan=third: no plan of study handed has this id or label"):
        study_plan(study, "third")


def test_each_batch_size_of_the_ramp_takes_the_seconds_of_predict(found):
    for step in found.schedules[0][1][::20]:
        topology = dataclasses.replace(PLAN.topology, gbs=step.phase.gbs)
        seconds = predict(dataclasses.replace(PLAN, topology=topology), found.request.calibration).sec_per_it
        assert step.choice.seconds == pytest.approx(seconds, rel=1e-12)


def test_the_alternatives_are_shapes_topologies_and_schedules(calendar, found):
    proposal = {"layers": 82, "hidden": 14336, "params": 2.06e11, "label": "x", "days": 100.0, "gpu_hours": 9e5}
    own = {**proposal, "layers": 70, "days": 105.0, "gpu_hours": 1e6}
    foreign = decision(calendar, sizing={"proposals": [proposal]})
    assert "shape, per parameter" not in set(foreign.alternatives().to_frame()["what"])
    assert not foreign.inconsistencies
    close = decision(calendar, sizing={"proposals": [own, proposal]}).alternatives().to_frame()
    assert set(close["what"]) == {"shape, per parameter", "topology", "schedule"}
    assert list(close.iloc[0])[2:] == ["-10.0%", "-4.8%"]
    fixed, fastest, reshaped, cheapest = other_schedules(found.request)
    assert reshaped.days <= fastest.days <= fixed.days <= cheapest.days and cheapest.gpu_hours < fixed.gpu_hours


def test_a_cheaper_schedule_that_takes_longer_costs_less(calendar):
    """Cost is GPU-hours, and money in proportion; days stand apart."""
    plan, cheap = calendar["schedules"][0], calendar["schedules"][3]
    close = decision(calendar).alternatives().to_frame().set_index("alternative").loc[cheap["name"]]
    assert close["cost (GPU-hours)"] == f"{cheap['gpu_hours'] / plan['gpu_hours'] - 1:+.1%}" < "0"
    assert close["days"] == f"{cheap['days'] / plan['days'] - 1:+.1%}" and close["days"][0] == "+"


def test_money_is_shown_where_a_gpu_hour_has_a_price(found):
    rows = found.alternatives.to_frame()
    assert "money" not in rows
    priced = dataclasses.replace(found.alternatives, price=2.0).to_frame()
    assert list(priced["money"]) == [pytest.approx(2 * hours, abs=2) for hours in rows["GPU-hours"]]


def test_on_a_capacity_that_grows_the_rivals_wait_for_it_too(found):
    grows = Capacity(
        steps=(CapacityStep(first_day=START, gpus=144), CapacityStep(first_day=date(2027, 2, 1), gpus=384))
    )
    late = forecast(dataclasses.replace(found.request, ramp=parse_ramp("1024,512,1000000"), capacity=grows, runs=100))
    plain, fastest, *_ = other_schedules(late.request)
    assert plain.days == pytest.approx(late.ideal.wall_s[0] / 86400) and fastest.days <= plain.days
    assert plain.gpu_hours == pytest.approx(late.ideal.gpu_s[0] / 3600)
    assert plain.restarts == len(late.jobs()) - 1 > 0
    assert all(rival.days > 31 for rival in other_topologies(late.request, count=1))


def test_every_danger_has_a_remedy_and_every_assumption_a_source(calendar):
    assert all(danger["what"] in shipped_json("risks")["remedies"] for danger in calendar["dangers"])
    assert set(shipped_json("risks")["sources"]) == set(vars(FailureModel())) - {"stops"}
    assert all(taken["source"] for taken in calendar["assumptions"])


def test_gpu_hours_by_cause_add_up_to_the_mean(found):
    parts = found.gpu_hours_by_cause
    assert sum(parts.values()) == pytest.approx(found.outcomes.gpu_s.mean() / 3600)
    assert parts["slower than a benchmark"] == pytest.approx(0.02 * parts["iterations"])


def rows(chart):
    """Every row of data in a specification."""
    parts = [part for name in ("concat", "layer") for part in chart.get(name, [])]
    return [*chart.get("data", {}).get("values", []), *(row for part in parts for row in rows(part))]


def test_the_fan_has_the_dates_of_each_quantile_and_draws_the_deadline(found, calendar):
    drawn = rows(fan(found).spec)
    last = [row for row in drawn if "half" in row][-1]
    finish = {name: day[:10] for name, day in found.record["finish"].items()}
    assert last["median"] == finish["p50"] and last["nine"] == f"{finish['p05']} to {finish['p95']}"
    assert last["tokens"] == pytest.approx(found.request.samples * PLAN.shape.seq_length / 1e9, rel=1e-4)
    assert [row["deadline"] for row in drawn if "deadline" in row] == ["2027-05-01"]
    assert rows(fan(decision(calendar)).spec) == drawn, "08 draws it of calendar.json"
    old = {name: value for name, value in calendar.items() if name != "fan"}
    assert "run 07_calendar again" in fan(decision(old)) and "run 07_calendar again" in page(decision(old))


def test_every_cause_of_cost_is_drawn_with_what_helps_and_the_allocation(found):
    drawn = rows(causes(found).spec)
    of = {row["cause"]: row for row in drawn if "cause" in row}
    spent = sum(row["hours"] for row in of.values())
    assert spent == pytest.approx(found.outcomes.gpu_s.mean() / 3600 - found.gpu_hours_by_cause["iterations"], rel=1e-3)
    assert "What helps: spare nodes" in of["node failure"]["card"].replace("\n", " ")
    assert of["outage of the machine"]["hours"] == 0 < of["outage of the machine"]["mean"], "days, and no GPU-hours"
    assert [row["allocation"] for row in drawn if "allocation" in row] == [1_200_000]


def test_each_restart_of_the_calendar_has_its_cause_and_its_iterations(found):
    """A capacity that grows, ends for a week and comes back."""
    days = ((START, 128), (date(2027, 1, 20), 384), (date(2027, 2, 10), 0), (date(2027, 2, 17), 384))
    steps = tuple(CapacityStep(first_day=day, gpus=gpus) for day, gpus in days)
    given = {"capacity": Capacity(steps=steps), "ramp": parse_ramp("512,512,0"), "runs": 100}
    jobs = [row for row in rows(gantt(forecast(dataclasses.replace(found.request, **given))).spec) if "card" in row]
    jobs = list({row["number"]: row for row in jobs}.values())
    assert jobs[0]["cause"] == "starts the run" and jobs[0]["iterations"].startswith("about 1 to ")
    assert "the capacity changed" in jobs[1]["cause"] and "dp" in jobs[1]["cause"]
    assert "nothing could run for 7 days" in jobs[2]["cause"]
    assert jobs[1]["dates"] == "2027-01-20 to 2027-02-10"


def test_no_job_stands_above_the_capacity_that_it_runs_on(found):
    """12 GPUs of 8 a node take two nodes, and where there are 12 there are two."""
    plan = dataclasses.replace(PLAN, topology=dataclasses.replace(PLAN.topology, tp=2, pp=6, dp=1))
    made = forecast(dataclasses.replace(found.request, plan=plan, capacity=constant(12, START), runs=100))
    drawn = rows(gantt(made).spec)
    assert (
        {row["nodes"] for row in drawn if "nodes" in row and "card" not in row}
        == {2}
        == {row["nodes"] for row in drawn if "card" in row}
    )


def test_shapes_are_drawn_over_width_and_depth():
    machine = cluster("jz-a100-80g")
    request = SizeRequest(
        parameters=20e9, vocabulary=50_257, gpus=32, cluster=machine, calibration=default(machine), gbs=512
    )
    figure = planning.shapes_and_efficiency(propose(request))
    assert figure.axes[0].get_xlabel() == "hidden size" and figure.axes[0].get_ylabel() == "layers"


def decided(calendar, **changes):
    """The recommendation on the forecast with other figures: 100 days and 900,000 GPU-hours without interruptions."""
    days = {"p05": 105, "p25": 108, "p50": 110, "p75": 112, "p95": 115}
    finish = {name: (START + timedelta(days=n)).isoformat() + "T00:00" for name, n in days.items()}
    base = {"ideal": {"days": 100.0, "gpu_hours": 900e3}, "finish": finish, "gpu_hours": 990e3}
    base |= {"gpu_hours_interval": [945e3, 1035e3], "deadline": None, "p_miss_deadline": None, "allocation": None}
    base |= {"p_overrun_allocation": None, "rivals": [], "schedules": [{"name": "own", "days": 100, "gpu_hours": 9e5}]}
    return recommend({**calendar, **base, **changes})


def by(days):
    return (START + timedelta(days=days)).isoformat()


def other(name, days, hours, *, risk=0.0, **failed):
    """An alternative; its simulated runs are as far from these days and GPU-hours as the plan's from its own."""
    more = {"p05": 5, "p75": 12, "p95": 15}
    finish = {name: (START + timedelta(days=days + n)).isoformat() for name, n in more.items()}
    figures = {"ideal": {"days": days, "gpu_hours": hours}, "finish": finish, "gpu_hours": hours + 90e3}
    figures |= {"gpu_hours_interval": [hours + 45e3, hours + 135e3]}
    figures |= {"p_miss_deadline": 0.0, "p_overrun_allocation": 0.0}
    facts = {"name": name, "days": days, "gpu_hours": hours, "memory_bytes": 6e10, "oom_probability": risk}
    return {**facts, "forecast": {**figures, **failed}}


CHANGED, REFUSED = "Start, with one change", "Do not start it as planned"
FASTER, LATE = other("tp8-pp2", 90.0, 810e3), other("tp8-pp2", 90.0, 810e3, p_miss_deadline=1.0)
NEAR, FULL = other("tp2-pp8", 99.0, 890e3), other("tp8-pp2", 90.0, 810e3, risk=0.011)
SLOW = other("cheapest at each batch size", 180.0, 700e3)


@pytest.mark.parametrize(
    ("figures", "verdict", "change", "reason"),
    [
        ({}, "Start", "", "no deadline and no allocation were given"),
        ({"rivals": [NEAR]}, "Start", "", "no deadline"),
        ({"rivals": [FASTER]}, CHANGED, "tp8-pp2", "90,000 GPU-hours less and 10 days less"),
        ({"schedules": [NEAR, SLOW]}, "Start", "", "no deadline"),
        ({"deadline": by(120), "p_miss_deadline": 0.01}, "Start", "", "probability of 99%"),
        ({"deadline": by(104), "p_miss_deadline": 0.97, "rivals": [FASTER]}, CHANGED, "tp8-pp2", "misses"),
        ({"deadline": by(104), "p_miss_deadline": 0.97}, REFUSED, "", "misses the deadline with a"),
        ({"deadline": by(90), "p_miss_deadline": 1.0, "rivals": [LATE]}, REFUSED, "", "not enough"),
        ({"allocation": 9e5, "p_overrun_allocation": 1.0, "schedules": [NEAR, SLOW]}, CHANGED,
         "cheapest at each batch size", "needs more than the allocation"),
        ({"oom_probability": 0.3}, REFUSED, "", "out of memory with a probability of 30%"),
        ({"oom_probability": 0.02}, REFUSED, "", "out of memory with a probability of 2%"),
        ({"rivals": [FULL]}, "Start", "", "no deadline"),
        ({"deadline": by(104), "p_miss_deadline": 0.97, "rivals": [FULL]}, REFUSED, "", "misses the deadline with a"),
        ({"oom_probability": 0.3, "rivals": [NEAR]}, CHANGED, "tp2-pp8", "out of memory"),
    ],
)  # fmt: skip
def test_the_page_ends_in_a_recommendation_with_its_reason(calendar, figures, verdict, change, reason):
    found = decided(calendar, **figures)
    assert (found.verdict, found.change) == (verdict, change)
    assert any(reason in line for line in found.reasons), found.reasons


def test_the_figures_of_a_recommendation_are_those_of_the_plan_that_it_names(found):
    """Of a slow plan another topology is recommended: its date, cost and memory are those of its own forecast."""
    slow = dataclasses.replace(PLAN, topology=dataclasses.replace(PLAN.topology, tp=8, pp=12, dp=4, mbs=1))
    asked = dataclasses.replace(found.request, plan=slow, price=Price(per_gpu_hour=2.0), deadline=None, allocation=None)
    page = decision(json.loads(json.dumps(calendar_record(forecast(asked), PlanSource(file="plan.json")))))
    advised = page.recommendation
    assert advised.verdict == CHANGED and advised.figures["oom_probability"] <= 0.01
    (rival,) = (a for a in other_topologies(asked) if a.name == advised.change)
    made, plan = forecast(rival.request), rival.request.plan
    for name in ("finish", "days", "gpu_hours", "cost"):
        assert advised.figures[name] == made.to_json()[name] != page.record[name], name
    assert advised.figures["memory_bytes"] == pytest.approx(predict(plan).memory_bytes)
    assert advised.figures["oom_probability"] == pytest.approx(predict(plan).oom_probability)
    assert f"finished by **{made.finish(0.5):%Y-%m-%d}**" in page.advice()


def test_what_would_turn_a_recommendation_is_how_far_a_benchmark_may_be_off(calendar):
    """Four of five runs take at most 112.75 days, 100 of them work: 7.25 % more of that reach the end of day 119."""
    kept = decided(calendar, deadline=by(119), p_miss_deadline=0.0).turns
    assert kept == (
        "a benchmark whose iterations are 7% slower than predicted: up to there four runs of five keep the deadline",
    )
    (failed,) = decided(calendar, deadline=by(104), p_miss_deadline=0.9).turns
    assert "8% faster than predicted: from there on" in failed
    _, changed = decided(calendar, deadline=by(104), p_miss_deadline=0.9, rivals=[FASTER]).turns
    assert "2% slower than predicted: up to there" in changed, "of the change: 102.75 of 105 days, over 90"
    far = {**calendar["prediction"], "support": {"words": "no measured run like this; the nearest is far"}}
    assert "no measured run like this" in decided(calendar, prediction=far).turns[0]


@pytest.mark.slow
@pytest.mark.usefixtures("uncounted_processes")
def test_from_a_target_size_to_the_page_for_who_decides(outputs):
    """01, 02, 07 and 08 in one study: the large question, from a size to a yes or no."""
    study = Study.create("big")
    notebook.run(
        "01_sizing", study, cluster="jz-a100-80g", choose="target", target=20e9, target_gpus=32, target_gbs=512
    )
    notebook.run("02_topology", study, gpus="32", precision="bf16", zero="1", partition="type:transformer|embedding")
    notebook.run("07_calendar", study, tokens=20e9, ramp="32,32,1000000", start="2027-01-04", deadline="2027-01-05")
    page = notebook.run("08_decision", study).read_text()
    assert (
        "Do not start it as planned" in page
        and "is missed with probability" in page
        and 'href="07_calendar.html"' in page
        and "data:image/png" in page
    )
    assert json.loads((study.folder / "sizing.json").read_text())["proposals"][0]["cost_beside_best"] == 1
    made, best = study.load("calendar.json", "07_calendar"), study.load("plans.json", "02_topology")["plans"][0]
    assert made["p_miss_deadline"] == 1 and made["plan_id"] == best["id"] and made["prediction"] == best["prediction"]
    assert study.load("decision.json", "08_decision")["inconsistencies"] == [] and best["id"] in page
    assert (study.folder / "figures/01_target.png").exists() and (study.folder / "decision.json").exists()
