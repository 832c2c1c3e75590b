"""Alerts: what a person should know of a run that nobody watches: died, stalled, not saved, requeued, finished, ...

Each is read from what the run left (its ledger, SLURM's state, the end of its log), so that everybody who looks finds
the same ones, and each has a key by which it is sent once.
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trilane.config.plan import read_plan
from trilane.slurm import ledger
from trilane.slurm.jobs import JobStatus
from trilane.utils.tables import short
from trilane.workspace.checkpoints import FOLDER, iteration_of, latest
from trilane.workspace.status import Status

OLD_S = 86400.0  # events that are older when a watch begins are not alerted
UNSURE_S = 90.0  # until a job has found out whether one of its nodes has died
TEXT = 600  # characters of an alert; a line of a log may have any length
LOOK_BYTES = 1 << 20  # of run.log at a time, which may have gigabytes
NOT_SAVED = "CHECKPOINT NOT SAVED: "  # as the training loop prints it
NAMED = re.compile(r"iter_(\d{7,12})")


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One thing that happened to a run: its kind, the job, a key that no other alert of the run has, and a text."""

    kind: str
    run: str
    job: str
    key: str
    text: str

    def __str__(self) -> str:
        """The alert in one line of limited length."""
        return short(f"{self.run}: {self.kind.upper()}: {self.text}", TEXT)

    def to_json(self) -> dict[str, Any]:
        """The body for a webhook; `text` is what Slack shows, and a log's `<!channel>` or link stays text.

        https://docs.slack.dev/messaging/formatting-message-text: & < > are escaped, and nothing else.
        """
        shown = str(self).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        return {"text": shown, "kind": self.kind, "run": self.run, "job": self.job, "source": "trilane"}


def recorded(folder: Path, unsure_s: float = 0.0) -> list[Alert]:
    """The alerts of the ledger's events of the last day.

    A failed start is none where a spare took a node's place; for `unsure_s` after it, that may still happen.
    """
    events, found, starts = ledger.events(folder), list[Alert](), Counter[str]()
    for place, event in enumerate(events):
        job, age_s = event["id"], ledger.age_s(event)
        starts[job] += event["event"] == "started"
        kind, text, key = _of_event(event, starts[job])
        after = [later["event"] for later in events[place + 1 :] if later["id"] == job]
        if event["event"] == "ended" and kind == "died":
            has_started = "started" in after
            until = after[: after.index("started")] if has_started else after
            kind = "" if "replaced" in until or (not has_started and age_s < unsure_s) else kind
        if kind and age_s < OLD_S:
            found.append(Alert(kind=kind, run=folder.name, job=job, key=f"{kind}:{key}", text=text))
    return found


def _of_event(event: dict[str, Any], starts: int) -> tuple[str, str, str]:
    """Kind, text and key of the alert that an event is, after so many starts of its job; "" for one that is none."""
    job, name, status = event["id"], event["event"], event.get("status")
    if name == "started" and event.get("restarts"):
        where = f"from iteration {event['iteration']} on {event['nodes']}"
        return "requeued", f"job {job} was put back into the queue, and goes on {where}", f"{job}:{event['restarts']}"
    if name == "replaced":
        dead = ", ".join(map(str, event["nodes"]))
        text = f"job {job} lost {dead} after iteration {event['iteration']}, and goes on with a spare node"
        return "replaced", text, f"{job}:{starts}"
    if name == "ended" and status == Status.COMPLETED:
        return "finished", f"job {job}: {event['evidence']}", f"{job}:{starts}"
    if name == "ended" and status in set(Status) and Status(status).has_failed:
        return "died", f"job {job}: {status}: {event['evidence']}", f"{job}:{starts}"
    # "done", or another job trains here: nothing is wrong. Of a chain's jobs each may refuse for the same reason.
    if name == "refused" and not event["says"].startswith(("done", "pruned", "job ", "this job")):
        return "died", f"the training was not started: {event['says']}", short(event["says"], 80)
    return "", "", ""


def of_job(folder: Path, job: JobStatus) -> list[Alert]:
    """The alert that the state of an ended job is: SLURM may have ended it without another line in the ledger."""
    events = ledger.events(folder)
    if not events or ledger.age_s(events[-1]) > OLD_S or not (job.has_failed or job.status is Status.COMPLETED):
        return []
    kind = "died" if job.has_failed else "finished"
    starts = sum(event["event"] == "started" and event["id"] == job.id for event in events)
    text = f"job {job.id}: {job.status}: {job.evidence}"
    return [Alert(kind=kind, run=folder.name, job=job.id, key=f"{kind}:{job.id}:{starts}", text=text)]


class SaveCheck:
    """Finds saves that failed, by the end of run.log and by the age of the newest checkpoint.

    It reads what was added since it last looked, at most LOOK_BYTES of it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._run = folder, read_plan(folder / "plan.json").run
        self._read = 0

    def failed(self, job: str, iteration: int) -> list[Alert]:
        """The alerts of a run that is now at that iteration: the last save that failed, and one that is overdue."""
        newest = latest(self._folder / FOLDER)
        saved = max(iteration_of(newest) if newest else 0, self._run.start_iteration)
        found = {at: text for at, text in [self._overdue(iteration, saved), *self._printed()[-1:]] if at > saved}
        return [
            Alert(kind="checkpoint not saved", run=self._folder.name, job=job, key=f"unsaved:{at}", text=text)
            for at, text in found.items()
        ]

    def _overdue(self, iteration: int, saved: int) -> tuple[int, str]:
        """The iteration whose checkpoint should be there, and why; 0 where none is missing.

        A save ends before the next one begins, so that at `iteration` only the last one that was due may be missing.
        """
        every = self._run.save_interval
        due = (iteration // every - 1) * every if every else 0
        return due, f"iteration {iteration}, and the newest checkpoint is of iteration {saved}; every {every} are due"

    def _printed(self) -> list[tuple[int, str]]:
        """The failed saves in what the log has got since: iteration and line."""
        path = self._folder / "run.log"
        if not path.is_file():
            return []
        with path.open("rb") as file:
            size = file.seek(0, 2)
            start = max(self._read if self._read <= size else 0, size - LOOK_BYTES)
            file.seek(start)
            data = file.read(LOOK_BYTES)
        whole = data.rfind(b"\n") + 1  # a line that is being written is read when it is whole, or too long
        self._read = start + (whole or len(data) // LOOK_BYTES * LOOK_BYTES)
        lines = (line.partition(NOT_SAVED)[2] for line in data[:whole].decode("utf-8", "replace").split("\n"))
        return [(int(named[1]), line[: 4 * TEXT]) for line in lines if (named := NAMED.search(line))]
