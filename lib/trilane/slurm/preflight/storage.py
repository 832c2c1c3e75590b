"""What the guard asks of folders: is the data where every node sees it, is there room, is the run folder free?"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

from trilane.slurm.preflight.finding import JobCheck, JobFinding, Rule, refuse, warn
from trilane.slurm.preflight.resources import size
from trilane.workspace.checkpoints import FOLDER, latest
from trilane.workspace.run_folder import is_completed, is_started

MADE = ("stdlib", "mock")  # sources that every machine has


def data(case: JobCheck) -> Iterator[JobFinding]:
    """The corpus exists."""
    source = case.plan.data.source
    if source in MADE:
        return
    path = Path(source)
    if not any(p.exists() for p in (path, Path(f"{source}.idx"), Path(f"{source}.bin"))):
        yield refuse("data", f"data.source={source}: no such file, folder or .bin/.idx pair", "name an existing one")


def shared(case: JobCheck) -> Iterator[JobFinding]:
    """What all nodes read or write lies on a file system that all of them see."""
    source = case.plan.data.source
    paths = {"run folder": str(case.folder.resolve()), "data.folder": str(Path(case.plan.data.folder).resolve())}
    paths |= {} if source in MADE else {"data.source": str(Path(source).resolve())}
    for name, path in paths.items():
        own = next((place for place in case.site.local if Path(path).is_relative_to(place)), None)
        if own and case.nodes > 1:
            yield refuse("shared", f"{name} {path} lies below {own}, which each node has for itself", "move it")
        elif own and not case.site.is_local:
            yield warn("shared", f"{name} {path} lies below {own}, which may not be the compute node's", "move it")


def room(case: JobCheck) -> Iterator[JobFinding]:
    """Bytes and inodes of the checkpoints against what is left. Under a project quota statvfs counts the project's.

    Left out: quotas by user or group, which only the site's own tools know.
    """
    place = next(p for p in (case.folder.resolve(), *case.folder.resolve().parents) if p.exists())
    need, (free, inodes) = size(case), left(place)
    says = f"checkpoints take up to {need / 1e9:.3g} GB, {place} has {free / 1e9:.3g} GB left"
    if need > free:
        yield refuse("disk", says, "smaller keep_last, larger save_interval, or another file system")
    elif need > free / 2:
        yield warn("disk", says, "smaller keep_last, or make room")
    ranks, run = case.plan.topology.gpus, case.plan.run
    kept = 1 + (min(run.keep_last or 10**9, run.goal // run.save_interval) if run.save_interval else 0)
    files = kept * (2 * ranks + 3)
    if files > inodes:
        says = f"checkpoints take {files} files, {place} has {inodes:.0f} inodes left"
        yield refuse("inodes", says, "remove files, or a smaller keep_last")


def left(place: Path) -> tuple[float, float]:
    """Bytes and inodes that the file system of `place` has left; endless inodes where it does not count them."""
    stat = os.statvfs(place)
    return stat.f_bavail * stat.f_frsize, stat.f_favail if stat.f_files else math.inf


def free(case: JobCheck) -> Iterator[JobFinding]:
    """Nobody ran here, or what ran here can go on."""
    folder = case.folder
    if is_completed(folder):
        yield refuse("run folder", f"{folder} holds a completed run", "take a new run folder")
    elif is_started(folder) and latest(folder / FOLDER) is None:
        says = f"{folder} holds a run without a checkpoint: what it left moves to attempts/, and it begins anew"
        yield warn("run folder", says, "take a new run folder to keep them side by side")


RULES: tuple[Rule, ...] = (data, shared, room, free)
