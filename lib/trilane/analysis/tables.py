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
from trilane.workspace.status import Status

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


def frame(runs: Sequence[Measurement], root: Path | None = None) -> DataFrame:
    """A row a run: numbers in base units, memory in GiB, NaN where unknown; `source` is a run's
    folder, else its log, below `root` where given. The runs of one log are numbered.
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
        rows.append(_row(run, source))
    return pd.DataFrame(rows)


def _row(run: Measurement, source: str) -> dict[str, Any]:
    log = run.log
    row: dict[str, Any] = {"run": run.name, "source": source}
    row["parameters"] = run.config.shape.parameters if run.config.shape else math.nan
    for name in ("gpus", "dp", "tp", "pp", "mbs", "gbs"):
        row[name] = getattr(run.config, name) or math.nan
    if not run.config.gpus:  # then a degree of one is only a default
        row |= {name: math.nan for name in ("dp", "tp", "pp") if row[name] == 1}
    notes = [source, run.note]
    causes = list(log.notes)
    if run.status is not Status.COMPLETED:
        notes.insert(1, run.status)
        causes = [log.evidence, *log.collectives, *causes]
    left_out = [f"{number} ({reason})" for reason, number in run.window.left_out.items()]
    return row | {
        "memory_gib": run.memory_bytes / 2**30,
        "sec_per_it": run.sec_per_it,
        "tflops": run.flops_per_s_per_gpu / 1e12,
        "mfu": run.utilization.get("mfu", math.nan),
        "lost": run.lost_share,
        "loss": run.last_loss,
        "tokens_per_s": run.tokens_per_s,
        "iterations": len(log.iterations),
        "first_iteration": log.first_iteration,
        "last_iteration": log.last_iteration,
        "skipped": run.skipped,
        "nan_iterations": run.nan_iterations,
        "status": run.status,
        "dialect": log.dialect,
        "hosts": "; ".join(log.hosts),
        "exclude": log.exclude,
        "cause": "; ".join(causes),
        "problems": "; ".join(map(str, log.problems)),
        "left_out": "; ".join(left_out),
        "notes": ", ".join(filter(None, notes)),
    }


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
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{value:.0f}"
    return f"{value:.4g}"


def markdown(table: DataFrame) -> str:
    """The table in Markdown, its columns aligned: those of BigScience's tables that hold anything;
    the middle of long notes is left out.
    """
    columns = []
    for head, key in HEADS.items():
        texts = [cell(key, value) for value in table[key]]
        texts = [middle(html.escape(text, quote=False).replace("|", "\\|"), 30) for text in texts]
        width = max(3, len(head), *map(len, texts))
        if key == "notes":
            columns.append([text.ljust(width) for text in (head, "-" * width, *texts)])
        elif any(texts):
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
        cells = {head: cell(key, row[key]) for head, key in PARSED.items()}
        facts = [f"{head} {text}" for head, text in cells.items() if text]
        details = [", ".join(facts), log.evidence, *log.collectives, *log.notes]
        details += [f"problem: {problem}" for problem in log.problems[:PROBLEMS]]
        lines += [f"  {detail}" for detail in details if detail]
    return "\n".join(lines)
