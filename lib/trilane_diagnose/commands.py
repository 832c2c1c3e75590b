"""`trilane debug`: hangs, slow nodes, bad restarts."""

from pathlib import Path

from trilane.cli.app import Answer, Group, command
from trilane.config.options import option
from trilane.config.plan import read_plan
from trilane.utils.validation import require, require_known, require_new
from trilane.workspace import rank_grid
from trilane.workspace.heartbeat import read_beats
from trilane.workspace.status import known_status
from trilane_diagnose import bisection
from trilane_diagnose import capture as stacks
from trilane_diagnose.hang import diagnose_hang
from trilane_diagnose.incident import read_incident
from trilane_diagnose.restart import compare_restart
from trilane_diagnose.stacks import last_calls
from trilane_diagnose.stragglers import find_stragglers, read_phase_times

GROUP = Group("debug", help="Find the cause of a hang, a slow node, a loss spike after a restart.")
SIZES = "where the folder has no topology.json or plan.json"


@command(GROUP)
def hang(
    folder: Path,
    tp: int = option(0, SIZES, minimum=1),
    pp: int = option(0, SIZES, minimum=1),
    dp: int = option(0, SIZES, minimum=1),
    gpus_per_node: int = option(8, "with --tp, --pp, --dp", minimum=1),
) -> Answer:
    """Print which ranks and nodes cause a hang: the stacks of all ranks, merged and analyzed.

    FOLDER is a run folder, or holds dumps of py-spy, faulthandler or NCCL.
    """
    return Answer.of(diagnose_hang(folder, rank_grid.asked(tp, pp, dp, gpus_per_node)))


@command(GROUP)
def incident(folder: Path) -> Answer:
    """Print what happened: one verdict from logs, stacks, Flight Recorder and SLURM's accounting.

    FOLDER is a run folder, or holds copies of these files, such as what `sacct --parsable2`
    printed.
    """
    return Answer.of(read_incident(folder))


@command(GROUP)
def capture(folder: Path) -> Answer:
    """Take the stacks of the running job of the run folder FOLDER, on all its nodes, and analyze
    them.
    """
    folder = folder.resolve()
    plan = read_plan(folder / "plan.json")
    written = known_status(folder)
    has_ended = written and not written.status.is_active
    require(not has_ended, "folder", folder, "its run has ended: no process has a stack any more")
    rule = "no rank has given a sign of life (hang_timeout_s=0, or not started)"
    require(read_beats(folder), "folder", folder, rule)
    taken = stacks.capture(folder, plan)
    verdict = diagnose_hang(taken)
    return Answer(verdict.to_json(), f"{taken}\n{verdict.summary()}")


@command(GROUP)
def stragglers(folder: Path) -> Answer:
    """Print which rank or node makes the others wait, from a run folder with phase times
    (run.timers).
    """
    grid, seconds = read_phase_times(folder)
    slow = find_stragglers(grid, seconds)
    text = "\n".join(one.summary() for one in slow) or "no rank is slower than its peers"
    return Answer({"ranks": len(seconds), "stragglers": [one.to_json() for one in slow]}, text)


@command(GROUP)
def calls(folder: Path) -> Answer:
    """Print the last call of each rank, from traces of Python's trace module of any size."""
    return Answer.of(last_calls(folder))


@command(GROUP)
def restart(a: Path, b: Path) -> Answer:
    """Compare what was saved (A) with what a restart loaded (B), by rank and tensor; exit code 1
    where they differ.

    Each is a run folder, a checkpoint, or a folder of fingerprints.
    """
    comparison = compare_restart(a, b)
    return Answer.of(comparison, comparison.findings)


@command(GROUP)
def bisect(
    plan: Path,
    axes: str = option(",".join(bisection.AXES), "what to shrink"),
    timeout: float = option(600.0, "seconds for a job", above=0),
    out: Path | None = option(
        None, "folder of the jobs (default: <plan>-bisect)", metavar="FOLDER"
    ),
) -> Answer:
    """Shrink the hanging PLAN in short jobs until the boundary between what works and what hangs is
    known.
    """
    read = read_plan(plan)
    names = tuple(axes.split(","))
    for name in names:
        require_known("axis", name, bisection.AXES)
    folder = out or plan.with_name(f"{plan.stem}-bisect")
    require_new("out", folder, "name another")
    return Answer.of(bisection.bisect(read, names, bisection.local_runner(folder, timeout)))
