"""From a run's log to the few numbers that are compared: a stable window, seconds per iteration, TFLOPs, memory."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from trilane.checks import require
from trilane.logs import RunLog, read_run_folder
from trilane.plan import Plan, read_plan

WARM_UP = 5  # iterations left out at the start: allocation, first use of each kernel


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A run in one line. Seconds are the median of the stable window, `spread` its quartiles' half distance over it.

    `flops_per_s_per_gpu` counts the FLOPs of ModelShape.flops_per_iteration. `memory_bytes` is the fullest rank's peak.
    """

    plan: Plan
    log: RunLog
    iterations: int
    sec_per_it: float
    spread: float
    tokens_per_s: float
    flops_per_s_per_gpu: float
    memory_bytes: float
    first_loss: float
    last_loss: float


def stable_window(log: RunLog, warm_up: int = WARM_UP) -> pd.DataFrame:
    """The iterations that count: those of the last batch size, without the first `warm_up` of the run (at most half of
    them) and without skipped ones.
    """
    table = log.iterations
    table = table.iloc[min(warm_up, len(table) // 2) :]
    if "global_batch_size" in table:
        table = table[table["global_batch_size"] == table["global_batch_size"].iloc[-1]]
    return table[table["skipped"] == 0] if "skipped" in table else table


def measure(folder: Path | str, warm_up: int = WARM_UP) -> Measurement:
    """The measurement of a run folder; ValueError where the run left no iteration."""
    folder = Path(folder)
    plan, log = read_plan(folder / "plan.json"), read_run_folder(folder)
    require(len(log.iterations) > 0, "run", folder.name, f"left no iteration: {log.status}: {log.evidence}")
    window = stable_window(log, warm_up)
    seconds = float(window["sec_per_it"].median())
    low, high = window["sec_per_it"].quantile([0.25, 0.75])
    topology, shape = plan.topology, plan.shape
    gbs = float(window["global_batch_size"].iloc[-1]) if "global_batch_size" in window else topology.gbs
    flops = shape.flops_per_iteration(gbs, topology.recompute == "full")
    return Measurement(
        plan=plan,
        log=log,
        iterations=len(window),
        sec_per_it=seconds,
        spread=float(high - low) / 2 / seconds,
        tokens_per_s=gbs * shape.seq_length / seconds,
        flops_per_s_per_gpu=flops / seconds / topology.gpus,
        memory_bytes=float(log.memory["max_allocated"].max()) if len(log.memory) else float("nan"),
        first_loss=float(log.iterations["lm_loss"].iloc[0]),
        last_loss=float(log.iterations["lm_loss"].iloc[-1]),
    )


def table(measurements: Iterable[Measurement]) -> pd.DataFrame:
    """The measurements as the BigScience tables print them, one row a run."""
    return pd.DataFrame(
        [
            {
                "GPUs": m.plan.topology.gpus,
                "Size": f"{m.plan.shape.parameters / 1e6:.1f}M",
                "DP": m.plan.topology.dp,
                "TP": m.plan.topology.tp,
                "PP": m.plan.topology.pp,
                "MBS": m.plan.topology.mbs,
                "GBS": m.plan.topology.gbs,
                "Mem (GiB)": round(m.memory_bytes / 2**30, 2),
                "Sec/it": round(m.sec_per_it, 3),
                "±": f"{m.spread:.0%}",
                "GFLOP/s per process": round(m.flops_per_s_per_gpu / 1e9, 1),
                "Loss": f"{m.first_loss:.2f} → {m.last_loss:.2f}",
                "Notes": m.log.status,
            }
            for m in measurements
        ]
    )
