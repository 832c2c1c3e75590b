"""`trilane slurm job`: what the job scripts ask: may this attempt begin, on which nodes, and how did it end."""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from trilane.cli.options import FOLDER, JSON, Group, command, emit, number, option, whole
from trilane.utils.tables import one_line

job = Group("job", help="For the job scripts: may this attempt begin, on which nodes, and how did it end.")


@command(job, FOLDER, JSON)
def begin(folder: Path, as_json: bool) -> None:
    """Print whether the attempt of the run folder may begin."""
    from trilane.slurm import attempt

    decision = attempt.begin(folder)
    emit(as_json, {"verdict": decision}, decision, indent=None)


TEST = option("--test", "tests", is_flag=True, help="test the nodes first, by steps of srun with the arguments SRUN")
GPUS = option("--gpus", type=whole(0), default=0, help="GPUs of a node that the test is to use; 0: a core")
SRUN = click.argument("srun", nargs=-1, type=click.UNPROCESSED)
CODE = option("--code", type=whole(-255, 255), default=0, help="the training's exit code")
COUNT = option("--count", type=whole(), required=True, help="nodes that train")
HERE = option("--here", is_flag=True, help="on this node, not by a step on another")


@command(job, FOLDER, SRUN, CODE, TEST, GPUS, JSON)
def end(folder: Path, srun: Sequence[str], code: int, tests: bool, gpus: int, as_json: bool) -> None:
    """Write and print how the attempt ended."""
    from trilane.slurm import attempt, node_test
    from trilane.slurm import nodes as job_nodes

    outcome = attempt.end(folder, code, test=node_test.tester(gpus, srun) if tests else None)
    text = f"{outcome.status} after {outcome.seconds:.0f} s: {outcome.evidence}"
    again = "again: a spare takes the place of a node; " if job_nodes.goes_on(folder, job_nodes.job_id()) else ""
    emit(as_json, asdict(outcome), again + text, indent=None)


@command(job, FOLDER, SRUN, COUNT, TEST, GPUS)
def nodes(folder: Path, srun: Sequence[str], count: int, tests: bool, gpus: int) -> None:
    """Print the nodes of the job that train next, as a SLURM node list; on stderr those that are left out, and why."""
    from trilane.slurm import node_test
    from trilane.slurm import nodes as job_nodes

    chosen, lines = job_nodes.start_nodes(folder, count, node_test.tester(gpus, srun) if tests else None)
    for line in lines:
        print(one_line(line), file=sys.stderr)
    print(chosen)


@command(job, FOLDER, option("--every", type=number(), default=30.0, help="seconds between two looks"), HERE)
def guard(folder: Path, every: float, here: bool) -> None:
    """Requeue the job when its first node, on which its script runs, has died; from another node, until ended."""
    from trilane.slurm import nodes as job_nodes

    if here:
        job_nodes.guard_first_node(folder, every)
    else:
        job_nodes.guard(folder.resolve(), every)
