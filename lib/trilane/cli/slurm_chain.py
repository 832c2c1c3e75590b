"""The door `chain`: a long run as dependent jobs, with other numbers of nodes for other batch sizes where asked."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from trilane.cli.slurm_jobs import add_site, line
from trilane.config.plan import read_plan
from trilane.costmodel.predict import predict
from trilane.slurm import chain, jobs, sites
from trilane.slurm.preflight import check
from trilane.slurm.request import add_request, request_of
from trilane.workspace import run_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The door's arguments, one set for each thing to do."""
    doors = parser.add_subparsers(dest="what", required=True)
    create = doors.add_parser("create", help="write the run folders of a chain")
    create.add_argument("plan", type=Path)
    create.add_argument("--stages", default="", metavar="GBS:NODES:MBS,...", help="nodes that follow the ramp")
    submit = doors.add_parser("submit", help="submit the jobs, each after the one before")
    submit.add_argument("--times", type=int, default=1, help="jobs a stage, where one time limit is not enough")
    doors.add_parser("status", help="every stage in one call")
    for name, door in doors.choices.items():
        door.add_argument("folder", type=Path)
        door.add_argument("--json", action="store_true", help="print one JSON object")
        if name != "status":
            door.add_argument("--allow", action="append", default=[], metavar="RULE")
            add_site(door)
            add_request(door)


def run(args: argparse.Namespace) -> int:
    """Do it and print what came of it; 1 where the guard refuses or a stage failed."""
    if args.what == "status":
        found = jobs.status(chain.stages_of(args.folder))
        print(json.dumps({"jobs": list(map(asdict, found))}, indent=1) if args.json else "\n".join(map(line, found)))
        return 1 if any(job.has_failed for job in found) else 0
    return _create(args) if args.what == "create" else _submit(args)


def _create(args: argparse.Namespace) -> int:
    plan, stages = read_plan(args.plan), chain.parse_stages(args.stages) if args.stages else []
    made = chain.create(args.folder, plan, stages, sites.site(args.site), request_of(args))
    rows = []
    for path, link in zip(made, chain.read(args.folder), strict=True):
        seconds = predict(link).sec_per_it
        hours = chain.gpu_hours(link, seconds)
        told = {"run": str(path), "gpus": link.topology.gpus, "first": link.run.start_iteration + 1}
        rows.append({**told, "last": link.run.goal, "gpu_hours": hours, "hours": hours / link.topology.gpus})
    if args.json:
        print(json.dumps({"links": rows}, indent=1))
    else:
        for row in rows:
            span = f"iterations {row['first']}-{row['last']}, {row['gpus']} GPUs"
            print(f"{row['run']}: {span}, {row['hours']:.2f} h, {row['gpu_hours']:.2f} GPU hours")
    return 0


def _submit(args: argparse.Namespace) -> int:
    site, request = sites.site(args.site), request_of(args)
    left = [p for p in chain.stages_of(args.folder) if not run_folder.is_completed(p)]
    found = {p.name: check.check(read_plan(p / "plan.json"), site, request, p, args.allow) for p in left}
    refused = any(check.refused(findings) for findings in found.values())
    ids = [] if refused else chain.submit(args.folder, site, args.times)
    if args.json:
        told = {name: [asdict(f) for f in findings] for name, findings in found.items()}
        print(json.dumps({"findings": told, "submitted": ids}, indent=1))
    else:
        print("\n".join(f"{name}: {check.line(f)}" for name, findings in found.items() for f in findings))
        print(f"submitted: {', '.join(ids) or 'nothing'}")
    return 1 if refused else 0
