"""Runs as rows, and rows as tables: of `trilane logs table` and `logs parse`, of notebooks."""

import html
import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trilane.analysis.measure import Measurement
from trilane.utils.numbers import size_text
from trilane.utils.tables import DataFrame, csv_text, middle, one_line

# The columns of BigScience's tables, and how a run ended
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
    "Status": "status",
    "Problems": "problems",
    "Notes": "source",
}
# what `logs parse` prints of a run
PARSED = "iterations first_iteration last_iteration sec_per_it tflops memory_gib loss hosts exclude"


def frame(runs: Sequence[Measurement], root: Path | None = None) -> DataFrame:
    """A row a run, see Measurement.row(); `source` is a run's folder, else its log, below `root`
    where given. The runs of one log are numbered.
    """
    import pandas as pd

    seen: Counter[Path] = Counter()
    rows = []
    for run in runs:
        place = run.log.source.parent if run.plan else run.log.source
        source = os.path.relpath(place, root) if root else place.name
        seen[place] += 1
        if seen[place] > 1:
            source = f"{source} run {seen[place]}"
        rows.append({"run": run.name, "source": source, **run.row()})
    return pd.DataFrame(rows)


def cell(key: str, value: Any) -> str:
    """The text of a value in a column, "" where it is unknown."""
    if isinstance(value, str):
        return one_line(value)
    if value is None or math.isnan(value):
        return ""
    if key == "parameters":
        return size_text(value)
    if key == "memory_gib":
        return f"{value:.1f}GiB"
    if float(value).is_integer():
        return f"{value:.15g}"
    return f"{value:.4g}"


def markdown(table: DataFrame) -> str:
    """The table in Markdown, its columns aligned: those of BigScience's tables that hold anything;
    the middle of long texts is left out.
    """
    columns = []
    for head, key in HEADS.items():
        texts = [middle(cell(key, value)) for value in table[key]]
        texts = [html.escape(text, quote=False).replace("|", "\\|") for text in texts]
        if any(texts):
            width = max(3, len(head), *map(len, texts))
            rule = f"{'-' * (width - 1)}:"
            columns.append([text.rjust(width) for text in (head, rule, *texts)])
    lines = [f"| {' | '.join(cells)} |\n" for cells in zip(*columns, strict=True)]
    return "".join(lines)


def write_iterations(runs: Sequence[Measurement], path: Path) -> None:
    """All iterations of all runs as CSV, after the columns `file` and `run`, its number; what a log
    does not print is empty.
    """
    import pandas as pd

    tables = {(str(run.log.source), n): run.log.iterations for n, run in enumerate(runs, 1)}
    table = pd.concat(tables, names=["file", "run"]).reset_index(level=["file", "run"])
    path.write_text(csv_text(table), encoding="utf-8")


def parse_text(runs: Sequence[Measurement]) -> str:
    """Each run in a few lines: how it ended, its numbers, the evidence, problems."""
    lines = []
    for run, row in zip(runs, frame(runs, Path()).to_dict("records"), strict=True):
        log = run.log
        lines.append(f"{row['source']}: {log.status} ({log.dialect})")
        cells = {name: cell(name, row[name]) for name in PARSED.split()}
        facts = [f"{name} {text}" for name, text in cells.items() if text]
        details = [", ".join(facts), log.evidence, *log.collectives, *log.notes]
        details += [f"problem: {problem}" for problem in log.problems]
        lines += [f"  {detail}" for detail in details if detail]
    return "\n".join(lines)
