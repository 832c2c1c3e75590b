"""Whether a job starts the training, and which of a run's jobs counts, by its ledger and by what
SLURM reports.
"""

import json
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_cluster import REQUEST, SITE, plan, run_folder
from support import small_plan

from trilane.config.batch_rampup import Ramp
from trilane.config.plan import read_plan
from trilane.slurm import attempt, chain, client, copies, jobs
from trilane.slurm.client import JobState
from trilane.workspace import ledger, pace
from trilane.workspace.checkpoints import name_of
from trilane.workspace.run import Run
from trilane.workspace.status import RunStatus, Status, known_status, write_status
from trilane_diagnose import nodes
from trilane_diagnose.node_test import Findings

BEGINNING = "go: from the beginning"


@pytest.fixture(autouse=True)
def own_job(monkeypatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n")


@pytest.fixture
def slurm(monkeypatch) -> dict[str, str]:
    """The states of jobs, by id, in a SLURM that knows nothing else."""
    known: dict[str, str] = {}

    def states(ids: Iterable[str], names: Collection[str] = ()) -> dict[str, JobState]:
        return {job: JobState(id=job, state=known.get(job, client.FORGOTTEN)) for job in ids}

    monkeypatch.setattr(client, "is_installed", lambda: True)
    monkeypatch.setattr(client, "states", states)
    monkeypatch.setattr(client, "past", lambda _: {})
    return known


@pytest.fixture
def folder(tmp_path) -> Path:
    """A run folder with three submitted jobs."""
    made = run_folder(tmp_path, plan("one", tmp_path / "data", nodes=1))
    for job in ("77", "78", "79"):
        ledger.note(made, "submitted", job, site="test")
    return made


def start(folder: Path, job: str) -> None:
    ledger.note(folder, "started", job, nodes="n1", iteration=0, restarts=0)


def status(word: str, evidence: str, exit_code: int = 1) -> RunStatus:
    return RunStatus(
        status=Status(word), evidence=evidence, rank=None, exit_code=exit_code, seconds=1.0
    )


def trained(folder: Path, job: str, word: str = "crashed") -> None:
    """The job started, and ended with that status in the folder."""
    start(folder, job)
    write_status(folder, status(word, f"by {job}"))
    ledger.note(folder, "ended", job, status=word, evidence=f"by {job}")


def spared(folder: Path, job: str, verdict: str = "dead node") -> None:
    """A spare takes the place of n2."""
    facts = {"verdict": verdict, "action": "spare", "again": True, "nodes": ["n2"]}
    ledger.note(folder, "response", job, **facts, iteration=0, says="one of three spares")


def at(folder: Path, iteration: int) -> None:
    lines = [f'{{"iteration": {number + 1}}}\n' for number in range(iteration)]
    (folder / "steps.jsonl").write_text("".join(lines))


def checkpoint(folder: Path, iteration: int) -> None:
    place = folder / "checkpoints" / name_of(iteration)
    place.mkdir(parents=True)
    (place / "manifest.json").write_text("{}")


def test_a_job_starts_where_iterations_are_left_and_nothing_stops_it(folder, slurm):
    (folder / "stop").touch()
    assert f"{folder}/stop" in attempt.begin(folder)
    (folder / "stop").unlink()
    assert attempt.begin(folder) == BEGINNING
    at(folder, 4)
    assert attempt.begin(folder).startswith("stop: done: iteration 4 of 4")


@pytest.mark.parametrize(
    ("at_iteration", "saved", "done"), [(4, 4, True), (4, 2, False), (3, 2, False)]
)
def test_nothing_is_left_to_do_where_the_last_iteration_is_saved(
    at_iteration: int, saved: int, done: bool, folder
):
    p = read_plan(folder)
    saving = replace(p, run=replace(p.run, save_interval=2))
    (folder / "plan.json").write_text(json.dumps(saving.to_json()))
    at(folder, at_iteration)
    checkpoint(folder, saved)
    assert bool(attempt.finished(Run(folder))) is done


def test_a_third_failure_at_one_iteration_is_the_last_until_the_run_is_submitted_again(
    folder,
):
    for _ in range(3):
        assert attempt.begin(folder).startswith("go: ")
        (folder / "run.log").write_text("RuntimeError: no such disk\n")
        assert nodes.end(folder, 1).status == "crashed"
    wanted = "3 attempts did not get beyond iteration 0"
    assert attempt.begin(folder) == f"stop: {wanted}"
    at(folder, 1)
    assert attempt.blocked(Run(folder)) == "", "it got further"
    at(folder, 0)
    ledger.note(folder, "submitted", "80", site="test")
    for _ in range(3):  # starts that a spare repeats are no failures of the run
        trained(folder, "80")
        spared(folder, "80")
    assert attempt.blocked(Run(folder)) == ""


def test_an_attempt_that_saved_nothing_is_put_aside_whole_and_one_that_did_goes_on_in_its_log(
    folder,
):
    attempt.begin(folder)
    (folder / "run.log").write_text("RuntimeError: 1\n")
    nodes.end(folder, 1)
    attempt.begin(folder)
    assert known_status(folder / "attempts/1").evidence == "RuntimeError: 1"
    assert not (folder / "run.log").exists() and not (folder / "status.json").exists()
    checkpoint(folder, 2)
    (folder / "run.log").write_text("START a\nCUDA out of memory. Tried to allocate 2.00 GiB\n")
    assert nodes.end(folder, 1).status == "OOM"
    assert attempt.begin(folder) == "go: from iter_0000002"
    with (folder / "run.log").open("a") as log:
        log.write("START b\nValueError: gbs\n")
    assert nodes.end(folder, 1).evidence == "ValueError: gbs", "only its own end counts"


def test_a_link_waits_for_the_stage_before_it(tmp_path):
    p = small_plan("ramp", train_iters=12, gbs=24)
    p = replace(p, cluster=replace(p.cluster, gpus_per_node=2, max_nodes=4))
    p = replace(p, run=replace(p.run, ramp=Ramp(start=8, increment=8, samples=64), save_interval=2))
    one, two = chain.create(tmp_path / "c", p, chain.parse_stages("8:1:2,24:2:2"), SITE, REQUEST)
    at(one, 6)
    checkpoint(one, 4)
    answer = attempt.begin(two)
    assert answer.startswith("stop: ramp-1-n1") and "6 of 6" in answer
    checkpoint(one, 6)
    assert attempt.begin(two) == BEGINNING


def test_a_folder_in_which_another_job_trains_is_left_alone(folder, slurm, monkeypatch):
    """SLURM lists a job as running for some time after its script has called `job end`."""
    start(folder, "77")
    slurm["77"] = "RUNNING"
    assert attempt.begin(folder) == "stop: job 77 trains here"
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert attempt.begin(folder) == BEGINNING, "the same job, requeued"
    slurm["77"] = "NODE_FAIL"
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    assert attempt.begin(folder) == BEGINNING
    trained(folder, "78")
    ledger.note(folder, "submitted", "79", site="test")
    slurm["78"] = "RUNNING"
    monkeypatch.setenv("SLURM_JOB_ID", "79")
    assert attempt.begin(folder) == BEGINNING, "it has recorded its end"
    ledger.note(folder, "ended", "79", status="crashed", evidence="")
    spared(folder, "78")
    assert attempt.begin(folder) == "stop: job 78 trains here"


def test_a_job_waits_for_the_end_of_one_whose_ranks_may_still_save(folder, slurm, monkeypatch):
    """SLURM 22.05 starts a job with --dependency=singleton on other nodes while the one before is
    COMPLETING.
    """
    start(folder, "77")
    slurm["77"] = "COMPLETING"
    waits: list[float] = []
    monkeypatch.setattr(
        attempt.time, "sleep", lambda s: (waits.append(s), slurm.update({"77": "CANCELLED"}))
    )
    assert attempt.begin(folder) == BEGINNING and waits == [2]
    slurm["77"] = "COMPLETING"  # for ever, as on a node that has died
    assert attempt.competing(Run(folder), "79", patience_s=0) == ""


@pytest.mark.parametrize(
    ("trainings", "states", "shown", "waiting"),
    [
        # of several jobs that trained the last one; the later ones of a chain are cancelled
        ("77 stopped, 78 crashed", "COMPLETED FAILED CANCELLED", "78 crashed by 78", 0),
        # one that failed before it began has not the end of the one before it
        ("78 crashed", "COMPLETED FAILED FAILED", "79 crashed SLURM: FAILED; the log gives", 0),
        # a job over its time limit is killed by signals, which looks like a crash
        ("77 crashed", "TIMEOUT CANCELLED CANCELLED", "77 time limit SLURM: TIMEOUT", 0),
        # that which runs, and how many wait behind it
        ("", "RUNNING PENDING PENDING", "77 running ", 2),
        ("", "COMPLETED PENDING RUNNING", "79 running ", 1),
    ],
)
def test_a_run_is_shown_by_its_job_that_counts(
    trainings: str, states: str, shown: str, waiting: int, folder, slurm
):
    for pair in filter(None, trainings.split(", ")):
        trained(folder, *pair.split(" "))
    slurm |= dict(zip(("77", "78", "79"), states.split(), strict=True))
    (found,) = jobs.job_status([folder])
    assert f"{found.id} {found.status} {found.evidence}".startswith(shown)
    assert found.waiting == waiting


def test_a_run_on_a_full_disk_or_after_a_response_says_so(folder, slurm, monkeypatch):
    p = read_plan(folder)
    saving = replace(p, run=replace(p.run, save_interval=2))
    (folder / "plan.json").write_text(json.dumps(saving.to_json()))
    (folder / "run.log").write_text("START\n")
    start(folder, "77")
    slurm["77"] = "RUNNING"
    spared(folder, "77")
    assert "of three spares" in jobs.job_status([folder])[0].evidence
    at(folder, 1)  # it got further
    assert jobs.job_status([folder])[0].evidence == "START"
    monkeypatch.setattr(jobs, "free_bytes", lambda _: 5)
    assert jobs.job_status([folder])[0].evidence.startswith("DISK FULL: ")


XID = "n2: [18.4] NVRM: Xid (PCI:0000:1b:00): 79, pid=8, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("dead", "broken", "spares", "log", "word", "replaced", "without"),
    [
        (["n2"], {}, 1, "", "node failure", "n2", None),
        (["n3"], {}, 1, "", "crashed", "", None),  # the spare: no reason for the training to fail
        (["n2"], {}, 0, "", "node failure", "", ("n2",)),
        ([], {"n2": "has no GPU"}, 1, "", "crashed", "n2", None),
        # the node of an Xid still answers; the errors of the other ranks are no reason
        ([], {}, 1, XID, "GPU error", "n2", None),
    ],
)
def test_a_spare_takes_the_place_of_a_node_that_is_dead_or_broken(
    dead: list[str],
    broken: dict[str, str],
    spares: int,
    log: str,
    word: str,
    replaced: str,
    without: tuple | None,
    folder,
    slurm,
    monkeypatch,
):
    every, requeued = ["n1", "n2", "n3"][: 2 + spares], list[list[str]]()
    monkeypatch.setattr(client, "hostnames", lambda _: list(every))
    monkeypatch.setattr(client, "call", lambda *_, **__: " NodeList=n Requeue=1")
    monkeypatch.setattr(nodes, "unreachable", lambda _: dead)
    monkeypatch.setattr(nodes, "requeue", lambda count, without: requeued.append(without))
    start(folder, "78")
    ledger.note(folder, "nodes", "78", chosen=["n1", "n2"], left_out={})
    if log:
        error = "[rank1]: torch.distributed.DistBackendError: NCCL error"
        (folder / "run.log").write_text(f"START a\n{error}\n{log}\n")
    outcome = nodes.end(folder, 1, test=lambda _: Findings(broken=broken))
    assert (outcome.status, nodes.goes_on(folder)) == (word, bool(replaced))
    assert outcome.exclude == (replaced or ",".join(without or ()))
    assert requeued == ([] if without is None else [without]) and known_status(folder) == outcome
    lost = [*dead, *(broken if replaced else ()), *(["n2"] if log else ())]
    assert nodes.lost_nodes(folder) == lost
    ledger.note(folder, "started", "78", nodes="n", iteration=0, restarts=1)
    assert nodes.lost_nodes(folder) == [], "requeued, it has other nodes"
    assert not nodes.goes_on(folder)


def test_a_spare_takes_over_from_a_node_that_makes_a_run_slow_without_another_test(
    folder, slurm, monkeypatch
):
    names = ["n1", "n2", "n3"]
    monkeypatch.setattr(client, "hostnames", lambda _: names)
    monkeypatch.setattr(nodes, "job_nodes", lambda: names)
    monkeypatch.setattr(client, "call", lambda *_, **__: "n")
    start(folder, "78")
    ledger.note(folder, "nodes", "78", chosen=["n1", "n2"], left_out={})
    (folder / "ranks").mkdir(exist_ok=True)
    pace.note(folder, 20, "SLOW since iteration 10: n2", ("n2.site.org",))
    write_status(folder, status("stopped", f"stopped at iteration 25 by {pace.RESTART}, saved", 0))
    monkeypatch.setattr(client, "hostnames", lambda _: names[:2])  # the spare has failed since
    assert nodes.end(folder, 0).exclude == "" and nodes.goes_on(folder)
    assert nodes.lost_nodes(folder) == []
    monkeypatch.setattr(client, "hostnames", lambda _: names)
    outcome = nodes.end(folder, 0)
    assert outcome.exclude == "n2" and nodes.goes_on(folder)
    assert nodes.lost_nodes(folder) == ["n2"]
    nodes.start_nodes(folder, 2, lambda _: pytest.fail("tested"))
    assert nodes.training_nodes(folder) == ["n1", "n3"]


EDITS = [
    ({"optimizer": {"lr": 6e-4}}, "optimizer.lr: 0.001 -> 0.0006"),
    ({"data": {"source": "\x1b[31mred"}}, "plan"),  # none that can be read
    ({"dropout": {"hidden": 0.0}}, ""),  # what it is by default
    (None, "plan"),  # deleted
]


@pytest.mark.parametrize(("edit", "difference"), EDITS)
def test_a_job_whose_plan_is_not_what_was_submitted_stops_with_the_difference(
    edit: dict | None, difference: str, folder, slurm, monkeypatch
):
    """However the file is written; also when it resumes. A job submitted by hand trains what is
    there.
    """
    monkeypatch.setenv("SLURM_JOB_ID", "81")
    path = folder / "plan.json"
    ledger.note(folder, "submitted", "81", site="test", plan=copies.keep_plan(Run(folder)))
    values = json.loads(path.read_text())
    for name, part in (edit or {}).items():
        values[name] |= part
    path.write_text(json.dumps(values, indent=7, sort_keys=True))
    if edit is None:
        path.unlink()
    answer = attempt.begin(folder)
    assert answer.startswith("stop: " if difference else "go: ") and difference in answer
    if difference:
        (kept,) = (folder / "submitted").iterdir()
        assert f"`cp submitted/{kept.name} plan.json`" in answer and "\x1b" not in answer
        assert "\n" not in ledger.events(folder, "refused")[-1]["says"]
        path.write_text(kept.read_text())
        assert attempt.begin(folder) == BEGINNING
