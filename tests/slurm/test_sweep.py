"""Sweeps: one array for each shape of a job; runs larger than one that ran out of memory are pruned."""

import json
from pathlib import Path

import pytest
from slurm_cluster import REQUEST, SITE, plan

from trilane.slurm import jobs, sweep
from trilane.slurm.attempt import begin
from trilane.utils.validation import to_mapping
from trilane.workspace.status import RunStatus, read_status, write_status


def test_who_needs_more_than_a_run_that_ran_out_is_pruned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [plan(f"mbs{mbs}", tmp_path / "data", nodes=1, dp=1, mbs=mbs, gbs=8) for mbs in (1, 2, 4)]
    folder = tmp_path / "sweep"
    predicted = [{**p.to_json(), "prediction": {"memory_bytes": p.topology.mbs * 2**30}} for p in plans]
    small, middle, large = sweep.create(folder, predicted, SITE, REQUEST)
    ran_out = RunStatus(status="OOM", evidence="CUDA out of memory", rank=0, exit_code=1, seconds=1.0)
    write_status(middle, ran_out)
    env = {"TRILANE_SWEEP": str(folder)}
    assert begin(small, env) == "go: from the beginning"
    assert begin(large, env) == "stop: pruned: predicted 4.00 GiB, and mbs2 ran out with 2.00 GiB"
    assert read_status(large).status == "pruned"
    assert [job.status for job in jobs.job_status([large, middle])] == ["pruned", "OOM"]
    assert sweep.failures(folder) == []


def test_plans_of_different_sizes_become_one_array_a_size(tmp_path: Path) -> None:
    sizes = {"half": (1, 1), "node": (1, 2), "two": (2, 4), "other": (2, 4)}
    plans = [plan(label, tmp_path / "d", nodes=n, dp=dp, gbs=16).to_json() for label, (n, dp) in sizes.items()]
    sweep.create(tmp_path / "sweep", plans, SITE, REQUEST)
    scripts = {path.name: path.read_text() for path in (tmp_path / "sweep").glob("*.sbatch")}
    arrays = {name: next(line for line in text.splitlines() if "--array" in line) for name, text in scripts.items()}
    wanted = {"1x1": "1", "1x2": "2", "2x2": "3,4"}
    assert arrays == {f"sweep-{shape}.sbatch": f"#SBATCH --array={lines}%4" for shape, lines in wanted.items()}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", r"^plans=.*: must be a list of plans"),
        ("[]", r"^plans=.*: must be a list of plans"),
        ('[{"label": "x"}]', r"^plan.shape=missing: is required$"),
        ("[", r"^plans=.*: not JSON"),
    ],
)
def test_a_bad_table_of_plans_is_one_line(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "plans.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        sweep.create(tmp_path / "sweep", sweep.read_plans(tmp_path / "plans.json"), SITE, REQUEST)


def test_the_ranking_of_02_is_a_table_of_plans(tmp_path: Path) -> None:
    p = plan("one", tmp_path / "d", nodes=1)
    ranked = {"id": p.id, **p.to_json(), "prediction": {"memory_bytes": 1.0}}
    found = {"plans": [ranked], "risky": [], "refused": []}
    (tmp_path / "plans.json").write_text(json.dumps(found))
    (made,) = sweep.create(tmp_path / "sweep", sweep.read_plans(tmp_path / "plans.json"), SITE, REQUEST)
    assert json.loads((made / "plan.json").read_text())["topology"] == to_mapping(p.topology)


def test_nothing_that_exists_is_swept_over(tmp_path: Path) -> None:
    plans = [plan("one", tmp_path / "d", nodes=1).to_json()]
    with pytest.raises(ValueError, match=r"^label=one: must be unique in a sweep$"):
        sweep.create(tmp_path / "sweep", plans * 2, SITE, REQUEST)
    sweep.create(tmp_path / "sweep", plans, SITE, REQUEST)
    with pytest.raises(ValueError, match=r"^sweep=.*: holds a sweep already; take a new folder$"):
        sweep.create(tmp_path / "sweep", plans, SITE, REQUEST)
    with pytest.raises(ValueError, match=r"^sweep=.*: is not the folder of a sweep$"):
        sweep.submit(tmp_path, SITE, 1)
