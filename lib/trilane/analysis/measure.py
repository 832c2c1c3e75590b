"""From a run's log to the few numbers that are compared: seconds per iteration, tokens, TFLOPs, memory, loss."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from trilane.analysis import flops
from trilane.analysis.numerics import Health, health
from trilane.analysis.phase_times import ideal_bubble, measured_bubble
from trilane.analysis.run_config import RunConfig, setup_of
from trilane.analysis.steady_state import WARM_UP, SteadyState, stable_window
from trilane.config.cluster import Gpu
from trilane.config.plan import Plan, read_plan
from trilane.logs.run import RunLog, read_run_folder
from trilane.utils.validation import require


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A run in one line; NaN where neither log nor plan tells.

    sec_per_it      median of the stable window; `spread` its quartiles' half distance over it
    tokens_per_s    of the whole job
    flops_per_s     per GPU by definition (tflops.DEFINITIONS, and `printed` and `profiler` where the log has them)
    utilization     mfu and hfu, where the card is known
    lost_share      of the printed time that iterations took beyond the median: stalls, evaluations, checkpoints
    bubble, waited  the ideal pipeline's idle share, and what the timers show (an upper bound)
    memory_bytes    the fullest rank's peak
    """

    name: str
    log: RunLog
    setup: RunConfig
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
    health: Health

    @property
    def label(self) -> str:
        """The run's name in figures: its topology's where there is a plan."""
        return self.plan.topology.label if self.plan else self.name

    @property
    def flops_per_s_per_gpu(self) -> float:
        """By our definition, Narayanan's; NaN where the shape is unknown."""
        return self.flops_per_s.get("narayanan", math.nan)


def measure(folder: Path | str, warm_up: int = WARM_UP) -> Measurement:
    """The measurement of a run folder; ValueError where the run left no iteration."""
    folder = Path(folder)
    plan, log = read_plan(folder / "plan.json"), read_run_folder(folder)
    require(len(log.iterations) > 0, "run", folder.name, f"left no iteration: {log.status}: {log.evidence}")
    return measure_log(log, plan, warm_up, name=folder.name)


def measure_log(
    log: RunLog, plan: Plan | None = None, warm_up: int = WARM_UP, name: str = "", gpu: Gpu | None = None
) -> Measurement:
    """The measurement of one run's log, with its plan where there is one; a log without iterations has NaN.

    `gpu` is the card where neither plan nor log tells it.
    """
    window, setup = stable_window(log, warm_up), setup_of(log, plan, gpu)
    all_seconds = log.iterations.reindex(columns=["sec_per_it"])["sec_per_it"].to_numpy(float)  # NaN where it has none
    counted = all_seconds[window.counts]
    seconds = float(np.median(counted)) if len(counted) else summed_up(log)
    low, high = np.quantile(counted, [0.25, 0.75]) if len(counted) else (math.nan, math.nan)
    batch = _batch(log, window, setup)
    tokens = batch * (setup.seq_length or math.nan)
    loss = log.iterations["lm_loss"] if "lm_loss" in log.iterations else pd.Series(dtype=float)
    first, last = loss.first_valid_index(), loss.last_valid_index()
    return Measurement(
        name=name or log.source.name,
        log=log,
        setup=setup,
        window=window,
        plan=plan,
        iterations=len(counted),
        sec_per_it=seconds,
        spread=float(high - low) / 2 / seconds if seconds > 0 else math.nan,
        tokens_per_s=tokens / seconds if tokens > 0 else math.nan,
        flops_per_s={**printed(log), **flops.rates(setup, seconds, batch)},
        utilization=flops.utilization(setup, seconds, batch),
        lost_share=_lost_share(all_seconds[WARM_UP:], seconds),
        bubble=ideal_bubble(setup),
        waited=measured_bubble(log, seconds, window),
        memory_bytes=peak_memory(log),
        first_loss=float(loss[first]) if first is not None else math.nan,
        last_loss=float(loss[last]) if last is not None else math.nan,
        health=health(log),
    )


def summed_up(log: RunLog) -> float:
    """Seconds per iteration of a log that prints none: the Trainer's runtime over its steps, or DeepSpeed's batch over
    its rate; NaN where there is neither.
    """
    steps = log.arguments.get("total_optimization_steps")
    if "train_runtime" in log.summary:
        if isinstance(steps, int) and steps > 0:
            return log.summary["train_runtime"] / steps
        return 1 / (log.summary.get("train_steps_per_second") or math.nan)
    batch = log.arguments.get("deepspeed.train_batch_size")
    if "samples_per_second" in log.iterations and isinstance(batch, int):
        return batch / float(log.iterations["samples_per_second"].median())
    return math.nan


def printed(log: RunLog) -> dict[str, float]:
    """FLOP/s per GPU as the log itself says: `printed`, the median of its lines by its dialect's own definition, and
    `profiler`, DeepSpeed's count of one iteration.
    """
    rates = {}
    if "flops_per_s_per_gpu" in log.iterations and len(log.iterations):
        column = log.iterations["flops_per_s_per_gpu"]
        later = float(column.iloc[1:].median())
        rates["printed"] = float(column.median()) if math.isnan(later) else later
    for name, value in log.summary.items():
        if name.startswith("profiler: fwd+bwd+step") and value > 1e6:
            rates["profiler"] = value
    return rates


def peak_memory(log: RunLog) -> float:
    """Bytes of the fullest rank: the most it allocated, else reserved; NaN where no rank says."""
    memory = log.memory
    most = next((c for c in ("max_allocated", "max_reserved") if c in memory and memory[c].notna().any()), None)
    return float(memory[most].max()) if most else math.nan


def _batch(log: RunLog, window: SteadyState, setup: RunConfig) -> float:
    """Sequences an iteration in the window; a ramp may have gone on after it."""
    if "global_batch_size" in log.iterations and window.counts.any():
        median = float(np.median(log.iterations["global_batch_size"].to_numpy(float)[window.counts]))
        return median if median == median else setup.gbs
    return setup.gbs


def _lost_share(seconds: np.ndarray, median: float) -> float:
    seconds = seconds[np.isfinite(seconds)] if not np.isfinite(seconds).all() else seconds
    slow = seconds[seconds > median]  # half of a long log, so that it is not copied whole
    whole = float(seconds.sum())
    return float((slow.sum() - median * len(slow)) / whole) if whole > 0 else math.nan


def table(measurements: Iterable[Measurement]) -> pd.DataFrame:
    """The measurements as the BigScience tables print them, one row a run; GFLOPs where none reaches a TFLOP/s."""
    rows, measurements = [], list(measurements)
    large = any(m.flops_per_s_per_gpu > 1e12 for m in measurements)
    rate, scale = ("TFLOPs", 1e12) if large else ("GFLOPs", 1e9)
    for m in measurements:
        s = m.setup
        rows.append(
            {
                "Run": m.name,
                "GPUs": s.gpus or "",
                "Size": _size(s.shape.parameters) if s.shape else "",
                **{name.upper(): getattr(s, name) if s.gpus else "" for name in ("dp", "tp", "pp")},
                "MBS": s.mbs or "",
                "GBS": int(s.gbs) or "",
                "Mem (GiB)": round(m.memory_bytes / 2**30, 2),
                "Sec/it": float(f"{m.sec_per_it:.4g}"),
                "±": f"{m.spread:.0%}" if m.spread == m.spread else "",
                rate: round(m.flops_per_s_per_gpu / scale, 1),
                "Loss": f"{m.first_loss:.2f} → {m.last_loss:.2f}" if m.last_loss == m.last_loss else "",
                "Notes": m.log.status,
            }
        )
    return pd.DataFrame(rows)


def _size(parameters: float) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"
