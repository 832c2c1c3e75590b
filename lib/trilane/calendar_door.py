"""The door `python -m trilane calendar`: a plan, its tokens and a ramp become dates, GPU-hours and risks."""

import argparse
import dataclasses
import json
from typing import Any

from trilane.calendar import QUANTILES, Bar, Forecast, forecast
from trilane.calibration import default, load
from trilane.capacity import constant, parse_day, read_capacity, today
from trilane.checks import from_mapping, read_json, require
from trilane.energy import Price, energy_kwh, energy_words
from trilane.pace import SOONEST, first_full_gbs
from trilane.plan import read_plan
from trilane.ramp import parse_ramp
from trilane.request import Request, with_pins
from trilane.stops import SOURCES, Risks

WORTH = {"days": SOONEST, "gpu_hours": 0.0}
MOST_LINES = 12  # changes of topology that are printed
MEANING = {
    "p_deadline": "probability of MISSING the deadline (ending after that day); null without --deadline",
    "p_allocation": "probability of OVERRUNNING the allocation of GPU-hours; null without --allocation",
    "intervals": "5 % and 95 % of the simulated runs",
    "ramp.days": "the ramp's iterations at the predicted seconds of each batch size alone; the interval has all",
}


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


def request_of(args: argparse.Namespace) -> Request:
    """What the options ask for; ValueError names the wrong one."""
    plan = read_plan(args.plan)
    start = parse_day("start", args.start) if args.start else today()
    require(args.seed >= 0, "seed", args.seed, "must not be negative")
    minutes = args.checkpoint_minutes
    require(minutes is None or minutes > 0, "checkpoint-minutes", minutes, "must be above zero")
    risks = with_pins(
        from_mapping(Risks, read_json(args.risks, "risks"), "risks") if args.risks else Risks(),
        args.failures_per_node_year,
        checkpoint_s=minutes * 60 if minutes else None,
        spare_nodes=args.spare_nodes,
        job_hours=args.job_hours,
        evaluation_iters=args.evaluation_iters,
    )
    return Request(
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


def to_json(found: Forecast, price: Price | None = None) -> dict[str, Any]:
    """The forecast as one JSON object: days, GPU-hours, ISO dates, probabilities, and the assumptions behind them."""
    r, ideal, price = found.request, found.ideal, price or Price()
    iterations = sum(phase.iterations for phase in found.phases[: found.ramp_phases])
    hours = [found.gpu_hours(q) for q in (0.5, 0.05, 0.95)]
    energy = [energy_kwh(h, r.plan.cluster.gpu.name, price) for h in hours]
    ramp_ends = found.outcomes.reached_s[:, found.ramp_end] if found.ramp_phases else found.outcomes.wall_s * 0
    return {
        "plan": r.plan.label,
        "start": r.start.isoformat(),
        "tokens": r.tokens,
        "samples": r.samples,
        "iterations": sum(phase.iterations for phase in found.phases),
        "ramp": {
            "iterations": iterations,
            "days": found.ramp_days,
            "days_interval": [float(v) / 86400 for v in _interval(ramp_ends)],
            "batch_sizes": found.ramp_phases,
            "first_full_gbs": first_full_gbs(r.plan.topology),
        },
        "days": found.days(0.5),
        "days_interval": [found.days(0.05), found.days(0.95)],
        "gpu_hours": hours[0],
        "gpu_hours_interval": hours[1:],
        "ideal": {"days": float(ideal.wall_s[0]) / 86400, "gpu_hours": float(ideal.gpu_s[0]) / 3600},
        "finish": {f"p{round(100 * q):02}": found.finish(q).isoformat(timespec="minutes") for q in QUANTILES},
        "deadline": r.deadline.isoformat() if r.deadline else None,
        "p_deadline": found.p_deadline,
        "allocation": r.allocation,
        "p_allocation": found.p_allocation,
        "cost": price.cost(hours[0]),
        "cost_interval": [price.cost(h) for h in hours[1:]],
        "energy_kwh": energy[0],
        "energy_interval": energy[1:],
        "checkpoint": {"interval_s": r.interval_s, "save_s": r.save_s},
        "lost_days": found.lost_days,
        "schedule": [_bar(bar) for bar in found.bars()],
        "assumptions": assumptions(r),
        "meaning": MEANING,
    }


def assumptions(request: Request) -> list[dict[str, Any]]:
    """What was taken for granted: a name, a value, a source."""
    r = request.risks
    stops = [
        {"what": s.name, "per_node_year": s.per_node_year, "per_year": s.per_year, "source": s.source} for s in r.stops
    ]
    names = [f.name for f in dataclasses.fields(r) if f.name != "stops"]
    return stops + [{"what": name, "value": getattr(r, name), "source": SOURCES[name]} for name in names]


def _interval(values: Any) -> tuple[float, float]:
    import numpy as np

    return float(np.nanquantile(values, 0.05)), float(np.nanquantile(values, 0.95))


def _bar(bar: Bar) -> dict[str, Any]:
    c = bar.choice
    return {
        "from_day": bar.start_s / 86400,
        "to_day": bar.end_s / 86400,
        "gbs": [bar.first_gbs, bar.last_gbs],
        "tp": c.tp,
        "pp": c.pp,
        "dp": c.dp,
        "mbs": c.mbs,
        "nodes": c.nodes,
        "gpus": c.gpus,
        "recompute": c.recompute,
    }


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
