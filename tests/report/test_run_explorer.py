"""The figure of a study's trainings: what is drawn of long, resumed and damaged logs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from trilane.analysis.loss_curve import join
from trilane.logs.run import RunLog
from trilane.report.plots.run_explorer import explorer
from trilane.report.plots.run_explorer_rows import smoothed, thinned, widths
from trilane.utils.tables import Text


def log(rows=30, first=1, **columns):
    """A log of `rows` iterations of 4 sequences and 3,600 seconds each."""
    at = np.arange(first, first + rows)
    given = {"lm_loss": 3 - at / 100, "grad_norm": 1 + at % 3, "sec_per_it": 3600.0, "consumed_samples": 4 * at}
    table = pd.DataFrame({"iteration": at, **{k: np.broadcast_to(v, rows) for k, v in {**given, **columns}.items()}})
    return RunLog(source=Path("a.log"), iterations=table, status="completed", evidence="")


def drawn(curves):
    """The series, the restarts, and the values of the controls."""
    spec = explorer(curves).spec
    picks = {p["name"]: p for p in spec["params"]}
    return spec["data"]["values"], spec, picks


def test_a_spike_of_one_line_in_a_long_log_is_drawn():
    loss = np.full(100_000, 2.0)
    loss[71_234] = 9.0
    (series,), _, _ = drawn({"a": join([log(100_000, lm_loss=loss)])})
    assert len(series["iterations"]) <= 2500 and series["iterations"][-1] == 100_000
    assert series["loss0"][series["iterations"].index(71_235)] == 9.0
    assert (
        f"Of 100,000 lines {len(series['iterations']):,} are drawn"
        in explorer({"a": join([log(100_000, lm_loss=loss)])}).text
    )


def test_short_logs_are_drawn_line_by_line_and_lines_without_a_number_are_gaps():
    assert thinned([np.arange(10.0)], 10).tolist() == list(range(10))
    (series,), _, _ = drawn({"a": join([log(4, lm_loss=np.array([3.0, np.nan, 2.0, 1.0]))])})
    assert series["loss0"] == [3, None, 2, 1]


def test_smoothing_is_the_unbiased_exponential_average_and_keeps_gaps():
    """Two lines: the first weighs half of the second, the third is missing: 4 / 3 of 2 * 1/3 + 1 * 2/3."""
    assert smoothed(np.array([2.0, 1.0, np.nan, 1.0]), 2) == pytest.approx([2, 4 / 3, np.nan, 8 / 7], nan_ok=True)
    assert smoothed(np.full(50, 7.0), 20) == pytest.approx(np.full(50, 7.0)), "a constant stays what it is"


def test_all_axes_that_all_logs_have_are_offered():
    both = {"a": join([log()], seq_length=10), "b": join([log(5)])}
    assert drawn({"a": both["a"]})[2]["across"]["bind"]["options"] == ["iterations", "samples", "tokens", "hours"]
    series, _, picks = drawn(both)
    assert picks["across"]["bind"]["options"] == ["iterations", "samples", "hours"], "b does not know its tokens"
    assert series[0]["samples"][-1] == 120 and series[0]["hours"][-1] == 30


def test_a_restart_is_marked_and_what_was_trained_again_is_drawn_as_it_was_the_first_time():
    first, second = log(20), log(20, first=11, lm_loss=5.0)
    series, spec, _ = drawn({"a": join([first, second])})
    assert [(s["piece"], s["iterations"][0], s["iterations"][-1]) for s in series] == [(0, 1, 30), (1, 11, 20)]
    assert series[1]["hours"] == [*range(11, 21)], "over the hours of the second time"
    marks = [layer["data"]["values"] for layer in spec["concat"][0]["layer"] if "data" in layer]
    assert [(m["resumed"], m["again"], m["hours"]) for m in marks[0]] == [
        ("at iteration 11", "10 lines trained again", 11)
    ]


def test_trainings_that_coincide_are_drawn_thick_to_thin():
    same, other = join([log()]), join([log(lm_loss=4.0)])
    assert widths({"a": same, "b": same}) == sorted(widths({"a": same, "b": same}), reverse=True) != [1.6, 1.6]
    assert widths({"a": same, "b": other}) == [1.6, 1.6]


def test_without_losses_there_is_one_clear_line():
    assert explorer({}) == explorer({"a": join([log(lm_loss=np.nan)])}) == Text("No log prints a loss.")


def test_a_loss_that_falls_far_begins_logarithmic_and_a_quantity_that_no_log_has_gets_no_panel():
    assert drawn({"a": join([log(lm_loss=np.linspace(11, 2, 30))])})[2]["as_log"]["value"] is True
    assert drawn({"a": join([log()])})[2]["as_log"]["value"] is False
    assert len(drawn({"a": join([log(grad_norm=0.0)])})[1]["concat"]) == 1


def test_names_are_data_and_never_part_of_an_expression():
    name = "'] + alert(1) + ['"
    _, spec, _ = drawn({name: join([log()])})
    text = str({k: v for k, v in spec["concat"][0]["layer"][0].items() if k == "transform"})
    assert "alert" not in text


def test_a_loss_that_never_changes_is_drawn_too():
    (series,), _, _ = drawn({"a": join([log(9, lm_loss=7.0, grad_norm=1.0)])})
    assert series["loss0"] == [7] * 9


def test_validation_losses_are_dots_on_every_axis_of_the_loss_alone():
    held_out = pd.DataFrame({"iteration": [10, 30], "lm_loss": [2.95, 2.75]})
    curves = {"a": join([replace(log(), validation=held_out)]), "b": join([log()])}
    first, *others = drawn(curves)[1]["concat"]
    (dots,) = [x for x in first["layer"] if x["mark"]["type"] == "point" and x.get("data")]
    at = {"iterations": 10, "samples": 40, "hours": 10}
    assert dots["data"]["values"][0] == {"run": "a", **at, "validation": 2.95} and len(dots["data"]["values"]) == 2
    assert len(first["layer"]) == len(others[0]["layer"]) + 2
    assert "Dots are validation losses, the last of each: a 2.75." in explorer(curves).text
