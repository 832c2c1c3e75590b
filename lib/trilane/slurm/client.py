"""SLURM's commands (sbatch, squeue, sacct, scontrol, scancel, sinfo) and their output as values."""

import getpass
import hashlib
import re
import shutil
import textwrap
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from trilane.utils.process import run
from trilane.utils.validation import require

JOB_ID = re.compile(r"\d+")
# between two tries: a restarted controller is back within their sum
DELAYS_S = (1.0, 2.0, 4.0, 8.0)
# neither squeue nor sacct knows the job, as on a cluster without accounting after a while
FORGOTTEN = "FORGOTTEN"
ENDED = (
    *(
        "COMPLETED",
        "FAILED",
        "CANCELLED",
        "TIMEOUT",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "BOOT_FAIL",
        "DEADLINE",
    ),
    *("PREEMPTED", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"),
)


class SlurmError(ValueError):
    """A SLURM command failed; its reason in one line."""


class SlurmUnreachable(SlurmError):
    """The controller cannot be reached; `exit_code` is EX_TEMPFAIL of sysexits.h: try again."""

    exit_code = 75


@dataclass(frozen=True, kw_only=True)
class JobState:
    """One job as SLURM reports it: `reason` is why it waits, `nodes` a SLURM node list, times as
    SLURM prints them.
    """

    id: str
    state: str
    reason: str = ""
    elapsed: str = ""
    limit: str = ""
    nodes: str = ""
    name: str = ""

    @property
    def has_ended(self) -> bool:
        """Whether it will not run again."""
        return self.state in (*ENDED, FORGOTTEN)


def is_installed() -> bool:
    """Whether SLURM's commands are installed on this machine."""
    return shutil.which("sbatch") is not None


def call(
    command: Sequence[str], *, cwd: Path | None = None, again: bool = True, stream: str = "stdout"
) -> str:
    """The command's output; tried again while the controller cannot be reached, unless `again` is
    False.

    Raises SlurmError with the command's error text where it fails, SlurmUnreachable where the
    controller stays unreachable, ValueError where the command is not installed.
    """
    rule = "is not installed here; `trilane train` trains on this machine"
    require(shutil.which(command[0]) is not None, "slurm", command[0], rule)
    for delay in (0.0, *DELAYS_S[: len(DELAYS_S) * again]):
        time.sleep(delay)
        # A busy controller answers within its MessageTimeout, 10 s by default, some sites have 60.
        # In a session of its own: Ctrl-C at a terminal does not end an sbatch that is being
        # answered.
        done = run(command, within_s=60.0, cwd=cwd, start_new_session=True)
        if done.returncode == 0:
            return str(getattr(done, stream))
        if not _is_away(done.stderr):
            raise SlurmError(f"slurm={command[0]}: {_message(done.stderr)}")
    reason = f"the controller cannot be reached ({_message(done.stderr)}); nothing was changed"
    raise SlurmUnreachable(f"slurm={command[0]}: {reason}")


def _is_away(error: str) -> bool:
    words = "unable to contact slurm controller|connection (refused|reset)|timed out|zero bytes were trans"
    return re.search(words, error, re.I) is not None


def require_answer(then: str = "") -> None:
    """Raise SlurmUnreachable, with `then` in its message, where no controller answers a ping within
    3 s.

    For the commands that a person waits for: a busy controller answers a ping at once, unlike other
    requests. Nothing where SLURM is not installed.
    """
    if shutil.which("scontrol") is None:
        return
    done = run(["scontrol", "ping"], within_s=3.0, start_new_session=True)
    is_down = (
        " is DOWN" in done.stdout and " is UP" not in done.stdout
    )  # a backup controller may answer
    if is_down or _is_away(done.stderr):
        answer = _message(done.stdout.partition("\n*")[0] + done.stderr)
        raise SlurmUnreachable(f"slurm=scontrol ping: SLURM does not answer ({answer}){then}")


def job_name(folder: Path) -> str:
    """The name of all jobs of a run or sweep, by which SLURM finds them: its folder's, and its
    path's hash.

    job_name(Path("runs/1b3")) is such as "1b3-5f0c9a31".
    """
    digits = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', folder.resolve().name)[:40].lstrip('-')}-{digits}"


def sbatch(
    script: Path,
    *options: str,
    name: str = "",
    known: Collection[str] = (),
    arguments: Sequence[str] = (),
) -> str:
    """Submit `script` with its arguments from its folder, as a job of that name; the job's id.

    A controller that failed during the call may have accepted the job: before the only other try, a
    job of the name that is none of the `known` ones is looked for. Where that fails,
    SlurmUnreachable has the command that looks.
    """
    name = name or job_name(script)
    command = [
        "sbatch",
        "--parsable",
        f"--job-name={name}",
        *options,
        "--",
        script.name,
        *arguments,
    ]
    look = f"look with: squeue -u $USER -t all --name={name}"
    for _ in range(2):
        try:
            # as ID[;CLUSTER], in the last line: a site's own sbatch may print others
            printed = call(command, cwd=script.parent, again=False).strip()
            job = printed.rpartition("\n")[2].partition(";")[0].strip()
            require(
                JOB_ID.fullmatch(job) is not None,
                "slurm",
                "sbatch",
                f"printed {job[:400]!r}, no job id; {look}",
            )
            return job
        except SlurmUnreachable as error:
            reason = str(error).removesuffix("; nothing was changed")
        try:
            found = [job for job in states((), [name]) if job not in known]
        except SlurmUnreachable:
            break
        if found:
            return found[-1]
    raise SlurmUnreachable(f"{reason}; the job may have been accepted: {look}")


def test_only(script: Path, *options: str) -> str:
    """Where and when the job could start, as `sbatch --test-only` prints it; SlurmError if never."""
    return _message(
        call(
            ["sbatch", "--test-only", *options, "--", script.name],
            cwd=script.parent,
            stream="stderr",
        )
    )


def states(ids: Iterable[str], names: Collection[str] = ()) -> dict[str, JobState]:
    """The state of each job of `ids`, FORGOTTEN where SLURM does not know it, and of one's own jobs
    of these names.

    One call of squeue, one of sacct for ids that it lacks, and one of scontrol for those that have
    not ended by either: a squeue that is a site's cached one must not let a second one start.
    """
    wanted = _checked(dict.fromkeys(ids))
    if not wanted and not names:
        return {}
    # `squeue -j` fails if it has forgotten one of the ids, so all jobs of this user are listed
    command = [
        "squeue",
        "-h",
        "-r",
        "-t",
        "all",
        "-u",
        getpass.getuser(),
        "-o",
        "%A|%T|%r|%M|%l|%N|%j",
    ]
    columns = ("id", "state", "reason", "elapsed", "limit", "nodes", "name")
    lines = [line.split("|", 6) for line in call(command).splitlines() if line.count("|") >= 6]
    rows = [dict(zip(columns, words, strict=True)) for words in lines]
    queued = [JobState(**row | {"reason": row["reason"].removeprefix("None")}) for row in rows]
    queued.sort(
        key=lambda state: not state.has_ended
    )  # of a job that is listed twice the row in which it lives counts
    found = {state.id: state for state in queued if state.id in wanted or state.name in names}
    missing = [job for job in wanted if job not in found]
    found |= _accounted(missing) if missing else {}
    unknown = [job for job in missing if job not in found]
    return (
        {job: JobState(id=job, state=FORGOTTEN) for job in wanted}
        | found
        | (_shown(unknown) if unknown else {})
    )


def _shown(ids: Sequence[str]) -> dict[str, JobState]:
    """The jobs that the controller itself still has; empty where it has none, or does not answer."""
    if shutil.which("scontrol") is None:
        return {}
    asked = "".join(f"show job {job}\n" for job in ids)
    shown = run(["scontrol", "-o"], within_s=60.0, start_new_session=True, input=asked).stdout
    lines = re.findall(
        r"JobId=(\d+) JobName=(.*?) UserId=.*? JobState=([A-Z_]+).*? NodeList=(\S*)", shown
    )
    nodes = {"(null)": ""}
    return {
        j: JobState(id=j, name=n, state=s, nodes=nodes.get(at, at))
        for j, n, s, at in lines
        if j in ids
    }


def past(ids: Collection[str]) -> dict[str, list[tuple[str, str, str]]]:
    """(state, end, exit code) of each time that SLURM has run the jobs: a requeued one has as many
    as starts.

    Empty where there is no accounting. A job that has lost a node under --no-kill has a row
    RESIZING before that of its end.
    """
    if not ids or shutil.which("sacct") is None:
        return {}
    columns = "jobidraw,state,end,exitcode"
    printed = run(
        ["sacct", "-DXnP", "-j", ",".join(_checked(ids)), "-o", columns], within_s=60.0
    ).stdout
    found = dict[str, list[tuple[str, str, str]]]()
    for job, state, end, code in (
        line.split("|") for line in printed.splitlines() if line.count("|") == 3
    ):
        if state != "RESIZING":
            found.setdefault(job, []).append(
                (state.partition(" ")[0], end, code)
            )  # "CANCELLED by 1000"
    return found


def _checked(ids: Iterable[str]) -> list[str]:
    """The ids as a list; ValueError where one is not a job's id."""
    wanted = list(ids)
    for job in wanted:
        require(JOB_ID.fullmatch(job) is not None, "job", repr(job), "must be a job's number")
    return wanted


def _accounted(ids: Sequence[str]) -> dict[str, JobState]:
    try:
        output = call(
            [
                "sacct",
                "-XnP",
                "-j",
                ",".join(ids),
                "-o",
                "jobidraw,state,elapsed,timelimit,nodelist,user",
            ]
        )
    except SlurmError:
        return {}  # "Slurm accounting storage is disabled": the ledger and the log have to do
    found = {}
    for line in (line for line in output.splitlines() if line.count("|") == 5):
        job, state, elapsed, limit, nodes, user = line.split("|")
        one = JobState(
            id=job, state=state.partition(" ")[0], elapsed=elapsed, limit=limit, nodes=nodes
        )  # "CANCELLED by 1000"
        # squeue does not list it: the accounting of one's own job is late, or never heard of its
        # end
        if job in ids and (one.has_ended or user != getpass.getuser()):
            found[job] = one
    return found


def cancel(ids: Iterable[str]) -> None:
    """Cancel the jobs. Raises SlurmError where one is not known, or belongs to another user."""
    if jobs := _checked(ids):
        call(["scancel", *jobs])


def hostnames(nodelist: str) -> list[str]:
    """The nodes of a SLURM node list."""
    return call(["scontrol", "show", "hostnames", nodelist]).split() if nodelist else []


def _message(text: str) -> str:
    """The error lines (a site may explain a refusal there), an option that this SLURM does not
    know, and the last line; unprefixed, joined and shortened.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    chosen = [
        line for line in lines if re.match(r"\w+: (error: |unrecognized option)", line)
    ] + lines[-1:]
    chosen = list(dict.fromkeys(re.sub(r"^\w+: (error: )?", "", line) for line in chosen))
    return (
        textwrap.shorten("; ".join(chosen), 400, placeholder=" ...") if chosen else "no error text"
    )
