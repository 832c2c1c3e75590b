"""One run, one answer: the record of `logs parse`, and what a notebook shows of many runs;
everywhere the same.
"""

import json
import math
import re
from dataclasses import replace

import pytest
from support import small_plan
from test_log_dialects import m2021, m2022

from trilane.analysis.collect import measure_all, measure_path, measure_runs
from trilane.analysis.measure import measure
from trilane.analysis.recalibrate import case_of
from trilane.cli.app import main
from trilane.config.batch_rampup import Ramp
from trilane.slurm import sites, study_runs
from trilane.slurm.sites import JobRequest
from trilane.workspace.status import RunStatus, Status, write_status
from trilane.workspace.study import Study


def arguments(**values):
    """As a program prints its arguments."""
    return "".join(f"  {name + ' ':.<49} {value}\n" for name, value in values.items())


DUMP = "------------------------ arguments ------------------------\n" + arguments(
    num_layers=24,
    hidden_size=2048,
    num_attention_heads=16,
    seq_length=2048,
    padded_vocab_size=50304,
    checkpoint_activations=True,
    world_size=8,
    global_batch_size=4,
)
MEMORY = "[Rank 3] (after 1 iterations) memory (MB) | allocated: 1.0 | max allocated: 2048.0 | reserved: 3.0 | max reserved: 4096.0\n"


def log(folder, name="a.log", text=None):
    (folder / name).write_text(text or DUMP + "".join(map(m2021, range(1, 11))) + MEMORY)
    return str(folder / name)


def parsed(capsys, *arguments):
    code = main(["logs", "parse", *map(str, arguments), "--json"])
    output = capsys.readouterr()
    return code, json.loads(output.out)["runs"] if output.out else [], output.err


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (m2022(1) + m2022(2), {"tflops": {"printed": 107.48}, "max_memory_gib": None}),
        (m2021(1, loss=float("nan")), {"last_loss": None, "status": "NaN loss"}),
        (
            "{'loss': 2.5, 'epoch': 0.1}\n{'loss': 2.25, 'epoch': 0.2}\n",
            {"iterations": 2, "sec_per_it": None},
        ),
    ],
)
def test_what_a_log_prints_is_kept_and_what_it_lacks_is_null(tmp_path, capsys, text, values):
    _, (run,), _ = parsed(capsys, log(tmp_path, text=text))
    assert {name: run[name] for name in values} == values


def test_a_notebook_shows_the_first_of_many_runs_failed_ones_first(tmp_path):
    text = DUMP + "".join(m2021(i) for i in range(1, 11))
    for number in range(45):
        (tmp_path / f"{number:02d}.log").write_text(text + "ValueError: no\n" * (number == 9))
    runs = measure_runs(Study("s"), str(tmp_path))
    endings = runs.endings()
    assert (endings.count("<tr>"), runs._repr_html_().count("<tr>"), len(runs.drawn)) == (40, 40, 8)
    assert re.findall(r"\d\d\.log", endings)[:2] == ["09.log", "00.log"]
    assert "no spike" in runs.spikes()
    assert "44 of 45 runs completed" in runs.summary()


RAMP = Ramp(start=2, increment=2, samples=30)
LINE = (
    " iteration {:8d}/{:8d} | elapsed time per iteration (ms): {:.1f} | global batch size: {:5d} | lm loss: {:.6E} | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
OF_RANK = "[Rank {}] (after 1 iterations) memory (MB) | allocated: 1.0 | max allocated: {}.0 | reserved: 9.0\n"


@pytest.fixture
def folder(outputs):
    """A run of 23 iterations, in a sweep of a study: 15 of 2 sequences in 0.1 s each, then 8 of 4
    in 0.3.
    """
    study = Study.create("s")
    plan = small_plan("ramp", train_iters=23, dp=2, mbs=1)
    plan = replace(plan, run=replace(plan.run, ramp=RAMP))
    values = {**plan.to_json(), "prediction": {"memory_bytes": 2.0**30}}
    (folder,) = study_runs.create_sweep(study.folder, [values], sites.site("generic"), JobRequest())
    steps = [
        (b.number, b.gbs, (0.1 if b.gbs == 2 else 0.3) + 1e-5 * b.number) for b in plan.batches()
    ]
    assert [gbs for _, gbs, _ in steps] == [2] * 15 + [4] * 8
    lines = [LINE.format(number, 23, 1000 * seconds, gbs, 5.0) for number, gbs, seconds in steps]
    (folder / "run.log").write_text("".join(lines) + OF_RANK.format(0, 7) + OF_RANK.format(1, 8))
    write_status(
        folder, RunStatus(status=Status.COMPLETED, evidence="end", rank=0, exit_code=0, seconds=4.0)
    )
    return folder


def test_a_ramp_is_measured_at_its_full_batch_and_everywhere_alike(folder, capsys):
    m, plan = measure(folder), small_plan(dp=2)
    seconds = 0.3002
    assert (m.iterations, m.config.gbs, m.sec_per_it) == (8, 4, pytest.approx(seconds, rel=1e-12))
    assert m.flops_per_s["narayanan"] == pytest.approx(
        plan.shape.flops_per_iteration(4) / seconds / 2
    )
    assert m.memory_bytes == 8 * 2**20 and m.status == "completed"
    assert math.isnan(m.mfu), "what a CPU was measured to do is no peak"
    tflops = m.flops_per_s["narayanan"] / 1e12

    for record in parsed(capsys, folder, folder / "run.log")[1]:
        assert record == m.to_json()
    assert m.to_json()["left_out"] == {"warm-up": 5, "global_batch_size is not 4": 10}

    (run,) = measure_all([folder.parent])[0]
    row = run.row()
    found = [row[name] for name in ("gbs", "sec_per_it", "tflops", "memory_gib", "status")]
    assert found == [4, m.sec_per_it, tflops, m.memory_bytes / 2**30, "completed"]

    shown = measure_runs(Study.open("s"))
    assert shown.runs[0].to_json() == m.to_json()
    cells = shown.to_frame().iloc[0]
    assert (cells["gbs"], cells["sec_per_it"], cells["status"]) == (4, m.sec_per_it, "completed")
    assert measure_path(folder)[0].to_json() == m.to_json()
    assert case_of(m).topology.gbs == 4
