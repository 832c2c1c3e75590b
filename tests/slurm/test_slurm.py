"""On a real SLURM: plans trained by jobs, chains and sweeps; signals, outages, killed submissions,
looks inside.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_cluster import (
    PATIENCE_S,
    REQUEST,
    SITE,
    allow,
    ended,
    lead,
    links,
    losses,
    one,
    one_process_a_node,
    pace,
    plan,
    run_folder,
    says,
    send,
    submit,
    submit_chain,
)
from support import REPOSITORY, plant_modules, wait_until
from test_script import PRESETS, recorded

from trilane.cli.app import main
from trilane.config.batch_rampup import Ramp
from trilane.config.plan import Plan
from trilane.launch import local
from trilane.logs.run import read_log
from trilane.slurm import chain, client, copies, jobs, script, study_runs
from trilane.slurm.preflight import REFUSAL, check_job
from trilane.utils.validation import to_mapping
from trilane.workspace import installation, ledger
from trilane.workspace import run as attempts
from trilane.workspace.checkpoints import FOLDER, latest

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
import submit_races

ASKED = [
    "--account",
    "xyz@a100",
    "--time-limit",
    "00:10:00",
    "--signal-s",
    "60",
    "--no-preflight",
    "--json",
]
# iterations, which a test lets the training begin one by one or many at once, to act in the middle
LONG = 30


@pytest.fixture
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The cluster's site as a file."""
    path = tmp_path_factory.mktemp("site") / "test.json"
    path.write_text(json.dumps(to_mapping(SITE)))
    return str(path)


def sleeping(folder: Path) -> Path:
    """The run folder with a script that sleeps instead of training."""
    text = (folder / "job.sbatch").read_text()
    sleep = "set -euo pipefail\nsrun --kill-on-bad-exit=1 bash -c 'trap \"touch save\" USR1; sleep 300'\n"
    (folder / "job.sbatch").write_text(text[: text.index("set -euo")] + sleep)
    return folder


def alone(p: Plan, root: Path) -> list[float]:
    """The losses of the same run on one process of this machine, from beginning to end without a
    break.
    """
    folder = run_folder(root, replace(p, label="alone", topology=replace(p.topology, dp=1)))
    assert local.train_local(folder, show_progress=False).status == "completed"
    return losses(folder)


def test_two_nodes_of_two_processes_train_to_the_end_with_the_code_that_was_submitted(
    cluster, tmp_path, monkeypatch
):
    """While the job waits the installed code is made to raise. The job inherits no variables but
    SLURM's own.
    """
    installed = tmp_path / "installed"
    packages = installation.packages()
    for package in packages:
        shutil.copytree(package, installed / package.name)
    monkeypatch.setattr(copies, "packages", lambda: [installed / p.name for p in packages])
    monkeypatch.setenv("PYTHONPATH", str(installed))
    request = replace(REQUEST, environment=sys.prefix)
    folder = run_folder(tmp_path, plan("two", tmp_path.parent / "data"), request)
    text = (folder / "job.sbatch").read_text()
    export = f"#SBATCH --export=NONE\n#SBATCH --hold\nexport PYTHONPATH={installed}\nset -"
    (folder / "job.sbatch").write_text(text.replace("set -", export, 1))
    job = submit(folder, SITE, REQUEST)
    (installed / "trilane/__init__.py").write_text(
        "raise ImportError('the installed code has changed')\n"
    )
    client.call(["scontrol", "release", job])
    found = ended(folder)
    assert (found.id, found.state, found.status) == (job, "COMPLETED", "completed"), says(folder)
    assert (found.iteration, found.iterations, found.nodes) == (4, 4, "jz-a100-[1-2]")
    assert len(losses(folder)) == 4 and losses(folder)[-1] < losses(folder)[0]
    assert [e["event"] for e in ledger.events(folder)] == [
        *("submitted", "started", "nodes", "ended")
    ]
    codes = {e["code"] for e in ledger.events(folder, "submitted", "started")}
    assert codes == {path.name for path in (folder / "code").iterdir()}
    wait_until(lambda: bool(client.past([job])), 60, "accounting")
    with pytest.raises(ValueError, match=r"^run folder=.*: holds a completed run; take a new one$"):
        submit(folder, SITE, REQUEST)


def test_sbatch_accepts_every_script_of_every_site_and_the_check_refuses_what_it_does_not(
    cluster, tmp_path
):
    """Of every site whose partitions and features this cluster has."""
    for name in [name for name in PRESETS if name.startswith(("generic", "jean-zay"))]:
        for file, text in recorded(name).items():
            if "everything" not in file:  # which names a reservation and nodes that are not here
                (tmp_path / file).write_text(text)
                client.test_only(tmp_path / file)
    p = plan("two", tmp_path.parent / "data")
    for wish, words in (
        ({"partition": "gpu_p4"}, "invalid partition name specified"),
        ({"account": "abc@a100"}, "invalid account or account/partition combination specified"),
        ({"exclude": "jz-a100-[1-51]"}, "requested node configuration is not available"),
    ):
        every = check_job(p, SITE, replace(REQUEST, **wish), attempts.Run(tmp_path))
        found = [f for f in every if f.rule == "sbatch"]
        assert [f.level for f in found] == [REFUSAL] and words in found[0].message.lower()


def test_the_commands_submit_show_and_cancel(cluster, site: str, tmp_path, capsys):
    folder = sleeping(run_folder(tmp_path, plan("sleeper", tmp_path.parent / "data")))
    command = [str(folder), "--site", site, "--account", "xyz@a100", "--json"]
    assert main(["slurm", "submit", *command]) == 1  # other commands than the plan renders
    assert json.loads(capsys.readouterr().out)["submitted"] == {}
    command += ["--allow", "changes", "--allow", "cpus-per-task"]
    assert main(["slurm", "submit", *command, "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out)["submitted"] == {}
    assert main(["slurm", "submit", *command]) == 0
    (job,) = json.loads(capsys.readouterr().out)["submitted"][str(folder)]
    wait_until(lambda: one(folder).state == "RUNNING", 60, "running")
    assert main(["slurm", "status", str(folder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["jobs"][0]
    assert (shown["id"], shown["verdict"], shown["nodes"]) == (job, "running", "jz-a100-[1-2]")
    with pytest.raises(ValueError, match=rf"^run folder=.*: has job {job} already"):
        submit(folder, SITE, REQUEST)
    assert main(["slurm", "cancel", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"cancelled": [job]}
    found = ended(folder)
    assert (found.state, found.status, found.evidence) == (
        "CANCELLED",
        "cancelled",
        "SLURM: CANCELLED",
    )
    assert main(["slurm", "status", str(folder)]) == 1


def test_a_run_folder_with_a_hostile_name_runs_and_nothing_in_it_is_executed(cluster, tmp_path):
    """All of the script up to the training."""
    root = tmp_path / '-rf $(touch x) `touch x` {a,b}* it\'s a "quote";touch x && é数 | touch x'
    (run,) = study_runs.create_sweep(
        root, [plan("one", tmp_path.parent / "data", nodes=1).to_json()], SITE, REQUEST
    )
    trace = plant_modules(run)
    text = (run / "job.sbatch").read_text()
    (run / "job.sbatch").write_text(text[: text.index("# a small corpus is tokenized")] + "pwd\n")
    job = submit(run, SITE, REQUEST)
    wait_until(lambda: client.states([job])[job].has_ended, 120, "end of the job")
    assert (run / f"slurm-{job}.out").read_text() == f"go: from the beginning\n{run}\n"
    assert (
        not trace.exists() and not list(tmp_path.rglob("x")) and list(tmp_path.iterdir()) == [root]
    )


@pytest.mark.parametrize(
    "how",
    ['kill -9 $PPID; sleep 0.3; "$real" "$@"', '"$real" "$@"; kill -9 $PPID'],
    ids=["while it asks", "before"],
)
def test_a_killed_submission_leaves_one_job(how: str, cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "SETTLE_S", 2.0)
    folder = submit_races.held_run(tmp_path, "run")
    with submit_races.changed_sbatch(tmp_path, how):
        assert submit_races.together([lambda: submit(folder, SITE, REQUEST)]) == 0
    submit_races.together([lambda: submit(folder, SITE, REQUEST)])
    (job,) = submit_races.jobs_of(folder)
    assert attempts.Run(folder).job_ids() == [job] == jobs.cancel([folder])


def test_of_submissions_and_of_jobs_at_once_one_is_made_or_begins(cluster, tmp_path):
    trial = submit_races.race_trial(submit_races.held_run(tmp_path, "submit"), 4)
    assert len(trial.jobs) == trial.successes == 1 and trial.recorded == trial.jobs
    ids = submit_races.running_jobs(tmp_path, 3)
    trial = submit_races.begin_trial(submit_races.held_run(tmp_path, "begin"), ids)
    assert len(trial.jobs) == trial.successes == 1
    client.cancel(ids)


def test_sigusr1_saves_and_the_next_link_goes_on(cluster, tmp_path, monkeypatch):
    """The signal that SLURM sends some minutes before the limit; then the job is ended, as it is at
    the limit.
    """
    p = one_process_a_node(plan("long", tmp_path.parent / "data", nodes=1, iters=LONG, gbs=8, dp=1))
    (folder,) = chain.create(tmp_path / "chain", p, [], SITE, REQUEST)
    pace(monkeypatch)
    allow(folder, 5)
    first, second = submit_chain(tmp_path / "chain", times=2)
    wait_until(lambda: attempts.iteration(folder) >= 5, PATIENCE_S, says(folder))
    assert one(folder).waiting == 1 and client.states([second])[second].reason == "Dependency"
    send(first, "USR1")
    lead(folder, lambda: latest(folder / FOLDER) is not None, "checkpoint")
    at = int(latest(folder / FOLDER).name.removeprefix("iter_"))
    allow(folder, at + 2)
    wait_until(
        lambda: attempts.iteration(folder) > at,
        60,
        "iteration after the signal: torchrun died of it",
    )
    client.cancel([first])
    wait_until(lambda: one(folder).id == second, PATIENCE_S, "second link")
    allow(folder, LONG)
    found = ended(folder)
    assert (found.id, found.status, found.iteration) == (second, "completed", LONG), says(folder)
    begun = ledger.events(folder, "started")
    assert [e["id"] for e in begun] == [first, second] and LONG > begun[1]["iteration"] >= at >= 5
    assert len(losses(folder)) == LONG


def test_two_links_on_1_and_2_nodes_follow_the_ramp_with_the_losses_of_one_run(
    cluster, site: str, tmp_path, capsys
):
    """As many replicas for batches of 8 and 16."""
    p = one_process_a_node(
        plan("ramp", tmp_path.parent / "data", nodes=1, iters=6, mbs=1, gbs=16, dp=1)
    )
    p = replace(p, run=replace(p.run, ramp=Ramp(start=8, increment=8, samples=24)))
    (tmp_path / "plan.json").write_text(json.dumps(p.to_json()))
    folder, asked = f"{tmp_path}/chain", ["--site", site, *ASKED]
    stages = ["--stages", "8:1:1,16:2:1"]
    assert main(["slurm", "chain", f"{tmp_path}/plan.json", folder, *asked, *stages]) == 0
    capsys.readouterr()
    assert main(["slurm", "submit", folder, *asked]) == 0
    submitted, paths = (
        json.loads(capsys.readouterr().out)["submitted"],
        links(Path(folder)),
    )
    ids = [job for path in paths for job in submitted[str(path)]]
    after = [e["after"] for path in paths for e in ledger.events(path, "submitted")]
    assert after == ["", *(f"afterany:{job}" for job in ids[:-1])]
    found = [ended(path) for path in paths]
    assert [(j.id, j.status) for j in found] == [(i, "completed") for i in ids], says(
        paths[0]
    ) + says(paths[1])
    assert [len(client.hostnames(j.nodes)) for j in found] == [1, 2]
    joined = [loss for path in paths for loss in losses(path)]
    assert len(joined) == 6 and joined == pytest.approx(alone(p, tmp_path), abs=1e-5)


def test_without_the_controller_nothing_is_shown_submitted_or_cancelled(
    cluster, site: str, tmp_path, capsys
):
    """A stopped controller accepts connections and answers none: squeue alone would
    wait a minute.
    """
    waits, other = (
        run_folder(tmp_path, plan(name, tmp_path / "data")) for name in ("waits", "other")
    )
    text = (waits / "job.sbatch").read_text()
    later = text.replace("set -", "#SBATCH --begin=now+1hour\nset -", 1)
    (waits / "job.sbatch").write_text(later)
    job = submit(waits, SITE, REQUEST)
    new = ["slurm", "submit", str(other), "--site", site, "--account", "xyz@a100"]
    controller = cluster.controller()
    try:
        os.kill(controller, signal.SIGSTOP)
        begin = time.monotonic()
        for command in (["status", str(waits)], ["cancel", str(waits)], new[1:]):
            assert main(["slurm", *command]) == 75
            out, line = capsys.readouterr()
            assert not out and line.count("\n") == 1 and line.endswith("nothing was changed\n")
        assert main(f"slurm watch {waits} --every 1 --seconds 0.1".split()) == 75
        assert time.monotonic() - begin < 25
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(controller, signal.SIGCONT)
    assert one(waits).status == "waiting" and not ledger.events(other)
    assert jobs.cancel([waits]) == [job]


# In place of Apptainer, which is not installed here: notes its arguments, and runs what follows the
# image.
BOX = """#!/bin/bash
echo "$*" >>"${0%/*}/calls"
while [[ $1 != *.sif ]]; do shift; done
shift; IN_BOX=1 exec "$@"
"""


def test_one_task_for_each_process_trains_saves_at_the_signal_and_is_found_by_its_name(
    cluster, tmp_path, monkeypatch
):
    """Two nodes of two tasks, in a container."""
    (tmp_path / "image.sif").touch()
    (tmp_path / "apptainer").write_text(BOX)
    (tmp_path / "apptainer").chmod(0o755)
    box = {"container": "apptainer", "container_image": f"{tmp_path}/image.sif"}
    own = replace(SITE, setup=(f"PATH={tmp_path}:$PATH",), **box)
    request = replace(REQUEST, launcher="srun")
    pace(monkeypatch)
    p = plan("own", tmp_path.parent / "data", iters=LONG)
    (folder,) = script.create({tmp_path / "own": p}, own, request)
    allow(folder, 3)
    job = submit(folder, own, request)
    shown = client.call(["squeue", "-h", "-j", job, "-o", "%j"]).strip()
    assert shown == client.job_name(folder) and jobs.active_jobs(folder) == [job]
    wait_until(lambda: attempts.iteration(folder) >= 3, PATIENCE_S, says(folder))
    send(job, "USR1")
    lead(folder, lambda: latest(folder / FOLDER) is not None, "checkpoint")
    allow(folder, LONG)
    found = ended(folder)
    assert (found.state, found.status, found.iteration) == ("COMPLETED", "completed", LONG), says(
        folder
    )
    log = read_log(folder / "run.log")
    assert len(log.iterations) == LONG and "max_allocated" in log.memory
    calls, code = (tmp_path / "calls").read_text(), next((folder / "code").iterdir())
    start = f"exec --nv --bind {folder} --pwd {folder} --bind {code} {tmp_path}/image.sif bash"
    assert calls.count(start) >= 4 and calls.count("exec python -m trilane_engine plan.json") == 4


def test_of_a_sweep_one_run_fails_and_is_submitted_again_alone(
    cluster, site: str, tmp_path, capsys
):
    """One node and one process each, one job at a time; the second wants a corpus that is not there
    yet.
    """
    corpus, folder = tmp_path / "corpus.txt", tmp_path / "sweep"
    plans = [
        plan(f"mbs{mbs}", tmp_path.parent / "data", nodes=1, dp=1, mbs=mbs, gbs=8) for mbs in (1, 2)
    ]
    plans[1] = replace(plans[1], data=replace(plans[1].data, source=str(corpus)))
    (tmp_path / "plans.json").write_text(json.dumps({"plans": [p.to_json() for p in plans]}))
    asked, submit = (
        ["--site", site, *ASKED],
        ["slurm", "submit", str(folder), "--site", site, *ASKED],
    )
    assert main(["slurm", "sweep", f"{tmp_path}/plans.json", str(folder), *asked]) == 0
    assert main(submit) == 1  # the check sees that the corpus is missing
    assert '"data"' in capsys.readouterr().out
    assert main([*submit, "--allow", "data", "--parallel", "1"]) == 0
    made = json.loads(capsys.readouterr().out)["submitted"]
    paths = [folder / f"runs/{p.label}" for p in plans]
    after = [e["after"] for path in paths for e in ledger.events(path, "submitted")]
    assert after == ["", f"afterany:{made[str(paths[0])][0]}"]
    found = [ended(path) for path in paths]
    assert [j.status for j in found] == ["completed", "crashed"], says(paths[1])
    assert [[j.id] for j in found] == [made[str(path)] for path in paths]
    corpus.write_text("to be or not to be, that is the question\n" * 40)
    assert main(submit) == 0
    assert list(json.loads(capsys.readouterr().out)["submitted"]) == [str(paths[1])]
    assert ended(paths[1]).status == "completed", says(paths[1])
