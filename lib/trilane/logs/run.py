"""RunLog: what one training run's log says, and how the run ended."""

import json
import re
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trilane.logs import endings, units
from trilane.logs.arguments import Value
from trilane.logs.devices import Device
from trilane.logs.partial_run import PartialRun
from trilane.logs.reader import Reader
from trilane.logs.stream import blocks
from trilane.logs.table import NAN, Column, Table
from trilane.utils.validation import require
from trilane.workspace.status import Status

if TYPE_CHECKING:
    import pandas as pd


INTEGERS = ("iteration", "train_iters", "consumed_samples", "consumed_tokens", "global_batch_size", "skipped", "nan")

DIALECTS = (
    "megatron-lm, megatron-deepspeed-2022, megatron-2021, deepspeedai, gpt-neox, deepspeed, hf-trainer, torchtitan, "
    "trilane, all_reduce_bench, nccl-tests"
)

CLOCKED = "seconds per iteration are the time between lines, by their time stamps or progress bars"
FRESH_S = 60.0  # a log written less long ago, or two iterations ago, is still being written


def _empty() -> "pd.DataFrame":
    import pandas as pd

    return pd.DataFrame()


@dataclass(frozen=True, kw_only=True)
class RunLog:
    """One run, in seconds, bytes and FLOP/s.

    iterations   a row per iteration line: iteration, consumed_samples, sec_per_it, lm_loss, grad_norm, ...; NaN where a
                 line does not say it (a skipped iteration has no loss)
    memory       a row per rank: rank, iteration, allocated, max_allocated, reserved, max_reserved; `max_` is the most
                 that the rank ever reported
    timers       a row per iteration: iteration, and each timer of the framework
    bandwidth    a row per trial and rank of a bandwidth bench
    devices      the GPUs that nvidia-smi shows
    summary      numbers that are said once: train_runtime and its like, the flops profiler's
    status       how it ended; `evidence` is the line that proves it, `rank` who said it (None where nobody did), and
                 `asked_bytes` what could not be had where memory ran out
    notes        what was put right in reading
    taped        more columns of the iterations, in files, where read_runs was told so
    """

    source: Path
    iterations: "pd.DataFrame"
    memory: "pd.DataFrame"
    status: Status
    evidence: str
    dialect: str = ""
    arguments: Mapping[str, Value] = field(default_factory=dict)
    timers: "pd.DataFrame" = field(default_factory=_empty)
    bandwidth: "pd.DataFrame" = field(default_factory=_empty)
    devices: tuple[Device, ...] = ()
    summary: Mapping[str, float] = field(default_factory=dict)
    rank: int | None = None
    asked_bytes: float = NAN
    notes: tuple[str, ...] = ()
    taped: Mapping[str, Column] = field(default_factory=dict)


NEEDED = ("iteration", "train_iters", "sec_per_it", "lm_loss", "samples_per_second", "global_batch_size", "epoch")


def read_runs(path: Path | str, keep: Collection[str] | None = None, spill: Path | None = None) -> list[RunLog]:
    """The runs whose log is the file `path`, in order; usually one. A file that is being written is read as it is.

    With `keep`, only these columns of the iterations, and those that the reading itself needs: memory for long logs.
    With a folder `spill`, the other columns are written there and come as `taped`.

    Raises ValueError where it is missing, empty, binary, or holds neither an iteration nor a line about an end.
    """
    path, reader = Path(path), Reader(None if keep is None else {*NEEDED, *keep}, spill)
    for block in blocks(path):
        reader.feed(block)
    drafts = reader.close()
    require(bool(drafts), "log", path, f"holds no iteration line; dialects tried: {DIALECTS}")
    age = time.time() - path.stat().st_mtime
    return [finish(draft, path, age if draft is drafts[-1] else float("inf")) for draft in drafts]


def read_log(path: Path | str) -> RunLog:
    """The run whose log is the file `path`, the last where there are several; raises ValueError as read_runs does."""
    return read_runs(path)[-1]


def read_run_folder(folder: Path | str) -> RunLog:
    """The run of a run folder: its run.log, with the verdict of status.json where there is one.

    Where the run was resumed, an iteration that was trained twice counts once, as it was trained last: that is what the
    run goes on from. A run that ended before its first iteration has empty tables.
    """
    folder = Path(folder)
    written = json.loads((folder / "status.json").read_text()) if (folder / "status.json").exists() else {}
    try:
        log = _joined(read_runs(folder / "run.log"))
    except ValueError as error:
        log = RunLog(
            source=folder / "run.log",
            iterations=_empty(),
            memory=_empty(),
            status=Status.UNFINISHED,
            evidence=str(error),
        )
    status, evidence = written.get("status", log.status), written.get("evidence", log.evidence)
    return replace(log, status=Status(status), evidence=evidence)


def _joined(parts: list[RunLog]) -> RunLog:
    """The last of the parts of one run, with the iterations and timers of those before up to where each was resumed."""
    whole = parts[0]
    for part in parts[1:]:
        tables = {name: _until(getattr(whole, name), getattr(part, name)) for name in ("iterations", "timers")}
        whole = replace(part, **tables)
    return whole


def _until(before: "pd.DataFrame", after: "pd.DataFrame") -> "pd.DataFrame":
    import pandas as pd

    if before.empty or after.empty:
        return before if after.empty else after
    kept = before[before["iteration"] < after["iteration"].iloc[0]]
    return pd.concat([kept, after], ignore_index=True)


def finish(draft: PartialRun, path: Path, age: float) -> RunLog:
    """The run of a draft, read from `path`, which was written `age` seconds ago."""
    table = draft.iterations if draft.iterations.rows else draft.companion
    note = units.mend(table)
    status, evidence, end = _verdict(draft, table, age)
    counted = [name for name, rows in draft.dialects.items() if rows or not any(draft.dialects.values())]
    memory = Table()
    for _, row in sorted(draft.memory.items()):
        memory.add(row)
    rank = end.rank if end and end.rank is not None else draft.root_rank if end else None
    return RunLog(
        source=path,
        taped=table.taped(),
        iterations=table.frame(INTEGERS),
        memory=memory.frame(("rank", "iteration")),
        status=status,
        evidence=evidence,
        dialect=" + ".join(sorted(counted)) or "unknown",
        arguments=draft.arguments,
        timers=draft.timers.frame(("iteration",)),
        bandwidth=draft.bandwidth.frame(("rank", "message_bytes")),
        devices=tuple(device for _, device in sorted(draft.devices.items())),
        summary=draft.summary,
        rank=rank,
        asked_bytes=end.asked_bytes if end else NAN,
        notes=tuple(filter(None, (note, CLOCKED if draft.clocked & set(counted) else ""))),
    )


def _verdict(draft: PartialRun, table: Table, age: float) -> tuple[Status, str, endings.Ending | None]:
    """Status, evidence, and the line about the end where one decides."""
    end, last = endings.strongest(draft.endings, draft.rows), endings.text(draft.last_line)
    if end and end.level < 4:
        return end.status, end.evidence, end
    loss = table.column("lm_loss") if "lm_loss" in table else np.empty(0)
    is_nan = len(loss) and loss[-1] != loss[-1] and b"nan" in draft.last_line.lower().partition(b"loss")[2][:16]
    # the Trainer hides a loss that is no number behind 0
    if is_nan or (len(loss) and loss[-1] == 0 and re.search(rb"'grad_norm': '?nan", draft.last_line)):
        return Status.NAN_LOSS, last, None
    if end and end.level == 4:
        return end.status, end.evidence, end
    if "train_runtime" in draft.summary or (table.rows and table.last("iteration") == table.last("train_iters")):
        return Status.COMPLETED, last, None
    if end:
        return end.status, end.evidence, end
    seconds = table.last("sec_per_it")
    fresh = age < max(FRESH_S, 2 * seconds if seconds == seconds else 0.0)
    return (Status.RUNNING if fresh else Status.UNFINISHED), last, None
