"""Paths to measured runs: which files hold one, and what each holds."""

import glob
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trilane.analysis.measure import Measurement, measure, measure_log
from trilane.analysis.steady_state import WARM_UP
from trilane.config.cluster import Gpu
from trilane.config.plan import read_plan
from trilane.logs.dialects import candidates
from trilane.logs.run import NoIterations
from trilane.logs.written_tables import read_runs
from trilane.utils.progress import progress
from trilane.utils.validation import require


@dataclass(frozen=True, kw_only=True)
class Read:
    """The runs of a path, or why it could not be read; `advice` where it holds no iteration, lines of text."""

    path: Path
    runs: list[Measurement] = field(default_factory=list)
    error: str = ""
    advice: str = ""


def measure_path(path: Path | str, warm_up: int = WARM_UP, gpu: Gpu | None = None) -> list[Measurement]:
    """The measured runs of a path: one of a run folder, its run.log or its steps.jsonl, those of any other log.

        measure_path("slurm-4711.out")[0].sec_per_it

    `gpu` is the card where another log does not name it. Raises ValueError where there is no run.
    """
    path, ours = Path(path), ("run.log", "steps.jsonl")
    folder = path if path.is_dir() else path.parent if path.name in ours else None
    if folder and _is_run(folder):
        return [measure(folder, warm_up)]
    if path.is_dir():
        path = next((path / name for name in ours if (path / name).is_file()), path)
        require(path.is_file(), "run", path, f"holds neither {' nor '.join(ours)}; `logs table` reads folders of logs")
    return [measure_log(log, None, warm_up, gpu=gpu) for log in read_runs(path)]


def measure_all(paths: Sequence[Path], warm_up: int = WARM_UP, gpu: Gpu | None = None) -> list[Read]:
    """What each path holds, in their order."""
    return [_read(path, warm_up, gpu) for path in progress(paths, "logs", "log")]


def _read(path: Path, warm_up: int, gpu: Gpu | None) -> Read:
    try:
        runs = measure_path(path, warm_up, gpu)
    except (ValueError, OSError) as error:
        advice = candidates.advice(path) if isinstance(error, NoIterations) else ""
        reason = f"log={path}: {error.strerror}" if isinstance(error, OSError) else str(error)
        return Read(path=path, error=reason, advice=advice)
    empty = not any(len(m.log.iterations) or len(m.log.bandwidth) or m.log.summary for m in runs)
    return Read(path=path, runs=runs, advice=candidates.advice(path) if empty else "")


def files(logs: str) -> list[Path]:
    """The files and run folders that a path or a glob matches, by name."""
    found = sorted(map(Path, glob.glob(str(Path(logs).expanduser()), recursive=True)))
    return [file for path in found for file in (below(path) if path.is_dir() and not _is_run(path) else [path])]


def below(folder: Path) -> list[Path]:
    """The run folders below a folder, and the files outside them whose names do not show that they are no logs."""
    no_logs = (".json", ".py", ".md", ".ipynb", ".html", ".png", ".csv", ".pt", ".bin", ".idx", ".sbatch", ".sh")
    every = sorted(folder.rglob("*"))
    runs = [path for path in (folder, *every) if _is_run(path)]
    # a sweep or chain keeps its code beside its sums
    others = {*runs, *(path.parent for path in every if path.name == "SHA256SUMS")}
    alone = (path for path in every if path.suffix not in no_logs and path.name[0] != ".")
    return [*runs, *(path for path in alone if path.is_file() and others.isdisjoint(path.parents))]


def _is_run(folder: Path) -> bool:
    try:
        return (folder / "run.log").is_file() and bool(read_plan(folder / "plan.json"))
    except ValueError:
        return False  # the log alone can still be read
