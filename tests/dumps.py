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


def pyspy_text(
    stack: Stack,
    pid: int = 4242,
    native: Sequence[str] = (),
) -> str:
    """`native` stands on top of the main thread's stack (--native)."""
    lines = [
        f"Process {pid}: python -u pretrain_gpt.py",
        "Python v3.8.12 (/opt/conda/bin/python3.8)",
        "",
    ]
    for name, frames in (("MainThread", stack), ("Thread-1", HELPER)):
        lines += [f'Thread {pid} (active): "{name}"', *(f"    {frame}" for frame in native)]
        lines += [f"    {function} ({file}:{line})" for function, file, line in frames]
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
    """A Flight Recorder dump of format 2.10; each call has group, sequence, op, sizes, state."""
    entries = []
    for number, call in enumerate(calls):
        p2p = call.get("p2p", False)
        entry = {
            "record_id": number,
            "process_group": (call["group"], call["group"]),
            "collective_seq_id": 0 if p2p else call["sequence"],
            "p2p_seq_id": call["sequence"] if p2p else 0,
            "profiling_name": f"nccl:{call['op']}",
            "input_sizes": call.get("sizes", [[4096]]),
            "state": call["state"],
            "retired": call["state"] == "completed",
            "is_p2p": p2p,
        }
        entries.append(entry)
    config = {name: {"name": name, "ranks": str(ranks)} for name, ranks in groups.items()}
    values = {"version": "2.10", "pg_config": config, "entries": entries}
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
