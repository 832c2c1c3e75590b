"""The door `sweep`: a table of plans as one job array, its state, its failures again, its table."""

import argparse
import json
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

from trilane.cli.slurm_jobs import add_site, line
from trilane.config.plan import read_plan
from trilane.slurm import jobs, sites, sweep
from trilane.slurm.preflight import check
from trilane.slurm.request import JobRequest, add_request, request_of
from trilane.slurm.sites import Site


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The door's arguments, one set for each thing to do."""
    doors = parser.add_subparsers(dest="what", required=True)
    create = doors.add_parser("create", help="write the run folders and the scripts of the array")
    create.add_argument("plans", type=Path, help="what `search --json` printed, or a list of plans")
    for name, text in (
        ("submit", "submit all runs, after the guard"),
        ("rerun", "submit the failures alone"),
        ("status", "every run in one call"),
        ("table", "the results, fastest first"),
    ):
        doors.add_parser(name, help=text)
    for name, door in doors.choices.items():
        door.add_argument("folder", type=Path)
        door.add_argument("--json", action="store_true", help="print one JSON object")
        if name in ("create", "submit", "rerun"):
            door.add_argument("--allow", action="append", default=[], metavar="RULE")
            add_site(door)
            add_request(door)


def run(args: argparse.Namespace) -> int:
    """Do it and print what came of it; 1 where the guard refuses or a run failed."""
    if args.what == "table":
        found = sweep.table(args.folder)
        print(found.to_json(orient="records", indent=1) if args.json else found.to_string(index=False))
        return 0
    if args.what == "status":
        return _status(args)
    site, request = sites.site(args.site), request_of(args)
    if args.what == "create":
        made = sweep.create(args.folder, sweep.read_plans(args.plans), site, request)
        _say(args, {"created": [str(path) for path in made]})
        return 0
    is_again = args.what == "rerun"
    if refused := _refused(args, site, request, sweep.failures(args.folder) if is_again else None):
        return refused
    arrays = (sweep.rerun if is_again else sweep.submit)(args.folder, site, request.parallel)
    _say(args, {"submitted": arrays})
    return 0


def _refused(args: argparse.Namespace, site: Site, request: JobRequest, lines: Collection[int] | None) -> int:
    """1, said, where the guard refuses one of these lines of runs.txt (None: all), each with its array's script."""
    scripts, found = sweep.scripts(args.folder, site), {}
    for n, p in enumerate(sweep.members(args.folder), 1):
        if lines is None or n in lines:
            found[p] = check.check(read_plan(p / "plan.json"), site, request, p, args.allow, scripts[n])
    refused = {str(p): list(map(asdict, check.refused(findings))) for p, findings in found.items()}
    if not any(refused.values()):
        return 0
    if args.json:
        print(json.dumps({"findings": refused}, indent=1))
    else:
        print("\n".join(f"{p.name}: {check.line(f)}" for p, findings in found.items() for f in findings))
    return 1


def _status(args: argparse.Namespace) -> int:
    found = jobs.status(sweep.members(args.folder))
    text = json.dumps({"jobs": list(map(asdict, found))}, indent=1) if args.json else "\n".join(map(line, found))
    print(text)
    return 1 if any(job.has_failed for job in found) else 0


def _say(args: argparse.Namespace, values: dict[str, list[str]]) -> None:
    if args.json:
        print(json.dumps(values))
    else:
        print("\n".join(f"{name}: {value}" for name, found in values.items() for value in found or ["nothing"]))
