"""Recalibration: a cluster's constants fitted to rows of one's own, as far as these predict each
other better.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from trilane.config.cluster import Cluster, catalogue
from trilane.costmodel.calibration import Calibration, Configuration, interval, to_json
from trilane.costmodel.constants import BOUNDS
from trilane.costmodel.fit import Posterior, Refit, posterior, refit
from trilane.costmodel.measured_rows import (
    MeasuredRow,
    Skipped,
    Source,
    cells_of,
    ignored_words,
    read_rows,
)
from trilane.costmodel.predict import Prediction, predict, sizes_of
from trilane.costmodel.shipped import default
from trilane.utils.tables import DataFrame, Html, Table, Text, as_json
from trilane.utils.validation import require
from trilane.workspace.study import Study, load_cluster

NOTHING = Text("Nothing to predict: no run has shape, topology, cluster and seconds.")


@dataclass(frozen=True, kw_only=True)
class Recalibration(Table):
    """Measured rows, and the constants before and after them; false where there are no rows.

    `left_out` names the rows that do not count, and why; `ignored` the columns and words that were
    not read.
    """

    shown = "run measured_sec_per_it predicted_sec_per_it predicted_over_measured recalibrated_sec_per_it"
    shown += " recalibrated_half_width recalibrated_over_measured measured_gib predicted_gib gib_over_measured"
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

    @cached_property
    def fitted(self) -> Calibration:
        """The constants after the rows: the prior where they do not help."""
        if not self.fit:
            return self.prior
        cluster, cases = self.cases[0].cluster, self.cases
        name = f"{len(cases)} rows of {cluster.name}"
        known = replace(
            self.fit.calibration, card=cluster.gpu.name, cluster=cluster.name, name=name
        )
        if not self.fit.weight:
            return known
        # what is written down for later plans: the width for one like those that ran
        width = float(
            np.median(posterior(cases, self._seconds, known, self.prior).half_widths(cases))
        )
        return replace(known, half_width=width, stack="", own=sizes_of(cases))

    @cached_property
    def belief(self) -> Posterior:
        """The posterior of the constants, which knows the rows."""
        return posterior(self.cases, self._seconds, self.fitted, self.prior)

    @cached_property
    def before(self) -> tuple[Prediction, ...]:
        """The predictions by the prior."""
        return tuple(predictions(self.cases, self.prior))

    @cached_property
    def after(self) -> tuple[Prediction, ...]:
        """The predictions by the constants after the rows."""
        return tuple(predictions(self.cases, self.fitted, self.belief))

    @property
    def _seconds(self) -> list[float]:
        return [row.seconds for row in self.rows]

    def errors(self) -> dict[str, dict[str, float]]:
        """Median and 90th percentile of relative errors before and after, each row left out of its
        fit.
        """
        found = {"before": self.fit.before, "after": self.fit.after} if self.fit else {}
        each = {name: np.abs(np.expm1(errors)) for name, errors in found.items()}
        return {
            n: {"median": float(np.median(e)), "p90": float(np.quantile(e, 0.9))}
            for n, e in each.items()
        }

    def moved(self) -> dict[str, tuple[float, float]]:
        """The constants that changed by 1 % or more, before and after, those that changed most
        first.
        """
        pairs = {name: (getattr(self.prior, name), getattr(self.fitted, name)) for name in BOUNDS}
        size = {name: abs(math.log(new / old)) for name, (old, new) in pairs.items()}
        return {
            name: pairs[name] for name in sorted(size, key=lambda n: -size[n]) if size[name] >= 0.01
        }

    def summary(self) -> str:
        """How many rows count and why others do not, the errors before and after, and what moved,
        in lines.
        """
        reasons = Counter(row.reason for row in self.left_out)
        names = {row.reason: row.row_id for row in reversed(self.left_out)}
        more = {reason: f" and {count - 1} more" * (count > 1) for reason, count in reasons.items()}
        lines = [f"not used: {names[reason]}{more[reason]}: {reason}" for reason in reasons][:12]
        lines += [f"ignored {line}" for line in self.ignored]
        if not self.fit:
            return "\n".join(lines)
        stack = f" of {self.prior.stack or self.rows[0].stack}" * bool(
            self.prior.stack or self.rows[0].stack
        )
        texts = [f"{name} {e['median']:.1%} / {e['p90']:.1%}" for name, e in self.errors().items()]
        weight = f"; weight of the rows {self.fit.weight:g}" if self.fit.weight else ""
        moved = ", ".join(
            f"{name} {old:.3g} -> {new:.3g}" for name, (old, new) in self.moved().items()
        )
        kept = (
            "they do not improve the prediction of each other: the constants from before are kept"
        )
        lines = [
            f"{len(self.rows)} rows{stack} on {self.cases[0].cluster.name} used, {len(self.left_out)} not",
            f"error, median / 90th percentile: {', '.join(texts)} (each row left out of its fit{weight})",
            f"moved: {moved or 'nothing'}" if self.fit.weight else kept,
            *lines,
        ]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "rows": len(self.rows),
            "left_out": self.left_out,
            "ignored": self.ignored,
        }
        found |= {
            **self.errors(),
            "weight": self.fit.weight if self.fit else 0.0,
            "moved": self.moved(),
        }
        return as_json({**found, "calibration": self.fitted.kept()})

    def to_frame(self) -> DataFrame:
        """A row a run: measured_sec_per_it, of before and after the fit predicted_ and
        recalibrated_sec_per_it, what these are over measured, and half_width, half of the 90 %
        interval as a share; measured_gib and predicted_gib.
        """
        table = pd.DataFrame(
            {"run": [row.row_id for row in self.rows], "measured_sec_per_it": self._seconds}
        )
        for name, predictions in (("predicted", self.before), ("recalibrated", self.after)):
            table[f"{name}_sec_per_it"] = [p.sec_per_it for p in predictions]
            table[f"{name}_over_measured"] = (
                table[f"{name}_sec_per_it"] / table["measured_sec_per_it"]
            )
            table[f"{name}_half_width"] = [p.sec_hi / p.sec_per_it - 1 for p in predictions]
        table["measured_gib"] = [row.memory_bytes / 2**30 for row in self.rows]
        table["predicted_gib"] = [p.memory_bytes / 2**30 for p in self.before]
        return table.assign(gib_over_measured=table["predicted_gib"] / table["measured_gib"])

    def _repr_html_(self) -> str:
        found = super()._repr_html_() if self else Html.of("<p>{}</p>", NOTHING)
        lines = Html.joined("", (Html.of("<p>{}</p>", line) for line in self.summary().split("\n")))
        summary = "Which rows count, their errors, and which constants moved"
        return found + Html.of("<details><summary>{}</summary>{}</details>", summary, lines)

    def measured_rows(self) -> DataFrame:
        """The measured runs in the columns that fit() and `trilane calibrate` take."""
        return pd.DataFrame([cells_of(row) for row in self.rows])

    def save(self, study: Study, made_by: str) -> list[Path]:
        """Write calibration.json, predicted.csv and measured.csv into the study, where there are
        rows.
        """
        if not self:
            return []
        tables = {"predicted.csv": self.to_frame(), "measured.csv": self.measured_rows()}
        first = study.save("calibration.json", to_json(self.fitted), made_by)
        return [first, *(study.save_table(name, table) for name, table in tables.items())]


def fit(rows: Source, cluster: Cluster | str) -> Recalibration:
    """The constants of a cluster fitted to measured rows: a DataFrame, or a CSV or Markdown file,
    with the columns of read_rows().

        fit(pandas.read_csv("rows.csv"), "jz-a100-80g").fitted

    The prior is what ships for the rows' software (column `engine`). Raises ValueError where no two
    rows can count, for rows of two clusters, in other units than seconds, or that contradict each
    other by a factor of ten.
    """
    machine = load_cluster(cluster)
    found, skipped = read_rows(rows, machine)
    if skipped and not isinstance(
        rows, str | Path
    ):  # those of a file are reported, as `trilane calibrate` does
        require(False, "rows", skipped[0].row_id, skipped[0].reason)
    return recalibrated(found, skipped, ignored_words(rows), machine, least=2)


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
    sites = list(dict.fromkeys(row.site for row in rows if row.site)) or [""]
    require(
        len(sites) == 1,
        "cluster",
        ", ".join(sites),
        "the rows are of two clusters; constants are of one",
    )
    is_other = cluster and sites[0] in catalogue() and sites[0] != cluster.name
    require(
        not is_other,
        "cluster",
        sites[0],
        f"is what the rows name, and not {cluster and cluster.name}",
    )
    stack = next(
        iter(Counter(row.stack for row in rows if row.seconds > 0).most_common(1)), ("", 0)
    )[0]
    found = list(_reasons(rows, stack, cluster or (rows[0].case.cluster if rows else None)))
    used = [row for row, reason in zip(rows, found, strict=True) if not reason]
    left_out = [
        Skipped(row_id=row.row_id, reason=why) for row, why in zip(rows, found, strict=True) if why
    ]
    left_out = [*skipped, *left_out]
    kinds = len({(row.case.shape, row.case.topology) for row in used})
    reasons = "".join(f"; {row.row_id}: {row.reason}" for row in left_out[:3])
    reasons += "".join(f"; ignored {line}" for line in ignored[:3])
    rule = f"{kinds or 'no'} different configurations among them can be used, {least} are needed{reasons}"
    require(kinds >= least, "rows", len(rows) + len(skipped), rule)
    machine = used[0].case.cluster
    prior = replace(default(machine, stack), name=stack or machine.name)
    fitted = refit([row.case for row in used], [row.seconds for row in used], prior)
    _require_plausible(used, np.exp(-fitted.before))
    kept: dict[str, Any] = {"left_out": tuple(left_out), "ignored": tuple(ignored)}
    return Recalibration(rows=tuple(used), prior=prior, fit=fitted, **kept)


def _reasons(rows: Sequence[MeasuredRow], stack: str, cluster: Cluster | None) -> Iterator[str]:
    """Why each row does not count, "" where it does: it must be of that software and cluster, and
    no copy.
    """
    seen = dict[Any, int]()
    for number, row in enumerate(rows):
        case = row.case
        first = seen.setdefault((case.shape, case.topology, row.seconds), number)
        reasons = {
            "has no seconds": not row.seconds > 0,
            "is marked as excluded": row.excluded,
            f"repeats {row.duplicate_of}": row.duplicate_of,
            row.problem: row.problem,
            f"is of {row.stack or 'no named software'}; most are of {stack or 'none'}": row.stack
            != stack,
            f"ran on {case.cluster.name}": cluster and case.cluster.name != cluster.name,
            f"repeats {rows[first].row_id} to its last digit": first != number,
        }
        yield next((text for text, is_wrong in reasons.items() if is_wrong), "")


def _require_plausible(rows: Sequence[MeasuredRow], ratio: np.ndarray) -> None:
    """ValueError where measured / predicted (N,) shows rows in other units, or that contradict each
    other.
    """
    low, high = (rows[int(at)].row_id for at in (ratio.argmin(), ratio.argmax()))
    rule = f"take {ratio.min():.3g} and {ratio.max():.3g} of what is predicted: they contradict each other"
    # all shipped rows lie within 0.7 to 2.5, also by constants of other software: a tenfold error
    # is beyond 6
    require(ratio.max() < 6 * ratio.min(), "rows", f"{low}, {high}", rule)
    factor = float(np.median(ratio))
    rule = f"is {factor:.2g} of what is predicted, as are the others: seconds of an iteration are needed"
    require(1 / 30 < factor < 30, "sec_per_it", f"{rows[0].seconds:g}", rule)


def predictions(
    cases: Sequence[Configuration], known: Calibration, belief: Posterior | None = None
) -> list[Prediction]:
    """The prediction for each case, with the belief's intervals where it is given."""
    found = [predict(c, known.on(c.day, c.topology.gpus)) for c in cases]
    if belief is None:
        return found
    each = zip(found, belief.half_widths(cases).tolist(), strict=True)
    ends = [(p, interval(p.sec_per_it, width)) for p, width in each]
    return [replace(p, sec_lo=low, sec_hi=high) for p, (low, high) in ends]
