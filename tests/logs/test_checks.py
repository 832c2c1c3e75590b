"""Planted faults: each is reported by its rule; a right log has no problem."""

from datetime import datetime, timedelta

import numpy as np
import pytest

from trilane.analysis.measure import measure_log
from trilane.logs.checks import average_rounded
from trilane.logs.run import read_logs
from trilane.logs.table import NAN


def line(i, loss=5.0, total=200, batch=4, used=None, ms=2000.0, more="", first=""):
    """An iteration of Megatron-LM, https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/training.py"""
    used = batch * i if used is None else used
    return (
        f"{first} iteration {i:8d}/{total:8d} | consumed samples: {used:12d} | elapsed time per iteration (ms): {ms:.1f} | "
        f"{more}global batch size: {batch:5d} | lm loss: {loss:.6E} | loss scale: 1.0 | number of nan iterations:   0 |\n"
    )


def lines(count=20, step=1, **changed):
    return "".join(line(i, 9 - i / 50, **changed) for i in range(step, count * step + 1, step))


def trainer(numbers):
    return "".join(f"{{'loss': {3 - n / 100:.4f}, 'learning_rate': 1e-05, 'epoch': {e:.2f}}}\n" for n, e in numbers)


def bars(last):
    return "".join(f"{n}/100 [00:{n // 2:02d}<01:00]\n{trainer([(n, n / 100)])}" for n in range(10, last + 1, 10))


RATE = "tokens per gpu per second (tgs): {} | actual seqlen:  {} | "
SIZES = (
    "using world size: 8, data-parallel-size: 8\n------ arguments ------\n  world_size ... 8\n  seq_length ... 2048\n"
)
TITAN = (  # https://github.com/pytorch/torchtitan/blob/main/torchtitan/components/metrics.py
    "step: {i:2d}  loss:  {loss:.4f}  grad_norm:  {norm:.4f}  memory: {gib:.4f}GiB(40.53%)  tps: 7,812  "
    "tflops: {tflops:.2f}  mfu: {mfu}%\n"
)


def titan(norm=1.5, gib=38.5, tflops=312.5, mfu=31.6):
    return "".join(TITAN.format(i=i, loss=8 - i / 10, norm=norm, gib=gib, tflops=tflops, mfu=mfu) for i in range(1, 6))


def stamped(count=20, seconds=2.0, pause=0.0, step=1, back=0.0, **changed):
    """Lines with time stamps; a `pause` after each tenth, and `back` before the 15th."""
    text, at = "", datetime(2026, 3, 1, 23, 59)
    for number, i in enumerate(range(step, count * step + 1, step), 1):
        at += timedelta(seconds=seconds * step + pause * (number % 10 == 0) - back * (number == 15))
        text += line(i, 9 - i / 500, total=10**6, first=f"[{at:%Y-%m-%d %H:%M:%S}]", **changed)
    return text


RIGHT = {
    "an evaluation in the time of one of ten iterations": stamped(step=10)
    .replace(": 2000.0", ": 90000.0", 9)
    .replace(": 90000.0", ": 2000.0", 8),
    "every iteration": lines(),
    "a rate of tokens": SIZES + lines(more=RATE.format(4 * 2048 / 2 / 8, 2048)),
    "a curriculum at its start": SIZES + lines(more=RATE.format(4 * 64 / 2 / 8, 64)),
    "a ramp-up": lines() + "".join(line(i, 8.5, batch=8, used=80 + 8 * (i - 20)) for i in range(21, 50)),
    "torchtitan": titan(),
    "the clock agrees": stamped(),
    "the clock includes evaluations": stamped(60, pause=600.0),
    "a norm after an overflow": titan(norm=-1.0),
    "an MFU that is not measured yet": titan(mfu=-100.0) + titan().replace("step:  ", "step: 1"),
    "a start that diverges": line(1, 12.4) + "".join(line(i, 33.1 - i / 9) for i in range(2, 20)),
}
FAULTS = {
    "bounds of seconds": ("sec_per_it", lines(ms=4e6)),
    "bounds of the rate": ("learning_rate", lines(10) + line(11, more="learning rate: 2.000E+00 | ")),
    "bounds of the norm": ("grad_norm", titan(norm=-1.5)),
    "bounds of the loss": ("lm_loss", lines(10) + line(11, -0.5)),
    "bounds of the share": ("mfu", titan(mfu=3160.0)),
    "bounds of memory": ("max_reserved", titan(gib=38500)),
    "bounds of iterations": ("train_iters", lines(20, total=15)),
    "jumps-back": ("consumed_samples", lines(10) + line(11, used=4) + line(12, used=8)),
    "loss that is a sum": ("lm_loss", "".join(line(i, 900.0 - i) for i in range(1, 9))),
    "rate of tokens": ("tokens_per_gpu_per_second", SIZES + lines(more=RATE.format(4 * 2048 / 2 / 8, 64))),
    "rate of samples": ("samples_per_second", SIZES + lines(step=10, ms=20000.0, more="samples per second: 2.000 | ")),
    "count of iterations": ("iteration", "".join(line(i, used=40 * i) for i in range(1, 20))),
    "clock of seconds under another label": ("sec_per_it", stamped(ms=2.0)),
    "clock of a logging interval": ("sec_per_it", stamped(step=10, ms=20000.0)),
    "clock that jumps back": ("time_s", stamped(back=3600.0)),
    "lost": (
        "iteration",
        "".join(f"[default3]:{line(i + 5, 9 - i / 50)}[default7]:{line(i, 8.0)}" for i in range(10, 90, 10)),
    ),
    "count of tokens": (
        "consumed_tokens",
        SIZES + "".join(line(i, more=f"consumed tokens: {4 * 4096 * i:12d} | ") for i in range(1, 20)),
    ),
    "bounds of evaluations": (
        "validation",
        lines() + "validation loss at iteration 20 | lm loss value: -1.5E+00 | lm loss PPL: 1.0E+00 |\n",
    ),
}


def problems(folder, text):
    (folder / "a.log").write_text(text)
    return [problem for log in read_logs(folder / "a.log") for problem in log.problems]


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_log_has_no_problem(tmp_path, name):
    assert problems(tmp_path, RIGHT[name]) == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_reported_by_its_rule_alone(tmp_path, name):
    column, text = FAULTS[name]
    found = problems(tmp_path, text)
    assert [(p.rule, p.column) for p in found] == [(name.split(" ")[0], column)], [str(p) for p in found]
    assert found[0].evidence in map(str.strip, text.splitlines())


def test_fragments_of_mixed_lines_are_no_runs_in_silence(tmp_path):
    text = "".join(line(136000 + i, total=200000) + line(i, total=200000) for i in range(1, 5))
    (tmp_path / "a.log").write_text(text)
    logs = read_logs(tmp_path / "a.log")
    assert len(logs) > 2 and all([p.rule for p in log.problems] == ["jumps-back"] for log in logs)


@pytest.mark.parametrize(
    ("stray", "at"),
    [
        ("loss spike detected: loss=9.31 at step=77", 0),
        ("loss spike detected: loss=9.31 at step=77", 4),
        ("run step 3: loss 2.4", 12),
        ("the loss is back: loss=2.4 at step 55", 30),
    ],
)
def test_a_line_of_another_kind_that_gives_a_step_and_a_loss_is_no_iteration_in_silence(tmp_path, stray, at):
    rows = [f"step={i} loss={5 - i / 50:.4f} lr=1.0e-04 step_time={2 + i % 3 / 10}s" for i in range(1, 41)]
    (tmp_path / "a.log").write_text("\n".join([*rows[:at], stray, *rows[at:]]) + "\n")
    logs = read_logs(tmp_path / "a.log")
    assert len(logs) == 2 and all({p.rule for p in log.problems} <= {"jumps-back", "stray"} for log in logs)
    assert stray in {p.evidence for p in logs[0].problems}


@pytest.mark.parametrize("resumed", [21, 30, 35])
def test_a_run_that_goes_back_to_its_checkpoint_has_no_problem(tmp_path, resumed):
    rows = [f"step={i} loss={5 - i / 50:.4f} lr=1.0e-04 step_time={2 + i % 3 / 10}s" for i in range(1, 61)]
    (tmp_path / "a.log").write_text("\n".join([*rows[:40], *rows[resumed - 1 :]]) + "\n")
    assert [log.problems for log in read_logs(tmp_path / "a.log")] == [(), ()]


def test_the_card_of_a_list_of_gpus_bounds_the_rate(tmp_path):
    listed = "".join(
        f"GPU {i}: NVIDIA A100-SXM4-80GB (UUID: GPU-1a2b3c4d-0000-0000-0000-00000000000{i})\n" for i in range(4)
    )
    (tmp_path / "a.log").write_text(listed + titan(tflops=1400))
    (log,) = read_logs(tmp_path / "a.log")
    assert log.problems == () and {problem.rule for problem in measure_log(log).log.problems} == {"peak"}
    assert measure_log(log).config.card == "A100-80GB"


def test_lines_that_look_like_iterations_and_were_not_read_are_named(tmp_path):
    home_made = "".join(f"optimizer step no. {n}, its loss was {3 - n / 100}\n" for n in range(1, 30))
    (problem,) = problems(tmp_path, lines(2) + home_made)
    assert (problem.rule, problem.line) == ("unread", 3) and "step no. 1," in problem.evidence


@pytest.mark.parametrize(("first", "shift"), [(0, 0), (4, 0), (2, 500)])
def test_another_trainer_in_the_same_file_is_not_left_out_in_silence(tmp_path, first, shift):
    """Lines that any trainer may print are read where no known one prints; here one does, before, after or between."""
    own = [f"step={i + shift} loss={5 - i / 50:.4f} lr=1.0e-04 step_time=2.{i}s\n" for i in range(1, 6)]
    known = [line(i, 9 - i / 50) for i in range(1, 5)]
    (tmp_path / "a.log").write_text("".join([*known[:first], *own, *known[first:]]))
    (log,) = read_logs(tmp_path / "a.log")
    assert len(log.iterations) == 4
    assert [(p.rule, p.line, p.evidence) for p in log.problems] == [("unread", first + 1, own[0].strip())]


def test_the_line_that_shows_a_problem_is_named_with_its_number(tmp_path):
    (problem,) = problems(tmp_path, SIZES + lines(90) + line(91, more="learning rate: 2.0E+00 | ") + lines(120)[-4000:])
    assert problem.line == SIZES.count("\n") + 91 and "2.0E+00" in problem.evidence


def table(each, count=60, step=1, pauses=(), first=1):
    """Lines of a run of `each` seconds an iteration, whose stamps are cut to whole seconds; 20 s after some lines."""
    at = np.arange(first, first + count * step, step, dtype=float)
    exact = each * (at - first) + 20.3 * sum((np.arange(count) > p).astype(float) for p in pauses) + 0.37
    stamps = np.floor(exact)
    changes = np.flatnonzero(np.concatenate([[True], stamps[1:] != stamps[:-1]]))
    seconds = np.full(count, NAN)
    seconds[changes[1:]] = np.diff(stamps[changes]) / np.diff(at[changes])
    return {"iteration": at, "sec_per_it": seconds}


@pytest.mark.parametrize("pauses", [(), (30,), (9, 20, 31, 42, 53)])
@pytest.mark.parametrize(
    ("each", "count", "step"), [(3.5, 40, 1), (2.31, 60, 1), (0.18, 600, 1), (0.35, 100, 10), (1.49, 400, 1)]
)
def test_the_median_of_rounded_seconds_is_right_to_a_few_percent(each, count, step, pauses):
    rounded = table(each, count, step, pauses)
    assert "whole seconds" in average_rounded(rounded)
    assert np.nanmedian(rounded["sec_per_it"]) == pytest.approx(each, rel=0.03)


@pytest.mark.parametrize("seconds", [[91 / 50, 92 / 50, 91 / 50, 107 / 50], [2.25, 2.31, 2.4, 2.2], [1.0, NAN, 2.0]])
def test_long_intervals_exact_stamps_and_too_few_lines_stay_as_they_are(seconds):
    made = {"iteration": 50.0 * np.arange(1, len(seconds) + 1), "sec_per_it": np.array(seconds)}
    assert average_rounded(made) == ""
    np.testing.assert_array_equal(made["sec_per_it"], seconds)
