"""RunLog: what one training run's log says, and how the run ended."""

import json
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from trilane.checks import require
from trilane.logs import megatron

INTEGERS = ("iteration", "train_iters", "consumed_samples", "global_batch_size", "skipped", "nan")


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """One run.

    iterations  a row per iteration line: iteration, consumed_samples, sec_per_it, lm_loss, grad_norm, ...
    memory      a row per rank: rank, allocated, max_allocated, reserved, max_reserved, in bytes
    status      "completed", "crashed", "cancelled", "timeout" or "unfinished"; `evidence` is the line that proves it
    """

    source: Path
    iterations: pd.DataFrame
    memory: pd.DataFrame
    status: str
    evidence: str


def read_log(path: Path | str) -> RunLog:
    """The run whose log is the file `path`; ValueError where it is missing or holds no iteration line."""
    path = Path(path)
    require(path.is_file(), "log", path, "no such file")
    iterations: list[dict[str, float]] = []
    memory: list[dict[str, float]] = []
    evidence = ""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            for kind, row in megatron.rows([line]):
                (iterations if kind == "iteration" else memory).append(row)
                evidence = line.strip() if kind == "iteration" else evidence
    require(bool(iterations), "log", path, "holds no iteration line of Megatron's dialect")
    table = pd.DataFrame(iterations)
    table = table.astype({name: "int64" for name in INTEGERS if name in table and table[name].notna().all()})
    complete = int(table["iteration"].iloc[-1]) == int(table["train_iters"].iloc[-1])
    return RunLog(
        source=path,
        iterations=table,
        memory=pd.DataFrame(memory).astype({"rank": "int64", "iteration": "int64"}) if memory else pd.DataFrame(),
        status="completed" if complete else "unfinished",
        evidence=evidence,
    )


def read_run_folder(folder: Path | str) -> RunLog:
    """The run of a run folder: its run.log, with the launcher's verdict of status.json where there is one.

    A run that ended before its first iteration has empty tables.
    """
    folder = Path(folder)
    verdict = json.loads((folder / "status.json").read_text()) if (folder / "status.json").exists() else {}
    try:
        log = read_log(folder / "run.log")
    except ValueError as error:
        empty = pd.DataFrame()
        log = RunLog(
            source=folder / "run.log", iterations=empty, memory=empty, status="unfinished", evidence=str(error)
        )
    status, evidence = verdict.get("status", log.status), verdict.get("evidence", log.evidence)
    return RunLog(source=log.source, iterations=log.iterations, memory=log.memory, status=status, evidence=evidence)
