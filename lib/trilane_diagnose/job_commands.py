"""`trilane slurm job`: what the job scripts ask."""

import itertools
import sys
from dataclasses import asdict
from pathlib import Path

from trilane.cli.app import Answer, Group, command, note
from trilane.config.options import option
from trilane.slurm import attempt
from trilane_diagnose import node_test
from trilane_diagnose import nodes as nodes_of_job

GROUP = Group(
    "job",
    hidden=True,
    help="For the job scripts: may this attempt begin, on which nodes, and how did it end.",
)
SRUN = option((), argument="[SRUN...]")
TEST = option(False, "test the nodes first, by steps of srun with the arguments SRUN", name="test")
GPUS = option(0, "GPUs of a node that the test is to use; 0: a core", minimum=0)


@command(GROUP)
def begin(folder: Path) -> Answer:
    """Print whether the attempt of the run folder may begin."""
    decision = attempt.begin(folder)
    return Answer({"verdict": decision}, decision)


@command(GROUP)
def end(
    folder: Path,
    srun: tuple[str, ...] = SRUN,
    code: int = option(0, "the training's exit code", minimum=-255, maximum=255),
    tests: bool = TEST,
    gpus: int = GPUS,
) -> Answer:
    """Write and print how the attempt ended."""
    test = node_test.tester(gpus, srun) if tests else None
    outcome = nodes_of_job.end(folder, code, test=test)
    text = f"{outcome.status} after {outcome.seconds:.0f} s: {outcome.evidence}"
    if nodes_of_job.goes_on(folder):
        text = f"again: {text}"
    return Answer(asdict(outcome), text)


@command(GROUP)
def nodes(
    folder: Path,
    srun: tuple[str, ...] = SRUN,
    count: int = option(help="nodes that train", minimum=1),
    tests: bool = TEST,
    gpus: int = GPUS,
) -> None:
    """Print the nodes of the job that train next, as a SLURM node list; on stderr those that are
    left out, and why.
    """
    test = node_test.tester(gpus if tests else None, srun)
    chosen, lines = nodes_of_job.start_nodes(folder, count, test)
    note(lines)
    print(chosen)


@command(GROUP, "watch-step")
def watch_step(folder: Path, first: str) -> None:
    """Print "end" as soon as only dead nodes have not ended the step, by srun's messages: FIRST,
    and those on stdin.
    """
    if nodes_of_job.only_dead_are_left(folder, itertools.chain([first], sys.stdin)):
        print("end: only dead nodes are left")


@command(GROUP)
def guard(
    folder: Path,
    every: float = option(30.0, "polling interval (s)", above=0),
    here: bool = option(False, "on this node, not by a step on another"),
) -> None:
    """Requeue the job when its first node, on which its script runs, has died; from another node,
    until ended.
    """
    if here:
        nodes_of_job.guard_first_node(folder, every)
    else:
        nodes_of_job.guard(folder.resolve(), every)
