"""Pre-flight checks of folders: data and run folder on a shared file system, free space, an unused run folder."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

from trilane.slurm.preflight.finding import JobCheck, JobFinding, Rule, refuse, warn
from trilane.slurm.preflight.resources import size
from trilane.workspace.checkpoints import FOLDER, latest
from trilane.workspace.run_folder import is_completed, is_started

BUILT_IN = ("stdlib", "mock")  # sources that need no files


def data(case: JobCheck) -> Iterator[JobFinding]:
    """The corpus exists."""
    source = case.plan.data.source
    if source in BUILT_IN:
        return
    path = Path(source)
    if not any(p.exists() for p in (path, Path(f"{source}.idx"), Path(f"{source}.bin"))):
        yield refuse("data", f"data.source={source}: no such file, folder or .bin/.idx pair", "name an existing one")


def shared(case: JobCheck) -> Iterator[JobFinding]:
    """The files that all nodes read or write are on a file system that all of them share."""
    source = case.plan.data.source
    paths = {"run folder": str(case.folder.resolve()), "data.folder": str(Path(case.plan.data.folder).resolve())}
    paths |= {} if source in BUILT_IN else {"data.source": str(Path(source).resolve())}
    for name, path in paths.items():
        own = next((place for place in case.site.local if Path(path).is_relative_to(place)), None)
        if own and case.nodes > 1:
            yield refuse("shared", f"{name} {path} lies below {own}, which is local to each node", "move it")
        elif own and not case.site.is_local:
            yield warn("shared", f"{name} {path} lies below {own}, which may differ on the compute node", "move it")


def space(case: JobCheck) -> Iterator[JobFinding]:
    """The checkpoints' bytes and inodes are free; under a project quota statvfs reports the project's.

    Left out: quotas by user or group, which only the site's own tools report.
    """
    place = next(p for p in (case.folder.resolve(), *case.folder.resolve().parents) if p.exists())
    need, (free, inodes) = size(case), available(place)
    message = f"checkpoints take up to {need / 1e9:.3g} GB, {place} has {free / 1e9:.3g} GB free"
    if need > free:
        yield refuse("disk", message, "smaller keep_last, larger save_interval, or another file system")
    elif need > free / 2:
        yield warn("disk", message, "smaller keep_last, or delete files")
    ranks, run = case.plan.topology.gpus, case.plan.run
    kept = 1 + (min(run.keep_last or 10**9, run.goal // run.save_interval) if run.save_interval else 0)
    files = kept * (2 * ranks + 3)
    if files > inodes:
        message = f"checkpoints take {files} files, {place} has {inodes:.0f} inodes free"
        yield refuse("inodes", message, "delete files, or a smaller keep_last")


def available(place: Path) -> tuple[float, float]:
    """Free bytes and inodes of the file system of `place`; infinite inodes where it does not count them."""
    stat = os.statvfs(place)
    return stat.f_bavail * stat.f_frsize, stat.f_favail if stat.f_files else math.inf


def free(case: JobCheck) -> Iterator[JobFinding]:
    """The run folder is unused, or its run can be resumed."""
    folder = case.folder
    if is_completed(folder):
        yield refuse("run folder", f"{folder} holds a completed run", "take a new run folder")
    elif is_started(folder) and latest(folder / FOLDER) is None:
        message = (
            f"{folder} holds a run without a checkpoint: its files move to attempts/, and it starts from the beginning"
        )
        yield warn("run folder", message, "take a new run folder to keep both")


RULES: tuple[Rule, ...] = (data, shared, space, free)
