"""The doors of jobs: script, submit, resubmit, status, cancel, tail, and `job`, which the scripts themselves call."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from trilane.config.plan import read_plan
from trilane.slurm import attempt, job_status, jobs, sites
from trilane.slurm.preflight import check
from trilane.slurm.request import add_request, request_of
from trilane.slurm.script import NAMES, render
from trilane.workspace.study import run_folders


def add_site(parser: argparse.ArgumentParser) -> None:
    """The option --site."""
    parser.add_argument("--site", required=True, help=f"{', '.join(sites.catalogue())}, or a JSON file")


def add_script(parser: argparse.ArgumentParser) -> None:
    """The door `script`."""
    parser.add_argument("plan", type=Path)
    parser.add_argument("--template", choices=NAMES, default="train")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_site(parser)
    add_request(parser)
    parser.set_defaults(call=_script)


def _script(args: argparse.Namespace) -> int:
    plan = read_plan(args.plan)
    text = render(args.template, plan, sites.site(args.site), request_of(args))
    print(json.dumps({"script": text}) if args.json else text, end="\n" if args.json else "")
    return 0


def add_submit(parser: argparse.ArgumentParser) -> None:
    """The doors `submit` and `resubmit`."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, or a study's name for all its runs")
    add_site(parser)
    parser.add_argument(
        "--allow", action="append", default=[], metavar="RULE", help="submit although the guard refuses"
    )
    parser.add_argument("--rewrite", action="store_true", help="write job.sbatch anew, for this site and these wishes")
    parser.add_argument("--dry-run", action="store_true", help="let the guard look, and submit nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_request(parser)
    parser.set_defaults(call=_submit)


def _submit(args: argparse.Namespace) -> int:
    """All runs or none: what the guard refuses in one of them keeps the others back too."""
    site, request, folders = sites.site(args.site), request_of(args), run_folders(args.runs)
    for path in folders if args.rewrite else []:
        jobs.rewrite(path, site, request)
    found = {str(f): check.check(read_plan(f / "plan.json"), site, request, f, args.allow) for f in folders}
    refused = any(check.refused(findings) for findings in found.values())
    submitted = {} if refused or args.dry_run else {str(f): jobs.submit(f, site, request) for f in folders}
    if args.json:
        told = {folder: [asdict(f) for f in findings] for folder, findings in found.items()}
        print(json.dumps({"findings": told, "submitted": submitted}, indent=1))
    else:
        for folder, findings in found.items():
            print("\n".join([f"{submitted.get(folder, 'not submitted')}  {folder}", *map(check.line, findings)]))
    return 1 if refused else 0


def add_status(parser: argparse.ArgumentParser) -> None:
    """The door `status`."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, or a study's name for all its runs")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(call=_status)


def _status(args: argparse.Namespace) -> int:
    found = jobs.status(run_folders(args.runs))
    if args.json:
        print(json.dumps({"jobs": [asdict(job) for job in found]}, indent=1))
    else:
        for job in found:
            print(line(job))
    return 1 if any(job.has_failed for job in found) else 0


def line(job: jobs.JobStatus) -> str:
    """A job in one line for the terminal."""
    later = f" +{job.waiting}" if job.waiting else ""
    where = job.reason or job.nodes
    told = f"{job.run:28.28} {job.id + later:12} {job.state:13} {job.elapsed:>10} {where:22.22}"
    return f"{told} {job.iteration:>7}/{job.iterations} {job.verdict:10} {job.evidence[:80]}".rstrip()


def add_cancel(parser: argparse.ArgumentParser) -> None:
    """The door `cancel`."""
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(call=_cancel)


def _cancel(args: argparse.Namespace) -> int:
    ids = jobs.cancel(run_folders(args.runs))
    print(json.dumps({"cancelled": ids}) if args.json else f"cancelled: {', '.join(ids) or 'nothing was going on'}")
    return 0


def add_tail(parser: argparse.ArgumentParser) -> None:
    """The door `tail`."""
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--lines", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(call=_tail)


def _tail(args: argparse.Namespace) -> int:
    lines = job_status.logs(run_folders([args.run])[0], args.lines)
    print(json.dumps({"lines": lines}) if args.json else "\n".join(lines))
    return 0


def add_job(parser: argparse.ArgumentParser) -> None:
    """The door `job`: what a job script asks before and says after its training."""
    parser.add_argument("what", choices=("begin", "end"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--code", type=int, default=0, help="the training's exit code")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(call=_job)


def _job(args: argparse.Namespace) -> int:
    if args.what == "begin":
        verdict = attempt.begin(args.folder)
        print(json.dumps({"verdict": verdict}) if args.json else verdict)
        return 0
    outcome = attempt.end(args.folder, args.code)
    text = f"{outcome.status} after {outcome.seconds:.0f} s: {outcome.evidence}"
    print(json.dumps(asdict(outcome)) if args.json else text)
    return 0
