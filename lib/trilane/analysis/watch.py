"""Watch: logs followed while they grow, with an event whenever something happens in them that matters."""

import errno
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trilane.analysis.measure import Measurement, measure_log
from trilane.analysis.record import record_text
from trilane.logs import endings
from trilane.logs.reading.partial_run import PartialRun
from trilane.logs.reading.reader import Reader, is_binary
from trilane.logs.run import RunLog, finish
from trilane.utils.growing import Growing
from trilane.utils.numbers import amount, duration
from trilane.utils.validation import require
from trilane.workspace.status import Status

QUIET_LOOKS = 3  # without a new line, after which an ending counts
RECENT = 10_000  # iterations at most that are measured and checked at a look
EARLIER = 10  # runs of a file before the one that grows, each with an event
SILENT, SILENT_S = 5.0, 60.0  # times an iteration's seconds without a line, and at least these, are reported
AWAY = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT)  # a shared file system that does not answer for a while
PACKED, WIDE = b"\x1f\x8b", (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a log at `time` (seconds since 1970), in words and as values.

    kind   waiting (no such file yet), replaced (truncated or rotated), away (the file system does not answer), run (a
           new one in the file), iterations, problem (of logs.problems), status (how it seems to have ended),
           silent, end (of a run), error (the log cannot be read)
    """

    time: float
    file: str
    kind: str
    text: str
    values: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The event as one JSON object; null where a number is unknown."""
        at = datetime.fromtimestamp(self.time, UTC).isoformat(timespec="seconds")
        values = {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in self.values.items()}
        return {"time": at, "file": self.file, "event": self.kind, **values}

    def __str__(self) -> str:
        return f"{datetime.fromtimestamp(self.time):%H:%M:%S} {self.file}: {self.text}"


def watch(
    paths: Sequence[Path],
    every: float,
    now: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Event]:
    """The events of the logs, looked at every `every` seconds, until each has ended or cannot be read.

    A run has ended where its log shows an ending and nothing was added for QUIET_LOOKS looks: the first message is
    often not the cause. A log that shows no ending is followed for ever. Polling works on every file system.
    """
    logs = [WatchedLog(path, every) for path in paths]
    while True:
        for log in logs:
            yield from log.look(now())
        logs = [log for log in logs if not log.done]
        if not logs:
            return
        sleep(every)


class WatchedLog:
    """One log: its reader, which keeps its state between two looks, and what was reported of it."""

    def __init__(self, path: Path, every: float) -> None:
        self.done, self._path, self._file, self._every = False, path, Growing(path), every
        self._reader, self._now = Reader(), 0.0
        self._run = self._rows = self._beginnings = 0
        self._status, self._away = Status.RUNNING, ""
        self._known: set[tuple[str, str]] = set()  # problems reported, by rule and column
        self._grew, self._silent, self._seconds = 0.0, SILENT_S, 0.0  # when the log grew; when silence is reported

    def look(self, now: float) -> Iterator[Event]:
        """What happened since the last look."""

        self._now = now
        try:
            if self._read(now):
                yield from self._changes()
            elif not self._grew and self._away != "waiting":
                self._away = "waiting"
                lacks = "holds no line yet" if self._path.exists() else "there is no such file yet"
                yield self._event("waiting", lacks)
            elif self._grew:
                yield from self._silence(now)
        except OSError as error:
            if error.errno in AWAY and self._away != str(error):
                self._away = str(error)
                yield self._event("away", f"cannot be read for now: {error.strerror}", error=str(error))
            elif error.errno not in AWAY:
                yield self._refused(f"log={self._path}: {error.strerror}")
        except ValueError as error:
            yield self._refused(str(error))

    def _event(self, kind: str, text: str, **values: Any) -> Event:
        return Event(time=self._now, file=str(self._path), kind=kind, text=text, values=values)

    def _refused(self, reason: str) -> Event:
        self.done = True
        return self._event("error", reason, error=reason)

    def _read(self, now: float) -> bool:
        """Read what was added; whether there is any."""
        require(self._path.is_file() or not self._path.exists(), "log", self._path, "is not a file")
        grew = False
        for block in self._file.blocks():
            if not grew and not self._grew:
                self._require_text(block)
            grew = True
            self._reader.feed(block)
        if not grew and not self._grew:
            self._require_text(self._file.rest)
        if grew:
            # an old log is quiet from the first look on
            self._grew, self._silent = now if self._grew else min(now, self._path.stat().st_mtime), SILENT_S
        return grew

    def _require_text(self, head: bytes) -> None:
        require(not head.startswith(PACKED), "log", self._path, "is a gzip file, which cannot grow; parse it")
        require(not head.startswith(WIDE), "log", self._path, "is UTF-16, which is only parsed; convert it")
        require(not is_binary(head[: 1 << 16]), "log", self._path, "is a binary file, not a log")

    def _changes(self) -> Iterator[Event]:
        """What the lines just read change."""
        if self._file.beginnings > self._beginnings:
            self._beginnings = self._file.beginnings
            yield self._event("replaced", "was truncated or replaced; it is read from its start")
        runs = self._reader.runs()
        if len(runs) < self._run:  # the last one was delayed output of the one before
            self._run, self._rows = len(runs), runs[-1].rows if runs else 0
        while self._run < len(runs):
            if self._run:
                yield self._ended(runs[self._run - 1])
            self._run = max(self._run + 1, len(runs) - EARLIER)
            self._rows, self._status, self._known = 0, Status.RUNNING, set()
            if self._run > 1:
                yield self._event("run", f"run {self._run} of the file begins", run=self._run)
        if runs:
            yield from self._progress(runs[-1])

    def _progress(self, run: PartialRun) -> Iterator[Event]:
        """The iterations since the last look, and an ending."""
        new, log = run.rows - self._rows, self._snapshot(run, RECENT)
        if new > 0:
            self._rows = run.rows
            interval = measure_log(self._snapshot(run, min(new, RECENT)), None, 0)
            yield self._iterations(run, interval, new, log.status.is_open)
        if {(p.rule, p.column) for p in log.problems} - self._known:
            for problem in finish(run.latest(RECENT), self._path, 0.0).problems:  # which searches for their lines
                if (problem.rule, problem.column) not in self._known:
                    self._known.add((problem.rule, problem.column))
                    yield self._event("problem", f"problem: {problem}", **asdict(problem))
        status = Status.RUNNING if log.status.is_open else log.status
        if status is not self._status:
            self._status = status
            text = "goes on" if status is Status.RUNNING else f"seems to have ended: {status}: {log.evidence}"
            yield self._event("status", text, status=status, evidence=log.evidence)

    def _snapshot(self, run: PartialRun, rows: int) -> RunLog:
        return finish(run.latest(rows), self._path, 0.0, with_lines=False)

    def _iterations(self, run: PartialRun, m: Measurement, new: int, is_open: bool) -> Event:
        table = run.iterations if run.iterations.rows else run.companion
        numbers = table.column("iteration")
        first, last, total = int(numbers[-new]), int(numbers[-1]), table.last("train_iters")
        left = (total - last) * m.sec_per_it if is_open else math.nan
        self._seconds = m.sec_per_it if m.sec_per_it > 0 else self._seconds
        words = (
            f"iteration {last}" if first == last else f"iterations {first} to {last}",
            f" of {total:.0f}" if total == total else "",
            f", {m.sec_per_it:.4g} s/it" if m.sec_per_it == m.sec_per_it else "",
            f", {amount(m.tokens_per_s)} tokens/s" if m.tokens_per_s > 0 else "",
            f", {m.flops_per_s_per_gpu / 1e12:.1f} TFLOP/s/GPU" if m.flops_per_s_per_gpu >= 5e10 else "",
            f", loss {m.last_loss:.4f}" if m.last_loss == m.last_loss else "",
            f", {duration(left)} left" if left > 0 else "",
        )
        values: dict[str, Any] = {"run": self._run, "first_iteration": first, "last_iteration": last, "lines": new}
        values |= {"sec_per_it": m.sec_per_it, "tokens_per_s": m.tokens_per_s, "tflops": m.flops_per_s_per_gpu / 1e12}
        return self._event("iterations", "".join(words), **values, loss=m.last_loss, seconds_left=left)

    def _ended(self, run: PartialRun) -> Event:
        """The end of a run, with its record as `logs parse` has it."""
        record = measure_log(finish(run.latest(run.rows), self._path, math.inf)).to_json()
        return self._event("end", record_text(record).removeprefix(f"{self._path}: "), run=self._run, record=record)

    def _silence(self, now: float) -> Iterator[Event]:
        """The run's ending, where the log has shown one for long enough; else that it is silent."""
        quiet, is_quiet = now - self._grew, now - self._grew >= QUIET_LOOKS * self._every
        # the last line of a program that is gone may have no end, and may be the one that matters
        if is_quiet and self._file.rest and (endings.ending(self._file.rest, 0) or not self._status.is_open):
            self._reader.feed(self._file.close())
            yield from self._changes()
        if is_quiet and not self._status.is_open:
            self.done = True
            yield self._ended(self._reader.runs()[-1])
        elif self._status.is_open and quiet >= max(self._silent, SILENT * self._seconds):
            self._silent = 4 * max(quiet, SILENT_S)
            times = f", {quiet / self._seconds:.0f} times an iteration's" if self._seconds else ""
            yield self._event("silent", f"nothing was added for {duration(quiet)}{times}", seconds=quiet)
