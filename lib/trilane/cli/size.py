"""The door `python -m trilane size`: shapes of a target size, each with its best topology and what it costs."""

import argparse
import dataclasses
import json
from typing import Any

from trilane.config import cluster as hardware
from trilane.config.engines import ENGINES
from trilane.config.parallelism import ATTENTIONS, PARTITIONS, RECOMPUTE
from trilane.costmodel.calibration import default, load
from trilane.planning.published import PlannedModel, published_models, size_line
from trilane.planning.sizing import Proposal, SizeRequest, candidate_json, survey, why_none
from trilane.utils.validation import require


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The door's options."""
    parser.add_argument("--params", required=True, type=float, help="parameters of the model, such as 200e9")
    parser.add_argument(
        "--vocab", required=True, type=int, help="tokens of the vocabulary; padded to a multiple of 128"
    )
    parser.add_argument("--gpus", required=True, type=int, help="GPUs of the run")
    parser.add_argument("--cluster", required=True, help="a cluster's name or JSON file")
    parser.add_argument("--tokens", type=float, default=300e9, help="tokens to train on (default: 300e9)")
    parser.add_argument("--gbs", type=int, default=2048, help="sequences an iteration (default: 2048)")
    parser.add_argument("--seq", type=int, default=2048, help="tokens of a sequence (default: 2048)")
    parser.add_argument("--tolerance", type=float, default=0.03, help="how far from the target (default: 0.03)")
    parser.add_argument("--recompute", choices=RECOMPUTE, help="default: whatever is fastest")
    parser.add_argument("--partition", choices=PARTITIONS)
    parser.add_argument(
        "--attention",
        choices=ATTENTIONS,
        help="scores: no flash kernel, as in 2022; default: what card and heads allow",
    )
    parser.add_argument("--engine", choices=ENGINES, default=ENGINES[0], help="what trains it (default: megatron)")
    parser.add_argument("--precision", choices=hardware.PRECISIONS, help="default: bf16 where the card has it")
    parser.add_argument("--fp32-gradients", action="store_true", help="accumulate 16-bit gradients in fp32")
    parser.add_argument("--calibration", metavar="JSON", help="constants fitted to your own runs")
    parser.add_argument("--top", type=int, default=10, help="shapes to list (default: 10)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def request_of(args: argparse.Namespace) -> SizeRequest:
    """What the options ask for; ValueError names the wrong one."""
    require(args.top >= 1, "top", args.top, "must be a whole number of at least 1")
    cluster = hardware.cluster(args.cluster)
    names = ("attention", "precision", "recompute", "partition")
    choices: dict[str, Any] = {name: value for name in names if (value := getattr(args, name))}
    choices |= {"fp32_gradients": True} if args.fp32_gradients else {}
    return SizeRequest(
        parameters=args.params,
        vocabulary=args.vocab,
        gpus=args.gpus,
        cluster=cluster,
        calibration=load(args.calibration) if args.calibration else default(cluster),
        tokens=args.tokens,
        gbs=args.gbs,
        seq_length=args.seq,
        tolerance=args.tolerance,
        choices=choices,
        engine=args.engine,
    )


def run(args: argparse.Namespace) -> int:
    """Propose and print; exit code 0, or 1 where no shape can run."""
    request = request_of(args)
    found, refused = survey(request)
    if args.json:
        print(json.dumps({**to_json(request, found[: args.top], len(found)), "refused": dict(refused)}, indent=1))
    else:
        _print(request, found[: args.top])
        if not found:
            print(why_none(request, refused))
    return 0 if found else 1


def to_json(request: SizeRequest, proposals: list[Proposal], runnable: int) -> dict[str, Any]:
    """The request, the candidates and the published models as one JSON object; bytes, seconds, days, GPU-hours."""
    best = proposals[0] if proposals else None
    asked = {f.name: getattr(request, f.name) for f in dataclasses.fields(request)}
    asked |= {"cluster": request.cluster.name, "vocab_size": request.vocab_size}
    del asked["calibration"]
    return {
        "request": asked,
        "runnable": runnable,
        "candidates": [candidate_json(p, best) for p in proposals if best],
        "published": [published_json(m) for m in published_models()],
    }


def published_json(model: PlannedModel) -> dict[str, Any]:
    """A published model with its size by the chronicles' formula."""
    shape = model.shape
    values = {"origin": model.origin, "layers": shape.num_layers, "hidden": shape.hidden_size, "ratio": model.ratio}
    return {**values, "params": shape.parameters, "printed_b": model.printed_b, "line": size_line(shape)}


def size_words(parameters: float) -> str:
    """ "176.2B", or "20.3M" where that is below a billion."""
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.1f}M"


def _print(request: SizeRequest, proposals: list[Proposal]) -> None:
    print(
        f"{size_words(request.parameters)} parameters, {request.vocab_size} rows of embedding, {request.gpus} GPUs of"
    )
    print(f"{request.cluster.name}, {request.tokens / 1e9:g} B tokens; days with nothing going wrong:")
    for p in proposals:
        s, (middle, low, high) = p.shape, p.tflops
        beside = p.days_at_target / proposals[0].days_at_target - 1
        print(
            f"{s.num_layers:4} x {s.hidden_size:5} a{s.num_attention_heads:<4}{size_words(s.parameters):>8} "
            f"ratio {p.ratio:4.0f} {p.prediction.sec_per_it:8.2f} s {middle:4.0f} TFLOP/s ({low:.0f}-{high:.0f}) "
            f"{p.days:7.1f} d {p.gpu_hours:10,.0f} GPU-h {p.prediction.memory_bytes / 2**30:5.1f} GiB "
            f"{beside:+6.1%}  {p.topology.label}"
        )
        for note in p.notes:
            print(f"{'':10}{note}")
