"""The door `benchmark`: train a plan for some iterations, leave the first ones out, say how fast the rest were."""

import argparse
import contextlib
import json
import math
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from trilane.analysis.steady_state import WARM_UP
from trilane.config.batch_rampup import Ramp
from trilane.config.plan import Plan, read_plan
from trilane.launch.local import run_folder, run_local
from trilane.logs.run import read_run_folder
from trilane.utils.validation import read_json, require, require_integer
from trilane.workspace.status import read_status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The door's arguments."""
    parser.add_argument("plan", type=Path, help="a plan, or the folder of a run that is over (also of another machine)")
    parser.add_argument("--iterations", type=int, default=0, help="train so many at the full batch (default: the plan)")
    parser.add_argument("--leave-out", type=int, default=WARM_UP, help="first iterations left out (default: 5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Train, unless the run is there already, and print the result; 0 when it completed."""
    require_integer("leave-out", args.leave_out, 0)
    require_integer("iterations", args.iterations, 0)
    if args.plan.is_dir():
        require(args.iterations == 0, "iterations", args.iterations, "a run that is over has had its iterations")
        folder = args.plan
    else:
        plan = read_plan(args.plan)
        iterations = args.iterations or plan.run.train_iters
        require(iterations > args.leave_out, "iterations", iterations, f"must be above leave-out={args.leave_out}")
        folder = _short_run(args.plan, plan, iterations) if args.iterations else run_folder(args.plan)
        with contextlib.redirect_stdout(sys.stderr):  # how far it is: stdout is for the result alone
            run_local(folder)
    found = result(folder, args.leave_out)
    print(json.dumps(found, indent=1) if args.json else text(found))
    return 0 if found["status"] == "completed" else 1


def shortened(plan: Plan, iterations: int) -> Plan:
    """The plan for so many iterations, all of them at its full batch size."""
    return replace(plan, run=replace(plan.run, train_iters=iterations, ramp=Ramp()))


def _short_run(path: Path, plan: Plan, iterations: int) -> Path:
    """A new folder beside the plan, with the shortened plan in it; ValueError where it exists."""
    folder = path.with_name(f"{path.stem}-benchmark-{iterations}")
    require(not folder.exists(), "plan", path, f"would run in {folder}, which exists; move one of them")
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(shortened(plan, iterations).to_json(), indent=1), encoding="utf-8")
    return folder


def result(folder: Path, leave_out: int = WARM_UP) -> dict[str, Any]:
    """The run in `folder` as one JSON object: seconds, rates and bytes; null where the run left nothing to count.

    Counted are the iterations after the first `leave_out` that were not skipped, of the last batch size. FLOPs are
    those of ModelShape.flops_per_iteration; `mfu` is their rate over the card's peak, recomputation not counted, null
    on a CPU: the rate in its plan is one that was measured, and no peak.
    """
    plan, log = read_plan(folder / "plan.json"), read_run_folder(folder)
    status = read_status(folder) if (folder / "status.json").exists() else None
    steps = _steps(folder / "steps.jsonl")
    counted = [s for s in steps[leave_out:] if not s["skipped"]]
    counted = [s for s in counted if s["global_batch_size"] == counted[-1]["global_batch_size"]]
    stamp = read_json(folder / "env.json", "stamp") if (folder / "env.json").exists() else {}
    memory = zip(log.memory["rank"], log.memory["max_allocated"], strict=True) if len(log.memory) else ()
    return {
        "label": plan.label,
        "engine": plan.engine,
        "parameters": plan.shape.parameters,
        "topology": asdict(plan.topology),
        "status": status.status if status else log.status,
        "evidence": status.evidence if status else log.evidence,
        "iterations": len(counted),
        "left_out": len(steps) - len(counted),
        **(_rates(plan, counted) if counted else {"sec_per_it": None}),
        "memory_bytes": {str(rank): int(value) for rank, value in memory},
        "last_loss": _last_loss(steps),
        "made_by": stamp,
    }


def _rates(plan: Plan, steps: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = np.array([step["sec_per_it"] for step in steps])
    low, median, high = (float(q) for q in np.quantile(seconds, [0.25, 0.5, 0.75]))
    gbs, t, gpu = steps[-1]["global_batch_size"], plan.topology, plan.cluster.gpu
    rate, once = (
        plan.shape.flops_per_iteration(gbs, full) / median / t.gpus for full in (t.recompute == "full", False)
    )
    return {
        "global_batch_size": gbs,
        "sec_per_it": {
            "median": median,
            "low_quartile": low,
            "high_quartile": high,
            "least": float(seconds.min()),
            "most": float(seconds.max()),
        },
        "spread": (high - low) / 2 / median,
        "samples_per_s": gbs / median,
        "tokens_per_s": gbs * plan.shape.seq_length / median,
        "flops_per_s_per_gpu": rate,
        "mfu": once / gpu.flops_per_s(t.precision) if gpu.kind == "cuda" else None,
    }


def _last_loss(steps: list[dict[str, Any]]) -> float | None:
    """The last loss that is a number."""
    return next((s["lm_loss"] for s in reversed(steps) if math.isfinite(s["lm_loss"])), None)


def _steps(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def text(found: dict[str, Any]) -> str:
    """The result in three lines."""
    head = f"{found['label']} ({found['engine']}): {found['status']}: {found['evidence']}"
    if found["sec_per_it"] is None:
        return head
    seconds = found["sec_per_it"]
    speed = (
        f"{seconds['median']:.4f} s an iteration (quartiles {seconds['low_quartile']:.4f} to "
        f"{seconds['high_quartile']:.4f}) over {found['iterations']}, {found['left_out']} left out"
    )
    mfu = f"MFU {found['mfu']:.1%}, " if found["mfu"] is not None else ""
    rates = (
        f"{found['tokens_per_s']:.0f} tokens/s, {found['flops_per_s_per_gpu'] / 1e12:.4g} TFLOP/s per GPU, "
        f"{mfu}fullest rank {max(found['memory_bytes'].values(), default=0) / 2**30:.2f} GiB"
    )
    return "\n".join([head, speed, rates])
