"""The line that a person reads and the line that a program reads say the same."""

import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
from plans import changed, small_plan

from trilane.engine.report import Iteration, average

pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says while it is imported

LINE = (
    " [2026-08-01 12:00:00.000000] iteration       10/     100 | consumed samples:         1280 | "
    "elapsed time per iteration (ms): 1234.5 | throughput per GPU (TFLOP/s/GPU): 98.8 | "
    "learning rate: 1.500000E-04 | global batch size:   128 | lm loss: 2.500000E+00 | loss scale: 65536.0 | "
    "grad norm: 1.235 | number of skipped iterations:   1 | number of nan iterations:   0 |"
)
STEP = Iteration(
    iteration=10,
    consumed_samples=1280,
    sec_per_it=1.2345,
    tflops=98.765,
    learning_rate=1.5e-4,
    global_batch_size=128,
    lm_loss=2.5,
    loss_scale=65536.0,
    grad_norm=1.2345678,
    skipped=1,
    nan=0,
)


def test_the_line_is_megatrons_to_the_last_blank() -> None:
    """Megatron-LM's training_log of 2025, with the clock in front."""
    assert STEP.line(100, datetime(2026, 8, 1, 12)) == LINE


def test_a_window_gives_means_of_time_and_loss_and_sums_of_counts() -> None:
    other = Iteration(**{**STEP.__dict__, "iteration": 11, "lm_loss": 3.5, "sec_per_it": 2.2345, "skipped": 0})
    mean = average([STEP, other])
    assert (mean.iteration, mean.lm_loss, mean.sec_per_it, mean.skipped) == (11, 3.0, pytest.approx(1.7345), 1)


@pytest.mark.slow
def test_every_printed_line_is_its_json_line(train: Callable, data: Path, tmp_path: Path) -> None:
    """Whole lines, clock aside, and nothing else on the last rank's terminal but its memory."""
    plan = small_plan(data, iters=5, pp=2)
    steps = train(plan)
    said = (tmp_path / "run" / "1.log").read_text().splitlines()
    memory = [line for line in said if line.startswith("[Rank 1] (after 1 iterations) memory (MB) | allocated: ")]
    printed = [re.sub(r"\[.*?\]", "[]", line) for line in said if line not in memory]
    noon = datetime(2026, 8, 1, 12)
    assert printed == [re.sub(r"\[.*?\]", "[]", Iteration(**step).line(5, noon)) for step in steps]
    assert len(memory) == 1
    assert len(steps) == 5


@pytest.mark.slow
def test_a_log_interval_thins_the_terminal_and_not_steps_jsonl(train: Callable, data: Path, tmp_path: Path) -> None:
    steps = train(changed(small_plan(data, iters=5), "run", log_interval=2))
    said = [line for line in (tmp_path / "run" / "0.log").read_text().splitlines() if "iteration " in line]
    assert [int(line.split("iteration")[1].split("/")[0]) for line in said] == [2, 4, 5]
    assert len(steps) == 5
    mean = (steps[0]["lm_loss"] + steps[1]["lm_loss"]) / 2
    assert f"lm loss: {mean:.6E}" in said[0]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["megatron", "deepspeed-zero", "hf-zero3"])
def test_no_library_talks_into_the_log(engine: str, train: Callable, data: Path, tmp_path: Path) -> None:
    """On two ranks: their memory lines and, on the last, the iterations."""
    train(small_plan(data, iters=2, engine=engine, dp=2, zero=1, recompute="full"))
    said = [(tmp_path / "run" / f"{rank}.log").read_text().splitlines() for rank in range(2)]
    assert [len(lines) for lines in said] == [1, 3]
