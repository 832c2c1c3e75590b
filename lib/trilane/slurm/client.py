"""SLURM's commands behind one small door: sbatch, squeue, sacct, scontrol, scancel; what they say as values."""

import getpass
import re
import shutil
import subprocess
import textwrap
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trilane.utils.validation import require

DOWN = re.compile(
    r"[Uu]nable to contact slurm controller|Connection (refused|reset)|[Ss]ocket timed out|Zero Bytes were trans"
)


DELAYS_S = (1.0, 2.0, 4.0, 8.0)  # a controller that is restarted is back within such a time


TIMEOUT_S = 60.0


TOLD = 400  # characters of what a command says


JOB_ID = re.compile(r"\d+(_\d+)?")


ENDED = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"),
    *("PREEMPTED", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"),
)


FORGOTTEN = "FORGOTTEN"


HERE = "ENDED HERE"  # a run of this machine, which SLURM never saw


class SlurmError(ValueError):
    """What SLURM refused, or that it cannot be reached, in one line."""


class SlurmAway(SlurmError):
    """The controller cannot be reached."""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """One job as SLURM sees it. `reason` is why it waits; `nodes` is a SLURM node list; times as SLURM prints them."""

    id: str
    state: str
    reason: str = ""
    elapsed: str = ""
    limit: str = ""
    nodes: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether it will not run any more."""
        return self.state in (*ENDED, FORGOTTEN, HERE)


def is_here() -> bool:
    """Whether SLURM's commands are installed on this machine."""
    return shutil.which("sbatch") is not None


def call(command: Sequence[str], *, cwd: Path | None = None, again: bool = True) -> str:
    """What the command prints. It is tried again while the controller is away, unless `again` is False.

    Raises SlurmError with what the command says of its errors where it fails, SlurmAway where the controller stays
    away, ValueError where the command is not installed.
    """
    return _done(command, cwd, again).stdout


def _done(command: Sequence[str], cwd: Path | None, again: bool) -> "subprocess.CompletedProcess[str]":
    require(shutil.which(command[0]) is not None, "slurm", command[0], "is not installed here; use site local")
    for delay in (*DELAYS_S, None):
        try:
            done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            said = done.stderr.strip()
        except subprocess.TimeoutExpired:
            said = f"{command[0]}: Socket timed out after {TIMEOUT_S:.0f} s"
        else:
            if done.returncode == 0:
                return done
        if DOWN.search(said) is None:
            raise SlurmError(f"slurm={command[0]}: {_told(said)}")
        if delay is None or not again:
            break
        time.sleep(delay)
    raise SlurmAway(f"slurm={command[0]}: the controller cannot be reached ({_told(said)}); nothing was changed")


def submit(script: Path, *options: str) -> str:
    """The id of the job that `script` becomes, submitted from its folder.

    A controller that went away in mid-call may have taken the job: before another try it is looked for by a token, so
    that nothing is submitted twice. Raises SlurmAway that says how to look for it where that could not be learnt.
    """
    token = f"trilane-{uuid.uuid4().hex[:12]}"
    command = ["sbatch", "--parsable", f"--comment={token}", *options, "--", script.name]
    look = f"look with: squeue -u $USER -t all -o '%i %k' | grep {token}"
    for delay in (*DELAYS_S, None):
        try:
            return _job_of(call(command, cwd=script.parent, again=False), look)
        except SlurmAway as error:
            said = str(error).removesuffix("; nothing was changed")
            try:
                time.sleep(delay or 0.0)
                listed = call(["squeue", "-h", "-t", "all", "-o", "%i|%k"])
            except SlurmAway:
                break
        found = [line.split("|")[0] for line in listed.splitlines() if line.endswith(f"|{token}")]
        if found:
            return found[0].split("_")[0]
    raise SlurmAway(f"{said}; the job may have been taken: {look}")


def _job_of(said: str, look: str) -> str:
    """The id that sbatch --parsable prints as ID[;CLUSTER], the last line of what a site's own sbatch may say."""
    job = (said.strip().splitlines() or [""])[-1].split(";")[0].strip()
    if JOB_ID.fullmatch(job) is None:
        raise SlurmError(f"slurm=sbatch: said {job!r}, which is no job's number; {look}")
    return job


def test_only(script: Path, *options: str) -> str:
    """What `sbatch --test-only` answers: where and when the job could start. SlurmError if never."""
    done = _done(["sbatch", "--test-only", *options, "--", script.name], script.parent, again=True)
    return _told(done.stderr)


def states(ids: Iterable[str]) -> dict[str, JobState]:
    """The state of each job of `ids` in two calls, however many there are: squeue for those that it still knows, sacct
    for the rest. FORGOTTEN where neither knows it, as without accounting after a while."""
    wanted = list(dict.fromkeys(ids))
    for job in wanted:
        require(JOB_ID.fullmatch(job) is not None, "job", repr(job), "must be a job's number, or ARRAY_INDEX")
    if not wanted:
        return {}
    found = _queued(wanted)
    missing = [job for job in wanted if job not in found]
    if missing:
        found |= _accounted(missing)
    return {job: found.get(job, JobState(id=job, state=FORGOTTEN)) for job in wanted}


def _queued(ids: Sequence[str]) -> dict[str, JobState]:
    # `squeue -j` fails where it forgot one of the ids, and that is no error; so it lists all of ours
    command = ["squeue", "-h", "-r", "-t", "all", "-u", getpass.getuser(), "-o", "%i|%T|%r|%M|%l|%N"]
    jobs: dict[str, JobState] = {}
    for line in call(command).splitlines():
        job, state, reason, elapsed, limit, nodes = line.split("|")
        if job in ids:
            why = "" if reason == "None" else reason
            jobs[job] = JobState(id=job, state=state, reason=why, elapsed=elapsed, limit=limit, nodes=nodes)
    return jobs


def _accounted(ids: Sequence[str]) -> dict[str, JobState]:
    names = "jobid,state,elapsed,timelimit,nodelist"
    try:
        said = call(["sacct", "-X", "-n", "-P", "-j", ",".join(ids), "-o", names])
    except SlurmError:
        return {}  # "Slurm accounting storage is disabled": the ledger and the log know the rest
    jobs = {}
    for line in said.splitlines():
        job, state, elapsed, limit, nodes = line.split("|")
        # "CANCELLED by 1000"
        jobs[job] = JobState(id=job, state=state.split()[0], elapsed=elapsed, limit=limit, nodes=nodes)
    return jobs


def owners(ids: Iterable[str]) -> dict[str, str]:
    """The user of each job of `ids` that squeue still knows."""
    wanted = list(ids)
    for job in wanted:
        require(JOB_ID.fullmatch(job) is not None, "job", repr(job), "must be a job's number, or ARRAY_INDEX")
    if not wanted:
        return {}
    try:
        said = call(["squeue", "-h", "-r", "-t", "all", "-j", ",".join(wanted), "-o", "%i|%F|%u"])
    except SlurmError as error:
        if "Invalid job id" not in str(error):
            raise
        # one that it forgot, and it says nothing of the others
        return {job: user for one in wanted for job, user in owners([one]).items()} if len(wanted) > 1 else {}
    users = {name: user for line in said.splitlines() for *names, user in [line.split("|")] for name in names}
    return {job: users[job] for job in wanted if job in users}


def require_own(ids: Iterable[str]) -> None:
    """ValueError where a job is somebody else's, or none that SLURM knows."""
    wanted = list(ids)
    users = owners(wanted)
    for job in wanted:
        require(job in users, "job", job, "SLURM knows no such job")
        require(users[job] == getpass.getuser(), "job", job, f"is of user {users[job]}, not yours")


def cancel(ids: Iterable[str]) -> None:
    """End the jobs, all of them ours or none."""
    jobs = list(ids)
    require_own(jobs)
    if jobs:
        call(["scancel", *jobs])


def send(job: str, signal: str) -> None:
    """Send a signal, such as USR1, to the steps of a job."""
    require_own([job])
    call(["scancel", f"--signal={signal}", job])


def raw_id(job: str) -> str:
    """The number that srun --jobid takes: of a job of an array not ARRAY_INDEX, but one of its own."""
    require(JOB_ID.fullmatch(job) is not None, "job", repr(job), "must be a job's number, or ARRAY_INDEX")
    if "_" not in job:
        return job
    found = call(["squeue", "-h", "-j", job, "-o", "%A"]).split()
    require(bool(found), "job", job, "does not run any more")
    return found[0]


def max_array() -> int | None:
    """The largest index that a job of an array may have, None where SLURM does not say."""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", call(["scontrol", "show", "config"]), re.M)
    return int(found[1]) - 1 if found else None


def hostnames(nodelist: str) -> list[str]:
    """The nodes of a SLURM node list."""
    return call(["scontrol", "show", "hostnames", nodelist]).split() if nodelist else []


def down_nodes() -> dict[str, str]:
    """Nodes that SLURM holds for dead or drained, with the state it gives them."""
    pairs = (line.split("|") for line in call(["sinfo", "-h", "-N", "-o", "%N|%T"]).splitlines())
    return {name: state for name, state in pairs if re.match(r"down|drain|fail", state)}


def exclude(job: str, nodes: Iterable[str]) -> None:
    """Keep a waiting job off `nodes`, beside those that it already avoids."""
    shown = call(["scontrol", "show", "job", job])
    before = [host for found in re.findall(r"ExcNodeList=([^\s(]+)", shown) for host in hostnames(found)]
    every = ",".join(dict.fromkeys([*before, *nodes]))  # an update puts the list in the place of the old one
    call(["scontrol", "update", f"JobId={job}", f"ExcNodeList={every}"])


def _told(said: str) -> str:
    """The lines that tell most, without the command's own prefix: all errors, among which a site's own explanation of a
    refusal may stand, and the last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    told = [line for line in lines if re.match(r"\w+: error: ", line)] + lines[-1:]
    told = list(dict.fromkeys(re.sub(r"^\w+: (error: )?", "", line) for line in told))
    return textwrap.shorten("; ".join(told), TOLD, placeholder=" ...") if told else "it said nothing"
