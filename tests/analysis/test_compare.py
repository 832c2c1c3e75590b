"""A/B: a claim needs more than runs of one thing differ; checked on runs whose truth is known."""

import dataclasses
import json
import math

import numpy as np
import pytest
from test_log_dialects import m2021
from test_measure import ARGUMENTS, log

from trilane.analysis.compare import SINGLE_DEVIATION, SINGLE_FREEDOM, compare
from trilane.analysis.measure import measure_log
from trilane.cli.app import main
from trilane.costmodel.measured_rows import read_rows
from trilane.utils.validation import DATA

RUN = measure_log(log(sec_per_it=2.0))


def runs(*seconds):
    return [dataclasses.replace(RUN, sec_per_it=float(s)) for s in seconds]


def claims(deviation, change, m, n, trials=400, seed=1):
    """Share of simulated comparisons that claim a difference: medians of runs scatter by
    `deviation`.
    """
    rng = np.random.default_rng(seed)
    found = 0
    for _ in range(trials):
        a = runs(*np.exp(deviation * rng.standard_normal(m)))
        b = runs(*np.exp(change + deviation * rng.standard_normal(n)))
        found += compare(a, b).decided
    return found / trials


@pytest.mark.parametrize(("m", "n"), [(2, 2), (3, 6), (1, 4)])
def test_false_alarms_stay_below_the_stated_five_percent(m, n):
    assert claims(0.02, 0.0, m, n) <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 400)


def test_the_spread_of_single_runs_is_that_of_repeats_among_the_shipped_rows():
    groups = {}
    for row in read_rows([DATA / "measured.csv"])[0]:
        if row.seconds > 0 and not row.duplicate_of:
            case = row.case
            key = (case.cluster.name, case.shape, case.topology, row.stack, case.day)
            groups.setdefault(key, []).append(math.log(row.seconds))
    differences = np.array([max(g) - min(g) for g in groups.values() if len(g) == 2])
    assert len(differences) == SINGLE_FREEDOM
    assert math.sqrt(np.mean(differences**2) / 2) == pytest.approx(SINGLE_DEVIATION, rel=0.02)


def test_where_batches_differ_the_time_of_a_token_counts():
    small, large = (
        measure_log(log(arguments=ARGUMENTS, global_batch_size=b, sec_per_it=s))
        for b, s in ((16, 2), (32, 3))
    )
    found = compare([small] * 2, [large] * 2)
    assert (
        found.unit == "token" and found.change == pytest.approx(math.log(3 / 4)) and found.decided
    )


def test_the_command_compares_logs(tmp_path, capsys):
    files = {"a": 2000.0, "b": 1500.0}
    for name, ms in files.items():
        (tmp_path / name).write_text("".join(m2021(i, ms=ms + i % 3) for i in range(1, 11)))
    a, b = (str(tmp_path / name) for name in files)
    assert main(["logs", "compare", a, a, "--with", b, "--with", b, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (
        found["decided"]
        and found["runs_a"] == 2
        and found["verdict"].startswith("B is faster: B takes 0.750 of A's time")
    )
    assert main(["logs", "compare", a, "--with", a]) == 0
    assert capsys.readouterr().out.startswith("no difference shown")
