"""The runs below a folder as the BigScience chronicles print them: GPUs, size, topology, memory, speed."""

import html
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trilane.analysis.measure import KEEP, Measurement, measure, measure_log
from trilane.documents.runs import read_runs
from trilane.utils.tables import DataFrame, Html, one_line, percent
from trilane.utils.validation import require_folder
from trilane.workspace.status import Status

COLUMNS = ("GPUs", "Size", "DP", "TP", "PP", "MBS", "GBS", "Mem", "Sec/it", "TFLOPs", "Notes")
SUFFIXES = (".log", ".out", ".txt", ".gz")
Row = Mapping[str, Any]  # Measurement.row() with `source`, where the run lies, and `notes`


def read_folder(folder: Path | str) -> tuple[list[Row], list[str]]:
    """The runs at and below a folder, by path, and why logs were left out; ValueError where there is no folder."""
    folder = Path(folder)
    require_folder("folder", folder)
    ours = sorted({path.parent for path in folder.rglob("plan.json") if (path.parent / "run.log").is_file()})
    rows = [_row(measure(path), str(path.relative_to(folder)), path.name) for path in ours]
    bad = []
    for path in _logs(folder, ours):
        try:
            runs = read_runs(path, KEEP)
        except (ValueError, OSError) as error:
            bad.append(str(error))
            continue
        for number, log in enumerate(runs, 1):
            if not len(log.bandwidth):
                name = path.name + (f" run {number}" if number > 1 else "")
                rows.append(_row(measure_log(log), f"{path.relative_to(folder)} {number}", name))
        bad += [f"log={path}: a bandwidth benchmark"] if any(len(log.bandwidth) for log in runs) else []
    return sorted(rows, key=lambda row: row["source"]), bad


def _logs(folder: Path, ours: Sequence[Path]) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        inside = any(own in path.parents for own in ours)
        if path.is_file() and not inside and path.suffix in SUFFIXES:
            yield path


def _row(m: Measurement, source: str, name: str) -> Row:
    status = m.status if m.status is not Status.COMPLETED else ""
    return {"source": source, **m.row(), "notes": ", ".join(filter(None, (name, status, m.note)))}


def cells(row: Row) -> list[str]:
    """The row's texts, by COLUMNS."""
    memory = "OOM" if row["status"] is Status.OOM else _text(row["memory_bytes"] / 2**30, "{:.1f}GiB")
    counts = [_text(row[name], "{:.0f}") for name in ("dp", "tp", "pp", "mbs", "gbs")]
    speed = [_text(row["sec_per_it"], "{:.4g}"), _text(row["tflops"], "{:.2f}" if row["tflops"] >= 1 else "{:.3g}")]
    return [_text(row["gpus"], "{:.0f}"), size(row["parameters"]), *counts, memory, *speed, row["notes"]]


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
    return _text(parameters, "{:.0f}")


def markdown(rows: Sequence[Row]) -> str:
    """The table in Markdown, its columns aligned."""
    body = [[html.escape(one_line(text), quote=False).replace("|", "\\|") for text in cells(row)] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(COLUMNS, *body, strict=True)]
    rule = [f"{'-' * (max(width, 3) - 1)}:" for width in widths[:-1]] + ["-" * max(widths[-1], 3)]
    lines = [_line(COLUMNS, widths), f"| {' | '.join(rule)} |", *(_line(texts, widths) for texts in body)]
    return "\n".join(lines) + "\n"


def _line(texts: Sequence[str], widths: Sequence[int]) -> str:
    padded = [text.rjust(max(width, 3)) for text, width in zip(texts[:-1], widths, strict=False)]
    return f"| {' | '.join([*padded, texts[-1].ljust(max(widths[-1], 3))])} |"


def to_csv(rows: Sequence[Row]) -> str:
    """The table as CSV."""
    import pandas as pd

    return pd.DataFrame([cells(row) for row in rows], columns=list(COLUMNS)).to_csv(index=False)


def to_html(rows: Sequence[Row]) -> str:
    """The table as a piece of HTML."""

    def line(texts: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{Html.escape(text)}</{tag}>" for text in texts) + "</tr>\n"

    body = "".join(line(cells(row), "td") for row in rows)
    return f"<table>\n<thead>{line(COLUMNS, 'th').strip()}</thead>\n<tbody>\n{body}</tbody>\n</table>\n"


def _text(value: float, form: str) -> str:
    return form.format(value) if value == value else ""
