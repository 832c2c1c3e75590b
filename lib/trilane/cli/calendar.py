"""The door `python -m trilane calendar`: a plan, its tokens and a ramp become dates, GPU-hours and risks."""

import argparse
import json

from trilane.config.plan import read_plan
from trilane.forecasting.forecast import forecast
from trilane.forecasting.request import ADAPT, forecast_request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The door's options."""
    parser.add_argument("plan", metavar="PLAN.json")
    parser.add_argument("--tokens", required=True, type=float, help="tokens of the whole run, such as 341e9")
    parser.add_argument("--ramp", metavar="START,INCREMENT,SAMPLES", help="the batch size's ramp; default: the plan's")
    parser.add_argument("--capacity", metavar="JSON", help="GPUs from day to day; default: the plan's GPUs, not shared")
    parser.add_argument(
        "--failures-per-node-year", type=float, help="node failures; default: 1.8, uncertain by a factor of 2.2"
    )
    parser.add_argument("--allocation", type=float, metavar="GPU_HOURS")
    parser.add_argument("--deadline", metavar="DATE", help="the last day, such as 2026-07-11")
    parser.add_argument("--start", metavar="DATE", help="default: today (UTC)")
    parser.add_argument("--adapt", choices=tuple(ADAPT), default="no", help="let DP, MBS, nodes follow the batch")
    parser.add_argument(
        "--day-worth", type=float, metavar="GPU_HOURS", help="the same, between the two: what a day is worth"
    )
    parser.add_argument("--reshape", action="store_true", help="with these, let TP and PP change too")
    parser.add_argument("--checkpoint-minutes", type=float, help="between checkpoints; default: Daly's optimum")
    parser.add_argument("--spare-nodes", type=int, help="nodes in reserve (default: 4, or what the jobs leave free)")
    parser.add_argument("--job-hours", type=float, help="the longest job that the queue takes (default: 20)")
    parser.add_argument("--evaluation-iters", type=int, help="per 1000 iterations (default: 100, as Megatron-LM)")
    parser.add_argument("--risks", metavar="JSON", help="fields of FailureModel that you know better")
    parser.add_argument("--price", type=float, metavar="PER_GPU_HOUR", help="money of one GPU-hour, in your currency")
    parser.add_argument("--watts", type=float, metavar="PER_GPU", help="of one GPU with its share of the node")
    parser.add_argument("--calibration", metavar="JSON", help="constants fitted to your own runs")
    parser.add_argument("--runs", type=int, default=10_000, help="simulated runs (default: 10000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Forecast and print; exit code 0."""
    options = {name: value for name, value in vars(args).items() if name not in ("plan", "json", "door", "call")}
    found = forecast(forecast_request(read_plan(args.plan), **options))
    print(json.dumps(found.to_json(), indent=1) if args.json else found.as_text())
    return 0
