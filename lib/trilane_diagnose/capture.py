"""Dumps the stacks of all ranks of a running job from outside, into its run folder."""

import json
import os
import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

from trilane.config.plan import Plan
from trilane.utils.files import json_object, read_text, replace_text
from trilane.utils.process import run
from trilane.utils.tables import as_json
from trilane.workspace import flight_recorder
from trilane.workspace.heartbeat import STACKS, Heartbeat, own_beats, process_state, read_beats

OTHERS_S = 30.0  # for the other nodes of the job to dump their ranks


def capture(folder: Path, plan: Plan) -> Path:
    """Dump all ranks into a new folder `stacks/<time>/` of the run, with topology.json; returns it.

    The watchdog of each other host sees the folder and dumps its ranks, or they are missing.
    """
    stacks = folder / "stacks" / datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%SZ")
    while stacks.exists():
        stacks = stacks.with_name(stacks.name + "b")
    stacks.mkdir(parents=True)
    beats = read_beats(folder)
    # now, since the job may end while this process waits for other nodes
    write_topology(stacks, plan, beats)
    capture_here(folder, stacks)
    expected = {beat.host for beat in beats.values()}
    end = time.monotonic() + OTHERS_S
    while time.monotonic() < end and not expected <= hosts_in(stacks):
        time.sleep(0.25)
    write_topology(stacks, plan, beats | read_beats(folder))
    return stacks


def hosts_in(stacks: Path) -> set[str]:
    """The hosts that have dumped their ranks into the folder."""
    return {name[7:-5] for name in os.listdir(stacks) if name.startswith("states-")}


def capture_here(folder: Path, stacks: Path) -> None:
    """Dump the ranks of this host into `stacks`: rank_<n>.txt by py-spy, else by faulthandler,
    and its Flight Recorder; states-<host>.json has the states of their processes."""
    # Where the heartbeats of this host cannot be seen, as from outside a container, the run folder
    # has the last ones.
    beats = own_beats(folder) or read_beats(folder)
    own = [beat for beat in beats.values() if beat.host == platform.node()]
    states = {beat.rank: process_state(beat.pid) for beat in own}
    asked = flight_recorder.ask(folder / "ranks", states)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda beat: _dump_rank(folder, stacks, beat, states[beat.rank]), own))
    flight_recorder.collect(folder / "ranks", asked, stacks)
    replace_text(stacks / f"states-{platform.node()}.json", json.dumps(as_json(states)))


def _dump_rank(folder: Path, stacks: Path, beat: Heartbeat, state: str) -> None:
    if state in ("gone", "Z", "X"):
        return
    text, error = pyspy_dump(beat.pid, stopped=state in ("T", "t"))
    text = text or _faulthandler_dump(folder, beat)
    text = text or f"Process {beat.pid}: \nError: py-spy: {error}\n"
    replace_text(stacks / f"rank_{beat.rank}.txt", text)


def pyspy_dump(pid: int, *, stopped: bool) -> tuple[str, str]:
    """The output of `py-spy dump` for a process of this host and "", or "" and the error."""
    own = Path(sys.executable).with_name("py-spy")
    command = [str(own) if own.exists() else "py-spy", "dump", "--pid", str(pid)]
    if stopped:  # and cannot be paused: py-spy would fail
        command.append("--nonblocking")
    # It takes milliseconds; a process that dies under it must not hold up the others.
    done = run(command, within_s=20.0)
    if done.returncode or not done.stdout.strip():
        lines = done.stderr.strip().splitlines()
        return "", lines[0] if lines else f"exit code {done.returncode}"
    return done.stdout, ""


def _faulthandler_dump(folder: Path, beat: Heartbeat) -> str:
    """What faulthandler writes on the signal STACKS; "" of a rank that does not respond in 3 s."""
    path = folder / "ranks" / f"{beat.rank}.stack"
    if not path.exists():
        return ""
    size = before = path.stat().st_size
    try:
        os.kill(beat.pid, STACKS)
    except OSError:
        return ""
    for _ in range(30):
        time.sleep(0.1)
        if path.stat().st_size == size > before:
            break
        size = path.stat().st_size
    return path.read_bytes()[before:].decode("utf-8", "replace")


def write_topology(stacks: Path, plan: Plan, beats: dict[int, Heartbeat]) -> None:
    """Write topology.json: the sizes, each rank's last heartbeat, and the state of its process."""
    states: dict[str, object] = {}
    for path in stacks.glob("states-*.json"):
        if path.is_file():
            states |= json_object(read_text(path)) or {}
    ranks = []
    for rank in range(plan.topology.gpus):
        row: dict[str, object] = {"rank": rank}
        if rank in beats:
            row |= as_json(beats[rank])
        state = states.get(str(rank))
        row["state"] = state if isinstance(state, str) else ""
        ranks.append(row)
    values = {
        "tp": plan.topology.tp,
        "pp": plan.topology.pp,
        # the ranks of a cp group stand between tp and dp, and reduce gradients as replicas do
        "dp": plan.topology.dp * plan.topology.cp,
        "gpus_per_node": plan.cluster.gpus_per_node,
        "ranks": ranks,
    }
    replace_text(stacks / "topology.json", json.dumps(values, indent=1) + "\n")
