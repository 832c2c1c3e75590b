"""Runs as rows, and rows as tables: of `trilane logs table` and `logs parse`, of notebooks, in CSV
and HTML.
"""

import html
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from trilane.analysis.measure import Measurement
from trilane.utils.files import natural
from trilane.utils.numbers import percent, size_text
from trilane.utils.tables import DataFrame, Html, csv_text, frame_of, middle, one_line
from trilane.utils.validation import require_known
from trilane.workspace.status import Status

Row = Mapping[str, Any]  # of a run: numbers in base units (`tflops` excepted), NaN where unknown


def _config(m: Measurement, name: str) -> float:
    value: float = getattr(m.config, name)
    # a parallelism of one is known only where the GPUs are
    open = name in ("dp", "tp", "pp") and value == 1 and not m.config.gpus
    return math.nan if open or not value else value


def _date(m: Measurement) -> str:
    """That of the last iteration's line, else of a run folder's log: of a copied file it is that of
    the copy.
    """
    at, path = m.log.printed_at, m.log.source
    if math.isnan(at) and m.plan and path.exists():
        at = path.stat().st_mtime
    return (
        f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M}" if 0 < at < 4e9 else ""
    )  # after 2096 it is damaged


def _cause(m: Measurement) -> str:
    return "; ".join(
        (m.log.evidence, *m.log.collectives) * (m.status is not Status.COMPLETED) + m.log.own
    )


# Each column of a table: the key of a row, by which rows are sorted, what it is of a run, and a
# number's form; "" is text.
COLUMNS: Mapping[
    str, tuple[str, str | Callable[[Measurement], Any], str | Callable[[Any], str]]
] = {
    "Run": ("run_name", "name", ""),
    "GPUs": ("gpus", partial(_config, name="gpus"), "{:.0f}"),
    "Size": ("parameters", partial(_config, name="parameters"), size_text),
    **{
        n.upper(): (n, partial(_config, name=n), "{:.0f}") for n in ("dp", "tp", "pp", "mbs", "gbs")
    },
    "Mem": ("memory_bytes", "memory_bytes", lambda value: f"{value / 2**30:.1f}GiB"),
    "Mem (GiB)": ("memory_gib", lambda m: m.memory_bytes / 2**30, "{:.2f}"),
    "Sec/it": ("sec_per_it", "sec_per_it", "{:.4g}"),
    "±": ("spread", "spread", partial(percent, digits=0)),
    "TFLOPs": ("tflops", lambda m: m.flops_per_s_per_gpu / 1e12, "{:.4g}"),
    "MFU": ("mfu", lambda m: m.utilization.get("mfu", math.nan), percent),
    "HFU": ("hfu", lambda m: m.utilization.get("hfu", math.nan), percent),
    "Lost": ("lost", "lost_share", percent),
    "Iterations": ("iterations", lambda m: len(m.log.iterations), "{:.0f}"),
    "Loss": ("loss", "last_loss", "{:.4g}"),
    "Losses": (
        "losses",
        lambda m: f"{m.first_loss:.2f} → {m.last_loss:.2f}" * (m.last_loss == m.last_loss),
        "",
    ),
    "Tokens/s": ("tokens_per_s", "tokens_per_s", "{:.0f}"),
    "Status": ("status", "status", ""),
    "First": ("first_iteration", "log.first_iteration", "{:.0f}"),
    "Last": ("last_iteration", "log.last_iteration", "{:.0f}"),
    "Skipped": ("skipped", "skipped", "{:.0f}"),
    "Invalid": ("nan_iterations", "nan_iterations", "{:.0f}"),
    "Date": ("date", _date, ""),
    "Dialect": ("dialect", "log.dialect", ""),
    "Problems": ("problems", lambda m: [str(problem) for problem in m.log.problems], ""),
    "Cause": ("cause", _cause, ""),
    "Node": ("hosts", lambda m: list(m.log.hosts), ""),
    "Exclude": ("exclude", "log.exclude", ""),
    "Not counted": ("left_out", lambda m: m.window.sentence.removeprefix("left out: "), ""),
    "Outcome": ("outcome", lambda m: ", ".join(filter(None, (m.status, m.note))), ""),
    "Source": ("source", "log.source", ""),
    "Notes": ("notes", "note", ""),
}


def rows_of(runs: Sequence[Measurement], root: Path | None = None) -> list[dict[str, Any]]:
    """The rows of runs, in their order; a run's name is its folder, else its log, below `root`.

    Without `root` that is the folder that holds all of them. The runs of one log are numbered.
    """
    places = [m.log.source.parent if m.plan else m.log.source for m in runs]
    root, seen, rows = (
        root or Path(os.path.commonpath([p.parent for p in places] or [Path()])),
        Counter[Path](),
        [],
    )
    readers = {
        key: attrgetter(read) if isinstance(read, str) else read
        for key, read, _ in COLUMNS.values()
    }
    for m, place in zip(runs, places, strict=True):
        seen[place] += 1
        name = place.name if place == root else os.path.relpath(place, root)
        name += f" run {seen[place]}" * (seen[place] > 1)
        failure = "" if m.status is Status.COMPLETED else m.status
        named = {"source": name, "notes": ", ".join(filter(None, (name, failure, m.note)))}
        rows.append(
            {key: read(m) for key, read in readers.items()}
            | named
            | {"name": name, "run": seen[place]}
        )
    return rows


def column(name: str) -> str:
    """The column of that name, in any case, by which rows are sorted, or `speed`; ValueError with
    all names for another one.
    """
    known = {"speed": "speed"} | {head.lower(): head for head in COLUMNS}
    require_known("sort", name.lower(), list(known))
    return known[name.lower()]


def ordered(rows: Sequence[Any], by: str) -> list[Any]:
    """The rows by a column, rising; by `speed` the fastest first. Those without a value are last in
    any case.
    """
    # TFLOPs alone compare runs of different sizes
    key = "tflops" if by == "speed" else COLUMNS[by][0]
    known = [row for row in rows if _is_known(row[key])]
    texts = isinstance(known[0][key], str) if known else False
    found = sorted(
        known,
        key=lambda row: natural(row[key].lower()) if texts else row[key],
        reverse=by == "speed",
    )
    return found + [row for row in rows if not _is_known(row[key])]


def _is_known(value: Any) -> bool:
    return value == value and value not in (None, "", [])


def cell(row: Row, head: str) -> str:
    """The row's text in a column, "" where its value is unknown."""
    key, _, form = COLUMNS[head]
    value = row[key]
    if head == "Mem" and row["status"] is Status.OOM:
        return "OOM"
    if isinstance(value, list):
        return "; ".join(value)
    if not _is_known(value):
        return ""
    return form(value) if callable(form) else form.format(value) if form else str(value)


def values(rows: Sequence[Row], heads: Sequence[str] = ()) -> DataFrame:
    """The rows in these columns, by default in all, for a notebook or a file: numbers are numbers,
    but for shares.
    """

    def value(row: Row, head: str) -> Any:
        key, _, form = COLUMNS[head]
        return row[key] if isinstance(form, str) and form else cell(row, head)

    table = frame_of(rows, {head: partial(value, head=head) for head in heads or COLUMNS})
    return table.convert_dtypes()  # 8 stays 8 where another has none


def tidy(rows: Sequence[Row]) -> DataFrame:
    """A column for each number, named by its key, and for what a log tells in words; NaN where a
    number is unknown.
    """
    texts = (
        "Run",
        "Status",
        "Dialect",
        "Source",
        "Cause",
        "Node",
        "Exclude",
        "Problems",
        "Not counted",
    )
    readers = {
        key: itemgetter(key) if form else partial(cell, head=head)
        for head, (key, _, form) in COLUMNS.items()
    }
    kept = {
        key: form
        for head, (key, _, form) in COLUMNS.items()
        if (form or head in texts) and head != "Mem"
    }
    numbers = {key: float for key, form in kept.items() if form}
    table = frame_of(rows, {key: readers[key] for key in kept}).astype(numbers)
    whole = {key: int for key in numbers if len(table) and (table[key] % 1 == 0).all()}
    return table.astype(whole).rename(columns={"run_name": "run"})


def folded(summary: str, table: Html) -> Html:
    """A table behind its summary, which a click opens."""
    return Html.of("<details><summary>{}</summary>{}</details>", summary, table)


def markdown(rows: Sequence[Row], sort: str = "") -> str:
    """The table in Markdown, its columns aligned: those of the chronicles' tables and that of
    `sort`, where they hold anything; the notes, of which the middle is left out, are the last.
    """
    usual = (
        "GPUs",
        "Size",
        "DP",
        "TP",
        "PP",
        "MBS",
        "GBS",
        "Mem",
        "Sec/it",
        "TFLOPs",
        "Loss",
        "Notes",
    )
    chosen = [head for head in COLUMNS if head in (*usual, sort)]
    table = frame_of(rows, {head: partial(cell, head=head) for head in chosen})
    table = table.map(lambda text: html.escape(one_line(text), quote=False).replace("|", "\\|"))
    table = table[[head for head in table if table[head].any()]].map(partial(middle, most=30))
    sides = [str.rjust if COLUMNS[head][2] else str.ljust for head in table]
    widths = [max(3, len(head), *table[head].str.len()) for head in table]
    rule = [
        "-" * (n - 1) + (":" if side is str.rjust else "-")
        for side, n in zip(sides, widths, strict=True)
    ]
    lines = list[str]()
    for cells in (list(table), rule, *table.itertuples(index=False)):
        padded = (side(text, n) for side, text, n in zip(sides, cells, widths, strict=True))
        lines.append(f"| {' | '.join(padded)} |")
    return "\n".join(lines) + "\n"


def write_iterations(runs: Sequence[Measurement], path: Path) -> None:
    """All iterations of all runs as CSV, after the columns `file` and `run`; what a log does not
    print is empty.
    """
    import pandas as pd

    # whole numbers stay whole where another log lacks the column
    tables = [
        m.log.iterations.astype(dict.fromkeys(m.log.iterations.select_dtypes("int64"), "Int64"))
        for m in runs
    ]
    keys = [(str(m.log.source), row["run"]) for m, row in zip(runs, rows_of(runs), strict=True)]
    every = pd.concat(tables, keys=keys, names=["file", "run"]).reset_index(["file", "run"])
    path.write_text(csv_text(every), encoding="utf-8")


def parse_text(runs: Sequence[Measurement]) -> str:
    """Each run in a few lines: how it ended, its numbers, the evidence, problems; those of one file
    are numbered.
    """
    in_file, lines = Counter(m.log.source for m in runs), list[str]()
    heads = ("Iterations", "First", "Last", "Sec/it", "TFLOPs", "Mem", "Loss", "Node", "Exclude")
    for m, row in zip(runs, rows_of(runs), strict=True):
        log, many = m.log, in_file[m.log.source]
        number = f", run {row['run']} of {many}" * (many > 1)
        lines.append(f"{log.source}{number}: {log.status} ({log.dialect})")
        facts = ", ".join(f"{head} {text}" for head in heads if (text := cell(row, head)))
        found = [facts, log.evidence, log.caveat, *log.collectives, *log.own]
        lines += [
            f"  {one}"
            for one in (*found, *(f"problem: {text}" for text in row["problems"][:4]))
            if one
        ]
    return "\n".join(lines)
