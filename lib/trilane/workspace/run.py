"""Run: a run folder, read once and handed on; its files written atomically, or moved aside for the
next attempt.

A file `save` makes the run save once, and is removed by it; a file `stop` makes it save and end,
and no later run starts there until it is removed.
"""

from functools import cached_property
from pathlib import Path
from typing import Any

from trilane.config.plan import Plan, plan_from_json, read_plan_values
from trilane.config.training import Run as Limits
from trilane.utils.files import (
    free_bytes,
    json_object,
    numbered,
    read_text,
    replace_text,
    set_aside,
)
from trilane.utils.tables import Json, one_line
from trilane.utils.validation import from_mapping
from trilane.workspace import ledger
from trilane.workspace.checkpoints import FOLDER, latest
from trilane.workspace.ledger import Event
from trilane.workspace.status import RunStatus, Status, known_status

# a line about the first value of the run that was NaN or Inf, and one about why it cannot save
NOT_FINITE = "ranks/not-finite.txt"
NOT_SAVED = "ranks/not-saved.txt"


class Run:
    """A run folder: its plan, status, ledger, progress and newest checkpoint, each read once, when
    it is first asked for.

        Run(Path("outputs/demo/runs/1b3")).plan.run.goal
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def renew(self) -> None:
        """Read all but the plan again: other processes may have written since."""
        for name in ("status", "iteration", "newest", "_ledger"):
            vars(self).pop(name, None)

    @cached_property
    def values(self) -> Json:
        """The JSON object of plan.json; ValueError where it cannot be read."""
        return read_plan_values(self.folder / "plan.json")

    @cached_property
    def plan(self) -> Plan:
        """The plan; ValueError where it is missing, malformed or impossible."""
        return plan_from_json(self.values)

    @cached_property
    def goal(self) -> int:
        """The iteration after which nothing is left to do, read without the rest of the plan, of
        which a status of many runs would take most of its time.
        """
        names = ("train_iters", "exit_iteration")
        given = self.values.get("run", {})
        if isinstance(given, dict):
            given = {name: given[name] for name in names if name in given}
        return from_mapping(Limits, given, "plan.run").goal

    @cached_property
    def status(self) -> RunStatus | None:
        """How the run ended, by status.json; None where that is missing or damaged."""
        return known_status(self.folder)

    @cached_property
    def iteration(self) -> int:
        """The last iteration in steps.jsonl."""
        return iteration(self.folder)

    @cached_property
    def newest(self) -> Path | None:
        """The newest complete checkpoint; None without one."""
        return latest(self.folder / FOLDER)

    @property
    def is_completed(self) -> bool:
        """Whether the run has completed; not where its plan was extended since."""
        if self.status is None or self.status.status is not Status.COMPLETED:
            return False
        try:
            return not 0 < self.iteration < self.goal
        except (ValueError, OSError):
            return True

    @cached_property
    def _ledger(self) -> list[Event]:
        return ledger.events(self.folder)

    def events(self, *kinds: str) -> list[Event]:
        """The events of its jobs in order, those of `kinds` where given; ValueError for a damaged
        ledger.
        """
        return [event for event in self._ledger if not kinds or event["event"] in kinds]

    def job_ids(self, kind: str = "submitted") -> list[str]:
        """Ids of its jobs with such an event, oldest first."""
        return list(dict.fromkeys(event["id"] for event in self.events(kind)))

    def unended(self) -> list[Event]:
        """The starts of jobs of this folder that have recorded no end since, or that go on after
        it.
        """
        starts: list[Event] = []
        for event in self.events("started", "ended", "response", "elsewhere"):
            if event["event"] in ("ended", "elsewhere"):
                starts = [start for start in starts if start["id"] != event["id"]]
            elif event["event"] == "started" or event["again"]:
                starts.append(event)
        return starts

    def note(self, event: str, job: str, **facts: Any) -> None:
        """Append one event of a job to the ledger."""
        self._ledger.append(ledger.note(self.folder, event, job, **facts))


def alarm(folder: Path, name: str) -> str:
    """What the run says in the file NOT_FINITE or NOT_SAVED, in one line; "" where nothing is
    wrong.
    """
    return one_line(read_text(folder / name, 2000))


def free_space(folder: Path, needed: int) -> str:
    """What is free on the disk of a run, and what its next save needs."""
    return f"{free_bytes(folder) / 1e9:.3g} GB free, the next save needs {needed / 1e9:.3g} GB"


def iteration(folder: Path) -> int:
    """The last iteration in steps.jsonl; 0 where there is none. Damaged lines do not count."""
    path = folder / "steps.jsonl"
    # else all of it: a crash may leave many NULs at the end
    for last_bytes in (1 << 14, 0):
        for line in reversed(read_text(path, last_bytes).split("\n")):
            if number := _iteration(line):
                return number
    return 0


def cut_steps(folder: Path, done: int) -> None:
    """Keep the first `done` iterations in steps.jsonl and validation.jsonl; the others will be
    trained again.

    What is removed, also a line that a killed run left half-written, goes to earlier/NAME.1, .2,
    ...
    """
    for path in (folder / "steps.jsonl", folder / "validation.jsonl"):
        text = path.read_bytes() if path.exists() else b""
        lines = (line.strip("\0") for line in text.decode("utf-8", "replace").split("\n"))
        kept = "".join(f"{line}\n" for line in lines if 0 < _iteration(line) <= done)
        if kept.encode() != text:
            set_aside(path)
            replace_text(path, kept)


def _iteration(line: str) -> int:
    """The iteration of a line of either file; 0 for a damaged line."""
    number = (json_object(line) or {}).get("iteration")
    if type(number) is int and 0 < number < 1 << 40:
        return number
    return 0


def put_aside(folder: Path, keep: bool) -> None:
    """Move what the earlier attempt left to attempts/N; only its status and ranks where the run
    continues (`keep`).
    """
    names = ["status.json", "ranks"]
    if not keep:
        names += ["run.log", "steps.jsonl", "validation.jsonl", "env.json"]
    left = [folder / name for name in names if (folder / name).exists()]
    if left:
        target = numbered(folder / "attempts", "", Path.mkdir)
        for path in left:
            path.rename(target / path.name)


def write_text(path: Path, text: str) -> Path:
    """Replace `path` by `text`; a different earlier version is kept as `earlier/NAME.1`, `.2`, ...
    beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and path.read_bytes() != text.encode():
        set_aside(path)
    return replace_text(path, text)


def is_started(folder: Path) -> bool:
    """Whether a run was ever started in the folder."""
    return any((folder / name).exists() for name in ("run.log", "steps.jsonl", "status.json"))
