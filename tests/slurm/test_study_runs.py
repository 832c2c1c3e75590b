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


def test_the_runs_of_a_study_are_its_best_plans_and_one_with_tp_and_pp(outputs: Path):
    """10 iterations of warm-up, WSD to a tenth of the rate; 100 iterations in jobs of six
    minutes.
    """
    study, sizes = Study.create("s"), ((1, 1), (2, 1), (1, 2), (2, 2), (4, 2))
    plans = [plan(topology={"tp": tp, "pp": pp, "dp": 2}) for tp, pp in sizes]
    plans = [replace(p, label=f"p{number}") for number, p in enumerate(plans)]
    listed = [p.to_json() for p in plans]
    study.save("plans.json", {"plans": listed}, "02_topology")
    request = JobRequest(account="x@a100", time_limit="00:06:00")
    changes = {"count": 2, "train_iters": 100, "decay_style": "WSD"}
    found = prepare_runs(study, "jean-zay-a100", request, **changes)
    reasons = dict.fromkeys(("p0", "p1"), "fastest predicted") | {
        "p3": "control: TP and PP at work"
    }
    assert {
        run.plan.label: why for run, why in zip(found.runs, found.reasons, strict=True)
    } == reasons
    o = found.runs[0].plan.optimizer
    samples = (o.warmup_samples, o.decay_samples, o.wsd_decay_samples)
    assert (o.lr, o.min_lr, *samples) == (6e-4, 6e-4 / 10, 5120, 51200, 10240)
    seconds = predict(plans[3]).sec_per_it
    hours = 100 * seconds / 3600
    row = ["p3", plans[3].id, 8, seconds, hours, 8 * hours, math.ceil(10 * hours)]
    assert list(found.view().iloc[2]) == [*row, "control: TP and PP at work"]
    assert list(found.start(False).to_frame()["run"]) == [run.folder.name for run in found.runs]
    (link,) = chain.costs({found.runs[2].folder: found.runs[2].plan}, request)
    assert (link["nodes"], link["batches"], link["first"], link["last"]) == (1, [512], 1, 100)
    assert chain.costs_text([link] * 2).count(f"{8 * hours:.2f} GPU hours") == 2
