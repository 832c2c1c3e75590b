"""The Python interface: frames go out tidy and come in checked, names and paths are read."""

import math
import re

import numpy as np
import pandas as pd
import pytest
from support import REPOSITORY
from test_log_dialects import m2021

import trilane

SHAPE, PLAN = "70,14336,112,2048,250880", REPOSITORY / "docs/plan-176b.json"


@pytest.fixture(scope="module")
def frame():
    found = trilane.search(SHAPE, "jz-a100-80g", gpus=384, gbs=2048, recompute="full")
    return found.to_frame()


def test_rows_of_a_frame_have_the_numbers_of_their_plans_or_a_reason(frame):
    rows = frame[:4].copy()
    rows.loc[1, "pp"] = rows.loc[1, "gpus"] = 11
    rows.loc[2, "num_attention_heads"] = 111
    again = trilane.predict(rows, "jz-a100-80g")
    assert again.predicted_sec_per_it.tolist() == pytest.approx(
        [frame.sec_per_it[0], math.nan, math.nan, frame.sec_per_it[3]], nan_ok=True
    )
    assert again.oom_probability[3] == frame.oom_probability[3]
    assert (
        again.reason[0] == ""
        and "gpus=11" in again.reason[1]
        and "num_attention_heads=111" in again.reason[2]
    )


def test_a_frame_holds_numbers_and_nan_alone_for_what_is_unknown(tmp_path):
    calendar = trilane.forecast(PLAN, tokens=3e11)  # without price, deadline and allocation
    cases = trilane.alternatives(calendar).to_frame()
    unknown = ["money_p50", "p_miss_deadline", "p_overrun_allocation"]
    assert cases[unknown].isna().all(axis=None) and {*cases[unknown].dtypes} == {np.dtype(float)}
    memory = "[Rank 3] (after 1 iterations) memory (MB) | allocated: 1.0 | max allocated: 20480.0\n"
    (tmp_path / "a.log").write_text("".join(m2021(i, ms=9500.0) for i in range(1, 9)) + memory)
    (tmp_path / "b.log").write_text("torch.cuda.OutOfMemoryError: CUDA out of memory.\n")
    runs = trilane.measure_runs(trilane.Study("none"), f"{tmp_path}/*.log").to_frame()
    assert runs.gbs.dtype == float and "memory_bytes" not in runs
    assert not [name for name in runs if type(runs[name].dtype) in (pd.Int64Dtype, pd.Float64Dtype)]
    assert (
        runs.sec_per_it.tolist() == pytest.approx([9.5, math.nan], nan_ok=True)
        and runs.memory_gib[0] == 20
    )


def test_two_lines_fit_ten_rows_of_a_file(frame, tmp_path):
    frame[:10].assign(sec_per_it=1.2 * frame.sec_per_it).to_csv(
        tmp_path / "my_runs.csv", index=False
    )
    rows = pd.read_csv(tmp_path / "my_runs.csv")
    known = trilane.fit(rows, "jz-a100-80g")
    assert len(known.rows) == 10 and not known.left_out and not known.ignored
    nearer = (
        trilane.predict(rows, "jz-a100-80g", known.fitted).predicted_sec_per_it / rows.sec_per_it
        - 1
    )
    assert nearer.abs().max() < 0.05 < (frame.sec_per_it[:10] / rows.sec_per_it - 1).abs().min()


def test_a_cell_that_cannot_be_read_is_named_by_row_and_column(frame):
    message = "rows=row 0: hidden_size=big: must be a whole number"
    with pytest.raises(ValueError, match="^" + re.escape(message)):
        trilane.fit(frame.assign(hidden_size="big"), "jz-a100-80g")


def test_names_and_paths_stand_for_plans_clusters_shapes_and_constants():
    plan = trilane.read_plan(PLAN)
    core = trilane.calibration_for("jz-a100-80g", "megatron-core")
    assert trilane.predict(str(PLAN)) == trilane.predict(PLAN) == trilane.predict(plan)
    assert trilane.predict(PLAN, calibration="megatron-core") == trilane.predict(plan, core)
    assert trilane.predict(plan, "jz-h100", "megatron-core").calibration.name == "megatron-core"
    asked = {"gpus": 384, "gbs": 2048, "top": 1, "recompute": "full"}
    by_name = trilane.search(SHAPE, "jz-a100-80g", calibration="megatron-core", **asked)
    by_value = trilane.search(by_name.rows[0].plan.shape, plan.cluster, calibration=core, **asked)
    assert by_name.rows == by_value.rows
