"""A rehearsal on 52 nodes of a real SLURM, 48 and 4 spare: the training is a sleep, everything else is real."""

import json
import time
from pathlib import Path

import pytest
from slurm_cluster import PATIENCE_S, REQUEST, SITE, Cluster, ended, one, says
from support import wait_until

from trilane.config.cluster import cluster as nodes_of
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.config.training import Run
from trilane.slurm import chain, client, jobs, ledger, submission

JOBS = 200


def bloom(label: str) -> Plan:
    """176B on 384 A100: 48 nodes of eight."""
    t = Topology(tp=4, pp=12, dp=8, mbs=2, gbs=2048, precision="bf16", partition="type:transformer|embedding")
    shape = parse_shape("70,14336,112,2048,250880")
    run = Run(train_iters=100, save_interval=10)
    return Plan(label=label, shape=shape, cluster=nodes_of("jz-a100-80g"), topology=t, run=run)


def rehearse(folder: Path) -> None:
    """Put a sleep in place of the training, for ever at first and short when it is requeued; the last iteration and its
    checkpoint are noted at its end."""
    script = (folder / "job.sbatch").read_text()
    head, _, rest = script.partition("# a small corpus is tokenized")
    end = rest[rest.index('echo "END ') :]
    sleep = "while :; do\ncode=0\nsrun --kill-on-bad-exit=1 --wait=60 bash -c "
    sleep += "'trap \"\" USR1; sleep $((${SLURM_RESTART_COUNT:-0} ? 1 : 600))' || code=$?\n"
    done = "[[ $code -ne 0 ]] || { mkdir -p checkpoints/iter_0000100; echo iter_0000100 >checkpoints/latest; }\n"
    done += "[[ $code -ne 0 ]] || echo '{\"iteration\": 100}' >>steps.jsonl\n"
    (folder / "job.sbatch").write_text(head + sleep + done + end)


def test_a_chain_on_48_nodes_loses_one_and_goes_on_with_a_spare(cluster: Cluster, tmp_path: Path) -> None:
    (folder,) = chain.create(tmp_path / "chain", bloom("bloom"), [], SITE, REQUEST)
    rehearse(folder)
    first, second = chain.submit(tmp_path / "chain", SITE, times=2)
    wait_until(lambda: one(folder).state == "RUNNING" and "go: " in says(folder), PATIENCE_S, "running")
    before = client.hostnames(one(folder).nodes)
    assert len(before) == 48
    dead = before[0]  # where the script runs: srun is gone, and no daemon waits a minute for what it has to say
    cluster.do("kill-node", dead)
    client.call(["scontrol", "update", f"NodeName={dead}", "State=DOWN", "Reason=killed"])
    found = ended(folder)
    assert (found.id, found.status) == (first, "completed"), says(folder)
    now = client.hostnames(found.nodes)
    assert len(now) == 48 and dead not in now and set(now) - set(before) <= {f"jz-a100-{n}" for n in range(1, 53)}
    assert dead in ledger.events(folder, "node failure")[0]["nodes"]
    assert client.states([second])[second].state in ("CANCELLED", "COMPLETED")  # nothing was left to do


def test_the_status_of_200_jobs_takes_one_call_of_slurm(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 submissions, and the members of an array, which one submission starts."""
    folders = [tmp_path / f"run-{number:03d}" for number in range(JOBS)]
    for folder in folders:
        folder.mkdir()
        (folder / "plan.json").write_text(json.dumps(bloom(folder.name).to_json()))
    script = tmp_path / "job.sbatch"
    script.write_text(jobs.files(bloom("bloom"), SITE, REQUEST)["job.sbatch"])
    ids = [submission.sbatch(script, "--hold") for _ in range(20)]
    array = submission.sbatch(script, "--hold", f"--array=1-{JOBS - len(ids)}")
    ids += [f"{array}_{number}" for number in range(1, 1 + JOBS - len(ids))]
    for folder, job in zip(folders, ids, strict=True):
        ledger.note(folder, "submitted", job, site="test", script="")
    asked = []
    call = client.call
    monkeypatch.setattr(client, "call", lambda command, **more: (asked.append(command[0]), call(command, **more))[1])
    begin = time.monotonic()
    found = jobs.job_status(folders)
    seconds = time.monotonic() - begin
    print(f"status of {JOBS} jobs: {seconds:.2f} s")
    assert asked == ["squeue"] and len(found) == JOBS
    assert {(j.state, j.reason, j.status) for j in found} == {("PENDING", "JobHeldUser", "waiting")}
    monkeypatch.undo()
    assert len(jobs.cancel(folders)) == JOBS
