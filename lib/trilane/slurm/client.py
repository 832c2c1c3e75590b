"""SLURM's commands (sbatch, squeue, sacct, scontrol, scancel, sinfo) and their output as values."""

import getpass
import re
import shutil
import subprocess
import textwrap
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trilane.utils.validation import require

DOWN = re.compile(
    r"[Uu]nable to contact slurm controller|Connection (refused|reset)|[Ss]ocket timed out|Zero Bytes were trans"
)

QUERIES = ("squeue", "sacct", "sinfo")  # one that dies without a word changed nothing, and is tried again
DELAYS_S = (1.0, 2.0, 4.0, 8.0)  # between two tries: a restarted controller is back within their sum
TIMEOUT_S = 60.0
ANSWER_S = 3.0  # of a ping, which a busy controller answers at once, unlike other requests
MESSAGE_LENGTH = 400  # characters of a command's error text
JOB_ID = re.compile(r"\d+(_\d+)?")

ENDED = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"),
    *("PREEMPTED", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"),
)

FORGOTTEN = "FORGOTTEN"  # neither squeue nor sacct knows the job, as on a cluster without accounting after a while
ENDED_HERE = "ENDED HERE"  # a run on this machine, without SLURM
ENDED_BY_LEDGER = "ENDED"  # by the ledger, while SLURM does not answer


class SlurmError(ValueError):
    """A SLURM command failed; its reason in one line."""


class SlurmUnreachable(SlurmError):
    """The controller cannot be reached; `exit_code` is EX_TEMPFAIL of sysexits.h: try again."""

    exit_code = 75


@dataclass(frozen=True, kw_only=True)
class JobState:
    """One job as SLURM reports it: `reason` is why it waits, `nodes` a SLURM node list, times as SLURM prints them."""

    id: str
    state: str
    reason: str = ""
    elapsed: str = ""
    limit: str = ""
    nodes: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether it will not run again."""
        return self.state in (*ENDED, FORGOTTEN, ENDED_HERE, ENDED_BY_LEDGER)


def is_installed() -> bool:
    """Whether SLURM's commands are installed on this machine."""
    return shutil.which("sbatch") is not None


def call(command: Sequence[str], *, cwd: Path | None = None, again: bool = True) -> str:
    """The command's standard output; tried again while the controller cannot be reached, unless `again` is False.

    Raises SlurmError with the command's error text where it fails, SlurmUnreachable where the controller stays
    unreachable, ValueError where the command is not installed.
    """
    return _completed(command, cwd, again).stdout


def _completed(command: Sequence[str], cwd: Path | None, again: bool) -> "subprocess.CompletedProcess[str]":
    require(shutil.which(command[0]) is not None, "slurm", command[0], "is not installed here; use site local")
    for delay in (*DELAYS_S, None):
        try:
            done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            error = done.stderr.strip()
        except subprocess.TimeoutExpired:
            error = f"{command[0]}: Socket timed out after {TIMEOUT_S:.0f} s"
        else:
            if done.returncode == 0:
                return done
        died = not error and command[0] in QUERIES and delay is not None and again
        if DOWN.search(error) is None and not died:
            raise SlurmError(f"slurm={command[0]}: {_message(error)}")
        if delay is None or not again:
            break
        time.sleep(delay)
    reason = f"the controller cannot be reached ({_message(error)}); nothing was changed"
    raise SlurmUnreachable(f"slurm={command[0]}: {reason}")


def require_answer(then: str = "") -> None:
    """Raise SlurmUnreachable, with `then` in its message, where no controller answers a ping within ANSWER_S seconds.

    For the commands that a person waits for; jobs wait for a controller that restarts. Nothing where SLURM is not
    installed.
    """
    if shutil.which("scontrol") is None:
        return
    try:
        done = subprocess.run(["scontrol", "ping"], capture_output=True, text=True, timeout=ANSWER_S, check=False)
        error = _message(done.stdout.partition("\n*")[0] + done.stderr)
        is_down = " is DOWN" in done.stdout and " is UP" not in done.stdout  # a backup controller may answer
    except subprocess.TimeoutExpired:
        error, is_down = f"nothing within {ANSWER_S:g} s", True
    if is_down or DOWN.search(error):
        raise SlurmUnreachable(f"slurm=scontrol ping: SLURM does not answer ({error}){then}")


def comment(job: str) -> str:
    """The first word of the comment of a job that squeue knows: the token of its submission, before the user's own."""
    _checked([job])
    return call(["squeue", "-h", "-t", "all", "-j", job, "-o", "%k"]).strip().partition("\n")[0].partition(" ")[0]


def test_only(script: Path, *options: str) -> str:
    """Where and when the job could start, as `sbatch --test-only` prints it; SlurmError if never."""
    done = _completed(["sbatch", "--test-only", *options, "--", script.name], script.parent, again=True)
    return _message(done.stderr)


def states(ids: Iterable[str]) -> dict[str, JobState]:
    """The state of each job, in one call of squeue and one of sacct for the rest; FORGOTTEN where neither knows it."""
    wanted = _checked(dict.fromkeys(ids))
    if not wanted:
        return {}
    found = _queued(wanted)
    missing = [job for job in wanted if job not in found]
    if missing:
        accounted = _accounted(missing)
        going = [job for job, state in accounted.items() if not state.has_ended]
        known = owners(going)  # of any user, whom the list of one's own jobs lacks
        # the controller runs no job that it does not know: the accounting is late, or never heard of its end
        found |= {job: state for job, state in accounted.items() if state.has_ended or job in known}
    return {job: found.get(job, JobState(id=job, state=FORGOTTEN)) for job in wanted}


def _checked(ids: Iterable[str]) -> list[str]:
    """The ids as a list; ValueError where one is not a job's id."""
    wanted = list(ids)
    for job in wanted:
        require(JOB_ID.fullmatch(job) is not None, "job", repr(job), "must be a job's number, or ARRAY_INDEX")
    return wanted


def _queued(ids: Sequence[str]) -> dict[str, JobState]:
    # `squeue -j` fails if it has forgotten one of the ids, so all jobs of this user are listed
    command = ["squeue", "-h", "-r", "-t", "all", "-u", getpass.getuser(), "-o", "%i|%T|%r|%M|%l|%N"]
    jobs: dict[str, JobState] = {}
    for line in call(command).splitlines():
        job, state, reason, elapsed, limit, nodes = line.split("|")
        if job in ids:
            reason = "" if reason == "None" else reason
            jobs[job] = JobState(id=job, state=state, reason=reason, elapsed=elapsed, limit=limit, nodes=nodes)
    return jobs


def _accounted(ids: Sequence[str]) -> dict[str, JobState]:
    try:
        output = call(["sacct", "-XnP", "-j", ",".join(ids), "-o", "jobid,state,elapsed,timelimit,nodelist"])
    except SlurmError:
        return {}  # "Slurm accounting storage is disabled": the ledger and the log have to do
    jobs = {}
    for line in output.splitlines():
        job, state, elapsed, limit, nodes = line.split("|")
        if job in ids:  # asked for an array, sacct answers with every task, and later than squeue does
            word = state.split()[0]  # of "CANCELLED by 1000"
            jobs[job] = JobState(id=job, state=word, elapsed=elapsed, limit=limit, nodes=nodes)
    return jobs


def owners(ids: Iterable[str]) -> dict[str, str]:
    """The user of each job of `ids` that squeue still knows."""
    wanted = _checked(ids)
    if not wanted:
        return {}
    try:
        output = call(["squeue", "-h", "-r", "-t", "all", "-j", ",".join(wanted), "-o", "%i|%F|%u"])
    except SlurmError as error:
        if "Invalid job id" not in str(error):
            raise
        # squeue has forgotten one of them, and lists none
        return {job: user for one in wanted for job, user in owners([one]).items()} if len(wanted) > 1 else {}
    users = {name: user for line in output.splitlines() for *names, user in [line.split("|")] for name in names}
    return {job: users[job] for job in wanted if job in users}


def require_own(ids: Iterable[str]) -> None:
    """Raise ValueError where a job belongs to another user, or squeue does not know it."""
    wanted = list(ids)
    users = owners(wanted)
    for job in wanted:
        require(job in users, "job", job, "SLURM has no such job")
        require(users[job] == getpass.getuser(), "job", job, f"belongs to user {users[job]}, not to you")


def cancel(ids: Iterable[str]) -> None:
    """Cancel the jobs; none of them where one belongs to another user (ValueError)."""
    jobs = list(ids)
    require_own(jobs)
    if jobs:
        call(["scancel", *jobs])


def send(job: str, signal: str) -> None:
    """Send a signal, such as USR1, to the steps of a job."""
    require_own([job])
    call(["scancel", f"--signal={signal}", job])


def raw_id(job: str) -> str:
    """The number that srun --jobid takes: an array's job has its own besides ARRAY_INDEX; unchanged without SLURM."""
    if "_" not in job or not is_installed():
        return job
    _checked([job])
    found = call(["squeue", "-h", "-j", job, "-o", "%A"]).split()
    require(bool(found), "job", job, "is no longer running")
    return found[0]


def max_array() -> int | None:
    """The largest index of a job array, None where SLURM does not report it."""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", call(["scontrol", "show", "config"]), re.M)
    return int(found[1]) - 1 if found else None


def hostnames(nodelist: str) -> list[str]:
    """The nodes of a SLURM node list."""
    return call(["scontrol", "show", "hostnames", nodelist]).split() if nodelist else []


def down_nodes() -> dict[str, str]:
    """The nodes that SLURM lists as down or failing, with their state.

    A drained node takes no new job, and trains on; "drained*" is drained and does not respond.
    """
    pairs = (line.split("|") for line in call(["sinfo", "-h", "-N", "-o", "%N|%T"]).splitlines())
    return {name: state for name, state in pairs if re.match(r"down|fail|drain\w*\*", state)}


def _message(text: str) -> str:
    """The error lines (a site may explain a refusal there), an option that this SLURM does not know, and the last line;
    unprefixed, joined and shortened.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    chosen = [line for line in lines if re.match(r"\w+: (error: |unrecognized option)", line)] + lines[-1:]
    chosen = list(dict.fromkeys(re.sub(r"^\w+: (error: )?", "", line) for line in chosen))
    return textwrap.shorten("; ".join(chosen), MESSAGE_LENGTH, placeholder=" ...") if chosen else "no error text"
