"""`trilane measure`: this machine or cluster, the speed of a plan, the equality of the engines."""

import os
import sys
from pathlib import Path

import click

from trilane.cli.options import JSON, PLAN, Group, command, emit, option, whole
from trilane.config.engines import ENGINES
from trilane.utils.validation import require_known

NAME = option("--name", default="", help="of the cluster; default: the host's without digits, or local on one machine")
ITERATIONS = option("--iterations", type=whole(0), default=0, help="train so many at the full batch (0: as planned)")
LEAVE_OUT = option("--leave-out", type=whole(0), default=5, help="first iterations left out")
measure = Group("measure", help="Measure this machine or cluster, the speed of a plan, the equality of the engines.")


@command(measure, click.argument("out", metavar="[OUT.json]", default=""), NAME)
def machine(out: str, name: str) -> None:
    """Measure this machine, or under torchrun or srun this cluster, into OUT.json, which describes it as a cluster."""
    # In place of this process: torchrun and srun count on the rank that they started. Only the engine imports torch.
    os.execv(sys.executable, [sys.executable, "-m", "trilane.engine.bench", out, name])


@command(measure, PLAN, ITERATIONS, LEAVE_OUT, JSON)
def plan(plan: Path, iterations: int, leave_out: int, as_json: bool) -> int:
    """Train PLAN and print how fast it was; the folder of a finished run, also of another machine, is only measured."""
    from trilane.experiments import benchmark

    found = benchmark.benchmark(plan, iterations, leave_out)
    return emit(as_json, found, benchmark.text(found), failed=found["status"] != "completed")


@command(measure, option("--engines", default="all", help=f"all, or some of {','.join(ENGINES)}"), JSON)
def engines(engines: str, as_json: bool) -> int:
    """Train the equality table of the engines here: each row's losses against one reference. Progress is on stderr.

    Exit code 1 where a row exceeds its bound or did not train.
    """
    from trilane.experiments.parity import Result, rows, summary, verify

    names = ENGINES if engines == "all" else tuple(name.strip() for name in engines.split(","))
    for name in names:
        require_known("engines", name, ("all", *ENGINES))
    results, left_out = list[Result](), list[str]()
    for found in verify(rows(names)):
        left_out += [found] if isinstance(found, str) else []
        results += [found] if isinstance(found, Result) else []
        print(found if isinstance(found, str) else found.line(), file=sys.stderr, flush=True)
    values = {"rows": [result.record() for result in results], "left_out": left_out}
    failed = not results or not all(result.ok for result in results)
    return emit(as_json, values, summary(results, left_out), indent=2, failed=failed)
