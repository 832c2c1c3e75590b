"""Kill submissions, and let several race, on a real SLURM: python benchmarks/submit_races.py

A run has one job: 50 submissions are killed (SIGKILL) at random moments and submitted again; in 50
races 2 to 4 processes submit a run, or 2 to 4 running jobs ask `job begin`, at the same moment.
What counts are the jobs that squeue and sacct list for the run folder. Processes are forked from
one that has imported the library. An sbatch that pauses before and after the real one makes the
moments around it as long as the rest. docs/slurm.md has its result.
"""

import argparse
import contextlib
import os
import platform
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from slurm_cluster import REQUEST, SITE, plan, run_folder, started, submit
from support import wait_until

from trilane.slurm import attempt, client, jobs
from trilane.workspace.run import Run

HELD = "#!/bin/bash\n#SBATCH --hold\n#SBATCH --account=xyz@a100\n#SBATCH --time=10\nsleep 300\n"
PAUSED = 'sleep {0}; out=$("$real" "$@") || exit; sleep {0}; echo "$out"'
PLACES = ("before SLURM had the job", "before the job was recorded", "after it")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What became of one run: its jobs by SLURM and by its ledger, how many processes got one (or
    "go").
    """

    kind: str
    processes: int
    jobs: list[str]
    recorded: list[str]
    successes: int
    place: str = ""

    @property
    def has_two(self) -> bool:
        """Whether the run had more than one job, or more than one job began."""
        return len(self.jobs) > 1 or self.successes > 1

    @property
    def is_lost(self) -> bool:
        """Whether the run has no job, or its ledger names other ones than SLURM; of jobs that
        begin, none did.
        """
        return (
            not self.successes
            if self.kind == "begin"
            else not self.jobs or sorted(self.recorded) != self.jobs
        )


@contextlib.contextmanager
def changed_sbatch(place: Path, how: str) -> Iterator[None]:
    """An sbatch on PATH, lines of bash in which "$real" "$@" is the real one."""
    path = place / "sbatch"
    path.write_text(f"#!/bin/bash\nreal={shutil.which('sbatch')}\n{how}\n")
    path.chmod(0o755)
    with mock.patch.dict(os.environ, PATH=f"{place}:{os.environ['PATH']}"):
        yield


def held_run(root: Path, name: str) -> Path:
    """A run folder whose script is accepted and held: it needs no node."""
    folder = run_folder(root, plan(name, root / "data", nodes=1))
    (folder / "job.sbatch").write_text(HELD)
    return folder


def fork(work: Callable[[], object], start: int) -> int:
    """A child in its own process group that does the work once `start` can be read; 0 where the
    work succeeded.
    """
    pid = os.fork()
    if pid:
        return pid
    os.setpgid(0, 0)
    os.read(start, 1)
    try:
        code = 0 if work() else 1
    except ValueError:
        code = 1
    os._exit(code)


def together(works: Sequence[Callable[[], object]]) -> int:
    """How many of the works succeed, each in a process of its own, all at the same moment."""
    read, write = os.pipe()
    pids = [fork(work, read) for work in works]
    os.write(write, b"." * len(pids))
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    os.close(read)
    os.close(write)
    return codes.count(0)


def jobs_of(folder: Path) -> list[str]:
    """Every job that SLURM has, or had, for the folder, by its working directory."""
    queue = client.call(["squeue", "-h", "-t", "all", "-o", "%F %Z"])
    past = client.call(["sacct", "-XnP", "-S", "now-1days", "--delimiter= ", "-o", "jobid,workdir"])
    pairs = [line.split(" ", 1) for line in f"{queue}\n{past}".splitlines() if " " in line]
    return sorted({job for job, path in pairs if path.strip() == str(folder.resolve())})


def kill_trial(folder: Path, seconds: float, group: bool) -> Trial:
    """A submission killed after so many seconds, alone or with its sbatch; then the same submission
    again, twice.
    """
    read, write = os.pipe()
    pid = fork(lambda: submit(folder, SITE, REQUEST), read)
    os.write(write, b".")
    time.sleep(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL) if group else os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    place = _place(folder)
    os.close(read)
    os.close(write)
    for _ in range(2):
        together([lambda: submit(folder, SITE, REQUEST)])
    return Trial(
        kind="kill",
        processes=1,
        jobs=jobs_of(folder),
        recorded=Run(folder).job_ids(),
        successes=1,
        place=place,
    )


def _place(folder: Path) -> str:
    """How far the submission in a folder came."""
    return PLACES[2] if Run(folder).job_ids() else PLACES[1] if jobs_of(folder) else PLACES[0]


def race_trial(folder: Path, processes: int) -> Trial:
    """So many submissions of one run at the same moment."""
    successes = together([lambda: submit(folder, SITE, REQUEST)] * processes)
    return Trial(
        kind="submit",
        processes=processes,
        jobs=jobs_of(folder),
        recorded=Run(folder).job_ids(),
        successes=successes,
    )


def running_jobs(root: Path, count: int) -> list[str]:
    """Jobs that run, and would sleep for minutes."""
    script = root / "sleep.sbatch"
    script.write_text(HELD.replace("#SBATCH --hold\n", ""))
    ids = [
        client.sbatch(script, "--output=/dev/null", name="sleep", known=()) for _ in range(count)
    ]
    wait_until(
        lambda: all(s.state == "RUNNING" for s in client.states(ids).values()),
        60,
        "the jobs do not start",
    )
    return ids


def begin_trial(folder: Path, ids: Sequence[str]) -> Trial:
    """These running jobs ask at the same moment whether they may train in the folder."""

    def asks(job: str) -> bool:
        os.environ["SLURM_JOB_ID"] = job  # of a process of its own
        return attempt.begin(folder).startswith("go")

    successes = together([lambda job=job: asks(job) for job in ids])
    begun = [e["id"] for e in Run(folder).events("started")]
    return Trial(
        kind="begin",
        processes=len(ids),
        jobs=begun,
        recorded=Run(folder).job_ids(),
        successes=successes,
    )


def submission_s(root: Path, count: int = 10) -> float:
    """The median time of a submission in seconds, without the start of Python."""
    seconds = []
    for number in range(count):
        folder = held_run(root, f"timed-{number}")
        begin = time.monotonic()
        job = submit(folder, SITE, REQUEST)
        seconds.append(time.monotonic() - begin)
        client.call(["scancel", job])
    return statistics.median(seconds)


def all_trials(root: Path, kills: int, races: int, seed: int) -> tuple[float, list[Trial]]:
    """The time of an undisturbed submission, and the trials."""
    draw = random.Random(seed)
    plain = submission_s(root / "plain")
    pause = max(0.05, plain / 3)
    trials = []
    ids = running_jobs(root, 4)
    with changed_sbatch(root, PAUSED.format(pause)):
        whole = submission_s(root / "paused", 3)
        for n in range(kills):
            print(f"\rkill {n + 1} of {kills}", end="", file=sys.stderr)
            trials.append(
                kill_trial(
                    held_run(root, f"kill-{n}"), draw.uniform(0, 1.1 * whole), draw.random() < 0.5
                )
            )
            jobs.cancel([root / f"kill-{n}"])
        for n in range(races):
            print(f"\rrace {n + 1} of {races}", end="", file=sys.stderr)
            folder, processes = held_run(root, f"race-{n}"), draw.randint(2, 4)
            trials.append(
                begin_trial(folder, ids[:processes]) if n % 2 else race_trial(folder, processes)
            )
    client.cancel(ids)
    return plain, trials


def table(trials: Sequence[Trial]) -> str:
    """A row for each kind of trial."""
    lines = ["| trial | trials | with two jobs | with a lost job |", "|---|---|---|---|"]
    groups = {f"killed {place}": [t for t in trials if t.place == place] for place in PLACES}
    for kind in ("submit", "begin"):
        for n in sorted({t.processes for t in trials if t.kind == kind}):
            groups[f"{n} at once: {kind}"] = [
                t for t in trials if (t.kind, t.processes) == (kind, n)
            ]
    for name, found in {**groups, "all": list(trials)}.items():
        lines.append(
            f"| {name} | {len(found)} | {sum(t.has_two for t in found)} | {sum(t.is_lost for t in found)} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--races", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="races-", dir="/tmp") as place:
        daemons = started()
        cluster = next(daemons)
        try:
            with mock.patch.dict(os.environ, cluster.variables):
                plain, trials = all_trials(Path(place), words.kills, words.races, words.seed)
        finally:
            daemons.close()
    print(
        f"\n{date.today()}, {os.cpu_count()} cores, Linux {platform.release()}; a submission takes {plain:.3f} s\n"
    )
    print(table(trials))
    for trial in trials:
        if trial.has_two or trial.is_lost:
            print(trial)
    return int(any(t.has_two or t.is_lost for t in trials))


if __name__ == "__main__":
    sys.exit(main())
