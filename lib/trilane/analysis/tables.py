"""Runs as rows, and rows as tables: of `trilane logs table` and `logs parse`, of notebooks, in CSV and HTML."""

import html
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from trilane.analysis.measure import Measurement
from trilane.analysis.paths import below, measure_all
from trilane.utils.files import natural
from trilane.utils.numbers import percent
from trilane.utils.tables import DataFrame, Html, csv_text, frame_of, middle, one_line, short
from trilane.utils.validation import require_folder, require_known
from trilane.workspace.status import Status

Row = Mapping[str, Any]  # of a run: numbers in base units (`tflops` excepted), NaN where unknown
WIDTH = 100  # characters of a row in text
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
    "Remarks": ("note", "note", ""),
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
        row["notes"] = ", ".join(filter(None, (row["name"], failure, row["note"])))
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

    def rank(row: Row) -> Any:
        value = row[key]
        return natural(value.lower()) if isinstance(value, str) else len(value) if isinstance(value, list) else value

    known = [row for row in rows if row[key] == row[key] and row[key] not in ("", [])]
    return sorted(known, key=rank, reverse=down) + [row for row in rows if not any(row is one for one in known)]


def cell(row: Row, head: str) -> str:
    """The row's text in a column, "" where its value is unknown."""
    key, _, form = COLUMNS[head]
    value = row[key]
    if head == "Mem" and row["status"] is Status.OOM:
        return "OOM"
    if isinstance(value, list):
        return "; ".join(value)
    return "" if value != value else form(value) if callable(form) else form.format(value) if form else str(value)


def texts(rows: Sequence[Row], heads: Sequence[str] = ()) -> DataFrame:
    """The cells of all rows in these columns, by default in all."""
    return frame_of(rows, {head: partial(cell, head=head) for head in heads or COLUMNS})


def to_csv(rows: Sequence[Row], heads: Sequence[str] = ()) -> str:
    """The table as CSV, by default with all columns."""
    return csv_text(texts(rows, heads))


def markdown(rows: Sequence[Row], heads: Sequence[str] = (), sort: str = "") -> str:
    """The table in Markdown, its columns aligned, and a line for each problem of a run below it.

    Without `heads` the columns that hold anything, as many as fit in WIDTH characters, that of `sort` in any case; the
    notes, cut to what is left, are the last.
    """
    table = texts(rows, heads or _fitting(rows, "TFLOPs" if sort == "speed" else sort)).map(_escaped)
    if table.columns[-1] == "Notes":
        left = max(30, WIDTH - sum(_widths(table)[:-1]) - 3 * len(table.columns) - 1)
        table["Notes"] = [_escaped(_cut(row, left)) for row in rows]
    sides = [str.rjust if COLUMNS[head][2] else str.ljust for head in table]
    widths = _widths(table)

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(side(text, n) for side, text, n in zip(sides, cells, widths, strict=True))} |"

    rule = ["-" * (n - 1) + (":" if side is str.rjust else "-") for side, n in zip(sides, widths, strict=True)]
    lines = [line(list(table)), line(rule), *map(line, table.itertuples(index=False))]
    wrong = [_escaped(short(f"! {row['name']}: {text}", 2 * WIDTH)) for row in rows for text in row["problems"]]
    return "\n".join([*lines, *([""] if wrong else []), *wrong]) + "\n"


def _fitting(rows: Sequence[Row], first: str) -> list[str]:
    """The columns that hold anything, the most useful ones first, while they fit beside 30 characters of notes."""
    useful = [first, "Sec/it", "TFLOPs", "GPUs", "Size", "Mem", "DP", "TP", "PP", "GBS", "MBS", "Loss", "Iterations"]
    table, left = texts(rows), WIDTH - 4 - min(30, max(len(row["notes"]) for row in rows))
    chosen = list[str]()
    for head in dict.fromkeys(head for head in [*useful, "Tokens/s"] if head not in ("", "Notes")):
        width = _widths(table[[head]])[0] + 3
        if table[head].any() and (width <= left or head == first):
            chosen.append(head)
            left -= width
    return [*sorted(chosen, key=list(COLUMNS).index), "Notes"]


def _cut(row: Row, most: int) -> str:
    """The notes in so many characters: of a long name the middle is left out, what follows it where it is long too."""
    rest = row["notes"].removeprefix(row["name"])
    rest = rest if len(row["notes"]) <= most or 2 * len(rest) <= most else ""
    return middle(row["name"], most - len(rest)) + rest


def _widths(table: DataFrame) -> list[int]:
    return [max(3, len(head), *table[head].str.len()) for head in table]


def _escaped(text: str) -> str:
    return html.escape(one_line(text), quote=False).replace("|", "\\|")


def to_html(rows: Sequence[Row], heads: Sequence[str] = ()) -> Html:
    """The table as a piece of HTML, each number with its value, to sort by.

    By default where the run lies, its status, and all other columns that hold anything; the notes repeat those.
    """
    table = texts(rows, heads)
    chosen = heads or dict.fromkeys(["Source", "Status", *(h for h in table if h != "Notes" and table[h].any())])

    def kind(head: str, text: str = "") -> Html:
        return Html(f' class="text{" long" * (len(text) > 30)}"' if not COLUMNS[head][2] else "")

    def shown(row: Row, head: str) -> Html:
        value, text = row[COLUMNS[head][0]], cell(row, head)
        is_number = isinstance(value, int | float) and value == value
        data = Html(f' data-value="{value!r}"' if is_number else "")
        return Html.of("<td{}{}>{}</td>", kind(head, text), data, text)

    titles = [Html.of('<th{} tabindex="0" role="button">{}</th>', kind(head), head) for head in chosen]
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
    heads = ("Run", "GPUs", "Size", "DP", "TP", "PP", "MBS", "GBS", "Mem (GiB)", "Sec/it", "±", rate)
    return values(rows, (*heads, "Losses", "Outcome")).rename(columns={"Losses": "Loss", "Outcome": "Notes"})


def write_iterations(runs: Sequence[Measurement], path: Path) -> None:
    """All iterations of all runs as CSV, after the columns `file` and `run`; what a log does not print is empty."""
    import pandas as pd

    tables, seen = list[DataFrame](), Counter[Path]()
    for source, table in ((m.log.source, m.log.iterations) for m in runs):
        seen[source] += 1
        # whole numbers stay whole where another log lacks the column
        tables.append(table.astype({name: "Int64" for name in table.select_dtypes("int64")}))
        tables[-1].insert(0, "file", str(source))
        tables[-1].insert(1, "run", seen[source])
    path.write_text(csv_text(pd.concat(tables)) if tables else "", encoding="utf-8")


def parse_text(runs: Sequence[Measurement]) -> str:
    """Each run in three lines, with one for each of its first problems; those of one file with their numbers."""
    texts, seen, in_file = list[str](), Counter[Path](), Counter(m.log.source for m in runs)
    for m in runs:
        seen[m.log.source] += 1
        number = f", run {seen[m.log.source]} of {in_file[m.log.source]}" if in_file[m.log.source] > 1 else ""
        texts.append("\n  ".join(filter(None, _lines(m, number))))
    return "\n".join(texts)


def _lines(m: Measurement, number: str) -> list[str]:
    values, log = m.to_json(), m.log
    held_out = log.validation["lm_loss"].iloc[-1:].dropna() if len(log.validation) else ()
    given = (
        (f"{len(log.iterations)} iterations{{}}", extent(m)),
        ("{:.4g} s/it", values["sec_per_it"]),
        *((f"{{:.1f}} TFLOP/s/GPU {name}", rate) for name, rate in values["tflops"].items()),
        ("{:.2f} GiB", values["max_memory_gib"]),
        ("loss {:.4f}", values["last_loss"]),
        *(("validation loss {:.4f}", loss) for loss in held_out),
    )
    places = (("node ", log.hosts), ("GPU ", log.gpus), ("--exclude=", [log.exclude] if log.exclude else []))
    wrong, most = [f"problem: {problem}" for problem in log.problems], 4
    for place, problem in enumerate(log.problems):
        wrong[place] += f"\n    {short(problem.evidence)}" if problem.evidence not in ("", log.evidence) else ""
    wrong[most:] = [f"{len(wrong) - most} more problems, which --json has"] if len(wrong) > most else []
    basis = f", {log.status_basis}" if log.status_basis else ""
    return [
        f"{log.source}{number}: {log.status} ({log.dialect}){basis}",
        ", ".join(form.format(value) for form, value in given if value is not None),
        log.evidence,
        values["caveat"],
        ", ".join(word + ", ".join(found) for word, found in places if found),
        *log.collectives,
        *wrong,
    ]


def extent(m: Measurement) -> str:
    """ " (10 to 400)": the numbers of a log's first and last iteration; "" where unknown, or where it has no others."""
    ends = m.log.first_iteration, m.log.last_iteration
    return "" if None in ends or ends == (1, len(m.log.iterations)) else f" ({ends[0]} to {ends[1]})"
