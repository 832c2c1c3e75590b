"""The runs of a study before they are launched, as 03_launch shows them."""

import math
from dataclasses import replace
from pathlib import Path

from test_preflight import plan

from trilane.costmodel.predict import predict
from trilane.slurm import chain
from trilane.slurm.sites import JobRequest
from trilane.slurm.study_runs import prepare_runs
from trilane.workspace.study import Study


def test_the_runs_of_a_study_are_its_best_plans_and_one_with_tp_and_pp(outputs: Path) -> None:
    """10 iterations of warm-up, a cosine to a tenth of the rate; 100 iterations in jobs of six
    minutes.
    """
    study, sizes = Study.create("s"), ((1, 1), (2, 1), (1, 2), (2, 2), (4, 2))
    plans = [plan(topology={"tp": tp, "pp": pp, "dp": 2}) for tp, pp in sizes]
    plans = [replace(p, label=f"p{number}") for number, p in enumerate(plans)]
    listed = [
        p.to_json() | {"prediction": predict(p).to_json() | {"sec_per_it": 36.0}} for p in plans
    ]
    study.save("plans.json", {"plans": listed}, "02_topology")
    request = JobRequest(account="x@a100", time_limit="00:06:00")
    found = prepare_runs(study, "jean-zay-a100", request, count=2, train_iters=100)
    reasons = dict.fromkeys(("p0", "p1"), "fastest predicted") | {
        "p3": "control: TP and PP at work"
    }
    assert {r.plan.label: r.reason for r in found.rows} == reasons
    o = found.rows[0].plan.optimizer
    assert (o.lr, o.min_lr, o.warmup_samples, o.decay_samples) == (6e-4, 6e-4 / 10, 5120, 51200)
    row = ["p3", plans[3].id, 8, 36.0, 1.0, 8.0, 10, "control: TP and PP at work"]
    assert list(found.to_frame().iloc[2]) == row, "by the prediction in plans.json"
    assert list(found.start(False).to_frame()["run"]) == [r.folder.name for r in found.rows]
    hours = 100 * predict(plans[3]).sec_per_it / 3600
    folder = found.rows[2].folder
    (link,) = chain.costs({folder: found.rows[2].plan}, request)
    sizes = {
        "gpus": 8,
        "nodes": 1,
        "mbs": 4,
        "batches": [512],
        "first": 1,
        "last": 100,
        "jobs": math.ceil(hours * 10),
    }
    assert link == sizes | {"run": str(folder), "hours": hours, "gpu_hours": hours * 8}
    link |= {"run": "r", "batches": [32, 64, 512], "hours": 1.5, "gpu_hours": 12.0, "jobs": 3}
    line = "r: iterations 1-100, 1 nodes, 8 GPUs, mbs 4, batch 32 to 512, 1.50 h, 12.00 GPU hours, 3 jobs"
    total = "in all: 2 runs, 6 jobs, 3.00 h one after another, 24.00 GPU hours"
    assert chain.costs_text([link] * 2).splitlines() == [line, line, total]
