"""Continuity: what a restart did not continue is named with its cause, from the logs alone; clean
restarts are not.
"""

import json
import math
from dataclasses import replace

import pytest
from recorded import compare
from restart_logs import Training, loss_of, rate, text, written
from test_measure import log
from test_spikes import noisy

from trilane.analysis.loss_curve import trainings
from trilane.cli.app import main
from trilane.logs.run import read_logs, read_run_folder
from trilane.utils.tables import as_json
from trilane_diagnose.continuity import find_breaks

PLAIN = Training()
AT = 401  # the first iteration after the restart; the checkpoint is that of iteration 400
RAMP = Training(batch=lambda i: 16.0 + 8 * min(6, i // 60))


def judged(folder, *parts):
    """The breaks of all trainings in those logs."""
    logs = [log for name in written(folder, parts) for log in read_logs(name)]
    every = [find_breaks(group) for group in trainings(logs)]
    return [broken for one in every for broken in one.breaks]


def restarted(folder, after, before=PLAIN, end=400, step=1, **arguments):
    """The breaks where `after` goes on at AT with what `before` trained until `end`."""
    old = text(before.rows(1, end, step))
    new = text(after.rows(AT, AT + 60 * step, step, run=1), arguments)
    return judged(folder, old, new)


# A cause that the logs do not show (moments, an older checkpoint, another form of the schedule) is
# none: a "-level".
FAULTS = {
    "rate from zero": (
        {"rate": lambda i: rate(1000)(i - AT + 1)},
        "learning_rate scheduler-restarted",
    ),
    "train_iters changed": (
        {"rate": rate(1500), "total": 1500},
        "learning_rate another-schedule",
    ),
    "decay changed": ({"rate": rate(700)}, "learning_rate rate-level"),
    "data from the start": ({"samples": -64.0 * 400}, "consumed_samples data-from-start"),
    "data replayed": ({"samples": -64.0 * 100}, "consumed_samples data-replayed"),
    "data skipped": ({"samples": 64.0 * 37}, "consumed_samples data-skipped"),
    "untrained weights": ({"loss": lambda i: loss_of(i - AT)}, "lm_loss weights-not-loaded"),
    "moments lost": (
        {"loss": lambda i: loss_of(i) * (1 + 0.06 * math.exp((AT - i) / 20))},
        "lm_loss loss-level",
    ),
    "a norm reset": ({"loss": lambda i: loss_of(i) * 1.3}, "lm_loss loss-level"),
}


def test_what_a_restart_did_not_continue_is_named_alone_with_its_cause_as_recorded(tmp_path):
    """Trainings that go on at their end, back, and with a line for five iterations."""
    every = {}
    for name, (fault, cause) in FAULTS.items():
        for end, step in ((400, 1), (440, 1), (400, 5)):
            breaks = restarted(tmp_path, replace(PLAIN, **fault), end=end, step=step)
            case = f"{name}, {end}, {step}"
            if case != "moments lost, 400, 5":  # over before two lines
                assert [f"{b.quantity} {b.cause}" for b in breaks] == [cause], case
            every[case] = [as_json(b) | {"sentence": ""} for b in breaks]
    compare("breaks", every)


def test_another_batch_is_named_and_a_planned_ramp_up_is_not(tmp_path):
    larger = replace(PLAIN, batch=lambda i: 64.0 if i < AT else 96.0)
    assert [b.cause for b in restarted(tmp_path, larger)] == ["batch-changed"]
    assert not restarted(tmp_path, larger, rampup_batch_size="['64', '32', '9765625']")


COURSES = {
    "ramp-up": RAMP,
    "batch that doubles": Training(batch=lambda i: 16.0 * 2 ** min(4, (i - 1) // 100)),
    "noisy": Training(noise=0.05),
    "warm-up that ends": Training(rate=rate(1000, warmup=400)),
}


@pytest.mark.parametrize("course", COURSES)
def test_nothing_is_found_at_a_clean_restart(tmp_path, course):
    """At its end, going back to the checkpoint, and with a line for ten iterations."""
    training = COURSES[course]
    for end, step in ((400, 1), (430, 1), (450, 10)):
        breaks = restarted(tmp_path, training, before=training, end=end, step=step)
        assert not breaks, [b.sentence for b in breaks]


@pytest.mark.parametrize("end", [400, 430])
def test_a_decay_of_wsd_begun_or_put_off_is_no_break(tmp_path, end):
    """From the checkpoint; where iterations were repeated, their loss is another one."""
    wsd = {"decay_style": "WSD", "wsd_decay_style": "minus_sqrt", "wsd_decay_samples": 90}
    stable = Training(rate=rate(2000, **wsd))
    decay = Training(rate=rate(490, **wsd), loss=lambda i: loss_of(i + 200 * (i > 400)))
    assert not restarted(tmp_path, stable, decay, end)
    repeated = end > 400
    for course, count in ((decay.rate, 0), (stable.rate, repeated), (rate(10), 1 + repeated)):
        after = replace(decay, rate=course)
        assert len(restarted(tmp_path, after, stable, end)) == count


def test_nothing_is_found_after_a_skip_or_in_a_new_run(tmp_path):
    skipped = [row for row in PLAIN.rows(AT, 560, run=1) if row["iteration"] > 480]
    assert not judged(tmp_path, text(PLAIN.rows(1, 400)), text(skipped))
    assert not judged(tmp_path, *(text(PLAIN.rows(1, 200, run=n)) for n in (0, 1)))


def test_noise_is_no_break():
    for seed in range(40):
        loss = noisy(600, 0.02, seed)
        after = log(200, first=401, lm_loss=loss[400:], name="b.log")
        assert not find_breaks([log(400, lm_loss=loss[:400]), after]).breaks


def test_a_loss_of_another_level_is_found_sooner_on_the_same_data():
    loss = noisy(1400, 0.01)

    def causes(factor, first):
        after = log(1401 - first, first=first, lm_loss=loss[first - 1 :] * factor, name="b.log")
        breaks = find_breaks([log(1000, lm_loss=loss[:1000]), after]).breaks
        return [(b.cause, b.after.iteration) for b in breaks]

    assert causes(1.015, 801) == [("loss-level", 801)], "on the same data noise cancels"
    assert causes(0.97, 801) and not causes(0.97, 1001), "a loss falls on its own"
    assert causes(1.05, 1001) == [("loss-level", 1001)] and not causes(1.005, 1001)


def test_several_runs_in_one_file_are_judged_as_in_several(tmp_path, capsys):
    name = tmp_path / "all.log"
    replayed = replace(PLAIN, samples=-640.0).rows(501, 560, run=2)
    parts = [PLAIN.rows(1, 400), PLAIN.rows(301, 500, run=1), replayed]
    name.write_text("".join(text(rows, {"world_size": 8}) for rows in parts))
    assert main(["logs", "spikes", str(name), "--json"]) == 0
    (training,) = json.loads(capsys.readouterr().out)["trainings"]
    (one,) = training["breaks"]
    assert (one["restart"], one["cause"]) == (501, "data-replayed")
    assert one["before"] == {"log": "all.log", "iteration": 500, "value": 32000}
    name.rename(tmp_path / "run.log")  # one run to 04: that of a run folder, resumed twice
    whole = find_breaks([read_run_folder(tmp_path)])
    assert whole.restarts == 2 and [b.cause for b in whole.breaks] == ["data-replayed"]
