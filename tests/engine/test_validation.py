"""The validation loss leaves no trace in the training; test_equality.py has its values."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from plans import changed, evaluations, run_folder, small_plan, steps

from trilane.config.training import Dropout
from trilane.engine.data.corpus import prepare

ITERS, EVERY = 6, 4  # evaluated after 4 and, being the last, after 6


def evaluating(data: Path, **settings):
    """A small plan that holds out a tenth of the documents and evaluates three batches of them."""
    plan = changed(small_plan(data, iters=ITERS, **settings), "data", split="900,100,0")
    return changed(plan, "run", eval_interval=EVERY, eval_iters=3)


@pytest.mark.parametrize("settings", [{"pp": 2}, {"engine": "deepspeed-zero", "zero": 1}], ids=str)
def test_training_with_dropout_goes_on_as_if_it_had_not_been_evaluated_also_after_a_resume(
    settings, fork, data, tmp_path
):
    """Dropout draws from the generators that a checkpoint keeps; the timers count no phase of an evaluation."""
    plan = replace(evaluating(data, **settings), dropout=Dropout(hidden=0.1, attention=0.1))
    plan, gpus = changed(plan, "run", timers=True), plan.topology.gpus
    without = run_folder(changed(plan, "run", eval_interval=0, eval_iters=0), tmp_path / "without")
    fork(gpus, without)
    folder = run_folder(changed(plan, "run", exit_iteration=5), tmp_path / "run")
    fork(gpus, folder)
    assert [at for at, _ in evaluations(folder)] == [4], "5 is where it stops, not where it ends"
    (folder / "plan.json").write_text(json.dumps(plan.to_json()))
    fork(gpus, folder)
    same = ("lm_loss", "grad_norm", "learning_rate")
    both = [[[step[name] for name in same] for step in steps(f)] for f in (folder, without)]
    assert both[0] == both[1]
    assert [at for at, _ in evaluations(folder)] == [4, 6]
    phases = [sum(low for low, _ in step["timers"].values()) / step["sec_per_it"] for step in steps(folder)]
    assert max(phases) < 1.1, "the phases of an evaluation count for the next iteration"


def test_a_share_that_leaves_no_sample_is_one_line(data):
    plan = changed(small_plan(data), "data", split="999999,1")
    with pytest.raises(ValueError, match=r"^data\.split=999999,1: leaves 0 documents of stdlib for validation"):
        prepare(plan.data, plan.shape)
