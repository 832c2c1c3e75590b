"""The boundary between works and hangs is found, in few short jobs."""

from dataclasses import replace
from pathlib import Path

import pytest
from support import small_cluster, small_plan

from trilane.config.plan import Plan
from trilane.workspace.status import known_status
from trilane_diagnose.bisection import bisect, changed, local_runner, values
from trilane_diagnose.hang import diagnose_hang

PLAN = small_plan(train_iters=100, dp=4, gbs=64)
SHAPE = replace(PLAN.shape, num_layers=40, hidden_size=256)
PLAN = replace(PLAN, shape=SHAPE, cluster=small_cluster())
JOBS = {2: [1, 21, 11, 6, 4, 3, 2], 40: [1, 21, 31, 36, 38, 39]}


@pytest.mark.parametrize("boundary", JOBS)
def test_a_planted_boundary_in_layers_is_found_in_few_jobs(boundary: int):
    """First the plan itself, then the smallest, then the middle of what is left."""

    def run(plan: Plan) -> str:
        return "hang" if plan.shape.num_layers >= boundary else "completed"

    report = bisect(PLAN, ("layers",), run)
    (found,) = report.boundaries
    assert (found.works, found.hangs) == (boundary - 1, boundary)
    tried = [(trial.axis, trial.value) for trial in report.trials]
    assert tried == [("plan", 0), *(("layers", layers) for layers in JOBS[boundary])]


def test_only_valid_plans_are_tried_and_replicas_keep_their_share_of_the_batch():
    pipeline = small_plan(pp=2, gbs=8)
    pipeline = replace(pipeline, shape=replace(pipeline.shape, num_layers=6))
    assert values(pipeline, "layers") == [2, 4, 6]
    fewer = changed(PLAN, "dp", 3)
    assert (fewer.topology.gbs, fewer.run.train_iters) == (48, 5)


@pytest.mark.parametrize(
    ("status", "message"), [("completed", "does not hang"), ("crashed", "fix that first")]
)
def test_a_plan_that_does_not_hang_is_refused(status: str, message: str):
    with pytest.raises(ValueError, match=message):
        bisect(PLAN, ("layers",), lambda plan: status)


@pytest.mark.slow
@pytest.mark.usefixtures("uncounted_processes")
def test_real_jobs_find_that_two_replicas_hang(data, tmp_path, monkeypatch):
    """Rank 1, which a single replica does not have, holds Python's lock from iteration 2 on, and is
    named.
    """
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "planted"))
    monkeypatch.setenv("TRILANE_PLANT", "lock-held 1 2")
    plan = small_plan(train_iters=4, dp=2, gbs=8)
    run = replace(plan.run, hang_timeout_s=5.0)
    plan = replace(plan, run=run, data=replace(plan.data, folder=str(data)))
    report = bisect(plan, ("dp",), local_runner(tmp_path / "jobs", 300.0))
    assert report.summary().splitlines()[-1] == "dp: works at 1, hangs at 2"
    assert [trial.status for trial in report.trials] == ["hang", "completed"]
    folders = [path.parent for path in tmp_path.rglob("status.json")]
    (hung,) = [folder for folder in folders if known_status(folder).status == "hang"]
    assert known_status(hung).rank == 1 and 1 in diagnose_hang(hung).suspects
