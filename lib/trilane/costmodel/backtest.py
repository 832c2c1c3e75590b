"""Backtest: predictions for measured rows, by constants that ship or are fitted without rows like
them; errors.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trilane.costmodel.calibration import Calibration, interval
from trilane.costmodel.columns import columns_of
from trilane.costmodel.fit import fit_time
from trilane.costmodel.iteration import iteration_time
from trilane.costmodel.measured_rows import (
    FILES,
    MeasuredRow,
    Skipped,
    Source,
    ignored_columns,
    read_rows,
    shipped_rows,
    usable,
)
from trilane.costmodel.memory import (
    DEFAULT,
    MemoryConstants,
    memory_bytes,
    memory_for,
    oom_probability,
    stage_memory,
)
from trilane.costmodel.predict import support_of, unmeasured_half_width
from trilane.costmodel.shipped import calibration_for, default, prior_of
from trilane.utils.progress import progress
from trilane.utils.tables import Columns, DataFrame, Table, Text, as_json
from trilane.utils.validation import require, require_known

# Sets of rows in data/: of the BigScience documents, cleaned and as printed; and of other cards,
# stacks and shapes.
SHIPPED = (*FILES, "measured")
LEAVE_OUT: dict[str, Callable[[MeasuredRow], Any]] = {
    "table": lambda row: row.table,
    "hidden": lambda row: row.case.shape.hidden_size,
    "date": lambda row: row.case.day,
}
SAME = 1e-6  # relative difference of two predictions that are one
BEST = 5e-4  # relative difference of a time to the best one, which is measured as well


@dataclass(frozen=True, kw_only=True)
class RowPrediction:
    """The prediction for a measured row: seconds with their 90 % interval, GiB of a first-stage
    GPU, P(OOM).
    """

    row_id: str
    sec_pred: float
    sec_lo: float
    sec_hi: float
    mem_gib_pred: float
    oom_probability: float


Pair = tuple[MeasuredRow, RowPrediction]


def group_name(row: MeasuredRow) -> str:
    """GPU family and software stack of a row, such as `A100 megatron-deepspeed`."""
    return f"{row.case.cluster.gpu.name.partition('-')[0]} {row.stack}".strip()


def time_figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Relative errors of seconds over distinct timed rows, and the share of rows within the
    interval (`coverage`).
    """
    errors = []
    inside = []
    for row, p in pairs:
        if usable([row]):
            errors.append(p.sec_pred / row.seconds - 1)
            inside.append(p.sec_lo <= row.seconds <= p.sec_hi)
    if not errors:
        return {}
    sizes = np.abs(errors)
    return {
        "n": len(errors),
        "median": float(np.median(sizes)),
        "p90": float(np.quantile(sizes, 0.9)),
        "bias": float(np.median(errors)),
        "coverage": float(np.mean(inside)),
    }


def ranking_figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Within tables: mean rank correlation (>= 3 rows), regret of the row predicted best, tables
    where it is best.
    """
    from scipy.stats import spearmanr

    tables: dict[str, list[Pair]] = {}
    for row, p in pairs:
        if np.isfinite(row.seconds) and not row.excluded and row.table:
            tables.setdefault(row.table, []).append((row, p))
    rho = []
    regret = []
    for members in tables.values():
        seconds = np.array([row.seconds for row, _ in members])
        predicted = np.round([p.sec_pred for _, p in members], 9)
        if len(set(seconds)) < 2:
            continue
        if len(members) >= 3:
            is_constant = predicted.max() / predicted.min() < 1 + SAME
            rho.append(0.0 if is_constant else float(spearmanr(predicted, seconds).statistic))
        best = np.isclose(predicted, predicted.min(), rtol=SAME)
        regret.append(float(seconds[best].mean() / seconds.min() - 1))
    if not regret:
        return {}
    figures = {
        "tables": len(regret),
        "regret_mean": float(np.mean(regret)),
        "regret_max": max(regret),
        "best": sum(r < BEST for r in regret),
    }
    if rho:
        figures["rho"] = float(np.mean(rho))
    return figures


def memory_figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Relative errors of memory over distinct rows, and OOM predicted (P > 1/2) for rows that ran
    out or did not.
    """
    errors = []
    ran_out = []
    ran = []
    for row, p in pairs:
        if row.duplicate_of:
            continue
        if np.isfinite(row.memory_bytes):
            errors.append(abs(p.mem_gib_pred * 2**30 / row.memory_bytes - 1))
        if row.ran_out:
            ran_out.append(p.oom_probability > 0.5)
        elif np.isfinite(row.seconds) or np.isfinite(row.memory_bytes):
            ran.append(p.oom_probability > 0.5)
    figures: dict[str, Any] = {
        "oom": f"{sum(ran_out)}/{len(ran_out)}",
        "false": f"{sum(ran)}/{len(ran)}",
    }
    if errors:
        figures["mem_n"] = len(errors)
        figures["mem_median"] = float(np.median(errors))
        figures["mem_p90"] = float(np.quantile(errors, 0.9))
    return figures


def figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    """All figures of a backtest."""
    found = {"predicted": len(pairs)}
    return found | time_figures(pairs) | ranking_figures(pairs) | memory_figures(pairs)


def predict_row(
    row: MeasuredRow,
    calibration: Calibration,
    memory: MemoryConstants = DEFAULT,
    half_width: float | None = None,
) -> RowPrediction:
    """Predict one row on its day; `half_width` of the interval of ln(seconds), by default the
    calibration's.
    """
    case = row.case
    on_day = calibration.on(case.day, case.topology.gpus)
    seconds = iteration_time(case.shape, case.topology, case.cluster, on_day, case.engine).total
    low, high = interval(seconds, half_width or calibration.half_width)
    columns = columns_of(case.shape, case.topology, case.engine)
    fullest = float(memory_bytes(columns, case.cluster, memory))
    first = float(stage_memory(columns, 0, case.cluster, memory).total)  # where nvidia-smi was read
    return RowPrediction(
        row_id=row.row_id,
        sec_pred=seconds,
        sec_lo=low,
        sec_hi=high,
        mem_gib_pred=first / 2**30,
        oom_probability=float(oom_probability(fullest, case.cluster, memory.spread)),
    )


def predict_default(rows: Sequence[MeasuredRow], calibration: str = "") -> list[RowPrediction]:
    """Predict every row by `calibration` (see calibration_for), else by what ships for its cluster
    and stack.
    """
    constants = dict[tuple[str, str], Calibration]()
    predictions = []
    for row in rows:
        cluster = row.case.cluster
        key = (cluster.name, row.stack)
        if key not in constants:
            if calibration:
                source = calibration_for(cluster, calibration)
            else:
                source = None
            constants[key] = source or default(cluster, row.stack)
        known = constants[key]
        seconds = predict_row(row, known).sec_pred
        width = unmeasured_half_width(row.case, known, support_of(row.case, known, seconds))
        memory = memory_for(replace(known, stack=row.stack), row.case.engine, cluster)
        predictions.append(predict_row(row, known, memory, width))
    return predictions


@dataclass(frozen=True, kw_only=True)
class Backtest(Table):
    """Predictions for the rows that could be read, and the rows that could not; shown as a table of
    figures.
    """

    shown = (
        "rows n median p90 coverage rho regret_mean best tables mem_median mem_p90 "
        "oom oom_of false false_of"
    )
    rows: tuple[MeasuredRow, ...]
    predictions: tuple[RowPrediction, ...]
    skipped: tuple[Skipped, ...]
    left_out: str = ""  # what the constants were fitted without: table, hidden, date or nothing
    ignored: tuple[str, ...] = ()  # columns and words that were not read, a line each

    @property
    def pairs(self) -> list[Pair]:
        """Each row with its prediction."""
        return list(zip(self.rows, self.predictions, strict=True))

    def groups(self) -> dict[str, dict[str, Any]]:
        """The figures of each GPU and software stack, where there are several."""
        groups = dict[str, list[Pair]]()
        for row, p in self.pairs:
            groups.setdefault(group_name(row), []).append((row, p))
        if len(groups) < 2:
            return {}
        return {name: figures(pairs) for name, pairs in groups.items()}

    def to_frame(self) -> DataFrame:
        """A row of figures over all timed rows, `n` of them, and one for each GPU and software
        stack: median, p90 and coverage as shares, rank correlation rho, ooms found of all that ran
        out, and false ones of all that ran.
        """
        import pandas as pd

        frame = pd.DataFrame({"all": figures(self.pairs), **self.groups()}).T.infer_objects()
        for name in ("oom", "false"):
            frame[[name, f"{name}_of"]] = frame[name].str.split("/", expand=True).astype(int)
        columns = self.shown.split()[1:]
        return frame.reindex(columns=columns).rename_axis("rows").reset_index()

    def as_text(self) -> str:
        """The table for a terminal: a line per figure, a column per group."""
        frame = self.to_frame().set_index("rows").T.rename_axis(None, axis=1)
        return frame.to_string(float_format="{:.4g}".format, na_rep="")

    def to_json(self) -> dict[str, Any]:
        """The backtest as a JSON object; a figure that is not finite is null."""
        totals = figures(self.pairs) | {"skipped": len(self.skipped), "ignored": self.ignored}
        groups = self.groups()
        if groups:
            totals["groups"] = groups
        return as_json({"rows": self.predictions, "skipped": self.skipped, "summary": totals})

    def summary(self) -> Text:
        """The errors of time and memory over all rows that count, and how many times lie in their
        intervals.
        """
        f = figures(self.pairs)
        parts = []
        errors = "**median error {:.1%}**, 90th percentile {:.1%}, over {} runs"
        if "median" in f:
            how = "that ship or were given"
            if self.left_out:
                how = f"fitted without each run's {self.left_out}"
            text = f"Time: {errors}, by constants {{}}. "
            text += "{:.0%} of the measured times lie in their 90 % interval."
            parts.append(Text.of(text, f["median"], f["p90"], f["n"], how, f["coverage"]))
        if "mem_median" in f:
            text = f"Memory: {errors}."
            parts.append(Text.of(text, f["mem_median"], f["mem_p90"], f["mem_n"]))
        return Text.joined("\n\n", parts or ["No row has its seconds or its memory."])

    def skipped_reasons(self) -> Columns:
        """Why rows could not be read, and how many for each reason; then what was ignored of those
        that could.
        """
        counts = Counter(row.reason for row in self.skipped)
        counts.update(dict.fromkeys(self.ignored, len(self.rows)))
        if not counts:
            counts["all rows could be read"] = 0
        return Columns({"reason": list(counts), "rows": list(counts.values())})


def backtest(
    rows_csv: Source, cluster: str | None = None, cv: str | None = None, calibration: str = ""
) -> Backtest:
    """Read a table of measured rows and predict each.

        backtest("scored", cv="table")

    `rows_csv` is a path, a DataFrame, "all" for every cleaned set that ships, or one of SHIPPED;
    `cluster` replaces its column. With `cv` (table, hidden or date; "" or "none" for none), each
    row is predicted by constants fitted without its kind (see leave_one_out); else by those of
    `calibration` (see calibration_for) or the shipped ones of its stack.
    """
    left_out = "" if cv in (None, "none") else cv
    rule = "contradicts calibration, which is fitted already"
    require(not (left_out and calibration), "cv", cv, rule)
    sources: Sequence[Source] = [rows_csv]
    if isinstance(rows_csv, str):
        names = FILES if rows_csv == "all" else [rows_csv]
        folder = shipped_rows().parent
        sources = [folder / f"{name}.csv" if name in SHIPPED else name for name in names]
    rows = list[MeasuredRow]()
    skipped = list[Skipped]()
    ignored = list[str]()
    for source in sources:
        read, unread = read_rows(source, cluster or None)
        rows += read
        skipped += unread
        ignored += ignored_columns(source)
    if left_out:
        predictions = leave_one_out(rows, left_out)
    else:
        predictions = predict_default(rows, calibration)
    return Backtest(
        rows=tuple(rows),
        predictions=tuple(predictions),
        skipped=tuple(skipped),
        left_out=left_out,
        ignored=tuple(ignored),
    )


def leave_one_out(rows: Sequence[MeasuredRow], by: str) -> list[RowPrediction]:
    """Cross-validation: predict every row by constants fitted without its table, hidden size or
    date (`by`).

    The fits start from the priors of constants.py, as the shipped constants were fitted to every
    row. Rows of one GPU and stack share the constants of time; those of memory are the documents'.
    A row and its repeats are left out together. Raises ValueError for another `by`. Sites and
    stacks without any row: benchmarks/foreign_sites.py.
    """
    require_known("cv", by, LEAVE_OUT)
    key = LEAVE_OUT[by]
    folds = dict[Any, list[MeasuredRow]]()
    for row in rows:
        folds.setdefault((group_name(row), key(row)), []).append(row)
    predictions = dict[str, RowPrediction]()
    for (group, left_out), test in progress(list(folds.items()), f"fits without each {by}", "fit"):
        gone = {r.row_id for r in test} | {r.duplicate_of for r in test}
        group_rows = [r for r in rows if group_name(r) == group and key(r) != left_out]
        rest = usable([r for r in group_rows if r.row_id not in gone])
        calibration = prior_of(test[0].case.cluster.name, test[0].stack)
        if rest:
            seconds = [r.seconds for r in rest]
            calibration = fit_time([r.case for r in rest], seconds, calibration)
        for row in test:
            predictions[row.row_id] = predict_row(row, calibration)
    return [predictions[row.row_id] for row in rows]
