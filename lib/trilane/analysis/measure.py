"""Measurement: what one run's log amounts to: seconds per iteration, tokens, TFLOPs, memory, loss, numerics, status."""

import math
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from trilane.analysis import flops
from trilane.analysis.numerics import Numerics, numerics
from trilane.analysis.phase_times import ideal_bubble, measured_bubble
from trilane.analysis.plausibility import HARMLESS, shape_problems
from trilane.analysis.run_config import RunConfig, of_window, run_config
from trilane.analysis.steady_state import (
    WARM_UP,
    SteadyState,
    exact_seconds,
    mean_seconds,
    ranges,
    share_beyond,
    steady_state,
)
from trilane.config.cluster import Gpu
from trilane.config.plan import Plan, read_plan
from trilane.logs.endings import caveat
from trilane.logs.problems import Problem
from trilane.logs.run import RunLog
from trilane.logs.run_folder import read_run_folder
from trilane.workspace.status import Status


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The summary of one run that every command, table and notebook shows; NaN where neither log nor plan has a value.

    config          what ran; its `gbs` is that of the window
    window          which iterations count (see steady_state), `iterations` how many
    sec_per_it      their median; `spread` half the distance of their quartiles relative to it
    tokens_per_s    of the whole job
    flops_per_s     per GPU by definition (flops.DEFINITIONS, and `printed` and `profiler` where the log has them)
    utilization     mfu and hfu, where the card is known
    lost_share      of the printed time that iterations took beyond the median: stalls, evaluations, checkpoints
    bubble, waited  the ideal pipeline's idle share, and what the timers show (an upper bound)
    memory_bytes    the fullest rank's peak
    """

    name: str
    log: RunLog
    config: RunConfig
    window: SteadyState
    plan: Plan | None = None
    iterations: int
    sec_per_it: float
    spread: float
    tokens_per_s: float
    flops_per_s: dict[str, float] = field(default_factory=dict)
    utilization: dict[str, float] = field(default_factory=dict)
    lost_share: float
    bubble: float
    waited: float
    memory_bytes: float
    first_loss: float
    last_loss: float
    numerics: Numerics

    @property
    def status(self) -> Status:
        """How the run ended, or that it runs."""
        return self.log.status

    @property
    def seconds(self) -> np.ndarray:
        """Seconds of the iterations that count, (iterations,)."""
        return self.log.column("sec_per_it")[self.window.counts] if self.iterations else np.empty(0)

    @property
    def flops_per_s_per_gpu(self) -> float:
        """By Narayanan's definition; the printed rate where the shape is unknown, NaN where there is neither."""
        return self.flops_per_s.get("narayanan", self.flops_per_s.get("printed", math.nan))

    @property
    def note(self) -> str:
        """What a table's notes add to the status: an engine not megatron, a rate that is the log's, contradictions."""
        printed = "narayanan" not in self.flops_per_s and "printed" in self.flops_per_s
        engine = self.plan.engine if self.plan and self.plan.engine != "megatron" else ""
        wrong = dict.fromkeys(problem.column for problem in self.log.problems)
        contradicted = f"contradicted: {', '.join(wrong)}" if wrong else ""
        return ", ".join(filter(None, (engine, "TFLOPs as printed" if printed else "", contradicted)))

    @property
    def time_problems(self) -> tuple[Problem, ...]:
        """The log's problems that leave open how long an iteration takes, or what it computes."""
        return tuple(problem for problem in self.log.problems if problem.column not in HARMLESS)

    def row(self) -> dict[str, Any]:
        """The run as a table's row of numbers in base units (`tflops` excepted); NaN where unknown."""
        c = self.config
        degrees = {name: getattr(c, name) for name in ("dp", "tp", "pp")}
        return {
            "gpus": c.gpus or math.nan,
            "parameters": c.parameters or math.nan,
            **{name: n if c.gpus or n > 1 else math.nan for name, n in degrees.items()},
            "mbs": c.mbs or math.nan,
            "gbs": c.gbs or math.nan,
            "memory_bytes": self.memory_bytes,
            "sec_per_it": self.sec_per_it,
            "tflops": self.flops_per_s_per_gpu / 1e12,
            "status": self.status,
        }

    def to_json(self) -> dict[str, Any]:
        """The run as one JSON object; null where a value is unknown."""
        log, left_out = self.log, self.window.left_out
        values = {
            "file": str(log.source),
            "dialect": log.dialect,
            "status": log.status,
            "status_basis": log.status_basis,
            "evidence": log.evidence,
            "rank": log.rank,
            "asked_gib": log.asked_bytes / 2**30,
            **{name: list(getattr(log, name)) for name in ("hosts", "gpus", "collectives")},
            "exclude": log.exclude,
            "caveat": caveat(log.status, log.evidence),
            "arguments": dict(log.arguments),
            "iterations": len(log.iterations),
            "first_iteration": log.first_iteration,
            "last_iteration": log.last_iteration,
            "iterations_counted": self.iterations,
            "global_batch_size": self.config.gbs or None,
            "sec_per_it": self.sec_per_it,
            "sec_per_it_spread": self.spread,
            "left_out": [{"reason": part.reason, "iterations": ranges(part.iterations)} for part in left_out],
            "tokens_per_s": self.tokens_per_s,
            "tflops": {name: _finite(rate / 1e12) for name, rate in self.flops_per_s.items()},
            "mfu": self.utilization.get("mfu"),
            "hfu": self.utilization.get("hfu"),
            "max_memory_gib": self.memory_bytes / 2**30,
            "last_loss": self.last_loss,
            "validation": [{n: _finite(v) for n, v in row.items()} for row in log.validation.to_dict("records")],
            "skipped_iterations": self.numerics.skipped,
            "nan_iterations": self.numerics.nan_iterations,
            "notes": [*log.notes, *filter(None, [self.window.note, self.config.note])],
            "problems": [asdict(problem) for problem in log.problems],
        }
        return {name: _finite(value) for name, value in values.items()}


def measure(folder: Path | str, warm_up: int = WARM_UP, status: Status | None = None) -> Measurement:
    """The measurement of a run folder, also of one without an iteration; `status` in place of the folder's own.

    Seconds come from steps.jsonl, since run.log rounds them to 0.1 ms; all else from run.log and status.json.
    Raises ValueError where the folder holds no plan.
    """
    folder = Path(folder)
    plan, log = read_plan(folder / "plan.json"), exact_seconds(read_run_folder(folder))
    return measure_log(replace(log, status=status or log.status), plan, warm_up, name=folder.name)


def measure_log(
    log: RunLog, plan: Plan | None = None, warm_up: int = WARM_UP, name: str = "", gpu: Gpu | None = None
) -> Measurement:
    """The measurement of one run's log, with its plan where there is one; a log without iterations has NaN.

    `gpu` is the card where neither plan nor log names it.
    """
    config = run_config(log, plan, gpu)
    window = steady_state(log, warm_up, config.gbs, config.seq_length)
    config = of_window(config, log, window.counts)
    every = log.column("sec_per_it") if "sec_per_it" in log.iterations else np.full(len(log.iterations), math.nan)
    counted = every[window.counts]
    seconds = float(np.median(counted)) if len(counted) else mean_seconds(log)
    low, high = np.quantile(counted, [0.25, 0.75]) if len(counted) else (math.nan, math.nan)
    tokens = config.gbs * config.seq_length
    loss = log.column("lm_loss")
    loss = loss[np.isfinite(loss)]
    rates = flops.rates(config, seconds)
    wrong = shape_problems(log, config, window.counts, rates)
    return Measurement(
        name=name or log.source.name,
        log=replace(log, problems=(*log.problems, *wrong)) if wrong else log,
        config=config,
        window=window,
        plan=plan,
        iterations=len(counted),
        sec_per_it=seconds,
        spread=float(high - low) / 2 / seconds if seconds > 0 else math.nan,
        tokens_per_s=tokens / seconds if tokens and seconds > 0 else math.nan,
        flops_per_s={**flops.printed_rates(log), **rates},
        utilization=flops.utilization(config, seconds),
        lost_share=share_beyond(every[WARM_UP:], seconds),
        bubble=ideal_bubble(config),
        waited=measured_bubble(log, seconds, window),
        memory_bytes=float(max(memory_by_rank(log).values(), default=math.nan)),
        first_loss=float(loss[0]) if len(loss) else math.nan,
        last_loss=float(loss[-1]) if len(loss) else math.nan,
        numerics=numerics(log),
    )


def memory_by_rank(log: RunLog) -> dict[int, float]:
    """Peak bytes of each rank: the most it allocated, else reserved; {} where the log has neither."""
    memory = log.memory
    most = next((c for c in ("max_allocated", "max_reserved") if c in memory and memory[c].notna().any()), None)
    return dict(memory.set_index("rank")[most].dropna()) if most else {}


def _finite(value: Any) -> Any:
    """A float without a value is null in JSON."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
