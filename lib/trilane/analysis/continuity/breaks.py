"""Continuity: what the restarts of a training did not continue, by its logs alone, and what the logs do not show."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trilane.analysis.continuity.causes import WORDS, Break, Line
from trilane.analysis.continuity.levels import LEAST_LINES, levels
from trilane.analysis.continuity.sides import Sides, derived, restarts, with_columns
from trilane.analysis.continuity.state import exact
from trilane.analysis.loss_curve import agree
from trilane.config.plan import read_plan
from trilane.logs.reading.reader import find_lines
from trilane.logs.run import RunLog
from trilane.logs.run_folder import read_run_folder
from trilane.utils.tables import DataFrame, Table, Text, one_line, short
from trilane.workspace.study import Study

JUDGED = (
    *("learning_rate", "consumed_samples", "global_batch_size", "loss_scale", "seq_length"),
    *("lm_loss", "grad_norm", "sec_per_it"),
)
KEEP = (
    *JUDGED,
    "consumed_tokens",
    "train_iters",
    "skipped",
    "samples_per_second",
    "tokens_per_second",
)  # columns of a log that are read for it
TRAINED = 0.25  # of the fall of the loss in a training: a log that begins within it above the end has its weights
EARLIER = 8  # trainings among which one is searched that another continues under numbers that begin again
SHOWN = 160  # characters of a line


@dataclass(frozen=True, kw_only=True)
class Continuity(Table):
    """The restarts of one training: `breaks`, what they did not continue; `unjudged`, what the logs do not show."""

    restarts: int
    breaks: tuple[Break, ...]
    unjudged: tuple[str, ...]

    def to_frame(self) -> DataFrame:
        """A row per break: both lines, the expected value and the likely cause."""
        import pandas as pd

        rows = [
            (b.restart, WORDS[b.quantity], str(b.before), str(b.after), f"{b.expected:.5g}", b.likely)
            for b in self.breaks
        ]
        return pd.DataFrame(rows, columns=["restart", "quantity", "before", "after", "expected", "likely cause"])

    def _repr_html_(self) -> str:
        return super()._repr_html_() if self.breaks else ""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {"breaks": [found.to_json() for found in self.breaks], "unjudged": list(self.unjudged)}

    def lines(self) -> list[str]:
        """A line for each break, the two lines of the logs below it, and one for what could not be judged."""
        found = list[str]()
        for b in self.breaks:
            found.append(one_line(f"restart at iteration {b.restart}: {b.sentence}"))
            shown = (line for line in (b.before, b.after) if line.number)
            found += [one_line(f"  {line.log}:{line.number}: {line.text}") for line in shown]
        return found + [f"not judged: {what}" for what in self.unjudged]

    def summary(self) -> Text:
        """How many restarts were judged and what was found, and what could not be judged, as Markdown."""
        if not self.restarts:
            return Text("No run was restarted.")
        counts = Text.of("**{}** restarts, **{}** breaks in what the logs print.", self.restarts, len(self.breaks))
        return Text.of("{}{}", counts, Text.joined("\n- not judged: ", ["\n", *self.unjudged]) if self.unjudged else "")


def find_breaks(logs: Sequence[RunLog], earlier: Sequence[RunLog] = ()) -> Continuity:
    """What the restarts of one training did not continue; its logs in the order in which they ran.

    Judged are learning rate, consumed samples, batch size, loss scale, sequence length, loss, gradient norm, speed and
    iteration numbers, as far as both sides print them. `earlier` are logs of trainings before it, which its first log
    may continue under iteration numbers that begin again. Left out: what changes without a restart (see find_spikes), a
    schedule that bends right at the restart, and planned changes of what only one side prints.
    """
    found, unjudged, number = list[Break](), dict[str, None](), 0
    if logs and (again := next(filter(None, (_begun_again(log, logs[0]) for log in reversed(earlier))), None)):
        found.append(_shown(again[0], again[1]))
    for sides in restarts(logs):
        number += 1
        found += [_shown(one, sides) for one in (*exact(sides), *levels(sides))]
        unjudged |= dict.fromkeys(_unjudged(sides))
    return Continuity(restarts=number, breaks=tuple(found), unjudged=tuple(unjudged))


def breaks_of(groups: Sequence[Sequence[RunLog]]) -> list[Continuity]:
    """The breaks of each of several trainings; each may continue one of the EARLIER before it under numbers that begin
    again."""
    ends = [group[-1] for group in groups]
    return [find_breaks(group, ends[max(0, n - EARLIER) : n]) for n, group in enumerate(groups)]


def study_breaks(study: Study) -> Continuity:
    """What the restarts of a study's runs did not continue: those inside each run folder, and those of a run that
    starts from a checkpoint of another one (run.load).
    """
    folders = study.run_folders()
    logs = {folder.resolve(): read_run_folder(folder) for folder in folders}
    every = list[Continuity]()
    for folder, log in logs.items():
        load = read_plan(folder / "plan.json").run.load
        source = next(
            (logs[place] for place in [Path(load).resolve(), *Path(load).resolve().parents] if place in logs), None
        )
        every.append(find_breaks([log] if not load or source in (None, log) else [replace(source, resumes=()), log]))
    return joined(every)


def joined(every: Iterable[Continuity]) -> Continuity:
    """What was found in several trainings, as one."""
    every = list(every)
    breaks = tuple(b for one in every for b in one.breaks)
    unjudged = tuple(dict.fromkeys(what for one in every for what in one.unjudged))
    return Continuity(restarts=sum(one.restarts for one in every), breaks=breaks, unjudged=unjudged)


def _unjudged(sides: Sides) -> Iterator[str]:
    missing = [WORDS[name] for name in JUDGED if not sides.both(name)]
    where = f"restart at iteration {sides.first:.0f}"
    if missing:
        yield f"{', '.join(missing)} (not printed on both sides of the {where})"
    if len(sides.before("lm_loss")[0]) < LEAST_LINES or len(sides.after("lm_loss")[0]) < 3:
        yield f"loss, gradient norm, speed (too few lines at the {where})"
    at = sides.before("iteration")[0]
    before = at[at < sides.first]
    if len(before) and sides.first - before[-1] > max(sides.every, sides.old_every):
        yield f"iterations {before[-1] + 1:.0f} to {sides.first - 1:.0f} (in no log)"


def _shown(found: Break, sides: Sides) -> Break:
    """The break with number and text of its lines, where the files show them once."""
    old, new = sides.old_log.source, sides.new_log.source
    once = old != new or found.after.iteration > float(sides.old["iteration"].iloc[-1])
    before = _numbered(found.before, old)
    return replace(found, before=before, after=_numbered(found.after, new) if once else found.after)


def _numbered(line: Line, path: Any) -> Line:
    try:
        number, text = find_lines(path, {line.iteration}).get(line.iteration, (None, ""))
    except (OSError, ValueError):  # the file is gone, or the log was never in one
        return line
    return replace(line, number=number, text=short(text.strip(), SHOWN))


def _begun_again(old: RunLog, new: RunLog) -> tuple[Break, Sides] | None:
    """Whether a log whose iterations begin again goes on with what another one trained: by its consumed samples, or by
    a loss that begins near the end of the other's while the learning rate starts anew.
    """
    lengths = [with_columns(log).get("train_iters") for log in (old, new)]
    if not agree(old, new) or lengths[0] != lengths[1] or not len(old.iterations):
        return None
    sides = Sides(old=derived(old, old.iterations), new=derived(new, new.iterations), old_log=old, new_log=new)
    if (
        not len(sides.old)
        or not len(sides.new)
        or sides.first > sides.every
        or float(sides.old["iteration"].iloc[-1]) < LEAST_LINES * sides.every
    ):
        return None
    expected = float(sides.old["iteration"].iloc[-1]) + sides.every
    ends = replace(sides, start=expected)
    (_, before), (_, after) = sides.before("consumed_samples"), sides.after("consumed_samples")
    if len(before) and len(after) and before[0] < after[0] - before[0] and after[0] <= 1.1 * before[-1] + before[0]:
        batch = sides.after("global_batch_size")[1]
        if len(batch) and after[0] > 2 * batch[0] * sides.every:
            return ends.found("iteration", "iterations-restarted", 0, expected), sides
    (at, x), (_, y), rates = sides.before("lm_loss"), sides.after("lm_loss"), sides.both("learning_rate")
    if len(x) < LEAST_LINES or len(y) < 3 or at[0] > 2 * sides.old_every or not rates or lengths[0] is None:
        return None
    end = float(np.median(x[-5:]))
    trained = x[0] - end > 0.15 * x[0] and float(np.median(y[:3])) < end + TRAINED * (x[0] - end)
    (_, rate), (_, new_rate) = sides.before("learning_rate"), sides.after("learning_rate")
    anew = not 0.5 < new_rate[0] / max(rate[-1], 1e-30) < 2
    return (ends.found("iteration", "weights-only", 0, expected), sides) if trained and anew else None
