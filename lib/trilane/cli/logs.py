"""`trilane logs`: training logs in any dialect: parse, tabulate, spikes."""

from collections.abc import Sequence
from pathlib import Path

from trilane.analysis.collect import every_iteration, frame, markdown, measure_all, parse_text
from trilane.analysis.loss_curve import trainings
from trilane.analysis.measure import Measurement
from trilane.analysis.spikes import training_record, training_text
from trilane.cli.app import GROUPS, Answer, Group, command, note
from trilane.config.options import option
from trilane.logs.dialects import use
from trilane.logs.trackers import write_events, write_offline
from trilane.utils.files import natural, write_new
from trilane.utils.tables import as_json, csv_text
from trilane.utils.validation import require_folder, require_new

logs = Group("logs", help=GROUPS["logs"])
LOGS = option(argument="LOGS...")
DIALECT = option((), "how your trainer prints its iterations (JSON); repeatable", metavar="FILE")


def read(paths: Sequence[Path]) -> tuple[list[Measurement], list[str]]:
    """The runs, and why other files hold none; ValueError where no file holds a run."""
    runs, unread = measure_all(paths)
    if not runs:
        rule = f"logs={paths[0]}: holds no run: neither plan.json with run.log, nor a training log"
        raise ValueError([*unread, rule][0])
    if unread:
        note([f"left_out={len(unread)}: files without a run, the first: {unread[0]}"])
    return runs, unread


@command(logs)
def parse(
    logs: tuple[Path, ...] = LOGS,
    csv: Path | None = option(None, "write all iterations of all runs to FILE", metavar="FILE"),
    tensorboard: Path | None = option(None, "write them for TensorBoard", metavar="DIR"),
    wandb: Path | None = option(None, "write them as offline runs of W&B", metavar="DIR"),
    dialect: tuple[Path, ...] = DIALECT,
) -> Answer:
    """Print speed, memory, loss and the ending of each run in the logs, plain or gzip.

    Where logs cannot be read: exit code 2 if none of them, 1 if some.
    """
    use(dialect)
    for name, path in {"csv": csv, "tensorboard": tensorboard, "wandb": wandb}.items():
        if path:
            require_new(name, path)
    runs, unread = read(logs)
    if csv:
        write_new(csv, csv_text(every_iteration(runs)))
    for number, run in enumerate(runs, 1):
        if tensorboard:
            write_events(run.log.iterations, tensorboard / str(number))
        if wandb:
            write_offline(run.log.iterations, wandb / str(number))
    return Answer({"runs": [run.to_json() for run in runs]}, parse_text(runs), bool(unread))


@command(logs)
def table(
    folder: Path,
    dialect: tuple[Path, ...] = DIALECT,
    csv: bool = option(False, "print CSV, with all columns, instead of Markdown"),
) -> Answer:
    """Print the runs below FOLDER as one table: run folders, or logs of other trainers, at any
    depth.
    """
    use(dialect)
    require_folder("folder", folder)
    runs, unread = read([folder])
    runs.sort(key=lambda run: natural(str(run.log.source)))
    rows = frame(runs, folder)
    values = {"folder": str(folder), "rows": rows.to_dict("records"), "left_out": unread}
    return Answer(as_json(values), csv_text(rows) if csv else markdown(rows))


@command(logs)
def spikes(logs: tuple[Path, ...] = LOGS) -> Answer:
    """Print where loss or gradient norm left their course, and what restarts did not continue; logs
    in their order.

    Where logs cannot be read: exit code 2 if none of them, 1 if some.
    """
    runs, unread = read(logs)
    records = [training_record(group) for group in trainings([run.log for run in runs])]
    text = "\n".join(map(training_text, records))
    values = as_json({"trainings": records})
    return Answer(values, text or "no log holds an iteration", bool(unread))
