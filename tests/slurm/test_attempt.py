"""Whether a job starts the training, and which of a run's jobs counts: told by its ledger and by what SLURM says."""

import json
import math
import time
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_cluster import plan, run_folder

from trilane.config.plan import read_plan
from trilane.slurm import attempt, client, jobs, ledger
from trilane.slurm.client import JobState
from trilane.slurm.nodes import node_failure
from trilane.workspace.checkpoints import name_of
from trilane.workspace.status import RunStatus, Status, known_status, write_status

ME = {"SLURM_JOB_ID": "78", "SLURM_JOB_NODELIST": "n1"}


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The states of jobs, by id, in a SLURM that knows nothing else."""
    known: dict[str, str] = {}
    monkeypatch.setattr(client, "is_installed", lambda: True)

    def states(ids: Iterable[str], names: Collection[str] = ()) -> dict[str, JobState]:
        return {i: JobState(id=i, state=known.get(i, client.FORGOTTEN)) for i in ids}

    monkeypatch.setattr(client, "states", states)
    monkeypatch.setattr(client, "down_nodes", list)
    monkeypatch.setattr(client, "cancel", lambda _: None)
    return known


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = run_folder(tmp_path, plan("one", tmp_path / "data", nodes=1))
    for job in ("77", "78", "79"):
        ledger.note(made, "submitted", job, site="test", script="")
    return made


def trained(folder: Path, job: str, status: str = "crashed", iteration: int = 0) -> None:
    """The job started, and ended with that status in the folder."""
    ledger.note(folder, "started", job, nodes="n1", iteration=iteration, restarts=0)
    write_status(folder, RunStatus(status=Status(status), evidence=f"by {job}", rank=None, exit_code=1, seconds=1.0))
    ledger.note(folder, "ended", job, status=status, evidence=f"by {job}")


def at(folder: Path, iteration: int) -> None:
    (folder / "steps.jsonl").write_text("".join(f'{{"iteration": {n + 1}}}\n' for n in range(iteration)))


def checkpoint(folder: Path, iteration: int) -> None:
    place = folder / "checkpoints" / name_of(iteration)
    place.mkdir(parents=True)
    (place / "manifest.json").write_text("{}")
    (folder / "checkpoints/latest").write_text(f"{name_of(iteration)}\n")


def test_a_job_that_has_recorded_its_end_does_not_hold_the_folder(folder: Path, slurm: dict[str, str]) -> None:
    """SLURM lists a job as running for some time after its script has called `job end`."""
    trained(folder, "77")
    slurm["77"] = "RUNNING"
    assert attempt.begin(folder, ME).startswith("go: ")


@pytest.mark.parametrize(("at_iteration", "saved", "done"), [(4, 4, True), (4, 2, False), (3, 2, False)])
def test_nothing_is_left_to_do_where_the_last_iteration_is_saved(
    at_iteration: int, saved: int, done: bool, folder: Path
) -> None:
    p = read_plan(folder / "plan.json")
    (folder / "plan.json").write_text(json.dumps(replace(p, run=replace(p.run, save_interval=2)).to_json()))
    at(folder, at_iteration)
    checkpoint(folder, saved)
    assert bool(attempt.finished(folder)) is done


@pytest.mark.parametrize(("failures", "goes_on"), [(2, True), (3, False), (4, False)])
def test_a_third_failure_at_one_iteration_is_the_last(failures: int, goes_on: bool, folder: Path) -> None:
    for _ in range(failures):
        trained(folder, "79")
    assert (attempt.blocked(folder) == "") is goes_on
    at(folder, 1)
    assert attempt.blocked(folder) == "", "it got further"


def test_failures_before_a_new_submission_are_forgiven(folder: Path) -> None:
    for _ in range(3):
        trained(folder, "79")
    ledger.note(folder, "submitted", "80", site="test", script="")
    trained(folder, "80")
    assert attempt.blocked(folder) == ""


@pytest.mark.parametrize(("mine", "other", "is_pruned"), [(5e9, 4e9, True), (5e9, 5e9, True), (5e9, 6e9, False)])
def test_a_run_of_a_sweep_is_not_started_where_one_that_needs_no_more_ran_out(
    mine: float, other: float, is_pruned: bool, folder: Path, tmp_path: Path
) -> None:
    peer = tmp_path / "peer"
    peer.mkdir()
    write_status(peer, RunStatus(status=Status.OOM, evidence="", rank=0, exit_code=1, seconds=1.0))
    for path, need in ((folder, mine), (peer, other)):
        values = json.loads((folder / "plan.json").read_text())
        (path / "plan.json").write_text(json.dumps(values | {"prediction": {"memory_bytes": need}}))
    (tmp_path / "runs.txt").write_text("one\npeer\n")
    assert bool(attempt.pruned(folder, str(tmp_path))) is is_pruned
    assert (folder / "status.json").exists() is is_pruned


def test_of_several_jobs_that_trained_the_last_one_counts(folder: Path, slurm: dict[str, str]) -> None:
    trained(folder, "77", "stopped")
    trained(folder, "78", "crashed")
    slurm |= {"77": "COMPLETED", "78": "FAILED", "79": "CANCELLED"}
    (found,) = jobs.job_status([folder])
    assert (found.id, found.status, found.evidence) == ("78", "crashed", "by 78")


def test_slurms_own_reason_comes_before_what_the_training_wrote(folder: Path, slurm: dict[str, str]) -> None:
    """A job over its time limit is killed by signals, which looks like a crash; a completed run has completed."""
    trained(folder, "77", "crashed")
    slurm |= {"77": "TIMEOUT", "78": "CANCELLED", "79": "CANCELLED"}
    (found,) = jobs.job_status([folder])
    assert (found.id, found.status, found.evidence) == ("77", "time limit", "SLURM: TIMEOUT")
    trained(folder, "77", "completed")
    assert jobs.job_status([folder])[0].status is Status.COMPLETED


@pytest.mark.parametrize(
    ("states", "shown", "waiting"),
    [
        ({"77": "RUNNING", "78": "PENDING", "79": "PENDING"}, "77", 2),
        ({"77": "COMPLETED", "78": "PENDING", "79": "PENDING"}, "78", 1),
        ({"77": "COMPLETED", "78": "PENDING", "79": "RUNNING"}, "79", 1),
        ({"77": "COMPLETED", "78": "COMPLETED", "79": "RUNNING"}, "79", 0),
    ],
)
def test_the_job_that_runs_is_shown_with_how_many_wait_behind_it(
    states: dict[str, str], shown: str, waiting: int, folder: Path, slurm: dict[str, str]
) -> None:
    slurm |= states
    (found,) = jobs.job_status([folder])
    assert (found.id, found.waiting) == (shown, waiting)


def test_where_no_node_answers_it_is_not_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun itself fails then: the process that asks runs on one of them."""
    dead: set[str] = set()

    class Step:
        def __init__(self, command: list[str], **_: object) -> None:
            self.returncode = int(any(f"--nodelist={node}" in command for node in dead))

        def poll(self) -> int:
            return self.returncode

        def communicate(self) -> tuple[str, str]:
            return "", "srun: error: Communication connection failure"

    monkeypatch.setattr(node_failure.subprocess, "Popen", Step)
    monkeypatch.setattr(client, "call", lambda command: "slurm 23.02.7")
    assert node_failure.unreachable(["n1", "n2", "n3"]) == []
    dead |= {"n2", "n3"}
    assert node_failure.unreachable(["n1", "n2", "n3"]) == ["n2", "n3"]
    dead |= {"n1"}
    assert node_failure.unreachable(["n1", "n2", "n3"]) == []


def test_nodes_that_a_slow_controller_lets_answer_one_after_another_are_not_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With rl_enable SLURM answers 128 requests over a minute or two; a node is dead once nothing answers any more."""
    begin = time.monotonic()

    class Step:
        def __init__(self, command: list[str], **_: object) -> None:
            node = int(command[-2].removeprefix("--nodelist=n"))
            self.answers = begin + 0.2 * node if node < 5 else math.inf
            self.returncode = 0

        def poll(self) -> int | None:
            return 0 if time.monotonic() > self.answers else None

        def communicate(self) -> tuple[str, str]:
            return "", ""

        def kill(self) -> None: ...

    monkeypatch.setattr(node_failure.subprocess, "Popen", Step)
    monkeypatch.setattr(client, "call", lambda command: "slurm 23.02.7")
    monkeypatch.setattr(node_failure, "STEP_S", 0.5)
    assert node_failure.unreachable([f"n{i}" for i in range(6)]) == ["n5"]


def test_an_oom_is_not_tried_again_and_a_lost_node_is() -> None:
    """The same plan runs out of memory again."""
    again = [status for status in Status if status.can_retry]
    assert Status.OOM not in again and Status.COMPLETED not in again and Status.PRUNED not in again
    assert {Status.NODE_FAILURE, Status.TIME_LIMIT, Status.HANG, Status.CRASHED, Status.PREEMPTED} <= set(again)
    assert {Status.ENVIRONMENT, Status.MISSING_FILE, Status.HOST_MEMORY} <= set(again), "once a person has put it right"


def test_a_hang_stays_a_hang_with_its_rank_though_the_watchdog_killed_the_others(
    folder: Path, slurm: dict[str, str]
) -> None:
    """The log ends with torchrun's lines about processes that were killed."""
    assert attempt.begin(folder, ME).startswith("go")
    verdict = RunStatus(status=Status.HANG, evidence="Rank 3: in the data loader", rank=3, exit_code=1, seconds=9.0)
    write_status(folder, verdict)
    (folder / "run.log").write_text("START a\nE1123 api.py:1002] failed (exitcode: -9) local_rank: 0 (pid: 53)\n")
    found = attempt.end(folder, 1, ME)
    assert (found.status, found.evidence, found.rank) == (Status.HANG, verdict.evidence, 3)


@pytest.mark.parametrize(
    ("dead", "broken", "spares", "status", "replaced"),
    [
        (["n2"], {}, 1, "node failure", "n2"),
        (["n3"], {}, 1, "crashed", ""),  # the spare: no reason for the training to fail
        (["n2"], {}, 0, "node failure", ""),
        (["n2", "n3"], {}, 1, "node failure", ""),
        ([], {"n2": "has no GPU"}, 1, "node failure", "n2"),
        ([], {"n2": "has no GPU"}, 0, "crashed", ""),  # not tested: no other could take its place
        ([], {}, 1, "crashed", ""),
    ],
)
def test_a_spare_takes_the_place_of_a_node_that_is_dead_or_broken(
    dead: list[str],
    broken: dict[str, str],
    spares: int,
    status: str,
    replaced: str,
    folder: Path,
    slurm: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    every = ["n1", "n2", "n3"][: 2 + spares]
    requeued = []
    monkeypatch.setattr(client, "hostnames", lambda _: list(every))
    monkeypatch.setattr(client, "call", lambda *_, **__: " NodeList=n Requeue=0")
    monkeypatch.setattr(node_failure, "unreachable", lambda _: dead)
    monkeypatch.setattr(node_failure, "requeue", lambda *_, **wishes: requeued.append(wishes["nodes"]))
    env = {"SLURM_JOB_ID": "78", "SLURM_JOB_NODELIST": "n"}
    ledger.note(folder, "started", "78", nodes="n", iteration=0, restarts=0)
    ledger.note(folder, "nodes", "78", chosen=["n1", "n2"], left_out={})
    outcome = attempt.end(folder, 1, env, test=lambda _: broken)
    ledger.note(folder, "noted", "78")  # by a process of its own, such as that which alerts
    assert (outcome.status, node_failure.goes_on(folder, "78")) == (status, replaced)
    assert (requeued != []) is (status == "node failure" and not replaced)
    assert node_failure.lost_nodes(folder, "78") == [*dead, *(broken if replaced else ())]
    ledger.note(folder, "started", "78", nodes="n", iteration=0, restarts=1)
    assert node_failure.lost_nodes(folder, "78") == [], "requeued, it has other nodes"
    assert node_failure.goes_on(folder, "78") == ""


@pytest.mark.parametrize(("spares", "replaced"), [(1, "n2"), (0, "")])
def test_a_node_with_a_gpu_error_is_replaced_or_left_out_of_the_next_start(
    spares: int, replaced: str, folder: Path, slurm: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node still answers; the errors of the other ranks are no reason."""
    every, requeued = ["n1", "n2", "n3"][: 2 + spares], []
    monkeypatch.setattr(client, "hostnames", lambda _: list(every))
    monkeypatch.setattr(client, "call", lambda *_, **__: " NodeList=n Requeue=0")
    monkeypatch.setattr(node_failure, "unreachable", lambda _: [])
    monkeypatch.setattr(node_failure, "requeue", lambda *_, **wishes: requeued.append(wishes["without"]))
    ledger.note(folder, "started", "78", nodes="n", iteration=0, restarts=0)
    ledger.note(folder, "nodes", "78", chosen=["n1", "n2"], left_out={})
    xid = "n2: [18.4] NVRM: Xid (PCI:0000:1b:00): 79, pid=8, GPU has fallen off the bus."
    (folder / "run.log").write_text(f"START a\n[rank1]: torch.distributed.DistBackendError: NCCL error\n{xid}\n")
    outcome = attempt.end(folder, 1, {"SLURM_JOB_ID": "78", "SLURM_JOB_NODELIST": "n"})
    assert (outcome.status, outcome.exclude, xid in outcome.evidence) == ("GPU error", "n2", True)
    assert known_status(folder) == outcome
    assert node_failure.goes_on(folder, "78") == replaced and node_failure.lost_nodes(folder, "78") == ["n2"]
    assert requeued == ([] if replaced else [["n2"]])


def test_starts_that_a_spare_repeats_are_not_failures_of_the_run(folder: Path) -> None:
    for _ in range(5):
        ledger.note(folder, "started", "79", nodes="n", iteration=0, restarts=0)
        ledger.note(folder, "ended", "79", status="crashed", evidence="")
        ledger.note(folder, "replaced", "79", nodes=["n2"], iteration=0)
    assert attempt.blocked(folder) == ""
    for _ in range(3):
        trained(folder, "79")
    assert attempt.blocked(folder)


def test_a_job_that_goes_on_with_a_spare_still_holds_the_folder(folder: Path, slurm: dict[str, str]) -> None:
    trained(folder, "77")
    ledger.note(folder, "replaced", "77", nodes=["n2"], iteration=0)
    slurm["77"] = "RUNNING"
    assert attempt.begin(folder, ME) == "stop: job 77 trains here"
