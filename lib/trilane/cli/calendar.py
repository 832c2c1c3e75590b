"""The door `python -m trilane calendar`: a plan, its tokens and a ramp become dates, GPU-hours and risks."""

import argparse
import json
from typing import Any

from trilane.config.batch_rampup import parse_ramp
from trilane.config.plan import read_plan
from trilane.costmodel.calibration import default, load
from trilane.forecasting.capacity import constant, parse_day, read_capacity, today
from trilane.forecasting.energy import Price, energy_words
from trilane.forecasting.failures import FailureModel
from trilane.forecasting.forecast import forecast
from trilane.forecasting.record import to_json
from trilane.forecasting.request import ForecastRequest, with_pins
from trilane.forecasting.throughput import SOONEST
from trilane.utils.validation import from_mapping, read_json, require

WORTH = {"days": SOONEST, "gpu_hours": 0.0}


MOST_LINES = 12  # changes of topology that are printed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The door's options."""
    parser.add_argument("plan", metavar="PLAN.json")
    parser.add_argument("--tokens", required=True, type=float, help="tokens of the whole run, such as 341e9")
    parser.add_argument("--ramp", metavar="START,INCREMENT,SAMPLES", help="the batch size's ramp; default: the plan's")
    parser.add_argument("--capacity", metavar="JSON", help="GPUs from day to day; default: the plan's GPUs, ours alone")
    parser.add_argument(
        "--failures-per-node-year", type=float, help="node failures; default: 1.8, unsure by a factor 2.2"
    )
    parser.add_argument("--allocation", type=float, metavar="GPU_HOURS")
    parser.add_argument("--deadline", metavar="DATE", help="the last day, such as 2026-07-11")
    parser.add_argument("--start", metavar="DATE", help="default: today (UTC)")
    parser.add_argument("--adapt", choices=("no", *WORTH), default="no", help="let DP, MBS, nodes follow the batch")
    parser.add_argument(
        "--day-worth", type=float, metavar="GPU_HOURS", help="the same, between the two: what a day is worth"
    )
    parser.add_argument("--reshape", action="store_true", help="with these, let TP and PP change too")
    parser.add_argument("--checkpoint-minutes", type=float, help="between checkpoints; default: Daly's optimum")
    parser.add_argument("--spare-nodes", type=int, help="nodes that stand by (default: 4)")
    parser.add_argument("--job-hours", type=float, help="the longest job that the queue takes (default: 20)")
    parser.add_argument("--evaluation-iters", type=int, help="per 1000 iterations (default: 100, as Megatron-LM)")
    parser.add_argument("--risks", metavar="JSON", help="any field of stops.Risks that you know better")
    parser.add_argument("--price", type=float, metavar="PER_GPU_HOUR", help="money of one GPU-hour, in your currency")
    parser.add_argument("--watts", type=float, metavar="PER_GPU", help="of one GPU with its share of the node")
    parser.add_argument("--calibration", metavar="JSON", help="constants fitted to your own runs")
    parser.add_argument("--runs", type=int, default=10_000, help="simulated runs (default: 10000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def request_of(args: argparse.Namespace) -> ForecastRequest:
    """What the options ask for; ValueError names the wrong one."""
    plan = read_plan(args.plan)
    start = parse_day("start", args.start) if args.start else today()
    require(args.seed >= 0, "seed", args.seed, "must not be negative")
    minutes = args.checkpoint_minutes
    require(minutes is None or minutes > 0, "checkpoint-minutes", minutes, "must be above zero")
    risks = with_pins(
        from_mapping(FailureModel, read_json(args.risks, "risks"), "risks") if args.risks else FailureModel(),
        args.failures_per_node_year,
        checkpoint_s=minutes * 60 if minutes else None,
        spare_nodes=args.spare_nodes,
        job_hours=args.job_hours,
        evaluation_iters=args.evaluation_iters,
    )
    return ForecastRequest(
        plan=plan,
        calibration=load(args.calibration) if args.calibration else default(plan.cluster),
        tokens=args.tokens,
        ramp=parse_ramp(args.ramp) if args.ramp else plan.run.ramp,
        capacity=read_capacity(args.capacity) if args.capacity is not None else constant(plan.topology.gpus, start),
        start=start,
        deadline=parse_day("deadline", args.deadline) if args.deadline else None,
        allocation=args.allocation,
        risks=risks,
        day_worth=WORTH.get(args.adapt) if args.day_worth is None else args.day_worth,
        reshape=args.reshape,
        runs=args.runs,
        seed=args.seed,
    )


def run(args: argparse.Namespace) -> int:
    """Forecast and print; exit code 0."""
    price = Price(per_gpu_hour=args.price, watts_per_gpu=args.watts)
    found = forecast(request_of(args))
    if args.json:
        print(json.dumps(to_json(found, price), indent=1))
    else:
        _print(to_json(found, price))
    return 0


def _print(said: dict[str, Any]) -> None:
    low, high = said["days_interval"]
    print(f"{said['plan']}: {said['tokens']:g} tokens, {said['iterations']} iterations from {said['start']}")
    ramp = said["ramp"]
    print(
        f"ramp      {ramp['iterations']} iterations, {ramp['batch_sizes']} batch sizes, {ramp['days']:.2f} days of work"
    )
    print(f"days      {said['days']:.1f} ({low:.1f} to {high:.1f}); {said['ideal']['days']:.1f} if nothing went wrong")
    low, high = said["gpu_hours_interval"]
    print(f"GPU-hours {said['gpu_hours']:,.0f} ({low:,.0f} to {high:,.0f}); {said['ideal']['gpu_hours']:,.0f} of work")
    print(f"finish    {said['finish']['p50'][:10]} ({said['finish']['p05'][:10]} to {said['finish']['p95'][:10]})")
    if said["p_deadline"] is not None:
        print(f"deadline  {said['deadline']}: missed with probability {said['p_deadline']:.1%}")
    if said["p_allocation"] is not None:
        print(f"allocation {said['allocation']:,.0f} GPU-hours: overrun with probability {said['p_allocation']:.1%}")
    if said["energy_kwh"] is not None:
        money = f", money {said['cost']:,.0f}" if said["cost"] else ""
        print(f"energy    {energy_words(said['energy_kwh'])}{money}")
    print("lost days " + ", ".join(f"{name} {days:.1f}" for name, days in said["lost_days"].items()))
    for bar in said["schedule"][:MOST_LINES]:
        print(
            f"  day {bar['from_day']:5.1f} to {bar['to_day']:5.1f}: gbs {bar['gbs'][0]} to {bar['gbs'][1]} on "
            f"{bar['nodes']} nodes, "
            f"tp {bar['tp']} pp {bar['pp']} dp {bar['dp']} mbs {bar['mbs']} recompute {bar['recompute']}"
        )
    if len(said["schedule"]) > MOST_LINES:
        print(f"  and {len(said['schedule']) - MOST_LINES} more (--json shows all)")
