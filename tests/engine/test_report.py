"""The line that a person reads and the line that a program reads say the same."""

from datetime import datetime

import pytest
from plans import changed, small_plan
from support import Later

from trilane.logs.run import read_log
from trilane_diagnose.stragglers import read_phase_times

report = Later("trilane_engine.report")
pytestmark = pytest.mark.filterwarnings("ignore")  # what torch says while it is imported

LINE = (
    " [2026-08-01 12:00:00.000000] iteration       10/     100 | consumed samples:         1280 | "
    "elapsed time per iteration (ms): 1234.5 | throughput per GPU (TFLOP/s/GPU): 98.8 | "
    "learning rate: 1.500000E-04 | global batch size:   128 | lm loss: 2.500000E+00 | loss scale: 65536.0 | "
    "grad norm: 1.235 | number of skipped iterations:   1 | number of nan iterations:   0 |"
)
STEP = {
    "iteration": 10,
    "consumed_samples": 1280,
    "sec_per_it": 1.2345,
    "tflops": 98.765,
    "learning_rate": 1.5e-4,
}
STEP |= {
    "global_batch_size": 128,
    "lm_loss": 2.5,
    "loss_scale": 65536.0,
    "grad_norm": 1.2345678,
    "skipped": 1,
    "nan": 0,
}


def test_the_line_is_megatrons_and_a_window_has_means_of_time_and_loss_and_sums_of_counts():
    """Megatron-LM's training_log of 2025, with the clock in front."""
    assert report.megatron_line([STEP], 100, datetime(2026, 8, 1, 12)) == LINE
    other = {**STEP, "lm_loss": 3.5, "sec_per_it": 2.2345, "skipped": 0}
    line = report.megatron_line([STEP, other], 100, datetime(2026, 8, 1, 12))
    assert "lm loss: 3.000000E+00" in line and "(ms): 1734.5" in line
    assert "skipped iterations:   1" in line


NAMES = {"forward-compute", "backward-compute", "all-grads-sync", "optimizer", "batch-generator"}


TIMED = {
    "megatron PP2 interleaved": ({"pp": 2, "interleaving": 2}, NAMES | {"p2p-wait"}),
    "HF ZeRO-3 DP2": ({"engine": "hf-zero3", "dp": 2, "zero": 3}, NAMES),
}


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "names"), TIMED.values(), ids=TIMED.keys())
def test_timers_fill_the_iteration_and_our_reader_reads_them(
    topology: dict, names: set, train, data, tmp_path
):
    """Of the last rank, of the two iterations before each line."""
    plan = changed(small_plan(data, iters=4, **topology), "run", timers=True, log_interval=2)
    steps = train(plan)
    log = read_log(tmp_path / "run" / f"{plan.topology.gpus - 1}.log")
    assert log.timers["iteration"].tolist() == [2, 4]
    timers = log.timers.drop(columns="iteration").iloc[1]
    assert set(timers.index) == names and timers.min() >= 0
    seconds = sum(step["sec_per_it"] for step in steps[2:]) / 2
    assert 0.7 * seconds < timers.sum() < 1.1 * seconds
    _, own = read_phase_times(tmp_path / "run")
    assert sorted(own) == [*range(plan.topology.gpus)]
    assert own[plan.topology.gpus - 1] == pytest.approx(timers.to_dict(), abs=1e-5)
