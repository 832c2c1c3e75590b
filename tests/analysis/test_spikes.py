"""Spikes: what was planted is found where it is, with its size and its end; noise and drift are
not.
"""

import json
import math
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


def wandering(n, deviation=0.02, seed=1, memory=0.7):
    """Noise that remembers: each line so much of the one before."""
    noise = deviation * np.random.default_rng(seed).standard_normal(n)
    for i in range(1, n):
        noise[i] += memory * noise[i - 1]
    return course(n) * np.exp(noise)


NOISE = {
    "calm": lambda seed: noisy(10_000, 0.02, seed),
    "wandering": lambda seed: wandering(10_000, 0.02, seed),
    "small batches": lambda seed: noisy(10_000, 0.1, seed),
}


@pytest.mark.parametrize("name", NOISE)
def test_noise_raises_no_alarm_in_ten_thousand_iterations(name):
    for seed in range(3):
        norm = 0.3 * np.exp(0.15 * np.random.default_rng(seed).standard_normal(10_000))
        assert not found(NOISE[name](seed), norm)


@pytest.mark.parametrize(("size", "length"), [(1.25, 1), (1.4, 12), (2.5, 100), (1.3, 400)])
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
    kinds = [(e.kind, e.recovered) for e in found(jump)]
    assert kinds == [("loss spike", None), ("divergence", None)] and {
        e.iteration for e in found(jump)
    } == {2001}
    (event,) = [e for e in found(slow) if e.kind == "divergence"]
    assert 1900 <= event.iteration <= 2300
    broken = noisy(300, 0.01)
    broken[250:] = math.nan
    (event,) = found(broken)
    assert (event.kind, event.iteration) == ("divergence", 251) and math.isnan(event.peak)
    assert "nan (no number)" in event.sentence
    skipped = log(300, lm_loss=broken, skipped=np.isnan(broken))
    assert not spikes.find_spikes(join([skipped])), "a skipped iteration prints no loss"


def test_the_command_joins_logs_and_reports(tmp_path, capsys):
    first = [m2021(i, n=60, loss=5 - 0.01 * i + 0.01 * (i % 3)) for i in range(1, 41)]
    losses = {i: (9 if i == 50 else 5) - 0.01 * i + 0.01 * (i % 3) for i in range(36, 61)}
    later = [m2021(i, n=60, loss=loss) for i, loss in losses.items()]
    files = [str(tmp_path / name) for name in ("1.log", "2.log")]
    for name, lines in zip(files, (first, later), strict=True):
        Path(name).write_text("".join(lines))
    assert main(["logs", "spikes", *files, "--json"]) == 0
    (training,) = json.loads(capsys.readouterr().out)["trainings"]
    assert training["iterations"] == 60 and training["restarts"][0]["redone"] == 5
    (event,) = training["events"]
    assert (event["kind"], event["iteration"], event["recovered"]) == ("loss spike", 50, 51)
    assert main(["logs", "spikes", files[0], "none"]) == 1
    assert capsys.readouterr().out.endswith("40 lines\n  no spike, jump or divergence\n")
    assert main(["logs", "spikes", "none"]) == 2
