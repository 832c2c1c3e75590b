"""Every topology trains the same model: each loss is that of a plain torch GPT in one process."""

from collections.abc import Callable

import pytest
from parity import Row, machine, rows
from plans import changed, evaluations
from plans import steps as reference

from trilane.config.engines import ENGINES

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("equality")]

# `trilane measure engines` trains all rows of equality.json, here those that combine most of what
# an engine does.
NAMES = {
    "megatron": "PP2 recompute block; DP2 CP2 in two instances, both overlaps;"
    "TP2 PP2 DP2 distributed optimizer, interleaved, sequence parallel, overlapped;"
    "CP2 PP2 DP2 recompute selective; TP2 fp16;"
    "TP2 CP2 distributed optimizer, sequence parallel, Llama;"
    "TP2 PP2 scores, torch's Adam; TP2 PP2 Apertus; PP2 DP2 distributed optimizer bf16;"
    "DP4 EP2 distributed optimizer, both overlaps; TP4 EP2 sequence parallel, shared experts;"
    "TP2 DP2 EP4 distributed optimizer, recompute selective, shared experts;"
    "PP2 DP2 EP2 interleaved, shared experts",
    "deepspeed-zero": "ZeRO-1 TP2 DP2 sequence parallel;"
    "ZeRO-3 TP2 DP2 overlapped; ZeRO-3 TP2 Apertus",
    "deepspeed-3d": "TP2 PP2 sequence parallel, recompute full; TP2 PP2 BLOOM; PP2 fp32 sums bf16",
    "hf-zero3": "ZeRO-2 DP2 BLOOM; ZeRO-3 DP2 Llama",
}
WANTED = {
    f"{engine} {name.strip()}" for engine, names in NAMES.items() for name in names.split(";")
}
ROWS = [row for row in rows() if {row.label, row.label.removesuffix(" fp32")} & WANTED]
# One row of each engine is trained on after it was evaluated, the others are short.
LONG = {row.engine: row.label for row in reversed(ROWS) if row.precision == "fp32"}


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.label)
def test_every_loss_is_that_of_one_process(
    row: Row, train, truth: Callable, truths: Callable, held_out: Callable, data, tmp_path
):
    """fp32, gloo: losses, also on what is held out, within 1e-5; gradient norms, on which clipping
    hangs, 1e-4. With experts 2e-6 and 1e-5.

    8 and 11 bits of mantissa, fp32 masters: losses within 2e-3, the norms within 2 %.
    """
    plan, iterations = (
        row.plan(machine(cards=0, bf16=True), str(data)),
        12 if row.label in LONG.values() else 4,
    )
    steps = train(changed(plan, "run", train_iters=iterations))
    expected = truth(row.task, iterations)
    assert not any(step["skipped"] for step in steps)
    assert [s["lm_loss"] for s in steps] == pytest.approx(
        [loss for loss, _ in expected], abs=row.bound, rel=0
    )
    close = 5 * row.bound if row.task.shape.experts else 10 * row.bound
    norms = [s["grad_norm"] for s in steps]
    assert norms == pytest.approx([norm for _, norm in expected], rel=close)
    loads = [step.get("imbalance") for step in reference(truths(row.task, iterations))]
    assert [step.get("imbalance") for step in steps] == pytest.approx(loads, rel=1e-5)
    found = [
        [at, pytest.approx(loss, abs=row.bound, rel=0)]
        for at, loss in held_out(row.task, iterations)
    ]
    assert evaluations(tmp_path / "run") == found


def test_every_row_is_a_plan():
    assert len(ROWS) == len(WANTED)
    assert {row.engine for row in rows()} == set(ENGINES)
    for row in rows():
        row.plan(machine(cards=0, bf16=True), "data")
