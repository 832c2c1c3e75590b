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
    ignored_words,
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
from trilane.utils.tables import Columns, DataFrame, Table, Text, as_json, displayed
from trilane.utils.validation import require, require_known


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
    timed = [
        (r, p) for r, p in pairs if np.isfinite(r.seconds) and not r.excluded and not r.duplicate_of
    ]
    if not timed:
        return {}
    error = np.array([p.sec_pred / r.seconds - 1 for r, p in timed])
    inside = [p.sec_lo <= r.seconds <= p.sec_hi for r, p in timed]
    return {
        "n": len(timed),
        "median": float(np.median(np.abs(error))),
        "p90": float(np.quantile(np.abs(error), 0.9)),
        "bias": float(np.median(error)),
        "coverage": float(np.mean(inside)),
    }


def ranking_figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Within tables: mean rank correlation (>= 3 rows), regret of the row predicted best, tables
    where it is best.
    """
    from scipy.stats import spearmanr

    tables: dict[str, list[Pair]] = {}
    for row, prediction in pairs:
        if np.isfinite(row.seconds) and not row.excluded and row.table:
            tables.setdefault(row.table, []).append((row, prediction))
    rho, regret = [], []
    for members in tables.values():
        seconds = np.array([r.seconds for r, _ in members])
        predicted = np.round([p.sec_pred for _, p in members], 9)
        if len(members) < 2 or len(set(seconds)) < 2:
            continue
        if len(members) >= 3:
            constant = predicted.max() / predicted.min() < 1 + 1e-6
            rho.append(0.0 if constant else float(spearmanr(predicted, seconds).statistic))
        best = np.isclose(predicted, predicted.min(), rtol=1e-6)
        regret.append(float(seconds[best].mean() / seconds.min() - 1))
    if not regret:
        return {}
    found = sum(r < 5e-4 for r in regret)
    figures = {
        "tables": len(regret),
        "regret_mean": float(np.mean(regret)),
        "regret_max": max(regret),
        "best": found,
    }
    return {**figures, "rho": float(np.mean(rho))} if rho else figures


def memory_figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Relative errors of memory over distinct rows, and OOM predicted (P > 1/2) for rows that ran
    out or did not.
    """
    distinct = [(r, p) for r, p in pairs if not r.duplicate_of]
    error = [
        abs(p.mem_gib_pred * 2**30 / r.memory_bytes - 1)
        for r, p in distinct
        if np.isfinite(r.memory_bytes)
    ]
    able = [
        (r, p)
        for r, p in distinct
        if not r.ran_out and np.isfinite([r.seconds, r.memory_bytes]).any()
    ]
    ran = [p.oom_probability > 0.5 for _, p in able]
    out = [p.oom_probability > 0.5 for r, p in distinct if r.ran_out]
    figures: dict[str, Any] = {"oom": f"{sum(out)}/{len(out)}", "false": f"{sum(ran)}/{len(ran)}"}
    if error:
        median, p90 = float(np.median(error)), float(np.quantile(error, 0.9))
        figures |= {"mem_n": len(error), "mem_median": median, "mem_p90": p90}
    return figures


def figures(pairs: Sequence[Pair]) -> dict[str, Any]:
    """All figures of a backtest."""
    return {
        "predicted": len(pairs),
        **time_figures(pairs),
        **ranking_figures(pairs),
        **memory_figures(pairs),
    }


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
    need = float(memory_bytes(columns, case.cluster, memory))
    return RowPrediction(
        row_id=row.row_id,
        sec_pred=seconds,
        sec_lo=low,
        sec_hi=high,
        mem_gib_pred=float(stage_memory(columns, 0, case.cluster, memory).total)
        / 2**30,  # where nvidia-smi was read
        oom_probability=float(oom_probability(need, case.cluster, memory.spread)),
    )


def predict_default(rows: Sequence[MeasuredRow], calibration: str = "") -> list[RowPrediction]:
    """Predict every row by `calibration` (see calibration_for), else by what ships for its cluster
    and stack.
    """
    machines = {(row.case.cluster.name, row.stack): row.case.cluster for row in rows}
    known = {
        (name, stack): calibration_for(cluster, calibration)
        if calibration
        else default(cluster, stack)
        for (name, stack), cluster in machines.items()
    }
    found = []
    for row in rows:
        k = known[row.case.cluster.name, row.stack]
        seconds = predict_row(row, k).sec_pred
        width = unmeasured_half_width(row.case, k, support_of(row.case, k, seconds))
        found.append(
            predict_row(
                row,
                k,
                memory_for(replace(k, stack=row.stack), row.case.engine, row.case.cluster),
                width,
            )
        )
    return found


# Sets of rows in data/: of the BigScience documents, cleaned and as printed; and of other cards,
# stacks and shapes.
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
    """Predictions for the rows that could be read, and the rows that could not; shown as a table of
    figures.
    """

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
        return {
            name: figures([p for p in self.pairs if group_name(p[0]) == name]) for name in names
        }

    def all_figures(self) -> dict[str, Any]:
        """The figures over all rows and, if there are several, over each group."""
        result, groups = (
            {**figures(self.pairs), "skipped": len(self.skipped), "ignored": self.ignored},
            self.groups(),
        )
        return {**result, "groups": groups} if len(groups) > 1 else result

    def to_frame(self) -> DataFrame:
        """A row of figures over all timed rows, `n` of them, and one for each GPU and software
        stack: median, p90 and coverage as shares, rank correlation rho, ooms found of all that ran
        out, and false ones of all that ran.
        """
        import pandas as pd

        groups = self.groups()
        frame = pd.DataFrame(
            {"all": figures(self.pairs), **(groups if len(groups) > 1 else {})}
        ).T.infer_objects()
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
        return as_json(
            {"rows": self.predictions, "skipped": self.skipped, "summary": self.all_figures()}
        )

    def finding(self) -> Text:
        """The errors of time and memory over all rows that count, and how many times lie in their
        intervals.
        """
        f, lines = figures(self.pairs), list[Text]()
        if "median" in f:
            how = (
                f"fitted without each run's {self.left_out}"
                if self.left_out
                else "that ship or were given"
            )
            text = "Time: **median error {:.1f} %**, 90th percentile {:.1f} %, over {} runs, by constants {}. "
            text += "{:.0f} % of the measured times lie in their 90 % interval."
            lines.append(
                Text.of(text, 100 * f["median"], 100 * f["p90"], f["n"], how, 100 * f["coverage"])
            )
        if "mem_median" in f:
            text = "Memory: **median error {:.1f} %**, 90th percentile {:.1f} %, over {} runs."
            lines.append(Text.of(text, 100 * f["mem_median"], 100 * f["mem_p90"], f["mem_n"]))
        return Text.joined("\n\n", lines or ["No row has its seconds or its memory."])

    def skipped_reasons(self) -> Columns:
        """Why rows could not be read, and how many for each reason; then what was ignored of those
        that could.
        """
        counts = Counter(skipped.reason for skipped in self.skipped)
        counts.update(dict.fromkeys(self.ignored, len(self.rows)))
        return Columns(
            {
                "reason": list(counts) or ["all rows could be read"],
                "rows": list(counts.values()) or [0],
            }
        )


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
    cv = "" if cv == "none" else cv or ""
    require(not (cv and calibration), "cv", cv, "contradicts calibration, which is fitted already")
    names = FILES if isinstance(rows_csv, str) and rows_csv == "all" else (rows_csv,)
    shipped = {name: shipped_rows().with_name(f"{name}.csv") for name in SHIPPED}
    paths = [shipped.get(name, name) if isinstance(name, str) else name for name in names]
    read = [read_rows(path, cluster or None) for path in paths]
    rows, skipped = [r for found, _ in read for r in found], [s for _, left in read for s in left]
    ignored = tuple(line for path in paths for line in ignored_words(path))
    predictions = leave_one_out(rows, cv) if cv else predict_default(rows, calibration)
    found: dict[str, Any] = {
        "rows": tuple(rows),
        "predictions": tuple(predictions),
        "skipped": tuple(skipped),
    }
    return Backtest(**found, left_out=cv, ignored=ignored)


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
    found: dict[str, RowPrediction] = {}
    folds = list(dict.fromkeys((group_name(r), key(r)) for r in rows))
    for group, left_out in progress(folds, "fits without each row's " + by, "fit"):
        test = [r for r in rows if (group_name(r), key(r)) == (group, left_out)]
        gone = {r.row_id for r in test} | {r.duplicate_of for r in test}
        rest = [
            r
            for r in rows
            if key(r) != left_out and r.row_id not in gone and group_name(r) == group
        ]
        own, prior = usable(rest), prior_of(test[0].case.cluster.name, test[0].stack)
        calibration = (
            fit_time([r.case for r in own], [r.seconds for r in own], prior) if own else prior
        )
        found |= {row.row_id: predict_row(row, calibration) for row in test}
    return [found[r.row_id] for r in rows]
