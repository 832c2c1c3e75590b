"""The door `python -m trilane search`: a space from options, the best plans as a table or as JSON."""

import argparse
import json
from typing import Any

from trilane.config import cluster as hardware
from trilane.config.engines import ENGINES
from trilane.config.model import read_shape
from trilane.config.parallelism import ATTENTIONS, OFFLOADS, PARTITIONS, RECOMPUTE
from trilane.costmodel.calibration import Calibration, default, load
from trilane.planning.search import OBJECTIVES, SearchResult, search
from trilane.utils.validation import require

PINS = ("tp", "pp", "dp", "mbs", "interleaving")


MOST_GBS = 1 << 14  # every size up to it is looked at: 9 s on two cores


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The door's options; each that names a choice pins it."""
    parser.add_argument("--shape", required=True, help="layers,hidden,heads,seq,vocab, or a JSON file with a shape")
    parser.add_argument("--cluster", required=True, help="a cluster's name or JSON file")
    parser.add_argument("--gpus", required=True, type=int, help="GPUs of the run")
    batch = parser.add_mutually_exclusive_group(required=True)
    batch.add_argument("--gbs", type=int, help="sequences an iteration")
    batch.add_argument("--gbs-max", type=int, help="look at every global batch size up to this one")
    for name in PINS:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3))
    parser.add_argument("--recompute", choices=RECOMPUTE)
    parser.add_argument("--partition", choices=PARTITIONS)
    parser.add_argument("--sequence-parallel", choices=("yes", "no"))
    parser.add_argument("--offload", choices=OFFLOADS)
    parser.add_argument("--precision", choices=hardware.PRECISIONS, help="default: bf16 where the card has it")
    parser.add_argument(
        "--attention", choices=ATTENTIONS, help="scores: no flash kernel; default: what card and heads allow"
    )
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0], help="what trains it (default: megatron)")
    parser.add_argument(
        "--fp32-gradients", choices=("yes", "no"), help="sum 16-bit gradients in fp32 (default: in bf16)"
    )
    parser.add_argument("--calibration", metavar="JSON", help="constants fitted to your own runs")
    parser.add_argument("--objective", choices=OBJECTIVES, default="seconds")
    parser.add_argument("--top", type=int, default=10, help="plans to list (default: 10)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def choices_of(args: argparse.Namespace) -> dict[str, Any]:
    """What the options pin or hold fixed, as search() takes it."""
    names = (*PINS, "zero", "recompute", "partition", "offload", "precision", "attention", "engine")
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    if args.sequence_parallel:
        given["sequence_parallel"] = args.sequence_parallel == "yes"
    if args.fp32_gradients:
        given["fp32_gradients"] = args.fp32_gradients == "yes"
    return given


def run(args: argparse.Namespace) -> int:
    """Search and print; exit code 0, or 1 where nothing can run."""
    cluster, shape = hardware.cluster(args.cluster), read_shape(args.shape)
    calibration: Calibration = load(args.calibration) if args.calibration else default(cluster)
    for name in ("gpus", "gbs", "gbs_max", "top", *PINS):
        value = getattr(args, name)
        require(value is None or value >= 1, name, value, "must be a whole number of at least 1")
    require(
        (args.gbs_max or 0) <= MOST_GBS, "gbs_max", args.gbs_max, f"must be at most {MOST_GBS}; gbs asks for one size"
    )
    require(args.gpus <= cluster.max_gpus, "gpus", args.gpus, f"{cluster.name} has {cluster.max_gpus}")
    sizes = args.gbs or range(1, args.gbs_max + 1)
    given = {"calibration": calibration, "objective": args.objective, "top": args.top, **choices_of(args)}
    found = search(shape, cluster, gpus=args.gpus, gbs=sizes, **given)
    if args.json:
        plans, risky = ([c.to_json() for c in rows] for rows in (found.candidates, found.risky))
        said = {"evaluated": found.evaluated, "refused": found.refused_by_rule, "held_fixed": found.space.held_fixed}
        print(json.dumps({**said, "plans": plans, "risky": risky}, indent=1))
    else:
        _print(found)
    return 0 if found.candidates else 1


def _print(found: SearchResult) -> None:
    print(f"{found.evaluated} topologies, {found.runnable} can run")
    for rule, count in found.refused_by_rule.items():
        print(f"{count:>12} refused: {rule}")
    print(f"held fixed: {found.space.held_fixed}")
    for n, candidate in enumerate([*found.candidates, *found.risky]):
        if n == len(found.candidates):
            print("apart, because these may run out of memory (P above 10 %):")
        p, t = candidate.prediction, candidate.topology
        seconds = f"{p.sec_per_it:9.3f} s ({p.sec_lo:.3f}-{p.sec_hi:.3f})"
        print(
            f"{seconds} {p.memory_bytes / 2**30:6.1f} GiB  P(OOM) {p.oom_probability:.2f}  gbs {t.gbs:5} "
            f"{candidate.plan.id} {candidate.label}"
        )
