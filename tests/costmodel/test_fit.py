"""Fits: slopes of a function that is known, and many points at once as one after another."""

import numpy as np

from trilane.costmodel.constants import BOUNDS
from trilane.costmodel.fit import time_errors
from trilane.costmodel.measured_rows import every_row
from trilane.costmodel.shipped import default

A = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 7.0]])


def test_the_errors_of_many_constants_at_once_are_those_of_one_after_another() -> None:
    """Of rows of several clusters, some in a regime of their own."""
    rows = [row for row in every_row() if np.isfinite(row.seconds)][::7]
    prior = default(rows[0].case.cluster)
    errors = time_errors(
        [r.case for r in rows], np.array([r.seconds for r in rows]), prior.regimes, prior
    )
    start = np.log([*(getattr(prior, name) for name in BOUNDS), *(r.factor for r in prior.regimes)])
    points = start + 0.1 * np.eye(len(start))
    assert len({r.case.cluster.name for r in rows}) > 1
    assert np.array_equal(errors(points), np.array([errors(point) for point in points]))
