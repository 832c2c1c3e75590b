"""One job for one run: real processes that are killed and race, with scripts on PATH in the place of SLURM."""

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from slurm_cluster import REQUEST, SITE, fake_commands, one, plan, run_folder

from trilane.cli.app import main
from trilane.slurm import attempt, chain, jobs, ledger, sweep
from trilane.utils.folder_lock import FolderLock

ACCEPT = 'echo "$$|$name" >>"$here/queue"'
# sbatch accepts the job under its own process id; what else it does is in the file `how`
SBATCH = """here=${0%/*}
name=$(sed 's/.*--job-name=\\([^ ]*\\).*/\\1/' <<<"$*")
. "$here/how"
"""
SQUEUE = """here=${0%/*}
[ ! -e "$here/away" ] || { echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1; }
while IFS='|' read -r id name; do
  case $* in
  *%T*) echo "$id|$(cat "$here/state")|None|0:00|1:00|n1|$name" ;;
  esac
done <"$here/queue"
"""


class Slurm:
    """The scripts; `queue` is a file of ID|NAME."""

    def __init__(self, place: Path) -> None:
        self.place = place
        scripts = {"sbatch": SBATCH, "squeue": SQUEUE, "sacct": "exit 1", "scancel": "true", "scontrol": "true"}
        for name, text in scripts.items():
            (place / name).write_text(f"#!/bin/bash\n{text}\n")
            (place / name).chmod(0o755)
        (place / "queue").touch()
        (place / "state").write_text("PENDING")
        self.does(f"{ACCEPT}; echo $$")

    def does(self, text: str) -> None:
        """What the next sbatch does."""
        (self.place / "how").write_text(f"{text}\n")

    @property
    def queue(self) -> list[str]:
        return [line.split("|")[0] for line in (self.place / "queue").read_text().splitlines()]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    monkeypatch.setattr(jobs, "SETTLE_S", 1.0)
    return Slurm(fake_commands(tmp_path, monkeypatch))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return run_folder(tmp_path, plan("one", tmp_path / "data", nodes=1))


def submit(folder: Path) -> str:
    return jobs.submit(folder, SITE, REQUEST)


def forked(*works: Callable[[], object]) -> list[str]:
    """What each work returns or raises in a process of its own, all at once; "" for one that was killed."""
    children = []
    for work in works:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                said = str(work())
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(write, said.encode())
            os._exit(0)
        os.close(write)
        children.append((pid, read))
    said = []
    for pid, read in children:
        with open(read, "rb") as pipe:
            said.append(pipe.read().decode())
        os.waitpid(pid, 0)
    return said


def test_a_job_whose_submission_was_killed_is_shown_cancelled_and_records_itself(slurm: Slurm, folder: Path) -> None:
    slurm.does(f"{ACCEPT}; kill -9 $PPID")
    forked(lambda: submit(folder))
    (job,) = slurm.queue
    assert (one(folder).id, one(folder).status) == (job, "waiting") and jobs.active_jobs(folder) == [job]
    assert jobs.cancel([folder]) == [job]
    assert attempt.begin(folder, {"SLURM_JOB_ID": job}).startswith("go: ") and ledger.job_ids(folder) == [job]
    attempt.end(folder, 1, {"SLURM_JOB_ID": job})
    assert attempt.begin(folder, {"SLURM_JOB_ID": "8"}).startswith("go: ")
    assert ledger.job_ids(folder) == [job, "8"], "submitted by hand"


def test_a_job_waits_for_slurm_before_it_trains_where_another_may(slurm: Slurm, folder: Path) -> None:
    """SLURM away, then back; away, and the other job writes; away, and nobody writes; the other job is ending."""
    (slurm.place / "queue").write_text("1|x\n")
    (slurm.place / "state").write_text("RUNNING")
    ledger.note(folder, "started", "1", nodes="", iteration=0, restarts=0)
    away = slurm.place / "away"
    away.touch()
    threading.Timer(0.2, away.unlink).start()
    assert attempt.competing(folder, "2", every_s=0.01) == "job 1 trains here"
    away.touch()
    threading.Timer(0.2, (folder / "run.log").touch).start()
    assert attempt.competing(folder, "2", every_s=0.01) == "job 1 still writes here"
    away.unlink()
    (slurm.place / "state").write_text("COMPLETING")
    threading.Timer(0.2, (slurm.place / "queue").write_text, [""]).start()
    assert attempt.competing(folder, "2", every_s=0.01) == ""
    away.touch()
    assert attempt.competing(folder, "2", patience_s=0.05, every_s=0.01) == ""


def test_a_sweep_and_a_chain_are_submitted_once(slurm: Slurm, tmp_path: Path) -> None:
    """Two at once, and a second time after the first was killed between its two links."""
    plans = [plan(f"dp{dp}", tmp_path / "d", nodes=1, dp=dp, gbs=8).to_json() for dp in (1, 2)]
    runs = sweep.create(tmp_path / "sweep", plans, SITE, REQUEST)
    task = "$(sed 's/.*--array=\\([0-9]*\\).*/\\1/' <<<\"$*\")"
    slurm.does(f'echo "$$_{task}|$name" >>"$here/queue"; echo $$')
    said = forked(*[lambda: sweep.submit(tmp_path / "sweep", SITE, 1)] * 2)
    assert len(slurm.queue) == 2, said
    assert [ledger.job_ids(run) for run in runs] == [[task] for task in slurm.queue]
    folder = tmp_path / "chain"
    (run,) = chain.create(folder, replace(plan("long", tmp_path / "d"), label="long"), [], SITE, REQUEST)
    slurm.does(f"{ACCEPT}; echo $$; [[ $* != *afterany* ]] || kill -9 $PPID")
    assert forked(lambda: chain.submit(folder, SITE, times=2)) == [""]
    both = slurm.queue[2:]
    said = forked(*[lambda: chain.submit(folder, SITE, times=2)] * 2)
    assert all(f"has job {', '.join(both)} already" in text for text in said), said
    assert slurm.queue[2:] == both == ledger.job_ids(run)


def test_a_run_that_trains_here_is_not_started_twice(
    slurm: Slurm, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(jobs, "PATIENCE_S", 0.05)
    begun, release = threading.Event(), threading.Event()

    def train(*_: object, **__: object) -> None:
        begun.set()
        release.wait(30)
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs.local, "train_local", train)
    local = replace(SITE, name="local")

    def start() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            jobs.submit(folder, local, REQUEST)

    first = threading.Thread(target=start)
    first.start()
    assert begun.wait(30)
    with pytest.raises(ValueError, match=rf"is locked by process {os.getpid()} on "):
        jobs.submit(folder, local, REQUEST)
    release.set()
    first.join()
    assert [e["event"] for e in ledger.events(folder)] == ["submitted", "started"]
    with FolderLock([folder]).held(0):
        assert main(["train", str(folder / "plan.json")]) == 2
    assert "is locked by process" in capsys.readouterr().err
