"""`python -m trilane ds-config`: DeepSpeed's JSON of a plan, or what is wrong with a JSON of yours."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trilane.config.plan import plan_from_json, read_plan
from trilane.interop.deepspeed_config import deepspeed_config
from trilane.interop.deepspeed_lint import contradictions, own_contradictions, read_topology
from trilane.utils.validation import read_json, require, to_mapping

LANES = {"tp": "tensor-parallel size", "pp": "pipeline stages", "dp": "replicas (default: what the batch sizes mean)"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `python -m trilane ds-config`."""
    parser.add_argument("file", type=Path, help="a plan, to be rendered; or a DeepSpeed JSON, to be read back")
    parser.add_argument("--plan", type=Path, default=None, help="hold the DeepSpeed JSON to this plan")
    for lane in ("tp", "pp", "dp"):
        parser.add_argument(f"--{lane}", type=int, default=0, metavar="N", help=f"{LANES[lane]}, where no plan says it")
    parser.add_argument("--json", action="store_true", help="what was found as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the plan's JSON; or the contradictions of the given one, then 1. ValueError for a file that is neither."""
    values = read_json(args.file, "file")
    require(isinstance(values, Mapping), "file", args.file, "must hold a JSON object")
    if "shape" in values and "topology" in values:
        plan = plan_from_json(dict(values))
        require(args.plan is None, "plan", args.plan, f"{args.file} is a plan itself")
        require(plan.engine != "megatron", "engine", plan.engine, "takes no DeepSpeed JSON")
        print(json.dumps(deepspeed_config(plan, compiler=True), indent=2))
        return 0
    if args.plan:
        lines, topology = contradictions(values, read_plan(args.plan)), None
    else:
        lines, topology = _meant(values, args.tp or 1, args.pp or 1, args.dp or replicas(values))
    if args.json:
        print(json.dumps({"contradictions": lines, "topology": topology}, indent=2))
    else:
        print("\n".join(lines) or f"no contradiction{'' if topology is None else ': ' + _words(topology)}")
    return 1 if lines else 0


def replicas(values: Mapping[str, Any]) -> int:
    """The data-parallel size that the three batch sizes mean together; 1 where they do not say."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    sizes = [values.get(name) for name in names]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return 1
    gbs, mbs, steps = sizes
    return max(1, gbs // (mbs * steps))  # type: ignore[operator]


def _meant(values: Mapping[str, Any], tp: int, pp: int, dp: int) -> tuple[list[str], dict[str, Any] | None]:
    """The contradictions, or where there are none the topology that is meant."""
    lines = own_contradictions(values, pp=pp, dp=dp)
    if lines:
        return lines, None
    try:
        return [], to_mapping(read_topology(values, tp=tp, pp=pp, dp=dp))
    except ValueError as error:
        return [str(error)], None


def _words(topology: Mapping[str, Any]) -> str:
    names = ("dp", "mbs", "gbs", "zero", "offload", "precision", "fp32_gradients")
    return ", ".join(f"{name} {topology[name]}" for name in names)
