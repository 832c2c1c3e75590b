"""The decision: what else could run, each figure with its provenance, and a recommendation by
simulated runs.
"""

import json
from dataclasses import replace
from datetime import date, timedelta

import pytest
from support import REPOSITORY

from trilane.cli import plan as commands
from trilane.cli.app import main
from trilane.config.batch_rampup import Ramp
from trilane.config.plan import read_plan
from trilane.costmodel.predict import SAFE, predict
from trilane.costmodel.shipped import default
from trilane.forecasting.forecast import forecast
from trilane.planning.alternatives import what_ifs
from trilane.planning.decision import Decision, calendar_record, decide, study_plan
from trilane.planning.search import search
from trilane.utils.numbers import chance
from trilane.workspace.study import Study

PLAN = read_plan(REPOSITORY / "docs/plan-176b.json")
PLAN = replace(PLAN, run=replace(PLAN.run, ramp=Ramp()))  # ASKED has it
ASKED = {
    "tokens": 341e9,
    "ramp": "192,16,9765625",
    "start": "2027-01-01",
    "runs": 500,
    "price": 2.0,
}


@pytest.fixture(scope="module")
def found():
    return forecast(PLAN, **ASKED, deadline="2027-06-01", allocation=1.4e6)


@pytest.fixture(scope="module")
def page(found):
    return Decision(asked=found)


def test_a_study_hands_on_a_whole_plan_by_id_or_label_with_its_calibration(outputs):
    """02 to 07: the seconds of the forecast's constant phase are those of plans.json to the last
    digit.
    """
    known, study = replace(default(PLAN.cluster), matmul=0.5), Study.create("handed")
    other = replace(PLAN, label="second", topology=replace(PLAN.topology, mbs=1))
    entries = [p.to_json() | {"id": p.id} | predict(p, known).beside() for p in (PLAN, other)]
    apart = [replace(PLAN, label="apart").to_json()]
    study.save("plans.json", {"plans": entries, "risky": apart}, "02_topology")
    assert study_plan(study, "apart")[0].label == "apart"
    for name, plan in (("", PLAN), (PLAN.id, PLAN), (other.id, other), ("second", other)):
        chosen, used, source = study_plan(study, name)
        assert chosen == plan and used == known and source["made_by"]["notebook"] == "02_topology"
        predicted = predict(plan, known).to_json()
        assert forecast(chosen, calibration=used, runs=100).record["prediction"] == predicted
    with pytest.raises(ValueError, match=r"^plan=.*plans.json:third: .* one of that id or label$"):
        study_plan(study, "third")


def test_a_page_of_plans_that_were_written_again_since_is_stale(outputs, found):
    study = Study.create("stale")
    study.save("plans.json", {"plans": [PLAN.to_json() | {"id": PLAN.id}]}, "02_topology")
    _, _, source = study_plan(study)
    study.save("calendar.json", calendar_record(found, source), "07_calendar")
    assert not decide(study).is_stale and PLAN.id in decide(study).notes()
    study.save("plans.json", {"plans": []}, "02_topology")
    assert decide(study).is_stale
    assert "written again" in decide(study).reasons[0], "next to the verdict"


def test_the_page_forecasts_what_07_forecast_with_every_option_that_was_given(outputs, tmp_path):
    """To the last digit: rates, constants and limits travel in calendar.json, as JSON."""
    given = {
        "failures_per_node_year": 4.0,
        "job_hours": 10.0,
        "seed": 3,
    }
    known = replace(default(PLAN.cluster), matmul=0.5)
    made = forecast(PLAN, **ASKED, **given, calibration=known, deadline="2027-09-01")
    study = Study.create("handed-on")
    study.save(
        "calendar.json", calendar_record(made, {"file": "plan.json", "made_by": {}}), "07_calendar"
    )
    again = decide(study).asked
    assert again.request.kept() == made.request.kept() and again.request.calibration == known
    assert (
        again.to_json() == made.to_json() and again.to_json() != forecast(PLAN, **ASKED).to_json()
    )


def test_every_figure_of_the_verdict_is_of_the_plan_that_it_names(found):
    """Of a slow plan another topology is recommended: date, cost and memory are those of a forecast
    of that plan.
    """
    slow = replace(PLAN, topology=replace(PLAN.topology, tp=8, pp=12, dp=4, mbs=1))
    page = Decision(asked=forecast(slow, **ASKED))
    advised, chosen = page.recommendation, page.forecast.request
    assert advised["verdict"] == CHANGED and advised["figures"]["oom_probability"] <= SAFE
    own = forecast(chosen.plan, **ASKED)
    assert advised["figures"] == own.figures() != page.asked.figures()
    assert predict(chosen.plan).memory_bytes / 2**30 == pytest.approx(
        advised["figures"]["memory_gib"]
    )
    for name in ("topology", "done by", "memory"):
        assert own.facts()[name] in page.verdict(), name
    columns = page.columns().to_frame().set_index("")
    columns.columns = [head.partition(",")[0] for head in columns]  # one for each plan
    assert [*columns][:2] == ["recommended", "as asked"], "which a phone shows first"
    assert (
        columns.loc["GPU-hours", "recommended"]
        == own.facts()["GPU-hours"]
        != columns.loc["GPU-hours", "as asked"]
    )


CHANGED, REFUSED = "Start, with one change", "Do not start it as planned"


def decided(**asked):
    return Decision(asked=forecast(PLAN, **{**ASKED, **asked}))


@pytest.mark.parametrize(
    ("days", "hours", "verdict", "reason"),
    [
        (400, 3e6, CHANGED, ""),
        (60, None, REFUSED, "misses the deadline"),
        (None, 5e5, REFUSED, "overruns the alloc"),
    ],
)
def test_a_run_that_no_topology_ends_within_its_limits_is_not_to_start(
    days, hours, verdict, reason
):
    page = decided(deadline=days and str(date(2027, 1, 1) + timedelta(days=days)), allocation=hours)
    assert page.recommendation["verdict"] == verdict
    assert bool(page.recommendation["figures"]) is (verdict != REFUSED)
    assert any(reason in line for line in page.recommendation["reasons"])
    assert ("Do not start" in page.verdict()) is (verdict == REFUSED)


def test_the_plan_that_is_recommended_is_recommended_where_it_is_asked_for(page):
    """And each number has its interval around it."""
    again = Decision(asked=page.forecast)
    assert page.recommendation["verdict"] == CHANGED and again.recommendation["verdict"] == "Start"
    figures = again.recommendation["figures"]
    for name in ("days", "gpu_hours", "money"):
        assert figures[f"{name}_p05"] < figures[f"{name}_p50"] < figures[f"{name}_p95"], name
    assert figures["sec_lo"] < figures["sec_per_it"] < figures["sec_hi"]
    assert figures["money_p50"] == 2.0 * figures["gpu_hours_p50"]


def test_a_plan_that_may_run_out_of_memory_gives_way_and_the_page_says_so():
    """A 200B model on 384 GPUs, on the fastest plan that a search lists apart."""
    plan = replace(
        PLAN,
        topology=replace(PLAN.topology, recompute="none", attention="fused", mbs=2),
        engine="megatron",
    )
    t = plan.topology
    asked = {"precision": t.precision, "gpus": t.gpus, "gbs": t.gbs, "engine": plan.engine}
    kept = {"attention": "fused", "recompute": "none"}
    fast = search(plan.shape, plan.cluster, **asked, **kept).risky[0].plan
    page = Decision(asked=forecast(fast, **{**ASKED, "ramp": ""}))
    assert page.recommendation["verdict"] == CHANGED and page.chosen is not page.plan
    assert not page.forecast.request.prediction.is_risky
    risk = chance(predict(fast).oom_probability)
    assert any(
        "the plan asked for" in line and risk in line for line in page.recommendation["reasons"]
    )


def test_what_ifs_are_forecasts_of_what_they_name(found):
    """By their laws: tokens and seconds scale the work, a later start moves the end, fewer GPUs
    take longer.
    """
    frame = what_ifs(found).to_frame().set_index("case")
    base, ideal = found.figures(), found.record["ideal"]["gpu_hours"]
    few, tokens, late, failures, slow = frame.to_dict("records")
    assert few["gpus"] == 256 and 1.4 < few["days_p50"] / base["days_p50"] < 1.7
    assert tokens["gpu_hours_p50"] / base["gpu_hours_p50"] == pytest.approx(1.3, rel=0.03)
    assert slow["gpu_hours_p50"] - base["gpu_hours_p50"] == pytest.approx(0.102 * ideal, rel=0.15)
    assert (
        failures["days_p95"] > base["days_p95"]
        and failures["gpu_hours_p50"] > base["gpu_hours_p50"]
    )
    assert (
        late["days_p50"] == base["days_p50"] and late["p_miss_deadline"] >= base["p_miss_deadline"]
    )


SMALL = "--shape 24,2048,16,2048,50304 --cluster jz-v100-32g --gpus 32 --gbs 512"
RUN = "--tokens 30B --start 2027-01-04 --deadline 2027-03-31 --price 2 --spare-nodes 0 --runs 200"


@pytest.mark.slow
def test_the_verdict_without_notebooks_is_that_of_the_page(outputs, capsys, monkeypatch):
    words = f"decide {SMALL} {RUN} --if tokens=+60% --study s --json".split()
    code = main(words)
    page = json.loads(capsys.readouterr().out)
    assert page.pop("page") == str(Study("s").folder / "08_decision.html")
    for name in ("02_topology", "07_calendar", "08_decision"):
        assert (Study("s").folder / f"{name}.html").is_file()
    monkeypatch.setattr(commands, "find_spec", lambda name: None)
    assert main(words) == code == 0
    alone = json.loads(capsys.readouterr().out)
    assert "pip install" in alone.pop("page")
    for name in ("headline", "recommendation", "cases", "plan_id"):
        assert alone[name] == page[name], name
    cases = {case["case"]: case for case in page["cases"]}
    days = [cases[name]["days_p50"] for name in ("tokens=+60%", "tokens=+30%")]
    assert days[0] > days[1] > cases["the plan 10 % slower"]["days_p50"]
