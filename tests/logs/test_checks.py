"""Planted faults: each is reported by its rule; a right log has no problem."""

import math
import re

import numpy as np
import pytest

from trilane.analysis.measure import measure_log
from trilane.logs.checks import correct_units, median, of_card
from trilane.logs.run import read_logs


def line(i, loss=5.0, total=200, batch=4, used=None, ms=2000.0, more=""):
    """An iteration of Megatron-LM,
    https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/training.py
    """
    used = batch * i if used is None else used
    return (
        f" iteration {i:8d}/{total:8d} | consumed samples: {used:12d} | elapsed time per iteration (ms): {ms:.1f} | "
        f"{more}global batch size: {batch:5d} | lm loss: {loss:.6E} | loss scale: 1.0 | number of nan iterations:   0 |\n"
    )


def lines(count=20, step=1, each=0, **changed):
    changed = [changed | ({"used": each * i} if each else {}) for i in range(count * step + 1)]
    return "".join(line(i, 9 - i / 50, **changed[i]) for i in range(step, count * step + 1, step))


RATE = "tokens per gpu per second (tgs): {} | actual seqlen:  {} | "
SIZES = "using world size: 8, data-parallel-size: 8\n------ arguments ------\n  world_size ... 8\n  seq_length ... 2048\n"
TITAN = (  # https://github.com/pytorch/torchtitan/blob/main/torchtitan/components/metrics.py
    "step: {i:2d}  loss:  {loss:.4f}  grad_norm:  {norm:.4f}  memory: 38.5000GiB(40.53%)  tps: 7,812  "
    "tflops: {tflops:.2f}  mfu: {mfu}%\n"
)
FAIRSEQ = "| epoch 001: {0} / 9000 loss=9.5, wps=20, ups=0.02, wpb=900, bsz=8, num_updates={0}, wall={1}\n"


def titan(norm=1.5, tflops=312.5, mfu=31.6):
    return "".join(
        TITAN.format(i=i, loss=8 - i / 10, norm=norm, tflops=tflops, mfu=mfu) for i in range(1, 6)
    )


NORM = " iteration {:8d}/     200 | elapsed time per iteration (ms): 2000.0 | grad norm: nan |\n"
SKIP = NORM.replace("grad norm: nan", "number of skipped iterations:   1")

RIGHT = {
    "every iteration": lines(),
    "a rate of tokens": SIZES + lines(more=RATE.format(4 * 2048 / 2 / 8, 2048)),
    "a rate of tokens as a running mean": SIZES
    + lines(more=RATE.format(1.49 * 4 * 2048 / 2 / 8, 2048)),
    "a rate of tokens that leaves out saves": SIZES
    + lines(more=RATE.format(4 * 2048 / 2 / 8 / 1.49, 2048)),
    "samples that leave out some": lines(batch=100, each=91),
    "samples of more": lines(batch=100, each=109),
    "the slowest": lines(ms=3.6e6),
    "the fastest": lines(ms=0.2),
    "the peak of two B200": titan(tflops=4500, mfu=100),
    "a curriculum at its start": SIZES + lines(more=RATE.format(4 * 64 / 2 / 8, 64)),
    "a ramp-up": lines()
    + "".join(line(i, 8.5, batch=8, used=80 + 8 * (i - 20)) for i in range(21, 50)),
    "torchtitan": titan(),
    "a norm after an overflow": titan(norm=-1.0),
    "an MFU that is not measured yet": titan(mfu=-100.0) + titan().replace("step:  ", "step: 1"),
    "a norm that is not computed": titan(norm=0.0),
    "a rate that is mostly printed as 0": lines(more="TFLOPs: 0.00 | ")
    + line(21, 8.6, more="TFLOPs: 0.10 | "),
    "a search for the loss scale": lines(9) + "".join(SKIP.format(i) for i in range(10, 42)),
    "a norm of NaN that is skipped": lines(9)
    + (NORM.format(10).rstrip("\n") + SKIP.format(10)[-40:]),
    "a start that diverges": line(1, 12.4) + "".join(line(i, 33.1 - i / 9) for i in range(2, 20)),
}
FAULTS = {
    "bounds of seconds": ("sec_per_it", lines(ms=3.61e6)),
    "bounds of the fastest": ("sec_per_it", lines(ms=0.1)),
    "bounds of FLOP/s": ("flops_per_s_per_gpu", titan(tflops=4501)),
    "bounds of the rate": (
        "learning_rate",
        lines(10) + line(11, more="learning rate: 2.000E+00 | "),
    ),
    "bounds of the norm": ("grad_norm", titan(norm=-1.5)),
    "bounds of the loss": ("lm_loss", lines(10) + line(11, -0.5)),
    "bounds of no loss": ("lm_loss", lines(10) + line(11, 0.0)),
    "bounds of the share": ("mfu", titan(mfu=100.1)),
    "jumps-back": ("consumed_samples", lines(10) + line(11, used=4) + line(12, used=8)),
    "rate of tokens": (
        "tokens_per_gpu_per_second",
        SIZES + lines(more=RATE.format(4 * 2048 / 2 / 8, 64)),
    ),
    "rate of half as many tokens again": (
        "tokens_per_gpu_per_second",
        SIZES + lines(more=RATE.format(1.51 * 4 * 2048 / 2 / 8, 2048)),
    ),
    "rate of words": (
        "tokens_per_second",
        "".join(map(FAIRSEQ.format, range(100, 900, 100), range(90, 900, 90))),
    ),
    "rate of samples": (
        "samples_per_second",
        SIZES + lines(step=10, ms=20000.0, more="samples per second: 2.000 | "),
    ),
    "trouble: a norm of 0": ("grad_norm", titan() + titan(norm=0.0).replace("step:  ", "step: 1")),
    "trouble: a norm of NaN without a loss": ("grad_norm", lines(9) + NORM.format(10)),
    "trouble: nothing but skipped": (
        "skipped",
        lines(9) + "".join(SKIP.format(i) for i in range(10, 43)),
    ),
    "count of iterations": ("iteration", lines(batch=100, each=111)),
    "count of fewer": ("iteration", lines(batch=100, each=90)),
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


def test_the_card_of_a_list_of_gpus_bounds_the_rate(tmp_path):
    listed = "".join(
        f"GPU {i}: NVIDIA A100-SXM4-80GB (UUID: GPU-1a2b3c4d-0000-0000-0000-00000000000{i})\n"
        for i in range(4)
    )
    (tmp_path / "a.log").write_text(listed + titan(tflops=1400))
    (log,) = read_logs(tmp_path / "a.log")
    assert log.problems == () and {problem.rule for problem in measure_log(log).log.problems} == {
        "peak"
    }
    assert measure_log(log).config.card == "A100-80GB"


# TFLOP/s printed, computed by two definitions, the card's peak, GiB reserved and of the card ->
# rules and their numbers
CARDS = """150 90 100 0 0 0 ->         | 151 90 100 0 0 0 -> flops 151 90 100   | 60 90 100 0 0 0 ->
           59 90 100 0 0 0 -> flops 59 90 100 | 0.9 0.1 0.1 0 0 0 -> | 1 0.1 0.1 0 0 0 -> flops 1 0.1 0.1
           0.1 1 1 0 0 0 -> flops 0.1 1 1 | nan 100 100 0 0 0 ->     | 312 312 400 312 0 0 ->
           313 312 312 312 0 0 -> peak 313 312 | 312 313 313 312 0 0 -> peak 313 312
           nan nan nan 0 102 100 -> | nan nan nan 0 103 100 -> memory 103 100 | nan nan nan 0 103 0 -> """


def test_a_card_bounds_rates_and_memory():
    for case in re.split(r"[|\n]", CARDS):
        given, _, wanted = map(str.split, case.partition("->"))
        printed, low, high, peak, memory, size = map(float, given)
        rates = (printed * 1e12, [r * 1e12 for r in (low, high) if r == r], peak * 1e12)
        found = of_card(*rates, {"reserved": memory * 2**30}, size * 2**30)
        assert [
            w for p in found for w in (p.rule, *re.findall(r"(?<!\w)[\d.]+", p.message))
        ] == wanted, case


# seconds; samples a second of a batch of 8 -> seconds; samples a second; which of them had the
# wrong unit
UNITS = """2 2 2000 2000 2000; -> 2 2 2 2 2;;3 time | 2000 2000 2 2 2; -> 2000 2000 2000 2000 2000;;3 time
           2 2 2 2000 2 2; ->;; | 2 3000; ->;; | 22000; 0.364 -> 22;0.364;1 time | 21600; 0.37 -> 21.6;0.37;1 time
           21590; 0.37 -> 21590;0.00037;1 rate | 0.01; 0.8 -> 10;0.8;1 time | 0.011; 0.727 -> 0.011;727;1 rate
           2 2; 4 0.004 -> 2 2;4 4;1 rate      | 2; 0.04 ->;;"""


def test_a_unit_that_is_a_thousand_times_wrong_is_corrected():
    for case in re.split(r"[|\n]", UNITS):
        given, _, wanted = (side.split(";") for side in case.partition("->"))
        columns = dict(
            zip(
                ("sec_per_it", "samples_per_second"),
                (np.array(x.split(), float) for x in given),
                strict=True,
            )
        )
        columns |= {"global_batch_size": np.full(len(columns["sec_per_it"]), 8.0)}
        right = [x.split() or y.split() for x, y in zip(wanted, given, strict=False)]
        if not given[1].strip():
            del columns["samples_per_second"]
        count, _, word = wanted[2].strip().partition(" ")
        assert correct_units(columns) == (
            f"{count} iterations have the wrong unit of {word}; corrected" if word else ""
        )
        assert columns["sec_per_it"] == pytest.approx([float(x) for x in right[0]]), case
        assert columns.get("samples_per_second", []) == pytest.approx(
            [float(x) for x in right[1]]
        ), case


def test_the_median_is_of_the_finite_numbers():
    assert (
        median(np.array([9, math.nan, 1, math.inf, 4])) == 4
        and median(np.array([9.0, 1, 4, 2])) == 3
    )
    assert math.isnan(median(np.array([math.nan])))
