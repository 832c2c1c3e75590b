"""`trilane debug`: hangs, slow nodes, bad restarts."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from trilane.cli.options import FILE, FOLDER, JSON, PLAN, Choice, Group, command, emit, number, option, together, whole
from trilane.config.plan import read_plan
from trilane.utils.validation import require, require_known
from trilane.workspace import rank_grid
from trilane.workspace.rank_grid import Grid

MISSING = "where the folder has no topology.json or plan.json"
GRID = together(
    *(option(f"--{name}", type=whole(), default=None, help=MISSING) for name in ("tp", "pp", "dp")),
    option("--gpus-per-node", type=whole(), default=8, help="with --tp, --pp, --dp"),
)
PREPARE = option("--prepare", type=FILE, metavar="FOLDER", help="only write both runs, and print their commands")
debug = Group("debug", help="Find the cause of a hang, a slow node, a loss spike after a restart.")


def grid_of(tp: int | None, pp: int | None, dp: int | None, gpus_per_node: int) -> Grid | None:
    """The grid that the options give; None where they give none."""
    return rank_grid.regular(tp or 1, pp or 1, dp or 1, gpus_per_node) if tp or pp or dp else None


@command(debug, FOLDER, GRID, JSON)
def hang(folder: Path, as_json: bool, **grid: Any) -> None:
    """Print which ranks and nodes cause a hang: the stacks of all ranks, merged and analyzed.

    FOLDER is a run folder, or holds dumps of py-spy, faulthandler or NCCL.
    """
    from trilane.diagnose.hang import diagnose_hang

    verdict = diagnose_hang(folder, grid_of(**grid))
    emit(as_json, verdict.to_json(), verdict.to_text())


@command(
    debug,
    FOLDER,
    option("--job", default="", help="its SLURM job: dump all its nodes by a second step of that job"),
    option("--commands", is_flag=True, help="only print the commands (srun, pdsh, ds_ssh)"),
    option("--here", type=FILE, metavar="STACKS", help="dump this host's ranks there, no more"),
    option("--what", type=Choice(("stacks", "memory", "processes", "hostfile")), default="stacks"),
    JSON,
)
def capture(folder: Path, job: str, commands: bool, here: Path | None, what: str, as_json: bool) -> None:
    """Take the stacks of the running job of the run folder FOLDER, and analyze them.

    With --job also the GPUs' memory, the ranks' processes, or the nodes as a hostfile of DeepSpeed and pdsh.
    """
    from trilane.diagnose.capture import capture_here
    from trilane.diagnose.hang import diagnose_hang
    from trilane.slurm import monitor

    folder = folder.resolve()
    plan = read_plan(folder / "plan.json")
    if what != "stacks":
        text = monitor.look(job, what, plan)
        emit(as_json, {what: text.splitlines()}, text.removesuffix("\n"))
    elif here is not None:
        capture_here(folder, here)
    elif commands:
        text = monitor.capture_commands(folder, plan, job)
        emit(as_json, {"commands": text.splitlines()}, text)
    else:
        stacks = monitor.capture_job(folder, plan, job)
        verdict = diagnose_hang(stacks)
        emit(as_json, verdict.to_json(), f"{stacks}\n{verdict.to_text()}")


@command(debug, FOLDER, GRID, JSON)
def stragglers(folder: Path, as_json: bool, **grid: Any) -> None:
    """Print which rank, node or link makes the others wait, from a run folder with phase times (run.timers)."""
    from trilane.diagnose.stragglers import find_stragglers
    from trilane.workspace.phase_times import read_phase_times

    ranks, seconds = read_phase_times(folder, grid_of(**grid))
    slow = find_stragglers(ranks, seconds)
    emit(as_json, {"ranks": len(seconds), "stragglers": [one.to_json() for one in slow]}, slow.to_text())


@command(debug, FOLDER, JSON)
def calls(folder: Path, as_json: bool) -> None:
    """Print the last call of each rank, from traces of Python's trace module of any size."""
    from trilane.diagnose.stacks import last_calls

    found = last_calls(folder)
    emit(as_json, found.to_json(), found.to_text())


@command(debug, click.argument("before", metavar="A", type=FILE), click.argument("after", metavar="B", type=FILE), JSON)
def restart(before: Path, after: Path, as_json: bool) -> int:
    """Compare what was saved (A) with what a restart loaded (B), by rank and tensor; exit code 1 where they differ.

    Each is a run folder, a checkpoint, or a folder of fingerprints.
    """
    from trilane.diagnose.restart import compare_restart

    found = compare_restart(before, after)
    return emit(as_json, found.to_json(), found.to_text(), failed=found.findings)


@command(debug, PLAN, PREPARE, JSON)
def rehearse(plan: Path, prepare: Path | None, as_json: bool) -> int:
    """Train, save, load and compare PLAN's engine and topology at tiny width; exit code 1 where they differ."""
    from trilane.launch import rehearsal

    if prepare:
        text = rehearsal.prepare(read_plan(plan), prepare.resolve())
        return emit(as_json, {"commands": text.splitlines()}, text)
    done = rehearsal.rehearse_here(read_plan(plan))
    failed = done.problem or (done.audit and done.audit.findings)
    return emit(as_json, done.to_json(), done.to_text(), failed=failed)


@command(
    debug,
    PLAN,
    option("--axes", default="layers,hidden,dp,gbs,blocking", help="what to shrink"),
    option("--timeout", type=number(), default=600.0, help="seconds for a job"),
    option("--out", type=FILE, help="folder of the jobs (default: <plan>-bisect)"),
    option("--dry-run", is_flag=True, help="only print what would be tried"),
    JSON,
)
def bisect(plan: Path, axes: str, timeout: float, out: Path | None, dry_run: bool, as_json: bool) -> None:
    """Shrink the hanging PLAN in short jobs until the boundary between what works and what hangs is known."""
    from trilane.launch import bisection

    read, names = read_plan(plan), tuple(axes.split(","))
    for name in names:
        require_known("axis", name, bisection.AXES)
    if dry_run:
        text = bisection.tried(read, names)
        emit(as_json, {"tried": text.splitlines()}, text)
        return
    folder = out or plan.with_name(f"{plan.stem}-bisect")
    require(not folder.exists(), "out", folder, "exists; name another")
    report = bisection.bisect(read, names, bisection.local_runner(folder, timeout))
    emit(as_json, asdict(report), str(report))
