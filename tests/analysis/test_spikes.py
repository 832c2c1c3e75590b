"""Spikes: what was planted is found where it is, with its size and its end; noise and drift are
not.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from test_log_dialects import m2021
from test_measure import log

from trilane.analysis import spikes
from trilane.analysis.loss_curve import join
from trilane.cli.app import main


def course(n):
    """A loss that falls as they do: fast, then by a power of the iteration."""
    return 1.7 + 27 * (np.arange(1, n + 1) + 30.0) ** -0.35


def found(loss, norm=None):
    columns = {"lm_loss": loss} if norm is None else {"lm_loss": loss, "grad_norm": norm}
    return spikes.find_spikes(join([log(len(loss), **columns)]))


def noisy(n, deviation=0.02, seed=1):
    return course(n) * np.exp(deviation * np.random.default_rng(seed).standard_normal(n))


@pytest.mark.parametrize("deviation", [0.02, 0.1])
def test_noise_raises_no_alarm_in_ten_thousand_iterations(deviation):
    norm = 0.3 * np.exp(0.15 * np.random.default_rng(1).standard_normal(10_000))
    assert not found(noisy(10_000, deviation), norm)


@pytest.mark.parametrize(("size", "length"), [(1.25, 1), (1.3, 400)])
def test_a_planted_spike_is_found_with_its_size_and_its_recovery(size, length):
    loss = noisy(3000, 0.01)
    loss[2000 : 2000 + length] *= 1 + (size - 1) * np.linspace(1, 0.5, length)
    (event,) = found(loss)
    assert (event.kind, event.iteration) == ("loss spike", 2001)
    assert event.peak / event.level == pytest.approx(size, rel=0.05)
    assert event.recovered is not None and abs(event.recovered - 2001 - length) <= 0.1 * length + 2


def test_a_loss_that_rises_and_stays_is_a_divergence():
    jump, slow = noisy(3000, 0.01), noisy(3000, 0.01)
    jump[2000:] *= 2
    slow[2000:] *= np.linspace(1, 1.5, 1000)
    divergence, spike = found(jump)
    assert (divergence.kind, spike.kind, spike.iteration) == ("divergence", "loss spike", 2001)
    assert 1900 <= divergence.iteration <= 2001 and spike.recovered is None
    (event,) = [e for e in found(slow) if e.kind == "divergence"]
    assert 1900 <= event.iteration <= 2300


def test_the_command_joins_logs_and_reports(tmp_path, capsys):
    first, later = f"{tmp_path}/1.log", f"{tmp_path}/2.log"
    for path, numbers in ((first, range(1, 41)), (later, range(36, 61))):
        losses = {i: 9 if i == 50 else 5 - 0.01 * (i % 3) for i in numbers}
        lines = [m2021(i, n=60, loss=loss) for i, loss in losses.items()]
        Path(path).write_text("".join(lines))
    assert main(["logs", "spikes", first, later, "--json"]) == 0
    (training,) = json.loads(capsys.readouterr().out)["trainings"]
    assert training["iterations"] == 60 and training["restarts"][0]["redone"] == 5
    (event,) = training["events"]
    assert (event["kind"], event["iteration"], event["recovered"]) == ("loss spike", 50, 51)
    assert main(["logs", "spikes", first, "none"]) == 1
    assert capsys.readouterr().out.endswith("40 lines\n  no spike, jump or divergence\n")
    assert main(["logs", "spikes", "none"]) == 2
