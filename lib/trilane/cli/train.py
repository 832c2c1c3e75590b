"""`trilane train`: a plan trained on this machine."""

import json
from dataclasses import asdict

import click

from trilane.cli.options import JSON, PLAN, Command, option, together, whole
from trilane.utils.tables import printable

PORT = option("--port", type=whole(0, 65535), default=0, help="torchrun's port (0: one that is free)")
RESUME = option("--resume", is_flag=True, help="go on from the newest checkpoint of the run folder")


@click.command(cls=Command)
@together(PLAN, PORT, RESUME, JSON)
def train(plan: str, port: int, resume: bool, as_json: bool) -> int:
    """Train PLAN here: a plan.json in its own folder, a plan of another file in a new folder of its name.

    Exit code 0 when the run completed, 3 when it was stopped on request, else 1.
    """
    from trilane.config.plan import read_plan
    from trilane.launch.local import run_folder, train_local
    from trilane.utils.folder_lock import FolderLock

    folder = run_folder(plan, resume)
    read_plan(folder / "plan.json")  # a folder that is not there cannot be locked
    with FolderLock([folder]).held(0.0):
        outcome = train_local(folder, port=port, resume=resume)
    text = f"{outcome.status} after {outcome.seconds:.1f} s: {outcome.evidence}"
    print(json.dumps(asdict(outcome)) if as_json else printable(text))
    return outcome.status.exit_code
