"""Measuring: which iterations count, one meaning of TFLOPs, curves over restarts."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from markup import Page

from trilane.analysis import loss_curve
from trilane.analysis import measure as flops
from trilane.analysis.collect import MeasuredRuns
from trilane.analysis.measure import measure_log
from trilane.analysis.run_config import RunConfig, run_config
from trilane.analysis.steady_state import steady_state
from trilane.config.cluster import cluster
from trilane.costmodel.measured_rows import read_rows
from trilane.logs.run import RunLog
from trilane.utils.validation import DATA

ARGUMENTS = dict(
    num_layers=24, hidden_size=2048, num_attention_heads=16, seq_length=2048, padded_vocab_size=50304, world_size=8,
    tensor_model_parallel_size=2, pipeline_model_parallel_size=2, micro_batch_size=1, global_batch_size=16,
)  # fmt: skip


def log(iterations=20, arguments=None, timers=None, name="a.log", first=1, step=1, **columns):
    at = np.arange(first, first + iterations * step, step)
    given = {"sec_per_it": 2.0, "lm_loss": 5.0, **columns}
    table = pd.DataFrame(
        {
            "iteration": at,
            **{k: np.broadcast_to(v, len(at)).astype(float) for k, v in given.items()},
        }
    )
    return RunLog(
        source=Path(name), iterations=table, status="completed", evidence="",
        dialect="megatron-lm", arguments=arguments or {}, timers=pd.DataFrame(timers or {}),
    )  # fmt: skip


def counted(this, **how):
    return this.iterations["iteration"][steady_state(this, **how)[0]].tolist()


def test_the_warm_up_does_not_count_but_at_most_half_of_the_lines_are_warm_up():
    assert counted(log(12)) == [6, 7, 8, 9, 10, 11, 12]
    assert counted(log(6)) == [4, 5, 6]
    assert counted(log(4, first=10, step=10)) == [20, 30, 40], (
        "a line of ten iterations is warm-up enough"
    )
    assert counted(log(1)) == [1]


@pytest.mark.parametrize(
    ("batch", "left"),
    [
        (
            [16, *[5325, 5322, 5311, 5310, 5328] * 3, 4000, 5325, 5322, 5311],
            [1, 2, 3, 4, 5, 17],
        ),  # filled by tokens
        (
            [*range(1920, 2048, 16), *[2048] * 12],
            [1, 2, 3, 4, 5],
        ),  # the end of a ramp, by 0.8 % a step
        ([64, 32] * 10, [1, 2, 3, 4, 5, *range(6, 21, 2)]),
    ],
    ids=("varies after a ramp", "ramp", "two sizes"),
)
def test_a_batch_that_differs_by_more_than_3_percent_is_left_out(batch, left):
    full = counted(log(global_batch_size=np.array(batch)), gbs=max(batch))
    assert sorted({*range(1, 21)} - {*full}) == left


def test_rates_are_those_that_the_chronicles_printed():
    """The prequel's tables after 20 February 2022: 101 rows, three of which contradict
    themselves.
    """
    with (DATA / "measured.csv").open(newline="") as file:
        printed = {row["row_id"]: row["tflops_printed"] for row in csv.DictReader(file)}
    off = []
    for row in read_rows([DATA / "measured.csv"])[0]:
        document, _, line = row.row_id.partition("L")
        is_later = document == "s003-" and int(line) > 586 and int(line) != 670
        if row.seconds > 0 and printed[row.row_id] and is_later:
            topology = row.case.topology
            config = RunConfig(
                shape=row.case.shape,
                gpus=topology.gpus,
                gbs=topology.gbs,
                recompute=topology.recompute,
            )
            rate = flops.rates(config, row.seconds)["narayanan"] / 1e12
            off.append(abs(rate / float(printed[row.row_id]) - 1))
    assert len(off) == 101
    assert sum(error < 1e-3 for error in off) == 98


def test_recomputation_does_not_count_for_the_utilization():
    this = log(arguments={**ARGUMENTS, "recompute_granularity": "full", "fp16": True})
    setup = run_config(this, gpu=cluster("jz-v100-32g").gpu)
    assert setup.peak_flops_per_s == 125e12
    used = setup.shape.flops_per_iteration(16) / 2 / 8 / 125e12
    assert flops.mfu(setup, 2.0) == pytest.approx(used)
    for lacks in ({"shape": None}, {"gpus": 0}, {"gbs": 0}):
        assert flops.rates(replace(setup, **lacks), 2.0) == {}
        assert math.isnan(flops.mfu(replace(setup, **lacks), 2.0))


def test_the_shape_of_a_log_has_megatrons_experts():
    """DeepSpeed's, of which it prints a list, stand in every second layer."""
    mixture = {"num_experts": 8, "moe_ffn_hidden_size": 96, "moe_layer_freq": str([0] + [1] * 23)}
    shape = run_config(log(arguments=ARGUMENTS | mixture)).shape
    assert (shape.experts, shape.expert_ffn, shape.first_dense) == (8, 96, 1)
    assert "[64]" in run_config(log(arguments=ARGUMENTS | {"num_experts": "[64]"})).note


def test_the_timers_of_logs_stand_side_by_side_as_medians():
    megatron = {"iteration": [1, 2], "forward-compute": [0.4, 0.6], "optimizer": [0.1, 0.1]}
    runs = (measure_log(log(2, timers=megatron)), measure_log(log(2, name="b.log")))
    words = " ".join(Page(MeasuredRuns(runs=runs).timers()).text.split())
    assert words == "timer (s) a.log b.log forward-compute 0.5 optimizer 0.1"
    assert "forward" not in MeasuredRuns(runs=runs[1:]).timers()


def test_logs_of_one_training_join_and_what_was_done_again_counts_once():
    joined = loss_curve.join([log(10, name="1"), log(6, first=8, name="2", lm_loss=4.0)])
    assert joined.table["iteration"].tolist() == list(range(1, 14))
    assert joined.table["lm_loss"].tolist() == [5.0] * 7 + [4.0] * 6
    assert [(r.iteration, r.redone, r.log) for r in joined.restarts] == [(8, 3, "2")]


def test_logs_are_sorted_into_trainings():
    a = log(10, name="a", arguments={"hidden_size": 64})
    b = log(10, name="b", arguments={"hidden_size": 32})
    goes_on = log(10, first=9, name="c", arguments={"hidden_size": 64})
    later = log(10, first=50, name="d")
    found = loss_curve.trainings([a, b, goes_on, later, log(0, name="empty")])
    assert [[this.source.name for this in t] for t in found] == [["a", "c"], ["b"], ["d"]]
