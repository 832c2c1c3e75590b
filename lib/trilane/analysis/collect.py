"""Runs of paths, measured; MeasuredRuns: those of a study or of any files of logs; runs as rows and
lines, of `trilane logs table` and `logs parse`.
"""

import html
import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any

import pandas as pd

from trilane.analysis.loss_curve import Curve, join, trainings
from trilane.analysis.measure import Measurement, measure, measure_log
from trilane.analysis.spikes import training_record, training_text
from trilane.config.cluster import Cluster, Gpu
from trilane.costmodel.recalibration import Recalibration
from trilane.logs.dialects import use
from trilane.logs.run import read_logs
from trilane.utils.frozen import frozen
from trilane.utils.numbers import size_text
from trilane.utils.tables import (
    DataFrame,
    Html,
    Table,
    Text,
    displayed,
    middle,
    one_line,
    short,
    show,
)
from trilane.utils.validation import require, shipped_json
from trilane.workspace.study import Study, load_cluster

DRAWN = 8  # runs of hundreds that a figure has
# what a file's name shows to be no log
NO_LOGS = shipped_json("log_words")["no_logs"]
ENDINGS = "source dialect status iterations first_iteration last_iteration skipped nan_iterations"
ENDINGS += " hosts exclude cause problems left_out"
# the columns of BigScience's tables, and how a run ended
HEADS = shipped_json("table_heads")
# what `logs parse` prints of a run
PARSED = "iterations first_iteration last_iteration sec_per_it tflops memory_gib loss hosts exclude"


@frozen
class MeasuredRuns(Table):
    """The runs, each with its own name, also those without an iteration; and why other files were
    not read.

    They are in the order in which they ran, as far as their paths show it.
    """

    shown = "run gpus parameters tp pp dp mbs gbs sec_per_it tflops mfu tokens_per_s memory_gib"
    shown += " lost loss status"
    runs: tuple[Measurement, ...]
    unread: tuple[str, ...] = ()

    @property
    def timed(self) -> list[Measurement]:
        """The runs that printed iterations with their time."""
        return [run for run in self.runs if run.iterations]

    @property
    def drawn(self) -> list[Measurement]:
        """The first of the timed runs, as many as a figure can show."""
        return self.timed[:DRAWN]

    def summary(self, found: Recalibration | None = None) -> Text:
        """How the runs ended; how wrong their predictions were, by the recalibration `found`; how
        many files were not read.
        """
        statuses = Counter(str(run.status) for run in self.runs)
        counts = [f"{n} of {len(self.runs)} runs {status}" for status, n in statuses.items()]
        summary = Text.of("**{}.**", ", ".join(counts))
        if found:
            summary = Text.of("{} {}", summary, found.headline)
        if self.unread:
            words = "{} {} files were not read, the first: {}"
            summary = Text.of(words, summary, len(self.unread), short(self.unread[0], 120))
        return summary

    def to_frame(self) -> DataFrame:
        """A row a run, with a column for each number, in base units where the name has none, and
        what the log shows of its end.
        """
        return frame(self.runs)

    def endings(self) -> Html:
        """How each run ended, failed ones first: the line that proves it, nodes at fault, wrong
        numbers.
        """
        runs = sorted(self.runs, key=lambda run: not run.status.has_failed)
        return show(displayed(frame(runs[: self.most]), ENDINGS))

    def curves(self) -> dict[str, Curve]:
        """The loss curve of each training among the drawn runs, by the name of its first run."""
        names = {id(run.log): run.name for run in self.drawn}
        logs = [run.log for run in self.drawn if "lm_loss" in run.log.iterations]
        return {names[id(group[0])]: join(group) for group in trainings(logs)}

    def timers(self) -> Html:
        """Median seconds of each timer that the logs print, those of the printing rank: a column a
        run. Some include others; a wait of the last stage is the pipeline's fill and drain, too.
        """
        medians = pd.DataFrame({run.name: run.log.timers.median() for run in self.drawn})
        rows = medians.drop(index="iteration", errors="ignore").rename_axis("timer (s)")
        return show(rows.reset_index())

    def spikes(self) -> Html:
        """Spikes of all trainings, and what their restarts did not continue, as `logs spikes` has
        them.
        """
        groups = trainings([run.log for run in self.timed])
        return Html.pre("\n".join(training_text(training_record(group)) for group in groups))


def measure_runs(
    study: Study,
    logs: str = "",
    cluster: Cluster | str | None = None,
    dialect: str = "",
) -> MeasuredRuns:
    """The runs of `logs` (a file, a folder, a glob; run on `cluster` where given), or of the study
    where that is empty.

        measure_runs(Study.open("demo"), "/data/*.out").endings()

    `dialect` is a file of a user's own table. A run folder is one run; in another folder every file
    counts whose name does not show that it is no log. Raises ValueError where there is no run.
    """
    use([Path(dialect)] if dialect else [])
    if not logs:
        runs = [measure(folder) for folder in study.run_folders()]
        require(runs, "study", study.name, "has no run; run 03_launch first, or name logs")
        return MeasuredRuns(runs=tuple(runs))
    machine = load_cluster(cluster) if cluster else None
    runs, unread = measure_all(matches(logs), machine.gpu if machine else None)
    require(runs, "logs", logs, f"no log among them: {[*unread, 'no such file'][0]}")
    if len({run.name for run in runs}) < len(runs):
        runs = [replace(run, name=f"{number} {run.name}") for number, run in enumerate(runs, 1)]
    return MeasuredRuns(runs=tuple(runs), unread=tuple(unread))


def measure_path(path: Path | str, gpu: Gpu | None = None) -> list[Measurement]:
    """The measured runs of a path: one of a run folder or its run.log, those of any other log.

        measure_path("slurm-4711.out")[0].sec_per_it

    `gpu` is the card where another log does not name it. Raises ValueError where there is no run.
    """
    path = Path(path)
    folder = path.parent if path.name == "run.log" else path
    if _is_run(folder):
        return [measure(folder)]
    return [measure_log(log, gpu=gpu) for log in read_logs(path)]


def measure_all(
    paths: Iterable[Path | str], gpu: Gpu | None = None
) -> tuple[list[Measurement], list[str]]:
    """The runs of the paths and of all below folders among them, in their order, and why others
    hold none.
    """
    runs = []
    unread = []
    for root in paths:
        for path in below(Path(root)):
            try:
                runs += measure_path(path, gpu)
            except OSError as error:
                unread.append(f"log={path}: {error.strerror}")
            except ValueError as error:
                unread.append(str(error))
    return runs, unread


def matches(pattern: str) -> list[Path]:
    """The paths that a path or a glob names, in their order."""
    return [Path(name) for name in sorted(glob(str(Path(pattern).expanduser()), recursive=True))]


def below(path: Path) -> list[Path]:
    """A file or a run folder itself; of another folder the run folders below it, and the files
    outside them whose names do not show that they are no logs.
    """
    if _is_run(path) or not path.is_dir():
        return [path]
    every = sorted(path.rglob("*"))
    runs = [inner for inner in every if _is_run(inner)]
    # a sweep or chain keeps its code beside its sums
    closed = {*runs, *(inner.parent for inner in every if inner.name == "SHA256SUMS")}
    logs = []
    for inner in every:
        is_log = inner.suffix not in NO_LOGS and not inner.name.startswith(".") and inner.is_file()
        if is_log and closed.isdisjoint(inner.parents):
            logs.append(inner)
    return [*runs, *logs]


def _is_run(folder: Path) -> bool:
    return (folder / "run.log").is_file() and (folder / "plan.json").is_file()


def frame(runs: Sequence[Measurement], root: Path | None = None) -> DataFrame:
    """A row a run, see Measurement.row(); `source` is a run's folder, else its log, below `root`
    where given.
    """
    rows = []
    for run in runs:
        place = run.log.source.parent if run.plan else run.log.source
        source = os.path.relpath(place, root or place.parent)
        rows.append({"run": run.name, "source": source, **run.row()})
    return pd.DataFrame(rows)


def every_iteration(runs: Sequence[Measurement]) -> DataFrame:
    """All iterations of the runs, with the log and the number of each run among them."""
    tables = {(str(run.log.source), n): run.log.iterations for n, run in enumerate(runs, 1)}
    return pd.concat(tables, names=["file", "run"]).reset_index(level=["file", "run"])


def cell(key: str, value: Any) -> str:
    """The text of a value in a column, "" where it is unknown."""
    if isinstance(value, str):
        return one_line(value)
    if value is None or math.isnan(value):
        return ""
    if key == "parameters":
        return size_text(value)
    if key == "memory_gib":
        return f"{value:.1f}GiB"
    if float(value).is_integer():
        return f"{value:.15g}"
    return f"{value:.4g}"


def markdown(table: DataFrame) -> str:
    """The table in Markdown, its columns aligned: those of BigScience's tables that hold anything;
    the middle of long texts is left out.
    """
    columns = []
    for head, key in HEADS.items():
        texts = [middle(cell(key, value)) for value in table[key]]
        texts = [html.escape(text, quote=False).replace("|", "\\|") for text in texts]
        if any(texts):
            width = max(3, len(head), *map(len, texts))
            rule = f"{'-' * (width - 1)}:"
            columns.append([text.rjust(width) for text in (head, rule, *texts)])
    return "".join([f"| {' | '.join(cells)} |\n" for cells in zip(*columns, strict=True)])


def parse_text(runs: Sequence[Measurement]) -> str:
    """Each run in a few lines: how it ended, its numbers, the evidence, problems."""
    lines = []
    counts = Counter(run.log.source for run in runs)
    seen = Counter[Path]()
    for run in runs:
        log = run.log
        row = run.row()
        number = ""
        if counts[log.source] > 1:
            seen[log.source] += 1
            number = f" run {seen[log.source]} of {counts[log.source]}"
        lines.append(f"{log.source}{number}: {log.status} ({log.dialect})")
        cells = {name: cell(name, row[name]) for name in PARSED.split()}
        facts = [f"{name} {text}" for name, text in cells.items() if text]
        details = [", ".join(facts), log.evidence, *log.collectives, *log.notes]
        details += [f"problem: {problem}" for problem in log.problems]
        lines += [f"  {detail}" for detail in details if detail]
    return "\n".join(lines)
