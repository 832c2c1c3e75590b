"""Backtest: predictions for measured rows, by the shipped constants or by constants fitted without rows like them."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trilane.costmodel.fit import fit_time
from trilane.costmodel.measured_rows import (
    FILES,
    MeasuredRow,
    Skipped,
    Source,
    ignored_words,
    read_rows,
    shipped_rows,
    usable,
)
from trilane.costmodel.metrics import Pair, RowPrediction, figures, group_name, predict_default, predict_row
from trilane.costmodel.shipped import prior_of
from trilane.utils.progress import progress
from trilane.utils.tables import Columns, DataFrame, Table, Text, as_json, displayed
from trilane.utils.validation import require, require_known

# Sets of rows in data/: of the BigScience documents, cleaned and as printed; and of other cards, stacks and shapes.
SHIPPED = (*FILES, "measured")
# Key of a figure -> column of a table, where % multiplies by 100.
HEADERS = {
    "n": "timed rows",
    "median": "median error %",
    "p90": "p90 %",
    "coverage": "in interval %",
    "rho": "rank correlation",
    "regret_mean": "regret %",
    "best": "best found",
    "tables": "of tables",
    "mem_median": "memory median %",
    "mem_p90": "memory p90 %",
    **{"oom": "OOM found", "oom_of": "of OOM", "false": "false OOM", "false_of": "of runs"},
}

LEAVE_OUT: dict[str, Callable[[MeasuredRow], Any]] = {
    "table": lambda row: row.table,
    "hidden": lambda row: row.case.shape.hidden_size,
    "date": lambda row: row.case.day,
}


@dataclass(frozen=True, kw_only=True)
class Backtest(Table):
    """Predictions for the rows that could be read, and the rows that could not; shown as a table of figures."""

    digits = 2
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
        """The figures of each GPU and software stack."""
        names = dict.fromkeys(group_name(row) for row in self.rows)
        return {name: figures([p for p in self.pairs if group_name(p[0]) == name]) for name in names}

    def summary(self) -> dict[str, Any]:
        """The figures over all rows and, if there are several, over each group."""
        result, groups = {**figures(self.pairs), "skipped": len(self.skipped), "ignored": self.ignored}, self.groups()
        return {**result, "groups": groups} if len(groups) > 1 else result

    def to_frame(self) -> DataFrame:
        """A row of figures over all timed rows, `n` of them, and one for each GPU and software stack: median, p90 and
        coverage as shares, rank correlation rho, ooms found of all that ran out, and false ones of all that ran.
        """
        import pandas as pd

        groups = self.groups()
        frame = pd.DataFrame({"all": figures(self.pairs), **(groups if len(groups) > 1 else {})}).T.infer_objects()
        for name in ("oom", "false"):
            frame[[name, f"{name}_of"]] = frame[name].str.split("/", expand=True).astype(int)
        return frame.reindex(columns=[*HEADERS]).rename_axis("rows").reset_index()

    def view(self) -> DataFrame:
        return displayed(self.to_frame().rename(columns=HEADERS))

    def as_text(self) -> str:
        """The table for a terminal: a line per figure, a column per group."""
        frame = self.view().set_index("rows").T.rename_axis(None, axis=1)
        return frame.to_string(float_format="{:.4g}".format, na_rep="")

    def to_json(self) -> dict[str, Any]:
        """The backtest as a JSON object; a figure that is not finite is null."""
        return as_json({"rows": self.predictions, "skipped": self.skipped, "summary": self.summary()})

    def finding(self) -> Text:
        """The errors of time and memory over all rows that count, and how many times lie in their intervals."""
        f, lines = figures(self.pairs), list[Text]()
        if "median" in f:
            how = f"fitted without each run's {self.left_out}" if self.left_out else "that ship or were given"
            text = "Time: **median error {:.1f} %**, 90th percentile {:.1f} %, over {} runs, by constants {}. "
            text += "{:.0f} % of the measured times lie in their 90 % interval."
            lines.append(Text.of(text, 100 * f["median"], 100 * f["p90"], f["n"], how, 100 * f["coverage"]))
        if "mem_median" in f:
            text = "Memory: **median error {:.1f} %**, 90th percentile {:.1f} %, over {} runs."
            lines.append(Text.of(text, 100 * f["mem_median"], 100 * f["mem_p90"], f["mem_n"]))
        return Text.joined("\n\n", lines or ["No row has its seconds or its memory."])

    def skipped_reasons(self) -> Columns:
        """Why rows could not be read, and how many for each reason; then what was ignored of those that could."""
        counts = Counter(skipped.reason for skipped in self.skipped)
        counts.update(dict.fromkeys(self.ignored, len(self.rows)))
        return Columns({"reason": list(counts) or ["all rows could be read"], "rows": list(counts.values()) or [0]})


def backtest(rows_csv: Source, cluster: str | None = None, cv: str | None = None, calibration: str = "") -> Backtest:
    """Read a table of measured rows and predict each.

        backtest("scored", cv="table")

    `rows_csv` is a path, a DataFrame, "all" for every cleaned set that ships, or one of SHIPPED; `cluster` replaces its
    column. With `cv` (table, hidden or date; "" or "none" for none), each row is predicted by constants fitted
    without its kind (see leave_one_out); else by those of `calibration` (see calibration_for) or the shipped ones of
    its stack. Raises ValueError for a file that cannot be read.
    """
    cv = "" if cv == "none" else cv or ""
    require(not (cv and calibration), "cv", cv, "contradicts calibration, which is fitted already")
    names = FILES if isinstance(rows_csv, str) and rows_csv == "all" else (rows_csv,)
    shipped = {name: shipped_rows().with_name(f"{name}.csv") for name in SHIPPED}
    paths = [shipped.get(name, name) if isinstance(name, str) else name for name in names]
    read = [read_rows(path, cluster or None) for path in paths]
    rows, skipped = [r for found, _ in read for r in found], [s for _, left in read for s in left]
    ignored = tuple(line for path in paths for line in ignored_words(path))
    predictions = leave_one_out(rows, cv) if cv else predict_default(rows, calibration)
    found: dict[str, Any] = {"rows": tuple(rows), "predictions": tuple(predictions), "skipped": tuple(skipped)}
    return Backtest(**found, left_out=cv, ignored=ignored)


def leave_one_out(rows: Sequence[MeasuredRow], by: str) -> list[RowPrediction]:
    """Cross-validation: predict every row by constants fitted without its table, hidden size or date (`by`).

    The fits start from the priors of constants.py. Rows of one GPU and stack share the constants of time; those
    of memory are the documents'. A row and its repeats are left out together. Raises ValueError for another
    `by`. Sites and stacks without any row: benchmarks/foreign_sites.py.
    """
    require_known("cv", by, LEAVE_OUT)
    key = LEAVE_OUT[by]
    found: dict[str, RowPrediction] = {}
    folds = list(dict.fromkeys((group_name(r), key(r)) for r in rows))
    for group, left_out in progress(folds, "fits without each row's " + by, "fit"):
        test = [r for r in rows if (group_name(r), key(r)) == (group, left_out)]
        rest = [r for r in rows if key(r) != left_out]
        found |= {p.row_id: p for p in predict_unseen(test, rest)}
    return [found[r.row_id] for r in rows]


def predict_unseen(test: Sequence[MeasuredRow], rest: Sequence[MeasuredRow]) -> list[RowPrediction]:
    """Predict rows of one GPU and stack by constants fitted to `rest`, without repeats of the test rows.

    The fit starts from the priors of constants.py, not from the shipped constants, which were fitted to every row.
    """
    first = test[0]
    gone = {r.row_id for r in test} | {r.duplicate_of for r in test}
    kept = [r for r in rest if r.row_id not in gone]
    prior = prior_of(first.case.cluster.name, first.stack)
    own = usable([r for r in kept if group_name(r) == group_name(first)])
    calibration = fit_time([r.case for r in own], [r.seconds for r in own], prior) if own else prior
    return [predict_row(row, calibration) for row in test]
