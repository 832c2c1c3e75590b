"""On a real SLURM: a plan submitted, watched, cancelled, refused; what SLURM refuses is one line."""

import getpass
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_cluster import REQUEST, SITE, Cluster, ended, losses, one, plan, run_folder, says
from support import plant_modules, wait_until
from test_script import PRESETS, recorded

from trilane.cli.app import main
from trilane.slurm import client, copies, jobs, ledger, monitor, sweep
from trilane.slurm.checks import REFUSAL
from trilane.slurm.nodes.exclusion import exclude
from trilane.slurm.preflight import check_job
from trilane.utils.validation import to_mapping
from trilane.workspace import installation


@pytest.fixture
def sleeper(cluster: Cluster, tmp_path: Path) -> Path:
    """A run folder whose script sleeps instead of training."""
    folder = run_folder(tmp_path, plan("sleeper", tmp_path.parent / "data"))
    script = (folder / "job.sbatch").read_text()
    (folder / "job.sbatch").write_text(
        script[: script.index("set -euo")] + "set -euo pipefail\n"
        "srun --kill-on-bad-exit=1 bash -c 'trap \"touch save\" USR1; sleep 300'\n"
    )
    return folder


def test_two_nodes_of_two_processes_train_to_the_end_with_the_code_that_was_submitted(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the job waits the installed code is made to raise. The job inherits no variables but SLURM's own."""
    installed = tmp_path / "installed"
    shutil.copytree(installation.package(), installed / "trilane", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(copies, "package", lambda: installed / "trilane")
    monkeypatch.setenv("PYTHONPATH", str(installed))
    request = replace(REQUEST, environment=sys.prefix)
    folder = run_folder(tmp_path, plan("two", tmp_path.parent / "data"), request)
    script = (folder / "job.sbatch").read_text()
    (folder / "job.sbatch").write_text(
        script.replace("set -", f"#SBATCH --export=NONE\nexport PYTHONPATH={installed}\nset -", 1)
    )
    job = jobs.submit(folder, SITE, request, ["--hold"])
    (installed / "trilane/__init__.py").write_text("raise ImportError('the installed code has changed')\n")
    client.call(["scontrol", "release", job])
    found = ended(folder)
    assert (found.id, found.state, found.status) == (job, "COMPLETED", "completed"), says(folder)
    assert (found.iteration, found.iterations, found.nodes) == (4, 4, "jz-a100-[1-2]")
    assert len(losses(folder)) == 4 and losses(folder)[-1] < losses(folder)[0]
    events = [e["event"] for e in ledger.events(folder)]
    assert events == ["submitted", "started", "ended"]
    script = (folder / "job.sbatch").read_text()
    assert ledger.events(folder, "submitted")[0]["script"] == ledger.fingerprint(script)
    codes = {e["code"] for e in ledger.events(folder, "submitted", "started")}
    assert codes == {path.name for path in (folder / "code").iterdir()}
    assert f" code {codes.pop()}\n" in (folder / "run.log").read_text().splitlines(keepends=True)[0]
    # what remains once squeue forgot it
    wait_until(lambda: client._accounted([job])[job].state == "COMPLETED", 60, "accounting")
    with pytest.raises(ValueError, match=r"^run folder=.*: holds a completed run; take a new one$"):
        jobs.submit(folder, SITE, REQUEST)


def test_a_job_whose_environment_is_missing_says_so(cluster: Cluster, tmp_path: Path) -> None:
    folder = run_folder(tmp_path, plan("early", tmp_path.parent / "data"))
    script = (folder / "job.sbatch").read_text()
    (folder / "job.sbatch").write_text(script.replace("VENV=", "unset TRILANE_VENV\nVENV=/nowhere #"))
    job = jobs.submit(folder, SITE, REQUEST)
    found = ended(folder)
    assert (found.id, found.state, found.status) == (job, "FAILED", "crashed")
    assert found.evidence.startswith(f"slurm-{job}.out: ") and "/nowhere/bin/activate: No such file" in found.evidence
    assert "/nowhere/bin/activate" in jobs.logs(folder)[-1]


def test_deepspeeds_own_launcher_trains_from_a_hostfile_of_the_allocation(cluster: Cluster, tmp_path: Path) -> None:
    request = replace(REQUEST, launcher="deepspeed")
    p = plan("ds", tmp_path.parent / "data", dp=4, zero=1, engine="deepspeed-zero")
    folder = run_folder(tmp_path, p, request)
    job = jobs.submit(folder, SITE, request)
    found = ended(folder)
    assert (found.state, found.status, found.iteration) == ("COMPLETED", "completed", 4), says(folder)
    lines = (folder / f"ranks/hostfile-{job}").read_text().splitlines()
    assert lines == [f"{host} slots=2" for host in client.hostnames(found.nodes)]


def test_sbatch_accepts_every_script_of_every_site(cluster: Cluster, tmp_path: Path) -> None:
    """Of every site whose partitions and features this cluster has."""
    for name in [name for name in PRESETS if name.startswith(("generic", "jean-zay"))]:
        for file, text in recorded(name).items():
            if "everything" not in file:  # which names a reservation and nodes that are not here
                (tmp_path / file).write_text(text)
                client.test_only(tmp_path / file)
    with pytest.raises(client.SlurmError, match="Invalid job array"):
        client.test_only(tmp_path / "sweep-jean-zay-a100.sbatch", "--array=1-20001")  # MaxArraySize=20001


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        ({"partition": "gpu_p4"}, "Invalid partition name specified"),
        ({"constraint": "b200"}, "Invalid feature specification"),
        ({"account": "abc@a100"}, "Invalid account or account/partition combination specified"),
        ({"qos": "qos_gpu_a100-t9"}, "Invalid qos specification"),
        ({"time_limit": "1000:00:00"}, "time limit"),
        ({"reservation": "hug"}, "reservation"),
        ({"exclude": "jz-a100-[1-51]"}, "Requested node configuration is not available"),
    ],
)
def test_the_guard_refuses_what_slurm_would_refuse(wish: dict, says: str, cluster: Cluster, tmp_path: Path) -> None:
    folder = run_folder(tmp_path, plan("two", tmp_path.parent / "data"), replace(REQUEST, **wish))
    p = plan("two", tmp_path.parent / "data")
    found = [f for f in check_job(p, SITE, REQUEST, folder) if f.rule == "sbatch"]
    assert [f.level for f in found] == [REFUSAL] and says.lower() in found[0].message.lower()


def test_the_commands_submit_show_and_cancel(sleeper: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    site = tmp_path / "test.json"
    site.write_text(json.dumps(to_mapping(SITE)))
    command = [str(sleeper), "--site", str(site), "--account", "xyz@a100", "--json"]
    assert main(["slurm", "submit", *command, "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out)["submitted"] == {}
    assert main(["slurm", "submit", *command]) == 0
    job = json.loads(capsys.readouterr().out)["submitted"][str(sleeper)]
    wait_until(lambda: one(sleeper).state == "RUNNING", 60, "running")
    assert main(["slurm", "status", str(sleeper), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["jobs"][0]
    assert (shown["id"], shown["verdict"], shown["nodes"]) == (job, "running", "jz-a100-[1-2]")
    with pytest.raises(ValueError, match=rf"^run folder=.*: has job {job} already"):
        jobs.submit(sleeper, SITE, REQUEST)
    assert main(["slurm", "cancel", str(sleeper), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"cancelled": [job]}
    found = ended(sleeper)
    assert (found.state, found.status, found.evidence) == ("CANCELLED", "cancelled", "SLURM: CANCELLED")
    assert main(["slurm", "status", str(sleeper)]) == 1
    assert " CANCELLED " in capsys.readouterr().out


def test_a_job_that_waits_says_why(sleeper: Path) -> None:
    job = jobs.submit(sleeper, SITE, REQUEST, ["--begin=now+1hour"])
    wait_until(lambda: one(sleeper).reason == "BeginTime", 30, "reason")
    assert (one(sleeper).state, one(sleeper).status) == ("PENDING", "waiting")
    assert jobs.cancel([sleeper]) == [job]


def test_a_run_folder_with_a_hostile_name_runs_and_nothing_in_it_is_executed(cluster: Cluster, tmp_path: Path) -> None:
    """All of the script up to the training; a sweep reads the path of its runs from a file."""
    names = ["-rf $(touch x) `touch x` {a,b}*", 'it\'s a "quote";touch x', "é数 && touch x & touch x | touch x"]
    for name in names:
        sweep.create(tmp_path / name, [plan("one", tmp_path.parent / "data", nodes=1).to_json()], SITE, REQUEST)
    traces = [plant_modules(tmp_path / name / "runs/one") for name in names]
    for where, end in (("runs/one/job.sbatch", ""), ("sweep-1x2.sbatch", "_1")):  # one job at a time in a folder
        wanted = {}
        for name in names:
            script = tmp_path / name / where
            text = script.read_text()
            script.write_text(text[: text.index("# a small corpus is tokenized")] + "pwd\n")
            wanted[client.sbatch(script) + end] = script.parent
        wait_until(
            lambda ids=list(wanted): all(s.has_ended for s in client.states(ids).values()), 120, "end of the jobs"
        )
        for name, (job, folder) in zip(names, wanted.items(), strict=True):
            text = (folder / f"slurm-{job}.out").read_text()
            assert text == f"go: from the beginning\n{tmp_path / name / 'runs/one'}\n"
    assert not any(trace.exists() for trace in traces)
    assert not list(tmp_path.rglob("x")) and {p.name for p in tmp_path.iterdir()} == set(names)


def test_a_run_of_an_array_is_looked_into(cluster: Cluster, sleeper: Path) -> None:
    """`srun --jobid=6_1` is "Invalid numeric value"."""
    array = client.sbatch(sleeper / "job.sbatch", "--array=1-2")
    try:
        wait_until(lambda: client.states([f"{array}_1"])[f"{array}_1"].state == "RUNNING", 120, "running")
        assert client.raw_id(f"{array}_1") not in (array, f"{array}_1")
        assert cluster.do("run", *monitor.attach(f"{array}_1", "memory")).count("== ") == 2
    finally:
        client.cancel([array])


def test_a_dead_node_joins_those_that_a_waiting_job_avoids(sleeper: Path) -> None:
    job = client.sbatch(sleeper / "job.sbatch", "--begin=now+1hour", "--exclude=jz-a100-[1-2]")
    exclude(job, ["jz-a100-3"])
    found = re.findall(r"ExcNodeList=(\S+)", client.call(["scontrol", "show", "job", job]))
    assert [client.hostnames(nodes) for nodes in found] == [["jz-a100-1", "jz-a100-2", "jz-a100-3"]]
    with pytest.raises(ValueError, match=r"^job=999999: SLURM has no such job$"):
        client.cancel([job, "999999"])
    assert client.owners([job, "999999"]) == {job: getpass.getuser()}
    client.cancel([job])


def test_a_job_of_somebody_else_is_left_alone(sleeper: Path) -> None:
    if getpass.getuser() != "root":
        pytest.skip("only root can submit for somebody else")
    command = ["sbatch", "--parsable", "--uid=nobody", "--account=xyz@a100", "--chdir=/tmp", "--output=/dev/null"]
    held = [*command, "--hold", "--wrap", "sleep 60"]  # nobody may not read the script, so it would fail at its start
    done = subprocess.run(held, capture_output=True, text=True, check=True)
    other = done.stdout.strip()
    ledger.note(sleeper, "submitted", other, site="test", script="")
    try:
        with pytest.raises(ValueError, match=rf"^job={other}: belongs to user nobody, not to you$"):
            client.cancel([other])
        assert client.call(["squeue", "-h", "-j", other, "-o", "%T"]).strip() == "PENDING"
    finally:
        subprocess.run(["scancel", other], check=True)


@pytest.mark.parametrize("job", ["1; id", "-1", "$(id)", "", "1 2", "a", "1_", "--user=root", "1\n2"])
def test_what_is_no_job_id_never_reaches_slurm(job: str) -> None:
    for call in (client.states, client.cancel):
        with pytest.raises(ValueError, match=r"^job="):
            call([job])


def test_a_job_that_slurm_does_not_know_is_one_line(cluster: Cluster) -> None:
    with pytest.raises(ValueError, match=r"^job=999999: SLURM has no such job$"):
        client.cancel(["999999"])
    assert client.states(["999999"])["999999"].state == client.FORGOTTEN


def test_a_controller_that_is_away_is_waited_for_and_nothing_is_submitted_twice(
    cluster: Cluster, sleeper: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "DELAYS_S", (0.2, 0.5, 1.0, 2.0, 4.0, 8.0))
    pid = int((Path(cluster.env["LOCAL_SLURM_DIR"]) / "run/slurmctld.pid").read_text().split()[0])
    os.kill(pid, 9)
    back = threading.Timer(1, cluster.start)
    back.start()
    job = client.sbatch(sleeper / "job.sbatch")
    back.join()
    listed = client.call(["squeue", "-h", "-t", "all", "-o", "%i %Z"]).splitlines()
    assert [line for line in listed if line.endswith(f" {sleeper}")] == [f"{job} {sleeper}"]
    client.cancel([job])


def test_a_controller_that_stays_away_is_one_clear_line(
    sleeper: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(client, "DELAYS_S", (0.1, 0.1))
    conf = Path(os.environ["SLURM_CONF"]).read_text().replace("SlurmctldPort=", "MessageTimeout=2\nSlurmctldPort=1#")
    (tmp_path / "slurm.conf").write_text(conf)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    ledger.note(sleeper, "submitted", "1", site="test", script="")
    begin = time.monotonic()
    assert main(["slurm", "status", str(sleeper)]) == 75
    why, line = capsys.readouterr().out.splitlines()
    assert why.startswith("slurm=scontrol ping: SLURM does not answer (") and "(as of " in line
    assert time.monotonic() - begin < 20  # 4 s on a machine that does nothing else


def test_without_slurm_a_submission_is_one_line(sleeper: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ValueError, match=r"^slurm=sbatch: is not installed here; use site local$"):
        jobs.submit(sleeper, SITE, REQUEST)
