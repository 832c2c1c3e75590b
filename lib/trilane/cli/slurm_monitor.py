"""The doors `attach` (look into a running job) and `watch` (say when one dies, stalls or goes on)."""

import argparse
import json
import os
from dataclasses import asdict

from trilane.slurm import client, jobs, monitor
from trilane.utils.validation import require_positive
from trilane.workspace.study import run_folders

TIME_IS_OVER = 75  # EX_TEMPFAIL: try again; monitor.sbatch then submits itself once more


def add_attach(parser: argparse.ArgumentParser) -> None:
    """The door `attach`."""
    parser.add_argument("job", help="a running job's id")
    parser.add_argument("what", choices=(*monitor.WHAT, "hostfile"))
    parser.add_argument("--slots", type=int, default=8, help="GPUs a node, for the hostfile")
    parser.add_argument("--json", action="store_true", help="print the command (or the hostfile) as JSON, run nothing")
    parser.set_defaults(call=attach)


def attach(args: argparse.Namespace) -> int:
    """Print the hostfile, or become the step that looks into the job."""
    if args.what == "hostfile":
        text = monitor.hostfile(args.job, args.slots)
        print(json.dumps({"hostfile": text}) if args.json else text, end="\n" if args.json else "")
        return 0
    command = monitor.attach(args.job, args.what)
    if args.json:
        print(json.dumps({"command": command}))
        return 0
    os.execvp(command[0], command)


def add_watch(parser: argparse.ArgumentParser) -> None:
    """The door `watch`."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder, or a study's name for all its runs")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between two looks")
    parser.add_argument("--seconds", type=float, default=7 * 86400.0, help="end after so many, with exit code 75")
    parser.add_argument("--stall", type=float, default=monitor.STALL_S, help="seconds without an iteration")
    parser.add_argument("--json", action="store_true", help="at the end, print every job as one JSON object")
    parser.set_defaults(call=watch)


def watch(args: argparse.Namespace) -> int:
    """A line for each change; 0 when all completed, 1 when one failed, 75 when the time is over or SLURM away."""
    for name in ("every", "seconds", "stall"):
        require_positive(name, getattr(args, name))
    folders = run_folders(args.runs)
    for line in monitor.watch(folders, args.every, args.seconds, args.stall):
        print(line, flush=True)
    try:
        found = jobs.status(folders)
    except client.SlurmError as error:
        print(error, flush=True)
        return TIME_IS_OVER
    if args.json:
        print(json.dumps({"jobs": list(map(asdict, found))}, indent=1))
    if any(job.verdict.is_active for job in found):
        return TIME_IS_OVER
    return 1 if any(job.has_failed for job in found) else 0
