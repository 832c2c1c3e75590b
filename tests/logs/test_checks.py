"""Planted faults: each is reported by its rule; a right log has no problem."""

import re

import pytest

from trilane.logs.run import read_logs


def line(i, loss, batch=4, used=None, ms=2000.0):
    """An iteration of Megatron-LM,
    https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/training.py
    """
    used = batch * i if used is None else used
    return (
        f" iteration {i:8d}/     200 | consumed samples: {used:12d} | elapsed time per iteration (ms): {ms:.1f} | "
        f"global batch size: {batch:5d} | lm loss: {loss:.6E} | loss scale: 1.0 | number of nan iterations:   0 |\n"
    )


def lines(count=20, **changed):
    return "".join(line(i, 9 - i / 50, **changed) for i in range(1, count + 1))


TITAN = (  # https://github.com/pytorch/torchtitan/blob/main/torchtitan/components/metrics.py
    "step: {i:2d}  loss:  {loss:.4f}  grad_norm:  1.5000  memory: 38.5000GiB(40.53%)  tps: 7,812  "
    "tflops: 312.50  mfu: {mfu}%\n"
)


def titan(mfu=31.6):
    return "".join(TITAN.format(i=i, loss=8 - i / 10, mfu=mfu) for i in range(1, 6))


RIGHT = {
    "every iteration": lines(),
    "a ramp-up": lines()
    + "".join(line(i, 8.5, batch=8, used=80 + 8 * (i - 20)) for i in range(21, 50)),
    "an MFU that is not measured yet": titan(mfu=-100.0) + titan().replace("step:  ", "step: 1"),
    "a start that diverges": line(1, 12.4) + "".join(line(i, 33.1 - i / 9) for i in range(2, 20)),
}
FAULTS = {
    "bounds of seconds": ("sec_per_it", lines(ms=3.61e6)),
    "bounds of the share": ("mfu", titan(mfu=100.1)),
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
    assert [(p.rule, p.column) for p in found] == [(re.split("[ :]", name)[0], column)], [
        str(p) for p in found
    ]
