"""`trilane logs`: training logs in any dialect: parse, tabulate, compare, spikes."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path

import click

from trilane.analysis import compare as comparison
from trilane.analysis import tables
from trilane.analysis.collect import measure_all, measure_path, read_folder
from trilane.analysis.loss_curve import join, trainings
from trilane.analysis.spikes import training_record, training_text
from trilane.cli.app import Answer, Group, command, note
from trilane.config.options import option
from trilane.logs.dialects import use
from trilane.logs.run import RunLog
from trilane.logs.written_tables import read_runs
from trilane.utils.hooks import hook
from trilane.utils.tables import csv_text
from trilane.utils.validation import require

GROUP = Group(
    "logs", help="Read training logs in any dialect, and hand-written tables of measured runs."
)
DIALECT = option((), "how your trainer prints its iterations (JSON); repeatable", metavar="FILE")


def unreadable(lines: Sequence[str], read: Sequence[object]) -> int:
    """Print why logs could not be read; the exit code: 2 where none could, 1 where some, 0 where
    all.
    """
    note(lines)
    return 0 if not lines else 1 if read else 2


@command(GROUP)
def parse(
    *logs: Path,
    csv: Path | None = option(None, "write all iterations of all runs to FILE", metavar="FILE"),
    dialect: tuple[Path, ...] = DIALECT,
    as_json: bool = False,
) -> int:
    """Print speed, memory, loss and the ending of each run in the logs, plain or gzip.

    Where logs cannot be read: exit code 2 if none of them, 1 if some.
    """
    use(dialect)
    if csv:
        require(csv.parent.is_dir(), "csv", csv, "its folder does not exist")
        require(csv.resolve() not in map(Path.resolve, logs), "csv", csv, "is a log")
    runs, unread = measure_all(logs)
    code = unreadable(unread, runs)
    if csv and runs:
        tables.write_iterations(runs, csv)
    if code < 2:
        Answer({"runs": [m.to_json() for m in runs]}, tables.parse_text(runs)).show(as_json)
    return code


@command(GROUP)
def table(
    folder: Path,
    sort: str = option("", "sort by a column, rising; speed: the fastest first", metavar="COLUMN"),
    dialect: tuple[Path, ...] = DIALECT,
    csv: bool = option(False, "print CSV, with all columns, instead of Markdown"),
    as_json: bool = False,
) -> Answer:
    """Print the runs below FOLDER as one table: run folders, or logs of other trainers, at any
    depth.
    """
    require(not (csv and as_json), "table", folder, "choose one of --csv and --json")
    by = tables.column(sort) if sort else ""
    use(dialect)
    rows, bad = read_folder(folder)
    note(bad[:10], label="trilane: left out: ")
    note(
        [f"{len(bad) - 10} more, which --json names"] if len(bad) > 10 else [],
        label="trilane: left out: ",
    )
    require(
        bool(rows),
        "folder",
        folder,
        "holds no run: neither plan.json with run.log, nor a training log",
    )
    rows = tables.ordered(rows, by) if by else rows
    values = [{k: None if v != v else v for k, v in row.items()} for row in rows]
    text = csv_text(tables.values(rows)) if csv else tables.markdown(rows, by)
    return Answer({"folder": str(folder), "rows": values, "left_out": bad}, text.removesuffix("\n"))


class CompareCommand(click.Command):
    """`--with` takes all words that follow it, up to the next option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Each word after `--with` as a `--with` of its own."""
        at = args.index("--with") + 1 if "--with" in args else len(args)
        names = list(takewhile(lambda word: not word.startswith("-"), args[at:]))
        spread = [word for name in names for word in ("--with", name)][1:]
        return super().parse_args(ctx, [*args[:at], *spread, *args[at + len(names) :]])


@command(GROUP, cls=CompareCommand)
def compare(
    *a: str,
    b: tuple[str, ...] = option(
        help="logs or run folders of the other variant", name="with", metavar="B..."
    ),
    confidence: float = option(0.95, "of the interval", above=0),
) -> Answer:
    """Print whether the runs of B are faster than those of A: logs or run folders of two variants."""
    runs_a, runs_b = ([m for path in paths for m in measure_path(path)] for paths in (a, b))
    found = comparison.compare(runs_a, runs_b, confidence)
    return Answer(
        {**asdict(found), "decided": found.decided, "verdict": found.sentence}, str(found)
    )


@command(GROUP)
def spikes(*logs: str, as_json: bool = False) -> int:
    """Print where loss or gradient norm left their course, and what restarts did not continue; logs
    in their order.

    Where logs cannot be read: exit code 2 if none of them, 1 if some.
    """
    read, bad = list[RunLog](), list[str]()
    for name in logs:
        try:
            runs = read_runs(name)
        except (ValueError, OSError) as error:
            bad.append(str(error))
            continue
        known = [log for log in runs if log.first_iteration is not None or not len(log.iterations)]
        read += known
        bad += [f"log={name}: its iterations have no numbers"] * (len(known) < len(runs))
    if (code := unreadable(bad, read)) < 2:
        found = [(group, join(group), hook("breaks")(group)) for group in trainings(read)]
        text = "\n".join(training_text(*one) for one in found) or "no log holds an iteration"
        Answer({"trainings": [training_record(*one) for one in found]}, text).show(as_json)
    return code
