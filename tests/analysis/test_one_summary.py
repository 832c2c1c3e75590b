"""One run folder, one answer: every command, table and notebook shows the same window, seconds, TFLOPs and memory."""

import json
from dataclasses import replace

import pytest
from support import small_plan

import trilane
from trilane.analysis.collect import measure_runs
from trilane.analysis.compare import compare
from trilane.analysis.fleet import read_folder
from trilane.analysis.measure import measure
from trilane.analysis.parallel import read_many
from trilane.analysis.recalibrate import case_of
from trilane.config.batch_rampup import Ramp
from trilane.experiments import benchmark
from trilane.slurm import sites, sweep
from trilane.slurm.sites import JobRequest
from trilane.workspace.status import RunStatus, Status, write_status
from trilane.workspace.study import Study

RAMP = Ramp(start=2, increment=2, samples=30)
LINE = (
    " iteration {:8d}/{:8d} | elapsed time per iteration (ms): {:.1f} | global batch size: {:5d} | lm loss: {:.6E} | "
    "number of skipped iterations:   0 | number of nan iterations:   0 |\n"
)
MEMORY = "[Rank {}] (after 1 iterations) memory (MB) | allocated: 1.0 | max allocated: {}.0 | reserved: 9.0\n"


@pytest.fixture
def folder(outputs):
    """A run of 23 iterations, in a sweep of a study: 15 of 2 sequences in 0.1 s each, then 8 of 4 in 0.3."""
    study = Study.create("s")
    plan = small_plan("ramp", train_iters=23, dp=2, mbs=1)
    plan = replace(plan, run=replace(plan.run, ramp=RAMP))
    prediction = {"memory_bytes": 2.0**30}
    values = {**plan.to_json(), "prediction": prediction}
    (folder,) = sweep.create(study.folder, [values], sites.site("generic"), JobRequest())
    batches = list(RAMP.batches(23, 4))
    seconds = [0.1 + 1e-5 * b.number if b.gbs == 2 else 0.3 + 1e-5 * b.number for b in batches]
    assert [b.gbs for b in batches] == [2] * 15 + [4] * 8
    lines = [LINE.format(b.number, 23, 1000 * s, b.gbs, 5.0) for b, s in zip(batches, seconds, strict=True)]
    steps = [{"iteration": b.number, "sec_per_it": s} for b, s in zip(batches, seconds, strict=True)]
    (folder / "run.log").write_text("".join(lines) + MEMORY.format(0, 7) + MEMORY.format(1, 8))
    (folder / "steps.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    write_status(folder, RunStatus(status=Status.COMPLETED, evidence="end", rank=0, exit_code=0, seconds=4.0))
    return folder


def test_a_ramp_is_measured_at_its_full_batch_and_everywhere_alike(folder):
    m, plan = measure(folder), small_plan(dp=2)
    seconds = 0.3 + 1e-5 * 19.5
    assert (m.iterations, m.config.gbs, m.sec_per_it) == (8, 4, pytest.approx(seconds, rel=1e-12))
    assert m.flops_per_s_per_gpu == pytest.approx(plan.shape.flops_per_iteration(4) / seconds / 2)
    assert m.memory_bytes == 8 * 2**20 and m.status == "completed"
    tflops = m.flops_per_s_per_gpu / 1e12

    bench = benchmark.result(folder)
    assert (bench["iterations"], bench["left_out"], bench["global_batch_size"]) == (8, 15, 4)
    assert (bench["sec_per_it"]["median"], bench["flops_per_s_per_gpu"]) == (m.sec_per_it, m.flops_per_s_per_gpu)
    assert (max(bench["memory_bytes"].values()), bench["status"]) == (m.memory_bytes, m.status)

    paths = [str(folder), str(folder / "run.log"), str(folder / "steps.jsonl")]
    for record in [r for one in read_many(paths) for r in one.records]:
        assert (record["iterations_counted"], record["global_batch_size"]) == (8, 4)
        assert record["left_out"] == m.to_json()["left_out"] and record["left_out"][-1]["iterations"] == "6-15"
        assert (record["sec_per_it"], record["tflops"]["narayanan"]) == (m.sec_per_it, tflops)
        assert (record["max_memory_gib"] * 2**30, record["status"]) == (m.memory_bytes, m.status)

    ((row,), _) = read_folder(folder.parent)
    assert [row[name] for name in ("gbs", "sec_per_it", "tflops", "memory_bytes", "status")] == [
        4, m.sec_per_it, tflops, m.memory_bytes, "completed",
    ]  # fmt: skip

    shown = measure_runs(Study.open("s"))
    assert shown.runs[0].to_json() == m.to_json()
    assert sweep.table(folder.parents[1]).equals(shown.to_frame())
    cells = shown.to_frame().iloc[0]
    assert (cells["GBS"], cells["Sec/it"], cells["Notes"]) == (4, m.sec_per_it, "completed")

    assert compare([m], trilane.measure_path(folder)).change == 0
    assert case_of(m).topology.gbs == 4


def test_a_ramp_that_did_not_end_is_a_case_of_the_batch_it_reached(folder):
    lines = (folder / "run.log").read_text().splitlines(keepends=True)
    (folder / "run.log").write_text("".join(lines[:12]))
    m = measure(folder)
    assert (m.iterations, m.config.gbs, case_of(m).topology.gbs) == (7, 2, 2)
    assert m.window.note == "global_batch_size=4 was not reached: 2, the largest, counts"
    assert m.note == "" and "was not reached" in m.to_json()["notes"][0]
