"""One node of a rehearsal, in place of its ranks: beats, steps, checkpoints and the signal, without
torch.

Run by each task of the step in the run folder. The first one trains: an iteration waits until the
file `allowed` has its number, and ends the step where a node of it is gone. That it sees by the
lock that each node holds, as ranks see it by a collective that fails. As `node.py test` it is the
test of a node before the training. Nothing of trilane is imported: forty interpreters start on two
cores.
"""

import fcntl
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

if sys.argv[1] == "test":  # in place of trilane_engine.bench.node_test
    bad = {
        name: socket.gethostname() in Path(name).read_text().split() for name in ("broken", "slow")
    }
    rate = 1e14 if bad["slow"] else 2e14  # of an A100, whose file has 3.12e14
    print(
        json.dumps(
            {
                "broken": ["a GPU is gone"] * bad["broken"],
                "rates": {"matmul FLOP/s": rate},
            }
        )
    )
    sys.exit()

RANKS, GOAL, EVERY = 8, int(sys.argv[1]), int(sys.argv[2])
node, nodes = int(os.environ["SLURM_PROCID"]), int(os.environ["TRAIN_NODES"])
start = os.environ["RDZV_ID"] + "." + os.environ.get("SLURM_RESTART_COUNT", "0")
locks, reports, checkpoints = Path("locks") / start, Path("ranks/nodes"), Path("checkpoints")
asked = False


def ask(*_: object) -> None:
    global asked
    asked = True


def report(step: int) -> None:
    """The node's line in the run folder, as its watchdog writes it."""
    beat = {
        "step": step,
        "phase": "forward",
        "time": time.time(),
        "pid": os.getpid(),
        "host": socket.gethostname(),
    }
    ranks = [{"rank": node * RANKS + r, **beat} for r in range(RANKS)]
    values = {"first": node * RANKS, "host": socket.gethostname(), "start": start, "ranks": ranks}
    path = reports / f"{node * RANKS}.json"
    path.with_name(f".{path.name}").write_text(json.dumps(values) + "\n")
    path.with_name(f".{path.name}").replace(path)


def missing() -> list[int]:
    """The nodes of this start that hold their lock no more, or not yet."""
    found = []
    for other in range(1, nodes):
        try:
            with (locks / str(other)).open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found.append(other)
        except FileNotFoundError:
            found.append(other)
        except BlockingIOError:
            pass
    return found


def done() -> int:
    """The iteration of the newest checkpoint; the steps after it are cut off, as the
    engine does.
    """
    names = [place.name for place in checkpoints.glob("iter_*")]
    number = max((int(name.removeprefix("iter_")) for name in names), default=0)
    steps = Path("steps.jsonl")
    lines = steps.read_text().splitlines() if steps.exists() else []
    steps.write_text(
        "".join(f"{line}\n" for line in lines if json.loads(line)["iteration"] <= number)
    )
    return number


def save(number: int) -> None:
    (checkpoints / f"iter_{number:07d}").mkdir(parents=True, exist_ok=True)
    print(f"trilane: saved iter_{number:07d}", flush=True)


def train() -> None:
    global asked
    while missing():
        time.sleep(0.05)
    for number in range(done() + 1, GOAL + 1):
        while int(Path("allowed").read_text() or 0) < number:
            if gone := missing():
                sys.exit(f"trilane: RuntimeError: Connection closed by peer: node {gone}")
            if asked:
                save(number - 1)
                asked = False
            time.sleep(0.02)
        for name in ("steps.jsonl", "executed.jsonl"):
            with Path(name).open("a") as file:
                file.write(json.dumps({"iteration": number, "start": start, "lm_loss": 1.0}) + "\n")
        report(number)
        if number % EVERY == 0 or number == GOAL:
            save(number)
    (locks / "end").touch()


signal.signal(signal.SIGUSR1, ask)
locks.mkdir(parents=True, exist_ok=True)
reports.mkdir(parents=True, exist_ok=True)
with (locks / str(node)).open("w") as mine:
    fcntl.flock(mine, fcntl.LOCK_EX)
    report(0)
    if node == 0:
        train()
    while not (locks / "end").exists():
        time.sleep(0.2)
