"""What SLURM's commands answer on a bad day: each is a small script here that says what the real one says."""

import errno
import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from slurm_cluster import REQUEST, SITE, fake_commands, one, plan, run_folder

from trilane.cli.app import main
from trilane.config.plan import read_plan
from trilane.engine.data import corpus
from trilane.report import notebook
from trilane.slurm import client, jobs, ledger, monitor, preflight, sweep
from trilane.slurm.nodes.exclusion import exclude
from trilane.slurm.script import render
from trilane.slurm.sites import JobRequest
from trilane.utils.validation import to_mapping
from trilane.workspace.status import RunStatus, write_status
from trilane.workspace.study import Study

AWAY = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"


class Commands:
    """SLURM's commands as scripts of one's own; `calls` is what was asked of them."""

    def __init__(self, place: Path) -> None:
        self.place, self.log = place, place / "calls"
        for name in ("sbatch", "squeue", "sacct", "scontrol", "scancel", "srun"):
            self.say(name, "true")

    def say(self, command: str, does: str) -> None:
        path = self.place / command
        path.write_text(f'#!/bin/bash\necho "{command} $*" >>{self.log}\n{does}\n')
        path.chmod(0o755)

    def calls(self, command: str) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if line.startswith(f"{command} ")]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    return Commands(fake_commands(tmp_path, monkeypatch))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with one job, 77."""
    made = run_folder(tmp_path, plan("one", tmp_path / "data", nodes=1))
    ledger.note(made, "submitted", "77", site="test", script="")
    return made


def accounted(commands: Commands, **states: str) -> None:
    """Those jobs have gone from squeue, and sacct knows them."""
    commands.say("sacct", "\n".join(f"echo '{job[1:]}|{state}|1:00|2:00|n1'" for job, state in states.items()))


def test_a_query_that_dies_without_a_word_is_made_again(commands: Commands, folder: Path) -> None:
    once = f"[ -e {folder}/died ] || {{ touch {folder}/died; kill -SEGV $$; }}"
    commands.say("squeue", f"{once}\necho '77|RUNNING|None|1:00|2:00|n1|x'")
    assert client.states(["77"])["77"].state == "RUNNING" and len(commands.calls("squeue")) == 2
    commands.say("squeue", "exit 3")
    with pytest.raises(client.SlurmError, match="squeue: no error text"):
        client.states(["77"])


@pytest.mark.parametrize("state", ["PREEMPTED", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"])
def test_a_job_that_will_not_run_any_more_has_ended(state: str, commands: Commands, folder: Path) -> None:
    accounted(commands, j77=state)
    assert one(folder).status not in ("waiting", "running") and one(folder).has_failed
    if state == "PREEMPTED":
        assert (one(folder).status, one(folder).evidence) == ("preempted", "SLURM: PREEMPTED")


def test_a_cancellation_leaves_out_what_squeue_forgot_and_refuses_what_is_somebody_elses(
    commands: Commands, folder: Path
) -> None:
    accounted(commands, j77="RUNNING", j78="RUNNING")
    ledger.note(folder, "submitted", "78", site="test", script="")
    forgot = "[[ $* != *77* ]] || { echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1; }"
    commands.say("squeue", f"[[ $* == *%u* ]] || exit 0\n{forgot}\necho '78|78|me'")
    assert jobs.cancel([folder]) == ["78"] and commands.calls("scancel") == ["scancel 78"]
    commands.say("squeue", "[[ $* != *%u* ]] || printf '78|78|me\\n77|77|you\\n'")
    with pytest.raises(ValueError, match=r"^job=77: belongs to user you, not to you$"):
        jobs.cancel([folder])
    assert len(commands.calls("scancel")) == 1


def test_a_job_that_runs_only_in_a_late_accounting_holds_no_run(commands: Commands, folder: Path) -> None:
    """Once the controller has forgotten it, it runs nowhere; one of somebody else's, whom it knows, does."""
    accounted(commands, j77="RUNNING")
    commands.say(
        "squeue", "[[ $* != *-j* ]] || { echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1; }"
    )
    assert jobs.active_jobs(folder) == [] and one(folder).state == "FORGOTTEN"
    commands.say("squeue", "[[ $* != *%u* ]] || echo '77|77|you'")
    assert jobs.active_jobs(folder) == ["77"]


def test_what_squeue_says_of_a_task_is_not_replaced_by_a_late_accounting_of_its_array(commands: Commands) -> None:
    """A sweep asks for the array, which squeue lists task by task, and sacct answers with every task."""
    commands.say("squeue", "[[ $* == *%u* ]] && echo '77_3|77|me' || echo '77_3|FAILED|None|0:01|2:00|n1|x'")
    commands.say("sacct", "echo '77_3|RUNNING|0:01|2:00|n1'")
    assert client.states(["77", "77_3"])["77_3"].state == "FAILED"


@pytest.mark.parametrize("state", ["SUSPENDED", "REQUEUE_HOLD", "RESIZING"])
def test_a_run_that_a_job_still_holds_takes_no_second_one(state: str, commands: Commands, folder: Path) -> None:
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
    stopped = RunStatus(status="stopped", evidence="saved at iteration 20", rank=None, exit_code=0, seconds=1.0)
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


def test_a_run_of_an_array_is_shown_with_what_its_script_printed(commands: Commands, tmp_path: Path) -> None:
    (made,) = sweep.create(tmp_path / "sweep", [plan("a", tmp_path / "d", nodes=1).to_json()], SITE, REQUEST)
    ledger.note(made, "submitted", "6_1", site="test", script="")
    (tmp_path / "sweep/slurm-6_1.out").write_text("no module named megatron\n")
    accounted(commands, j6_1="FAILED")
    assert one(made).evidence == "slurm-6_1.out: no module named megatron"
    assert jobs.logs(made) == ["no module named megatron"]


def test_the_guard_looks_at_a_sweeps_own_script_before_a_submission_and_a_second_one(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(
        preflight,
        "check_job",
        lambda *a: [preflight.JobFinding(level="refusal", rule="x", message=str(a[5]), remedy="y")],
    )
    (made,) = sweep.create(tmp_path / "sweep", [plan("a", tmp_path / "d", nodes=1).to_json()], SITE, REQUEST)
    ledger.note(made, "submitted", "6_1", site="test", script="")
    accounted(commands, j6_1="FAILED")
    for what in ("submit", "rerun"):
        assert main(["slurm", "sweep", what, str(tmp_path / "sweep"), "--site", "generic"]) == 1
        assert f"{tmp_path}/sweep/sweep-1x2.sbatch" in capsys.readouterr().out
    assert not commands.calls("sbatch")


def test_a_step_is_attached_to_a_run_of_an_array_by_its_own_number(commands: Commands, folder: Path) -> None:
    """`srun --jobid=6_1` says "Invalid numeric value"."""
    commands.say(
        "squeue", "case $* in *%A*) echo 8;; *%u*) echo '6_1|6|me';; *) echo '6_1|RUNNING|None|1|2|n1|x';; esac"
    )
    commands.say("srun", "echo slurm 22.05.8")
    commands.say("scontrol", "echo n1")
    assert monitor.attach("6_1", "stacks")[1] == "--jobid=8"
    assert client.raw_id("77") == "77"


def test_capture_names_the_number_that_srun_takes(commands: Commands, folder: Path, capsys) -> None:
    commands.say("squeue", "echo 8")
    assert main(["debug", "capture", str(folder), "--job", "6_1", "--commands"]) == 0
    assert capsys.readouterr().out.startswith("srun --jobid=8 ")
    commands.say("squeue", "true")
    assert main(["debug", "capture", str(folder), "--job", "6_1", "--commands"]) == 2
    assert capsys.readouterr().err == "trilane: job=6_1: is no longer running\n"


def test_a_node_that_is_excluded_joins_those_that_the_job_avoids_already(commands: Commands) -> None:
    shown = "echo '   ReqNodeList=(null) ExcNodeList=n[1-2]'"
    commands.say("scontrol", f"case $* in 'show job'*) {shown};; *hostnames*) printf 'n1\\nn2\\n';; esac")
    exclude("77", ["n2", "n5"])
    assert commands.calls("scontrol")[-1] == "scontrol update JobId=77 ExcNodeList=n1,n2,n5"
    commands.say("scontrol", "echo '   ReqNodeList=(null) ExcNodeList=(null)'")
    exclude("77", ["n5"])
    assert commands.calls("scontrol")[-1] == "scontrol update JobId=77 ExcNodeList=n5"


@pytest.mark.parametrize(
    ("shown", "avoided"),
    [
        ("NumNodes=3 Partition=gpu", "n9,n3,n5"),  # six nodes, of which three may be left out: not n1, the first
        ("NumNodes=2-2 Partition=gpu", "n9,n1,n3,n5"),
        ("NumNodes=3 Partition=gpu Reservation=ours", "n9,n1,n3,n5"),  # eight nodes
        ("NumNodes=6 Partition=gpu", "n9,n5"),  # what the person has excluded stays, and so does the newest
        ("NumNodes=3 Partition=(null)", "n9,n1,n3,n5"),
    ],
)
def test_a_job_may_use_repaired_nodes_again_where_too_few_others_are_left(
    shown: str, avoided: str, commands: Commands
) -> None:
    """Fifty-two nodes are all that some have: a job of 48 would wait for ever after the fifth that failed."""
    says = f"'show job'*) echo '{shown} ExcNodeList=n[9,1,3]';; *reservation*) echo 'NodeCnt=8 CoreCnt=64';;"
    commands.say("scontrol", f"case $* in {says} *hostnames*) printf 'n9\\nn1\\nn3\\n';; esac")
    commands.say("sinfo", "seq -f n%.0f 6")
    exclude("77", ["n5"], ["n1", "n3"])
    assert commands.calls("scontrol")[-1] == f"scontrol update JobId=77 ExcNodeList={avoided}"


def test_watching_goes_on_while_slurm_is_away_and_says_it_once(
    commands: Commands, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    commands.say("squeue", AWAY)
    lines = monitor.watch([folder], every_s=0.01, seconds=60)
    assert next(lines).startswith("SLURM does not answer, asked again every 0.01 s: slurm=squeue: the controller")
    commands.say("squeue", "true")
    accounted(commands, j77="TIMEOUT")
    assert list(lines) == ["SLURM answers again", "one: job 77 TIMEOUT n1: DIED: time limit SLURM: TIMEOUT"]
    commands.say("squeue", AWAY)
    assert main(["slurm", "watch", str(folder), "--every", "0.01", "--seconds", "0.2"]) == 75
    assert capsys.readouterr().out.count("SLURM does not answer") == 1


def test_the_watching_job_submits_itself_again_once_slurm_is_back(commands: Commands, folder: Path) -> None:
    text = render("monitor", read_plan(folder / "plan.json"), SITE, REQUEST)
    commands.say("python", "exit 75")
    commands.say("sleep", "true")
    commands.say("sbatch", "(($(grep -c ^sbatch ${0%/*}/calls) > 1))")
    subprocess.run(["bash", "-euo", "pipefail", "-c", text[text.index("code=0") :]], check=True)
    assert commands.calls("sbatch") == ["sbatch monitor.sbatch"] * 2
    commands.say("python", "exit 1")
    subprocess.run(["bash", "-euo", "pipefail", "-c", text[text.index("code=0") :]], check=True)
    assert len(commands.calls("sbatch")) == 2


def test_a_submission_that_may_have_been_taken_is_not_called_undone(commands: Commands, folder: Path) -> None:
    commands.say("sbatch", "echo 'sbatch: error: Batch job submission failed: Socket timed out' >&2; exit 1")
    commands.say("squeue", AWAY)
    script, name = folder / "job.sbatch", client.job_name(folder)
    with pytest.raises(client.SlurmUnreachable) as found:
        client.sbatch(script, name=name, known=["77"])
    said = f"the job may have been accepted: look with: squeue -u $USER -t all --name={name}"
    assert str(found.value).endswith(said) and "nothing was changed" not in str(found.value)
    commands.say("squeue", "; ".join(f"echo '{job}|PENDING|None|0:00|2:00||{name}'" for job in (77, 78)))
    assert client.sbatch(script, name=name, known=["77"]) == "78" and len(commands.calls("sbatch")) == 2


def test_a_test_submission_is_tried_again_and_never_a_traceback(
    commands: Commands, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "TIMEOUT_S", 0.2)
    commands.say("sbatch", "exec sleep 5")
    with pytest.raises(client.SlurmUnreachable, match=r"^slurm=sbatch: the controller cannot be reached"):
        client.test_only(folder / "job.sbatch")
    assert len(commands.calls("sbatch")) == 2


def test_what_a_site_explains_and_prints_beside_its_answer_is_understood(commands: Commands, folder: Path) -> None:
    hours = "Your project xyz has used up its hours, see https://example.org/hours"
    commands.say("sbatch", f"printf 'sbatch: error: {hours}\\nsbatch: error: Unspecified error\\n' >&2; exit 1")
    with pytest.raises(client.SlurmError, match=rf"^slurm=sbatch: {hours}; Unspecified error$"):
        client.sbatch(folder / "job.sbatch")
    commands.say("sbatch", "printf -- '-----> Welcome\\n--> Verifying valid submit host...OK\\n4711;cluster\\n'")
    assert client.sbatch(folder / "job.sbatch") == "4711"
    commands.say("sbatch", "echo Welcome")
    with pytest.raises(client.SlurmError, match=r"^slurm=sbatch: printed 'Welcome', which is not a job id; look with"):
        client.sbatch(folder / "job.sbatch")


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_the_ledger_is_written_and_the_corpus_made(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lustre mounted without -o flock."""

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    ledger.note(tmp_path, "submitted", "1")
    with corpus.locked(tmp_path / "lock"):
        assert ledger.job_ids(tmp_path) == ["1"]
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        ledger.note(tmp_path, "submitted", "2")


@pytest.mark.parametrize(
    ("given", "meant"),
    [("~/env", "/home/me/env"), ("venv", "{here}/venv"), ("../venv", "{up}/venv"), ("conda:x", "conda:x"), ("", "")],
)
def test_an_environment_is_a_whole_path(
    given: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    assert JobRequest(environment=given).environment == meant.format(here=tmp_path, up=tmp_path.parent)


def test_two_jobs_of_a_user_on_a_node_are_told_apart() -> None:
    """Ranks of another job have another SLURM_JOB_ID in /proc/PID/environ."""
    ours, other = f"9{os.getpid()}", f"8{os.getpid()}"
    command = [sys.executable, "-c", "import time; time.sleep(300)", "trilane.engine plan.json"]
    ranks = [subprocess.Popen(command, env={"RANK": r, "SLURM_JOB_ID": j}) for r, j in (("0", ours), ("1", other))]
    try:
        env = {**os.environ, "SLURM_JOB_ID": ours}
        done = subprocess.run(["bash", "-c", monitor.WHAT["processes"]], env=env, capture_output=True, text=True)
        assert re.findall(r"rank (\d+) pid (\d+)", done.stdout) == [("0", str(ranks[0].pid))]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.slow
def test_the_launch_notebook_executed_again_submits_nothing_twice(
    commands: Commands, outputs: Path, tmp_path: Path
) -> None:
    (tmp_path / "test.json").write_text(json.dumps(to_mapping(SITE)))
    commands.say("sbatch", "echo $((70 + $(grep -c parsable ${0%/*}/calls)))")
    commands.say("squeue", "printf '71|PENDING|Priority|0:00|2:00||x\\n72|PENDING|Priority|0:00|2:00||x\\n'")
    given = {"site": str(tmp_path / "test.json"), "submit": True, "account": "xyz@a100", "corpus": "mock"}
    study = Study.create("s")
    small = {"runs": 2, "control": False, "train_iters": 4}
    notebook.run_all(study, {**given, **small}, ["01_sizing", "02_topology", "03_launch"])
    for state in ("PENDING", "RUNNING"):
        commands.say("squeue", f"printf '71|{state}||0:00|2:00||x\\n72|PENDING|Priority|0:00|2:00||x\\n'")
        if state == "RUNNING":
            (study.run_folders()[0] / "run.log").write_text("START\n")
        notebook.run("03_launch", study, **given, **small)
        page = (study.folder / "03_launch.html").read_text()
        assert page.count("has job 71 already") == page.count("has job 72 already") == 1
    assert len(study.run_folders()) == 2
    assert len([call for call in commands.calls("sbatch") if "--parsable" in call]) == 2


def test_only_controllers_that_are_all_down_or_silent_do_not_answer(commands: Commands) -> None:
    """`scontrol ping` lists a backup controller too, and fails where the primary one is down."""
    down, up = (
        f"echo 'Slurmctld({which}) at login is {state}'" for which, state in (("primary", "DOWN"), ("backup", "UP"))
    )
    for answer in ("true", f"{down}; {up}; exit 1", "echo anything"):
        commands.say("scontrol", answer)
        client.require_answer()
    for silence in (f"{down}; exit 1", "exec sleep 5", AWAY):
        commands.say("scontrol", silence)
        with pytest.raises(client.SlurmUnreachable, match=r"SLURM does not answer .*; nothing was done$"):
            client.require_answer("; nothing was done", within_s=0.2)


def test_what_was_submitted_before_a_refusal_is_printed(
    commands: Commands, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    other = run_folder(tmp_path, plan("other", tmp_path / "data", nodes=1))
    site = tmp_path / "test.json"
    site.write_text(json.dumps(to_mapping(SITE)))
    commands.say("sbatch", "[[ $* == *--test-only* ]] || echo 78")
    commands.say("squeue", "echo '77|RUNNING|None|1:00|2:00|n1|x'")
    command = ["slurm", "submit", str(other), str(folder), "--site", str(site), "--account", "xyz@a100", "--json"]
    assert main(command) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out)["submitted"] == {str(other): "78"} and "has job 77 already" in printed.err


def test_a_drained_node_has_not_failed(commands: Commands) -> None:
    """%T of sinfo; a star: it does not respond."""
    states = ("idle", "draining", "drained", "drained*", "down", "down*", "failing", "mixed")
    commands.say("sinfo", "; ".join(f"echo 'n{i}|{state}'" for i, state in enumerate(states)))
    assert sorted(client.down_nodes()) == ["n3", "n4", "n5", "n6"]


@pytest.mark.parametrize(
    ("asked", "file"),
    [
        ("--output=logs/%x-%j.log", "logs/one-77.log"),
        ("-o out.%5A.%u.txt", "out.00077.me.txt"),
        ("--output=%N-%%-%j", "jz-7-%-77"),
        ("--output=fixed[1].txt", "fixed[1].txt"),
    ],
)
def test_an_output_that_was_edited_by_hand_is_followed(asked: str, file: str, commands: Commands, folder: Path) -> None:
    script = (folder / "job.sbatch").read_text()
    (folder / "job.sbatch").write_text(script.replace("--output=slurm-%j.out", asked))
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text("bash: no such file\n")
    (folder / "slurm-78.out").write_text("another job's\n")
    ledger.note(folder, "started", "77", nodes="jz-[7-8,11]", iteration=0, restarts=0)
    assert jobs.output(folder, "77") == folder / file
    assert jobs.logs(folder) == ["bash: no such file"]
