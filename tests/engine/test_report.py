"""The line that a person reads and the line that a program reads say the same."""

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from plans import changed, small_plan
from support import Later

from trilane.config.batch_rampup import Batch
from trilane.interop.deepspeed_config import deepspeed_config
from trilane.logs.run import read_log
from trilane.workspace.phase_times import read_phase_times

torch, phases = Later("torch"), Later("trilane_engine.phases")
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


def test_the_line_is_megatrons_and_a_window_has_means_of_time_and_loss_and_sums_of_counts() -> None:
    """Megatron-LM's training_log of 2025, with the clock in front."""
    assert report.megatron_line([STEP], 100, datetime(2026, 8, 1, 12)) == LINE
    other = {**STEP, "iteration": 11, "lm_loss": 3.5, "sec_per_it": 2.2345, "skipped": 0}
    line = report.megatron_line([STEP, other], 100, datetime(2026, 8, 1, 12))
    assert (
        " iteration       11/" in line
        and "lm loss: 3.000000E+00" in line
        and "(ms): 1734.5" in line
    )
    assert "skipped iterations:   1" in line


def test_the_last_rank_prints_every_few_iterations_what_it_writes_of_each(
    tmp_path: Path, capsys
) -> None:
    """And of an evaluation Megatron-LM's three lines of 2025 (evaluate_and_print_results); e^2 is
    7.389.
    """
    plan = changed(small_plan(tmp_path), "run", log_interval=2, exit_iteration=5, train_iters=100)
    steps = [{**STEP, "iteration": number} for number in range(1, 6)]
    for rank in (0, 1):
        world = SimpleNamespace(is_last=rank == 1, rank=rank, device=torch.device("cpu"))
        log = report.TrainingLog(plan, world, tmp_path)
        with mock.patch("trilane_engine.heartbeat.iterated") as counted:
            for step in steps:
                log.write(step, saving=step["iteration"] == 3)
        assert counted.call_count == 4, (
            "an iteration says nothing of the pace while a save is being written"
        )
        log.evaluated(Batch(number=5, first=32, gbs=8), 2.0, 0.5)
        log._timers.stop()
        out = capsys.readouterr().out.splitlines()
        wanted = [
            report.megatron_line(steps[at : at + 2], 100, datetime(2026, 8, 1, 12))
            for at in (0, 2, 4)
        ]
        assert [line.partition("]")[2] for line in out[:3]] == [
            line.partition("]")[2] for line in wanted
        ] * rank
        validation = " validation loss at iteration 5 | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 | "
        assert (
            out[3:] == ["-" * (len(validation) + 1), validation, "-" * (len(validation) + 1)] * rank
        )
        found = [tmp_path / name for name in ("steps.jsonl", "validation.jsonl")]
        evaluation = {"iteration": 5, "consumed_samples": 40, "lm_loss": 2.0, "seconds": 0.5}
        lines = [
            [json.loads(line) for line in path.read_text().splitlines()]
            for path in found
            if path.exists()
        ]
        assert lines == [steps, [evaluation]][: 2 * rank]
    table = report.timing_table(
        {"forward-compute": (0.001, 0.0025), "optimizer": (0.0, 1.0)}
    ).splitlines()
    assert table[1:] == [
        f"    forward-compute {'.' * 32}: (1.00, 2.50)",
        f"    optimizer {'.' * 38}: (0.00, 1000.00)",
    ]


NAMES = {"forward-compute", "backward-compute", "all-grads-sync", "optimizer", "batch-generator"}


TIMED = {
    "megatron PP2 interleaved": ({"pp": 2, "interleaving": 2}, NAMES | {"p2p-wait"}),
    "HF ZeRO-3 DP2": ({"engine": "hf-zero3", "dp": 2, "zero": 3}, NAMES),
    "3D PP2 DP2": ({"engine": "deepspeed-3d", "pp": 2, "dp": 2, "zero": 1}, NAMES | {"p2p-wait"}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("topology", "names"), TIMED.values(), ids=TIMED.keys())
def test_timers_fill_the_iteration_and_our_reader_reads_them(
    topology: dict, names: set, train: Callable, data: Path, tmp_path: Path
) -> None:
    """(min, max) over ranks, of the two iterations before each line; no rank can spend more than
    the iteration.
    """
    plan = changed(small_plan(data, iters=4, **topology), "run", timers=True, log_interval=2)
    steps = train(plan)
    spreads = [step["timers"] for step in steps if "timers" in step]
    assert [step["iteration"] for step in steps if "timers" in step] == [2, 4]
    assert all(set(spread) == names for spread in spreads)
    seconds = sum(step["sec_per_it"] for step in steps[2:]) / 2
    assert sum(low for low, _ in spreads[1].values()) < 1.1 * seconds
    assert sum(high for _, high in spreads[1].values()) > 0.7 * seconds
    assert all(0 <= low <= high for low, high in spreads[1].values())
    _, own = read_phase_times(tmp_path / "run")
    for name, (low, high) in spreads[1].items():
        own_seconds = [times.get(name, 0.0) for times in own.values()]
        assert len(own_seconds) == plan.topology.gpus
        assert (min(own_seconds), max(own_seconds)) == (pytest.approx(low), pytest.approx(high))
    last = tmp_path / "run" / f"{plan.topology.gpus - 1}.log"
    for log in (read_log(last), read_log(tmp_path / "run" / "steps.jsonl")):
        assert log.timers["iteration"].tolist() == [2, 4]
        for name, (low, high) in spreads[1].items():
            assert log.timers[name].iloc[1] == pytest.approx(high, abs=1e-5)
            assert log.timers[f"{name} min"].iloc[1] == pytest.approx(low, abs=1e-5)


def test_a_phase_counts_its_own_time_and_an_evaluation_between_iterations_none(monkeypatch) -> None:
    """The clock goes on by one at each change of phase; a phase that failed stays current."""
    marks = [
        (0.0, ""),
        (1.0, "forward-compute"),
        (2.0, "batch-generator"),
        (4.0, "forward-compute"),
        (5.0, ""),
    ]
    assert phases.durations(marks) == {"": 1.0, "forward-compute": 2.0, "batch-generator": 2.0}
    clock = iter(range(100))
    monkeypatch.setattr("trilane_engine.phases.perf_counter", lambda: float(next(clock)))
    timers = phases.Timers(torch.device("cpu"))
    for evaluates in (False, True):
        with phases.phase("forward-compute"):
            pass
        timers.skip() if evaluates else timers.fold()
    with phases.phase("forward-compute"):
        pass
    timers.fold()
    timers.stop()
    assert timers.own() == {"forward-compute": 1.0}
    with pytest.raises(RuntimeError), phases.phase("optimizer"):
        raise RuntimeError
    assert phases.current() == "optimizer"
    phases.end()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "topology"),
    [("deepspeed-zero", {"zero": 3, "offload": "full"}), ("hf-zero3", {"zero": 3})],
    ids=str,
)
def test_no_library_prints_into_the_log_and_deepspeeds_settings_are_kept(
    engine: str, topology: dict, train: Callable, data: Path, tmp_path: Path
) -> None:
    """On two ranks: their memory lines, first and last, from rank 0 its path, from the last the
    iterations.
    """
    plan = small_plan(data, iters=2, engine=engine, dp=2, recompute="full", **topology)
    train(plan)
    kept = tmp_path / "run" / "ds_config.json"
    assert json.loads(kept.read_text()) == deepspeed_config(plan, compiler=False)
    logs = [(tmp_path / "run" / f"{rank}.log").read_text().splitlines() for rank in range(2)]
    assert [len(lines) for lines in logs] == [3, 4] and "unfused path" in logs[0][0], logs
