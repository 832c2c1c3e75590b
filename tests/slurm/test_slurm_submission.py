"""On a real SLURM: submissions that are killed and race leave one job for one run, and of several jobs one begins."""

import sys
from pathlib import Path

import pytest
from slurm_cluster import REQUEST, SITE, Cluster
from support import REPOSITORY

from trilane.slurm import client, jobs, ledger

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
import submit_races


@pytest.mark.parametrize(
    "how",
    [
        "kill -9 $PPID",
        'kill -9 $PPID; sleep 0.3; "$real" "$@"',
        '"$real" "$@"; kill -9 $PPID',
        'setsid "$real" "$@" & kill -9 $PPID $$',
    ],
    ids=["before sbatch", "while sbatch asks", "before the answer", "with its sbatch"],
)
def test_a_killed_submission_leaves_one_job(
    how: str, cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "SETTLE_S", 2.0)
    folder = submit_races.held_run(tmp_path, "run")
    with submit_races.changed_sbatch(tmp_path, how):
        assert submit_races.together([lambda: jobs.submit(folder, SITE, REQUEST)]) == 0
    submit_races.together([lambda: jobs.submit(folder, SITE, REQUEST)])
    (job,) = submit_races.jobs_of(folder)
    assert ledger.job_ids(folder) == [job] == jobs.cancel([folder])


def test_submissions_and_jobs_at_once(cluster: Cluster, tmp_path: Path) -> None:
    for processes in (2, 4):
        trial = submit_races.race_trial(submit_races.held_run(tmp_path, f"submit-{processes}"), processes)
        assert len(trial.jobs) == trial.successes == 1 and trial.recorded == trial.jobs
    ids = submit_races.running_jobs(tmp_path, 3)
    for processes in (2, 3):
        trial = submit_races.begin_trial(submit_races.held_run(tmp_path, f"begin-{processes}"), ids[:processes])
        assert len(trial.jobs) == trial.successes == 1
    client.cancel(ids)
