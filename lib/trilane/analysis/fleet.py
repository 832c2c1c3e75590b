"""A fleet of runs as rows: the columns of the BigScience chronicles, then what hundreds of logs are asked."""

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trilane.analysis.measure import KEEP, Measurement
from trilane.analysis.parallel import below, measure_path, on_all_cores
from trilane.utils.files import natural
from trilane.utils.validation import require_folder, require_known
from trilane.workspace.status import Status

Row = Mapping[str, Any]  # Measurement.row(), where the run lies, and what its log shows


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
NAMED = 12  # of many runs that a sentence has
MOST_S = 4e9  # seconds since 1970, in 2096: a later date is a damaged one
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
    rows = [row_of(m, place, n) for n, m in enumerate(runs, 1) if not len(m.log.bandwidth)]
    return rows, "" if len(rows) == len(runs) else f"log={path}: a bandwidth benchmark"


def rows_of(runs: Sequence[Measurement]) -> list[Row]:
    """The rows of runs, in their order, each at its place below the folder that holds all of them."""
    places, seen = [str(m.log.source) for m in runs], Counter[str]()
    root, rows = os.path.commonpath([os.path.dirname(place) for place in places] or [""]), list[Row]()
    for m, place in zip(runs, places, strict=True):
        seen[place] += 1
        rows.append(row_of(m, os.path.relpath(place, root or "."), seen[place]))
    return rows


def row_of(m: Measurement, place: str, number: int = 1) -> Row:
    """The row of a run, the one of that `number` in its file, which lies at `place`."""
    log, again = m.log, f" run {number}" if number > 1 else ""
    at = log.clock[-1][1] if log.clock else log.source.stat().st_mtime if log.source.exists() else math.nan
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
        # that of the last iteration's line, else of the file
        "date": f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M}" if 0 < at < MOST_S else "",
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


def size(parameters: float) -> str:
    """A number of parameters in short: 181B, 1.3B, 350M."""
    for unit, word in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= 0.9995 * unit:
            value = parameters / unit
            return f"{value:.0f}{word}" if value >= 9.95 else f"{value:.1f}{word}"
    return _number("{:.0f}")(parameters)


def first_of(texts: Sequence[str]) -> list[str]:
    """The first of many texts, and how many more there are."""
    more = [f"{len(texts) - NAMED} more"] if len(texts) > NAMED else []
    return [*texts[:NAMED], *more]


def numbered(runs: Sequence[Measurement]) -> list[Measurement]:
    """The runs, named by a number and what is known: file names are long, and a file may hold several runs."""
    named = []
    for number, m in enumerate(runs, 1):
        c = m.config
        known = f" tp{c.tp}-pp{c.pp}-dp{c.dp}" + f"-mbs{c.mbs}" * (c.mbs > 0) if c.gpus else f" {m.log.dialect}"
        named.append(m if m.plan else replace(m, name=f"{number}{known}"))
    return named
