"""A run that is extended, skips iterations or lowers its rate: what is done stays, and what follows is exact."""

import json
from dataclasses import replace

import pytest
from plans import changed, run_folder, small_plan, steps

from trilane.config.training import LrChange, Part


@pytest.fixture
def text(tmp_path):
    """A file of 1,999 tokens: 31 samples of 64 tokens an epoch."""
    path = tmp_path / "few.txt"
    path.write_text(" ".join(str(number * number) for number in range(1000))[:1998])
    return str(path)


def test_an_extended_run_is_the_one_that_had_its_order_from_the_start(fork, data, text, tmp_path):
    """Four iterations of 8 samples take 32, two epochs, which hold 62; eleven take 88: one further epoch."""
    plan = small_plan(data, iters=4, source=text)
    longer = changed(plan, "run", train_iters=11)
    folder = run_folder(changed(plan, "run", save_interval=4), tmp_path / "run")
    fork(1, folder)
    (folder / "plan.json").write_text(json.dumps(longer.to_json()))
    fork(1, folder)
    assert "the run has 88 samples instead of 32" in (folder / "0.log").read_text()
    whole = run_folder(changed(longer, "run", order_samples=32), tmp_path / "whole")
    fork(1, whole)
    rows = [[(s["lm_loss"], s["grad_norm"]) for s in steps(f)] for f in (folder, whole)]
    assert len(rows[0]) == 11 and rows[0] == rows[1]


def test_after_a_spike_a_run_goes_on_without_those_iterations_at_a_lower_rate(fork, data, tmp_path):
    """From the checkpoint before, on two replicas, as the reference that skipped them; bit for bit on one layout."""
    plan = changed(small_plan(data, iters=7, dp=2, zero=1), "run", save_interval=2, keep_last=0)
    spiked, folder = run_folder(changed(plan, "run", exit_iteration=4), tmp_path / "spiked"), tmp_path / "run"
    fork(2, spiked)
    plan = changed(plan, "run", skip="3-4,6")
    plan = changed(plan, "optimizer", lr_changes=(LrChange(samples=16, factor=0.25),))
    run_folder(changed(plan, "run", load=str(spiked / "checkpoints/iter_0000002")), folder)
    fork(2, folder)
    log = (folder / "0.log").read_text()
    assert "skips iterations 3 to 4: next is sample 32" in log and "skips iterations 6 to 6" in log
    found = steps(spiked)[:2] + steps(folder)
    assert [(s["iteration"], s["consumed_samples"]) for s in found] == [(1, 8), (2, 16), (5, 40), (7, 56)]
    rates = [plan.optimizer.learning_rate(s["consumed_samples"], plan.samples) for s in found]
    full = replace(plan.optimizer, lr_changes=()).learning_rate(40, plan.samples)
    assert [s["learning_rate"] for s in found] == rates and rates[2] == 0.25 * full
    for name in ("whole", "truth"):
        run_folder(plan, tmp_path / name)
        fork(2 * (name == "whole"), tmp_path / name)
    assert [s["lm_loss"] for s in steps(tmp_path / "whole")] == [s["lm_loss"] for s in found]
    truth = [loss for loss, _ in json.loads((tmp_path / "truth" / "truth.json").read_text())]
    assert [s["lm_loss"] for s in found] == pytest.approx(truth, abs=1e-5)
    (folder / "plan.json").write_text(json.dumps(changed(plan, "run", skip="3-4").to_json()))
    fork(2, folder, code=2)
    assert "skip=3-4: the checkpoint iter_0000007 has skipped 6" in (folder / "0.log").read_text()


ORDER = """
import hashlib
from dataclasses import replace
from trilane.engine.data.corpus import prepare_all
from trilane.engine.data.samples import training_set
def order(iters):
    run = replace(plan.run, train_iters=iters, order_samples=plan.samples)
    longer = replace(plan, run=run)
    samples = training_set(longer, world, prepare_all(longer.data, longer.shape))
    rows = [samples[k]["tokens"] for k in range(longer.samples)]
    return [hashlib.sha256(row.numpy().tobytes()).hexdigest()[:8] for row in rows]
print(order({iters}) == order({further})[: 8 * {iters}], order({further})[62:93] != order({further})[93:124])
"""


def test_the_place_of_a_sample_depends_neither_on_how_far_nor_on_how_often_a_run_is_extended(ask, data, text):
    plan = small_plan(data, iters=4, source=text)
    assert ask(plan, ORDER.replace("{iters}", "4").replace("{further}", "9")) == "True True\n"
    assert ask(plan, ORDER.replace("{iters}", "9").replace("{further}", "30")) == "True True\n"
    parts = (Part(source=text, weight=3), Part(source="mock", weight=1))
    blended = replace(plan, data=replace(plan.data, source="blend", blend=parts))
    assert ask(blended, ORDER.replace("{iters}", "4").replace("{further}", "25")) == "True True\n"
    assert ask(blended, ORDER.replace("{iters}", "25").replace("{further}", "31")) == "True True\n"
