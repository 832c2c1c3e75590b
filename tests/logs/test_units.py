"""Seconds that are differences of time stamps in whole seconds."""

import numpy as np
import pytest

from trilane.logs.table import NAN, NumericTable
from trilane.logs.units import average_rounded


def table(each, count=60, step=1, pauses=(), first=1):
    """Lines of a run of `each` seconds an iteration, whose stamps are cut to whole seconds; 20 s after some lines."""
    at = np.arange(first, first + count * step, step, dtype=float)
    exact = each * (at - first) + 20.3 * sum((np.arange(count) > p).astype(float) for p in pauses) + 0.37
    stamps = np.floor(exact)
    changes = np.flatnonzero(np.concatenate([[True], stamps[1:] != stamps[:-1]]))
    seconds = np.full(count, NAN)
    seconds[changes[1:]] = np.diff(stamps[changes]) / np.diff(at[changes])
    made = NumericTable()
    made.extend(["iteration", "sec_per_it"], np.array([at, seconds]))
    return made


@pytest.mark.parametrize("pauses", [(), (30,), (9, 20, 31, 42, 53)])
@pytest.mark.parametrize(
    ("each", "count", "step"), [(3.5, 40, 1), (2.31, 60, 1), (0.18, 600, 1), (0.35, 100, 10), (1.49, 400, 1)]
)
def test_the_median_of_rounded_seconds_is_right_to_a_few_percent(each, count, step, pauses):
    rounded = table(each, count, step, pauses)
    assert "whole seconds" in average_rounded(rounded)[0]
    assert np.nanmedian(rounded.column("sec_per_it")) == pytest.approx(each, rel=0.03)


@pytest.mark.parametrize("seconds", [[91 / 50, 92 / 50, 91 / 50, 107 / 50], [2.25, 2.31, 2.4, 2.2], [1.0, NAN, 2.0]])
def test_long_intervals_exact_stamps_and_too_few_lines_stay_as_they_are(seconds):
    made = NumericTable()
    made.extend(["iteration", "sec_per_it"], np.array([50.0 * np.arange(1, len(seconds) + 1), seconds]))
    assert average_rounded(made)[0] == ""
    np.testing.assert_array_equal(made.column("sec_per_it"), seconds)
