"""The validation loss: that of the reference on every engine, and without a trace in the training."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from plans import changed, run_folder, small_plan, steps

from trilane.config.training import Dropout
from trilane.engine.data.corpus import prepare

ITERS, EVERY = 6, 4  # evaluated after 4 and, being the last, after 6
ENGINES = {
    "megatron, interleaved pipeline": {"pp": 2, "interleaving": 2},
    "megatron, overlapped gathering": {"dp": 2, "zero": 1, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "DeepSpeed's pipeline": {"engine": "deepspeed-3d", "pp": 2, "zero": 1},
    "ZeRO-3": {"engine": "deepspeed-zero", "dp": 2, "zero": 3},
    "transformers under ZeRO-3": {"engine": "hf-zero3", "dp": 2, "zero": 3},
}


def evaluating(data: Path, **settings):
    """A small plan that holds out a tenth of the documents and evaluates three batches of them."""
    plan = changed(small_plan(data, iters=ITERS, **settings), "data", split="900,100,0")
    return changed(plan, "run", eval_interval=EVERY, eval_iters=3)


def evaluations(folder: Path):
    return [json.loads(line) for line in (folder / "validation.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def reference(fork, data, tmp_path_factory):
    """[iteration, validation loss] of the plain torch GPT."""
    folder = run_folder(evaluating(data), tmp_path_factory.mktemp("reference") / "run")
    fork(0, folder)
    return json.loads((folder / "truth-validation.json").read_text())


@pytest.mark.parametrize("settings", ENGINES.values(), ids=ENGINES)
def test_every_engine_has_the_reference_s_validation_losses(settings, reference, train, data, tmp_path):
    train(evaluating(data, **settings))
    found = [[e["iteration"], e["lm_loss"]] for e in evaluations(tmp_path / "run")]
    assert found == [[at, pytest.approx(loss, abs=1e-5)] for at, loss in reference]
    assert [at for at, _ in found] == [4, 6]


def test_training_with_dropout_goes_on_as_if_it_had_not_been_evaluated_also_after_a_resume(fork, data, tmp_path):
    """Dropout draws from the generators that a checkpoint keeps; the timers count no phase of an evaluation."""
    plan = replace(evaluating(data, pp=2), dropout=Dropout(hidden=0.1, attention=0.1))
    plan = changed(plan, "run", timers=True)
    without = run_folder(changed(plan, "run", eval_interval=0, eval_iters=0), tmp_path / "without")
    fork(2, without)
    folder = run_folder(changed(plan, "run", exit_iteration=5), tmp_path / "run")
    fork(2, folder)
    assert [e["iteration"] for e in evaluations(folder)] == [4], "5 is where it stops, not where it ends"
    (folder / "plan.json").write_text(json.dumps(plan.to_json()))
    fork(2, folder)
    same = ("lm_loss", "grad_norm", "learning_rate")
    both = [[[step[name] for name in same] for step in steps(f)] for f in (folder, without)]
    assert both[0] == both[1]
    assert [e["iteration"] for e in evaluations(folder)] == [4, 6]
    slowest = max(sum(high for _, high in step["timers"].values()) / step["sec_per_it"] for step in steps(folder))
    assert slowest < 1.5, "the phases of an evaluation count for the next iteration"


def test_a_share_that_leaves_no_sample_is_one_line(data):
    plan = changed(small_plan(data), "data", split="999999,1")
    with pytest.raises(ValueError, match=r"^data\.split=999999,1: leaves 0 documents of stdlib for validation"):
        prepare(plan.data, plan.shape)
