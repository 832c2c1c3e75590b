"""Every topology trains the same model: each loss is that of a plain torch GPT in one process."""

from collections.abc import Callable
from pathlib import Path

import pytest
from plans import changed, evaluations

from trilane.engine.parity import Row, machine, rows

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("equality")]

ROWS = rows()
SHORT = 6
# One row of each engine and precision is trained for as long as `trilane measure engines` does, the others are short.
LONG = {(row.engine, row.precision): row.label for row in reversed(ROWS) if len(row.settings) > 0}
FP32, HALF = ([r for r in ROWS if (r.precision == "fp32") is whole] for whole in (True, False))


def iterations(row: Row) -> int:
    return 20 if LONG[row.engine, row.precision] == row.label else SHORT


def trained(row: Row, train: Callable, data: Path) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of the row, none of its iterations skipped."""
    plan = row.plan(machine(cards=0, bf16=True), str(data))
    steps = train(changed(plan, "run", train_iters=iterations(row)))
    assert not any(s["skipped"] for s in steps)
    return [s["lm_loss"] for s in steps], [s["grad_norm"] for s in steps]


@pytest.mark.parametrize("row", FP32, ids=lambda r: r.label)
def test_every_loss_is_that_of_one_process(
    row: Row, train: Callable, truth: Callable, held_out: Callable, data: Path, tmp_path: Path
) -> None:
    """fp32, gloo: losses, also on what is held out, within 1e-5; gradient norms, on which clipping hangs, 1e-4."""
    losses, norms = trained(row, train, data)
    assert losses == pytest.approx([loss for loss, _ in truth(row.task, iterations(row))], abs=row.bound, rel=0)
    assert norms == pytest.approx([norm for _, norm in truth(row.task, iterations(row))], rel=1e-4)
    expected = [[at, pytest.approx(loss, abs=row.bound, rel=0)] for at, loss in held_out(row.task, iterations(row))]
    assert evaluations(tmp_path / "run") == expected


@pytest.mark.parametrize("row", HALF, ids=lambda r: r.label)
def test_half_precision_follows_fp32(row: Row, train: Callable, truth: Callable, data: Path) -> None:
    """8 and 11 bits of mantissa, fp32 masters: losses within 2e-3 over 6 or 20 iterations.

    The norms of the first 6, which a wrong sum of gradients moves first, within 2 %.
    """
    losses, norms = trained(row, train, data)
    assert losses == pytest.approx([loss for loss, _ in truth(row.task, iterations(row))], abs=row.bound, rel=0)
    assert norms[:6] == pytest.approx([norm for _, norm in truth(row.task, iterations(row))][:6], rel=2e-2)
