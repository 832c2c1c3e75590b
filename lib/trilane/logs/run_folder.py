"""The log of a run folder: its parts joined, where the run was resumed, and its status.json."""

from dataclasses import replace
from pathlib import Path

from trilane.logs.run import RunLog, read_logs
from trilane.utils.tables import DataFrame
from trilane.workspace.status import Status, known_status, status_problem


def read_run_folder(folder: Path | str) -> RunLog:
    """The run of a run folder: its run.log, with status and evidence of status.json if there is one.

    Of an iteration that was trained again after a resume, the last result counts: the run continued from it. A run that
    ended before its first iteration has empty tables.
    """
    folder = Path(folder)
    written = known_status(folder)
    try:
        log = _joined(read_logs(folder / "run.log"))
    except ValueError as error:
        log = RunLog(source=folder / "run.log", status=Status.UNFINISHED, evidence=str(error))
    if written:
        return replace(log, status=written.status, evidence=written.evidence)
    return replace(log, notes=(*log.notes, *filter(None, [status_problem(folder)])))


def _joined(parts: list[RunLog]) -> RunLog:
    """The last part of a resumed run, with the iterations and timers of earlier parts up to where each was resumed."""
    whole = parts[0]
    for part in parts[1:]:
        iterations, timers = _until(whole.iterations, part.iterations), _until(whole.timers, part.timers)
        resumes = whole.resumes
        if len(part.iterations) and len(whole.iterations):
            first = int(part.iterations["iteration"].iloc[0])
            resumes = (*resumes, (first, whole.iterations[whole.iterations["iteration"] >= first]))
        held = continued(whole.validation, part)
        problems = tuple(dict.fromkeys((*whole.problems, *part.problems)))
        whole = replace(part, iterations=iterations, validation=held, timers=timers, resumes=resumes, problems=problems)
    return whole


def continued(before: DataFrame, log: RunLog) -> DataFrame:
    """The evaluations of earlier logs before the first iteration of `log`, and its own."""
    import pandas as pd

    if len(before) and len(log.iterations):
        before = before[before["iteration"] < log.iterations["iteration"].iloc[0]]
    parts = [part for part in (before, log.validation) if len(part)]
    return pd.concat(parts, ignore_index=True) if parts else before


def _until(before: DataFrame, after: DataFrame) -> DataFrame:
    import pandas as pd

    if before.empty or after.empty:
        return before if after.empty else after
    return pd.concat([before[before["iteration"] < after["iteration"].iloc[0]], after], ignore_index=True)
