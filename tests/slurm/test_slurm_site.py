"""On a real SLURM: a site of one's own, one task for each process, a comment of one's own; a setup line that fails."""

from dataclasses import replace
from pathlib import Path

import pytest
from slurm_cluster import PATIENCE_S, REQUEST, SITE, Cluster, allow, ended, lead, pace, plan, says, send
from support import wait_until

from trilane.logs.run import read_log
from trilane.slurm import client, jobs, script
from trilane.slurm.sites import JobRequest, Site
from trilane.workspace import run_folder
from trilane.workspace.checkpoints import FOLDER, latest

OWN = replace(
    SITE,
    env={"FROM_SITE": "it's mine"},
    setup=('[[ $FROM_SITE == "it\'s mine" ]]', "export FROM_SETUP=1  # for the tasks"),
    srun=("--label",),
    sbatch={"nice": "5"},
    mem="0",
)


# In place of Apptainer, which is not installed here: notes its arguments, and runs what follows the image.
BOX = """#!/bin/bash
echo "$*" >>"${0%/*}/calls"
while [[ $1 != *.sif ]]; do shift; done
shift; IN_BOX=1 exec "$@"
"""


def boxed(root: Path) -> Site:
    """OWN with its tasks in a container."""
    (root / "image.sif").touch()
    (root / "apptainer").write_text(BOX)
    (root / "apptainer").chmod(0o755)
    setup = (*OWN.setup, f"PATH={root}:$PATH")
    return replace(OWN, setup=setup, container="apptainer", container_image=str(root / "image.sif"))


def written(root: Path, label: str, site: Site, request: JobRequest) -> Path:
    p = plan(label, root.parent / "data", iters=30)
    folder = root / label
    folder.mkdir()
    for name, text in script.files(p, site, request).items():
        (folder / name).write_text(text)
    return folder


def test_one_task_for_each_process_trains_saves_at_the_signal_and_is_found_by_its_name(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes of two tasks, in a container; the log has srun's labels."""
    request, site = replace(REQUEST, launcher="srun", comment="for Ada (2)"), boxed(tmp_path)
    pace(monkeypatch)
    folder = written(tmp_path, "own", site, request)
    allow(folder, 3)
    job = jobs.submit(folder, site, request)
    shown = client.call(["squeue", "-h", "-j", job, "-o", "%k|%j"]).strip()
    assert shown == f"for Ada (2)|{client.job_name(folder)}" and jobs.active_jobs(folder) == [job]
    wait_until(lambda: run_folder.iteration(folder) >= 3, PATIENCE_S, says(folder))
    send(job, "USR1")
    lead(folder, lambda: latest(folder / FOLDER) is not None, "checkpoint")
    allow(folder, 30)
    found = ended(folder)
    assert (found.state, found.status, found.iteration) == ("COMPLETED", "completed", 30), says(folder)
    log = read_log(folder / "run.log")
    assert len(log.iterations) == 30 and set(log.memory["rank"]) == {0, 1, 2, 3}
    assert "3:  [" in (folder / "run.log").read_text()
    calls = (tmp_path / "calls").read_text()
    box = (
        f"exec --nv --bind {folder} --pwd {folder} --bind {next((folder / 'code').iterdir())} {tmp_path}/image.sif bash"
    )
    assert calls.count(box) >= 4 and calls.count("exec python -m trilane.engine plan.json") == 4


def test_a_setup_line_that_fails_ends_the_job_with_its_number_text_and_code(cluster: Cluster, tmp_path: Path) -> None:
    site = replace(OWN, setup=("export A=1", "exit_with() { return $1; }", "exit_with 7 || exit_with 8", "touch late"))
    folder = written(tmp_path, "setup", site, REQUEST)
    job = jobs.submit(folder, site, REQUEST)
    found = ended(folder)
    message = "site test: setup line 3 ended with exit code 8: exit_with 7 || exit_with 8"
    assert (found.state, found.status, found.evidence) == ("FAILED", "crashed", f"slurm-{job}.out: {message}")
    assert not (folder / "late").exists() and not (folder / "run.log").exists()
