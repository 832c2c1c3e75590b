"""Recalibration: a cluster's constants fitted to rows of one's own, as far as these predict each
other better.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trilane.config.cluster import Cluster, catalogue
from trilane.costmodel.calibration import Calibration, Configuration, to_json
from trilane.costmodel.fit import Refit, refit
from trilane.costmodel.measured_rows import MeasuredRow, Skipped
from trilane.costmodel.predict import predict_case
from trilane.costmodel.shipped import default
from trilane.costmodel.support import sizes_of
from trilane.utils.frozen import frozen
from trilane.utils.tables import DataFrame, Html, Json, Table, as_json
from trilane.utils.validation import require
from trilane.workspace.study import Study

# All shipped rows lie within 0.7 to 2.5 of what is predicted, also by constants of other software:
# a tenfold error of one row is beyond 6, other units than seconds are beyond 30.
CONTRADICTION = 6
OTHER_UNIT = 30


@frozen
class Recalibration(Table):
    """Measured rows, and the constants before and after them; false where there are no rows.

    `left_out` names the rows that do not count, and why; `ignored` the columns and words that were
    not read.
    """

    shown = (
        "run measured_sec_per_it predicted_sec_per_it predicted_over_measured "
        "recalibrated_sec_per_it recalibrated_half_width recalibrated_over_measured "
        "measured_gib predicted_gib gib_over_measured"
    )
    rows: tuple[MeasuredRow, ...] = ()
    prior: Calibration
    fit: Refit | None = None
    left_out: tuple[Skipped, ...] = ()
    ignored: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.rows)

    @property
    def cases(self) -> tuple[Configuration, ...]:
        return tuple(row.case for row in self.rows)

    @property
    def _seconds(self) -> list[float]:
        return [row.seconds for row in self.rows]

    @cached_property
    def fitted(self) -> Calibration:
        """The constants after the rows: the prior where they do not help."""
        if not self.fit:
            return self.prior
        cluster = self.cases[0].cluster
        fitted = replace(
            self.fit.calibration,
            card=cluster.gpu.name,
            name=f"{len(self.rows)} rows of {cluster.name}",
        )
        if not self.fit.weight:
            return fitted
        own = tuple(dict.fromkeys(map(sizes_of, self.cases)))
        return replace(fitted, stack="", own=own)

    def errors(self) -> dict[str, dict[str, float]]:
        """Median and 90th percentile of relative errors before and after, each row left out of its
        fit.
        """
        if not self.fit:
            return {}
        figures = {}
        for name, logs in (("before", self.fit.before), ("after", self.fit.after)):
            median, p90 = np.quantile(np.abs(np.expm1(logs)), (0.5, 0.9)).tolist()
            figures[name] = {"median": median, "p90": p90}
        return figures

    @property
    def headline(self) -> str:
        """How wrong the seconds were that had been predicted; KeyError where no row counts."""
        outside = 0
        for case, seconds in zip(self.cases, self._seconds, strict=True):
            before = predict_case(case, self.prior)
            outside += not before.sec_lo <= seconds <= before.sec_hi
        wrong = self.errors()["before"]["median"]
        words = f"Predicted seconds were wrong by {wrong:.0%} at the median; {outside} of "
        return f"{words}{len(self.rows)} runs lay outside the 90 % interval."

    def summary(self) -> str:
        """How many rows count and why others do not, and the errors before and after, a
        line each.
        """
        lines = []
        if self.fit:
            stack = self.prior.stack or self.rows[0].stack or "unnamed software"
            lines.append(f"{len(self.rows)} rows of {stack} used, {len(self.left_out)} not")
            for when, error in self.errors().items():
                figures = f"median {error['median']:.1%}, 90th percentile {error['p90']:.1%}"
                lines.append(f"error {when}, each row left out of its fit: {figures}")
            if not self.fit.weight:
                lines.append("they do not predict each other better: the constants stay")
        for reason, count in Counter(row.reason for row in self.left_out).items():
            lines.append(f"not used: {count} rows: {reason}")
        lines += [f"ignored {line}" for line in self.ignored]
        return "\n".join(lines)

    def to_json(self) -> Json:
        values = {
            "rows": len(self.rows),
            "left_out": self.left_out,
            "ignored": self.ignored,
            **self.errors(),
            "weight": self.fit.weight if self.fit else 0.0,
            "calibration": self.fitted.kept(),
        }
        return as_json(values)

    def to_frame(self) -> DataFrame:
        """A row a run: measured_sec_per_it, of before and after the fit predicted_ and
        recalibrated_sec_per_it, what these are over measured, and recalibrated_half_width, half of
        the 90 % interval as a share; measured_gib and predicted_gib.
        """
        before = [predict_case(case, self.prior) for case in self.cases]
        after = [predict_case(case, self.fitted) for case in self.cases]
        columns = {
            "run": [row.row_id for row in self.rows],
            "measured_sec_per_it": self._seconds,
            "predicted_sec_per_it": [p.sec_per_it for p in before],
            "recalibrated_sec_per_it": [p.sec_per_it for p in after],
            "recalibrated_half_width": [p.sec_hi / p.sec_per_it - 1 for p in after],
            "measured_gib": [row.memory_bytes / 2**30 for row in self.rows],
            "predicted_gib": [p.memory_bytes / 2**30 for p in before],
        }
        table = pd.DataFrame(columns)
        for name in ("predicted", "recalibrated"):
            ratio = table[f"{name}_sec_per_it"] / table["measured_sec_per_it"]
            table[f"{name}_over_measured"] = ratio
        return table.assign(gib_over_measured=table["predicted_gib"] / table["measured_gib"])

    def _repr_html_(self) -> str:
        return super()._repr_html_() + Html.pre(self.summary())

    def save(self, study: Study, made_by: str) -> list[Path]:
        """Write calibration.json and predicted.csv into the study, where there are rows."""
        if not self:
            return []
        return [
            study.save("calibration.json", to_json(self.fitted), made_by),
            study.save_table("predicted.csv", self.to_frame()),
        ]


def recalibrated(
    rows: Sequence[MeasuredRow],
    skipped: Sequence[Skipped],
    ignored: Sequence[str],
    cluster: Cluster | None,
    least: int,
) -> Recalibration:
    """The constants refitted to the rows that count, of which `least` must differ in more than
    their seconds.
    """
    stacks = Counter(row.stack for row in rows if row.seconds > 0)
    stack = max(stacks, key=stacks.__getitem__, default="")
    if cluster is None and rows:
        cluster = rows[0].case.cluster
    used = []
    left_out = list(skipped)
    for row, reason in zip(rows, _reasons(rows, stack, cluster), strict=True):
        if reason:
            left_out.append(Skipped(row_id=row.row_id, reason=reason))
        else:
            used.append(row)
    kinds = len({(row.case.shape, row.case.topology) for row in used})
    reasons = [f"; {row.row_id}: {row.reason}" for row in left_out[:3]]
    rule = f"{kinds or 'no'} different configurations among them can be used, {least} are needed"
    require(kinds >= least, "rows", len(rows) + len(skipped), rule + "".join(reasons))
    machine = used[0].case.cluster
    prior = replace(default(machine, stack), name=stack or machine.name)
    fitted = refit([row.case for row in used], [row.seconds for row in used], prior)
    _require_plausible(used, np.exp(-fitted.before))
    return Recalibration(
        rows=tuple(used),
        prior=prior,
        fit=fitted,
        left_out=tuple(left_out),
        ignored=tuple(ignored),
    )


def _reasons(rows: Sequence[MeasuredRow], stack: str, cluster: Cluster | None) -> Iterator[str]:
    """Why each row does not count, "" where it does: it must be of that software and cluster, and
    no copy.
    """
    first = dict[Any, MeasuredRow]()
    for row in rows:
        case = row.case
        site = row.site if row.site in catalogue() else case.cluster.name
        original = first.setdefault((case.shape, case.topology, row.seconds), row)
        if not row.seconds > 0:
            yield "has no seconds"
        elif row.excluded:
            yield "is marked as excluded"
        elif row.duplicate_of:
            yield f"repeats {row.duplicate_of}"
        elif row.problem:
            yield row.problem
        elif row.stack != stack:
            yield f"is of {row.stack or 'no named software'}; most are of {stack or 'none'}"
        elif cluster and site != cluster.name:
            yield f"ran on {site}"
        elif original is not row:
            yield f"repeats {original.row_id} to its last digit"
        else:
            yield ""


def _require_plausible(rows: Sequence[MeasuredRow], ratio: np.ndarray) -> None:
    """ValueError where measured / predicted (N,) shows rows in other units, or that contradict each
    other.
    """
    ends = f"{rows[int(ratio.argmin())].row_id}, {rows[int(ratio.argmax())].row_id}"
    took = f"take {ratio.min():.3g} and {ratio.max():.3g} of what is predicted"
    rule = f"{took}: they contradict each other"
    require(ratio.max() < CONTRADICTION * ratio.min(), "rows", ends, rule)
    factor = float(np.median(ratio))
    rule = f"is {factor:.2g} of what is predicted, as are the others"
    rule += ": seconds of an iteration are needed"
    is_plausible = 1 / OTHER_UNIT < factor < OTHER_UNIT
    require(is_plausible, "sec_per_it", f"{rows[0].seconds:g}", rule)
