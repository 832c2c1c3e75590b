"""Measured rows predicted by fits that have not seen them: without their table, size, date or file."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trilane.costmodel.calibration import Calibration
from trilane.costmodel.fit import fit_time
from trilane.costmodel.measured_rows import MeasuredRow, every_row, usable
from trilane.costmodel.memory import DEFAULT
from trilane.costmodel.metrics import RowPrediction, calibrate_memory, calibrate_time, group_name, predict_row
from trilane.costmodel.shipped import Fit, combined, prior_of
from trilane.costmodel.uncertainty import posterior
from trilane.utils.progress import progress
from trilane.utils.validation import require_known

LEAVE_OUT: dict[str, Callable[[MeasuredRow], Any]] = {
    "table": lambda row: row.table,
    "hidden": lambda row: row.case.shape.hidden_size,
    "date": lambda row: row.case.day,
}
FOREIGN = {"file": 0, "file-ten": 10}  # leave out a whole file, and how many rows of its own are known then


def leave_one_out(rows: Sequence[MeasuredRow], by: str) -> list[RowPrediction]:
    """Cross-validation: predict every row by constants fitted without its table, hidden size, date or file (`by`).

    The fits start from the priors of constants.py. Rows of one GPU and software stack share the constants of time, rows
    of one stack those of memory. A row and its repeats are left out together. By `file`, nothing of that site and stack
    is left, and its constants are those that fits of the other files share with it (shipped.combined); by
    `file-ten` ten rows of the same cluster and stack are known. Raises ValueError for another `by`.
    """
    require_known("cv", by, (*LEAVE_OUT, *FOREIGN))
    if by in FOREIGN:
        return predict_foreign(rows, FOREIGN[by])
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
    memory = calibrate_memory([r for r in kept if r.stack == first.stack])
    return [predict_row(row, calibration, memory) for row in test]


def predict_foreign(rows: Sequence[MeasuredRow], known: int) -> list[RowPrediction]:
    """Predict the rows of each cluster and stack by fits of other files, and of `known` of their own rows.

    The known rows are drawn at random (seeded) for each fold of a group, never from the fold itself.
    """
    distinct = {(row.file, row.row_id): row for row in (*every_row(), *rows)}
    groups: dict[tuple[str, str, str], list[MeasuredRow]] = {}
    for row in distinct.values():
        groups.setdefault((row.file, row.case.cluster.name.replace("16g", "32g"), row.stack), []).append(row)
    wanted, found = {r.row_id for r in rows}, dict[str, RowPrediction]()
    fits = {}
    for key, members in groups.items():
        timed, prior = usable(members), prior_of(*key[1:])
        fitted = fit_time([r.case for r in timed], [r.seconds for r in timed], prior)
        fits[key] = Fit.of(timed, fitted)
    for key, members in progress(list(groups.items()), "fits of other files", "group"):
        if not wanted & {r.row_id for r in members}:
            continue
        first = members[0]
        prior = combined(first.case.cluster, first.stack, [fit for k, fit in fits.items() if k[0] != key[0]])
        rng = np.random.default_rng(0)
        order = rng.permutation(len(members))
        for fold in np.array_split(order, max(len(members) // 10, 2) if known else 1):
            test = [members[i] for i in fold]
            own = usable([members[i] for i in order if i not in fold])
            on = [own[i] for i in rng.permutation(len(own))[:known]] if known else []
            found |= {p.row_id: p for p in _predict_after(test, on, prior)}
    return [found[r.row_id] for r in rows]


def _predict_after(test: Sequence[MeasuredRow], on: Sequence[MeasuredRow], prior: Calibration) -> list[RowPrediction]:
    """Predict rows by the prior refitted to the rows `on`, none or some, with the posterior's intervals."""
    calibration = calibrate_time(on, prior)
    fitted = posterior([r.case for r in on], [r.seconds for r in on], calibration, prior)
    widths = fitted.half_widths([row.case for row in test]).tolist()
    return [predict_row(row, calibration, DEFAULT, width) for row, width in zip(test, widths, strict=True)]
