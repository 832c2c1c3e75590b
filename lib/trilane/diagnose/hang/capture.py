"""Capture: the stacks of all ranks of a running job, taken from outside, written below its run folder."""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trilane.config.plan import Plan
from trilane.utils.files import replace_text
from trilane.workspace import call_trace, flight_recorder, rank_grid
from trilane.workspace.heartbeat import STACKS, Heartbeat, process_state, read_beats

TAKE_S = 20.0  # py-spy takes milliseconds; a process that dies under it must not hold up the others


FAULT_S = 3.0


OTHERS_S = 30.0  # for the other nodes of the job


def capture(folder: Path, plan: Plan, hosts: set[str] | None = None) -> Path:
    """Dumps of all ranks in a new `stacks/<time>/` of the run folder, with its topology.json; that folder.

    Ranks of this host are dumped here. Each other host's watchdog sees the new folder and does the same; where one
    does not answer within OTHERS_S its ranks are missing, which is evidence too.
    """
    stacks = folder / "stacks" / datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%SZ")
    while stacks.exists():
        stacks = stacks.with_name(stacks.name + "b")
    stacks.mkdir(parents=True)
    beats = read_beats(folder)
    _write_topology(stacks, plan, beats)  # who waits for other nodes may be ended with the job
    capture_here(folder, stacks)
    expected = (hosts if hosts is not None else {beat.host for beat in beats.values()}) | {platform.node()}
    end = time.monotonic() + OTHERS_S
    while time.monotonic() < end and not all((stacks / f"states-{host}.json").exists() for host in expected):
        time.sleep(0.1)
    _write_topology(stacks, plan, beats)
    return stacks


def capture_here(folder: Path, stacks: Path) -> None:
    """Dump the ranks of this host into `stacks`: rank_<n>.json by py-spy, else rank_<n>.txt by faulthandler, and the
    last calls where the plan traces them, and what NCCL's Flight Recorder says where there is one; states-<host>.json
    says how each process was."""
    host = platform.node()
    own = [beat for beat in read_beats(folder).values() if beat.host == host]
    states = {beat.rank: process_state(beat.pid) for beat in own}
    asked = flight_recorder.ask(folder / "ranks", states)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda beat: _take(folder, stacks, beat, states[beat.rank]), own))
    flight_recorder.collect(folder / "ranks", asked, stacks)
    replace_text(stacks / f"states-{host}.json", json.dumps({str(rank): state for rank, state in states.items()}))


def _take(folder: Path, stacks: Path, beat: Heartbeat, state: str) -> None:
    calls = folder / "ranks" / f"{beat.rank}.calls"
    if calls.exists():
        replace_text(stacks / f"rank_{beat.rank}.calls", "\n".join(call_trace.read_calls(calls)) + "\n")
    if state in ("gone", "Z", "X"):
        return
    text, error = spied(beat.pid, stopped=state in ("T", "t"))
    if text:
        replace_text(stacks / f"rank_{beat.rank}.json", text)
        return
    replace_text(
        stacks / f"rank_{beat.rank}.txt", _faults(folder, beat) or f"Process {beat.pid}: \nError: py-spy: {error}\n"
    )


def spied(pid: int, *, stopped: bool = False) -> tuple[str, str]:
    """What `py-spy dump --json` says of a process of this host, or "" and why it cannot."""
    beside = Path(sys.executable).with_name("py-spy")
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return "", "not installed"
    # A process that is stopped already cannot be paused: py-spy would fail.
    command = [program, "dump", "--json", "--pid", str(pid), *(["--nonblocking"] if stopped else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TAKE_S, check=False)
    except subprocess.TimeoutExpired:
        return "", f"no answer within {TAKE_S:.0f} s"
    said = (done.stderr.strip().splitlines() or ["no output"])[0]
    return (done.stdout, "") if done.returncode == 0 and done.stdout.strip() else ("", said)


def _faults(folder: Path, beat: Heartbeat) -> str:
    """What faulthandler writes when asked by the signal; "" where the rank does not listen or cannot."""
    path = folder / "ranks" / f"{beat.rank}.stack"
    if not path.exists():
        return ""
    before, end = path.stat().st_size, time.monotonic() + FAULT_S
    try:
        os.kill(beat.pid, STACKS)
    except (ProcessLookupError, PermissionError):
        return ""
    size = before
    while time.monotonic() < end:
        time.sleep(0.1)
        if path.stat().st_size == size > before:
            break
        size = path.stat().st_size
    return path.read_bytes()[before:].decode("utf-8", "replace")


def _write_topology(stacks: Path, plan: Plan, beats: dict[int, Heartbeat]) -> None:
    states: dict[str, str] = {}
    for path in stacks.glob("states-*.json"):
        states |= json.loads(path.read_text(encoding="utf-8"))
    t = plan.topology
    grid = rank_grid.regular(t.tp, t.pp, t.dp, min(plan.cluster.gpus_per_node, t.gpus))
    ranks = [_facts(place, beats.get(place.rank), states.get(str(place.rank), "")) for place in grid.places]
    sizes = {"tp": t.tp, "pp": t.pp, "dp": t.dp, "gpus_per_node": plan.cluster.gpus_per_node}
    replace_text(stacks / "topology.json", json.dumps({**sizes, "ranks": ranks}, indent=1) + "\n")


def _facts(place: rank_grid.Place, beat: Heartbeat | None, state: str) -> dict[str, Any]:
    """Its node is that of the host that its beat tells; without one nobody knows it."""
    facts: dict[str, Any] = {"rank": place.rank, "tp": place.tp, "pp": place.pp, "dp": place.dp}
    if beat is not None:
        facts |= {"host": beat.host, "pid": beat.pid, "step": beat.step, "phase": beat.phase, "time": beat.time}
    return {**facts, "state": state}
