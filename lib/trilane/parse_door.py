"""The door `parse`: logs in any dialect, what each run did and how it ended, as text, JSON or CSV."""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from trilane.checks import require
from trilane.logs import RunLog
from trilane.many_logs import read_many
from trilane.shape import ModelShape, padded_vocab_size

KEEP = ("flops_per_s_per_gpu", "skipped")  # beside what reading needs: all that a record tells
WARM_UP = 5  # as measure's
FULL = ("checkpoint_activations", "deepspeed_activation_checkpointing")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The door's arguments."""
    parser.add_argument("logs", nargs="+", metavar="LOG", help="a log of a training run, plain or gzip")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--csv", metavar="FILE", default="", help="write all iterations of all runs to FILE")


def run(args: argparse.Namespace) -> int:
    """Print the runs. 0, or where a log cannot be read: 2 if it is the only one, 1 if others were read."""
    if args.csv:
        require(Path(args.csv).parent.is_dir(), "csv", args.csv, "its folder does not exist")
        require(Path(args.csv).resolve() not in map(Path.resolve, map(Path, args.logs)), "csv", args.csv, "is a log")
    found = read_many(args.logs, record, KEEP, Path(args.csv) if args.csv else None)
    records = [values for one in found for values in one.records]
    bad = [one.error for one in found if one.error]
    for line in bad:
        print(f"trilane: {line}", file=sys.stderr)
    if bad and not records:
        return 2
    if args.json:
        print(json.dumps({"runs": records}, indent=1, allow_nan=False))
    else:
        for values in records:
            print(text(values))
    return 1 if bad else 0


def record(log: RunLog) -> dict[str, Any]:
    """A run as JSON; what the log does not tell is null."""
    loss = log.iterations["lm_loss"].dropna().tolist() if "lm_loss" in log.iterations else []
    seconds = sec_per_it(log)
    memory = log.memory
    most = next((c for c in ("max_allocated", "max_reserved") if c in memory and memory[c].notna().any()), None)
    values = {
        "file": str(log.source),
        "dialect": log.dialect,
        "status": log.status,
        "evidence": log.evidence,
        "rank": log.rank,
        "asked_gib": log.asked_bytes / 2**30,
        "arguments": dict(log.arguments),
        "iterations": len(log.iterations),
        "sec_per_it": seconds,
        "tflops": {name: _plain(rate / 1e12) for name, rate in flops_per_s(log, seconds).items()},
        "max_memory_gib": float(memory[most].max()) / 2**30 if most else None,
        "last_loss": loss[-1] if loss else None,
        "notes": list(log.notes),
    }
    return {name: _plain(value) for name, value in values.items()}


def text(values: dict[str, Any]) -> str:
    """A run's record in three lines."""
    rates = ", ".join(f"{rate:.1f} TFLOP/s/GPU {name}" for name, rate in values["tflops"].items() if rate is not None)
    told = (
        f"{values['iterations']} iterations",
        "" if values["sec_per_it"] is None else f"{values['sec_per_it']:.4g} s/it",
        rates,
        "" if values["max_memory_gib"] is None else f"{values['max_memory_gib']:.2f} GiB",
        "" if values["last_loss"] is None else f"loss {values['last_loss']:.4f}",
    )
    numbers = ", ".join(filter(None, told))
    return f"{values['file']}: {values['status']} ({values['dialect']})\n  {numbers}\n  {values['evidence']}"


def sec_per_it(log: RunLog) -> float:
    """Median seconds per iteration of the stable window; the Trainer's runtime over its steps; else NaN."""
    from trilane.measure import stable_window

    if "sec_per_it" in log.iterations:
        window = stable_window(log, WARM_UP)
        return float((window if len(window) else log.iterations)["sec_per_it"].median())
    steps = log.arguments.get("total_optimization_steps")
    if "train_runtime" in log.summary:
        if isinstance(steps, int) and steps > 0:
            return log.summary["train_runtime"] / steps
        return 1 / (log.summary.get("train_steps_per_second") or math.nan)
    batch = log.arguments.get("deepspeed.train_batch_size")
    if "samples_per_second" in log.iterations and isinstance(batch, int):
        return batch / float(log.iterations["samples_per_second"].median())
    return math.nan


def flops_per_s(log: RunLog, seconds: float) -> dict[str, float]:
    """FLOP/s per GPU by definition.

    printed     the median of what the log prints, by its dialect's own definition
    narayanan   ModelShape.flops_per_iteration over `seconds`, where the arguments tell shape, batch and world size
    """
    rates = {}
    if "flops_per_s_per_gpu" in log.iterations:
        rates["printed"] = float(log.iterations["flops_per_s_per_gpu"].iloc[1:].median())
        if math.isnan(rates["printed"]):
            rates["printed"] = float(log.iterations["flops_per_s_per_gpu"].median())
    for name, value in log.summary.items():
        if name.startswith("profiler: fwd+bwd+step") and value > 1e6:
            rates["profiler"] = value
    shape, world, batch = _shape(log), _whole(log, "world_size"), _batch(log)
    if shape and world and batch and seconds > 0:
        rates["narayanan"] = shape.flops_per_iteration(batch, _recomputes_all(log)) / seconds / world
    return rates


def _shape(log: RunLog) -> ModelShape | None:
    """The model's shape, None where an argument is missing or they do not fit together."""
    names = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    sizes = {name: _whole(log, name) for name in names}
    vocab = _whole(log, "padded_vocab_size")
    if not vocab and (tokens := _whole(log, "vocab_size")):
        multiple = _whole(log, "make_vocab_size_divisible_by") or 128
        vocab = padded_vocab_size(tokens, _tp(log), multiple)
    if not vocab or not all(sizes.values()):
        return None
    L, h, a, s = sizes.values()
    try:
        return ModelShape(num_layers=L, hidden_size=h, num_attention_heads=a, seq_length=s, vocab_size=vocab)
    except ValueError:
        return None


def _tp(log: RunLog) -> int:
    return _whole(log, "tensor_model_parallel_size") or _whole(log, "model_parallel_size") or 1


def _batch(log: RunLog) -> float:
    if "global_batch_size" in log.iterations:
        return float(log.iterations["global_batch_size"].iloc[-1])
    batch = _whole(log, "global_batch_size") or _whole(log, "deepspeed.train_batch_size")
    if not batch and "world_size" in log.arguments:  # versions of 2020 name only what a replica takes
        replicas = _whole(log, "world_size") // (_tp(log) * (_whole(log, "pipeline_model_parallel_size") or 1))
        batch = _whole(log, "batch_size") * max(1, replicas)
    return float(batch)


def _whole(log: RunLog, name: str) -> int:
    value = log.arguments.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _recomputes_all(log: RunLog) -> bool:
    return any(log.arguments.get(name) is True for name in FULL) or log.arguments.get("recompute_granularity") == "full"


def _plain(value: Any) -> Any:
    """A float without a value is null in JSON."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
