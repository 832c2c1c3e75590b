"""Problem: what cannot be right in the numbers of a run, or is not known, with the line that shows it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path

import numpy as np

from trilane.logs import endings
from trilane.logs.clock import SKEW_S
from trilane.logs.dialects import candidates
from trilane.logs.digest import LINES, Finding
from trilane.logs.reading.line_clock import DAY_S
from trilane.logs.reading.partial_run import PartialRun
from trilane.logs.reading.reader import find_lines
from trilane.logs.table import NAN, NumericTable

MOST_NUMBER = 1e15  # of an iteration; a larger one is damaged
SEARCHED = 1 << 18  # bytes at the beginning of a file in which lines are searched that were not read
FRAGMENT = 2  # iterations at most of lines that are no run; those of a failed launch have its arguments or ending


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What cannot be right in a column, or cannot be known: `rule` by its short name, `line` its number in the file
    (None: unknown), `evidence` that line's text."""

    rule: str
    column: str
    message: str
    line: int | None = None
    evidence: str = ""

    def __str__(self) -> str:
        where = f" (line {self.line})" if self.line is not None else ""
        return f"{self.column}: {self.message}{where}"


def problems(
    found: Collection[Finding], table: NumericTable, run: PartialRun, path: Path | None
) -> tuple[Problem, ...]:
    """The problems with their lines: the last iteration's, or one that is searched for in the file `path`, where that
    is given, between the lines of the first and last iteration.
    """
    numbers = table.column("iteration") if found else np.empty(0)
    rows = {f.row for f in found if 0 <= f.row < len(numbers) - 1 and abs(numbers[f.row]) < MOST_NUMBER}
    wanted, ends = {int(numbers[row]) for row in rows}, (run.first_number, run.last_number)
    lines = find_lines(path, wanted, *ends) if path and rows else {}
    last = run.last_number or None, endings.text(run.last_line)
    made = []
    for f in found:
        line, text = last if f.row not in rows else lines.get(int(numbers[f.row]), (None, ""))
        made.append(Problem(rule=f.rule, column=f.column, message=f.message, line=line, evidence=text))
    return tuple(made)


def of_file(runs: Sequence[PartialRun], path: Path) -> list[tuple[Problem, ...]]:
    """The problems of each of a file's runs that only the whole file shows."""
    mixed = _fragments(runs)
    rules = (mixed if any(mixed) else _strays(runs, path), _unread(runs, path), _earlier(runs), _epochs(runs))
    return [tuple(chain(*found)) for found in zip(*rules, strict=True)]


def _fragments(runs: Sequence[PartialRun]) -> list[tuple[Problem, ...]]:
    """A problem for each of the runs of a file that is a fragment, with neither a launch nor an end."""
    odd = [
        0 < run.rows <= FRAGMENT and not (run.launched or run.arguments or run.endings or run.summary) for run in runs
    ]
    text = "the numbers of the file's lines jump back and forth: those of several programs or ranks are mixed"
    problem = Problem(rule="jumps-back", column="iteration", message=text)
    return [(problem,) if one and sum(odd) >= LINES else () for one in odd]


def _strays(runs: Sequence[PartialRun], path: Path) -> list[tuple[Problem, ...]]:
    """A problem for two runs that are one but for a number: the last of the first leaps ahead and the second goes on
    from the number before it, the first of the second falls back and the number after it goes on, or the first run is
    one line with other columns than the second."""
    found: list[tuple[Problem, ...]] = [() for _ in runs]
    for at, (old, new) in enumerate(pairwise(runs), 1):
        if new.launched or old.endings or "iteration" not in old.iterations or "iteration" not in new.iterations:
            continue
        last, first = old.iterations.last("iteration"), new.iterations.at("iteration", 0)
        leaps = old.rows > 1 and old.iterations.at("iteration", -2) < first < last
        falls = new.rows > 1 and first < last < new.iterations.at("iteration", 1)
        other = old.rows == 1 and first < last and old.iterations.names != new.iterations.names
        if leaps or falls or other:
            text = f"{first if falls else last:.0f} stands alone between the numbers of one run: another line's?"
            line, shown = old.last_number, endings.text(old.last_line)
            if falls:
                line = new.first_number
                shown = find_lines(path, {int(first)}, line, line).get(int(first), (line, ""))[1]
            problem = Problem(rule="jumps-back", column="iteration", message=text, line=line or None, evidence=shown)
            found[at - 1], found[at] = (*found[at - 1], problem), (*found[at], problem)
    return found


def _earlier(runs: Sequence[PartialRun]) -> list[tuple[Problem, ...]]:
    """A problem for each run that begins, by its time stamps, before the end of the run before it in the file."""
    ends = [[stamp for _, stamp in run.clock if stamp > DAY_S] or [NAN] for run in runs]
    text = "begin before the end of the run before it in the file: the same run twice, or several files in one?"
    found: list[tuple[Problem, ...]] = [() for _ in runs]
    for at in (at for at in range(1, len(runs)) if ends[at][0] < ends[at - 1][-1] - SKEW_S):
        message = f"the lines' time stamps {text}"
        found[at] = (Problem(rule="clock", column="time_s", message=message, line=runs[at].first_number or None),)
    return found


def _epochs(runs: Sequence[PartialRun]) -> list[tuple[Problem, ...]]:
    """A problem for each run that follows one of its dialect in the next epoch, and has no launch of its own."""
    found: list[tuple[Problem, ...]] = [() for _ in runs]
    for at, (old, new) in enumerate(pairwise(runs), 1):
        known = old.rows and new.rows and "epoch" in old.iterations and "epoch" in new.iterations
        same = set(old.dialects) == set(new.dialects) and not new.launched
        if known and same and new.iterations.at("epoch", 0) == old.iterations.last("epoch") + 1:
            text = "its numbers begin anew with an epoch: of one run, whose epochs' length the log does not give?"
            line = new.first_number or None
            found[at] = (Problem(rule="epochs", column="iteration", message=text, line=line),)
    return found


def _unread(runs: Sequence[PartialRun], path: Path) -> list[tuple[Problem, ...]]:
    """A problem for the run in whose lines, at the beginning of the file, some look like iterations, with a loss and a
    number that rises, and were not read: another trainer's, or most of the run's."""
    found: list[tuple[Problem, ...]] = [() for _ in runs]
    for form in candidates.forms(path, SEARCHED):
        at = max((i for i, run in enumerate(runs) if i == 0 or 0 < run.first_number <= form.number), default=0)
        if form.is_sure and _is_apart(form, runs):
            text = f"{form.lines} lines or more look like iterations and were not read"
            line = endings.text(form.text)
            found[at] = (Problem(rule="unread", column="iteration", message=text, line=form.number, evidence=line),)
    return found


def _is_apart(form: candidates.Form, runs: Sequence[PartialRun]) -> bool:
    """Whether the lines are no report of the iterations that were read: they are more than twice as many, stand before
    or behind all of these, or have other numbers."""
    read = [run for run in runs if run.rows and run.first_number]
    if not read or form.rises[form.place or 0] > 2 * sum(run.rows for run in runs):
        return form.rises[form.place or 0] > LINES
    tables = [run.iterations if run.iterations.rows else run.companion for run in read]
    first, last = form.iterations
    outside = form.last < read[0].first_number or form.number > read[-1].last_number
    others = all(last < table.at("iteration", 0) or first > table.last("iteration") for table in tables)
    return form.is_named and (outside or others)
