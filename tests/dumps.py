"""Writing dumps as the tools do: py-spy, faulthandler, Flight Recorder; for any stacks."""

import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from job import Stack

HELPER: Stack = (
    ("wait", "threading.py", 324),
    ("run", "tensorboard/summary/writer.py", 233),
    ("_bootstrap", "threading.py", 973),
)


# --locals: what may look like frames, threads and errors
VALUES = [
    "    Arguments:",
    "        pad: (4096, 1, 8192)",
    "    Locals:",
    '        raised: "RuntimeError: bad"',
    "        e: (2)",
]


def pyspy_text(
    stack: Stack,
    pid: int = 4242,
    flags: str = "active",
    command: str = "python -u pretrain_gpt.py",
    native: Sequence[str] = (),
    values: Sequence[str] = (),
    holder: Stack = (),
) -> str:
    """`native` stands on top of the main thread's stack and below all (--native), `values` below
    each frame; `holder` is another thread that holds Python's global lock.
    """
    below = ["clone3 (libc.so.6)"] if native else []
    lines = [f"Process {pid}: {command}", "Python v3.8.12 (/opt/conda/bin/python3.8)", ""]
    for name, frames in (("MainThread", stack), ("Thread-1", HELPER), ("Thread-2", holder)):
        if not frames:
            continue
        state = f"{flags}{'+gil' * (name == 'Thread-2')}"
        lines += [f'Thread {pid} ({state}): "{name}"', *(f"    {frame}" for frame in native)]
        for f, file, line in frames:
            lines += [f"    {f} ({file}:{line})", *(f"    {value}" for value in values)]
        lines += [f"    {frame}" for frame in below]
    return "\n".join(lines) + "\n"


def faulthandler_text(stack: Stack, main: str = "Current thread") -> str:
    parts = []
    for name, frames in (
        ("Thread 0x00007f406fc746c0", HELPER),
        (f"{main} 0x00007f40a1b2c740", stack),
    ):
        lines = [
            f'  File "/opt/lib/site-packages/{file}", line {line} in {f}'
            for f, file, line in frames
        ]
        parts.append("\n".join([f"{name} (most recent call first):", *lines]))
    return "\n\n".join(parts) + "\n"


STYLES: dict[str, Callable[[Stack], str]] = {
    "text": pyspy_text,
    "faults": faulthandler_text,
}


def recording(
    calls: list[dict[str, Any]], groups: dict[str, list[int]], *, as_json: bool = False
) -> bytes:
    """A Flight Recorder dump of format 2.10; each call has group, sequence, op, sizes, state.

    Groups have a name that all ranks share, and a number among the groups of this rank (pg_id),
    under which pg_status tells how far they are.
    """
    status = {}
    for number, name in enumerate(groups):
        entered = [c["sequence"] for c in calls if c["group"] == name and not c.get("p2p")]
        status[str(number)] = {"last_enqueued_collective": max(entered, default=-1)}
    entries = []
    for number, call in enumerate(calls):
        p2p = call.get("p2p", False)
        entries.append(
            {
                "record_id": number,
                "pg_id": [*groups].index(call["group"]),
                "process_group": (call["group"], call["group"]),
                "collective_seq_id": 0 if p2p else call["sequence"],
                "p2p_seq_id": call["sequence"] if p2p else 0,
                "op_id": number,
                "profiling_name": f"nccl:{call['op']}",
                "input_sizes": call.get("sizes", [[4096]]),
                "state": call["state"],
                "retired": call["state"] == "completed",
                "is_p2p": p2p,
            }
        )
    config = {name: {"name": name, "ranks": str(ranks)} for name, ranks in groups.items()}
    values = {"version": "2.10", "pg_config": config, "pg_status": status, "entries": entries}
    return json.dumps(values).encode() if as_json else pickle.dumps(values, protocol=2)


def write_all(folder: Path, stacks: dict[int, Stack], style: str = "text") -> None:
    """One file a rank, in one style, or with "mixed" in all."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank, stack in stacks.items():
        kind = (*STYLES,)[rank % 2] if style == "mixed" else style
        (folder / f"rank_{rank}.txt").write_text(STYLES[kind](stack))


def topology(folder: Path, tp: int, pp: int, dp: int, **extra: Any) -> None:
    values = {"tp": tp, "pp": pp, "dp": dp, "gpus_per_node": 8, **extra}
    (folder / "topology.json").write_text(json.dumps(values))
