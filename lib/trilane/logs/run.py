"""RunLog: the content of one training run's log, or of a run folder, and how the run ended."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path

import numpy as np

from trilane.logs import checks, endings
from trilane.logs.arguments import Value
from trilane.logs.dialects import dialects
from trilane.logs.endings import Ending, Level
from trilane.logs.places import Place, excluded, place_of
from trilane.logs.reading.lines import lines
from trilane.logs.reading.reader import Reader
from trilane.logs.reading.runs import PartialRun
from trilane.logs.reading.trainer_dicts import number_iterations
from trilane.logs.table import NumericTable
from trilane.logs.trackers import event_lines
from trilane.utils.frozen import frozen
from trilane.utils.tables import DataFrame, Table, show
from trilane.utils.validation import shipped_json, shown
from trilane.workspace.status import Status, known_status

INTEGERS = shipped_json("log_words")["integers"]  # columns of whole numbers
UNREAD = "holds no iteration line (docs/guides/my-logs.md has how to read another trainer's)"
LABELS = shipped_json("log_words")["labels"]  # columns, and how names of their numbers look
SHOWN = 10  # iterations that a notebook shows of a log


@frozen
class RunLog(Table):
    """One run, in seconds, bytes and FLOP/s. It shows its last iterations.

    iterations   a row per iteration line: iteration, consumed_samples, sec_per_it, lm_loss,
                 grad_norm, ...; NaN where one is missing (a skipped iteration has no loss)
    validation   a row per evaluation: iteration, lm_loss
    memory       the most bytes that any rank reported: allocated, max_allocated, reserved,
                 max_reserved
    timers       a row per iteration: iteration, and each timer of the framework
    totals       numbers printed once, such as train_runtime
    status       how it ended; `evidence` is the line that proves it, `rank` the rank that printed
                 it (None if unknown), `hosts` those of the line or of its rank, and `exclude` the
                 nodes at fault, as SLURM's --exclude takes them
    endings      all lines about an end, in their order
    collectives  by the ranks' NCCL watchdogs: the ranks of each process group that timed out, and
                 what each reports
    notes        what a run of trilane prints of itself: SLOW, NOT FINITE, CHECKPOINT NOT SAVED; and
                 a memory, rate or time of the last iteration's line that no column has
    problems     numbers that cannot be right, or that nothing shows to be right
    resumes      of a run folder: for each time that the run was resumed the first iteration after
                 it, and the rows that it trained again, as they were before
    """

    source: Path
    iterations: DataFrame = field(default_factory=NumericTable().frame)
    validation: DataFrame = field(default_factory=NumericTable().frame)
    memory: Mapping[str, float] = field(default_factory=dict)
    status: Status
    evidence: str
    dialect: str = ""
    arguments: Mapping[str, Value] = field(default_factory=dict)
    timers: DataFrame = field(default_factory=NumericTable().frame)
    totals: Mapping[str, float] = field(default_factory=dict)
    rank: int | None = None
    hosts: tuple[str, ...] = ()
    exclude: str = ""
    endings: tuple[Ending, ...] = ()
    collectives: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[checks.Problem, ...] = ()
    resumes: tuple[tuple[int, DataFrame], ...] = ()

    def summary(self) -> str:
        """Where it is, how many iterations it has, and how it ended."""
        return f"{self.source}, {len(self.iterations)} iterations, {self.status}"

    @property
    def first_iteration(self) -> int | None:
        """The number of the first iteration, as the log counts; None without one."""
        return self._iteration(0)

    @property
    def last_iteration(self) -> int | None:
        """The number of the last iteration, as the log counts; None without one."""
        return self._iteration(-1)

    def _iteration(self, place: int) -> int | None:
        if self.iterations.empty:
            return None
        number = float(self.iterations["iteration"].iloc[place])
        if abs(number) < checks.MOST_NUMBER:
            return int(number)
        return None

    def column(self, name: str) -> np.ndarray:
        """A column of the iterations, (iterations,); empty where the log does not have it."""
        if name in self.iterations:
            return self.iterations[name].to_numpy(float)
        return np.empty(0)

    def to_frame(self) -> DataFrame:
        """The iterations: a row each, columns as above."""
        return self.iterations

    def _repr_html_(self) -> str:
        return show(self.iterations.tail(SHOWN))


def read_logs(path: Path | str) -> list[RunLog]:
    """The runs in the log file `path`, in order; usually one. A file that is being written is read
    as far as it goes.

    Raises ValueError if the file is missing, empty or binary, or holds neither an iteration nor an
    ending.
    """
    path = Path(path)
    source = event_lines if "tfevents" in path.name else lines
    runs = Reader().read(source(path))
    if not runs:
        raise ValueError(f"log={shown(path)}: {UNREAD}")
    return [_finish(run, path) for run in runs]


def read_log(path: Path | str) -> RunLog:
    """The run in the log file `path`, the last if there are several; raises ValueError as read_logs
    does.
    """
    return read_logs(path)[-1]


def _finish(run: PartialRun, path: Path) -> RunLog:
    """The RunLog of a run in `path`."""
    import pandas as pd

    number_iterations(run)
    counted = {name for name, rows in run.dialects.items() if rows} or {*run.dialects}
    programs = {
        dialect.name: dialect.variant(run.last_line)
        for dialect in dialects()
        if dialect.name in counted
    }
    end = _end(run)
    iterations = run.iterations.arrays(INTEGERS)
    # what its arguments and its last iteration show of the ranks' places
    world = run.arguments.get("world_size")
    run.places.world = world if isinstance(world, int) else 0
    run.places.has_launchers |= b"[default" in run.last_line[:40]
    run.places.see(place_of(run.last_line), run.last_line)
    place = run.places.resolve(end.place)
    hosts = end.hosts or tuple(filter(None, [place.node]))
    return RunLog(
        source=path,
        iterations=pd.DataFrame(iterations, copy=False),
        validation=run.validation.frame(("iteration",)),
        memory=run.memory,
        status=end.status,
        evidence=end.evidence,
        dialect=run.program
        or " + ".join(sorted(programs.get(name, name) for name in counted))
        or "unknown",
        arguments=run.arguments,
        timers=run.timers.frame(("iteration",)),
        totals=run.summary,
        rank=place.rank,
        hosts=hosts,
        exclude=excluded(hosts) if end.blames_node else "",
        endings=tuple(run.endings),
        collectives=tuple(run.watchdogs.lines(run.places.world)) if end.status.has_failed else (),
        notes=tuple(dict.fromkeys([*run.own, *_unread(run.last_line, {*iterations, *run.memory})])),
        problems=tuple(checks.problems(iterations)),
    )


def _unread(line: bytes, columns: set[str]) -> Iterator[str]:
    """Names in the line of a memory, a rate or a time where none of its columns was read."""
    for of_kind, pattern in LABELS:
        if columns.isdisjoint(of_kind):
            label = re.search(pattern.encode(), line)
            if label:
                yield f"not read: {endings.text(label[0])}"


def _end(run: PartialRun) -> Ending:
    """The ending that decides, else what the last iteration shows."""
    done = run.iterations.last("iteration") + 1 - run.first_iteration
    is_done = done == run.iterations.last("train_iters")
    ends = run.endings
    if is_done:  # a run that the scheduler ended and that reached its last iteration was continued
        ends = [end for end in ends if end.level > Level.SCHEDULER or end.rows >= run.rows]
    end = endings.strongest(ends, run.rows)
    if end and end.level < Level.PLANNED:
        return end
    last = Ending(
        level=Level.PLANNED,
        status=Status.UNFINISHED,
        evidence=endings.text(run.last_line),
        rows=run.rows,
        place=Place(),
        hosts=(),
    )
    if run.is_nan:
        return replace(last, status=Status.NAN_LOSS)
    is_planned = end and end.level == Level.PLANNED
    if not is_planned and ("train_runtime" in run.summary or is_done):
        return replace(last, status=Status.COMPLETED)
    return end or last


def read_run_folder(folder: Path | str) -> RunLog:
    """The run of a run folder: its run.log, with status and evidence of status.json if there is
    one.

    Of an iteration that was trained again after a resume, the last result counts: the run continued
    from it. A run that ended before its first iteration has empty tables.
    """
    folder = Path(folder)
    path = folder / "run.log"
    try:
        log = _joined(read_logs(path))
    except ValueError as error:
        log = RunLog(source=path, status=Status.UNFINISHED, evidence=str(error))
    if written := known_status(folder):
        return replace(log, status=written.status, evidence=written.evidence)
    return log


def _joined(parts: list[RunLog]) -> RunLog:
    """The last part of a resumed run, with the iterations and timers of earlier parts up to where
    each was resumed.
    """
    whole = parts[0]
    for part in parts[1:]:
        resumes = whole.resumes
        if len(part.iterations) and len(whole.iterations):
            first = int(part.iterations["iteration"].iloc[0])
            again = whole.iterations[whole.iterations["iteration"] >= first]
            resumes = (*resumes, (first, again))
        whole = replace(
            part,
            iterations=continued(whole.iterations, part, "iterations"),
            timers=continued(whole.timers, part, "timers"),
            validation=continued(whole.validation, part, "validation"),
            resumes=resumes,
            problems=tuple(dict.fromkeys((*whole.problems, *part.problems))),
            notes=(*whole.notes, *part.notes),
        )
    return whole


def continued(before: DataFrame, log: RunLog, name: str) -> DataFrame:
    """The rows of earlier logs before the first iteration of `log`, and its own, of its table of
    that name.
    """
    import pandas as pd

    if len(before) and len(log.iterations):
        before = before[before["iteration"] < log.iterations["iteration"].iloc[0]]
    parts = [part for part in (before, getattr(log, name)) if len(part)]
    if parts:
        return pd.concat(parts, ignore_index=True)
    return before
