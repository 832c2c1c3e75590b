"""The figures show what was predicted or measured, and hold names as data alone."""

import itertools
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from markup import HOSTILE

from trilane.analysis.loss_curve import join
from trilane.config.cluster import cluster
from trilane.config.model import parse_shape
from trilane.logs.run import RunLog
from trilane.planning.search import search
from trilane.planning.search_result import SearchResult
from trilane.report.html import embedded
from trilane.report.plots import explorer, losses

MACHINE, SHAPE = cluster("jz-a100-80g"), parse_shape("24,2048,16,2048,50304")


@pytest.mark.parametrize("value", HOSTILE)
def test_no_text_in_a_specification_ends_its_element(value):
    text = embedded({"name": value})
    assert json.loads(text) == {"name": value} and not set(text) & set("<>&\u2028")


@pytest.fixture(scope="module")
def found() -> SearchResult:
    return search(SHAPE, MACHINE, gpus=(16, 32), gbs=128, mbs=(1, 2, 4), recompute="none")


def drawn(found: SearchResult) -> explorer.Interactive:
    """The explorer of a search."""
    return explorer.explorer(explorer.shown_plans(found))


def test_the_explorer_shows_the_best_the_front_and_each_plan_once_with_its_prediction(found):
    rows = drawn(found).spec["datasets"]["plans"]
    ids = [row["id"] for row in rows]
    best = found.best(1).rows[0]
    assert ids[0] == best.plan.id and len({*ids}) == len(ids)
    p, row = best.prediction, rows[0]
    assert row["lo"] < row["s"] < row["hi"] and row["evidence"] == p.support.words
    assert sum(row["times"]) == pytest.approx(p.sec_per_it, rel=1e-3)
    assert sum(row["memory"]) == pytest.approx(p.memory_bytes / 2**30, rel=1e-3)


def test_filters_choose_among_all_that_can_run(found):
    """Of a TP, ZeRO stage and risk the explorer has the fastest that a search of these alone has,
    faint where a filter leaves it out.
    """
    spec = drawn(found).spec
    for tp, zero in itertools.product((1, 2, 4, 8), (0, 1)):
        sizes = {"gpus": (16, 32), "gbs": 128, "mbs": (1, 2, 4), "recompute": "none"}
        (best, *_), risk = search(SHAPE, MACHINE, tp=tp, zero=zero, **sizes).rows, "up to 1%"
        rows = [
            (r["s"], r["id"])
            for r in spec["datasets"]["plans"]
            if (r["tp"], r["zero"], r["risk"]) == (tp, zero, risk)
        ]
        assert min(rows)[1] == best.plan.id
    options = {p["name"]: p["bind"]["options"] for p in spec["params"] if "only" in p["name"]}
    assert options["only_tp"] == ["all", 1, 2, 4, 8] and options["only_zero"] == ["all", 0, 1]


def log(rows=30, first=1, **columns):
    """A log of `rows` iterations of 4 sequences each."""
    at = np.arange(first, first + rows)
    values = {"lm_loss": 3 - at / 100, "grad_norm": 1 + at % 3, "sec_per_it": 3600.0, **columns}
    table = pd.DataFrame({"iteration": at, "consumed_samples": 4 * at})
    table = table.assign(**{name: np.broadcast_to(value, rows) for name, value in values.items()})
    return RunLog(source=Path("a.log"), iterations=table, status="completed", evidence="")


def test_a_restart_is_marked_at_its_first_iteration():
    curve = join([log(20), log(20, first=11, lm_loss=5.0)])
    loss, norm = losses.curves({"a": curve}).axes
    (mark,) = [line for line in loss.lines if line.get_linestyle() == "--"]
    assert mark.get_xdata()[0] == 11 and loss.get_xlabel() == "iterations"
    assert norm.get_ylabel() == "gradient norm"
