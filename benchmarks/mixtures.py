"""Mixtures of experts beside public rows: python benchmarks/mixtures.py [ROWS.csv]

Two constants were chosen by these rows: the host time of a layer with experts (layers.ROUTED),
and what experts add to an interval (predict.UNROUTED). `left out` chooses them anew by the other
sources alone: the host time with the least median error, then the narrowest intervals that hold
85 % of them. `as shipped` has the constants that ship. Of each source: rows, median and
90th percentile of the error, share inside the 90 % interval, its median width (high over low).
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from trilane.config.parallelism import invalid_reason
from trilane.costmodel import layers, predict
from trilane.costmodel.measured_rows import read_rows

ROWS = Path(__file__).with_name("mixtures.csv")
SMALL = "Megatron-LM MoE tests"  # models of a demonstration
HOST = (1, 2, 4, 6, 8, 10)
ADDED = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.8)
HELD = 0.85
SHIPPED = (layers.ROUTED, predict.UNROUTED)
Choice = tuple[float, float]


class Row(NamedTuple):
    """ln(predicted / measured) of a run, and the half-width without what experts add."""

    error: float
    width: float


def rows_by_source(path: Path) -> tuple[dict[str, list[int]], dict[float, list[Row]]]:
    """The places of each source's rows, and of each host time all rows."""
    found, skipped, _ = read_rows([path])
    for row in skipped:
        print(f"not read: {row.row_id}: {row.reason}")
    about = pd.read_csv(path, dtype=str, keep_default_na=False).set_index("row_id")
    able = []
    for row in found:
        reason = invalid_reason(row.case.shape, row.case.topology)
        if reason:
            print(f"not read: {row.row_id}: {reason}")
        elif about.loc[row.row_id, "section"] != SMALL:
            able.append(row)
    sources: dict[str, list[int]] = {}
    for place, row in enumerate(able):
        sources.setdefault(about.loc[row.row_id, "source"].partition("@")[0], []).append(place)
    predict.UNROUTED = 0
    by_host = {}
    for host in HOST:
        layers.ROUTED = host
        by_host[host] = []
        for row, p in zip(able, predict.predict_rows(able), strict=True):
            error = math.log(p.sec_per_it / row.seconds)
            by_host[host].append(Row(error, math.log(p.sec_hi / p.sec_lo) / 2))
    return sources, by_host


def widths(rows: Sequence[Row], added: float) -> list[float]:
    """Half-widths, as predict.half_width() has them."""
    return [math.hypot(row.width, added) for row in rows]


def inside(rows: Sequence[Row], added: float) -> list[bool]:
    """Which measured seconds lie inside the interval."""
    return [abs(row.error) <= width for row, width in zip(rows, widths(rows, added), strict=True)]


def chosen(by_host: dict[float, list[Row]], places: Sequence[int]) -> Choice:
    """The two constants by the rows at these places."""

    def error(host: float) -> float:
        return float(np.median([abs(math.expm1(by_host[host][place].error)) for place in places]))

    host = min(HOST, key=error)
    rows = [by_host[host][place] for place in places]
    holding = [added for added in ADDED if np.mean(inside(rows, added)) >= HELD]
    return host, min(holding, default=ADDED[-1])


def line(name: str, picked: Sequence[tuple[Row, Choice]]) -> str:
    """The figures of some rows, each by its constants."""
    error = [abs(math.expm1(row.error)) for row, _ in picked]
    median, p90 = np.quantile(error, (0.5, 0.9))
    held = np.mean([inside([row], added)[0] for row, (_, added) in picked])
    width = math.exp(2 * np.median([widths([row], added)[0] for row, (_, added) in picked]))
    return f"{name:34} {len(picked):3} rows  {median:4.0%} / {p90:4.0%}  {held:4.0%}, {width:.2f}"


def main(path: Path = ROWS) -> None:
    """Print both tables."""
    sources, by_host = rows_by_source(path)
    every = [place for places in sources.values() for place in places]
    for title in ("left out", "as shipped"):
        print(f"{title}: median / p90, inside, width")
        picked = {}
        for source, places in sources.items():
            choice: Choice = SHIPPED
            if title == "left out":
                choice = chosen(by_host, [place for place in every if place not in places])
            picked[source] = [(by_host[choice[0]][place], choice) for place in places]
            print(line(source, picked[source]), choice if title == "left out" else "")
        print(line("all", [one for rows in picked.values() for one in rows]))
        away = [rows for source, rows in picked.items() if not source.startswith("awslabs")]
        print(line("without awslabs", [one for rows in away for one in rows]))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
