"""The door `python -m trilane search`: a space from options, the best plans as a table or as JSON."""

import argparse
import json
from typing import Any

from trilane.config import cluster as hardware
from trilane.config.parallelism import ATTENTIONS, OFFLOADS, PARTITIONS, RECOMPUTE, usual_precision
from trilane.costmodel.calibration import Calibration, default, load
from trilane.planning.plans import plan_of, read_shape
from trilane.planning.search import OBJECTIVES, SearchResult, search_space
from trilane.planning.space import Space
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
    parser.add_argument("--offload", choices=OFFLOADS, default="none")
    parser.add_argument("--precision", choices=hardware.PRECISIONS, help="default: bf16 where the card has it")
    parser.add_argument("--attention", choices=ATTENTIONS, default="fused", help="scores: no flash kernel")
    parser.add_argument("--calibration", metavar="JSON", help="constants fitted to your own runs")
    parser.add_argument("--objective", choices=OBJECTIVES, default="seconds")
    parser.add_argument("--top", type=int, default=10, help="plans to list (default: 10)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def space_of(args: argparse.Namespace, cluster: hardware.Cluster) -> Space:
    """The space that the options describe."""
    for name in ("gpus", "gbs", "gbs_max", "top", *PINS):
        value = getattr(args, name)
        require(value is None or value >= 1, name, value, "must be a whole number of at least 1")
    require(
        (args.gbs_max or 0) <= MOST_GBS, "gbs_max", args.gbs_max, f"must be at most {MOST_GBS}; gbs asks for one size"
    )
    require(args.gpus <= cluster.max_gpus, "gpus", args.gpus, f"{cluster.name} has {cluster.max_gpus}")
    given: dict[str, Any] = {"zero": (0, 1)}  # what every engine has; 2 and 3 are for who asks
    given |= {name: (value,) for name in PINS if (value := getattr(args, name)) is not None}
    if args.sequence_parallel:
        given["sequence_parallel"] = (args.sequence_parallel == "yes",)
    for name in ("zero", "recompute", "partition"):
        if getattr(args, name) is not None:
            given[name] = (getattr(args, name),)
    return Space(
        gpus=(args.gpus,),
        gbs=(args.gbs,) if args.gbs else tuple(range(1, args.gbs_max + 1)),
        offload=(args.offload,),
        precision=args.precision or usual_precision(cluster),
        attention=args.attention,
        **given,
    )


def run(args: argparse.Namespace) -> int:
    """Search and print; exit code 0, or 1 where nothing can run."""
    cluster, shape = hardware.cluster(args.cluster), read_shape(args.shape)
    calibration: Calibration = load(args.calibration) if args.calibration else default(cluster)
    found = search_space(shape, cluster, space_of(args, cluster), calibration, args.objective, args.top)
    if args.json:
        plans = [plan_of(c, shape, cluster) for c in found.candidates]
        print(json.dumps({"evaluated": found.evaluated, "refused": found.refused_by_rule, "plans": plans}, indent=1))
    else:
        _print(found)
    return 0 if found.candidates else 1


def _print(found: SearchResult) -> None:
    print(f"{found.evaluated} topologies, {found.runnable} can run")
    for rule, count in found.refused_by_rule.items():
        print(f"{count:>12} refused: {rule}")
    for candidate in found.candidates:
        p, t = candidate.prediction, candidate.topology
        seconds = f"{p.sec_per_it:9.3f} s ({p.sec_lo:.3f}-{p.sec_hi:.3f})"
        print(f"{seconds} {p.memory_bytes / 2**30:6.1f} GiB  P(OOM) {p.oom_probability:.2f}  gbs {t.gbs:5} {t.label}")
