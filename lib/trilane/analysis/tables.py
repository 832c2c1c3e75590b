"""Runs as rows, and rows as tables: of `trilane logs table` and `logs parse`, of notebooks, in CSV and HTML."""

import html
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
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


def size(parameters: float) -> str:
    """A number of parameters in short: 181B, 1.3B, 350M."""
    for unit, word in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= 0.9995 * unit:
            return f"{parameters / unit:.{0 if parameters >= 9.95 * unit else 1}f}{word}"
    return f"{parameters:.0f}"


# Each column of a table: the key of a row, by which rows are sorted, and a number's form; "" is text.
COLUMNS: Mapping[str, tuple[str, str | Callable[[Any], str]]] = {
    "Run": ("run_name", ""),
    "GPUs": ("gpus", "{:.0f}"),
    "Size": ("parameters", size),
    **{name: (name.lower(), "{:.0f}") for name in ("DP", "TP", "PP", "MBS", "GBS")},
    "Mem": ("memory_bytes", lambda value: f"{value / 2**30:.1f}GiB"),
    "Sec/it": ("sec_per_it", "{:.4g}"),
    "±": ("spread", partial(percent, digits=0)),
    "TFLOPs": ("tflops", lambda value: f"{value:.2f}" if value >= 1 else f"{value:.3g}"),
    **{head: (head.lower(), percent) for head in ("MFU", "HFU", "Lost", "Bubble", "Waits")},
    "Iterations": ("iterations", "{:.0f}"),
    "Loss": ("loss", "{:.4g}"),
    "Tokens/s": ("tokens_per_s", "{:.0f}"),
    "Status": ("status", ""),
    "First": ("first_iteration", "{:.0f}"),
    "Last": ("last_iteration", "{:.0f}"),
    **{"Skipped": ("skipped", "{:.0f}"), "NaN": ("nan_iterations", "{:.0f}"), "Norm": ("grad_norm", "{:.4g}")},
    **{"Largest norm": ("grad_norm_max", "{:.4g}"), "Scale": ("loss_scale", "{:.0f}")},
    "Reductions": ("loss_scale_drops", "{:.0f}"),
    **{name: (name.lower(), "") for name in ("Date", "Dialect", "Problems", "Cause", "Node", "Exclude")},
    **{"Mem (GiB)": ("memory_gib", "{:.2f}"), "GFLOPs": ("gflops", "{:.1f}"), "Losses": ("losses", "")},
    **{
        "Left out": ("left_out", ""),
        "Outcome": ("outcome", ""),
        "Remarks": ("note", ""),
        "Source": ("source", ""),
        "Notes": ("notes", ""),
    },
}
TABLE = (
    "Run",
    "GPUs",
    "Size",
    "DP",
    "TP",
    "PP",
    "MBS",
    "GBS",
    "Mem",
    "Sec/it",
    "±",
    "TFLOPs",
    "Loss",
    "Status",
    "Remarks",
)


def rows_of(runs: Sequence[Measurement], root: Path | None = None) -> list[dict[str, Any]]:
    """The rows of runs, in their order, each at its place below `root`: of run folders, else of their logs.

    Without `root` that is the folder that holds all of them. Where two have one name, the name is the place.
    """
    places = [m.log.source.parent if m.plan else m.log.source for m in runs]
    root = root or Path(os.path.commonpath([place.parent for place in places] or [Path()]))
    seen, rows = Counter[Path](), list[dict[str, Any]]()
    for m, place in zip(runs, places, strict=True):
        seen[place] += 1
        again = f" run {seen[place]}" if seen[place] > 1 else ""
        source = place.name if place == root else os.path.relpath(place, root)
        names = {"source": source + again, "name": place.name + again, "run": seen[place]}
        rows.append({**names, **_row(m)})
    alike = Counter(row["name"] for row in rows)
    for row in rows:
        row["name"] = row["source"] if alike[row["name"]] > 1 else row["name"]
        failure = row["status"] if row["status"] is not Status.COMPLETED else ""
        row["notes"] = ", ".join(filter(None, (row["name"], failure, row["note"])))
    return rows


def _row(m: Measurement) -> dict[str, Any]:
    c, log = m.config, m.log
    at = log.clock[-1][1] if log.clock else log.source.stat().st_mtime if log.source.exists() else math.nan
    numbers = {"gpus": c.gpus, "parameters": c.parameters, "mbs": c.mbs, "gbs": c.gbs}
    # a parallelism of one is known only where the GPUs are
    numbers |= {name: n if c.gpus or n > 1 else 0 for name in ("dp", "tp", "pp") if (n := getattr(c, name))}
    ends = {"first_iteration": log.first_iteration, "last_iteration": log.last_iteration}
    return {
        "run_name": m.name,
        **{name: number or math.nan for name, number in numbers.items()},
        "memory_bytes": m.memory_bytes,
        "sec_per_it": m.sec_per_it,
        "spread": m.spread,
        "memory_gib": m.memory_bytes / 2**30,
        "tflops": m.flops_per_s_per_gpu / 1e12,
        "gflops": m.flops_per_s_per_gpu / 1e9,
        "mfu": m.utilization.get("mfu", math.nan),
        "hfu": m.utilization.get("hfu", math.nan),
        "lost": m.lost_share,
        "bubble": m.bubble,
        "waits": m.waited,
        "status": m.status,
        "dialect": log.dialect,
        "iterations": len(log.iterations),
        **{name: math.nan if number is None else number for name, number in ends.items()},
        "loss": m.last_loss,
        "tokens_per_s": m.tokens_per_s,
        **asdict(m.numerics),
        # that of the last iteration's line, else of the file; later than 2096 it is a damaged one
        "date": f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M}" if 0 < at < 4e9 else "",
        "problems": [str(problem) for problem in log.problems],
        "cause": "" if m.status is Status.COMPLETED else "; ".join([log.evidence, *log.collectives]),
        "hosts": list(log.hosts),
        "node": ", ".join((*log.hosts, *(f"GPU {gpu}" for gpu in log.gpus))),
        "exclude": log.exclude,
        "left_out": m.window.sentence.removeprefix("left out: "),
        "losses": f"{m.first_loss:.2f} → {m.last_loss:.2f}" if m.last_loss == m.last_loss else "",
        "outcome": ", ".join(filter(None, (m.status, m.note))),
        "note": m.note,
    }


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
    key, form = COLUMNS[head]
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
    sides = [str.rjust if COLUMNS[head][1] else str.ljust for head in table]
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
        return Html(f' class="text{" long" * (len(text) > 30)}"' if not COLUMNS[head][1] else "")

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
        key, form = COLUMNS[head]
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
