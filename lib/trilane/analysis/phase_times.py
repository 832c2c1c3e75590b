"""Phases: where the time of an iteration goes by a log's timers, and how much of it the pipeline is idle."""

import re
from collections.abc import Mapping

from trilane.analysis.run_config import RunConfig
from trilane.analysis.steady_state import SteadyState
from trilane.logs.run import RunLog

# Timers of Megatron and DeepSpeed by phase; the first pattern that matches takes a timer.
PHASES = {
    "optimizer": r"optimizer|^(?:step|_step)(?:_microstep)?$",
    "data_parallel": r"params-all-reduce|all-grads-sync|grads?-reduce|allreduce|reduce-scatter|params-all-gather",
    "pipeline_wait": r"send|recv|embedding-all-reduce|embedding-grads",
    "data": r"batch-generator|batch_input",
    "forward": r"^forward-compute$|^fwd(?:_microstep)?$|^forward(?:_microstep)?$",
    "backward": r"^backward-compute$|^bwd(?:_inner)?_microstep$|^bwd$|^backward(?:_microstep)?$",
}
ORDER = ("forward", "backward", "pipeline_wait", "data_parallel", "optimizer", "data")

# Timers that include others: counting both would count twice.
OUTER = re.compile(r"^forward-backward$|^optimizer$|^bwd_microstep$|^interval-time$|^train_batch$| min$")
INNER = {"optimizer": r"^optimizer-", "bwd_microstep": r"^bwd_(?:inner|allreduce)_microstep$"}


def phases(log: RunLog, window: SteadyState | None = None) -> dict[str, float]:
    """Median seconds per iteration of each phase by the timers of the printing rank; {} without timers.

    With a window, over the iterations that count, where timers were printed for any of them.

    Megatron prints the mean over its log interval. `pipeline_wait` is what that rank spends in sends, receives and the
    all-reduce of the shared embedding: on the last stage these include the pipeline's fill and drain, so it is an upper
    bound of the bubble. `batch-generator` runs inside forward-compute and is left out where the log has that.
    """
    timers = log.timers
    if window is not None and "iteration" in timers and "iteration" in log.iterations:
        counted = timers[timers["iteration"].isin(log.iterations["iteration"][window.counts])]
        timers = counted if len(counted) else timers
    medians = {n: float(timers[n].median()) for n in timers if n != "iteration" and timers[n].notna().any()}
    medians = {name: value for name, value in medians.items() if not _is_outer(name, medians)}
    found: dict[str, float] = {}
    for name, seconds in medians.items():
        phase = next((p for p, pattern in PHASES.items() if re.search(pattern, name)), None)
        if phase and not (phase == "data" and "forward-compute" in medians):
            found[phase] = found.get(phase, 0.0) + seconds
    return {name: found[name] for name in ORDER if name in found}


def _is_outer(name: str, medians: Mapping[str, float]) -> bool:
    """Whether the timer includes others that were printed too."""
    if name in INNER:
        return any(re.search(INNER[name], other) for other in medians)
    return OUTER.search(name) is not None


def ideal_bubble(config: RunConfig) -> float:
    """Share of an iteration that an ideal 1F1B pipeline is idle: (p - 1) / (m v + p - 1); NaN where m is unknown.

    p stages, m microbatches, v chunks a stage (interleaving). Narayanan et al. 2021, arXiv:2104.04473, section 2.2,
    who state it relative to the ideal time: (p - 1) / (m v). Left out: unequal stages, transfers.
    """
    p, m = config.pp, config.microbatches
    if p == 1:
        return 0.0
    return (p - 1) / (m * config.interleaving + p - 1) if m else float("nan")


def measured_bubble(log: RunLog, seconds: float, window: SteadyState | None = None) -> float:
    """Share of an iteration that the printing rank waits in the pipeline (see `pipeline_wait`); NaN without timers."""
    wait = phases(log, window).get("pipeline_wait", float("nan"))
    return wait / seconds if seconds > 0 else float("nan")
