"""The parity table of the engines, trained on this machine and compared with the reference."""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trilane.config.cluster import Cluster
from trilane.config.plan import Plan
from trilane.experiments.parity_table import Row, Task, machine
from trilane.launch.local import environment
from trilane.utils.process import held_port


@dataclass(frozen=True, kw_only=True)
class WorkerPool:
    """A process that trains small plans in turn (engine/worker_pool.py), and the machine that it reports."""

    process: "subprocess.Popen[str]"
    machine: Cluster

    def run(self, processes: int, folder: Path, code: int = 0) -> str:
        """Train `folder`/plan.json in `processes` (0: the reference); "", or their output where an exit code is not
        `code`.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        with held_port() as port:
            self.process.stdin.write(f"{processes} {port} {folder}\n")
            self.process.stdin.flush()
            codes = self.process.stdout.readline().split()
        output = "\n".join(log.read_text(errors="replace") for log in sorted(folder.glob("*.log")))
        return "" if codes and set(codes) == {str(code)} else output or f"exit codes {' '.join(codes) or 'none'}"


@contextlib.contextmanager
def worker_pool() -> Iterator[WorkerPool]:
    """A worker pool inside the block; its workers end with it."""
    command, pipe = [sys.executable, "-m", "trilane.engine.worker_pool"], subprocess.PIPE
    with subprocess.Popen(command, env=environment(8), text=True, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        yield WorkerPool(process=process, machine=machine(**json.loads(process.stdout.readline())))


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of one row: the largest |difference of loss| over its iterations (None: did not train), and its time."""

    row: Row
    max_abs_diff: float | None
    seconds: float
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Whether every loss is within the row's bound; a NaN is not."""
        return self.max_abs_diff is not None and self.max_abs_diff <= self.row.bound

    def record(self) -> dict[str, Any]:
        """The row as JSON."""
        names = {"engine": self.row.engine, "topology": self.row.topology, "precision": self.row.precision}
        return {**names, "max_abs_diff": self.max_abs_diff, "seconds": round(self.seconds, 2)}

    def line(self) -> str:
        """The row as one line of text."""
        found = self.problem or f"{self.max_abs_diff:.1e}"
        verdict = "ok" if self.ok else f"above {self.row.bound:g}" if self.max_abs_diff is not None else "failed"
        names = f"{self.row.engine:15s} {self.row.precision:5s} {self.row.topology:45s}"
        return f"{names} {found:>9s}  {self.seconds:5.1f} s  {verdict}"


class ParityRunner:
    """Trains rows in folders of their own, and for each task once the reference that they are compared with."""

    def __init__(self, pool: WorkerPool, folder: Path) -> None:
        self._pool, self._folder, self._count = pool, folder, 0
        self._references: dict[Task, list[float]] = {}

    def result(self, row: Row) -> Result:
        """Train the row and compare its losses with the reference. ValueError where this machine cannot train it."""
        made = row.plan(self._pool.machine, str(self._folder / "data"))
        reference = self._reference(row.task)
        begin = time.monotonic()
        folder, problem = self._run(made, made.topology.gpus)
        seconds = time.monotonic() - begin
        if problem:
            return Result(row=row, max_abs_diff=None, seconds=seconds, problem=problem.strip().splitlines()[-1])
        losses = [json.loads(line)["lm_loss"] for line in (folder / "steps.jsonl").read_text().splitlines()]
        diffs = [abs(loss - right) for loss, right in zip(losses, reference, strict=True)]
        if any(diff != diff for diff in diffs):  # max() could ignore a NaN
            return Result(row=row, max_abs_diff=None, seconds=seconds, problem="a loss is not a number")
        return Result(row=row, max_abs_diff=max(diffs), seconds=seconds)

    def _reference(self, task: Task) -> list[float]:
        if task not in self._references:
            folder, problem = self._run(task.plan(self._pool.machine, str(self._folder / "data")), 0)
            assert not problem, problem
            self._references[task] = [loss for loss, _ in json.loads((folder / "truth.json").read_text())]
        return self._references[task]

    def _run(self, made: Plan, processes: int) -> tuple[Path, str]:
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        (folder / "plan.json").write_text(json.dumps(made.to_json()), encoding="utf-8")
        return folder, self._pool.run(processes, folder)


def verify(table: Sequence[Row]) -> Iterator[Result | str]:
    """The result of each row in turn; a line of text instead where this machine cannot train it."""
    with tempfile.TemporaryDirectory(prefix="trilane-verify-") as folder, worker_pool() as pool:
        runner = ParityRunner(pool, Path(folder))
        for row in table:
            try:
                yield runner.result(row)
            except ValueError as error:
                yield f"{row.label}: left out, {error}"


def summary(results: Sequence[Result], left_out: Sequence[str]) -> str:
    """The table as text, and how many rows are within their bound."""
    lines = [result.line() for result in results]
    held = sum(result.ok for result in results)
    return "\n".join([*lines, *left_out, f"{held} of {len(results)} rows within their bound; {len(left_out)} left out"])
