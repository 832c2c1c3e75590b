"""What SLURM's commands answer on a bad day: each is a small script here that says what the real
one says.
"""

import functools
import json
from pathlib import Path

import pytest
from slurm_cluster import REQUEST, SITE, Commands, one, plan, run_folder, submit_chain

from trilane.cli.app import main
from trilane.slurm import attempt, chain, client, copies, jobs, ledger
from trilane.utils.folder_lock import FolderLock
from trilane.utils.validation import to_mapping
from trilane.workspace.status import RunStatus, write_status

AWAY = (
    "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with one job, 77."""
    made = run_folder(tmp_path, plan("one", tmp_path / "data", nodes=1))
    ledger.note(made, "submitted", "77", site="test", script="")
    return made


def accounted(commands: Commands, **states: str) -> None:
    """Those jobs have gone from squeue, and sacct knows them."""
    commands.say(
        "sacct",
        "\n".join(f"echo '{job[1:]}|{state}|1:00|2:00|n1|me'" for job, state in states.items()),
    )


def test_a_job_that_runs_only_in_a_late_accounting_holds_no_run(
    commands: Commands, folder: Path
) -> None:
    """Once the controller has forgotten it, it runs nowhere; one of somebody else's, which squeue
    is not asked for, does.
    """
    accounted(commands, j77="RUNNING")
    assert (
        jobs.active_jobs(folder) == []
        and one(folder).state == "FORGOTTEN"
        and jobs.cancel([folder]) == []
    )
    commands.say("sacct", "echo '77|RUNNING|1:00|2:00|n1|you'")
    assert jobs.active_jobs(folder) == ["77"]


@pytest.mark.parametrize("state", ["SUSPENDED", "REQUEUE_HOLD"])
def test_a_run_that_a_job_still_holds_takes_no_second_one(
    state: str, commands: Commands, folder: Path
) -> None:
    commands.say("squeue", f"echo '77|{state}|None|1:00|2:00|n1|x'")
    with pytest.raises(ValueError, match=r"has job 77 already"):
        jobs.submit(folder, SITE, REQUEST)
    assert jobs.active_jobs(folder) == ["77"] and not commands.calls("sbatch")


def test_a_job_that_died_before_it_trained_is_shown_with_what_its_script_printed(
    commands: Commands, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    """77 trained and was stopped; 78 found no environment; 79, which waited for it, was cancelled."""
    ledger.note(folder, "started", "77", nodes="", iteration=0, restarts=0)
    (folder / "run.log").write_text("RuntimeError: of the first job\n")
    stopped = RunStatus(
        status="stopped", evidence="saved at iteration 20", rank=None, exit_code=0, seconds=1.0
    )
    write_status(folder, stopped)
    ledger.note(folder, "ended", "77", status="stopped", evidence="x")
    for job in ("78", "79"):
        ledger.note(folder, "submitted", job, site="test", script="")
    line = "line 23: /nowhere/bin/activate: No such file or directory"
    (folder / "slurm-78.out").write_text(f"{line}\n\n")
    accounted(commands, j77="COMPLETED", j78="FAILED", j79="CANCELLED")
    found = one(folder)
    assert (found.id, found.status, found.evidence) == ("78", "crashed", f"slurm-78.out: {line}")
    assert main(["slurm", "status", str(folder), "--lines", "2"]) == 1
    assert capsys.readouterr().out.endswith(f"\n{line}\n\n")
    ledger.note(folder, "started", "79", nodes="", iteration=0, restarts=0)
    accounted(commands, j77="COMPLETED", j78="FAILED", j79="COMPLETED")
    ledger.note(folder, "ended", "79", status="stopped", evidence="x")
    (folder / "slurm-79.out").write_text("go: from the beginning\n")
    assert (one(folder).id, one(folder).evidence) == ("79", "saved at iteration 20")
    assert jobs.logs(folder) == ["RuntimeError: of the first job"]


def test_attempts_that_were_killed_end_in_the_ledger_by_what_slurm_accounts(
    commands: Commands, folder: Path
) -> None:
    """77 was preempted after it had lost a spare, requeued, and ended by its time limit. Asked
    twice, noted once.
    """
    for restarts in (0, 1):
        ledger.note(folder, "started", "77", nodes="", iteration=0, restarts=restarts)
    (folder / "run.log").write_text("START\n")
    rows = "77|RESIZING|2026-11-27T09:00:00|0:0\n77|PREEMPTED|2026-11-27T10:00:00|0:0\n77|TIMEOUT|2026-11-27T12:00:00|0:1"
    commands.say(
        "sacct", f"[[ $* == *-DXnP* ]] && echo '{rows}' || echo '77|TIMEOUT|1:00|2:00|n1|me'"
    )
    for _ in range(2):
        assert one(folder).status == "time limit" and not ledger.unended(folder)
    assert [(e["status"], e["end"], e["exit"]) for e in ledger.events(folder, "ended")] == [
        ("preempted", "2026-11-27T10:00:00", "0:0"),
        ("time limit", "2026-11-27T12:00:00", "0:1"),
    ]
    assert "`trilane slurm submit" in (folder / "run.log").read_text().splitlines()[-1]
    ledger.note(folder, "started", "77", nodes="", iteration=0, restarts=1)
    # slurmdbd learns of the end later than the controller
    commands.say(
        "sacct",
        "[[ $* == *-DXnP* ]] && printf '77|PREEMPTED|x|0:0\\n77|REQUEUED|x|0:0\\n' || echo '77|CANCELLED|1|2|n1|me'",
    )
    assert one(folder).status and ledger.events(folder, "ended")[-1]["state"] == "CANCELLED"
    assert ledger.age_s({"time": "2999-01-01T00:00:00+00:00"}) == 0


def test_a_squeue_that_lies_a_cut_ledger_and_a_deleted_plan_start_no_second_training(
    commands: Commands, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    """squeue lists nothing, or nonsense, while 77 runs; its start is lost, and the plan gone."""
    runs = "JobId=77 JobName=x UserId=me(1) JobState=RUNNING Reason=None NodeList=n1 X=1"
    commands.say("scontrol", f"cat >/dev/null; echo '{runs}'")
    for answer in (
        "true",
        "echo nonsense",
        "echo '77|RUNNING|None|1|2|n1|x'; echo '77|COMPLETED|None|1|2|n1|x'",
    ):
        commands.say("squeue", answer)
        with pytest.raises(jobs.ActiveJob, match=r"has job 77 already \(RUNNING\)"):
            jobs.submit(folder, SITE, REQUEST)
    (folder / "slurm-77.out").write_text("go: from the beginning\n")
    with (folder / ledger.NAME).open("ab") as file:
        file.write(b'{"event": "started", "id": "77", "no\n\xff\x00\n')
    assert attempt.begin(folder, {"SLURM_JOB_ID": "78"}) == "stop: job 77 trains here"
    (folder / "plan.json").unlink()
    assert main(["slurm", "status", str(folder)]) == 0
    out, said = capsys.readouterr()
    assert "RUNNING" in out and "plan.json" in out and "2 of 4 lines are damaged" in said
    assert main(["slurm", "cancel", str(folder)]) == 0 and jobs.logs(folder) == [
        "go: from the beginning"
    ]


def test_watching_goes_on_while_slurm_is_away_and_says_it_once(
    commands: Commands, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    commands.say("squeue", AWAY)
    lines = jobs.watch([folder], every_s=0.01, seconds=60)
    assert next(lines).startswith(
        "SLURM does not answer, asked again every 0.01 s: slurm=squeue: the controller"
    )
    commands.say("squeue", "true")
    accounted(commands, j77="TIMEOUT")
    resume = f"`trilane slurm submit {folder} --site test` resumes at iteration 0"
    died = f"one: job 77 TIMEOUT n1: DIED: time limit SLURM: TIMEOUT; {resume}"
    assert list(lines) == ["SLURM answers again", died]
    commands.say("squeue", AWAY)
    assert main(["slurm", "watch", str(folder), "--every", "0.01", "--seconds", "0.2"]) == 75
    assert capsys.readouterr().out.count("SLURM does not answer") == 1
    commands.say("scontrol", AWAY)
    assert main(["slurm", "status", str(folder)]) == 75
    assert capsys.readouterr().err.startswith(
        "trilane: slurm=scontrol ping: SLURM does not answer ("
    )


def test_a_submission_that_may_have_been_taken_is_not_called_undone(
    commands: Commands, folder: Path
) -> None:
    commands.say(
        "sbatch", "echo 'sbatch: error: Batch job submission failed: Socket timed out' >&2; exit 1"
    )
    commands.say("squeue", AWAY)
    script, name = folder / "job.sbatch", client.job_name(folder)
    with pytest.raises(client.SlurmUnreachable) as found:
        client.sbatch(script, name=name, known=["77"])
    said = f"the job may have been accepted: look with: squeue -u $USER -t all --name={name}"
    assert str(found.value).endswith(said) and "nothing was changed" not in str(found.value)
    commands.say(
        "squeue", "; ".join(f"echo '{job}|PENDING|None|0:00|2:00||{name}'" for job in (77, 78))
    )
    assert (
        client.sbatch(script, name=name, known=["77"]) == "78"
        and len(commands.calls("sbatch")) == 2
    )


def test_the_status_of_many_runs_takes_one_call_of_slurm(
    commands: Commands, tmp_path: Path
) -> None:
    folders = [tmp_path / f"run-{number:03d}" for number in range(30)]
    for number, folder in enumerate(folders, 1):
        folder.mkdir()
        (folder / "plan.json").write_text(
            json.dumps(plan(folder.name, tmp_path / "data").to_json())
        )
        ledger.note(folder, "submitted", f"{number}", site="test")
    commands.say("squeue", 'for n in {1..30}; do echo "$n|PENDING|JobHeldUser|0:00|2:00||x"; done')
    assert len(jobs.job_status(folders)) == 30 and len(commands.calls("squeue")) == 1


def test_without_slurm_a_submission_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(
        ValueError,
        match=r"^slurm=sbatch: is not installed here; `trilane train` trains on this machine$",
    ):
        client.sbatch(folder / "job.sbatch")


def test_a_chain_whose_submission_was_killed_is_found_by_its_name(
    commands: Commands, tmp_path: Path
) -> None:
    """Its jobs are shown, cancelled, record themselves, and let no other be submitted."""
    (run,) = chain.create(tmp_path / "chain", plan("long", tmp_path / "d"), [], SITE, REQUEST)
    name = client.job_name(run)
    commands.say(
        "squeue", "; ".join(f"echo '{job}|PENDING|None|0:00|1:00||{name}'" for job in (7, 8))
    )
    assert (one(run).id, one(run).waiting) == ("7", 1) and not ledger.job_ids(run)
    with pytest.raises(jobs.ActiveJob, match=r"has job 7, 8 already"):
        submit_chain(tmp_path / "chain", times=2)
    assert ledger.job_ids(run) == ["7", "8"] == jobs.cancel([run]) and not commands.calls("sbatch")


def test_a_run_that_trains_here_is_not_started_twice_nor_submitted(
    commands: Commands, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    with FolderLock([folder]).held(0):
        assert main(["train", str(folder / "plan.json")]) == 2
    assert "is locked by process" in capsys.readouterr().err
    assert (
        main(
            [
                "slurm",
                "submit",
                str(folder),
                "--site",
                "local",
                "--allow",
                "cluster",
                "--allow",
                "script",
            ]
        )
        == 2
    )
    assert "site=local: has no SLURM; `trilane train PLAN` trains here" in capsys.readouterr().err


def test_a_completed_run_is_left_out_of_a_submission(
    commands: Commands, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Until all are: then the check refuses them."""
    done, asked = (
        run_folder(tmp_path, plan("done", tmp_path / "data", nodes=1)),
        tmp_path / "site.json",
    )
    write_status(
        done, RunStatus(status="completed", evidence="", rank=None, exit_code=0, seconds=1.0)
    )
    asked.write_text(json.dumps(to_mapping(SITE)))
    options = ["--site", str(asked), "--account", "xyz@a100", "--dry-run", "--json"]
    for runs, wanted in (([done, folder], [folder]), ([done], [done])):
        main(["slurm", "sweep", "submit", *map(str, runs), *options])
        found = json.loads(capsys.readouterr().out)
        findings = found["findings"]
        assert [(row["jobs"], row["nodes"]) for row in found["runs"]] == [(1, 1)]
        assert list(findings) == list(map(str, wanted))
        assert ("run folder" in {f["rule"] for f in findings[str(wanted[0])]}) is (wanted == [done])
    died, full = (
        run_folder(tmp_path, plan(name, tmp_path / "data", nodes=1)) for name in ("died", "full")
    )
    for run, status in ((died, "crashed"), (full, "OOM")):
        write_status(
            run, RunStatus(status=status, evidence="", rank=None, exit_code=1, seconds=1.0)
        )
    main(["slurm", "submit", *map(str, (done, died, full)), *options, "--failed"])
    assert list(json.loads(capsys.readouterr().out)["findings"]) == [str(died)], (
        "the same plan runs out of memory again"
    )


def test_a_job_that_waits_takes_a_changed_plan_where_that_is_accepted(
    commands: Commands, folder: Path
) -> None:
    kept, script = copies.keep_plan(folder), copies.hash_of((folder / "job.sbatch").read_text())
    ledger.note(folder, "submitted", "78", site="/a b/test.json", plan=kept, script=script)
    edit(folder, "optimizer.lr", 6e-4)
    assert "optimizer.lr: 0.001 -> 0.0006" in attempt.altered(folder, "78")
    assert "--site '/a b/test.json'" in attempt.altered(folder, "78")
    commands.say("squeue", "echo '78|PENDING|None|1:00|2:00||x'")
    assert jobs.accept_changes(folder, "test") == ["78"] and attempt.altered(folder, "78") == ""
    assert not jobs.unreached(folder, ["78"])
    (folder / "job.sbatch").write_text("#!/bin/bash\n")
    assert "job 78 keeps the job.sbatch that SLURM has" in jobs.unreached(folder, ["78"])[0]


@pytest.mark.parametrize(
    ("times", "parallel", "before"),
    [
        (1, 0, "---"),
        (1, 1, "-12"),
        (1, 2, "--1"),
        (1, 3, "---"),
        (2, 1, "-12345"),
        (2, 2, "--1234"),
    ],
)
def test_so_many_jobs_run_at_a_time_as_are_asked_for(
    times: int, parallel: int, before: str, commands: Commands, tmp_path: Path
) -> None:
    """Three runs: a job waits for the one so many before it."""
    commands.say("sbatch", f"grep -c ^sbatch {commands.log}")
    runs = [run_folder(tmp_path, plan(name, tmp_path / "data", nodes=1)) for name in "abc"]
    made = jobs.submit_all(runs, SITE, REQUEST, times=times, parallel=parallel)
    assert made == [(run, str(number)) for number, run in enumerate(sorted(runs * times), 1)]
    after = {e["id"]: e["after"] for run in runs for e in ledger.events(run, "submitted")}
    assert [after[job].removeprefix("afterany:") or "-" for _, job in made] == [*before]


def edit(folder: Path, name: str, value: object) -> None:
    values = json.loads((folder / "plan.json").read_text())
    *path, last = name.split(".")
    functools.reduce(dict.__getitem__, path, values)[last] = value
    (folder / "plan.json").write_text(json.dumps(values))
