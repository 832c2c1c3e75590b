"""Paths to runs: which files hold one; many logs, read by several processes; every iteration as CSV."""

import csv
import glob
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trilane.analysis.measure import KEEP, Measurement, measure, measure_log
from trilane.analysis.steady_state import WARM_UP
from trilane.config.cluster import Gpu
from trilane.config.plan import read_plan
from trilane.documents.runs import read_runs
from trilane.logs.dialects import candidates
from trilane.logs.run import INTEGERS, NoIterations, RunLog
from trilane.utils.tables import csv_text
from trilane.utils.validation import require
from trilane.workspace.installation import SUMS
from trilane.workspace.run_folder import STEPS

T = TypeVar("T")
LARGE, MANY = 50_000_000, 64  # bytes in several files, or files, from which other processes pay off
NOT_LOGS = (".json", ".py", ".md", ".ipynb", ".html", ".png", ".csv", ".pt", ".bin", ".idx", ".sbatch", ".sh")
OURS = ("run.log", STEPS)  # in a run folder, next to plan.json
SHOWN = 16  # files from which progress is shown without a terminal
CHUNK = 50_000  # rows of a CSV file that are in memory


@dataclass(frozen=True, kw_only=True)
class Read:
    """One log: a record for each run, or why it could not be read; the CSV file of each run, where requested; what to
    do where no iteration was found (`advice`, lines of text)."""

    records: list[dict[str, Any]]
    error: str = ""
    advice: str = ""
    parts: tuple[Path, ...] = ()


def read_many(paths: Sequence[str], out: Path | None = None) -> list[Read]:
    """The measurements of all runs of the logs as JSON objects, in the logs' order; with `out`, all iterations as CSV.

    Large sets are read on all cores.
    """
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") if out else nullcontext() as folder:
        jobs = [(path, Path(folder) / str(i) if folder else None) for i, path in enumerate(paths)]
        found = on_all_cores(_read, jobs)
        if out and (parts := [part for one in found for part in one.parts]):
            _join(parts, out)
    return found


def on_all_cores(read: Callable[..., T], jobs: Sequence[tuple[Any, ...]]) -> list[T]:
    """`read(*job)` of each job, whose first value is a path, in their order; by several processes where that pays."""
    sizes = [Path(job[0]).stat().st_size if Path(job[0]).is_file() else 0 for job in jobs]
    workers = min(len(os.sched_getaffinity(0)), len(jobs)) if sum(sizes) > LARGE or len(jobs) > MANY else 1
    if workers < 2:
        return [read(*job) for job in _shown(jobs)]
    # a fork has numpy and pandas already; nothing here has started a thread
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        places = {pool.submit(read, *job): place for place, job in enumerate(jobs)}
        for done in _shown(jobs, as_completed(places)):
            done.result()
        return [job.result() for job, _ in sorted(places.items(), key=lambda item: item[1])]


def measure_path(
    path: Path | str,
    warm_up: int = WARM_UP,
    gpu: Gpu | None = None,
    keep: Collection[str] | None = None,
    spill: Path | None = None,
) -> list[Measurement]:
    """The measured runs of a path: one of a run folder, its run.log or its steps.jsonl, those of any other log.

    `gpu`, `keep` and `spill` (see logs.run.read_runs) hold for other logs. Raises ValueError where there is no run.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent if path.name in OURS else None
    if folder and _is_run(folder):
        return [measure(folder, warm_up)]
    if path.is_dir():
        path = next((path / name for name in OURS if (path / name).is_file()), path)
        require(path.is_file(), "run", path, f"holds neither {' nor '.join(OURS)}; `logs table` reads folders of logs")
    return [measure_log(log, None, warm_up, gpu=gpu) for log in read_runs(path, keep, spill)]


def files(logs: str) -> list[Path]:
    """The files and run folders that a path or a glob matches, by name."""
    found = sorted(map(Path, glob.glob(str(Path(logs).expanduser()), recursive=True)))
    return [file for path in found for file in (below(path) if path.is_dir() and not _is_run(path) else [path])]


def below(folder: Path) -> list[Path]:
    """The run folders below a folder, and the files outside them whose names do not show that they are no logs."""
    every = sorted(folder.rglob("*"))
    runs = [path for path in (folder, *every) if (path / "plan.json").is_file() and _is_run(path)]
    # SUMS: of the frozen code of a sweep or chain
    others = {*runs, *(path.parent for path in every if path.name == SUMS)}
    alone = (path for path in every if path.suffix not in NOT_LOGS and path.name[0] != ".")
    return [*runs, *(path for path in alone if path.is_file() and others.isdisjoint(path.parents))]


def _is_run(folder: Path) -> bool:
    """Whether the folder holds a plan that can be read, and a log."""
    try:
        return (folder / "run.log").is_file() and bool(read_plan(folder / "plan.json"))
    except ValueError:
        return False  # the log alone can still be read


def _shown(jobs: Sequence[Any], done: Iterator[Any] | None = None) -> Any:
    from tqdm import tqdm

    hidden = not sys.stderr.isatty() and len(jobs) < SHOWN
    every = 0.1 if sys.stderr.isatty() else 5.0
    return tqdm(done or jobs, total=len(jobs), unit="log", mininterval=every, disable=hidden or len(jobs) < 2)


def _read(path: str, folder: Path | None) -> Read:
    if folder:
        folder.mkdir()
    try:
        runs = measure_path(path, keep=KEEP, spill=folder)
    except NoIterations as error:
        return Read(records=[], error=str(error), advice=candidates.advice(Path(path)))
    except (ValueError, OSError) as error:
        return Read(records=[], error=str(error))
    empty = not any(len(m.log.iterations) or len(m.log.bandwidth) or m.log.summary for m in runs)
    advice = candidates.advice(Path(path)) if empty else ""
    parts = []
    for number, m in enumerate(runs, 1):
        if folder:
            parts.append(folder / f"{number}.csv")
            write_iterations(parts[-1], m.log, number)
    return Read(records=[m.to_json() for m in runs], parts=tuple(parts), advice=advice)


def write_iterations(path: Path, log: RunLog, number: int) -> None:
    """The iterations of a run as CSV, after the columns `file` and `run` (its `number`)."""
    import pandas as pd

    kept, spilled = log.iterations, log.spilled
    whole = {name for name in INTEGERS if name in spilled and _is_whole(spilled[name].read, len(kept))}
    for start in range(0, max(1, len(kept)), CHUNK):
        rows = kept.iloc[start : start + CHUNK]
        more = {name: column.read(start, start + len(rows)) for name, column in spilled.items()}
        more = {name: values.astype("int64") if name in whole else values for name, values in more.items()}
        table = pd.concat([rows, pd.DataFrame(more, index=rows.index)], axis=1)
        table.insert(0, "file", str(log.source))
        table.insert(1, "run", number)
        with path.open("a", encoding="utf-8", newline="") as file:
            file.write(csv_text(table, header=start == 0))


def _is_whole(read: Callable[[int, int], Any], rows: int) -> bool:
    steps = range(0, rows, CHUNK)
    return all(bool((abs(read(start, min(rows, start + CHUNK))) < 2**53).all()) for start in steps)


def _join(parts: Sequence[Path], out: Path) -> None:
    """One CSV file of several; a column that a part lacks is empty."""
    headers = [_header(part) for part in parts]
    names = list(dict.fromkeys(name for header in headers for name in header))
    with out.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        for part, header in zip(parts, headers, strict=True):
            with part.open(newline="") as source:
                if header == names:
                    source.readline()
                    shutil.copyfileobj(source, file, 1 << 20)
                else:
                    writer.writerows(csv.DictReader(source))


def _header(part: Path) -> list[str]:
    with part.open(newline="") as file:
        return next(csv.reader(file))
