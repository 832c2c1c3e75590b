"""Runs as rows, and rows as tables: of `trilane logs table` and `logs parse`, of notebooks."""

import html
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trilane.analysis.measure import Measurement
from trilane.utils.files import natural
from trilane.utils.numbers import size_text
from trilane.utils.tables import DataFrame, csv_text, middle, one_line
from trilane.utils.validation import require_known
from trilane.workspace.status import Status

Row = Mapping[str, Any]  # of a run: numbers in base units (`tflops` excepted), NaN where unknown
# The columns of BigScience's tables, and of `logs parse`
HEADS = {
    "GPUs": "gpus",
    "Size": "parameters",
    "DP": "dp",
    "TP": "tp",
    "PP": "pp",
    "MBS": "mbs",
    "GBS": "gbs",
    "Mem": "memory_gib",
    "Sec/it": "sec_per_it",
    "TFLOPs": "tflops",
    "Loss": "loss",
    "Notes": "notes",
}
PARSED = {
    "Iterations": "iterations",
    "First": "first_iteration",
    "Last": "last_iteration",
    "Sec/it": "sec_per_it",
    "TFLOPs": "tflops",
    "Mem": "memory_gib",
    "Loss": "loss",
    "Node": "hosts",
    "Exclude": "exclude",
}
PROBLEMS = 4  # problems of a run that `logs parse` prints


def rows_of(runs: Sequence[Measurement], root: Path | None = None) -> list[dict[str, Any]]:
    """The rows of runs, in their order; `source` is a run's folder, else its log, below `root`.

    Without `root` that is the folder that holds all of them. The runs of one log are numbered.
    """
    places = [run.log.source.parent if run.plan else run.log.source for run in runs]
    if not root:
        root = Path(os.path.commonpath([place.parent for place in places] or [Path()]))
    seen: Counter[Path] = Counter()
    rows = []
    for run, place in zip(runs, places, strict=True):
        seen[place] += 1
        if place == root:
            source = place.name
        else:
            source = os.path.relpath(place, root)
        if seen[place] > 1:
            source = f"{source} run {seen[place]}"
        notes = [source, run.note]
        if run.status is not Status.COMPLETED:
            notes.insert(1, run.status)
        rows.append({**_row(run), "source": source, "notes": ", ".join(filter(None, notes))})
    return rows


def _row(run: Measurement) -> dict[str, Any]:
    log = run.log
    row: dict[str, Any] = {"run_name": run.name}
    for name in ("gpus", "parameters", "dp", "tp", "pp", "mbs", "gbs"):
        value = getattr(run.config, name)
        # a parallelism of one is known only where the GPUs are
        is_open = name in ("dp", "tp", "pp") and value == 1 and not run.config.gpus
        row[name] = math.nan if is_open or not value else value
    causes = list(log.own)
    if run.status is not Status.COMPLETED:
        causes = [log.evidence, *log.collectives, *causes]
    first = log.first_iteration
    last = log.last_iteration
    return row | {
        "memory_bytes": run.memory_bytes,
        "memory_gib": run.memory_bytes / 2**30,
        "sec_per_it": run.sec_per_it,
        "spread": run.spread,
        "tflops": run.flops_per_s_per_gpu / 1e12,
        "mfu": run.utilization.get("mfu", math.nan),
        "hfu": run.utilization.get("hfu", math.nan),
        "lost": run.lost_share,
        "iterations": len(log.iterations),
        "loss": run.last_loss,
        "tokens_per_s": run.tokens_per_s,
        "status": run.status,
        "first_iteration": math.nan if first is None else first,
        "last_iteration": math.nan if last is None else last,
        "skipped": run.skipped,
        "nan_iterations": run.nan_iterations,
        "dialect": log.dialect,
        "problems": [str(problem) for problem in log.problems],
        "cause": "; ".join(causes),
        "hosts": list(log.hosts),
        "exclude": log.exclude,
        "left_out": run.window.sentence.removeprefix("left out: "),
    }


def frame(rows: Sequence[Row]) -> DataFrame:
    """A row a run, its columns named as in JSON, memory in GiB; NaN where a number is unknown."""
    import pandas as pd

    texts = [{key: _text(value) for key, value in row.items()} for row in rows]
    table = pd.DataFrame(texts).rename(columns={"run_name": "run"})
    return table.drop(columns="memory_bytes", errors="ignore")


def _text(value: Any) -> Any:
    if isinstance(value, list):
        return "; ".join(value)
    return value


def ordered(rows: list[dict[str, Any]], by: str) -> list[dict[str, Any]]:
    """The rows by a column, rising; by `speed` the fastest first. Those without a value are last in
    any case. ValueError with all names for a column that is not known.
    """
    heads = {head.lower(): key for head, key in HEADS.items()}
    key = heads.get(by.lower(), by.lower())
    require_known("sort", key, ["speed", *rows[0]])
    if key == "speed":  # TFLOPs alone compare runs of different sizes
        return sorted(rows, key=lambda row: -row["tflops"] if _is_known(row["tflops"]) else 0.0)
    known = [row for row in rows if _is_known(row[key])]
    if all(isinstance(_text(row[key]), str) for row in known):
        known.sort(key=lambda row: natural(_text(row[key]).lower()))
    else:
        known.sort(key=lambda row: row[key])
    return known + [row for row in rows if not _is_known(row[key])]


def _is_known(value: Any) -> bool:
    return value == value and value not in ("", [])


def cell(row: Row, key: str) -> str:
    """The row's text in a column, "" where its value is unknown."""
    value = _text(row[key])
    if key == "memory_gib" and row["status"] is Status.OOM:
        return "OOM"
    if not _is_known(value):
        return ""
    if isinstance(value, str):
        return value
    if key == "parameters":
        return size_text(value)
    if key == "memory_gib":
        return f"{value:.1f}GiB"
    if value == int(value):
        return f"{value:.0f}"
    return f"{value:.4g}"


def markdown(rows: Sequence[Row], sort: str = "") -> str:
    """The table in Markdown, its columns aligned: those of BigScience's tables and that of `sort`,
    where they hold anything; the notes, of which the middle is left out, are the last.
    """
    heads = dict(HEADS)
    notes = heads.pop("Notes")
    if sort in rows[0] and sort not in HEADS.values():
        heads[sort] = sort
    heads["Notes"] = notes
    columns = []
    for head, key in heads.items():
        texts = [one_line(cell(row, key)) for row in rows]
        texts = [middle(html.escape(text, quote=False).replace("|", "\\|"), 30) for text in texts]
        if not any(texts):
            continue
        width = max(3, len(head), *map(len, texts))
        if all(isinstance(row[key], str | list) for row in rows):
            cells = [head, "-" * width, *texts]
            columns.append([text.ljust(width) for text in cells])
        else:
            cells = [head, f"{'-' * (width - 1)}:", *texts]
            columns.append([text.rjust(width) for text in cells])
    lines = [f"| {' | '.join(cells)} |\n" for cells in zip(*columns, strict=True)]
    return "".join(lines)


def write_iterations(runs: Sequence[Measurement], path: Path) -> None:
    """All iterations of all runs as CSV, after the columns `file` and `run`; what a log does not
    print is empty.
    """
    import pandas as pd

    tables = []
    seen: Counter[Path] = Counter()
    for run in runs:
        seen[run.log.source] += 1
        # whole numbers stay whole where another log lacks the column
        whole = run.log.iterations.select_dtypes("int64").columns
        table = run.log.iterations.astype(dict.fromkeys(whole, "Int64"))
        table.insert(0, "file", str(run.log.source))
        table.insert(1, "run", seen[run.log.source])
        tables.append(table)
    path.write_text(csv_text(pd.concat(tables)), encoding="utf-8")


def parse_text(runs: Sequence[Measurement]) -> str:
    """Each run in a few lines: how it ended, its numbers, the evidence, problems; those of one file
    are numbered.
    """
    in_file = Counter(run.log.source for run in runs)
    seen: Counter[Path] = Counter()
    lines = []
    for run, row in zip(runs, rows_of(runs), strict=True):
        log = run.log
        seen[log.source] += 1
        name = str(log.source)
        if in_file[log.source] > 1:
            name = f"{name}, run {seen[log.source]} of {in_file[log.source]}"
        lines.append(f"{name}: {log.status} ({log.dialect})")
        facts = [f"{head} {cell(row, key)}" for head, key in PARSED.items() if cell(row, key)]
        details = [", ".join(facts), log.evidence, *log.collectives, *log.own]
        details += [f"problem: {problem}" for problem in row["problems"][:PROBLEMS]]
        lines += [f"  {detail}" for detail in details if detail]
    return "\n".join(lines)
