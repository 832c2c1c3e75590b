"""SLURM's commands (sbatch, squeue, sacct, scontrol, scancel) and their output as values, in the
plain form that every release prints.
"""

import getpass
import os
import re
import shutil
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from trilane.utils.files import hash_of
from trilane.utils.frozen import frozen
from trilane.utils.process import run
from trilane.utils.tables import short
from trilane.utils.validation import require, shipped_json

JOB_ID = re.compile(r"\d+")
# between two tries: a restarted controller is back within their sum
DELAYS_S = (1.0, 2.0, 4.0, 8.0)
# A busy controller answers within its MessageTimeout, 10 s by default; some sites have 60.
ANSWER_S = 60.0
# neither squeue nor sacct knows the job, as on a cluster without accounting after a while
FORGOTTEN = "FORGOTTEN"
ENDED = shipped_json("ends")["slurm_ended"]
QUEUED = ("id", "state", "reason", "elapsed", "nodes", "name", "folder")
AWAY = re.compile(
    r"unable to contact slurm controller|connection (refused|reset)|timed out|"
    r"zero bytes were trans",
    re.IGNORECASE,
)


class SlurmError(ValueError):
    """A SLURM command failed; its reason in one line."""


class SlurmUnreachable(SlurmError):
    """The controller cannot be reached; `exit_code` is EX_TEMPFAIL of sysexits.h: try again."""

    exit_code = 75


@frozen
class JobState:
    """One job as SLURM reports it: `reason` is why it waits, `nodes` a SLURM node list, `folder`
    where it works, times as SLURM prints them.
    """

    id: str
    state: str
    reason: str = ""
    elapsed: str = ""
    nodes: str = ""
    name: str = ""
    folder: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether it will not run again."""
        return self.state in (*ENDED, FORGOTTEN)

    def is_of(self, home: Path) -> bool:
        """Whether it is a job of the run folder `home`, by its name, which has the hash of its
        folder; one with another name, such as one submitted by hand, by where it works.

        A folder that is not there any more was moved here. What SLURM does not say speaks for
        `home`.
        """
        if self.name == job_name(home):
            return True
        if self.folder:
            return not os.path.isdir(self.folder) or os.path.samefile(self.folder, home)
        return re.search(r"-[0-9a-f]{8}$", self.name) is None


def is_installed() -> bool:
    """Whether SLURM's commands are installed on this machine."""
    return shutil.which("sbatch") is not None


def call(command: Sequence[str], *, cwd: Path | None = None, again: bool = True) -> str:
    """The command's output; tried again while the controller cannot be reached, unless `again` is
    False.

    Raises SlurmError with the command's error text where it fails, SlurmUnreachable where the
    controller stays unreachable, ValueError where the command is not installed.
    """
    rule = "is not installed here; `trilane train` trains on this machine"
    require(shutil.which(command[0]), "slurm", command[0], rule)
    delays = [0.0]
    if again:
        delays += DELAYS_S
    for delay in delays:
        time.sleep(delay)
        # in a session of its own: Ctrl-C does not end an sbatch that is being answered
        done = run(command, within_s=ANSWER_S, cwd=cwd, start_new_session=True)
        if done.returncode == 0:
            return done.stdout
        if not AWAY.search(done.stderr):
            raise SlurmError(f"slurm={command[0]}: {_message(done.stderr)}")
    reason = f"the controller cannot be reached ({_message(done.stderr)}); nothing was changed"
    raise SlurmUnreachable(f"slurm={command[0]}: {reason}")


def _message(text: str) -> str:
    """The text of an error in one line, shortened."""
    return short(text, 400) or "no error text"


def require_answer() -> None:
    """Raise SlurmUnreachable where no controller answers a ping within 3 s.

    For the commands that a person waits for: a busy controller answers a ping at once, unlike other
    requests. Nothing where SLURM is not installed.
    """
    if shutil.which("scontrol") is None:
        return
    done = run(["scontrol", "ping"], within_s=3.0, start_new_session=True)
    # a backup controller may answer
    is_down = " is DOWN" in done.stdout and " is UP" not in done.stdout
    if is_down or AWAY.search(done.stderr):
        answer = _message(done.stdout.partition("\n*")[0] + done.stderr)
        raise SlurmUnreachable(f"slurm=scontrol ping: no answer ({answer}); nothing was changed")


def job_name(folder: Path) -> str:
    """The name of all jobs of a run or sweep, by which SLURM finds them: its folder's, and its
    path's hash.

    job_name(Path("runs/1b3")) is such as "1b3-5f0c9a31".
    """
    path = folder.resolve()
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", path.name)[:40].lstrip("-")
    return f"{plain}-{hash_of(str(path), 8)}"


def sbatch(
    script: Path,
    *options: str,
    name: str,
    known: Collection[str],
    arguments: Sequence[str] = (),
) -> str:
    """Submit `script` with its arguments from its folder, as a job of that name; the job's id.

    A controller that failed during the call may have accepted the job: before the only other try, a
    job of the name that is none of the `known` ones is looked for. Where that fails,
    SlurmUnreachable has the command that looks.
    """
    command = ["sbatch", "--parsable", f"--job-name={name}", *options, "--", script.name]
    command += arguments
    look = f"look with: squeue -u $USER -t all --name={name}"
    for _ in range(2):
        try:
            printed = call(command, cwd=script.parent, again=False)
        except SlurmUnreachable:
            pass
        else:
            # as ID[;CLUSTER], in the last line: a site's own sbatch may print others
            job = printed.strip().rpartition("\n")[2].partition(";")[0].strip()
            rule = f"printed {job[:400]!r}, no job id; {look}"
            require(JOB_ID.fullmatch(job), "slurm", "sbatch", rule)
            return job
        try:
            accepted = [job for job in states((), [name]) if job not in known]
        except SlurmUnreachable:
            break
        if accepted:
            return accepted[-1]
    reason = "the controller cannot be reached; the job may have been accepted"
    raise SlurmUnreachable(f"slurm=sbatch: {reason}: {look}")


def test_only(script: Path) -> None:
    """Raise SlurmError where the job could never start, by `sbatch --test-only`."""
    call(["sbatch", "--test-only", "--", script.name], cwd=script.parent)


def states(ids: Iterable[str], names: Collection[str] = ()) -> dict[str, JobState]:
    """The state of each job of `ids`, FORGOTTEN where SLURM does not know it, and of one's own jobs
    of these names.

    One call of squeue, and one of sacct for ids that it lacks.
    """
    wanted = list(dict.fromkeys(ids))
    if not wanted and not names:
        return {}
    found: dict[str, JobState] = {}
    for state in _queued():
        if state.id not in wanted and state.name not in names:
            continue
        # of a job that is listed twice the row in which it lives counts
        if state.id not in found or found[state.id].has_ended:
            found[state.id] = state
    missing = [job for job in wanted if job not in found]
    found |= {job: JobState(id=job, state=FORGOTTEN) for job in missing}
    return found | past(missing)


def _queued() -> list[JobState]:
    """This user's jobs that squeue lists: `squeue -j` fails if it has forgotten one of the ids."""
    form = "%A|%T|%r|%M|%N|%j|%Z"
    user = getpass.getuser()
    jobs = []
    for line in call(["squeue", "-h", "-r", "-t", "all", "-u", user, "-o", form]).splitlines():
        row = dict(zip(QUEUED, line.split("|", len(QUEUED) - 1), strict=False))
        if "name" in row:
            row["reason"] = row["reason"].removeprefix("None")
            jobs.append(JobState(**row))
    return jobs


def past(ids: Collection[str]) -> dict[str, JobState]:
    """The last time that SLURM has run the jobs, by its accounting; {} where there is none.

    Left out: one's own jobs that have not ended there. squeue does not list them, so that the
    accounting is late, or never heard of their end.
    """
    if not ids or shutil.which("sacct") is None:
        return {}
    columns = "jobidraw,state,elapsed,nodelist,user,workdir"
    command = ["sacct", "-DXnP", "-j", ",".join(ids), "-o", columns]
    jobs = {}
    for line in run(command, within_s=ANSWER_S).stdout.splitlines():
        words = line.split("|", 5)
        if len(words) < 5 or words[0] not in ids:
            continue
        job, word, elapsed, nodes, user, folder = [*words, ""][:6]
        state = word.partition(" ")[0]  # "CANCELLED by 1000"
        # of a job that has lost a node under --no-kill there is a row RESIZING before its end's
        if state in ENDED or (state != "RESIZING" and user != getpass.getuser()):
            jobs[job] = JobState(id=job, state=state, elapsed=elapsed, nodes=nodes, folder=folder)
    return jobs


def cancel(ids: Sequence[str]) -> None:
    """Cancel the jobs. Raises SlurmError where one is not known, or belongs to another user."""
    if ids:
        call(["scancel", *ids])


def hostnames(nodelist: str) -> list[str]:
    """The nodes of a SLURM node list."""
    if not nodelist:
        return []
    return call(["scontrol", "show", "hostnames", nodelist]).split()
