"""Continuity: what a restart did not continue is named with its cause, from the logs alone; clean
restarts are not.
"""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from recorded import compare, numbers_in
from restart_logs import DIALECTS, Training, constant, cosine, loss_of, text, written, wsd
from test_measure import log
from test_spikes import noisy, wandering

from trilane.analysis.loss_curve import trainings
from trilane.cli.app import main
from trilane.logs.run import read_run_folder
from trilane.logs.written_tables import read_runs
from trilane.utils.tables import as_json
from trilane_diagnose.continuity import find_breaks

PLAIN = Training()
AT = 401  # the first iteration after the restart; the checkpoint is that of iteration 400
RAMP = Training(batch=lambda i: 16.0 + 8 * min(6, i // 60))


def found(folder, *parts):
    """The breaks of all trainings in those logs, and what was not judged."""
    logs = [log for name in written(folder, parts) for log in read_runs(name)]
    every = [find_breaks(group) for group in trainings(logs)]
    return [b for one in every for b in one.breaks], [
        what for one in every for what in one.unjudged
    ]


def restarted(
    folder, after, before=PLAIN, end=400, step=1, lines=60, dialect="megatron", **arguments
):
    """The breaks where `after` goes on at AT with what `before` trained until `end`."""
    last = AT + lines * step
    parts = (before.rows(1, end, step), None), (after.rows(AT, last, step, run=1), arguments)
    return found(folder, *(text(rows, dialect, given) for rows, given in parts))


def changed(**fields):
    return replace(PLAIN, **fields)


def fading(size, lines):
    """One that grows by `size` at the restart and is gone after so many lines."""
    return lambda i: 1 + size * math.exp((AT - i) / lines)


# A cause that the logs do not show (moments, an older checkpoint, another form of the schedule) is
# none: a "-level".
FAULTS = {
    "rate from zero": (
        changed(rate=lambda i: cosine(1000)(i - AT + 1)),
        "learning_rate",
        "scheduler-restarted",
    ),
    "train_iters changed": (
        changed(rate=cosine(1500), total=1500),
        "learning_rate",
        "another-schedule",
    ),
    "decay changed": (changed(rate=cosine(700)), "learning_rate", "rate-level"),
    "data from the start": (changed(samples=-64.0 * 400), "consumed_samples", "data-from-start"),
    "data replayed": (changed(samples=-64.0 * 100), "consumed_samples", "data-replayed"),
    "data skipped": (changed(samples=64.0 * 37), "consumed_samples", "data-skipped"),
    "scale back at its first": (
        changed(scale=lambda i: 65536.0),
        "loss_scale",
        "loss-scale-initial",
    ),
    "another precision": (changed(scale=lambda i: 1.0), "loss_scale", "precision-changed"),
    "four times the gradient": (
        changed(norm=lambda i: 4 * PLAIN.norm(i)),
        "grad_norm",
        "gradient-scale",
    ),
    "gradient up": (
        changed(norm=lambda i: PLAIN.norm(i) * fading(4, 5)(i)),
        "grad_norm",
        "gradient-level",
    ),
    "untrained weights": (changed(loss=lambda i: loss_of(i - AT)), "lm_loss", "weights-not-loaded"),
    "moments lost": (
        changed(loss=lambda i: loss_of(i) * fading(0.06, 20)(i)),
        "lm_loss",
        "loss-level",
    ),
    "a norm reset": (changed(loss=lambda i: loss_of(i) * 1.3), "lm_loss", "loss-level"),
}


@pytest.mark.parametrize(
    ("end", "step"), [(400, 1), (440, 1), (400, 5)], ids=["at its end", "going back", "sparse"]
)
@pytest.mark.parametrize(("after", "quantity", "cause"), FAULTS.values(), ids=FAULTS.keys())
def test_what_a_restart_did_not_continue_is_named_alone_with_its_cause(
    tmp_path, after, quantity, cause, end, step
):
    if step > 1 and after in (FAULTS["gradient up"][0], FAULTS["moments lost"][0]):
        pytest.skip("over before two lines were printed")
    breaks, _ = restarted(tmp_path, after, end=end, step=step)
    assert [(b.quantity, b.cause) for b in breaks] == [(quantity, cause)]
    assert (breaks[0].before.log, breaks[0].after.log) == ("1.log", "2.log")
    assert breaks[0].before.iteration < AT <= breaks[0].after.iteration


def test_breaks_are_those_that_were_recorded(tmp_path):
    """Every field of each, of trainings that go on at their end, back, and with a line for five
    iterations.
    """
    every = {}
    for name, (after, *_) in FAULTS.items():
        for end, step in ((400, 1), (440, 1), (400, 5)):
            breaks, unjudged = restarted(tmp_path, after, end=end, step=step)
            every[f"{name}, {end}, {step}"] = [
                as_json(b) | {"sentence": numbers_in(b.sentence)} for b in breaks
            ] + unjudged
    compare("breaks", every)


COUNT = 64.0 * np.arange(1, 101)
SAMPLES = {
    "": (6369, 6431),
    "data-from-start": (32,),
    "data-replayed": (33, 6367),
    "data-skipped": (6433,),
}
LIMITS = [  # a column, its values before the restart, and causes, each with values after it
    (
        "loss_scale",
        1024.0,
        {"": (257, 4095), "loss-scale-lost": (256, 4096), "precision-changed": (1,)},
    ),
    ("loss_scale", 512.0, {"loss-scale-initial": (2.0**16, 2.0**32)}),
    ("global_batch_size", 1000.0, {"": (991, 1009), "batch-changed": (989, 1011)}),
    (
        "learning_rate",
        1.0,
        {"": (0.981, 1.019), "rate-level": (0.051, 0.979, 1.021), "scheduler-restarted": (0.049,)},
    ),
    ("consumed_samples", COUNT, SAMPLES),
    ("grad_norm", 0.4, {"": (0.79,), "gradient-scale": (0.81,)}),
    ("lm_loss", 5.0, {"": (4.0, 5.04), "loss-level": (5.06,)}),
    (
        "lm_loss",
        np.where(abs(COUNT - 3200) < 640, 5.5, 5.0),
        {"": (5.75,), "loss-level": (5.79,)},
    ),  # rose on its own
    (
        "lm_loss",
        np.where(COUNT < 150, 10.0, 8.4),
        {"loss-level": (9.29,), "weights-not-loaded": (9.31,)},
    ),
]


@pytest.mark.parametrize(("name", "before", "causes"), LIMITS)
def test_a_break_begins_at_its_limit(name, before, causes):
    for cause, value in ((cause, value) for cause, values in causes.items() for value in values):
        after = COUNT[:40] + value if name == "consumed_samples" else value
        parts = log(100, **{name: before}), log(40, first=101, name="b.log", **{name: after})
        assert [(b.quantity, b.cause) for b in find_breaks(parts).breaks] == [(name, cause)] * bool(
            cause
        ), value


@pytest.mark.parametrize(("before", "after", "few"), [(12, 3, False), (11, 3, True), (12, 2, True)])
def test_a_loss_is_judged_by_twelve_lines_before_a_restart_and_three_after(before, after, few):
    unjudged = find_breaks([log(before), log(after, first=before + 1, name="b.log")]).unjudged
    assert any(line.startswith("loss, gradient norm (too few") for line in unjudged) is few


def test_a_ramp_up_or_a_sequence_length_that_begins_again_is_named(tmp_path):
    again = replace(RAMP, batch=lambda i: RAMP.batch(i if i < AT else i - AT))
    breaks, _ = restarted(tmp_path, again, before=RAMP)
    assert [(b.quantity, b.cause) for b in breaks] == [("global_batch_size", "ramp-up-restarted")]
    small = changed(
        batch=lambda i: 64.0 if i < AT else 8.0,
        norm=lambda i: PLAIN.norm(i) * (1 if i < AT else 2.8),
    )
    assert [b.cause for b in restarted(tmp_path, small)[0]] == ["batch-changed"], (
        "of which the norm is the root"
    )
    planned = changed(batch=lambda i: 64.0 if i < AT else 96.0)
    assert [b.cause for b in restarted(tmp_path, planned)[0]] == ["batch-changed"]
    assert not restarted(tmp_path, planned, rampup_batch_size="['64', '32', '9765625']")[0]
    one, two = log(100, seq_length=2048.0), log(40, first=101, seq_length=1024.0, name="b.log")
    assert [b.cause for b in find_breaks([one, two]).breaks] == ["sequence-length"]


def test_only_losses_equal_to_the_last_digit_show_which_checkpoint_was_loaded():
    loss = noisy(400)
    before, after = (
        log(300, lm_loss=loss[:300]),
        log(60, first=301, lm_loss=loss[100:160], name="b.log"),
    )
    (found,) = find_breaks([before, after]).breaks
    assert (found.cause, found.detail) == ("older-checkpoint", "from iteration 101 on")


COURSES = {
    "ramp-up": RAMP,
    "batch that doubles": Training(batch=lambda i: 16.0 * 2 ** min(4, (i - 1) // 100)),
    "scale halved": Training(scale=lambda i: 65536.0 if i < AT else 32768.0),
    "noisy": Training(noise=0.05),
    "constant": Training(rate=constant()),
    "warm-up": Training(rate=cosine(3000, warmup=800)),
    "warm-up that ends": Training(rate=cosine(1000, warmup=400)),
    "decay that begins": Training(rate=wsd(1000, 600)),
}


@pytest.mark.parametrize("dialect", ["megatron", "trainer"])
@pytest.mark.parametrize("course", COURSES.values(), ids=COURSES.keys())
def test_nothing_is_found_at_a_clean_restart(tmp_path, course, dialect):
    """At its end, going back to the checkpoint, and with a line for ten iterations."""
    for end, step in ((400, 1), (430, 1), (450, 10)):
        breaks, _ = restarted(
            tmp_path, course, before=course, end=end, step=step, lines=40, dialect=dialect
        )
        assert not breaks, [b.sentence for b in breaks]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_nothing_is_found_after_a_skip_early_elsewhere_or_in_a_new_run(tmp_path, dialect):
    skipped = [r for r in PLAIN.rows(AT, 560, run=1) if r["iteration"] > 480]
    breaks, unjudged = found(tmp_path, text(PLAIN.rows(1, 400), dialect), text(skipped, dialect))
    assert not breaks and "iterations 401 to 480 (in no log)" in unjudged
    for end in (8, 30, 80):
        later = PLAIN.rows(end + 1, end + 40, run=1)
        assert not found(tmp_path, text(PLAIN.rows(1, end), dialect), text(later, dialect))[0]
    assert found(tmp_path, *(text(PLAIN.rows(1, 200, run=n), dialect) for n in (0, 1))) == ([], [])


@pytest.mark.parametrize("memory", [0.0, 0.9])
def test_noise_is_no_break(memory):
    for seed in range(40):
        loss, norm = (
            wandering(600, 0.02, seed, memory),
            0.3 * np.exp(0.15 * np.random.default_rng(seed).standard_normal(600)),
        )
        after = log(200, first=401, lm_loss=loss[400:], grad_norm=norm[400:], name="b.log")
        assert not find_breaks([log(400, lm_loss=loss[:400], grad_norm=norm[:400]), after]).breaks


def test_noise_that_a_repetition_does_not_share_and_counts_of_few_digits_are_no_break():
    """52.4M: such a count rises unevenly by its last digit."""
    for seed in range(10):
        again = log(250, first=351, lm_loss=noisy(600, 0.05, seed + 100)[350:], name="b.log")
        assert not find_breaks([log(400, lm_loss=noisy(600, 0.05, seed)[:400]), again]).breaks
    counts = np.round(64.0 * np.arange(1, 461), -3)
    after = log(60, first=401, consumed_samples=counts[400:], name="b.log")
    assert not find_breaks([log(400, consumed_samples=counts[:400]), after]).breaks


def test_a_loss_of_another_level_is_found_sooner_on_the_same_data():
    loss = noisy(1400, 0.01)

    def causes(factor, first):
        after = log(1401 - first, first=first, lm_loss=loss[first - 1 :] * factor, name="b.log")
        return [
            (b.cause, b.after.iteration)
            for b in find_breaks([log(1000, lm_loss=loss[:1000]), after]).breaks
        ]

    assert causes(1.015, 801) == [("loss-level", 801)], "on the same data noise cancels"
    assert causes(0.97, 801) and not causes(0.97, 1001), "a loss falls on its own"
    assert causes(1.05, 1001) == [("loss-level", 1001)] and not causes(1.005, 1001)


def test_several_runs_in_one_file_are_judged_as_in_several(tmp_path, capsys):
    name = tmp_path / "all.log"
    parts = [
        PLAIN.rows(1, 400),
        PLAIN.rows(301, 500, run=1),
        changed(samples=-640.0).rows(501, 560, run=2),
    ]
    name.write_text("".join(text(rows, "megatron", {"world_size": 8}) for rows in parts))
    assert main(["logs", "spikes", str(name), "--json"]) == 0
    (training,) = json.loads(capsys.readouterr().out)["trainings"]
    (one,) = training["breaks"]
    assert (one["restart"], one["quantity"], one["cause"]) == (
        501,
        "consumed_samples",
        "data-replayed",
    )
    assert (
        one["before"] == {"log": "all.log", "iteration": 500, "value": 32000}
        and one["after"]["iteration"] == 501
    )
    assert main(["logs", "spikes", str(name)]) == 0
    assert "data is replayed" in capsys.readouterr().out
    name.rename(tmp_path / "run.log")  # one run to 04: that of a run folder, resumed twice
    whole = find_breaks([read_run_folder(tmp_path)])
    assert whole.restarts == 2 and [(b.restart, b.cause) for b in whole.breaks] == [
        (501, "data-replayed")
    ]


JUMP = changed(loss=lambda i: loss_of(i) * 1.43)


@pytest.mark.parametrize(
    ("after", "step", "excluded", "possible"),
    [
        # all at once: nothing that an optimizer does; the gradients go on
        (JUMP, 1, ("Adam", "scheduler", "gradients", "batch"), ("weights", "samples", "averaged")),
        # a line covers five iterations: an optimizer has acted
        (JUMP, 5, ("scheduler", "gradients"), ("weights", "Adam", "samples")),
        # from the third iteration on
        (changed(loss=lambda i: loss_of(i) * (1 + 0.43 * (i > AT + 2))), 1, ("scheduler",), ("weights", "Adam")),
        (changed(rate=lambda i: 2 * PLAIN.rate(i)), 1, (), ("count of steps", "arguments of the schedule")),
        (changed(norm=lambda i: 4 * PLAIN.norm(i)), 1, ("weights", "Adam", "averaged"), ("gradients", "samples")),
    ],
)  # fmt: skip
def test_causes_are_excluded_by_what_goes_on_and_all_others_remain(
    tmp_path, after, step, excluded, possible
):
    (found,), unjudged = restarted(tmp_path, after, step=step)
    both = [*found.excluded, *found.possible]
    for words, mine in ((excluded, found.excluded), (possible, found.possible)):
        assert all(any(word in cause for cause in mine) for word in words), both
    assert all(cause in found.sentence for cause in both) and "likely" not in found.sentence
    assert "seeds, optimizer states, data order" in unjudged[-1]
