"""A short run of a plan, and what was measured in it."""

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path

from trilane.analysis.measure import Measurement, measure
from trilane.analysis.steady_state import WARM_UP
from trilane.config.batch_rampup import Ramp
from trilane.config.plan import read_plan
from trilane.launch.local import run_folder, train_local
from trilane.utils.validation import require


def benchmark(plan: Path, iterations: int = 0) -> Measurement:
    """Train the plan of that file, `iterations` long at its full batch (0: as planned), and measure
    the run.

    For a run folder, also of another machine, nothing is trained. The log goes to stderr.
    """
    if plan.is_dir():
        require(iterations == 0, "iterations", iterations, "a finished run is measured as it is")
        return measure(plan)
    read = read_plan(plan)
    count = iterations or read.run.train_iters
    rule = f"must be above {WARM_UP}, of the warm-up"
    require(count > WARM_UP, "iterations", count, rule)
    if iterations:
        folder = plan.with_name(f"{plan.stem}-benchmark-{iterations}")
        require(not folder.exists(), "plan", plan, f"would run in {folder}, which exists")
        folder.mkdir()
        run = replace(read.run, train_iters=iterations, ramp=Ramp())
        text = json.dumps(replace(read, run=run).to_json(), indent=1)
        (folder / "plan.json").write_text(text, encoding="utf-8")
    else:
        folder = run_folder(plan)
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result alone
        train_local(folder)
    return measure(folder)
