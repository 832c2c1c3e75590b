"""`python -m trilane capture RUN_FOLDER`: the stacks of a running job, taken now; or the commands that take them."""

import argparse
import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from trilane.config.plan import read_plan
from trilane.diagnose.hang import text
from trilane.diagnose.hang.capture import capture, capture_here
from trilane.diagnose.hang.verdict import diagnose
from trilane.slurm import client, node_failure
from trilane.utils.validation import require
from trilane.workspace.heartbeat import read_beats

SLURM_S = 120.0


def srun_command(job: str, nodes: int, command: str) -> list[str]:
    """The second step that document 003 starts beside a hanging one: a task a node, of no GPU, in the job's share."""
    require(re.fullmatch(r"\d+(_\d+)?", job) is not None, "job", job, "must be a job's number")
    head = ["srun", f"--jobid={job}", *node_failure.step_options(), f"--nodes={nodes}", f"--ntasks={nodes}"]
    return [*head, "--ntasks-per-node=1", "--input=none", *shlex.split(command)]


def here_command(folder: Path, stacks: Path) -> str:
    """What each node runs to dump its own ranks."""
    parts = [sys.executable, "-m", "trilane", "capture", str(folder), "--here", str(stacks)]
    return shlex.join(parts)


def by_hostfile(command: str) -> str:
    """The same with pdsh or DeepSpeed's ds_ssh, for those who may log in to the nodes; text to copy."""
    return f"pdsh -R ssh -w ^hostfile {shlex.quote(command)}\nds_ssh -f hostfile {shlex.quote(command)}"


def any_program() -> str:
    """For a program that is not ours: every python process of the user, as document 003 did; text to copy."""
    found = "pgrep -u $USER -f python | xargs -I {} py-spy dump --pid {}"
    return f"srun --jobid=JOB --overlap --gres=gpu:0 --ntasks-per-node=1 --output=trace-%N.out sh -c '{found}'"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `python -m trilane capture`."""
    parser.add_argument("folder", type=Path, help="the folder of a run that is going on")
    parser.add_argument("--job", default="", help="its SLURM job: dump all its nodes by a second step of that job")
    parser.add_argument("--commands", action="store_true", help="only print the commands (srun, pdsh, ds_ssh)")
    parser.add_argument(
        "--here", type=Path, default=None, metavar="STACKS", help="dump this host's ranks there, no more"
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def run(args: argparse.Namespace) -> int:
    """Dump the ranks and say the verdict; 0 when done."""
    folder = args.folder.resolve()
    plan = read_plan(folder / "plan.json")
    if args.here is not None:
        capture_here(folder, args.here)
        return 0
    nodes = -(-plan.topology.gpus // plan.cluster.gpus_per_node)
    command = here_command(folder, folder / "stacks" / "by-hand")
    job = client.raw_id(args.job) if args.job and client.is_installed() else args.job
    if args.commands:
        print("\n".join([shlex.join(srun_command(job or "0", nodes, command)), by_hostfile(command)]))
        print(f"# a program that is not trilane's, then `python -m trilane hang` on the folder:\n{any_program()}")
        return 0
    beats = read_beats(folder)
    require(bool(beats), "folder", folder, "no rank has given a sign of life (hang_timeout_s=0, or not started)")
    away = {beat.host for beat in beats.values()} - {platform.node()}
    if args.job and shutil.which("srun"):
        stacks = folder / "stacks" / f"job-{args.job}"
        stacks.mkdir(parents=True, exist_ok=True)
        subprocess.run(srun_command(job, nodes, here_command(folder, stacks)), check=False, timeout=SLURM_S)
        verdict = diagnose(stacks)
    else:
        # The watchdog of every other node sees the new folder and fills in its ranks.
        stacks = capture(folder, plan, away)
        verdict = diagnose(stacks)
    print(json.dumps(verdict.to_json(), indent=1) if args.json else f"{stacks}\n{text.as_text(verdict)}")
    return 0
