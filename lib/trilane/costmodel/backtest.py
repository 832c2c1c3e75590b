"""Backtest: predictions for measured rows, by constants that ship or are fitted without rows like
them; errors.
"""

from collections.abc import Sequence
from operator import attrgetter

import numpy as np

from trilane.costmodel.fit import fit_time
from trilane.costmodel.measured_rows import (
    FILES,
    MeasuredRow,
    Skipped,
    Source,
    read_rows,
    usable,
)
from trilane.costmodel.memory import DEFAULT
from trilane.costmodel.predict import Prediction, predict_case, predict_rows
from trilane.costmodel.shipped import prior_of
from trilane.utils.frozen import frozen
from trilane.utils.tables import DataFrame, Json, Table, Text, as_json, grouped
from trilane.utils.validation import DATA, require, require_known

# Sets of rows in data/: of the BigScience documents, cleaned and as printed; and of other cards,
# stacks and shapes.
SHIPPED = (*FILES, "measured")
LEAVE_OUT = {"table": "table", "hidden": "case.shape.hidden_size", "date": "case.day"}
SAME = 1e-6  # relative difference of two predictions that are one
BEST = 5e-4  # relative difference of a time to the best one, which is measured as well


def group_name(row: MeasuredRow) -> str:
    """GPU family and software stack of a row, such as `A100 megatron-deepspeed`."""
    return f"{row.case.cluster.gpu.name.partition('-')[0]} {row.stack}".strip()


def compared(rows: Sequence[MeasuredRow], predictions: Sequence[Prediction]) -> DataFrame:
    """Each measured row beside its prediction: seconds with their 90 % interval, GiB of a
    first-stage GPU, P(OOM); NaN for what was not measured.
    """
    import pandas as pd

    cells = []
    for row, p in zip(rows, predictions, strict=True):
        cell = {
            "row_id": row.row_id,
            "group": group_name(row),
            "table": row.table,
            "gpus": row.case.topology.gpus,
            "sec_per_it": row.seconds,
            "sec_pred": p.sec_per_it,
            "sec_lo": p.sec_lo,
            "sec_hi": p.sec_hi,
            "mem_gib": row.memory_bytes / 2**30,
            "mem_gib_pred": p.stages[0].total / 2**30,  # where nvidia-smi was read
            "oom_probability": p.oom_probability,
            "ran_out": row.ran_out,
            "excluded": row.excluded,
            "is_copy": bool(row.duplicate_of),
        }
        cells.append(cell)
    return pd.DataFrame(cells)


def figures(runs: DataFrame) -> Json:
    """Figures of runs as compared() has them: of distinct rows the relative errors of seconds and
    memory, the share of times within the interval (`coverage`), and OOM predicted (P > 1/2) for
    rows that ran out or did not; a figure that no row gives is left out.
    """
    timed = runs[runs["sec_per_it"].notna() & ~runs["excluded"]]
    distinct = timed[~timed["is_copy"]]
    errors = distinct["sec_pred"] / distinct["sec_per_it"] - 1
    once = runs[~runs["is_copy"]]
    memory_errors = (once["mem_gib_pred"] / once["mem_gib"] - 1).abs()
    is_called = once["oom_probability"] > 0.5
    ran = ~once["ran_out"] & (once["sec_per_it"].notna() | once["mem_gib"].notna())
    values = {
        "predicted": len(runs),
        "n": len(distinct),
        "median": errors.abs().median(),
        "p90": errors.abs().quantile(0.9),
        "bias": errors.median(),
        "coverage": distinct["sec_per_it"].between(distinct["sec_lo"], distinct["sec_hi"]).mean(),
        **ranking_figures(timed[timed["table"] != ""]),
        "oom": (is_called & once["ran_out"]).sum(),
        "oom_of": once["ran_out"].sum(),
        "false": (is_called & ran).sum(),
        "false_of": ran.sum(),
        "mem_n": memory_errors.count(),
        "mem_median": memory_errors.median(),
        "mem_p90": memory_errors.quantile(0.9),
    }
    return {name: value for name, value in values.items() if np.isfinite(value)}


def ranking_figures(timed: DataFrame) -> Json:
    """Within tables: mean rank correlation (>= 3 rows), regret of the row predicted best, tables
    where it is best.
    """
    rho = []
    regret = []
    for _, members in timed.groupby("table"):
        seconds = members["sec_per_it"]
        predicted = members["sec_pred"].round(9)
        if seconds.nunique() < 2:
            continue
        if len(members) >= 3:
            is_constant = predicted.max() / predicted.min() < 1 + SAME
            rho.append(0.0 if is_constant else predicted.corr(seconds, method="spearman"))
        best = np.isclose(predicted, predicted.min(), rtol=SAME)
        regret.append(seconds[best].mean() / seconds.min() - 1)
    if not regret:
        return {}
    return {
        "tables": len(regret),
        "regret_mean": np.mean(regret),
        "regret_max": max(regret),
        "best": sum(r < BEST for r in regret),
        "rho": np.mean(rho) if rho else np.nan,
    }


@frozen
class Backtest(Table):
    """Measured rows with their predictions (`runs`, see compared()), and the rows that could not be
    read; shown as a table of figures.
    """

    shown = (
        "rows n median p90 coverage rho regret_mean best tables mem_median mem_p90 "
        "oom oom_of false false_of"
    )
    runs: DataFrame
    skipped: tuple[Skipped, ...]
    left_out: str = ""  # what the constants were fitted without: table, hidden, date or nothing
    ignored: tuple[str, ...] = ()  # columns and words that were not read, a line each

    def groups(self) -> dict[str, Json]:
        """The figures of each GPU and software stack, where there are several."""
        groups = self.runs.groupby("group", sort=False)
        if len(groups) < 2:
            return {}
        return {name: figures(runs) for name, runs in groups}

    def to_frame(self) -> DataFrame:
        """A row of figures over all timed rows, `n` of them, and one for each GPU and software
        stack: median, p90 and coverage as shares, rank correlation rho, ooms found of all that ran
        out, and false ones of all that ran.
        """
        import pandas as pd

        frame = pd.DataFrame({"all": figures(self.runs), **self.groups()}).T.infer_objects()
        return frame.reindex(columns=self.shown.split()[1:]).rename_axis("rows").reset_index()

    def as_text(self) -> str:
        """The table for a terminal: a line per figure, a column per group."""
        frame = self.to_frame().set_index("rows").T.rename_axis(None, axis=1)
        return frame.to_string(float_format="{:.4g}".format, na_rep="")

    def to_json(self) -> Json:
        """The predictions of rows, those skipped, and the figures of all and of each group."""
        names = ["row_id", "sec_pred", "sec_lo", "sec_hi", "mem_gib_pred", "oom_probability"]
        totals = figures(self.runs) | {"skipped": len(self.skipped), "ignored": self.ignored}
        groups = self.groups()
        if groups:
            totals["groups"] = groups
        rows = self.runs[names].to_dict("records")
        return as_json({"rows": rows, "skipped": self.skipped, "summary": totals})

    def summary(self) -> Text:
        """The errors of time and memory over all rows that count, how many times lie in their
        intervals, and how many rows could not be read.
        """
        f = figures(self.runs)
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
        if self.skipped:
            text = "{} rows could not be read; the first: {}"
            parts.append(Text.of(text, len(self.skipped), self.skipped[0].reason))
        return Text.joined("\n\n", parts)


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
    sources = [rows_csv]
    if isinstance(rows_csv, str):
        names = FILES if rows_csv == "all" else [rows_csv]
        sources = [DATA / f"{name}.csv" if name in SHIPPED else name for name in names]
    rows, skipped, ignored = read_rows(sources, cluster or None)
    reasons = [skipped[0].reason if skipped else "is empty", *ignored]
    rule = f"no row can be predicted; the first: {'; '.join(reasons[:3])}"
    require(bool(rows), "rows", rows_csv, rule)
    if left_out:
        predictions = leave_one_out(rows, left_out)
    else:
        predictions = predict_rows(rows, calibration)
    return Backtest(
        runs=compared(rows, predictions),
        skipped=tuple(skipped),
        left_out=left_out,
        ignored=tuple(ignored),
    )


def leave_one_out(rows: Sequence[MeasuredRow], by: str) -> list[Prediction]:
    """Cross-validation: predict every row by constants fitted without its table, hidden size or
    date (`by`).

    The fits start from the priors of constants.py, as the shipped constants were fitted to every
    row. Rows of one GPU and stack share the constants of time; those of memory are the documents'.
    A row and its repeats are left out together. Raises ValueError for another `by`. Sites and
    stacks without any row: benchmarks/foreign_sites.py.
    """
    require_known("cv", by, LEAVE_OUT)
    key = attrgetter(LEAVE_OUT[by])
    folds = grouped(rows, lambda row: (group_name(row), key(row)))
    predictions = {}
    for (group, left_out), test in folds.items():
        gone = {r.row_id for r in test} | {r.duplicate_of for r in test}
        group_rows = [r for r in rows if group_name(r) == group and key(r) != left_out]
        rest = usable([r for r in group_rows if r.row_id not in gone])
        calibration = prior_of(test[0].case.cluster, test[0].stack)
        if rest:
            seconds = [r.seconds for r in rest]
            calibration = fit_time([r.case for r in rest], seconds, calibration)
        for row in test:
            predictions[row.row_id] = predict_case(row.case, calibration, DEFAULT)
    return [predictions[row.row_id] for row in rows]
