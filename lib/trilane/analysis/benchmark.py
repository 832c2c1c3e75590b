"""A short run of a plan, and what was measured in it."""

import contextlib
import sys
from dataclasses import replace
from pathlib import Path

from trilane.analysis.measure import Measurement, measure
from trilane.analysis.steady_state import WARM_UP
from trilane.config.batch_rampup import Ramp
from trilane.launch.local import require_startable, run_folder, train_local
from trilane.utils.validation import require


def benchmark(plan: Path, iterations: int = 0) -> Measurement:
    """Train the plan of that file, `iterations` long at its full batch (0: as planned), and measure
    the run.

    For a run folder, also of another machine, nothing is trained. The log goes to stderr.
    """
    if plan.is_dir():
        return measure(plan)
    read = require_startable(plan)  # before there is a file or a folder
    count = iterations or read.run.train_iters
    require(count > WARM_UP, "iterations", count, f"must be above {WARM_UP}, of the warm-up")
    if iterations:
        run = replace(read.run, train_iters=iterations, ramp=Ramp())
        path = plan.with_name(f"{plan.stem}-benchmark-{iterations}.json")
        plan = replace(read, run=run).save(path)
    folder = run_folder(plan)
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result alone
        train_local(folder)
    return measure(folder)
