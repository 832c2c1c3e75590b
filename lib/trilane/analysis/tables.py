"""Runs as rows, and rows as tables: of `trilane logs table` and `logs parse`, of notebooks, in CSV and HTML."""

import html
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import compress
from operator import not_
from pathlib import Path
from typing import Any

from trilane.analysis.measure import Measurement
from trilane.analysis.paths import below, measure_all
from trilane.logs.endings import caveat
from trilane.utils.files import natural
from trilane.utils.numbers import percent
from trilane.utils.tables import DataFrame, Html, csv_text, frame_of, middle, one_line, short
from trilane.utils.validation import require_folder, require_known
from trilane.workspace.status import Status

Row = Mapping[str, Any]  # of a run: numbers in base units (`tflops` excepted), NaN where unknown
SIZES = ("GPUs", "Size", "DP", "TP", "PP", "MBS", "GBS")
Reader = str | Callable[[Measurement], Any]


def size(parameters: float) -> str:
    """A number of parameters in short: 181B, 1.3B, 350M."""
    for unit, word in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= 0.9995 * unit:
            return f"{parameters / unit:.{0 if parameters >= 9.95 * unit else 1}f}{word}"
    return f"{parameters:.0f}"


def _degree(m: Measurement, name: str) -> int:
    # a parallelism of one is known only where the GPUs are
    degree: int = getattr(m.config, name)
    return degree if m.config.gpus or degree > 1 else 0


def _date(m: Measurement) -> str:
    """That of the last iteration's line, else of the file."""
    log = m.log
    at = log.clock[-1][1] if log.clock else log.source.stat().st_mtime if log.source.exists() else math.nan
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M}" if 0 < at < 4e9 else ""  # after 2096 it is damaged


def _cause(m: Measurement) -> str:
    return "" if m.status is Status.COMPLETED else "; ".join([m.log.evidence, *m.log.collectives])


# Each column of a table: the key of a row, by which rows are sorted, what it is of a run, and a number's form; "" is
# text. A number of 0 in the configuration is unknown.
COLUMNS: Mapping[str, tuple[str, Reader, str | Callable[[Any], str]]] = {
    "Run": ("run_name", "name", ""),
    "GPUs": ("gpus", "config.gpus", "{:.0f}"),
    "Size": ("parameters", "config.parameters", size),
    **{name: (name.lower(), partial(_degree, name=name.lower()), "{:.0f}") for name in ("DP", "TP", "PP")},
    **{name: (name.lower(), f"config.{name.lower()}", "{:.0f}") for name in ("MBS", "GBS")},
    "Mem": ("memory_bytes", "memory_bytes", lambda value: f"{value / 2**30:.1f}GiB"),
    "Mem (GiB)": ("memory_gib", lambda m: m.memory_bytes / 2**30, "{:.2f}"),
    "Sec/it": ("sec_per_it", "sec_per_it", "{:.4g}"),
    "±": ("spread", "spread", partial(percent, digits=0)),
    "TFLOPs": ("tflops", lambda m: m.flops_per_s_per_gpu / 1e12, lambda v: f"{v:.2f}" if v >= 1 else f"{v:.3g}"),
    "GFLOPs": ("gflops", lambda m: m.flops_per_s_per_gpu / 1e9, "{:.1f}"),
    "MFU": ("mfu", lambda m: m.utilization.get("mfu", math.nan), percent),
    "HFU": ("hfu", lambda m: m.utilization.get("hfu", math.nan), percent),
    "Lost": ("lost", "lost_share", percent),
    "Bubble": ("bubble", "bubble", percent),
    "Waits": ("waits", "waited", percent),
    "Iterations": ("iterations", lambda m: len(m.log.iterations), "{:.0f}"),
    "Loss": ("loss", "last_loss", "{:.4g}"),
    "Losses": ("losses", lambda m: f"{m.first_loss:.2f} → {m.last_loss:.2f}" * (m.last_loss == m.last_loss), ""),
    "Tokens/s": ("tokens_per_s", "tokens_per_s", "{:.0f}"),
    "Status": ("status", "status", ""),
    "First": ("first_iteration", "log.first_iteration", "{:.0f}"),
    "Last": ("last_iteration", "log.last_iteration", "{:.0f}"),
    "Skipped": ("skipped", "numerics.skipped", "{:.0f}"),
    "NaN": ("nan_iterations", "numerics.nan_iterations", "{:.0f}"),
    "Norm": ("grad_norm", "numerics.grad_norm", "{:.4g}"),
    "Largest norm": ("grad_norm_max", "numerics.grad_norm_max", "{:.4g}"),
    "Scale": ("loss_scale", "numerics.loss_scale", "{:.0f}"),
    "Reductions": ("loss_scale_drops", "numerics.loss_scale_drops", "{:.0f}"),
    "Date": ("date", _date, ""),
    "Dialect": ("dialect", "log.dialect", ""),
    "Problems": ("problems", lambda m: [str(problem) for problem in m.log.problems], ""),
    "Cause": ("cause", _cause, ""),
    "Node": ("hosts", lambda m: list(m.log.hosts), ""),
    "Exclude": ("exclude", "log.exclude", ""),
    "Left out": ("left_out", lambda m: m.window.sentence.removeprefix("left out: "), ""),
    "Outcome": ("outcome", lambda m: ", ".join(filter(None, (m.status, m.note))), ""),
    "Source": ("source", "log.source", ""),
    "Notes": ("notes", "note", ""),
}


def rows_of(runs: Sequence[Measurement], root: Path | None = None) -> list[dict[str, Any]]:
    """The rows of runs, in their order, each at its place below `root`: of run folders, else of their logs.

    Without `root` that is the folder that holds all of them. Where two have one name, the name is the place.
    """
    places = [m.log.source.parent if m.plan else m.log.source for m in runs]
    root = root or Path(os.path.commonpath([place.parent for place in places] or [Path()]))
    rows, seen = frame_of(runs, {key: read for key, read, _ in COLUMNS.values()}).to_dict("records"), Counter[Path]()
    for row, place in zip(rows, places, strict=True):
        seen[place] += 1
        again = f" run {seen[place]}" if seen[place] > 1 else ""
        source = place.name if place == root else os.path.relpath(place, root)
        row |= {"source": source + again, "name": place.name + again, "run": seen[place]}
        unknown = [key for key in ("gpus", "parameters", "dp", "tp", "pp", "mbs", "gbs") if not row[key]]
        row |= dict.fromkeys(unknown, math.nan)
    alike = Counter(row["name"] for row in rows)
    for row in rows:
        row["name"] = row["source"] if alike[row["name"]] > 1 else row["name"]
        failure = row["status"] if row["status"] is not Status.COMPLETED else ""
        row["notes"] = ", ".join(filter(None, (row["name"], failure, row["notes"])))
    return rows


def read_folder(folder: Path | str) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of the runs at and below a folder, by path, and why files hold none; ValueError without a folder."""
    folder = Path(folder)
    require_folder("folder", folder)
    found = measure_all(below(folder))
    benches = [f"log={read.path}: a bandwidth benchmark" for read in found for m in read.runs if len(m.log.bandwidth)]
    rows = rows_of([m for read in found for m in read.runs if not len(m.log.bandwidth)], folder)
    unread = [read.error for read in found if read.error]
    return sorted(rows, key=lambda row: natural(row["source"])), [*unread, *dict.fromkeys(benches)]


def column(name: str, field: str = "columns") -> str:
    """The column of that name, in any case; ValueError with all names for another one. Sorting also knows `speed`."""
    known = {head.lower(): head for head in COLUMNS} | ({"speed": "speed"} if field == "sort" else {})
    require_known(field, name.lower(), list(known))
    return known[name.lower()]


def ordered(rows: Sequence[Any], by: str, reverse: bool = False) -> list[Any]:
    """The rows by a column, rising; by `speed` the fastest first. Those without a value are last in any case."""
    # TFLOPs alone compare runs of different sizes
    key, down = (COLUMNS["TFLOPs"][0], not reverse) if by == "speed" else (COLUMNS[by][0], reverse)
    has = [row[key] == row[key] and row[key] not in ("", []) for row in rows]

    def rank(row: Row) -> Any:
        value = row[key]
        return natural(value.lower()) if isinstance(value, str) else len(value) if isinstance(value, list) else value

    return [*sorted(compress(rows, has), key=rank, reverse=down), *compress(rows, map(not_, has))]


def cell(row: Row, head: str) -> str:
    """The row's text in a column, "" where its value is unknown."""
    key, _, form = COLUMNS[head]
    value = row[key]
    if head == "Mem" and row["status"] is Status.OOM:
        return "OOM"
    if isinstance(value, list):
        return "; ".join(value)
    if value is None or value != value:
        return ""
    return form(value) if callable(form) else form.format(value) if form else str(value)


def texts(rows: Sequence[Row], heads: Sequence[str] = ()) -> DataFrame:
    """The cells of all rows in these columns, by default in all."""
    return frame_of(rows, {head: partial(cell, head=head) for head in heads or COLUMNS})


def markdown(rows: Sequence[Row], heads: Sequence[str] = (), sort: str = "") -> str:
    """The table in Markdown, its columns aligned, and a line for each problem of a run below it.

    Without `heads` the columns of the chronicles' tables and that of `sort`, where they hold anything; the notes, of
    which the middle is left out, are the last.
    """
    table = texts(rows, heads)
    if not heads:
        usual = {*SIZES, "Mem", "Sec/it", "TFLOPs", "Loss", sort} - {"Notes"}
        table = table[[head for head in table if head in usual and table[head].any()] + ["Notes"]]
        table = table.map(partial(middle, most=30))
    table = table.map(_escaped)
    sides = [str.rjust if COLUMNS[head][2] else str.ljust for head in table]
    widths = [max(3, len(head), *table[head].str.len()) for head in table]

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(side(text, n) for side, text, n in zip(sides, cells, widths, strict=True))} |"

    rule = ["-" * (n - 1) + (":" if side is str.rjust else "-") for side, n in zip(sides, widths, strict=True)]
    lines = [line(list(table)), line(rule), *map(line, table.itertuples(index=False))]
    wrong = [_escaped(short(f"! {row['name']}: {text}", 200)) for row in rows for text in row["problems"]]
    return "\n".join([*lines, *([""] if wrong else []), *wrong]) + "\n"


def _escaped(text: str) -> str:
    return html.escape(one_line(text), quote=False).replace("|", "\\|")


def to_html(rows: Sequence[Row], heads: Sequence[str] = ()) -> Html:
    """The table as a piece of HTML, each number with its value, to sort by.

    By default where the run lies, its status, and all other columns that hold anything and repeat no other.
    """
    table, again = texts(rows, heads), {"Run", "Mem (GiB)", "GFLOPs", "Losses", "Outcome", "Notes"}
    chosen = heads or dict.fromkeys(["Source", "Status", *(h for h in table if h not in again and table[h].any())])
    kinds = {head: Html("" if COLUMNS[head][2] else ' class="text"') for head in chosen}

    def shown(row: Row, head: str) -> Html:
        value = row[COLUMNS[head][0]]
        data = Html(f' data-value="{value!r}"' if isinstance(value, int | float) and value == value else "")
        return Html.of("<td{}{}>{}</td>", kinds[head], data, cell(row, head))

    titles = [Html.of('<th{} tabindex="0" role="button">{}</th>', kinds[head], head) for head in chosen]
    lines = [Html.of("<tr>{}</tr>", Html.joined("", [shown(row, head) for head in chosen])) for row in rows]
    made = '<table class="sortable wide">\n<thead><tr>{}</tr></thead>\n<tbody>\n{}\n</tbody>\n</table>'
    return Html.of(made, Html.joined("", titles), Html.joined("\n", lines))


def values(rows: Sequence[Row], heads: Sequence[str]) -> DataFrame:
    """The rows in these columns for a notebook or a file: numbers are numbers, but for sizes and shares."""

    def value(row: Row, head: str) -> Any:
        key, _, form = COLUMNS[head]
        return row[key] if head == "TFLOPs" or (form and isinstance(form, str)) else cell(row, head)

    return frame_of(rows, {head: partial(value, head=head) for head in heads})


def frame(runs: Sequence[Measurement]) -> DataFrame:
    """The runs as a DataFrame, a row each; GFLOPs where none reaches a TFLOP/s."""
    rows = rows_of(runs)
    rate = "TFLOPs" if any(row["tflops"] > 1 for row in rows) else "GFLOPs"
    heads = ("Run", *SIZES, "Mem (GiB)", "Sec/it", "±", rate, "Losses", "Outcome")
    return values(rows, heads).rename(columns={"Losses": "Loss", "Outcome": "Notes"})


def write_iterations(runs: Sequence[Measurement], path: Path) -> None:
    """All iterations of all runs as CSV, after the columns `file` and `run`; what a log does not print is empty."""
    import pandas as pd

    tables = list[DataFrame]()
    for m, row in zip(runs, rows_of(runs), strict=True):
        whole = m.log.iterations.select_dtypes("int64")
        # whole numbers stay whole where another log lacks the column
        tables.append(m.log.iterations.astype(dict.fromkeys(whole, "Int64")))
        tables[-1].insert(0, "file", str(m.log.source))
        tables[-1].insert(1, "run", row["run"])
    path.write_text(csv_text(pd.concat(tables)) if tables else "", encoding="utf-8")


def parse_text(runs: Sequence[Measurement]) -> str:
    """Each run in a few lines: how it ended, its numbers, the evidence, problems; those of one file are numbered."""
    in_file, lines = Counter(m.log.source for m in runs), list[str]()
    heads = ("Iterations", "First", "Last", "Sec/it", "TFLOPs", "Mem", "Loss", "Node", "Exclude")
    for m, row in zip(runs, rows_of(runs), strict=True):
        log, many = m.log, in_file[m.log.source]
        number, basis = f", run {row['run']} of {many}" * (many > 1), f", {log.status_basis}" * bool(log.status_basis)
        lines.append(f"{log.source}{number}: {log.status} ({log.dialect}){basis}")
        facts = ", ".join(f"{head} {text}" for head in heads if (text := cell(row, head)))
        found = [facts, log.evidence, caveat(log.status, log.evidence), *log.collectives]
        lines += [f"  {one}" for one in (*found, *(f"problem: {text}" for text in row["problems"][:4])) if one]
    return "\n".join(lines)
