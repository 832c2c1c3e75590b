"""`trilane train`: a plan trained on this machine."""

import json
from dataclasses import asdict

import click

from trilane.cli.options import Command, Whole, json_option, option, plan_argument


@click.command(cls=Command)
@plan_argument
@option("--port", type=Whole(0, 65535), default=0, help="torchrun's port (0: one that is free)")
@option("--resume", is_flag=True, help="go on from the newest checkpoint of the run folder")
@json_option
def train(plan: str, port: int, resume: bool, as_json: bool) -> int:
    """Train PLAN here: a plan.json in its own folder, a plan of another file in a new folder of its name.

    Exit code 0 when the run completed, 3 when it was stopped on request, else 1.
    """
    from trilane.launch.local import run_folder, train_local

    outcome = train_local(run_folder(plan, resume), port=port, resume=resume)
    text = f"{outcome.status} after {outcome.seconds:.1f} s: {outcome.evidence}"
    print(json.dumps(asdict(outcome)) if as_json else text)
    return outcome.status.exit_code
