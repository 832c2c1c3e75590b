"""Jobs of a run: what is read, submitted, shown and watched, also when SLURM's commands, each a
small script here, answer as on a bad day.
"""

import re
import shutil
from pathlib import Path

import pytest
from slurm_cluster import REQUEST, SITE, Commands, one, plan, run_folder, submit, submit_chain

from trilane.cli.app import main
from trilane.cli.slurm import folders_of
from trilane.slurm import attempt, chain, client, jobs
from trilane.workspace import ledger
from trilane.workspace.run import Run
from trilane.workspace.status import RunStatus, write_status

AWAY = (
    "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A run folder with one job, 77."""
    made = run_folder(tmp_path, plan("one", tmp_path / "data", nodes=1))
    ledger.note(made, "submitted", "77", site="test")
    return made


def status(word: str, evidence: str = "") -> RunStatus:
    return RunStatus(status=word, evidence=evidence, rank=None, exit_code=0, seconds=1.0)


def queue(commands: Commands, *rows: str, name: str = "x") -> None:
    """What squeue lists: "77 RUNNING" and the like."""
    lines = [f"echo '{row.replace(' ', '|')}|None|1:00|n1|{name}'" for row in rows]
    commands.say("squeue", "\n".join(lines) or "true")


def accounted(commands: Commands, *rows: str, user: str = "me") -> None:
    """What sacct has of jobs that have gone from squeue: "77 TIMEOUT" and the like."""
    lines = [f"echo '{row.replace(' ', '|')}|1:00|n1|{user}'" for row in rows]
    commands.say("sacct", "\n".join(lines))


def test_a_job_that_runs_only_in_a_late_accounting_holds_no_run(commands, folder):
    """Once the controller has forgotten it, it runs nowhere; one of somebody else's, which squeue
    is not asked for, does.
    """
    accounted(commands, "77 RUNNING")
    assert jobs.active_jobs(folder) == [] == jobs.cancel([folder])
    assert one(folder).state == "FORGOTTEN"
    accounted(commands, "77 RUNNING", user="you")
    assert jobs.active_jobs(folder) == ["77"]


@pytest.mark.parametrize("state", ["SUSPENDED", "REQUEUE_HOLD"])
def test_a_run_that_a_job_still_holds_takes_no_second_one(state: str, commands, folder):
    queue(commands, f"77 {state}")
    with pytest.raises(ValueError, match=r"has job 77 already"):
        submit(folder, SITE, REQUEST)
    assert jobs.active_jobs(folder) == ["77"] and not commands.calls("sbatch")


def test_a_job_that_died_before_it_trained_is_shown_with_what_its_script_printed(
    commands, folder, capsys
):
    """77 trained and was stopped; 78 found no environment; 79, which waited for it, was
    cancelled.
    """
    ledger.note(folder, "started", "77", nodes="", iteration=0, restarts=0)
    (folder / "run.log").write_text("RuntimeError: of the first job\n")
    write_status(folder, status("stopped", "saved at iteration 20"))
    ledger.note(folder, "ended", "77", status="stopped", evidence="x")
    for job in ("78", "79"):
        ledger.note(folder, "submitted", job, site="test")
    line = "line 23: /nowhere/bin/activate: No such file or directory"
    (folder / "slurm-78.out").write_text(f"{line}\n\n")
    accounted(commands, "77 COMPLETED", "78 FAILED", "79 CANCELLED")
    found = one(folder)
    assert (found.id, found.status, found.evidence) == ("78", "crashed", f"slurm-78.out: {line}")
    assert main(["slurm", "status", str(folder)]) == 1
    assert capsys.readouterr().out.rstrip().endswith(line)


def test_no_link_out_of_a_run_folder_is_followed(commands, folder):
    (folder.parent / "private").write_text("what only I may read\n")
    for name in ("run.log", "slurm-77.out"):
        (folder / name).symlink_to(folder.parent / "private")
    for state in ("77 RUNNING", "77 FAILED"):
        queue(commands, state)
        assert "a link that leads out of the run folder" in one(folder).evidence


def test_a_cut_ledger_and_a_deleted_plan_start_no_second_training(commands, folder, capsys):
    both = "echo '77|RUNNING|None|1|n1|x'; echo '77|COMPLETED|None|1|n1|x'"
    commands.say("squeue", both)
    with pytest.raises(jobs.ActiveJob, match="has job 77 already"):
        submit(folder, SITE, REQUEST)
    (folder / "plan.json").unlink()
    assert main(["slurm", "status", str(folder)]) == 0
    out, _ = capsys.readouterr()
    assert "RUNNING" in out and "plan.json" in out
    with (folder / ledger.NAME).open("ab") as file:
        file.write(b'{"event": "started", "id": "77", "no\n')
    for read in (attempt.begin, jobs.active_jobs):
        with pytest.raises(ValueError, match=r"^ledger=.*jobs\.jsonl: line 2 is damaged; look"):
            read(folder)


def test_watching_goes_on_while_slurm_is_away_and_reports_it_once(commands, folder, capsys):
    commands.say("squeue", AWAY)
    lines = jobs.watch([folder], every_s=0.01, seconds=60)
    assert next(lines).startswith("SLURM does not answer, asked again every 0.01 s: slurm=squeue")
    queue(commands)
    accounted(commands, "77 TIMEOUT")
    (line,) = lines
    assert line.endswith("time limit SLURM: TIMEOUT")
    commands.say("squeue", AWAY)
    assert main(f"slurm watch {folder} --every 0.01 --seconds 0.2".split()) == 75
    assert capsys.readouterr().out.count("SLURM does not answer") == 1
    commands.say("scontrol", AWAY)
    assert main(["slurm", "status", str(folder)]) == 75


def test_a_submission_that_may_have_been_taken_is_not_called_undone(commands, folder):
    commands.say(
        "sbatch", "echo 'sbatch: error: Batch job submission failed: Socket timed out' >&2; exit 1"
    )
    commands.say("squeue", AWAY)
    script, name = folder / "job.sbatch", client.job_name(folder)
    look = f"the job may have been accepted: look with: squeue -u $USER -t all --name={name}"
    with pytest.raises(client.SlurmUnreachable, match=re.escape(look) + "$"):
        client.sbatch(script, name=name, known=["77"])
    queue(commands, "77 PENDING", "78 PENDING", name=name)
    assert client.sbatch(script, name=name, known=["77"]) == "78"
    assert len(commands.calls("sbatch")) == 2


def test_a_chain_whose_submission_was_killed_is_found_by_its_name(commands, tmp_path):
    """Its jobs are shown, cancelled, record themselves, and let no other be submitted."""
    (run,) = chain.create(tmp_path / "chain", plan("long", tmp_path / "d"), [], SITE, REQUEST)
    queue(commands, "7 PENDING", "8 PENDING", name=client.job_name(run))
    assert (one(run).id, one(run).waiting) == ("7", 1) and not Run(run).job_ids()
    with pytest.raises(jobs.ActiveJob, match=r"has job 7, 8 already"):
        submit_chain(tmp_path / "chain", times=2)
    assert Run(run).job_ids() == ["7", "8"] == jobs.cancel([run]) and not commands.calls("sbatch")


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_copy_of_a_run_leaves_the_runs_job_alone(by_hand: bool, commands, folder, capsys):
    """By the job's name, or by its folder where it was submitted by hand; a folder that was only
    moved has its job. A job submitted for the copy does not wait for that of the run.
    """
    ledger.note(folder, "started", "77", nodes="", iteration=0, restarts=0)
    copy = folder.with_name("copy")
    shutil.copytree(folder, copy)
    queue(commands, "77 RUNNING", name=f"own|{folder}" if by_hand else client.job_name(folder))
    assert jobs.active_jobs(folder) == ["77"] and jobs.active_jobs(copy) == []
    assert main(["slurm", "cancel", str(copy)]) == 0
    assert capsys.readouterr().out == "cancelled: nothing\n"
    assert one(copy).status == "not submitted"
    commands.say("sbatch", "echo 78")
    assert submit(copy, SITE, REQUEST) == "78" and not Run(copy).unended()
    assert attempt.competing(Run(folder), "78") == "job 77 trains here"
    assert not attempt.competing(Run(copy), "78")
    queue(commands)
    accounted(commands, "77 FAILED", user=f"me|{folder}")
    assert one(copy).id == "78" and not commands.calls("scancel")
    queue(commands, "77 RUNNING", name=f"{client.job_name(folder)}|{folder}")
    assert jobs.active_jobs(folder.rename(folder.with_name("moved"))) == ["77"]


def test_a_run_named_twice_is_one_run(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert folders_of([folder.name, str(folder), f"{folder.name}/plan.json"]) == [Path(folder.name)]
