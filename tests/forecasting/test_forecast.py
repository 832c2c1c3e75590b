"""The calendar: dates, GPU-hours and risks, against published laws, hand counts and each other."""

import json
import math
from dataclasses import replace
from datetime import date

import numpy as np
import pytest

from trilane.cli.app import main
from trilane.config.batch_rampup import parse_ramp
from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.costmodel import shipped
from trilane.costmodel.columns import columns_of
from trilane.costmodel.iteration import iteration_time
from trilane.forecasting.failures import NODE_YEAR_S, FailureModel, Interruption, daly_interval_s
from trilane.forecasting.forecast import Forecast
from trilane.forecasting.request import ForecastRequest
from trilane.forecasting.simulation import Uncertainty, Work, simulate

A100 = cluster("jz-a100-80g")
K = shipped.default(A100)
BF16 = {
    "zero": 1,
    "recompute": "full",
    "precision": "bf16",
    "attention": "scores",
    "fp32_gradients": True,
}
TOPOLOGY = Topology(
    tp=4, pp=12, dp=8, mbs=2, gbs=2048, partition="type:transformer|embedding", **BF16
)
SHAPE = parse_shape("70,14336,112,2048,250880")
PLAN = Plan(label="p176", shape=SHAPE, cluster=A100, topology=TOPOLOGY, engine="deepspeed-3d")
HOUR, DAY = 3600.0, 86400.0
CALM = FailureModel(
    stops=(),
    startup_s=0,
    job_hours=1e9,
    evaluation_iters=0,
    checkpoint_s=1e12,
    slowdown=1,
    slowdown_spread=0,
)
SURE = {"risks": CALM, "calibration": replace(K, half_width=1e-9)}
RAMP, NO_RAMP = "192,16,9765625", "2048,1,1"


def request(**changes):
    given = {
        "plan": PLAN,
        "calibration": K,
        "tokens": 341e9,
        "ramp": RAMP,
        "start": "2027-01-01",
        "runs": 2000,
    }
    return ForecastRequest(**{**given, **changes})


def made(**changes):
    return Forecast(request=request(**changes))


@pytest.mark.parametrize(
    ("mtbf", "interval", "save", "restart"),
    [(20, 1.5, 60, 600), (5, 0.7, 60, 600), (2, 0.3, 30, 300)],
)
def test_simulated_runs_take_as_long_on_average_as_by_dalys_formula(mtbf, interval, save, restart):
    """M e^(R/M) (e^((t + d)/M) - 1) W / t: Daly 2006, equation 20, exact for stops at a constant
    rate (the simulation leaves out those during a restart). Lost work is charged.
    """
    stops = (Interruption(name="stop", per_year=NODE_YEAR_S / (mtbf * HOUR)),)
    risks, tau = replace(CALM, stops=stops, startup_s=restart), interval * HOUR
    work = Work(same=np.array([0]), seconds=np.array([2000 * HOUR]), gpus=8, nodes=1)
    sure, rng = Uncertainty(common=0, independent=0), np.random.default_rng(1)
    found = simulate(work, sure, risks, {"saving": save / tau}, tau, 4000, rng)
    M = mtbf * HOUR
    pieces = 2000 * HOUR / tau
    expected = M * math.exp(restart / M) * (math.exp((tau + save) / M) - 1) * pieces
    assert found.wall_s.mean() == pytest.approx(expected, rel=0.006)
    assert found.gpu_s == pytest.approx(8 * found.wall_s)


def test_ramp_days_are_each_batch_sizes_predicted_seconds_times_its_iterations():
    by_hand = sum(
        phase.iterations
        * iteration_time(columns_of(SHAPE, replace(TOPOLOGY, gbs=phase.gbs)), A100, K).total
        for phase in parse_ramp(RAMP).between(2048, 0, 10**9)[:-1]
    )
    assert made(runs=100).to_json()["ramp"]["days"] == pytest.approx(by_hand / DAY)


def test_without_risk_and_doubt_the_run_takes_its_iterations_and_nothing_else():
    found = made(**SURE)
    work = found.work_s / DAY
    assert [found.days(q) for q in (0.05, 0.5, 0.95)] == pytest.approx([work] * 3, rel=1e-6)
    assert found.gpu_hours(0.5) == pytest.approx(work * 24 * 384, rel=1e-6)
    assert sum(p.iterations for p in found.request.phases) == parse_ramp(RAMP).iterations(
        found.request.samples, 2048
    )


def test_gpus_that_share_sequences_are_counted_and_paid():
    t = replace(TOPOLOGY, cp=2, dp=4, attention="fused")
    found = made(
        plan=replace(PLAN, topology=t, engine="megatron"),
        ramp=NO_RAMP,
        calibration=None,
        runs=100,
        risks=CALM,
    )
    assert found.gpu_hours(0.5) == pytest.approx(24 * 384 * found.days(0.5))
    assert (
        found.figures()["gpus"] == 8 * found.work.nodes == 384
        and "cp2" in found.facts()["topology"]
    )


def test_the_sooner_the_deadline_and_the_smaller_the_allocation_the_likelier_they_are_missed():
    found = made()
    last, hours = found.finish(0.5).date(), found.gpu_hours(0.95)
    days = (date(2027, 3, 1), last, date(2028, 1, 1))
    missed = [made(deadline=day).to_json()["p_miss_deadline"] for day in days]
    over = [
        made(allocation=limit).to_json()["p_overrun_allocation"]
        for limit in (hours / 2, hours, 2 * hours)
    ]
    assert missed[0] == 1 and 0.35 < missed[1] < 0.65 and missed[2] == 0
    assert over[0] == 1 and over[1] == pytest.approx(0.05, abs=0.005) and over[2] == 0


@pytest.mark.parametrize(
    ("whole", "spares"), [({}, 4), ({"tp": 8, "pp": 4, "dp": 13, "gbs": 2080}, 0)]
)
def test_no_more_nodes_stand_by_than_the_jobs_leave_free(whole, spares):
    """jz-a100-80g has 52 nodes of 8: 384 GPUs leave 4 of them, 416 none."""
    plan = replace(PLAN, topology=replace(TOPOLOGY, **whole))
    asked = {"plan": plan, "ramp": f"{plan.topology.gbs},1,1", "runs": 100}
    assumed = {a["what"]: a for a in made(**asked).to_json()["assumptions"]}
    assert assumed["spare_nodes"]["value"] == spares


def test_an_evaluation_is_the_forward_pass_of_an_iteration():
    """100 of 1000 iterations, or those of the plan: a quarter of one with full recomputation, a
    third without.
    """
    assert request().shares["evaluation"] == pytest.approx(0.1 / 4)
    assert request(risks=FailureModel(startup_s=720)).shares["ends of jobs"] == pytest.approx(0.01)
    selective = replace(PLAN, topology=replace(TOPOLOGY, recompute="none"))
    assert request(plan=selective).shares["evaluation"] == pytest.approx(0.1 / 3)
    own = replace(
        PLAN,
        run=replace(PLAN.run, eval_interval=500, eval_iters=10),
        data=replace(PLAN.data, split="9,1,0"),
    )
    assert request(plan=own).shares["evaluation"] == pytest.approx(10 / 500 / 4)


def test_a_checkpoint_is_written_by_all_nodes_at_once():
    """176B parameters of 12 bytes through 48 nodes at 1 GB/s each: 44 s, as often as Daly says."""
    asked = request()
    save_s, interval_s = asked.saving
    assert save_s == pytest.approx(12 * SHAPE.parameters / 48e9) == pytest.approx(44, abs=0.5)
    assert interval_s == pytest.approx(daly_interval_s(save_s, 1 / asked.risks.stops_per_s(48)))
    assert asked.shares["saving"] == pytest.approx(save_s / interval_s)
    one = replace(
        PLAN, topology=Topology(gbs=2048, **BF16), shape=parse_shape("24,2048,16,2048,50304")
    )
    alone = request(plan=one, ramp=NO_RAMP).saving[0]
    assert alone == pytest.approx(12 * one.shape.parameters / 1e9), (
        "an eighth of a node writes as a node does"
    )


@pytest.fixture
def command(tmp_path, capsys):
    """The command on the plan; FILE holds these values."""
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN.to_json()))
    given = ["--tokens", "341e9", "--ramp", RAMP, "--start", "2027-01-01", "--runs", "500"]

    def run(words, values=None):
        (tmp_path / "x.json").write_text(json.dumps(values))
        text = words.replace("FILE", f"{tmp_path}/x.json")
        code = main(
            ["plan", "calendar", str(path), *given, *text.split()]
        )  # the last of an option counts
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            "--ramp 192,8,9765625",
            "ramp=200: every batch size must be a multiple of mbs x dp = 2 x 8",
        ),
        ("--tokens 1000", "tokens=1000: below one batch of 393216"),
        ("--tokens 1e16", "would end after 9999: more GPUs, or fewer tokens"),
        ("--deadline 2026-12-31", "deadline=2026-12-31: must not be before the start, 2027-01-01"),
        ("--deadline soon", "deadline=soon: must be a date such as 2026-03-11"),
        (
            "--checkpoint-minutes 6000",
            "undone: such a run would undo most of its work, or lose ten times it",
        ),
        ("--checkpoint-minutes 0", "checkpoint_minutes=0.0: must be above 0"),
        ("--spare-nodes 5", "spare_nodes=5: must be at most 4, the nodes that the jobs leave free"),
        ("--runs 1000000000", "runs=1000000000: must be at most 100000"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(command, given, message):
    code, _, errors = command(given)
    assert code == 2 and message in errors and errors.count("\n") == 1
