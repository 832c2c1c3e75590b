"""`trilane debug`: hangs, slow nodes, bad restarts."""

from dataclasses import asdict
from pathlib import Path

import click

from trilane.cli.options import FILE, Group, Number, Whole, emit, grid_options, json_option, option, plan_argument
from trilane.utils.validation import require, require_known
from trilane.workspace import rank_grid
from trilane.workspace.rank_grid import Grid


@click.group(cls=Group)
def debug() -> None:
    """Find the cause of a hang, a slow node, a loss spike after a restart."""


def grid_of(tp: int | None, pp: int | None, dp: int | None, gpus_per_node: int) -> Grid | None:
    """The grid that the options give; None where they give none."""
    if not (tp or pp or dp):
        return None
    return rank_grid.regular(tp or 1, pp or 1, dp or 1, gpus_per_node)


@debug.command()
@click.argument("folder", type=FILE)
@grid_options
@json_option
def hang(folder: Path, tp: int | None, pp: int | None, dp: int | None, gpus_per_node: int, as_json: bool) -> None:
    """Print which ranks and nodes cause a hang: the stacks of all ranks, merged and judged.

    FOLDER is a run folder, or holds dumps of py-spy, faulthandler or NCCL.
    """
    from trilane.diagnose.hang.verdict import diagnose_hang

    verdict = diagnose_hang(folder, grid_of(tp, pp, dp, gpus_per_node))
    emit(as_json, verdict.to_json, verdict.to_text)


@debug.command()
@click.argument("folder", type=FILE)
@option("--job", default="", help="its SLURM job: dump all its nodes by a second step of that job")
@option("--commands", is_flag=True, help="only print the commands (srun, pdsh, ds_ssh)")
@option("--here", type=FILE, metavar="STACKS", help="dump this host's ranks there, no more")
@json_option
def capture(folder: Path, job: str, commands: bool, here: Path | None, as_json: bool) -> None:
    """Take the stacks of the running job of the run folder FOLDER, and judge them."""
    from trilane.config.plan import read_plan
    from trilane.diagnose.hang.capture import capture_here
    from trilane.diagnose.hang.verdict import diagnose_hang
    from trilane.slurm import monitor

    folder = folder.resolve()
    plan = read_plan(folder / "plan.json")
    if here is not None:
        capture_here(folder, here)
    elif commands:
        text = monitor.capture_commands(folder, plan, job)
        emit(as_json, lambda: {"commands": text.splitlines()}, lambda: text)
    else:
        stacks = monitor.capture_job(folder, plan, job)
        verdict = diagnose_hang(stacks)
        emit(as_json, verdict.to_json, lambda: f"{stacks}\n{verdict.to_text()}")


@debug.command()
@click.argument("folder", type=FILE)
@grid_options
@option("--spares", type=Whole(), help="spare nodes: plan the search for one bad node, too")
@option("--results", default="", metavar="good,bad,...", help="the results of the restarts so far")
@json_option
def stragglers(
    folder: Path,
    tp: int | None,
    pp: int | None,
    dp: int | None,
    gpus_per_node: int,
    spares: int | None,
    results: str,
    as_json: bool,
) -> None:
    """Print which rank, node or link makes the others wait, from a run folder with phase times (run.timers)."""
    from trilane.diagnose.stragglers.node_swaps import resume_search
    from trilane.diagnose.stragglers.stragglers import find_stragglers
    from trilane.workspace.phase_times import read_phase_times

    require(bool(spares) or not results, "results", results, "needs --spares")
    grid, seconds = read_phase_times(folder, grid_of(tp, pp, dp, gpus_per_node))
    slow = find_stragglers(grid, seconds)
    search = resume_search(slow.nodes(grid), spares, [*filter(None, results.split(","))]) if spares else None
    values = {"ranks": len(seconds), "stragglers": [asdict(one) for one in slow]}
    values["search"] = search.to_json() if search else None
    emit(as_json, lambda: values, lambda: "\n".join([slow.to_text(), *([search.to_text()] if search else [])]))


@debug.command()
@click.argument("folder", type=FILE)
@json_option
def calls(folder: Path, as_json: bool) -> None:
    """Print the last call of each rank, from traces of Python's trace module of any size, or a run's ranks/*.calls."""
    from trilane.diagnose.hang.call_trace import calls_text, groups, last_calls

    found = last_calls(folder)
    places = [{"function": f, "line": line, "ranks": ranks} for f, line, ranks in groups(found)]
    values = {"groups": places, "calls": [asdict(call) for call in found]}
    emit(as_json, lambda: values, lambda: calls_text(found))


@debug.command()
@click.argument("before", metavar="A", type=FILE)
@click.argument("after", metavar="B", type=FILE)
@json_option
def restart(before: Path, after: Path, as_json: bool) -> int:
    """Compare what was saved (A) with what a restart loaded (B), by rank and tensor; exit code 1 where they differ.

    Each is a run folder, a checkpoint, or a folder of fingerprints.
    """
    from trilane.diagnose.restart.compare import compare_restart

    found = compare_restart(before, after)
    emit(as_json, found.to_json, found.to_text)
    return 1 if found.findings else 0


@debug.command()
@plan_argument
@option("--prepare", type=FILE, metavar="FOLDER", help="only write both runs, and print the commands that start them")
@json_option
def rehearse(plan: Path, prepare: Path | None, as_json: bool) -> int:
    """Train, save, load and compare PLAN's engine and topology at tiny width; exit code 1 where they differ."""
    from trilane.config.plan import read_plan
    from trilane.experiments import rehearse as rehearsal

    if prepare:
        text = rehearsal.prepare(read_plan(plan), prepare.resolve())
        emit(as_json, lambda: {"commands": text.splitlines()}, lambda: text)
        return 0
    done = rehearsal.rehearse_here(read_plan(plan))
    emit(as_json, lambda: rehearsal.to_json(done), lambda: rehearsal.to_text(done))
    return 1 if done.problem or (done.audit and done.audit.findings) else 0


@debug.command()
@plan_argument
@option("--axes", default="layers,hidden,dp,gbs,blocking", help="what to shrink")
@option("--timeout", type=Number(), default=600.0, help="seconds for a job")
@option("--out", type=FILE, help="folder of the jobs (default: <plan>-bisect)")
@option("--dry-run", is_flag=True, help="only print what would be tried")
@json_option
def bisect(plan: Path, axes: str, timeout: float, out: Path | None, dry_run: bool, as_json: bool) -> None:
    """Shrink the hanging PLAN in short jobs until the boundary between what works and what hangs is known."""
    from trilane.config.plan import read_plan
    from trilane.experiments import bisect as bisection

    read, names = read_plan(plan), tuple(axes.split(","))
    for name in names:
        require_known("axis", name, bisection.AXES)
    if dry_run:
        text = bisection.tried(read, names)
        emit(as_json, lambda: {"tried": text.splitlines()}, lambda: text)
        return
    folder = out or plan.with_name(f"{plan.stem}-bisect")
    require(not folder.exists(), "out", folder, "exists; name another")
    report = bisection.bisect(read, names, bisection.local_runner(folder, timeout))
    emit(as_json, lambda: asdict(report), lambda: str(report))
