"""A measured run as one JSON object."""

import math
from typing import Any

from trilane.analysis.steady_state import ranges
from trilane.config.plan import Plan, read_plan
from trilane.logs.run import RunLog

KEEP = ("flops_per_s_per_gpu", "skipped", "nan", "seq_length")  # beside what reading needs: all that a record tells


OURS = ("run.log", "steps.jsonl")  # in a run folder, beside plan.json


def record(log: RunLog) -> dict[str, Any]:
    """A run as JSON; what the log does not tell is null."""
    from trilane.analysis.measure import measure_log

    m = measure_log(log, plan_beside(log))
    values = {
        "file": str(log.source),
        "dialect": log.dialect,
        "status": log.status,
        "evidence": log.evidence,
        "rank": log.rank,
        "asked_gib": log.asked_bytes / 2**30,
        "arguments": dict(log.arguments),
        "iterations": len(log.iterations),
        "sec_per_it": m.sec_per_it,
        "sec_per_it_spread": m.spread,
        "left_out": [{"reason": part.reason, "iterations": ranges(part.iterations)} for part in m.window.left_out],
        "tokens_per_s": m.tokens_per_s,
        "tflops": {name: _plain(rate / 1e12) for name, rate in m.flops_per_s.items()},
        "mfu": m.utilization.get("mfu"),
        "hfu": m.utilization.get("hfu"),
        "max_memory_gib": m.memory_bytes / 2**30,
        "last_loss": m.last_loss,
        "skipped_iterations": m.health.skipped,
        "nan_iterations": m.health.nan_iterations,
        "notes": [*log.notes, *filter(None, [m.window.note, m.setup.note])],
    }
    return {name: _plain(value) for name, value in values.items()}


def plan_beside(log: RunLog) -> Plan | None:
    """The plan of the run folder that the log lies in; None where there is none that can be read."""
    file = log.source.parent / "plan.json"
    try:
        return read_plan(file) if log.source.name in OURS and file.is_file() else None
    except ValueError:
        return None  # what the log itself says still stands


def _plain(value: Any) -> Any:
    """A float without a value is null in JSON."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
