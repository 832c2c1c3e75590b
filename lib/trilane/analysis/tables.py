"""The runs below a folder as a table: the columns of the BigScience chronicles, then what a fleet of logs is asked."""

import html
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trilane.analysis.measure import KEEP, Measurement
from trilane.analysis.parallel import below, measure_path, on_all_cores
from trilane.utils.files import natural
from trilane.utils.tables import DataFrame, Html, middle, one_line, percent, short
from trilane.utils.validation import require_folder, require_known
from trilane.workspace.status import Status

Row = Mapping[str, Any]  # Measurement.row(), where the run lies, and what its log says
WIDTH = 100  # characters of a row in text
FOR_NOTES = 30  # of them for the notes, if they are as long


def _number(form: str) -> Callable[[float], str]:
    return lambda value: form.format(value) if value == value else ""


def _rate(value: float) -> str:
    return _number("{:.2f}" if value >= 1 else "{:.3g}")(value)


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column: the value `key` of a row, by which rows are sorted, as a person reads it; text stands on the left."""

    key: str
    text: Callable[[Any], str] = str
    is_text: bool = False


COLUMNS = {
    "GPUs": Column(key="gpus", text=_number("{:.0f}")),
    "Size": Column(key="parameters", text=lambda value: size(value)),
    **{name: Column(key=name.lower(), text=_number("{:.0f}")) for name in ("DP", "TP", "PP", "MBS", "GBS")},
    "Mem": Column(key="memory_bytes", text=lambda value: _number("{:.1f}GiB")(value / 2**30)),
    "Sec/it": Column(key="sec_per_it", text=_number("{:.4g}")),
    "TFLOPs": Column(key="tflops", text=_rate),
    "Iterations": Column(key="iterations"),
    "Loss": Column(key="loss", text=_number("{:.4g}")),
    "Tokens/s": Column(key="tokens_per_s", text=_number("{:.0f}")),
    "Status": Column(key="status", is_text=True),
    "First": Column(key="first_iteration", text=_number("{:.0f}")),
    "Last": Column(key="last_iteration", text=_number("{:.0f}")),
    "Date": Column(key="date", is_text=True),
    "Dialect": Column(key="dialect", is_text=True),
    "Problems": Column(key="problems", text="; ".join, is_text=True),
    "Cause": Column(key="cause", is_text=True),
    "Exclude": Column(key="exclude", is_text=True),
    "Remarks": Column(key="note", is_text=True),
    "Source": Column(key="source", is_text=True),
    "Notes": Column(key="notes", is_text=True),
}
# as many of them as hold anything and fit, the first before the last
IN_TEXT = (
    *("Sec/it", "TFLOPs", "GPUs", "Size", "Mem", "DP", "TP", "PP", "GBS", "MBS"),
    *("Loss", "Iterations", "Tokens/s"),
)
TABLE = '<table class="sortable wide">\n<thead><tr>{}</tr></thead>\n<tbody>\n{}\n</tbody>\n</table>'
LONG = 30  # characters of a cell that may wrap
SPEED, FASTEST = "speed", "TFLOPs"  # the fastest first, by the rate that alone compares runs of different sizes


def read_folder(folder: Path | str) -> tuple[list[Row], list[str]]:
    """The runs at and below a folder, by path, and why files were left out; ValueError where there is no folder."""
    folder = Path(folder)
    require_folder("folder", folder)
    found = on_all_cores(_read, [(path, folder) for path in below(folder)])
    rows = sorted((row for part, _ in found for row in part), key=lambda row: natural(row["source"]))
    names = Counter(row["name"] for row in rows)
    named = [row if names[row["name"]] == 1 else _with_name(row, row["source"]) for row in rows]
    return named, [reason for _, reason in found if reason]


def _read(path: Path, folder: Path) -> tuple[list[Row], str]:
    try:
        runs = measure_path(path, keep=KEEP)
    except (ValueError, OSError) as error:
        return [], str(error)
    place = str(path.relative_to(folder)) if path != folder else path.name
    rows = [_row(m, place, n) for n, m in enumerate(runs, 1) if not len(m.log.bandwidth)]
    return rows, "" if len(rows) == len(runs) else f"log={path}: a bandwidth benchmark"


def _row(m: Measurement, place: str, number: int) -> Row:
    log, again = m.log, f" run {number}" if number > 1 else ""
    date = datetime.fromtimestamp(log.source.stat().st_mtime, UTC) if log.source.exists() else None
    row = {
        "source": place + again,
        **m.row(),
        "run": number,
        "dialect": log.dialect,
        "iterations": len(log.iterations),
        "first_iteration": math.nan if log.first_iteration is None else log.first_iteration,
        "last_iteration": math.nan if log.last_iteration is None else log.last_iteration,
        "loss": m.last_loss,
        "tokens_per_s": m.tokens_per_s,
        "date": f"{date:%Y-%m-%d %H:%M}" if date else "",
        "problems": [str(problem) for problem in log.problems],
        "cause": "" if m.status is Status.COMPLETED else "; ".join([log.evidence, *log.collectives]),
        "hosts": list(log.hosts),
        "exclude": log.exclude,
        "note": m.note,
    }
    return _with_name(row, Path(place).name + again)


def _with_name(row: Row, name: str) -> Row:
    status = row["status"] if row["status"] is not Status.COMPLETED else ""
    return {**row, "name": name, "notes": ", ".join(filter(None, (name, status, row["note"])))}


def column(name: str, field: str = "columns") -> str:
    """The column of that name, in any case; ValueError with all names for another one."""
    known = {head.lower(): head for head in COLUMNS}
    require_known(field, name.lower(), [*known, *([SPEED] if field == "sort" else [])])
    return known.get(name.lower(), SPEED)


def ordered(rows: Sequence[Row], by: str, reverse: bool = False) -> list[Row]:
    """The rows by a column, rising, or by `speed`, the fastest first; those without a value last in any case."""
    key, down = (COLUMNS[FASTEST].key, not reverse) if by == SPEED else (COLUMNS[by].key, reverse)
    known = [row for row in rows if _is_known(row[key])]
    last = [row for row in rows if not _is_known(row[key])]
    return sorted(known, key=lambda row: _rank(row[key]), reverse=down) + last


def _is_known(value: Any) -> bool:
    return bool(value == value and value not in ("", []))


def _rank(value: Any) -> Any:
    return natural(value.lower()) if isinstance(value, str) else len(value) if isinstance(value, list) else value


def cells(row: Row, heads: Sequence[str] = tuple(COLUMNS)) -> list[str]:
    """The row's texts in these columns."""
    texts = [COLUMNS[head].text(row[COLUMNS[head].key]) for head in heads]
    return ["OOM" if head == "Mem" and row["status"] is Status.OOM else t for head, t in zip(heads, texts, strict=True)]


def frame(runs: Collection[Measurement]) -> DataFrame:
    """The runs as a DataFrame, a row each, memory in GiB; GFLOPs where none reaches a TFLOP/s."""
    import pandas as pd

    rate, scale = ("TFLOPs", 1e12) if any(m.flops_per_s_per_gpu > 1e12 for m in runs) else ("GFLOPs", 1e9)
    rows = []
    for m in runs:
        row = m.row()
        counts = {name: int(row[name]) if row[name] == row[name] else "" for name in ("dp", "tp", "pp", "mbs", "gbs")}
        rows.append(
            {
                "Run": m.name,
                "GPUs": m.config.gpus or "",
                "Size": size(row["parameters"]),
                **{name.upper(): count for name, count in counts.items()},
                "Mem (GiB)": round(m.memory_bytes / 2**30, 2),
                "Sec/it": float(f"{m.sec_per_it:.4g}"),
                "±": percent(m.spread, 0),
                rate: round(m.flops_per_s_per_gpu / scale, 1),
                "Loss": f"{m.first_loss:.2f} → {m.last_loss:.2f}" if m.last_loss == m.last_loss else "",
                "Notes": ", ".join(filter(None, (m.status, m.note))),
            }
        )
    return pd.DataFrame(rows)


def size(parameters: float) -> str:
    """A number of parameters in short: 181B, 1.3B, 350M."""
    for unit, word in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= 0.9995 * unit:
            value = parameters / unit
            return f"{value:.0f}{word}" if value >= 9.95 else f"{value:.1f}{word}"
    return _number("{:.0f}")(parameters)


def markdown(rows: Sequence[Row], heads: Sequence[str] = (), sort: str = "") -> str:
    """The table in Markdown, its columns aligned, and a line for each problem of a run below it.

    Without `heads` the columns of IN_TEXT that hold anything, as many as fit in WIDTH characters, that of `sort` in any
    case. Notes are cut to what is left.
    """
    chosen = tuple(heads) or _fitting(rows, FASTEST if sort == SPEED else sort)
    body = [[_escaped(text) for text in cells(row, chosen)] for row in rows]
    if chosen[-1] == "Notes":
        left = max(FOR_NOTES, WIDTH - sum(_width(chosen, body)[:-1]) - 3 * len(chosen) - 1)
        body = [[*texts[:-1], _escaped(_notes(row, left, chosen))] for texts, row in zip(body, rows, strict=True)]
    widths = _width(chosen, body)
    rule = ["-" * (n - 1) + ("-" if COLUMNS[head].is_text else ":") for head, n in zip(chosen, widths, strict=True)]
    lines = [_line(chosen, chosen, widths), f"| {' | '.join(rule)} |"]
    lines += [_line(chosen, texts, widths) for texts in body]
    wrong = [_escaped(short(f"! {row['name']}: {text}", 2 * WIDTH)) for row in rows for text in row["problems"]]
    return "\n".join([*lines, *([""] if wrong else []), *wrong]) + "\n"


def _fitting(rows: Sequence[Row], first: str) -> tuple[str, ...]:
    """The columns of IN_TEXT that hold anything, as many as fit before the notes."""
    chosen, left = list[str](), WIDTH - min(FOR_NOTES, max(len(row["notes"]) for row in rows)) - 4
    for head in dict.fromkeys([*([first] if first else []), *IN_TEXT]):
        texts = [cells(row, (head,)) for row in rows]
        width = _width((head,), texts)[0] + 3
        if head != "Notes" and any(text for (text,) in texts) and (width <= left or head == first):
            chosen.append(head)
            left -= width
    return (*sorted(chosen, key=tuple(COLUMNS).index), "Notes")


def _width(heads: Sequence[str], body: Sequence[Sequence[str]]) -> list[int]:
    return [max(3, *map(len, column)) for column in zip(heads, *body, strict=True)]


def _escaped(text: str) -> str:
    return html.escape(one_line(text), quote=False).replace("|", "\\|")


def _notes(row: Row, most: int, heads: Sequence[str]) -> str:
    """The notes in that many characters: of a long name the middle is left out, and the rest as far as it fits."""
    status = row["status"] if row["status"] is not Status.COMPLETED and "Status" not in heads else ""
    for rest in ((status, row["note"]), (status, "!" if row["problems"] else "")):
        marks = "".join(f", {text}" for text in rest if text)
        if len(row["name"] + marks) <= most:
            break
    return middle(row["name"], max(most - len(marks), 4)) + marks


def _line(heads: Sequence[str], texts: Sequence[str], widths: Sequence[int]) -> str:
    sides = (str.ljust if COLUMNS[head].is_text else str.rjust for head in heads)
    return f"| {' | '.join(side(text, n) for side, text, n in zip(sides, texts, widths, strict=True))} |"


def to_csv(rows: Sequence[Row], heads: Sequence[str] = ()) -> str:
    """The table as CSV, by default with all columns."""
    import pandas as pd

    chosen = tuple(heads) or tuple(COLUMNS)
    return pd.DataFrame([cells(row, chosen) for row in rows], columns=list(chosen)).to_csv(index=False)


def to_html(rows: Sequence[Row], heads: Sequence[str] = ()) -> Html:
    """The table as a piece of HTML, each number with its value, to sort by.

    By default where the run lies, its status, and all other columns that hold anything; the notes repeat those.
    """
    holding = (
        head for head in COLUMNS if head != "Notes" and any(text for row in rows for text in cells(row, (head,)))
    )
    chosen = tuple(heads) or tuple(dict.fromkeys(["Source", "Status", *holding]))
    titles = Html.joined("", [Html.of('<th{} tabindex="0" role="button">{}</th>', _class(h), h) for h in chosen])
    body = Html.joined("\n", [Html.of("<tr>{}</tr>", Html.joined("", _html_cells(row, chosen))) for row in rows])
    return Html.of(TABLE, titles, body)


def _html_cells(row: Row, heads: Sequence[str]) -> Iterator[Html]:
    for head, text in zip(heads, cells(row, heads), strict=True):
        value = row[COLUMNS[head].key]
        is_number = isinstance(value, int | float) and value == value
        data = Html(f' data-value="{value!r}"' if is_number else "")
        yield Html.of("<td{}{}>{}</td>", _class(head, len(text) > LONG), data, text)


def _class(head: str, is_long: bool = False) -> Html:
    return Html(f' class="text{" long" * is_long}"' if COLUMNS[head].is_text else "")
