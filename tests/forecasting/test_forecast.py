"""The calendar: dates, GPU-hours and risks, against published laws, hand counts and each other."""

import dataclasses
import json
import math
from datetime import date, timedelta
from itertools import pairwise

import numpy as np
import pytest

from trilane.cli.app import main
from trilane.config.batch_rampup import parse_ramp
from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.costmodel import shipped
from trilane.forecasting.capacity import FOREVER, Capacity, CapacityStep, CapacityWindow, capacity_of, constant
from trilane.forecasting.failures import (
    NODE_YEAR_S,
    FailureModel,
    Interruption,
    daly_interval_s,
    wait_for_node_s,
    young_interval_s,
)
from trilane.forecasting.forecast import forecast
from trilane.forecasting.request import ForecastRequest, Price, forecast_request
from trilane.forecasting.simulation import Simulation, Stretch, Uncertainty
from trilane.forecasting.timeline import schedules_of, stretches_of

A100 = cluster("jz-a100-80g")
K = shipped.default(A100)
BF16 = {"zero": 1, "recompute": "full", "precision": "bf16", "attention": "scores", "fp32_gradients": True}
TOPOLOGY = Topology(tp=4, pp=12, dp=8, mbs=2, gbs=2048, partition="type:transformer|embedding", **BF16)
SHAPE = parse_shape("70,14336,112,2048,250880")
PLAN = Plan(label="p176", shape=SHAPE, cluster=A100, topology=TOPOLOGY, engine="deepspeed-3d")
START, HOUR, DAY, DAY_LONG = date(2027, 1, 1), 3600.0, 86400.0, timedelta(days=1)
CALM = FailureModel(
    stops=(), startup_s=0, job_hours=1e9, evaluation_iters=0, checkpoint_s=1e12, slowdown=1, slowdown_spread=0
)
SURE = dataclasses.replace(K, half_width=1e-9)
RAMP = "192,16,9765625"


def request(**changes):
    given = {"plan": PLAN, "calibration": K, "tokens": 341e9, "ramp": parse_ramp(RAMP), "start": START, "runs": 2000}
    return ForecastRequest(**{**given, "capacity": None, **changes})


def work_days(found):
    """Days of the iterations on the first window's schedule."""
    return sum(step.phase.iterations * step.choice.seconds for step in found.schedules[0][1]) / DAY


def one_stretch(seconds, gpus=8.0, nodes=1.0):
    window = CapacityWindow(start_s=0, end_s=FOREVER, gpus=int(gpus), shared=False)
    return Stretch(window=window, seconds=np.array([seconds]), gpus=np.array([gpus]), nodes=np.array([nodes]))


def daly_wall_s(work_s: float, interval_s: float, save_s: float, mtbf_s: float, restart_s: float) -> float:
    """Expected seconds of `work_s` with a checkpoint after every `interval_s` of work and interruptions at random.

        M e^(R/M) (e^((t + d)/M) - 1) W / t            Daly 2006, equation 20

    Exact where stops come at a constant rate, also during restart and save.
    """
    M = mtbf_s
    return M * math.exp(restart_s / M) * (math.exp((interval_s + save_s) / M) - 1) * work_s / interval_s


@pytest.mark.parametrize(
    ("mtbf", "interval", "save", "restart"), [(20, 1.5, 60, 600), (5, 0.7, 60, 600), (2, 0.3, 30, 300)]
)
def test_simulated_runs_take_as_long_on_average_as_by_dalys_formula(mtbf, interval, save, restart):
    """Daly 2006, equation 20, exact for stops at a constant rate (the simulation leaves out those during a restart)."""
    stops = (Interruption(name="stop", per_year=NODE_YEAR_S / (mtbf * HOUR)),)
    risks = dataclasses.replace(CALM, stops=stops, startup_s=restart)
    shares, tau = {"saving": save / (interval * HOUR)}, interval * HOUR
    sure = Uncertainty(common=0, independent=0)
    many = Simulation(np.array([0]), sure, risks, shares, tau, 4000, np.random.default_rng(1))
    found = many.run([one_stretch(2000 * HOUR)])
    expected = daly_wall_s(2000 * HOUR, tau, save, mtbf * HOUR, restart)
    assert found.wall_s.mean() == pytest.approx(expected, rel=0.006)


def test_dalys_interval_is_nearly_the_best_and_youngs_for_short_saves():
    """Daly 2006: the optimum of equation 20; for d << M Young's sqrt(2 d M)."""
    d, M = 60.0, 20 * HOUR
    best = daly_interval_s(d, M)
    assert best == pytest.approx(young_interval_s(d, M), rel=0.03)
    costs = [daly_wall_s(1e6, best * f, d, M, 600) for f in (0.7, 1.0, 1.4)]
    assert costs[1] == min(costs)
    assert daly_interval_s(10 * HOUR, HOUR) == HOUR


def test_a_spare_node_shortens_the_wait_and_none_means_waiting_for_the_repair():
    waits = [wait_for_node_s(48, 10, 24, spares) for spares in (0, 1, 2, 4)]
    assert waits[0] == pytest.approx(DAY) and waits == sorted(waits, reverse=True) and waits[3] < 0.1 * DAY
    assert wait_for_node_s(48, 10, 24, 10**9) == pytest.approx(0) == wait_for_node_s(48, 1e5, 24, 10**9)
    assert wait_for_node_s(48, 1e5, 24, 1000) == pytest.approx(DAY / 1001)


def test_without_risk_and_doubt_the_run_takes_its_iterations_and_nothing_else():
    found = forecast(request(risks=CALM, calibration=SURE))
    assert found.days(0.05) == pytest.approx(found.days(0.95), rel=1e-6)
    assert found.days(0.5) == pytest.approx(work_days(found), rel=1e-6)
    assert found.gpu_hours(0.5) == pytest.approx(found.days(0.5) * 24 * 384, rel=1e-6)
    assert sum(p.iterations for p in found.phases) == parse_ramp(RAMP).iterations(request().samples, 2048)


def test_ramp_days_are_each_batch_sizes_predicted_seconds_times_its_iterations():
    from trilane.costmodel.iteration import iteration_time

    by_hand = sum(
        phase.iterations * iteration_time(SHAPE, dataclasses.replace(TOPOLOGY, gbs=phase.gbs), A100, K).total
        for phase in parse_ramp(RAMP).phases(2048)
    )
    assert forecast(request(runs=100)).ramp_days == pytest.approx(by_hand / DAY)


def test_ramp_days_of_a_run_that_ends_inside_its_ramp_are_those_of_the_whole_run():
    found = forecast(request(tokens=100e9, ramp=parse_ramp("1024,1024,100000000"), risks=CALM, calibration=SURE))
    assert len(found.phases) == found.ramp_phases == 1
    assert found.ramp_days == pytest.approx(found.days(0.5), rel=1e-6)
    ramp = found.to_json()["ramp"]
    assert ramp["days_interval"] == pytest.approx([ramp["days"]] * 2, rel=1e-6)


def test_days_on_which_nothing_can_run_are_no_days_of_the_ramp():
    steps = [(date(2027, 1, 1), 384), (date(2027, 1, 5), 0), (date(2027, 2, 5), 384)]
    capacity = Capacity(steps=tuple(CapacityStep(first_day=d, gpus=n) for d, n in steps))
    plain, late = forecast(request(runs=100)), forecast(request(runs=100, capacity=capacity))
    assert late.ramp_days == pytest.approx(plain.ramp_days, rel=1e-6) and plain.ramp_days > 4
    assert late.ideal.wall_s[0] == pytest.approx(plain.ideal.wall_s[0] + 31 * DAY)


def test_a_calibrations_interval_alone_becomes_the_interval_of_the_days():
    """One batch size, nothing else uncertain: the 5 and 95 % quantiles are the calibration's own factors."""
    found = forecast(request(risks=dataclasses.replace(CALM, common=1.0), ramp=parse_ramp("2048,1,0"), runs=10_000))
    factors = [found.days(q) / work_days(found) for q in (0.05, 0.95)]
    assert np.log(factors) == pytest.approx([-K.half_width, K.half_width], rel=0.06)


def test_the_sooner_the_deadline_and_the_smaller_the_allocation_the_likelier_they_are_missed():
    found = forecast(request())
    last = found.finish(0.5).date()
    at = [
        dataclasses.replace(found, request=request(deadline=day)).p_miss_deadline
        for day in (date(2027, 3, 1), last, date(2028, 1, 1))
    ]
    assert at[0] == 1 and 0.35 < at[1] < 0.65 and at[2] == 0
    hours = found.gpu_hours(0.95)
    over = [
        dataclasses.replace(found, request=request(allocation=limit)).p_overrun_allocation
        for limit in (hours / 2, hours, 2 * hours)
    ]
    assert over[0] == 1 and over[1] == pytest.approx(0.05, abs=0.005) and over[2] == 0
    assert found.p_miss_deadline is None and found.p_overrun_allocation is None


def test_more_failures_and_fewer_spares_cost_days():
    def days(rate, **changes):
        risks = dataclasses.replace(FailureModel(), **changes).with_failures(rate)
        return forecast(
            request(
                risks=risks,
            )
        ).days(0.5)

    assert days(0) < days(2) < days(20) < days(20, spare_nodes=0)


@pytest.mark.parametrize(
    ("gpus", "whole", "spares"),
    [(None, {}, 4), (416, {}, 4), (400, {}, 2), (384, {}, 0), (None, {"tp": 8, "pp": 4, "dp": 13, "gbs": 2080}, 0)],
)
def test_no_more_nodes_stand_by_than_the_jobs_leave_free(gpus, whole, spares):
    """jz-a100-80g has 52 nodes of 8: 384 GPUs leave 4 of them, 416 none, and a stated capacity is all there is."""
    plan = dataclasses.replace(PLAN, topology=dataclasses.replace(TOPOLOGY, **whole))
    capacity = None if gpus is None else constant(gpus, START)
    asked = request(plan=plan, capacity=capacity, ramp=parse_ramp(f"{plan.topology.gbs},1,0"), runs=100)
    found = forecast(asked)
    assert found.spare_nodes == spares
    assert next(a["value"] for a in found.to_json()["assumptions"] if a["what"] == "spare_nodes") == spares
    fewer = forecast(dataclasses.replace(asked, risks=FailureModel(spare_nodes=0)))
    assert (fewer.days(0.5) > found.days(0.5)) is (spares > 0)
    with pytest.raises(ValueError, match=rf"^spare_nodes={spares + 1}: must be at most {spares}, the nodes that"):
        forecast(dataclasses.replace(asked, risks=FailureModel(spare_nodes=spares + 1)))


def test_where_the_capacity_changes_each_window_has_the_spares_that_it_leaves():
    early = dataclasses.replace(request(runs=100), capacity=steps((START, 416, False), (date(2027, 2, 1), 384, False)))
    stretches, _ = stretches_of(early, schedules_of(early))
    assert [stretch.spare_nodes for stretch in stretches] == [4, 0] and forecast(early).spare_nodes == 0


def test_a_smaller_capacity_at_first_delays_the_end_and_costs_hardly_more_gpu_hours():
    """Prequel, 'Hardware': 144 GPUs until mid-February, then 384; GPU-hours are those of GPUs that work."""
    steps = [(date(2027, 1, 1), 144), (date(2027, 2, 15), 384)]
    capacity = Capacity(steps=tuple(CapacityStep(first_day=d, gpus=n) for d, n in steps))
    early, late = forecast(request(risks=CALM)), forecast(request(risks=CALM, capacity=capacity))
    assert 20 < late.days(0.5) - early.days(0.5) < 45
    assert late.gpu_hours(0.5) == pytest.approx(early.gpu_hours(0.5), rel=0.05)
    jobs = late.jobs()
    assert all(job.choice.gpus <= 144 for job in jobs if job.end_s < 45 * DAY)
    assert jobs[-1].choice.gpus == 384 and jobs[0].start_s == 0
    assert all(a.end_s == pytest.approx(b.start_s, abs=1) for a, b in pairwise(jobs))


@pytest.mark.parametrize(("few", "waits"), [(47, True), (48, True), (95, True), (96, False)])
def test_gpus_whose_memory_holds_no_replica_are_waited_through_like_too_few(few, waits):
    """48 GPUs are a replica by count; ZeRO 1 fits the card only from two replicas on."""
    found = forecast(request(capacity=steps((START, few, False), (date(2027, 2, 1), 384, False)), runs=100))
    assert (found.jobs()[0].start_s == 31 * DAY) is waits


def test_days_without_gpus_are_waited_for_and_cost_nothing():
    steps = (CapacityStep(first_day=date(2027, 1, 11), gpus=384),)
    late = forecast(request(risks=CALM, calibration=SURE, capacity=Capacity(steps=steps)))
    early = forecast(request(risks=CALM, calibration=SURE))
    assert late.days(0.5) == pytest.approx(early.days(0.5) + 10)
    assert late.gpu_hours(0.5) == pytest.approx(early.gpu_hours(0.5))


def steps(*pairs):
    return Capacity(steps=tuple(CapacityStep(first_day=d, gpus=n, shared=s) for d, n, s in pairs))


def test_a_job_whose_gpus_stay_goes_on_where_the_capacity_changes():
    """A step to as many GPUs, or to more than the plan takes, and to a shared machine."""
    same = steps((START, 384, False), (date(2027, 1, 20), 400, False), (date(2027, 2, 1), 384, True))
    risks = dataclasses.replace(CALM, startup_s=1200, queue_s=7200)
    plain, changed = forecast(request(risks=risks)), forecast(request(risks=risks, capacity=same))
    assert (
        changed.expected.wall_s == pytest.approx(plain.expected.wall_s)
        and len(changed.jobs()) == len(plain.jobs()) == 1
    )
    assert changed.expected.gpu_s == pytest.approx(plain.expected.gpu_s)


def test_a_change_of_gpus_costs_a_start_up_and_where_shared_the_queue_which_is_not_charged():
    fewer = steps((START, 96, False), (date(2027, 2, 1), 384, True))
    free = dataclasses.replace(CALM, startup_s=0, queue_s=0)
    begun, queued = dataclasses.replace(free, startup_s=1200.0), dataclasses.replace(free, queue_s=7200.0)
    base, start, wait = (forecast(request(risks=r, capacity=fewer, calibration=SURE)) for r in (free, begun, queued))
    assert start.lost_days["change of capacity"] * DAY == pytest.approx(1200)
    assert start.gpu_hours(0.5) - base.gpu_hours(0.5) == pytest.approx(384 * 1200 / 3600, rel=0.01)
    assert wait.lost_days["queue between jobs"] * DAY == pytest.approx(7200, rel=0.01)
    assert wait.gpu_hours(0.5) == pytest.approx(base.gpu_hours(0.5), abs=1)
    assert wait.days(0.5) - base.days(0.5) == pytest.approx(7200 / DAY, rel=0.01)


def test_a_shared_machine_makes_a_run_wait_but_not_pay():
    shared, alone = (forecast(request(capacity=constant(384, START, shared=s))) for s in (True, False))
    assert shared.days(0.5) > 1.05 * alone.days(0.5)
    assert shared.gpu_hours(0.5) == pytest.approx(alone.gpu_hours(0.5), rel=0.02)


@pytest.mark.parametrize(("shared", "share"), [(False, 0.0), (True, 0.1)])
def test_the_ends_of_jobs_are_queued_for_only_where_the_capacity_is_shared(shared, share):
    """Jobs of 20 hours, two hours in the queue between them."""
    asked = request(capacity=constant(384, START, shared=shared), runs=100)
    assert [s.queue_share for s in stretches_of(asked, schedules_of(asked))[0]] == pytest.approx([share])


def test_the_gpu_hours_of_all_causes_are_those_of_the_run():
    """With a long run that is 10 % slower than its benchmark, and interruptions."""
    risks = dataclasses.replace(FailureModel(), slowdown=1.1)
    found = forecast(request(risks=risks))
    parts = found.gpu_hours_by_cause
    assert sum(parts.values()) == pytest.approx(found.outcomes.gpu_s.mean() / HOUR)
    assert parts["slower than a benchmark"] == pytest.approx(0.1 * parts["iterations"])
    assert parts["node failure"] > 0 and "queue between jobs" not in parts


def test_a_run_that_ends_on_the_day_of_its_deadline_keeps_it():
    sure = request(risks=CALM, calibration=SURE, tokens=30e9, runs=100)
    last = forecast(sure).finish(0.5).date()
    missed = [forecast(dataclasses.replace(sure, deadline=day)).p_miss_deadline for day in (last, last - DAY_LONG)]
    assert missed == [0, 1]


def test_an_evaluation_is_the_forward_pass_of_an_iteration():
    """100 of 1000 iterations: a quarter of one with full recomputation (four passes), a third without."""
    assert request().shares["evaluation"] == pytest.approx(0.1 / 4)
    selective = dataclasses.replace(PLAN, topology=dataclasses.replace(TOPOLOGY, recompute="none"))
    assert request(plan=selective).shares["evaluation"] == pytest.approx(0.1 / 3)
    assert request(risks=FailureModel(startup_s=720)).shares["ends of jobs"] == pytest.approx(0.01)


def test_a_plan_that_evaluates_is_forecast_with_its_own_evaluations():
    own = dataclasses.replace(
        PLAN,
        data=dataclasses.replace(PLAN.data, split="949,50,1"),
        run=dataclasses.replace(PLAN.run, eval_interval=500, eval_iters=10),
    )
    found = [forecast_request(own, evaluation_iters=n).shares["evaluation"] for n in (None, 40)]
    assert found == pytest.approx([10 / 500 / 4, 40 / 1000 / 4])


def test_a_checkpoint_is_written_by_all_nodes_at_once():
    """176B parameters of 12 bytes through 48 nodes at 1 GB/s each: 44 s, as often as Daly says."""
    asked = request()
    assert asked.save_s == pytest.approx(12 * SHAPE.parameters / 48e9) == pytest.approx(44, abs=0.5)
    assert asked.interval_s == pytest.approx(daly_interval_s(asked.save_s, 1 / asked.risks.stops_per_s(48)))
    assert asked.shares["saving"] == pytest.approx(asked.save_s / asked.interval_s)
    one = dataclasses.replace(PLAN, topology=Topology(gbs=2048, **BF16), shape=parse_shape("24,2048,16,2048,50304"))
    alone = request(plan=one, ramp=parse_ramp("2048,1,0"))
    assert alone.save_s == pytest.approx(12 * one.shape.parameters / 1e9), "an eighth of a node writes as a node does"


@pytest.mark.parametrize("common", [0.0, 0.3, 1.0])
def test_the_parts_of_an_error_add_up_to_the_calibrations_interval_and_the_spread_of_long_runs(common):
    """Variances of ln(seconds): 90 % of a Gaussian lie within 1.645 deviations on each side."""
    parts = request(risks=FailureModel(common=common, slowdown_spread=0.02)).uncertainty
    whole = (K.half_width / 1.6449) ** 2
    assert parts.independent**2 == pytest.approx((1 - common) * whole)
    assert parts.common**2 + parts.independent**2 == pytest.approx(whole + 0.02**2)


def test_tokens_that_fill_no_whole_sequence_take_one_more():
    assert [request(tokens=1e9 + more).samples for more in (0, 1)] == [488282, 488282]
    assert [request(tokens=2048 * 10**6 + more).samples for more in (0, 1, 2048)] == [10**6, 10**6 + 1, 10**6 + 1]


def test_a_restart_of_the_schedule_is_paid_once_and_not_in_every_piece_of_its_phase():
    """The last phase is cut into pieces, so that its progress can be dated."""
    asked = request(runs=100)
    ((window, schedule),) = schedules_of(asked)
    late = (*schedule[:-1], dataclasses.replace(schedule[-1], pause_s=1000.0))
    plain, paused = (stretches_of(asked, ((window, s),))[0][0].seconds.sum() for s in (schedule, late))
    assert paused - plain == pytest.approx(1000)


def test_of_windows_with_different_room_the_fewest_spares_are_reported():
    tight = steps((START, 416, False), (date(2027, 2, 1), 392, False))
    assert forecast(request(runs=100, capacity=tight)).spare_nodes == 1


def test_two_steps_on_one_day_are_a_contradiction():
    with pytest.raises(ValueError, match=r"^capacity.from=2027-01-01: must come after 2027-01-01$"):
        steps((START, 8, False), (START, 16, False))


def test_the_same_seed_gives_the_same_answer():
    assert forecast(request()).days(0.95) == forecast(request()).days(0.95)
    assert forecast(request()).days(0.95) != forecast(request(seed=1)).days(0.95)


def test_batch_sizes_that_the_plan_cannot_divide_are_run_where_dp_and_mbs_may_follow():
    with pytest.raises(ValueError, match=r"^ramp=200, 216, 232, 248: every batch size must be a multiple of mbs x dp"):
        small = dataclasses.replace(PLAN, topology=dataclasses.replace(TOPOLOGY, gbs=256))
        request(plan=small, ramp=parse_ramp("192,8,100000"))
    found = forecast(request(ramp=parse_ramp("192,8,9765625"), day_worth=1e9, runs=100))
    assert all(s.phase.gbs % (s.choice.mbs * s.choice.dp) == 0 for s in found.schedules[0][1])


def test_energy_is_known_for_known_cards_and_money_where_a_price_is_given():
    """DGX A100 data sheet: 6.5 kW at most for 8 GPUs."""
    assert Price().energy_kwh(1000, "A100-80GB") == pytest.approx(1000 * 6.5 / 8 * 1.2)
    assert Price().energy_kwh(1000, "RTX-9") is None
    assert Price(watts_per_gpu=500).energy_kwh(1000, "RTX-9") == pytest.approx(600)
    assert Price().cost(10) is None and Price(per_gpu_hour=2.0).cost(10) == 20


@pytest.fixture
def plan_file(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN.to_json()))
    return str(path)


GIVEN = {"--tokens": "341e9", "--ramp": RAMP, "--start": "2027-01-01", "--runs": "500"}


def test_the_command_prints_dates_hours_and_risks(capsys, plan_file, tmp_path):
    capacity = tmp_path / "capacity.json"
    capacity.write_text('{"steps": [{"from": "2026-12-01", "gpus": 176}, {"from": "2027-02-15", "gpus": 416}]}')
    words = [word for pair in GIVEN.items() for word in pair]
    words += ["--capacity", str(capacity), "--allocation", "3e6", "--deadline", "2027-12-31", "--price", "2"]
    assert main(["plan", "calendar", plan_file, *words, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["ramp"]["iterations"] == sum(p.iterations for p in parse_ramp(RAMP).phases(2048)) == 12658
    assert values["days_interval"][0] < values["days"] < values["days_interval"][1]
    assert values["gpu_hours_interval"][0] < values["gpu_hours"] < values["gpu_hours_interval"][1]
    assert values["finish"]["p05"] < values["finish"]["p50"] < values["finish"]["p95"]
    assert values["p_miss_deadline"] == 0 and values["p_overrun_allocation"] == 0
    assert values["cost"] == pytest.approx(2 * values["gpu_hours"]) and values["energy_kwh"] > 0
    assert (
        "MISSING" in values["meaning"]["p_miss_deadline"] and "OVERRUNNING" in values["meaning"]["p_overrun_allocation"]
    )
    assert {a["what"] for a in values["assumptions"]} >= {"node failure", "slowdown"}
    assert main(["plan", "calendar", plan_file, *words]) == 0
    assert "deadline  2027-12-31: missed with probability 0.0%" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--ramp 192,8,9765625", "ramp=200, 216, 232,"),  # each failing step is named
        ("--ramp 192,8,9765625", "2008, 2024, 2040: every batch size must be a multiple of mbs x dp = 2 x 8"),
        ("--ramp 192,7,9765625", "ramp.increment=7: must divide the way from start=192 to gbs=2048"),
        ("--ramp 1,2", "ramp=1,2: must be three whole numbers: START,INCREMENT,SAMPLES"),
        (
            "--ramp 8,8,9765625 --adapt days --capacity CAPACITY",
            "capacity.gpus=48: the last step never ends, and no replica on so few GPUs fits the card's memory",
        ),
        ("--tokens 1000", "tokens=1000: below one batch of 393216"),
        ("--tokens -5", "tokens=-5: must be a number above zero"),
        ("--tokens nan", "tokens=nan: must be a number above zero"),
        ("--deadline 2026-12-31", "deadline=2026-12-31: must not be before the start, 2027-01-01"),
        ("--deadline soon", "deadline=soon: must be a date such as 2026-03-11"),
        ("--failures-per-node-year -1", "failures_per_node_year=-1.0: must be zero or a number above"),
        ("--failures-per-node-year 1e4", "failures-per-node-year=10000: such a run would lose ten times"),
        ("--allocation 0", "allocation=0.0: must be a number above zero"),
        ("--job-hours 0", "job_hours=0.0: must be a number above zero"),
        ("--spare-nodes -1", "spare_nodes=-1: must be a whole number of at least 0"),
        ("--spare-nodes 5", "spare_nodes=5: must be at most 4, the nodes that the jobs leave free"),
        ("--reshape", "reshape=True: needs --adapt days"),
        ("--day-worth -1", "day_worth=-1.0: must be zero or a number above"),
        ("--price -1", "price=-1.0: must be zero or a number above"),
        ("--checkpoint-minutes 6000", "checkpoint-minutes=6000: such a run would undo most of its work"),
        ("--ramp ²,1,3", "ramp=²,1,3: must be three whole numbers"),
        ("--checkpoint-minutes 0", "checkpoint_minutes=0.0: must be a number above zero"),
        ("--runs 3", "runs=3: must be a whole number of at least 100"),
        ("--runs 1000000000", "runs=1000000000: must be at most 214285, for the memory that 140 pieces"),
        ("--tokens 1e30", "tokens=1e+30: must be at most 1e+16"),
        ("--tokens 1e16", "would end after 9999: more GPUs, or fewer tokens"),
        ("--capacity nowhere.json", "capacity=nowhere.json: no such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, plan_file, tmp_path, given, message):
    small = tmp_path / "small.json"
    small.write_text('[{"from": "2027-01-01", "gpus": 48}]')
    words = given.replace("CAPACITY", str(small)).split()
    options = [word for pair in GIVEN.items() for word in pair]
    assert main(["plan", "calendar", plan_file, *options, *words]) == 2  # the last of an option counts
    errors = capsys.readouterr().err
    assert message in errors and errors.count("\n") == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"slowdown_spread": -1}, "slowdown_spread=-1.0: must be zero or a number above"),
        ({"stops": [{"name": "flood", "spread": 50}]}, "stop.spread=50.0: must be at most 3.0"),
        ({"stops": [{"name": "flood"}, {"name": "flood"}]}, "stop.name=flood: must be unique"),
        ({"stops": [{"name": "saving"}]}, "stop.name=saving: names another cause of the forecast"),
        ({"stops": [{"name": "flood", "per_year": 1e20}]}, "stop flood=1e+20: such a run would lose ten times"),
    ],
)
def test_risks_that_contradict_themselves_are_refused_by_name(capsys, plan_file, tmp_path, values, message):
    path = tmp_path / "risks.json"
    path.write_text(json.dumps(values))
    options = [word for pair in GIVEN.items() for word in pair]
    assert main(["plan", "calendar", plan_file, *options, "--risks", str(path)]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(f"trilane: {message}") and errors.count("\n") == 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "capacity=[]: needs at least one step"),
        ({"steps": []}, "capacity=[]: needs at least one step"),
        ({}, "capacity=[]: needs at least one step"),
        ({"stepz": []}, "capacity field=stepz: did you mean steps?"),
        (384, "capacity=384: must be a list of steps"),
        ([{"from": "2027-01-01"}], "capacity.gpus=missing: is required"),
        ([{"from": "2027-01-01", "gpu": 8}], "capacity field=gpu: did you mean gpus?"),
        ([{"from": "tomorrow", "gpus": 8}], "capacity.from=tomorrow: must be a date"),
        ([{"from": "2027-01-01", "gpus": -8}], "capacity.gpus=-8: must be a whole number of at least 0"),
        ([{"from": "2027-01-01", "gpus": 0}], "capacity.gpus=0: no step has any GPU"),
        ([{"from": "2027-01-01", "gpus": 8, "shared": "yes"}], "capacity.shared=yes: must be true or false"),
        ([{"from": "2027-01-02", "gpus": 8}, {"from": "2027-01-01", "gpus": 8}], "capacity.from=2027-01-01: must come"),
        ([7], "capacity step=7: must be an object"),
    ],
)
def test_a_capacity_that_is_none_is_refused(values, message):
    with pytest.raises(ValueError) as refused:
        capacity_of(values)
    assert str(refused.value).startswith(message)


def test_a_capacity_that_never_holds_a_replica_is_refused():
    with pytest.raises(
        ValueError, match=r"^capacity.gpus=40: one replica of tp4-pp12-dp8-mbs2-zero1-full-\S+ takes 48"
    ):
        request(capacity=constant(40, START))


def test_a_plan_far_from_all_measured_runs_has_a_wider_forecast():
    """The prediction's interval widens with the distance from measured rows (costmodel/predict.py)."""
    near = request()
    shape = dataclasses.replace(near.plan.shape, num_layers=4, hidden_size=512, num_attention_heads=4, seq_length=128)
    topology = dataclasses.replace(near.plan.topology, tp=1, pp=1, mbs=1, partition="uniform")
    far = dataclasses.replace(near, plan=dataclasses.replace(near.plan, shape=shape, topology=topology))
    assert far.uncertainty.common > 1.5 * near.uncertainty.common
