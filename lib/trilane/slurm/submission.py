"""Submissions: each is marked by a token before sbatch, and recorded in the ledgers of its runs before and after it, so
that one that was interrupted is found again and nothing is submitted twice.
"""

import contextlib
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trilane.slurm import client, frozen_code, ledger
from trilane.slurm.script import directives
from trilane.utils.folder_lock import FolderLock
from trilane.utils.validation import require

PATIENCE_S = 15.0  # for the lock of a folder, which a submission holds for a second or two
SETTLE_S = 10.0  # in which a controller still accepts the request of an sbatch that was killed (MessageTimeout)


class UnknownSubmission(client.SlurmUnreachable):
    """Whether SLURM accepted a submission is not known."""


def new_token() -> str:
    """A comment by which the job of one submission is found again."""
    return f"trilane-{uuid.uuid4().hex[:12]}"


def look_command(*tokens: str) -> str:
    """The command with which a person finds the jobs of tokens."""
    return f"squeue -u $USER -t all -o '%i %k' | grep {tokens[0] if len(tokens) == 1 else 'trilane-'}"


def sbatch(script: Path, *options: str, token: str = "", arguments: Sequence[str] = ()) -> str:
    """Submit `script` with its arguments from its folder, its comment preceded by the token; the job's id.

    A controller that failed during the call may have accepted the job: before another try it is looked for by its
    token, so that nothing is submitted twice. Where even that fails, UnknownSubmission names the command that looks.
    """
    token = token or new_token()
    own = directives(script.read_text(encoding="utf-8", errors="replace")).get("comment", "")
    comment = f"--comment={token} {own}".rstrip()
    command = ["sbatch", "--parsable", comment, *options, "--", script.name, *arguments]
    for delay in (*client.DELAYS_S, None):
        try:
            return _job_of(client.call(command, cwd=script.parent, again=False), token)
        except UnknownSubmission:
            raise
        except client.SlurmUnreachable as error:
            reason = str(error).removesuffix("; nothing was changed")
            try:
                time.sleep(delay or 0.0)
                found = find([token])
            except client.SlurmUnreachable:
                break
        if found:
            return found[token]
    raise UnknownSubmission(f"{reason}; the job may have been accepted: look with: {look_command(token)}")


def _job_of(output: str, token: str) -> str:
    """The id that sbatch --parsable prints as ID[;CLUSTER], in the last line: a site's own sbatch may print others."""
    job = (output.strip().splitlines() or [""])[-1].split(";")[0].strip()
    if client.JOB_ID.fullmatch(job) is None:
        reason = f"slurm=sbatch: printed {job[: client.MESSAGE_LENGTH]!r}, which is not a job id"
        raise UnknownSubmission(f"{reason}; look with: {look_command(token)}")
    return job


def find(tokens: Iterable[str]) -> dict[str, str]:
    """The job, or array, of each token, where SLURM has one: by squeue, else by the accounting of the last week.

    Raises SlurmUnreachable where squeue does not answer. Left out: a job that has ended, where squeue has forgotten it
    and the accounting does not answer or keeps neither the comment nor the command line.
    """
    wanted = set(tokens)
    rows = (line.partition("|") for line in client.call(["squeue", "-h", "-t", "all", "-o", "%F|%k"]).splitlines())
    found = {word: job for job, _, comment in rows if (word := comment.partition(" ")[0]) in wanted}
    for kept in ("comment,submitline", "comment") if wanted - set(found) else ():  # submitline: since SLURM 20.11
        with contextlib.suppress(client.SlurmError):
            output = client.call(["sacct", "-XnP", "-S", "now-7days", "-o", f"jobid,{kept}"], again=False)
            pairs = [(line.split("|")[0].split("_")[0], line) for line in output.splitlines()]
            return {token: job for job, line in pairs for token in wanted if token in line} | found
    return found


def is_submitting(token: str) -> bool:
    """Whether an sbatch with that token runs on this host: it outlives the process that started it."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if re.search(f"--comment={token}[ \0]".encode(), path.read_bytes()):
                return True
    return False


class ActiveJob(ValueError):
    """A run has jobs that have not ended: their ids are the second argument."""

    def __str__(self) -> str:
        return str(self.args[0])


@contextlib.contextmanager
def exclusive(folders: Iterable[Path], *, takes_more: bool = False) -> Iterator[FolderLock]:
    """The run folders locked against other submissions, and earlier ones that were interrupted recorded.

    Raises ActiveJob where a run has a job that has not ended, unless it `takes_more`.
    """
    wanted = list(folders)
    with FolderLock(wanted).held(PATIENCE_S) as lock:
        _record_interrupted(wanted)
        for folder, active in _active(wanted).items():
            if active and not takes_more:
                ids, states = [job.id for job in active], ", ".join(job.state for job in active)
                raise ActiveJob(
                    f"run folder={folder}: has job {', '.join(ids)} already ({states}); cancel it first", ids
                )
        yield lock


def submit_script(
    script: Path,
    runs: Mapping[Path, str],
    site: str,
    options: Sequence[str],
    lock: FolderLock,
    home: Path | None = None,
    **facts: Any,
) -> str:
    """Submit a script for run folders that are locked; the id of its job, to which each adds its suffix ("", "_3").

    Their ledgers get a line before sbatch and one after it. The code is frozen in `home` (the script's folder where it
    is not given), and its folder is the script's argument: a job has that from its start, whatever `--export` or a
    site's own sbatch do with the environment, and keeps it in the queue.
    """
    token, home = new_token(), home or script.parent
    text = script.read_text(encoding="utf-8")
    code = frozen_code.freeze(home) if frozen_code.USED_BY in text else None
    common = {"token": token, "site": site, "script": ledger.fingerprint(text), "code": code.name if code else ""}
    common |= facts
    for folder, suffix in runs.items():
        ledger.note(folder, "submitting", "", suffix=suffix, **common)
    require(lock.is_ours, "run folder", next(iter(runs)), "was taken by another process while this one was suspended")
    try:
        job = sbatch(script, *options, token=token, arguments=[str(code)] if code else [])
    except client.SlurmUnreachable:
        raise  # the job may exist: the next submission finds it by the token
    except ValueError as error:
        for folder in runs:
            ledger.note(folder, "not submitted", "", token=token, says=str(error))
        raise
    for folder, suffix in runs.items():
        ledger.note(folder, "submitted", f"{job}{suffix}", **common)
    if code:
        frozen_code.discard_unused(home, code)
    return job


def _record_interrupted(folders: Iterable[Path]) -> None:
    """Record what became of submissions that were killed before they recorded it: their job, or that there is none.

    An sbatch may outlive its submission, and the controller may accept a request that it has received for some seconds
    more. A job that appears even later does not train: attempt.begin knows that its submission was given up.
    """
    left = {folder: found for folder in folders if (found := ledger.open_submissions(folder))}
    jobs = _interrupted([event for found in left.values() for event in found], wait=True)
    for folder, found in left.items():
        for event in found:
            facts = ledger.of_submission(event)
            if job := jobs.get(event["token"]):
                ledger.note(folder, "submitted", f"{job}{event['suffix']}", **facts)
            else:
                ledger.note(folder, "not submitted", "", **facts, says="SLURM has no such job")


def _interrupted(found: Sequence[Mapping[str, Any]], *, wait: bool) -> dict[str, str]:
    """The jobs of submissions whose outcome is not recorded, by token; with `wait`, once there can be no more.

    Raises SlurmError with the command that looks for them where SLURM does not answer, or an sbatch does not end.
    """
    tokens, end = sorted({event["token"] for event in found}), time.monotonic() + SETTLE_S
    look = f"an earlier submission may have been accepted: {look_command(*tokens)}"
    while tokens:
        going = any(map(is_submitting, tokens))  # asked before squeue is
        try:
            jobs = find(tokens)
        except client.SlurmUnreachable as error:
            raise client.SlurmUnreachable(f"{error}; {look}") from None
        is_young = any(ledger.age_s(e) < SETTLE_S for e in found if e["token"] not in jobs)
        if not wait or not (going or (is_young and time.monotonic() < end)):
            return jobs
        if time.monotonic() > end + PATIENCE_S:
            raise client.SlurmError(f"slurm=sbatch: has not ended; {look}")
        time.sleep(0.5)
    return {}


def job_ids(folders: Iterable[Path], *, wait: bool = False) -> dict[Path, list[str]]:
    """Ids of the jobs of each folder, oldest first, with those whose submission was killed before it recorded them."""
    left = {folder: ledger.open_submissions(folder) for folder in map(Path, folders)}
    found = [event for events in left.values() for event in events] if client.is_installed() else []
    jobs = _interrupted(found, wait=wait)
    return {
        folder: [*ledger.job_ids(folder), *(jobs[e["token"]] + e["suffix"] for e in events if e["token"] in jobs)]
        for folder, events in left.items()
    }


def active_jobs(folder: Path) -> list[str]:
    """Ids of the folder's jobs that have not ended: waiting, running, held or suspended."""
    return [job.id for job in _active([Path(folder)])[Path(folder)]]


def _active(folders: Sequence[Path]) -> dict[Path, list[client.JobState]]:
    """The jobs of each folder that have not ended."""
    ids = job_ids(folders)
    known = states_of(ids)
    found = {folder: [known[job] for job in mine if job in known] for folder, mine in ids.items()}
    return {folder: [job for job in mine if not job.has_ended] for folder, mine in found.items()}


def states_of(ids: Mapping[Path, Iterable[str]]) -> dict[str, client.JobState]:
    """The states of all these jobs that are SLURM's."""
    wanted = [job for mine in ids.values() for job in mine if client.JOB_ID.fullmatch(job)]
    return client.states(wanted) if wanted and client.is_installed() else {}
