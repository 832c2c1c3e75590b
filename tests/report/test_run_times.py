"""The figures of what an iteration takes: parts in their order, ratios with their intervals."""

from types import SimpleNamespace

import pandas as pd
import pytest

from trilane.analysis.recalibrate import NOTHING
from trilane.report.plots.run_times import UNTIMED, phases_measured, phases_predicted, predicted_over_measured
from trilane.utils.tables import Text


def run(name, seconds, **timers):
    """A measurement with the medians of some timers, in seconds."""
    table = pd.DataFrame({"iteration": [1, 2], **{k.replace("_", "-"): [v, v] for k, v in timers.items()}})
    iterations = pd.DataFrame({"iteration": [1, 2]})
    log = SimpleNamespace(timers=table if timers else pd.DataFrame(), iterations=iterations)
    window = SimpleNamespace(counts=[True, True])
    return SimpleNamespace(name=name, log=log, window=window, sec_per_it=seconds)


def test_phases_follow_each_other_and_what_no_timer_covers_ends_the_iteration():
    timers = {"forward_compute": 1.0, "backward_compute": 2.0, "optimizer": 0.5}
    drawn = phases_measured([run("a", 4.0, **timers), run("b", 3.0)]).spec["data"]["values"]
    parts = [(v["part"], v["begin"], v["end"]) for v in drawn]
    assert parts == [("forward", 0, 1), ("backward", 1, 3), ("optimizer", 3, 3.5), (UNTIMED, 3.5, 4)]
    assert sum(v["share"] for v in drawn) == pytest.approx(1)
    assert isinstance(phases_measured([run("b", 3.0)]), Text), "one line, no empty figure"


def prediction(seconds, low, high):
    return SimpleNamespace(sec_per_it=seconds, sec_lo=low, sec_hi=high)


class Recalibrated(SimpleNamespace):
    def __bool__(self):
        return bool(self.runs)


def test_a_run_outside_its_interval_is_distinguished_from_one_inside():
    before, after = [prediction(2.0, 1.5, 2.5)], [prediction(3.5, 3.0, 4.2)]
    found = predicted_over_measured(Recalibrated(runs=[run("a", 4.0)], before=before, after=after, inside=0))
    drawn = next(layer["data"]["values"] for layer in found.spec["layer"] if "one" not in str(layer["data"]["values"]))
    assert [(v["when"], v["ratio"], v["low"], v["inside"]) for v in drawn] == [
        ("before these runs", 0.5, 0.375, "no"),
        ("after them", 0.875, 0.75, "yes"),
    ]
    assert "0 of 1" in found.text


def test_without_a_prediction_there_is_one_clear_line():
    nothing = Recalibrated(runs=[])
    assert predicted_over_measured(nothing) is phases_predicted(nothing) is NOTHING
