"""`trilane logs`: training logs in any dialect and hand-written tables: parse, tabulate, compare, spikes."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from trilane.cli.options import FILE, FOLDER, JSON, Command, Group, command, emit, number, option
from trilane.utils.tables import csv_text, one_line, printable
from trilane.utils.validation import require

MOST = 10  # files that were left out are named

logs = Group("logs", help="Read training logs in any dialect, and hand-written tables of measured runs.")


def report_unreadable(lines: Sequence[str], read: Sequence[object]) -> int:
    """Print why logs could not be read; the exit code: 2 where none could, 1 where some, 0 where all."""
    for line in lines:
        print("trilane:", one_line(line), file=sys.stderr)
    return 0 if not lines else 1 if read else 2


LOGS = click.argument("logs", nargs=-1, required=True, metavar="LOG...", type=FILE)
CSV_FILE = option("--csv", type=FILE, metavar="FILE", help="write all iterations of all runs to FILE")
WATCH = option("--watch", is_flag=True, hidden=True)  # gone: it names its successor until 0.1.0 is released


DIALECT = option(
    "--dialect",
    multiple=True,
    type=FILE,
    metavar="FILE",
    help="how your trainer prints its iterations (JSON); repeatable",
)


@command(logs, LOGS, CSV_FILE, DIALECT, WATCH, JSON)
def parse(logs: Sequence[Path], csv: Path | None, dialect: Sequence[Path], watch: bool, as_json: bool) -> int:
    """Print speed, memory, loss and the ending of each run in the logs, plain or gzip.

    Where logs cannot be read: exit code 2 if none of them, 1 if some.
    """
    from trilane.analysis.paths import measure_all
    from trilane.analysis.tables import parse_text, write_iterations
    from trilane.logs.dialects.tables import use

    require(not watch, "option", "--watch", "is now `trilane slurm watch`, or `logs parse` once more")
    use(dialect)
    if csv:
        require(csv.parent.is_dir(), "csv", csv, "its folder does not exist")
        require(csv.resolve() not in map(Path.resolve, logs), "csv", csv, "is a log")
    found = measure_all(logs)
    runs = [m for read in found for m in read.runs]
    code = report_unreadable([read.error for read in found if read.error], runs)
    for read in found:
        print(read.advice, end="\n" if read.advice else "", file=sys.stderr)
    if csv and runs:
        write_iterations(runs, csv)
    if code < 2:
        emit(as_json, {"runs": [m.to_json() for m in runs]}, parse_text(runs))
    return code


MARKDOWN = option("--markdown", is_flag=True, help="print Markdown (the default)")
CSV = option("--csv", is_flag=True, help="print CSV, with all columns")
HTML = option("--html", is_flag=True, help="print a page, with all columns, which a click on a heading sorts")
SORT = option("--sort", default="", metavar="COLUMN", help="sort by a column, rising; speed: the fastest first")
REVERSE = option("--reverse", is_flag=True, help="the other way round; what has no value stays last")
COLUMNS = option("--columns", default="", metavar="A,B,...", help="print these columns")


@command(logs, FOLDER, SORT, REVERSE, COLUMNS, DIALECT, MARKDOWN, CSV, HTML, JSON)
def table(
    folder: Path,
    sort: str,
    reverse: bool,
    columns: str,
    dialect: Sequence[Path],
    markdown: bool,
    csv: bool,
    html: bool,
    as_json: bool,
) -> None:
    """Print the runs below FOLDER as one table: run folders, or logs of other trainers, at any depth, on all cores."""
    from trilane.analysis import tables
    from trilane.logs.dialects.tables import use
    from trilane.report.index import sortable_page

    require(markdown + csv + html + as_json < 2, "table", folder, "choose one of --markdown, --csv, --html, --json")
    by = tables.column(sort, "sort") if sort else ""
    heads = [tables.column(name.strip()) for name in columns.split(",")] if columns else []
    use(dialect)
    rows, bad = tables.read_folder(folder)
    for line in [*bad[:MOST], *([f"{len(bad) - MOST} more, which --json names"] if len(bad) > MOST else [])]:
        print("trilane: left out:", one_line(line), file=sys.stderr)
    require(bool(rows), "folder", folder, "holds no run: neither plan.json with run.log, nor a training log")
    rows = tables.ordered(rows, by, reverse) if by else rows[:: -1 if reverse else 1]
    if csv or html:
        name = f"Runs in {folder}"
        page = csv_text(tables.texts(rows, heads)) if csv else sortable_page(name, tables.to_html(rows, heads))
        print(printable(page.removesuffix("\n")))
        return
    values = [{k: None if v != v else v for k, v in row.items()} for row in rows]
    found = {"folder": str(folder), "rows": values, "left_out": bad}
    emit(as_json, found, tables.markdown(rows, heads, by).removesuffix("\n"))


class CompareCommand(Command):
    """`--with` takes all words that follow it, up to the next option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Each word after `--with` as a `--with` of its own."""
        words, follows = list[str](), False
        for word in args:
            words += ["--with"] if follows and not word.startswith("-") and words[-1] != "--with" else []
            follows = word == "--with" or (follows and not word.startswith("-"))
            words.append(word)
        return super().parse_args(ctx, words)


A = click.argument("a", nargs=-1, required=True, metavar="A...")
B = option("--with", "b", multiple=True, required=True, metavar="B...", help="logs or run folders of the other variant")
CONFIDENCE = option("--confidence", type=number(), default=0.95, help="of the interval")


@command(logs, A, B, CONFIDENCE, JSON, cls=CompareCommand)
def compare(a: Sequence[str], b: Sequence[str], confidence: float, as_json: bool) -> None:
    """Print whether the runs of B are faster than those of A: logs or run folders of two variants."""
    from trilane.analysis import compare as comparison
    from trilane.analysis.paths import measure_path

    runs_a, runs_b = ([m for path in paths for m in measure_path(path)] for paths in (a, b))
    found = comparison.compare(runs_a, runs_b, confidence)
    values = {**asdict(found), "decided": found.decided, "verdict": found.sentence}
    emit(as_json, values, str(found))


@command(logs, click.argument("logs", nargs=-1, required=True, metavar="LOG..."), JSON)
def spikes(logs: Sequence[str], as_json: bool) -> int:
    """Print where loss or gradient norm left their course, and what restarts did not continue; logs in their order.

    Where logs cannot be read: exit code 2 if none of them, 1 if some.
    """
    from trilane.analysis.continuity import find_breaks
    from trilane.analysis.loss_curve import join, trainings
    from trilane.analysis.spikes import training_record, training_text
    from trilane.logs.run import RunLog
    from trilane.logs.written_tables import read_runs

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
    code = report_unreadable(bad, read)
    if code < 2:
        groups = trainings(read)
        found = [(group, join(group), find_breaks(group)) for group in groups]
        text = "\n".join(training_text(*one) for one in found) or "no log holds an iteration"
        emit(as_json, {"trainings": [training_record(*one) for one in found]}, text)
    return code
