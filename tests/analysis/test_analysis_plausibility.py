"""Where shape and card are known, what contradicts them is reported, and is no measurement in
silence.
"""

import pytest
from test_measure import ARGUMENTS, log

from trilane.analysis.measure import measure_log
from trilane.analysis.recalibrate import recalibrate
from trilane.config.cluster import cluster

V100 = cluster("jz-v100-32g")


def measured(**columns):
    this = log(arguments={**ARGUMENTS, "fp16": True}, **columns)
    return measure_log(this, gpu=V100.gpu)


RIGHT = measured().flops_per_s["narayanan"]  # 2 s an iteration
CASES = {
    "as computed": ([], {"flops_per_s_per_gpu": RIGHT}),
    "a tenth of the computed": (["flops"], {"flops_per_s_per_gpu": RIGHT / 10}),
    "printed beyond the peak": (["flops", "peak"], {"flops_per_s_per_gpu": 4e14}),
}


@pytest.mark.parametrize("name", CASES)
def test_rates_are_held_against_shape_and_card(name):
    rules, columns = CASES[name]
    assert [problem.rule for problem in measured(**columns).log.problems] == rules


def test_a_run_whose_numbers_contradict_each_other_teaches_the_planner_nothing():
    good, bad = measured(), measured(flops_per_s_per_gpu=RIGHT / 10)
    alone, found = recalibrate([good], V100), recalibrate([good, bad], V100)
    assert len(alone.rows) == 1 and not alone.left_out
    assert found.rows == alone.rows and "TFLOP/s printed" in found.left_out[0].reason
    assert "a.log" in found._repr_html_() and not recalibrate([bad], V100)
