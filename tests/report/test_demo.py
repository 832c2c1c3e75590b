"""The demo study, as `make run` runs it: plan, train, read the own log, report; and Ctrl-C in its
middle.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from markup import Page
from support import SMALL, heed_ctrl_c, uncounted, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("demo")]


def command(*more: str) -> list[str]:
    return [sys.executable, "-m", "trilane", "run", "all", *SMALL, *more]


def losses(run: Path) -> list[float]:
    return [json.loads(line)["lm_loss"] for line in (run / "steps.jsonl").read_text().splitlines()]


def test_the_best_and_a_control_really_train_for_50_iterations(demo):
    runs = sorted((demo / "runs").iterdir())
    assert len(runs) == 2
    for run in runs:
        assert json.loads((run / "status.json").read_text())["status"] == "completed"
        assert len(losses(run)) == 50
        assert {"plan.json", "job.sbatch", "run.log", "env.json"} <= {p.name for p in run.iterdir()}
    topologies = [json.loads((run / "plan.json").read_text())["topology"] for run in runs]
    assert any(t["tp"] > 1 and t["pp"] > 1 for t in topologies)


def test_the_loss_falls_by_one_and_a_half_nats_and_is_the_same_on_every_topology(demo):
    curves = [losses(run) for run in sorted((demo / "runs").iterdir())]
    assert all(curve[0] - curve[-1] >= 1.5 for curve in curves)
    assert max(max(step) - min(step) for step in zip(*curves, strict=True)) < 1e-3


def test_the_index_has_each_notebooks_answer_and_figure(demo):
    page = Page((demo / "index.html").read_text())
    for answer in ("topologies", "2 of 2 plans have trained", "Predicted seconds were wrong by"):
        assert answer in page.text
    assert page.tags.count("img") == 4 and "<details>" not in page.text


def test_a_second_run_of_the_study_is_refused(demo):
    env = {**uncounted(), "TRILANE_OUTPUTS": str(demo.parent)}
    refused = subprocess.run(command(), env=env, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr.strip().endswith("exists; resume it, or name another")


def test_ctrl_c_ends_every_process_and_leaves_the_run_folder_readable(demo, tmp_path):
    """In the first training of a study whose plans are made."""
    outputs = tmp_path / "outputs"
    shutil.copytree(
        demo, outputs / "demo", ignore=shutil.ignore_patterns("runs", "03_*", "04_*", "earlier")
    )
    (outputs / "local.json").write_text((demo.parent / "local.json").read_text())
    env = {**uncounted(), "TRILANE_OUTPUTS": str(outputs)}
    pipes = {"stderr": subprocess.PIPE, "text": True, "preexec_fn": heed_ctrl_c}
    with subprocess.Popen(command("--resume"), env=env, **pipes) as child:
        steps = outputs / "demo/runs"
        wait_until(
            lambda: any(p.stat().st_size for p in steps.glob("*/steps.jsonl")),
            120,
            "no step was taken",
        )
        family = psutil.Process(child.pid).children(recursive=True)
        child.send_signal(signal.SIGINT)
        errors = child.communicate(timeout=60)[1]
    assert child.returncode == 130
    assert errors.count("completed before, kept") == 2
    # a kernel that is ended in the middle of a reply may complain of its socket; no code of ours
    # does
    assert "trilane: interrupted" in errors and "/trilane/" not in errors.partition("Traceback")[2]
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive, alive
    run = next(steps.glob("*/steps.jsonl")).parent
    from trilane.logs.run import read_run_folder

    an_hour_ago = (
        time.time() - 3600
    )  # a log without an end that grew a moment ago counts as running
    os.utime(run / "run.log", (an_hour_ago, an_hour_ago))
    log = read_run_folder(run)
    assert len(log.iterations) >= 1 and log.status in ("cancelled", "unfinished")
