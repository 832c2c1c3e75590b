"""Runs of paths, measured; MeasuredRuns: those of a study or of any files of logs, with tables and
sentences.
"""

import glob
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd

from trilane.analysis.loss_curve import Curve, join, trainings
from trilane.analysis.measure import Measurement, measure, measure_log
from trilane.analysis.spikes import CALM, training_text
from trilane.analysis.steady_state import WARM_UP
from trilane.analysis.tables import folded, rows_of, tidy, values
from trilane.config.cluster import Cluster, Gpu
from trilane.config.plan import read_plan
from trilane.costmodel.recalibration import NOTHING, Recalibration
from trilane.logs.dialects import use
from trilane.logs.written_tables import read_runs
from trilane.utils.files import natural
from trilane.utils.hooks import hook
from trilane.utils.progress import progress
from trilane.utils.tables import Columns, DataFrame, Html, Table, Text, short, show
from trilane.utils.validation import require, require_folder
from trilane.workspace.status import Status
from trilane.workspace.study import Study

SHOWN, DRAWN = 40, 8  # runs of hundreds that a table and a figure have
NO_LOG = Html(
    "<p>No log among them: rows of typed tables are compared with their predictions alone.</p>"
)


@dataclass(frozen=True, kw_only=True)
class MeasuredRuns(Table):
    """The runs, each with its own name, also those without an iteration; and why other files were
    not read.

    They are in the order in which they ran, as far as their paths show it.
    """

    runs: tuple[Measurement, ...]
    unread: tuple[str, ...] = ()

    @property
    def logs(self) -> list[Measurement]:
        """The runs that a log shows; rows of typed tables have neither iterations nor an ending."""
        return [m for m in self.runs if m.log.dialect != "table"]

    @property
    def timed(self) -> list[Measurement]:
        """The runs that printed iterations with their time."""
        return [m for m in self.logs if m.iterations]

    @property
    def drawn(self) -> list[Measurement]:
        """The first of the timed runs, as many as a figure can show."""
        return self.timed[:DRAWN]

    def finding(self, recalibration: Recalibration) -> Text:
        """How the runs ended, whether their losses agree, and how wrong the predictions of their
        time were.
        """
        ends = Counter(str(m.status) for m in self.logs)
        counts = [f"{number} of {len(self.logs)} runs {status}" for status, number in ends.items()]
        rows = len(self.runs) - len(self.logs)
        counts += [f"{rows} rows of typed tables, without logs"] * bool(rows)
        lead = Text.of("**{}.**", ", ".join(counts))
        is_long = len(self.runs) > SHOWN or len(self.timed) > DRAWN
        shown = f"Tables show the first {SHOWN} runs, figures {DRAWN}; runs.csv has all." * is_long
        text = Text.joined(
            " ", filter(None, [lead, self._agreement(), accuracy(recalibration), shown])
        )
        unread = _first([short(reason.partition(";")[0], 120) for reason in self.unread])
        return Text.joined("\n- not read: ", [text, *unread])

    def _agreement(self) -> str:
        """Whether trainings have one loss, by the largest difference at an iteration that two of
        them have.
        """
        losses = [curve.table.set_index("iteration")["lm_loss"] for curve in self.curves().values()]
        table = pd.concat(losses, axis=1) if len(losses) > 1 else pd.DataFrame()
        gap = (
            (table.max(axis=1) - table.min(axis=1))[table.notna().sum(axis=1) > 1].max()
            if len(table)
            else math.nan
        )
        # repeats of one training in 16 bits differ by a few thousandths
        agree = "agree within" if gap < 0.01 else "differ by up to"
        return f"Their losses {agree} {gap:.1g} nats per token." if gap == gap else ""

    def to_frame(self) -> DataFrame:
        """A row a run, with a column for each number, in base units where the name has none, and
        what the log tells.
        """
        return tidy(rows_of(self.runs))

    def summary(self) -> str:
        return f"{len(self.runs)} runs"

    def _repr_html_(self) -> str:
        return super()._repr_html_() if self.logs else NO_LOG

    def view(self) -> DataFrame:
        return self.table().view()

    def table(self) -> Columns:
        """The first runs in the columns of the BigScience tables that hold anything."""
        usual = (
            "GPUs",
            "Size",
            "TP",
            "PP",
            "DP",
            "MBS",
            "GBS",
            "Sec/it",
            "TFLOPs",
            "Tokens/s",
            "Mem (GiB)",
            "Losses",
        )
        return _table(self.logs[:SHOWN], *usual, "Outcome")

    def endings(self) -> Html:
        """How each run ended, failed ones first: the line that proves it, nodes at fault, wrong
        numbers; folded where all completed.
        """
        runs = sorted(self.logs, key=lambda m: not m.status.has_failed)[:SHOWN]
        heads = (
            "Source",
            "Dialect",
            "Status",
            "Iterations",
            "First",
            "Last",
            "Node",
            "Exclude",
            "Cause",
            "Problems",
        )
        table = show(_table(runs, *heads).to_frame())
        is_calm = all(
            m.status is Status.COMPLETED and not (m.log.problems or m.log.own) for m in self.logs
        )
        if not is_calm or not runs:
            return table if runs else NO_LOG
        return folded(
            f"All {len(self.logs)} completed, and no number in their logs contradicts another",
            table,
        )

    def details(self) -> Html:
        """Of each run: what does not count and why, where time is lost, utilization, skipped and
        broken iterations.
        """
        heads = ("Not counted", "Lost", "MFU", "HFU", "Skipped", "Invalid")
        table = show(_table(self.timed[:SHOWN], *heads).to_frame())
        return (
            folded("Utilization, lost time, skipped iterations", table) if self.timed else Html("")
        )

    def curves(self) -> dict[str, Curve]:
        """The loss curve of each training, by the name of its first run."""
        of = {id(m.log): m for m in self.timed}
        groups = trainings([m.log for m in self.timed if "lm_loss" in m.log.iterations])
        return {of[id(g[0])].name: join(g, of[id(g[0])].config.seq_length) for g in groups}

    def drawn_curves(self) -> dict[str, Curve]:
        """The first of the curves, as many as a figure can show."""
        return dict(islice(self.curves().items(), DRAWN))

    def spikes(self) -> Html:
        """Spikes of all trainings, and what their restarts did not continue, as `logs spikes` has
        them.
        """
        groups = trainings([m.log for m in self.timed])
        texts = [training_text(g, join(g), hook("breaks")(g)) for g in groups]
        loud = [
            line
            for text in texts
            if not text.endswith(f"lines\n  {CALM}")
            for line in text.splitlines()
        ]
        quiet = sum(text.endswith(f"lines\n  {CALM}") for text in texts)
        lead = (
            Html.of("<p>{} of {} trainings: {}.</p>", quiet, len(texts), CALM)
            if quiet
            else Html("")
        )
        return Html.of("{}{}", lead, Html.pre("\n".join(_first(loud, SHOWN))) if loud else Html(""))


def measure_runs(
    study: Study,
    logs: str = "",
    warm_up: int = WARM_UP,
    cluster: Cluster | None = None,
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
        runs = [measure(folder, warm_up) for folder in study.run_folders()]
        require(bool(runs), "study", study.name, "has no run; run 03_launch first, or name logs")
        return MeasuredRuns(runs=tuple(runs))
    card = cluster.gpu if cluster and cluster.gpu.kind == "cuda" else None
    runs, unread = measure_all(files(logs), warm_up, card)
    require(bool(runs), "logs", logs, f"no log among them: {[*unread, 'no such file'][0]}")
    once = [name for name, count in Counter(m.name for m in runs if m.plan).items() if count == 1]
    named = (
        m if m.plan and m.name in once else replace(m, name=_name(number, m))
        for number, m in enumerate(runs, 1)
    )
    return MeasuredRuns(runs=tuple(named), unread=tuple(unread))


def accuracy(found: Recalibration) -> Text:
    """How wrong predictions of time were before the runs, and after them for a run that the fit has
    not seen.
    """
    if not found.fit:
        return (
            Text.of("Nothing to predict: {}.", found.left_out[0].reason)
            if found.left_out
            else NOTHING
        )
    before, after = (f"{100 * error['median']:.2g} %" for error in found.errors().values())
    text = Text.of(
        "Predicted seconds were wrong by **{}** (median of {} runs)", before, len(found.rows)
    )
    if not found.fit.weight:
        return Text.of(
            "{}; constants fitted to these predict no better, so those from before are kept.", text
        )
    return Text.of("{}; by constants fitted to the other runs, by **{}**.", text, after)


def _name(number: int, m: Measurement) -> str:
    # file names are long, and a file may hold several runs
    c = m.config
    return f"{number} " + (
        f"tp{c.tp}-pp{c.pp}-dp{c.dp}" + f"-mbs{c.mbs}" * (c.mbs > 0) if c.gpus else m.log.dialect
    )


def _table(runs: Sequence[Measurement], *heads: str) -> Columns:
    """The runs in those of these columns that hold anything."""
    table = values(rows_of(runs), ("Run", *heads))
    table = table[table.columns[table.notna().any() & (table != "").any()]]
    return Columns(table.rename(columns={"Losses": "Loss", "Outcome": "Notes"}))


def _first(texts: Sequence[str], most: int = 12) -> list[str]:
    """The first of many texts, and how many more there are."""
    return [*texts[:most], *([f"{len(texts) - most} more"] if len(texts) > most else [])]


def measure_path(
    path: Path | str, warm_up: int = WARM_UP, gpu: Gpu | None = None
) -> list[Measurement]:
    """The measured runs of a path: one of a run folder, its run.log or its steps.jsonl, those of
    any other log.

        measure_path("slurm-4711.out")[0].sec_per_it

    `gpu` is the card where another log does not name it. Raises ValueError where there is no run.
    """
    path, ours = Path(path), ("run.log", "steps.jsonl")
    folder = path if path.is_dir() else path.parent if path.name in ours else None
    if folder and _is_run(folder):
        return [measure(folder, warm_up)]
    if path.is_dir():
        path = next((path / name for name in ours if (path / name).is_file()), path)
        require(
            path.is_file(),
            "run",
            path,
            f"holds neither {' nor '.join(ours)}; `logs table` reads folders of logs",
        )
    return [measure_log(log, None, warm_up, gpu=gpu) for log in read_runs(path)]


def measure_all(
    paths: Sequence[Path], warm_up: int = WARM_UP, gpu: Gpu | None = None
) -> tuple[list[Measurement], list[str]]:
    """The runs of the paths, in their order, and why others hold none."""
    runs, unread = list[Measurement](), list[str]()
    for path in progress(paths, "logs", "log"):
        try:
            runs += measure_path(path, warm_up, gpu)
        except OSError as error:
            unread.append(f"log={path}: {error.strerror}")
        except ValueError as error:
            unread.append(str(error))
    return runs, unread


def files(logs: str) -> list[Path]:
    """The files and run folders that a path or a glob matches, by name."""
    found = sorted(map(Path, glob.glob(str(Path(logs).expanduser()), recursive=True)))
    return [
        file
        for path in found
        for file in (below(path) if path.is_dir() and not _is_run(path) else [path])
    ]


def below(folder: Path) -> list[Path]:
    """The run folders below a folder, and the files outside them whose names do not show that they
    are no logs.
    """
    no_logs = (
        ".json",
        ".py",
        ".md",
        ".ipynb",
        ".html",
        ".png",
        ".csv",
        ".pt",
        ".bin",
        ".idx",
        ".sbatch",
        ".sh",
    )
    every = sorted(folder.rglob("*"))
    runs = [path for path in (folder, *every) if _is_run(path)]
    # a sweep or chain keeps its code beside its sums
    others = {*runs, *(path.parent for path in every if path.name == "SHA256SUMS")}
    alone = (path for path in every if path.suffix not in no_logs and path.name[0] != ".")
    return [*runs, *(path for path in alone if path.is_file() and others.isdisjoint(path.parents))]


def _is_run(folder: Path) -> bool:
    try:
        return (folder / "run.log").is_file() and bool(read_plan(folder / "plan.json"))
    except ValueError:
        return False  # the log alone can still be read


def read_folder(folder: Path | str) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of the runs at and below a folder, by path, and why files hold none; ValueError
    without a folder.
    """
    folder = Path(folder)
    require_folder("folder", folder)
    runs, unread = measure_all(below(folder))
    return sorted(rows_of(runs, folder), key=lambda row: natural(row["source"])), unread
