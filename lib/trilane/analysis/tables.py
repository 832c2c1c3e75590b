"""Runs as tables: for notebooks, in Markdown that fits a terminal, in CSV, and in HTML to be sorted."""

import html
from collections.abc import Collection, Iterator, Sequence

from trilane.analysis.fleet import COLUMNS, FASTEST, SPEED, Row, cells, size
from trilane.analysis.measure import Measurement
from trilane.utils.numbers import percent
from trilane.utils.tables import DataFrame, Html, csv_text, middle, one_line, short
from trilane.workspace.status import Status

WIDTH = 100  # characters of a row in text
FOR_NOTES = 30  # of them for the notes, if they are as long
TABLE = '<table class="sortable{}">\n<thead><tr>{}</tr></thead>\n<tbody>\n{}\n</tbody>\n</table>'
LONG = 30  # characters of a cell that may wrap
# as many of them as have a value and fit, the first before the last
IN_TEXT = (
    *("Sec/it", "TFLOPs", "GPUs", "Size", "Mem", "DP", "TP", "PP", "GBS", "MBS"),
    *("Loss", "Iterations", "Tokens/s"),
)


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
                "Sec/it": m.sec_per_it,
                "±": percent(m.spread, 0),
                rate: round(m.flops_per_s_per_gpu / scale, 1),
                "Loss": f"{m.first_loss:.2f} → {m.last_loss:.2f}" if m.last_loss == m.last_loss else "",
                "Notes": ", ".join(filter(None, (m.status, m.note))),
            }
        )
    return pd.DataFrame(rows)


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
    """The columns of IN_TEXT that have a value, as many as fit before the notes."""
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
    return csv_text(pd.DataFrame([cells(row, chosen) for row in rows], columns=list(chosen)))


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
    return Html.of(TABLE, " wide", titles, body)


def _html_cells(row: Row, heads: Sequence[str]) -> Iterator[Html]:
    for head, text in zip(heads, cells(row, heads), strict=True):
        value = row[COLUMNS[head].key]
        is_number = isinstance(value, int | float) and value == value
        data = Html(f' data-value="{value!r}"' if is_number else "")
        yield Html.of("<td{}{}>{}</td>", _class(head, len(text) > LONG), data, text)


def _class(head: str, is_long: bool = False) -> Html:
    return Html(f' class="text{" long" * is_long}"' if COLUMNS[head].is_text else "")
