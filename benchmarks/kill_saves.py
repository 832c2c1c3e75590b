"""Kill runs at random moments, also while they save, and see whether they go on right: python
benchmarks/kill_saves.py

Every trial trains a small GPT, sends SIGKILL to one rank or to all of them, checks every complete
checkpoint, starts the run again in the same folder, and compares the losses with those of a run
that was never killed. Two trials of three are killed inside a save, at one of MOMENTS in turn,
which a pause makes long enough to be hit. Workers are forked from a process that has imported the
libraries, so a trial takes some seconds. docs/engine.md has its result.
"""

import argparse
import contextlib
import importlib
import json
import os
import platform
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/engine"))

import parity
from plans import changed, run_folder, small_plan, steps

from trilane.config.plan import Plan
from trilane.utils.process import held_port
from trilane.workspace import checkpoints

ITERATIONS, INTERVAL = 12, 2
PAUSE_S = 0.25
ANY = "any"
# Where in a save -> the function before whose n-th call it pauses: module, class in it or "", name,
# n.
MOMENTS = {
    "the copy": ("trilane_engine.checkpoint.save", "HostCopy", "take", 1),
    "the thread's writing": ("trilane_engine.checkpoint.slices", "", "_bytes", 1),
    "the end of its writing": ("trilane_engine.checkpoint.slices", "", "checksum", 1),
    "the ranks' reports": ("trilane_engine.checkpoint.save", "", "gather_values", 1),
    "the manifest": ("trilane.workspace.checkpoints", "", "write_manifest", 1),
    "the new name": ("trilane.workspace.checkpoints", "", "sync_folder", 1),
    "the file `latest`": ("trilane.workspace.checkpoints", "", "sync_folder", 2),
    "the deletion of the oldest": ("trilane.workspace.checkpoints", "", "discard", 1),
}
PATIENCE_S = 30.0  # for the ranks whose peer was killed; a launcher would end them
LAYOUTS = {
    "megatron, one process": {},
    "megatron TP2 PP2": {"tp": 2, "pp": 2},
    "megatron DP2 distributed optimizer": {"dp": 2, "zero": 1},
    "deepspeed-zero ZeRO-1 DP2": {"engine": "deepspeed-zero", "dp": 2, "zero": 1},
    "deepspeed-zero ZeRO-3 DP2 full offload": {
        "engine": "deepspeed-zero",
        "dp": 2,
        "zero": 3,
        "offload": "full",
    },
    "hf-zero3 DP2 full offload": {"engine": "hf-zero3", "dp": 2, "zero": 3, "offload": "full"},
    "deepspeed-3d TP2 PP2": {"engine": "deepspeed-3d", "tp": 2, "pp": 2, "zero": 1},
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What became of one killed run. `half` counts the half-written checkpoints that
    the kill left.
    """

    layout: str
    moment: str
    victims: str
    killed_after: int
    complete: int
    half: int
    resumed_from: int
    difference: float
    fault: str = ""


def fork(plan: Plan, folder: Path) -> list[int]:
    """The plan's workers, started."""
    size = plan.topology.gpus
    with held_port() as port:
        return [worker.pid for worker in parity.begin(size, port, folder)]


def ended(pids: list[int], seconds: float) -> list[int]:
    """Exit codes once all are gone; who is not gone after so long is killed."""
    codes: dict[int, int] = {}
    end = time.monotonic() + seconds
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            kill(set(pids) - set(codes))
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


def kill(pids: set[int]) -> None:
    """SIGKILL, to those that are still there."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def count(folder: Path) -> int:
    """Iterations trained so far."""
    path = folder / "steps.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@contextlib.contextmanager
def pausing(moment: str, marker: Path) -> Iterator[None]:
    """Workers forked inside pause before that function, once in a save, and leave `marker`."""
    if moment == ANY:
        yield
        return
    module, owner, name, call = MOMENTS[moment]
    place: Any = importlib.import_module(module)
    place = getattr(place, owner) if owner else place
    function, calls, last = getattr(place, name), 0, 0.0

    def paused(*args: Any, **options: Any) -> Any:
        nonlocal calls, last
        calls = calls + 1 if time.monotonic() - last < PAUSE_S / 2 else 1
        if calls == call:
            marker.touch()
            time.sleep(PAUSE_S)
        last = time.monotonic()
        return function(*args, **options)

    setattr(place, name, paused)
    yield
    setattr(place, name, function)


def wait_for_moment(
    folder: Path, moment: str, marker: Path, seconds: float, chance: random.Random
) -> None:
    """Return in the middle of the moment in one of the saves; or at any, one time in two soon after
    a save begins.
    """
    while count(folder) < 1:
        time.sleep(0.001)
    if moment == ANY and chance.random() < 0.5:
        time.sleep(chance.random() * seconds)
        return
    saves = chance.randrange(2 if "deletion" in moment else 1, ITERATIONS // INTERVAL)
    end = time.monotonic() + 2 * seconds + 20 * PAUSE_S
    while count(folder) < saves * INTERVAL and time.monotonic() < end:
        time.sleep(0.0005)
    marker.unlink(missing_ok=True)
    while moment != ANY and not marker.exists() and time.monotonic() < end:
        time.sleep(0.0005)
    time.sleep(chance.random() * (0.1 if moment == ANY else 0.9 * PAUSE_S))


def faulty(root: Path) -> str:
    """What is wrong with any complete checkpoint, looked at from outside; "" where nothing is."""
    for path in checkpoints.complete(root):
        for name, (_, checksum) in checkpoints.read_manifest(path)["files"].items():
            problem = checkpoints.fault(path, name, checksum)
            if problem:
                return f"{path.name}: {problem}"
    named = checkpoints.latest(root)
    return (
        "" if named is None or named in checkpoints.complete(root) else f"latest names {named.name}"
    )


def trial(
    name: str,
    plan: Plan,
    folder: Path,
    whole: list[float],
    seconds: float,
    moment: str,
    chance: random.Random,
) -> Trial:
    """Kill one run of the plan in `folder`, start it again, compare."""
    marker = folder.with_suffix(".moment")
    with pausing(moment, marker):
        pids = fork(plan, run_folder(plan, folder))
    wait_for_moment(folder, moment, marker, seconds, chance)
    all_of_them = chance.random() < 0.5
    kill(set(pids) if all_of_them else {chance.choice(pids)})
    ended(pids, PATIENCE_S)
    root, killed_after = folder / checkpoints.FOLDER, count(folder)
    complete, half = checkpoints.complete(root), checkpoints.leftovers(root)
    newest = checkpoints.iteration_of(complete[-1]) if complete else 0
    fault = faulty(root)
    codes = ended(fork(plan, folder), 300)
    log = (folder / "0.log").read_text()
    resumed = [int(n) for n in re.findall(r"resumes after iteration (\d+) of", log)]
    losses = [step["lm_loss"] for step in steps(folder)]
    if set(codes) != {0} or len(losses) != ITERATIONS:
        fault = fault or f"the second run ended with {codes} after {len(losses)} iterations"
    if newest and (not resumed or resumed[-1] != newest):
        fault = fault or f"it went on from {resumed}, not from {newest}"
    return Trial(
        layout=name,
        moment=moment,
        victims="all ranks" if all_of_them else "one rank",
        killed_after=killed_after,
        complete=len(complete),
        half=len(half),
        resumed_from=resumed[-1] if resumed else 0,
        difference=max(
            (abs(a - b) for a, b in zip(losses, whole, strict=False)), default=float("nan")
        ),
        fault=fault or faulty(root),
    )


def page(trials: list[Trial], seed: int) -> str:
    """The table of all trials."""
    lines = [
        "# Killed runs",
        "",
        f"`python benchmarks/kill_saves.py --trials {len(trials)} --seed {seed}`, {date.today().isoformat()}, "
        f"{os.cpu_count()} cores ({platform.machine()}, {platform.system()} {platform.release()}), no GPU, gloo, fp32, "
        f"a GPT of 4 x 64, {ITERATIONS} iterations, a checkpoint every {INTERVAL}.",
        "",
        "Each trial: SIGKILL to one rank or all of them, in two trials of three inside a save, before one of its steps "
        "in turn; every complete checkpoint checked from outside; the run started again in its folder; its losses "
        "compared with those of a run that was never killed.",
        "",
        "| layout, or moment | killed runs | of one rank | left a half-written one | went on from a checkpoint "
        "| from the start | largest difference of a loss | faults |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = {
        name: [t for t in trials if t.layout == name]
        for name in dict.fromkeys(t.layout for t in trials)
    }
    rows |= {f"before {name}": [t for t in trials if t.moment == name] for name in MOMENTS}
    rows["at any moment"] = [t for t in trials if t.moment == ANY]
    for name, found in [*rows.items(), ("all", trials)]:
        cells = [
            len(found),
            sum(t.victims == "one rank" for t in found),
            sum(t.half > 0 for t in found),
            sum(t.resumed_from > 0 for t in found),
            sum(t.resumed_from == 0 for t in found),
            f"{max((t.difference for t in found), default=0.0):.1e}",
            sum(bool(t.fault) for t in found),
        ]
        lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    faults = [
        f"- {t.layout}, killed after iteration {t.killed_after}: {t.fault}"
        for t in trials
        if t.fault
    ]
    return "\n".join(
        [
            *lines,
            "",
            *(
                faults
                or ["No partial or damaged checkpoint was ever loaded, nor named by `latest`."]
            ),
        ]
    )


def main() -> int:
    """0 where every run went on right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--layout", action="append", choices=list(LAYOUTS), help="these alone (default: all)"
    )
    parser.add_argument("--json", type=Path, help="write every trial there too")
    args = parser.parse_args()
    parity.load()
    chance, trials, plans = random.Random(args.seed), [], {}
    with tempfile.TemporaryDirectory() as place:
        names = args.layout or list(LAYOUTS)
        for name in names:
            small = small_plan(
                Path(place) / "data", iters=ITERATIONS, source="mock", **LAYOUTS[name]
            )
            plan = changed(small, "run", save_interval=INTERVAL)
            folder, begin = run_folder(plan, Path(place) / name), time.monotonic()
            codes = ended(fork(plan, folder), 600)
            assert set(codes) == {0}, (folder / "0.log").read_text()
            seconds = sum(step["sec_per_it"] for step in steps(folder))
            plans[name] = (plan, [step["lm_loss"] for step in steps(folder)], seconds)
            print(
                f"{name}: {time.monotonic() - begin:.1f} s, never killed",
                file=sys.stderr,
                flush=True,
            )
        for number in range(args.trials):
            name = names[number % len(names)]
            moment = (
                ANY
                if number % 3 == 2
                else list(MOMENTS)[(number - (number + 1) // 3) % len(MOMENTS)]
            )
            found = trial(
                name, plans[name][0], Path(place) / f"{number}", *plans[name][1:], moment, chance
            )
            trials.append(found)
            print(number + 1, json.dumps(found.__dict__), file=sys.stderr, flush=True)
    if args.json:
        args.json.write_text(json.dumps([t.__dict__ for t in trials], indent=1))
    print(page(trials, args.seed))
    return int(any(t.fault or not t.difference <= 1e-6 for t in trials))


if __name__ == "__main__":
    sys.exit(main())
