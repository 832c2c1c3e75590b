"""Pre-flight checks of time: the limit, the warning before it, and the interval between checkpoints."""

import math
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from trilane.forecasting.failures import FailureModel, evaluation_s
from trilane.slurm.preflight.finding import JobCheck, JobFinding, Rule, refuse, warn
from trilane.slurm.sites import seconds_of
from trilane.utils.files import json_lines, read_text
from trilane.workspace.checkpoints import checkpoint_bytes
from trilane.workspace.run_folder import STEPS

SIGNAL = re.compile(r"(?:R?B?:)?\w+(?:@(\d+))?")
SIGNAL_S = 60  # man sbatch, --signal: where no time is given
# man sbatch, --signal: sent up to 60 seconds earlier than asked for; a margin on what saving is predicted to take
MARGIN = 1.5
# engine/checkpoint/save.py: "saved checkpoints/iter_0000010 (12.3 MB in 0.42 s, ..."
SAVED = re.compile(r"saved checkpoints/iter_\d+ \([\d.]+ MB in ([\d.]+) s")
LAST_BYTES = 1 << 24  # of the run's files, which may have gigabytes
ACCEPTED = 0.01  # share of a run's time that an interval may lose relative to the best one
SHORT_S = 3600.0  # a run of an hour loses an hour at most


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds of a run's iteration, save and evaluation, measured in its folder before or predicted."""

    iteration_s: float
    save_s: float
    evaluation_s: float
    is_measured: bool

    @property
    def word(self) -> str:
        """Where the seconds come from."""
        return "measured" if self.is_measured else "predicted"


def pace(case: JobCheck) -> Pace:
    """The pace of the run: the median of its last iterations and the slowest of its last saves, else as predicted.

    A save is predicted by the forecast's bandwidth (data/risks.json: 1 GB/s a node, assumed), an evaluation as
    forward passes. "Measured" is what has both. Left out: that a later part of a batch ramp-up is slower.
    """
    plan, model = case.plan, FailureModel()
    steps = [step.get("sec_per_it") for step in json_lines(read_text(case.folder / STEPS, LAST_BYTES))]
    seconds = statistics.median([s for s in steps if isinstance(s, float) and 0 < s < math.inf] or [0.0])
    saves = [float(s) for s in SAVED.findall(read_text(case.folder / "run.log", LAST_BYTES))]
    iteration_s = seconds if seconds > 0 else case.prediction.sec_per_it
    return Pace(
        iteration_s=iteration_s,
        save_s=max(saves, default=model.save_s(checkpoint_bytes(plan.shape), case.nodes)),
        evaluation_s=evaluation_s(plan.topology, plan.run.eval_iters, iteration_s),
        is_measured=seconds > 0 and bool(saves),
    )


def needed_s(case: JobCheck, at: Pace) -> float:
    """Seconds of all iterations of the run, with its evaluations."""
    run = case.plan.run
    count = run.goal - run.start_iteration
    evaluations = count // run.eval_interval if run.eval_interval else 0
    return count * at.iteration_s + evaluations * at.evaluation_s


def time(case: JobCheck) -> Iterator[JobFinding]:
    """The training ends, or saves a checkpoint, before the job's time limit."""
    run, at = case.plan.run, pace(case)
    limit = seconds_of(case.directives.get("time", "00:10:00"))
    asked = "signal" in case.directives or run.exit_duration_minutes > 0
    if 0 < limit < run.exit_duration_minutes * 60:
        message = f"exit_duration_minutes={run.exit_duration_minutes:g} is beyond the limit of {limit / 60:.0f} minutes"
        yield refuse("time", message, "end the run some minutes before the limit")
    if limit == math.inf and not run.save_interval:
        message = "without a time limit SLURM sends no signal before it, and no checkpoint is saved before the end"
        yield warn("checkpoints", message, "save_interval, or a time limit")
        return
    needs = needed_s(case, at)
    if needs <= limit:
        yield from _against_failures(case, at, needs)
        return
    evaluations = " with their evaluations" if run.eval_interval else ""
    iterations = f"{run.goal - run.start_iteration} iterations{evaluations} take {needs / 3600:.1f} h"
    duration, interval = f"{iterations}, the limit is {limit / 3600:.1f} h", run.save_interval * at.iteration_s
    if not asked and not 0 < interval < limit:
        remedy = "save_interval, exit_duration_minutes or --signal-s"
        yield refuse("checkpoints", f"{duration}, and no checkpoint is saved before", remedy)
    else:
        yield warn("time", f"{duration}: {-(-needs // limit):.0f} jobs one after another", "submit them as a chain")
    if limit / 10 < interval:
        message = f"a checkpoint every {interval / 3600:.1f} h: a failure loses as much"
        yield warn("checkpoints", message, f"save_interval={max(1, int(limit / 10 / at.iteration_s))}")
    else:
        yield from _against_failures(case, at, needs)


def _against_failures(case: JobCheck, at: Pace, needs: float) -> Iterator[JobFinding]:
    """The interval between checkpoints against Daly's optimum for the failures of so many nodes.

    An interval T of saves of d seconds costs the share d / T + T r / 2 at r failures a second.
    """
    model = FailureModel()
    rate, best = model.stops_per_s(case.nodes), model.checkpoint_interval_s(at.save_s, case.nodes)
    interval = min(case.plan.run.save_interval * at.iteration_s or needs, needs)

    def cost(every_s: float) -> float:
        return at.save_s / every_s * (every_s < needs) + every_s * rate / 2

    lost = cost(interval) - cost(min(best, needs))
    if needs > SHORT_S and lost > ACCEPTED:
        often = "no checkpoint before the end" if interval == needs else f"a checkpoint every {interval / 60:.0f} min"
        model_of = (
            f"{case.nodes} nodes fail every {1 / rate / 3600:.0f} h (forecast's rates), a save takes {at.save_s:.0f} s"
        )
        message = f"{often}: {lost:.0%} of the time more than with Daly's {best / 60:.0f} min; {model_of}"
        yield warn("checkpoints", message, f"save_interval={max(1, round(best / at.iteration_s))}")


def warning(case: JobCheck) -> Iterator[JobFinding]:
    """The warning before the limit leaves time for the iteration, or evaluation, that goes on, and for a save.

    A job that begins later than its warning comes, or so shortly before that no iteration fits, only saves.
    """
    limit, found = seconds_of(case.directives.get("time", "00:10:00")), case.directives.get("signal")
    at, run = pace(case), case.plan.run
    if limit == math.inf or needed_s(case, at) * MARGIN <= limit:  # it ends before, even if predicted too short
        return
    signal = SIGNAL.fullmatch(found) if found else None
    signal_s = float(signal[1] or SIGNAL_S) if signal else 0.0
    left = max(signal_s, limit - run.exit_duration_minutes * 60 if run.exit_duration_minutes else 0.0)
    step = at.iteration_s + at.evaluation_s
    need, option = step + at.save_s, "--signal-s" if left == signal_s else "exit_duration_minutes"
    parts = f"{step:.0f} s of an iteration{' and an evaluation' * (at.evaluation_s > 0)}, {at.save_s:.0f} s of a save"
    enough = math.ceil(max(MARGIN * need, SIGNAL_S) / 30) * 30
    if 0 < left < need:
        certain = at.is_measured or left < at.iteration_s
        remedy = f"--signal-s {enough}" if option == "--signal-s" else f"at most {(limit - enough) / 60:.0f} minutes"
        message = f"{left:.0f} s before the limit are less than {need:.0f} s ({parts}, {at.word}): nothing is saved"
        yield (refuse if certain else warn)("signal", message, remedy)
    start = FailureModel().startup_s
    if limit < start + need + max(left, 0.0):
        message = f"{limit / 60:.0f} min hold no start ({start / 60:.0f} min, assumed), iteration and save ({parts})"
        yield warn("time", message, f"a limit of {math.ceil((start + 2 * max(left, need)) / 600) * 10} minutes or more")


RULES: tuple[Rule, ...] = (time, warning)
