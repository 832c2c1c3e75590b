"""The boundary between works and hangs is found, in few short jobs."""

from dataclasses import replace
from pathlib import Path

import pytest
from support import small_cluster, small_plan

from trilane.config.plan import Plan
from trilane.diagnose.hang import diagnose_hang
from trilane.launch.bisection import bisect, changed, local_runner, values
from trilane.workspace.status import read_status

PLAN = small_plan(train_iters=100, dp=4, gbs=64)
PLAN = replace(PLAN, shape=replace(PLAN.shape, num_layers=40, hidden_size=256), cluster=small_cluster())


@pytest.mark.parametrize("boundary", [2, 3, 17, 39, 40])
def test_a_planted_boundary_in_layers_is_found_in_few_jobs(boundary: int) -> None:
    report = bisect(PLAN, ("layers",), lambda p: "hang" if p.shape.num_layers >= boundary else "completed")
    assert (report.boundaries[0].works, report.boundaries[0].hangs) == (boundary - 1, boundary)
    assert len(report.trials) <= 8


def test_every_axis_has_its_own_boundary() -> None:
    def hangs(plan: Plan) -> str:
        large = plan.shape.num_layers * plan.shape.hidden_size * plan.topology.dp >= 20_000
        return "timeout" if large else "completed"

    report = bisect(PLAN, ("layers", "hidden", "dp", "gbs"), hangs)
    boundaries = [str(boundary) for boundary in report.boundaries]
    assert boundaries[0] == "layers: works at 19, hangs at 20"
    assert boundaries[1] == "hidden: works at 124, hangs at 128"
    assert boundaries[2] == "dp: works at 1, hangs at 2"
    assert boundaries[3] == "gbs: hangs even at 8, the smallest that was tried"


def test_only_valid_plans_are_tried_and_replicas_keep_their_share_of_the_batch() -> None:
    pipeline = small_plan(pp=2, gbs=8)
    assert values(PLAN, "dp") == [1, 2, 3, 4]
    assert values(replace(pipeline, shape=replace(pipeline.shape, num_layers=6)), "layers") == [2, 4, 6]
    assert changed(PLAN, "dp", 3).topology.gbs == 48


@pytest.mark.parametrize(("status", "message"), [("completed", "does not hang"), ("crashed", "fix that first")])
def test_a_plan_that_does_not_hang_is_refused(status: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bisect(PLAN, ("layers",), lambda plan: status)


@pytest.mark.slow
@pytest.mark.usefixtures("uncounted_processes")
def test_real_jobs_find_that_two_replicas_hang(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1, which a single replica does not have, holds Python's lock from iteration 2 on, and is named."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "planted"))
    monkeypatch.setenv("TRILANE_PLANT", "lock-held 1 2")
    plan = small_plan(train_iters=4, dp=2, gbs=8)
    plan = replace(plan, run=replace(plan.run, hang_timeout_s=5.0), data=replace(plan.data, folder=str(data)))
    report = bisect(plan, ("dp",), local_runner(tmp_path / "jobs", 300.0))
    assert [str(b) for b in report.boundaries] == ["dp: works at 1, hangs at 2"]
    assert [t.status for t in report.trials] == ["hang", "completed"]
    (hung,) = [path.parent for path in tmp_path.rglob("status.json") if read_status(path.parent).status == "hang"]
    assert read_status(hung).rank == 1 and 1 in diagnose_hang(hung).suspects
