"""Reading logs: every iteration line once, in seconds and bytes; and the numbers made of them."""

import pandas as pd
import pytest

from trilane.analysis.loss_curve import join
from trilane.logs.run import read_log, read_run_folder
from trilane.workspace.status import RunStatus, write_status

LINE = (
    " [2026-08-01 12:00:00.000000] iteration {i:8d}/{n:8d} | consumed samples: {s:12d} | elapsed time per iteration (ms): "
    "{ms:.1f} | throughput per GPU (TFLOP/s/GPU): 1.5 | learning rate: 1.000000E-04 | global batch size:     4 | "
    "lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 2.500 | number of skipped iterations:   0 | "
    "number of nan iterations:   0 |\n"
)
MEMORY = "[Rank {r}] (after 1 iterations) memory (MB) | allocated: 100.0 | max allocated: {mb:.1f} | reserved: 1.0 | max reserved: 2.0\n"


def log_text(iterations=10, total=10):
    memory = MEMORY.format(r=0, mb=400) + MEMORY.format(r=1, mb=512)
    lines = [
        LINE.format(i=i, n=total, s=4 * i, ms=1000 if i == 1 else 200 + i, loss=6 - i / 10)
        for i in range(1, iterations + 1)
    ]
    return "some other line\n" + lines[0] + memory + "".join(lines[1:])


def test_the_iteration_line_of_megatron_is_read_in_seconds_and_flops(tmp_path):
    (tmp_path / "run.log").write_text(log_text())
    log = read_log(tmp_path / "run.log")
    first = log.iterations.iloc[0]
    assert len(log.iterations) == 10 and pd.api.types.is_integer_dtype(
        log.iterations["consumed_samples"]
    )
    assert (first.iteration, first.consumed_samples, first.sec_per_it, first.lm_loss) == (
        1,
        4,
        1.0,
        5.9,
    )
    assert first.flops_per_s_per_gpu == 1.5e12
    assert list(log.memory["max_allocated"]) == [400 * 2**20, 512 * 2**20]
    assert log.status == "completed" and "iteration       10/" in log.evidence


def test_the_launchers_verdict_comes_before_the_text(tmp_path):
    (tmp_path / "run.log").write_text(log_text())
    write_status(
        tmp_path,
        RunStatus(status="crashed", evidence="rank 1: killed", rank=1, exit_code=1, seconds=9.0),
    )
    log = read_run_folder(tmp_path)
    assert (log.status, log.evidence) == ("crashed", "rank 1: killed")


def test_a_run_that_never_took_a_step_is_empty_not_an_error(tmp_path):
    log = read_run_folder(tmp_path)
    assert (len(log.iterations), log.status) == (0, "unfinished")


def test_an_iteration_that_a_resumed_run_trained_again_counts_once(tmp_path):
    """Killed after iteration 7, the run went on from a checkpoint of iteration 4; what was trained
    last stands.
    """
    again = "".join(LINE.format(i=i, n=10, s=4 * i, ms=100, loss=3 - i / 10) for i in range(5, 11))
    (tmp_path / "run.log").write_text(
        log_text(iterations=7) + "trilane: resumes after iteration 4\n" + again
    )
    found = read_run_folder(tmp_path)
    rows = found.iterations
    assert [(at, list(again["iteration"])) for at, again in found.resumes] == [(5, [5, 6, 7])]
    assert [(r.iteration, r.redone) for r in join([found]).restarts] == [(5, 3)], (
        "as where it is a log of its own"
    )
    assert list(rows["iteration"]) == list(range(1, 11))
    assert list(rows["lm_loss"]) == pytest.approx(
        [5.9, 5.8, 5.7, 5.6, 2.5, 2.4, 2.3, 2.2, 2.1, 2.0]
    )


def test_a_resumed_run_has_each_evaluation_once(tmp_path):
    """Those after the iteration at which it went on were made again."""
    held_out = (
        " validation loss at iteration {} | lm loss value: {:.6E} | lm loss PPL: 1.0E+00 | \n"
    )
    first = log_text(iterations=8) + held_out.format(4, 5.5) + held_out.format(8, 5.25)
    again = "".join(LINE.format(i=i, n=10, s=4 * i, ms=200, loss=6 - i / 10) for i in range(6, 11))
    (tmp_path / "run.log").write_text(
        first + again + held_out.format(8, 5.125) + held_out.format(10, 5.0)
    )
    log = read_run_folder(tmp_path)
    assert log.validation.to_numpy().tolist() == [[4, 5.5], [8, 5.125], [10, 5.0]]
    assert join([log]).validation.equals(log.validation)
