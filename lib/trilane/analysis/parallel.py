"""Many logs, read by several processes with a progress bar; every iteration as CSV, in constant memory."""

import csv
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trilane.analysis.collect import measure_path
from trilane.analysis.measure import KEEP
from trilane.logs import candidates
from trilane.logs.plausibility import Problem
from trilane.logs.run import INTEGERS, NoIterations, RunLog

LARGE = 50_000_000  # bytes in several files from which other processes pay off
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
    sizes = [Path(path).stat().st_size if Path(path).is_file() else 0 for path in paths]
    workers = min(len(os.sched_getaffinity(0)), len(paths)) if sum(sizes) > LARGE else 1
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") if out else nullcontext() as folder:
        jobs = [(path, Path(folder) / str(i) if folder else None) for i, path in enumerate(paths)]
        found = _pooled(jobs, workers) if workers > 1 else [_read(*job) for job in _shown(jobs)]
        if out and (parts := [part for one in found for part in one.parts]):
            _join(parts, out)
    return found


def _shown(jobs: Sequence[Any], done: Iterator[Any] | None = None) -> Any:
    from tqdm import tqdm

    hidden = not sys.stderr.isatty() and len(jobs) < SHOWN
    every = 0.1 if sys.stderr.isatty() else 5.0
    return tqdm(done or jobs, total=len(jobs), unit="log", mininterval=every, disable=hidden or len(jobs) < 2)


def _pooled(jobs: Sequence[tuple], workers: int) -> list[Read]:
    # a fork has numpy and pandas already; nothing here has started a thread
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        places = {pool.submit(_read, *job): place for place, job in enumerate(jobs)}
        for done in _shown(jobs, as_completed(places)):
            done.result()
        return [job.result() for job, _ in sorted(places.items(), key=lambda item: item[1])]


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
        table.to_csv(path, mode="a", header=start == 0, index=False)


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


def record_text(values: dict[str, Any]) -> str:
    """A run's record in three lines, and one for each of its problems."""
    rates = ", ".join(f"{rate:.1f} TFLOP/s/GPU {name}" for name, rate in values["tflops"].items() if rate is not None)
    parts = (
        f"{values['iterations']} iterations",
        "" if values["sec_per_it"] is None else f"{values['sec_per_it']:.4g} s/it",
        rates,
        "" if values["max_memory_gib"] is None else f"{values['max_memory_gib']:.2f} GiB",
        "" if values["last_loss"] is None else f"loss {values['last_loss']:.4f}",
        *(f"validation loss {row['lm_loss']:.4f}" for row in values["validation"][-1:] if row["lm_loss"] is not None),
    )
    numbers = ", ".join(filter(None, parts))
    wrong = "".join(f"\n  problem: {Problem(**problem)}" for problem in values["problems"])
    head = f"{values['file']}: {values['status']} ({values['dialect']})\n  {numbers}\n  {values['evidence']}"
    return f"{head}{_places(values)}{wrong}"


def _places(values: dict[str, Any]) -> str:
    """Lines with node, GPU and --exclude of an ending, and with who did not come to a collective."""
    named = (
        ("node ", ", ".join(values["hosts"])),
        ("GPU ", ", ".join(values["gpus"])),
        ("--exclude=", values["exclude"]),
    )
    where = ", ".join(word + text for word, text in named if text)
    return "".join(f"\n  {line}" for line in (*filter(None, [where]), *values["collectives"]))
