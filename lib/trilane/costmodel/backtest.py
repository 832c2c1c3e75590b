"""Backtest: measured rows against what was predicted for them, with and without having seen their kind."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from trilane.costmodel.calibration import Calibration, default, shipped_regimes
from trilane.costmodel.columns import columns_of
from trilane.costmodel.fit import fit_memory, fit_time
from trilane.costmodel.iteration import iteration_time
from trilane.costmodel.measured_rows import MeasuredRow, Skipped, read_rows
from trilane.costmodel.memory import DEFAULT, MemoryConstants, first_stage_bytes, memory_bytes, oom_probability
from trilane.costmodel.metrics import RowPrediction, figures
from trilane.costmodel.uncertainty import posterior
from trilane.utils.validation import require_known

LEAVE_OUT: dict[str, Callable[[MeasuredRow], Any]] = {
    "table": lambda row: row.table,
    "hidden": lambda row: row.case.shape.hidden_size,
    "date": lambda row: row.case.day,
}

ENOUGH_MEMORY_ROWS = 20  # fewer say less than the shipped constants do


@dataclass(frozen=True, kw_only=True)
class Backtest:
    """Predictions of the rows that could be read, and the rows that could not."""

    rows: tuple[MeasuredRow, ...]
    predictions: tuple[RowPrediction, ...]
    skipped: tuple[Skipped, ...]

    def summary(self) -> dict[str, Any]:
        """The figures over all rows, and over each GPU and software stack where there are several."""
        pairs = list(zip(self.rows, self.predictions, strict=True))
        groups = {_group(row): [p for p in pairs if _group(p[0]) == _group(row)] for row in self.rows}
        result = {**figures(pairs), "skipped": len(self.skipped)}
        return {**result, "groups": {k: figures(v) for k, v in groups.items()}} if len(groups) > 1 else result

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        skipped = [asdict(s) for s in self.skipped]
        return {"rows": [asdict(p) for p in self.predictions], "skipped": skipped, "summary": self.summary()}


def predict_row(
    row: MeasuredRow, calibration: Calibration, memory: MemoryConstants = DEFAULT, half_width: float | None = None
) -> RowPrediction:
    """Seconds and memory of one row on its day; `half_width` of the interval, else the calibration's."""
    case = row.case
    on_day = calibration.on(case.day, case.topology.gpus)
    seconds = iteration_time(case.shape, case.topology, case.cluster, on_day, case.engine).total
    low, high = (replace(calibration, half_width=half_width) if half_width else calibration).interval(seconds)
    columns = columns_of(case.shape, case.topology, case.engine)
    need = float(memory_bytes(columns, case.cluster, memory))
    return RowPrediction(
        row_id=row.row_id,
        sec_pred=seconds,
        sec_lo=low,
        sec_hi=high,
        mem_gib_pred=float(first_stage_bytes(columns, case.cluster, memory)) / 2**30,
        oom_probability=float(oom_probability(need, case.cluster, memory.spread)),
    )


def as_they_are(rows: Sequence[MeasuredRow]) -> list[RowPrediction]:
    """Every row by the default calibration of its cluster and stack: nothing is fitted."""
    cache: dict[tuple[str, str], Calibration] = {}
    for row in rows:
        key = (row.case.cluster.name, row.stack)
        if key not in cache:
            cache[key] = default(row.case.cluster, row.stack)
    return [predict_row(row, cache[row.case.cluster.name, row.stack]) for row in rows]


def calibrated(rows: Sequence[MeasuredRow], on: Sequence[MeasuredRow]) -> list[RowPrediction]:
    """Every row by the default calibration of the first of the `on` rows, refitted to those.

    The intervals are the posterior's: the further a row is from those that were fitted to, the wider.
    """
    first = on[0]
    calibration = learn_time(on, default(first.case.cluster, first.stack))
    memory, timed = learn_memory(on), _teaching(on)
    belief = posterior([r.case for r in timed], [r.seconds for r in timed], calibration)
    widths = belief.half_widths([row.case for row in rows]).tolist()
    return [predict_row(row, calibration, memory, width) for row, width in zip(rows, widths, strict=True)]


def learn_time(rows: Sequence[MeasuredRow], prior: Calibration) -> Calibration:
    """Constants of time from rows; duplicates and rows marked as unusable teach nothing."""
    timed = _teaching(rows)
    return fit_time([r.case for r in timed], [r.seconds for r in timed], prior) if timed else prior


def _teaching(rows: Sequence[MeasuredRow]) -> list[MeasuredRow]:
    return [r for r in rows if np.isfinite(r.seconds) and not r.excluded and not r.duplicate_of]


def learn_memory(rows: Sequence[MeasuredRow]) -> MemoryConstants:
    """Constants of memory from rows, or the shipped ones where they are too few."""
    weighed = [r for r in rows if np.isfinite(r.memory_bytes) and not r.duplicate_of]
    if len(weighed) < ENOUGH_MEMORY_ROWS:
        return DEFAULT
    return fit_memory([r.case for r in weighed], [r.memory_bytes for r in weighed])


def leave_one_out(rows: Sequence[MeasuredRow], by: str) -> list[RowPrediction]:
    """Every row by constants fitted without its table, hidden size or date, starting from the priors of constants.py.

    Rows of one GPU and software stack share the constants of time, rows of one stack those of memory. A row that
    another row repeats leaves with it.
    """
    require_known("cv", by, LEAVE_OUT)
    key = LEAVE_OUT[by]
    found: dict[str, RowPrediction] = {}
    for group, left_out in dict.fromkeys((_group(r), key(r)) for r in rows):
        test = [r for r in rows if (_group(r), key(r)) == (group, left_out)]
        rest = [r for r in rows if key(r) != left_out]
        found |= {p.row_id: p for p in predict_unseen(test, rest)}
    return [found[r.row_id] for r in rows]


def predict_unseen(test: Sequence[MeasuredRow], rest: Sequence[MeasuredRow]) -> list[RowPrediction]:
    """Rows `test` of one GPU and stack by constants fitted to `rest` alone; repeats of a test row teach nothing.

    The fit starts from the priors of constants.py, not from what ships, which has seen every row.
    """
    first = test[0]
    prior = replace(Calibration(), regimes=shipped_regimes(first.case.cluster.name))
    gone = {r.row_id for r in test} | {r.duplicate_of for r in test}
    kept = [r for r in rest if r.row_id not in gone]
    calibration = learn_time([r for r in kept if _group(r) == _group(first)], prior)
    memory = learn_memory([r for r in kept if r.stack == first.stack])
    return [predict_row(row, calibration, memory) for row in test]


def _group(row: MeasuredRow) -> str:
    return f"{row.case.cluster.gpu.name.partition('-')[0]} {row.stack}".strip()


def backtest(
    rows_csv: str, cluster: str | None = None, cv: str | None = None, calibrate_on: str | None = None
) -> Backtest:
    """Read a CSV of measured rows and predict each; see the three ways above."""
    rows, skipped = read_rows(rows_csv, cluster)
    if cv:
        predictions = leave_one_out(rows, cv)
    elif calibrate_on:
        on, bad = read_rows(calibrate_on, cluster)
        skipped += bad
        predictions = calibrated(rows, on) if on else as_they_are(rows)
    else:
        predictions = as_they_are(rows)
    return Backtest(rows=tuple(rows), predictions=tuple(predictions), skipped=tuple(skipped))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The door's options."""
    parser.add_argument("rows", help="a CSV with the columns of lib/trilane/data/measured.csv")
    parser.add_argument("--cluster", help="a cluster's name or JSON file, instead of the column")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--cv", choices=sorted(LEAVE_OUT), help="refit without each table, hidden size or date")
    how.add_argument("--calibrate-on", metavar="CSV", help="refit to these rows first")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Run the door on parsed options; exit code 0, or 1 where no row could be predicted."""
    result = backtest(args.rows, args.cluster, args.cv, args.calibrate_on)
    if args.json:
        print(json.dumps(_finite(result.to_json()), indent=1))
    else:
        for skipped in result.skipped:
            print(f"skipped {skipped.row_id}: {skipped.reason}", file=sys.stderr)
        for name, value in result.summary().items():
            print(f"{name:12} {value if not isinstance(value, float) else round(value, 4)}")
    return 0 if result.predictions else 1


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value
