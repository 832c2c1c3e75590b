"""Figures of a forecast: the fan of dates, the causes of cost, and the jobs."""

import json
from datetime import date

import pytest
from support import REPOSITORY

from trilane.config.plan import read_plan
from trilane.forecasting.decision import Decision
from trilane.forecasting.forecast import forecast
from trilane.forecasting.request import Capacity, CapacityStep
from trilane.report.plots.forecast import causes, fan, gantt

PLAN = read_plan(REPOSITORY / "docs/plan-176b.json")
ASKED = {"tokens": 341e9, "ramp": "192,16,9765625", "start": "2027-01-01", "runs": 500}


def capacity(*days):
    return Capacity(steps=tuple(CapacityStep(first_day=date.fromisoformat(day), gpus=gpus) for day, gpus in days))


@pytest.fixture(scope="module")
def found():
    return forecast(PLAN, **ASKED, deadline="2027-05-01", allocation=1.2e6)


def rows(chart):
    """Every row of data in a specification."""
    parts = [part for name in ("concat", "layer") for part in chart.get(name, [])]
    return [*chart.get("data", {}).get("values", []), *(row for part in parts for row in rows(part))]


def test_the_fan_has_the_dates_of_each_quantile_and_draws_the_deadline(found):
    drawn = rows(fan(found).spec)
    last = [row for row in drawn if "half" in row][-1]
    finish = {name: day[:10] for name, day in found.record["finish"].items()}
    assert last["median"] == finish["p50"] and last["nine"] == f"{finish['p05']} to {finish['p95']}"
    assert last["tokens"] == pytest.approx(found.request.samples * PLAN.shape.seq_length / 1e9, rel=1e-4)
    assert [row["deadline"] for row in drawn if "deadline" in row] == ["2027-05-01"]
    page = Decision(record=json.loads(json.dumps(found.record)))
    assert rows(fan(page).spec) == drawn, "08 draws it of calendar.json"


def test_every_cause_of_cost_is_drawn_with_what_helps_and_the_allocation(found):
    drawn = rows(causes(found).spec)
    of = {row["cause"]: row for row in drawn if "cause" in row}
    spent = sum(row["hours"] for row in of.values())
    assert spent == pytest.approx(found.outcomes.gpu_s.mean() / 3600 - found.gpu_hours_by_cause["iterations"], rel=1e-3)
    assert "What helps: spare nodes" in of["node failure"]["card"].replace("\n", " ")
    assert of["outage of the machine"]["hours"] == 0 < of["outage of the machine"]["mean"], "days, and no GPU-hours"
    assert [row["allocation"] for row in drawn if "allocation" in row] == [1_200_000]


def test_each_restart_of_the_calendar_has_its_cause_and_its_iterations():
    """A capacity that grows, ends for a week and comes back."""
    days = (("2027-01-01", 128), ("2027-01-20", 384), ("2027-02-10", 0), ("2027-02-17", 384))
    made = forecast(PLAN, **{**ASKED, "ramp": "512,512,0", "runs": 100}, capacity=capacity(*days))
    jobs = list({row["number"]: row for row in rows(gantt(made).spec) if "card" in row}.values())
    assert jobs[0]["cause"] == "starts the run" and jobs[0]["iterations"].startswith("about 1 to ")
    assert "the capacity changed" in jobs[1]["cause"] and "dp" in jobs[1]["cause"]
    assert "nothing could run for 7 days" in jobs[2]["cause"] and jobs[1]["dates"] == "2027-01-20 to 2027-02-10"
