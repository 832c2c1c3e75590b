"""Long runs on a real SLURM: a signal, a dead node, links on 1, 2 and 1 nodes; the losses are those of one run."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_cluster import (
    PATIENCE_S,
    REQUEST,
    SITE,
    Cluster,
    allow,
    ended,
    lead,
    losses,
    one,
    pace,
    plan,
    run_folder,
    says,
    send,
)
from support import wait_until

from trilane.cli.app import main
from trilane.config.batch_rampup import Ramp
from trilane.config.plan import Plan
from trilane.launch import local
from trilane.slurm import chain, client, jobs, ledger, monitor
from trilane.workspace import run_folder as attempt
from trilane.workspace.checkpoints import FOLDER, latest

LONG = 30  # iterations, which a test lets the training begin one by one or many at once, to act in the middle


def alone(p: Plan, root: Path) -> list[float]:
    """The losses of the same run on one process of this machine, from beginning to end without a break."""
    one_process = replace(p, label="alone", topology=replace(p.topology, dp=1))
    folder = run_folder(root, one_process)
    assert local.train_local(folder, show_progress=False).status == "completed"
    return losses(folder)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of the long run, never interrupted."""
    root = tmp_path_factory.mktemp("unbroken")
    return alone(plan("long", root.parent / "data", nodes=1, iters=LONG, gbs=8, dp=1), root)


def one_process_a_node(p: Plan) -> Plan:
    """The plan on nodes of one process each: what many nodes do, at the cost of few processes."""
    return replace(p, cluster=replace(p.cluster, gpus_per_node=1, cores_per_node=1))


def fallen_by_itself(folder: Path) -> str:
    return f"{one(folder)}\n{says(folder)}"


def test_sigusr1_saves_and_the_next_link_goes_on_with_the_same_losses(
    cluster: Cluster, unbroken: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal that SLURM sends some minutes before the limit; then the job is ended, as it is at the limit."""
    p = one_process_a_node(plan("long", tmp_path.parent / "data", nodes=1, iters=LONG, gbs=8, dp=1))
    (folder,) = chain.create(tmp_path / "chain", p, [], SITE, REQUEST)
    pace(monkeypatch)
    allow(folder, 5)
    first, second = chain.submit(tmp_path / "chain", SITE, times=2)
    wait_until(lambda: attempt.iteration(folder) >= 5, PATIENCE_S, fallen_by_itself(folder))
    assert one(folder).waiting == 1 and client.states([second])[second].reason == "Dependency"
    send(first, "USR1")
    lead(folder, lambda: latest(folder / FOLDER) is not None, "checkpoint")
    at = int(latest(folder / FOLDER).name.removeprefix("iter_"))
    allow(folder, at + 2)
    wait_until(lambda: attempt.iteration(folder) > at, 60, "iteration after the signal: torchrun died of it")
    client.cancel([first])
    wait_until(lambda: one(folder).id == second, PATIENCE_S, "second link")
    allow(folder, LONG)
    found = ended(folder)
    assert (found.id, found.status, found.iteration) == (second, "completed", LONG), says(folder)
    begun = ledger.events(folder, "started")
    assert [e["id"] for e in begun] == [first, second] and LONG > begun[1]["iteration"] >= at >= 5
    assert losses(folder) == pytest.approx(unbroken, abs=1e-5)


def test_a_spare_takes_the_place_of_a_dead_node_and_the_next_one_brings_the_job_back_elsewhere(
    cluster: Cluster, unbroken: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node is killed with all on it; srun fails before SLURM holds the node for dead, as it mostly does."""
    p = one_process_a_node(plan("long", tmp_path.parent / "data", nodes=2, iters=LONG, gbs=8, dp=2, save_interval=3))
    request = replace(REQUEST, spares=1)
    folder = run_folder(tmp_path, p, request)
    script = folder / "job.sbatch"
    script.write_text(script.read_text().replace("--wait=60", "--wait=8"))  # processes end seconds apart, too
    pace(monkeypatch)
    allow(folder, 7)
    job = jobs.submit(folder, SITE, request)
    wait_until(lambda: attempt.iteration(folder) >= 7, PATIENCE_S, fallen_by_itself(folder))
    first, second, spare = client.hostnames(one(folder).nodes)
    cluster.do("kill-node", second)
    allow(folder, 8)  # which misses the ranks of the dead node
    wait_until(lambda: bool(ledger.events(folder, "ended")), PATIENCE_S, says(folder))
    assert client.down_nodes() == {}, "SLURM knew it before us: nothing is tested"
    wait_until(lambda: bool(ledger.events(folder, "replaced")), PATIENCE_S, says(folder))
    wait_until(lambda: attempt.iteration(folder) >= 8, PATIENCE_S, fallen_by_itself(folder))
    client.call(["scontrol", "update", f"NodeName={second}", "State=DOWN", "Reason=noticed late"])
    allow(folder, 9)
    wait_until(lambda: attempt.iteration(folder) >= 9, PATIENCE_S, "SLURM ended the job with the node")
    assert client.hostnames(one(folder).nodes) == [first, spare]
    cluster.do("kill-node", spare)
    allow(folder, 10)
    # requeued; it may wait only for a moment
    wait_until(lambda: one(folder).state != "RUNNING" or len(ledger.events(folder, "started")) == 3, 60, says(folder))
    client.call(["scontrol", "update", f"NodeName={spare}", "State=DOWN", "Reason=the wait is over"])
    allow(folder, LONG)
    found = ended(folder)
    assert (found.id, found.status, found.iteration) == (job, "completed", LONG), says(folder)
    last = client.hostnames(found.nodes)
    assert len(last) == 3 and not {second, spare} & set(last)
    starts = [(e["id"], e["restarts"], e["iteration"]) for e in ledger.events(folder, "started")]
    assert starts == [(job, 0, 0), (job, 0, 7), (job, 1, 9)]
    assert [e["nodes"] for e in ledger.events(folder, "node failure")] == [[second], [spare]]
    chosen = [e["chosen"] for e in ledger.events(folder, "nodes")]
    assert chosen == [[first, second], [first, spare], last[:2]]
    assert losses(folder) == pytest.approx(unbroken, abs=1e-5)


def test_three_links_on_1_2_and_1_nodes_follow_the_ramp_with_the_losses_of_one_run(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """As many replicas for batches of 8, 16 and 24."""
    p = one_process_a_node(plan("ramp", tmp_path.parent / "data", nodes=1, iters=9, mbs=1, gbs=24, dp=1))
    p = replace(p, run=replace(p.run, ramp=Ramp(start=8, increment=8, samples=72)))
    site = tmp_path / "test.json"
    site.write_text(json.dumps({"name": "test", "partition": "gpu_p5", "local": ["/dev/shm"]}))
    (tmp_path / "plan.json").write_text(json.dumps(p.to_json()))
    folder = str(tmp_path / "chain")
    command = ["--site", str(site), "--account", "xyz@a100", "--time-limit", "00:10:00", "--signal-s", "60"]
    command += ["--no-preflight", "--json"]
    stages = ["--stages", "8:1:1,16:2:1,24:1:1"]
    assert main(["slurm", "chain", "create", str(tmp_path / "plan.json"), folder, *command, *stages]) == 0
    capsys.readouterr()
    assert main(["slurm", "chain", "submit", folder, *command]) == 0
    ids = json.loads(capsys.readouterr().out)["submitted"]
    paths = chain.stages_of(Path(folder))
    found = [ended(path) for path in paths]
    assert [(j.id, j.status) for j in found] == [(i, "completed") for i in ids], says(paths[0]) + says(paths[1])
    assert [len(client.hostnames(j.nodes)) for j in found] == [1, 2, 1]
    joined = [loss for path in paths for loss in losses(path)]
    assert len(joined) == 9 and joined == pytest.approx(alone(p, tmp_path), abs=1e-5)
    assert chain.submit(Path(folder), SITE) == []


@pytest.fixture
def hanging(cluster: Cluster, tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A running job of two nodes whose four ranks do nothing, as in a hang; their command lines are the engine's."""
    folder = run_folder(tmp_path, plan("hanging", tmp_path.parent / "data"))
    script = (folder / "job.sbatch").read_text()
    head, _, _ = script.partition("\n  srun ")
    ranks = 'for local in 0 1; do RANK=$((2 * SLURM_NODEID + local)) python -c "import time\ndef stuck():\n'
    ranks += '    time.sleep(600)\nstuck()" trilane.engine plan.json & done; wait'
    (folder / "job.sbatch").write_text(
        f"{head}\nsrun --kill-on-bad-exit=1 bash -c 'trap \"\" USR1\n{ranks}'\nexit\ndone\n"
    )
    job = jobs.submit(folder, SITE, REQUEST)
    wait_until(lambda: "START" in says(folder), PATIENCE_S, f"start: {fallen_by_itself(folder)}")
    yield folder, job
    jobs.cancel([folder])
    ended(folder)


def test_a_step_attached_to_a_running_job_sees_every_rank_on_every_node(
    hanging: tuple[Path, str], cluster: Cluster, capsys: pytest.CaptureFixture
) -> None:
    """Document 003's step: where all ranks hang, while the job that hangs keeps all its resources."""
    folder, job = hanging
    said = ""

    def all_stuck() -> bool:
        nonlocal said
        said = cluster.do("run", *monitor.attach(job, "stacks"))
        return said.count(" rank ") >= 4 and said.count("stuck") >= 4

    wait_until(all_stuck, 120, "stacks")
    hosts = client.hostnames(one(folder).nodes)
    assert [f"== {hosts[r // 2]} rank {r} pid" in said for r in range(4)] == [True] * 4 and said.count("== ") == 4
    assert cluster.do("run", *monitor.attach(job, "memory")).count("== ") == 2
    assert main(["debug", "capture", str(folder), "--job", job, "--what", "hostfile"]) == 0
    assert capsys.readouterr().out == f"{hosts[0]} slots=2\n{hosts[1]} slots=2\n"
    assert one(folder).state == "RUNNING"


def test_the_watcher_says_that_a_job_stalls_and_that_it_died(hanging: tuple[Path, str]) -> None:
    folder, job = hanging
    lines = list(monitor.watch([folder], every_s=0.2, seconds=1, stall_s=0.3))
    assert lines[0].startswith(f"hanging: job {job} RUNNING jz-a100-[")
    assert len(lines) == 2 and lines[1].startswith("hanging: STALLED: no iteration for ")
    client.cancel([job])
    wait_until(lambda: one(folder).state == "CANCELLED", 60, "cancelled")
    said = list(monitor.watch([folder], every_s=0.2, seconds=60))
    assert said == [f"hanging: job {job} CANCELLED {one(folder).nodes}: DIED: cancelled SLURM: CANCELLED"]


def test_a_time_limit_is_a_verdict(cluster: Cluster, tmp_path: Path) -> None:
    """A job over its limit ends as TIMEOUT. The shortest limit is a minute; an update makes it 0, and SLURM sees that
    when it next looks at the limits, every 30 s."""
    folder = run_folder(tmp_path, plan("slow", tmp_path.parent / "data", nodes=1))
    script = (folder / "job.sbatch").read_text()
    (folder / "job.sbatch").write_text(
        script[: script.index("set -euo")] + "srun bash -c 'trap \"\" USR1; echo sleeps; sleep 300'\n"
    )
    job = jobs.submit(folder, SITE, REQUEST, ["--time=00:01:00"])
    wait_until(lambda: "sleeps" in says(folder), PATIENCE_S, "running")
    client.call(["scontrol", "update", f"JobId={job}", "TimeLimit=0"])
    found = ended(folder)
    assert (found.state, found.status) == ("TIMEOUT", "time limit")
