"""A sweep on a real SLURM: an array with a limit, each run's status, failures alone again, the larger ones pruned."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_cluster import PATIENCE_S, REQUEST, SITE, Cluster, losses, plan, says
from support import wait_until

from trilane.cli.app import main
from trilane.report import notebook
from trilane.slurm import client, jobs, sweep
from trilane.slurm.attempt import begin
from trilane.utils.validation import to_mapping
from trilane.workspace.status import RunStatus, read_status, write_status
from trilane.workspace.study import Study


def all_ended(folder: Path) -> list[jobs.JobStatus]:
    """The runs of a sweep once all have ended."""
    done = (*client.ENDED, client.FORGOTTEN)
    paths = sweep.members(folder)
    wait_until(
        lambda: all(j.state in done for j in jobs.job_status(paths)), PATIENCE_S, f"the sweep goes on: {says(folder)}"
    )
    return jobs.job_status(paths)


def test_of_three_runs_one_fails_and_runs_again_alone(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """One node and one process each; the third wants a corpus that is not there yet."""
    site = tmp_path / "test.json"
    site.write_text(json.dumps(to_mapping(SITE)))
    corpus = tmp_path / "corpus.txt"
    plans = [plan(f"mbs{mbs}", tmp_path.parent / "data", nodes=1, dp=1, mbs=mbs, gbs=8) for mbs in (1, 2, 4)]
    plans[2] = replace(plans[2], data=replace(plans[2].data, source=str(corpus)))
    (tmp_path / "plans.json").write_text(json.dumps({"plans": [p.to_json() for p in plans]}))
    folder = tmp_path / "sweep"
    command = ["--site", str(site), "--account", "xyz@a100", "--time-limit", "00:10:00", "--signal-s", "60", "--json"]
    assert (
        main(["slurm", "sweep", "create", str(tmp_path / "plans.json"), str(folder), *command, "--parallel", "2"]) == 0
    )
    assert main(["slurm", "sweep", "submit", str(folder), *command]) == 1  # the guard sees that the corpus is missing
    assert '"data"' in capsys.readouterr().out
    assert main(["slurm", "sweep", "submit", str(folder), *command, "--allow", "data"]) == 0
    arrays = json.loads(capsys.readouterr().out)["submitted"]
    assert "ArrayTaskThrottle=2" in client.call(["scontrol", "show", "job", arrays[0]])  # as created
    wait_until(lambda: any(j.state == "RUNNING" for j in jobs.job_status(sweep.members(folder))), 60, "running")
    assert sum(j.state == "RUNNING" for j in jobs.job_status(sweep.members(folder))) <= 2
    found = all_ended(folder)
    assert [j.status for j in found] == ["completed", "completed", "crashed"], says(folder)
    assert [j.id for j in found] == [f"{arrays[0]}_{n}" for n in (1, 2, 3)]
    corpus.write_text("to be or not to be, that is the question\n" * 40)
    again = sweep.rerun(folder, SITE, parallel=2)
    found = all_ended(folder)
    assert [j.id for j in found] == [f"{arrays[0]}_1", f"{arrays[0]}_2", f"{again[0]}_3"]
    assert [j.status for j in found] == ["completed"] * 3, says(folder)
    assert len({round(losses(path)[0], 3) for path in sweep.members(folder)[:2]}) == 1
    capsys.readouterr()
    assert main(["slurm", "sweep", "table", str(folder), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {(row["Run"], row["Notes"]) for row in rows} == {(f"mbs{mbs}", "completed") for mbs in (1, 2, 4)}
    assert sweep.rerun(folder, SITE, parallel=2) == []


def test_the_launch_notebook_submits_the_best_plan_of_the_search_and_shows_it_done(
    cluster: Cluster, outputs: Path, tmp_path: Path
) -> None:
    site = tmp_path / "test.json"
    site.write_text(json.dumps(to_mapping(SITE)))
    given = {"site": str(site), "submit": True, "account": "xyz@a100", "time_limit": "00:20:00", "watch_s": PATIENCE_S}
    small = {"runs": 1, "control": False, "train_iters": 4, "corpus": "mock"}
    study = Study.create("s")
    notebook.run_all(study, {**given, **small}, ["01_sizing", "02_topology", "03_launch"])
    (folder,) = (study.folder / "runs").iterdir()
    (job,) = jobs.job_status([folder])
    assert (job.state, job.status, job.iteration) == ("COMPLETED", "completed", 4), says(folder)
    page = (study.folder / "03_launch.html").read_text()
    assert f"job {job.id} COMPLETED" in page and "All 1 runs completed" in page


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
    shown = sweep.table(folder)
    assert dict(zip(shown["Run"], shown["Notes"], strict=True)) == {
        "mbs1": "not submitted",
        "mbs2": "OOM",
        "mbs4": "pruned",
    }


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
