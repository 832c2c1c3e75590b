"""How wrong predictions are for a site and a software stack without rows, and after ten rows of it.

    python benchmarks/foreign_sites.py [--json]

All shipped rows, of each file the constants that fits of the other files share with it
(shipped.combined); then with ten of its own rows. docs/planner.md, 'Sites and stacks left out as a
whole', has the figures.
"""

import json
import sys
from collections.abc import Sequence

import numpy as np

from trilane.costmodel.backtest import compared, figures
from trilane.costmodel.fit import fit_time, refit
from trilane.costmodel.measured_rows import MeasuredRow, every_row, usable
from trilane.costmodel.memory import DEFAULT
from trilane.costmodel.predict import Prediction, predict_case
from trilane.costmodel.shipped import Fit, combined, nodes_name, prior_of


def main() -> None:
    """Print the figures of each file and stack, without a row and after ten."""
    rows, found = list(every_row()), dict[str, dict[str, object]]()
    for known in (0, 10):
        runs = compared(rows, predict_foreign(rows, known))
        names = [f"{row.file} {row.stack}" for row in rows]
        for name, own in (("all", runs), *runs.groupby(names, sort=False)):
            width = (own["sec_hi"] / own["sec_lo"]).median()
            found.setdefault(name, {})[f"after {known} rows"] = figures(own) | {"width": width}
    if "--json" in sys.argv:
        print(json.dumps(found, indent=1, default=float))
        return
    for name, each in found.items():
        print(name)
        for when, values in each.items():
            print(f"  {when}: {', '.join(f'{key} {value:.3g}' for key, value in values.items())}")  # type: ignore[attr-defined]


def predict_foreign(rows: Sequence[MeasuredRow], known: int) -> list[Prediction]:
    """Predict the rows of each cluster and stack by fits of other files, and of `known` of their
    own rows.

    The known rows are drawn at random (seeded) for each fold of a group, never from the fold
    itself; to them the prior is refitted. Intervals are the posterior's.
    """
    distinct = {(row.file, row.row_id): row for row in rows}
    groups: dict[tuple[str, str, str], list[MeasuredRow]] = {}
    for row in distinct.values():
        groups.setdefault((row.file, nodes_name(row.case.cluster.name), row.stack), []).append(row)
    found, fits = dict[str, Prediction](), {}
    for key, members in groups.items():
        timed, prior = usable(members), prior_of(members[0].case.cluster, key[2])
        fitted = fit_time([r.case for r in timed], [r.seconds for r in timed], prior)
        fits[key] = Fit.of(timed, fitted)
    for key, members in groups.items():
        first = members[0]
        prior = combined(
            first.case.cluster, first.stack, [fit for k, fit in fits.items() if k[0] != key[0]]
        )
        rng = np.random.default_rng(0)
        order = rng.permutation(len(members))
        for fold in np.array_split(order, max(len(members) // 10, 2) if known else 1):
            test = [members[i] for i in fold]
            own = usable([members[i] for i in order if i not in fold])
            on = [own[i] for i in rng.permutation(len(own))[:known]] if known else []
            measured = [r.case for r in on], [r.seconds for r in on]
            calibration = refit(*measured, prior).calibration if on else prior
            for row in test:
                found[row.row_id] = predict_case(row.case, calibration, DEFAULT)
    return [found[r.row_id] for r in rows]


if __name__ == "__main__":
    main()
